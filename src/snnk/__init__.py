"""Scalable neural network kernels: f(Wx + b) as phi(x) . psi(W, b).

The names below are imported when they are first used, so that `import snnk` and `snnk --help` do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snnk.maps import (
        ACTIVATIONS,
        FEATURE_MAPS,
        PROJECTIONS,
        URF,
        ArcCosine,
        FeatureMap,
        PowerSeries,
        ProjectedURF,
        UnreachableError,
    )
    from snnk.nn import Bundled, SNNKAdapter, SNNKLinear, bundle, error_bound
    from snnk.ridge import RidgeStats

__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "FEATURE_MAPS",
    "PROJECTIONS",
    "URF",
    "ArcCosine",
    "Bundled",
    "FeatureMap",
    "PowerSeries",
    "ProjectedURF",
    "RidgeStats",
    "SNNKAdapter",
    "SNNKLinear",
    "UnreachableError",
    "__version__",
    "bundle",
    "error_bound",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in ("maps", "nn", "ridge"):
            module = import_module(f"snnk.{room}")
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module 'snnk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
