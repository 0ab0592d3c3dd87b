"""Scalable neural network kernels: f(Wx + b) as phi(x) . psi(W, b)."""

from snnk.activations import ACTIVATIONS, Activation, Spectrum
from snnk.adapters import SNNKAdapter, fit_projections_
from snnk.bounds import ErrorBound, error_bound
from snnk.bundle import Bundled, BundleReport, bundle
from snnk.features import (
    FEATURE_MAPS,
    URF,
    ArcCosine,
    Directions,
    FeatureMap,
    PowerSeries,
    ProjectedURF,
    Sampled,
    UnreachableError,
)
from snnk.layers import SNNKLinear
from snnk.projections import PROJECTIONS, Projection
from snnk.ridge import RidgeSolution, RidgeStats

__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "FEATURE_MAPS",
    "PROJECTIONS",
    "URF",
    "Activation",
    "ArcCosine",
    "BundleReport",
    "Bundled",
    "Directions",
    "ErrorBound",
    "FeatureMap",
    "PowerSeries",
    "ProjectedURF",
    "Projection",
    "RidgeSolution",
    "RidgeStats",
    "SNNKAdapter",
    "SNNKLinear",
    "Sampled",
    "Spectrum",
    "UnreachableError",
    "__version__",
    "bundle",
    "error_bound",
    "fit_projections_",
]
