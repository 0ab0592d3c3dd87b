r"""SNNK adapters: Y = v * (phi(X) A^T) + X (the appendix on SNNK-inspired adapter blocks).

phi is frozen, A and the gate v are trained. v starts at zero, so that the adapter starts as the identity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk import _checks
from snnk.maps import FeatureMap, MapLike, make_feature_map
from snnk.maps.projections import make_generator


class SNNKAdapter(nn.Module):
    """A block that starts as the identity and learns what to add to its input.

    Args:
        dim: size of the last dimension of inputs and outputs.
        num_features: number m of features.
        feature_map: name in FEATURE_MAPS ("relu", "cos", "sin", ...) or a FeatureMap.
        gate: train v beside A. Without it A itself starts at zero.
        bias: add a trained bias, (dim,), to what the adapter adds.
        train_directions: train the feature map's projection too; with `Directions`, `bias` and no gate that is the
            bottleneck adapter of Houlsby et al. (2019).
        init_weights: start as the identity, with A drawn from `seed`. False draws A, gate and bias from torch's global
            generator, so that no two such adapters are equal; it is there for tests.
        seed: of the feature map and of A.
        device, dtype: of all tensors.
        **options: for the feature map.

    Example:
        >>> adapter = SNNKAdapter(8, num_features=16)
        >>> x = torch.randn(2, 5, 8)
        >>> bool(torch.equal(adapter(x), x)), sum(p.numel() for p in adapter.parameters())
        (True, 136)
    """

    gate: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        num_features: int = 16,
        feature_map: MapLike = "relu",
        *,
        gate: bool = True,
        bias: bool = False,
        train_directions: bool = False,
        init_weights: bool = True,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim = _checks.positive_int(dim, "dim")
        self.num_features = _checks.positive_int(num_features, "num_features")
        self.init_weights, self.seed = init_weights, seed
        place: Any = {"device": device, "dtype": dtype}
        if not isinstance(feature_map, FeatureMap):
            options = {"seed": seed, **place, **options}
        self.feature_map = make_feature_map(feature_map, dim, num_features, **options)
        self.weight = nn.Parameter(torch.empty(dim, num_features, **place))
        for name, wanted in (("gate", gate), ("bias", bias)):
            self.register_parameter(name, nn.Parameter(torch.empty(dim, **place)) if wanted else None)
        if train_directions:
            self.feature_map.train_directions_()
        self._reset_weights()

    def reset_parameters(self) -> None:
        """Draw the feature map, A, gate and bias again, as at first."""
        self.feature_map.reset_parameters()
        self._reset_weights()

    @torch.no_grad()
    def _reset_weights(self) -> None:
        generator = make_generator(self.seed, stream=2) if self.init_weights else None
        with torch.device("cpu"):
            drawn = torch.randn(self.dim, self.num_features + 2, generator=generator)
        self.weight.copy_(drawn[:, :-2] * self.num_features**-0.5)
        columns = {"gate": drawn[:, -2], "bias": drawn[:, -1]}
        if self.init_weights:
            columns = dict.fromkeys(columns, torch.zeros(self.dim, device="cpu"))
            if self.gate is None:
                self.weight.zero_()
        for name, column in columns.items():
            if getattr(self, name) is not None:
                getattr(self, name).copy_(column)

    @property
    def starts_as_identity(self) -> bool:
        """Whether it adds nothing to any input, as before training."""
        return not any(p.any() for p in (self.weight if self.gate is None else self.gate, self.bias) if p is not None)

    def delta(self, x: Tensor) -> Tensor:
        """The change that the adapter adds to its input: (*, dim) -> (*, dim)."""
        # features may be in a wider dtype than A, which is what a frozen model in bfloat16 trains with
        y = F.linear(self.feature_map(x).to(self.weight.dtype), self.weight)
        if self.gate is not None:
            y = self.gate * y
        return y if self.bias is None else y + self.bias

    def forward(self, x: Tensor) -> Tensor:
        return x + self.delta(x)

    def extra_repr(self) -> str:
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return f"dim={self.dim}, num_features={self.num_features}, trainable={trained}"
