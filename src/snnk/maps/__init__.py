"""Feature maps phi and psi, with one file per map.

`FEATURE_MAPS` is the one registry of names. The names of activations ("relu", "cos", "gelu", ...) are maps with psi,
for SNNK layers, adapters and poolers; "relu" is the paper's arc-cosine map. "random-relu" and "random-fourier" are
random features for a matrix that is fitted to data, in compression plans, `snnk fit` and `snnk.sklearn`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from snnk import _checks
from snnk.maps.activations import ACTIVATIONS, Activation, Spectrum
from snnk.maps.arccos import ArcCosine
from snnk.maps.base import FeatureMap, UnreachableError
from snnk.maps.directions import Directions
from snnk.maps.power import PowerSeries
from snnk.maps.projected import ProjectedURF
from snnk.maps.projections import PROJECTIONS, Projection
from snnk.maps.sampled import Sampled
from snnk.maps.urf import URF

FEATURE_MAPS: dict[str, Callable[..., FeatureMap]] = {
    "relu": ArcCosine,  # the paper's ReLU-SNNK; URF(activation="relu") estimates relu(w.x + b) itself
    "arccos0": partial(ArcCosine, order=0),
    "arccos2": partial(ArcCosine, order=2),
    "tanh_power": partial(PowerSeries, activation="tanh"),
    **{name: partial(URF, activation=name) for name in ACTIVATIONS if name != "relu"},
    "random-relu": partial(ArcCosine, augment=True),
    "random-fourier": partial(ProjectedURF, on_error="ignore"),
}


def make_feature_map(feature_map: Any, in_features: int, num_features: int, **options: Any) -> FeatureMap:
    """A FeatureMap from a name in FEATURE_MAPS, or the given FeatureMap, its sizes checked.

    Example:
        >>> make_feature_map("cos", 8, 16).num_features
        16
    """
    if isinstance(feature_map, FeatureMap):
        if options:
            raise TypeError(f"{', '.join(options)} cannot change a feature map that is given as an object; make it so")
        if (feature_map.in_features, feature_map.num_features) != (in_features, num_features):
            raise ValueError(
                f"the feature map is {feature_map.in_features} -> {feature_map.num_features}; "
                f"the layer needs {in_features} -> {num_features}"
            )
        return feature_map
    return _checks.look_up(feature_map, FEATURE_MAPS, "feature map")(in_features, num_features, **options)


__all__ = [
    "ACTIVATIONS",
    "FEATURE_MAPS",
    "PROJECTIONS",
    "URF",
    "Activation",
    "ArcCosine",
    "Directions",
    "FeatureMap",
    "PowerSeries",
    "ProjectedURF",
    "Projection",
    "Sampled",
    "Spectrum",
    "UnreachableError",
    "make_feature_map",
]
