"""Feature maps phi and psi, with one file per map.

`FEATURE_MAPS` is the one registry of names. The names of activations ("relu", "cos", "gelu", ...) are maps with psi,
for SNNK layers, adapters and poolers; "relu" is the paper's arc-cosine map. "random-relu" and "random-fourier" are
random features for a matrix that is fitted to data, in compression plans, `snnk fit` and `snnk.sklearn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snnk import _checks
from snnk.maps.activations import ACTIVATIONS, Activation
from snnk.maps.affine import Affine as Affine  # bundles have it, and files may name it
from snnk.maps.arccos import ArcCosine
from snnk.maps.base import CLASSES, FeatureMap, UnreachableError
from snnk.maps.directions import Directions
from snnk.maps.power import PowerSeries
from snnk.maps.projected import ProjectedURF
from snnk.maps.projections import PROJECTIONS
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
RANDOM_MAPS = ("random-relu", "random-fourier")  # the names in FEATURE_MAPS whose matrix is always fitted to data


MapLike = str | FeatureMap | Callable[..., FeatureMap]


MOST_NUMBERS = 1 << 27  # in all tensors of a map from a file, unless its projection is large, too
MOST_PER_NUMBER = 8  # of the projection


def make_feature_map(feature_map: MapLike, in_features: int, num_features: int, **options: Any) -> FeatureMap:
    """A FeatureMap from a name in FEATURE_MAPS or a callable, or the given FeatureMap, with its sizes checked.

    Example:
        >>> make_feature_map("cos", 8, 16).num_features
        16
    """
    if not isinstance(feature_map, FeatureMap):
        make = feature_map if callable(feature_map) else _checks.look_up(feature_map, FEATURE_MAPS, "feature map")
        feature_map = make(in_features, num_features, **options)
    elif options:
        raise TypeError(
            f"{', '.join(options)} cannot change a feature map that is given as an object; pass them when it is made"
        )
    if (feature_map.in_features, feature_map.num_features) != (in_features, num_features):
        raise ValueError(
            f"the feature map is {feature_map.in_features} -> {feature_map.num_features}; "
            f"the layer needs {in_features} -> {num_features}"
        )
    return feature_map


def make_calibrated(
    feature_map: str | Callable[..., FeatureMap],
    in_features: int,
    num_features: int,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    device: Any = None,
    **options: Any,
) -> FeatureMap:
    """A new map, calibrated to inputs and a layer where its class can be; its series is fitted once, not twice."""
    fm = make_feature_map(feature_map, in_features, num_features, device="meta", **options)
    fm.to_empty(device=torch.get_default_device() if device is None else device)
    if isinstance(fm, URF | ProjectedURF):
        return fm.calibrate(x, weight, bias)
    fm.reset_parameters()
    return fm


def feature_map_from_config(config: dict[str, Any], shape: tuple[int, ...]) -> FeatureMap:
    """A map of zeros for the tensors of a file, from what `to_config` gave.

    Args:
        config: its JSON; the class is looked up in a closed table.
        shape: that of its projection in the file, which bounds what is allocated here.
    """
    cls = _checks.look_up(config.get("class"), CLASSES, "feature map")
    d, m = (_checks.positive_int(config[name], name) for name in ("in_features", "num_features"))
    degree = max(len(config.get("coefficients", "")) - 1, 1)
    if d * m * degree > 2 * math.prod(shape):
        raise ValueError(f"a map {d} -> {m} of degree {degree} does not fit its projection of shape {shape}")
    fm = cls.from_config({name: value for name, value in config.items() if name != "class"})
    size = sum(buffer.numel() for buffer in fm.buffers())
    if size > max(MOST_NUMBERS, MOST_PER_NUMBER * degree * math.prod(shape)):
        raise ValueError(f"a map with {size} numbers does not fit its projection of shape {shape}")
    fm.to_empty(device=torch.get_default_device())
    for buffer in fm.buffers():
        buffer.zero_()
    return fm


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
    "UnreachableError",
]
