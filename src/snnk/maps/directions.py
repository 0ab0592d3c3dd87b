r"""Features along given directions: phi(x) = f(G(x - c)), with rows of G that are chosen from data.

The inputs of a frozen layer vary along few of their d dimensions, so that sixteen directions of the data explain more
than sixteen random ones. There is no psi: the matrix behind these features is trained or fitted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnk import _checks
from snnk.maps.activations import ActivationLike, resolve_activation
from snnk.maps.base import FeatureMap, named_in_files
from snnk.maps.projections import PROJECTIONS


@named_in_files
class Directions(FeatureMap):
    """Neurons f(g.(x - c)) with frozen rows g: orthonormal random ones until `set_` gives others.

    Args:
        in_features: size d of inputs.
        num_features: number m of features, one per direction.
        activation: f, a name in ACTIVATIONS, an Activation, a module or an elementwise callable.
        normalize: see FeatureMap.
        seed, device, dtype: of the projection, (m, d + 1): G and -Gc.

    Example:
        >>> fm = Directions(8, 4, "gelu").set_(torch.eye(8)[:4])
        >>> x = torch.randn(5, 8)
        >>> bool(torch.allclose(fm(x), F.gelu(x[:, :4]), atol=1e-6))
        True
    """

    def __init__(
        self,
        in_features: int,
        num_features: int,
        activation: ActivationLike = "gelu",
        *,
        normalize: str | None = None,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_features, normalize=normalize, seed=seed)
        self.activation = resolve_activation(activation)
        self.register_buffer("projection", torch.empty(num_features, in_features + 1, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def set_(self, directions: Tensor, center: Tensor | None = None) -> Directions:
        """Take rows G (m, d), and c (d,) or 0."""
        _checks.finite(_checks.matrix(directions, self.in_features, "directions"), "directions")
        if directions.shape != (self.num_features, self.in_features):
            raise ValueError(
                f"directions must be ({self.num_features}, {self.in_features}); got shape {tuple(directions.shape)}"
            )
        g = directions.double()
        c = g.new_zeros(self.in_features) if center is None else _checks.finite(center, "center").to(g)
        self._fill(projection=torch.cat([g, -(g @ c)[:, None]], 1))
        return self

    def _reset(self) -> None:
        m, d = self.num_features, self.in_features
        self.set_(PROJECTIONS["orthogonal"](m, d, self._generator()) * d**-0.5)

    def _phi(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.projection[:, :-1], self.projection[:, -1]))

    def _times_jacobian(self, left: Tensor, x: Tensor) -> Tensor:
        g = self.projection[:, :-1]
        z = F.linear(x, g, self.projection[:, -1])
        slope = torch.func.jvp(self.activation, (z,), (torch.ones_like(z),))[1]
        return (left * slope[..., None, :]) @ g

    def _config(self) -> dict[str, Any]:
        return {"activation": self._activation_name(self.activation)}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation.name}"
