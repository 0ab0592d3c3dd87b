"""SNNKLinear: f(Wx + b) ~ phi(x) A^T with A = psi(W, b) (section 3; the appendix on SNNK layers). Only A is trained."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk import _checks
from snnk.maps import URF, FeatureMap, MapLike, ProjectedURF, make_calibrated, make_feature_map
from snnk.maps.activations import ActivationLike
from snnk.maps.projections import make_generator


class SNNKLinear(nn.Module):
    """A layer and its activation in one: `weight` is the (out, num_features) matrix A behind a fixed feature map.

    A starts as psi of random weights, drawn as nn.Linear draws them; `from_linear` takes pretrained ones.

    Args:
        in_features, out_features: as for the layer it replaces.
        num_features: number m of real features.
        feature_map: name in FEATURE_MAPS ("relu", "cos", "sin", "gelu", ...) or a FeatureMap.
        bias: whether the random weights that A starts from come with a bias; A absorbs it.
        seed: of the feature map and of the random weights.
        weights: (W, b) to start from instead of random ones; b may be None.
        **options: for the feature map, such as normalize="dim" or projection="iid".

    Example:
        >>> layer = SNNKLinear(8, 3, num_features=16, feature_map="relu")
        >>> layer(torch.randn(2, 5, 8)).shape, sum(p.numel() for p in layer.parameters())
        (torch.Size([2, 5, 3]), 48)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_features: int,
        feature_map: MapLike = "relu",
        bias: bool = True,
        *,
        seed: int = 0,
        weights: tuple[Tensor, Tensor | None] | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.in_features = _checks.positive_int(in_features, "in_features")
        self.out_features = _checks.positive_int(out_features, "out_features")
        self.num_features = _checks.positive_int(num_features, "num_features")
        self.bias, self.seed = bool(bias), seed
        if not isinstance(feature_map, FeatureMap):
            options = {"seed": seed, "device": device, "dtype": dtype, **options}
        self.feature_map = make_feature_map(feature_map, in_features, num_features, **options)
        self.weight = nn.Parameter(torch.empty(out_features, num_features, device=device, dtype=dtype))
        if weights is None:
            self._reset_weight()
        else:
            self._set_weight(*weights)

    def reset_parameters(self) -> None:
        """Draw the feature map and A again from their seeds."""
        self.feature_map.reset_parameters()
        self._reset_weight()

    def _reset_weight(self) -> None:
        generator = make_generator(self.seed, stream=1)
        bound = 1 / math.sqrt(self.in_features)
        with torch.device("cpu"):
            w = torch.rand(self.out_features, self.in_features + 1, generator=generator) * 2 * bound - bound
        self._set_weight(w[:, :-1], w[:, -1] if self.bias else None, check=False)  # random weights: nothing to estimate

    def _set_weight(self, weight: Tensor, bias: Tensor | None, check: bool = True) -> None:
        if self.weight.is_meta:
            return
        device = self.feature_map.projection.device
        with torch.no_grad():
            psi = self.feature_map.psi(weight.to(device), None if bias is None else bias.to(device), check=check)
            self.weight.copy_(psi)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        activation: ActivationLike | None,
        num_features: int,
        *,
        feature_map: MapLike | None = None,
        inputs: Tensor | None = None,
        seed: int = 0,
        **options: Any,
    ) -> SNNKLinear:
        """A layer that stands for activation(linear(x)), with A = psi(W, b).

        Args:
            linear: the pretrained layer; it is left as it is.
            activation: what follows it: a name, a torch module or an elementwise callable; unused with a feature_map.
            num_features: number m of real features.
            feature_map: a name in FEATURE_MAPS or a FeatureMap instead of URF(activation). A map given as an object is
                used as it is; with `inputs`, a copy of it is calibrated.
            inputs: typical inputs (*, d), from which mean, norms and range are measured; without them |x| = 1 is
                assumed, or `x_norm` where it is given among the options.
            seed: of the feature map.
            **options: for the feature map.

        Example:
            >>> linear = nn.Linear(8, 3)
            >>> SNNKLinear.from_linear(linear, "sin", 64).weight.shape
            torch.Size([3, 64])
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear; got {type(linear).__name__}")
        if linear.weight.is_meta:
            raise ValueError("linear is on the meta device: it has no weights to start from. Load it first")
        d, o = linear.in_features, linear.out_features
        place: Any = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        if not isinstance(feature_map, FeatureMap):
            if feature_map is None:
                if activation is None:
                    raise TypeError("from_linear needs an activation or a feature_map; got neither")
                feature_map = partial(URF, activation=activation)
            fm = make_calibrated(
                feature_map, d, num_features, inputs, linear.weight, linear.bias, seed=seed, **place, **options
            )
        else:
            fm = make_feature_map(feature_map, d, num_features, **options)
            if isinstance(fm, URF | ProjectedURF) and inputs is not None:
                fm = copy.deepcopy(fm).calibrate(inputs, linear.weight, linear.bias)
        return cls(
            d, o, num_features, fm, linear.bias is not None, seed=seed, weights=(linear.weight, linear.bias), **place
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.feature_map.phi(x), self.weight)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_features={self.num_features}, "
            f"trainable={sum(p.numel() for p in self.parameters() if p.requires_grad)} "
            f"of the dense layer's {self.out_features * (self.in_features + self.bias)}"
        )
