"""A frozen affine map Mx + c, which stands between the feature maps of a bundle."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnk.maps.base import FeatureMap, named_in_files


@named_in_files
class Affine(FeatureMap):
    """phi(x) = Mx + c, zeros until `projection` [M, c] (num_features, in_features + 1) is filled; it has no psi."""

    def __init__(self, in_features: int, num_features: int, *, device: Any = None, dtype: Any = None, **options: Any):
        super().__init__(in_features, num_features, **options)
        self.register_buffer("projection", torch.zeros(num_features, in_features + 1, device=device, dtype=dtype))

    def _reset(self) -> None:
        self.projection.zero_()

    def _phi(self, x: Tensor) -> Tensor:
        return F.linear(x, self.projection[:, :-1], self.projection[:, -1])

    def _times_jacobian(self, left: Tensor, x: Tensor) -> Tensor:
        return left @ self.projection[:, :-1]

    def _config(self) -> dict[str, Any]:
        return {}
