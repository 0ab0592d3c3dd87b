r"""Arc-cosine features (section 3.2): phi(x) = Theta(Gx) (Gx)^n / sqrt(m), psi(w) the same of w.

    E[phi(x) . psi(w)] = K_n(x, w) / 2,    K_n(x, w) = |x|^n |w|^n J_n(theta) / pi,

theta the angle of x and w (Cho & Saul 2009). Order 1 is the paper's ReLU-SNNK layer. K_n is not a function of x.w
alone, so that no layer f(Wx + b) computes it. The paper writes Gamma_n = ReLU((v.omega)^n), which is right for n = 1
only: for n = 0 it would be 1 and for n = 2 it would lose the half-space. Its formula for J_n is right for n < 2 only:
with d/dtheta in place of Cho & Saul's (1/sin theta) d/dtheta it gives K_2(x, x) = 2 |x|^4 instead of 3 |x|^4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnk.maps.base import FeatureMap, named_in_files
from snnk.maps.projections import ProjectionLike, resolve_projection


@named_in_files
class ArcCosine(FeatureMap):
    """Features of half the arc-cosine kernel of order 0, 1 or 2.

    Args:
        in_features: size d of inputs and weights.
        num_features: number m of features, one per projection.
        order: 0 (angle only), 1 (ReLU) or 2.
        projection: name in PROJECTIONS, a Projection, or a callable. Rows of length sqrt(d) lose nothing here: the
            kernel is homogeneous, so that the length of a row is a known constant, which is corrected.
        augment: append 1 to inputs and the bias to weights. Without it a bias is ignored, as in the paper.
        normalize: see FeatureMap.
        seed, device, dtype: of the projection.

    Example:
        >>> fm = ArcCosine(8, 64)
        >>> x, w = torch.randn(5, 8), torch.randn(3, 8)
        >>> (fm.phi(x) @ fm.psi(w).T).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        in_features: int,
        num_features: int,
        order: int = 1,
        *,
        projection: ProjectionLike = "orthogonal",
        augment: bool = False,
        normalize: str | None = None,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_features, normalize=normalize, seed=seed)
        if order not in (0, 1, 2):
            raise ValueError(f"order must be 0, 1 or 2; got {order!r}")
        self.order = int(order)
        self.augment = augment
        self.kind = resolve_projection(projection)
        width = in_features + augment
        self.register_buffer("projection", torch.empty(num_features, width, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def unbiased(self) -> bool:
        return self.kind.gaussian_rows or self.kind.sphere_rows

    def _reset(self) -> None:
        m, width = self.projection.shape
        g = self.kind(m, width, self._generator())
        if self.kind.sphere_rows and self.order == 2:
            g = g * ((width + 2) / width) ** 0.25  # E|g|^4 of a Gaussian is d (d + 2), on the sphere d^2
        # phi carries 1/sqrt(m); for orders 1 and 2 it goes into the projection, which costs nothing in phi
        self._fill(projection=g * m ** (-0.5 / self.order) if self.order else g)

    def _phi(self, x: Tensor) -> Tensor:
        g = self.projection
        y = F.linear(x, g[:, :-1], g[:, -1]) if self.augment else F.linear(x, g)
        return self._nonlinear(y)

    def _psi(self, weight: Tensor, bias: Tensor, check: bool) -> Tensor:
        w = torch.cat([weight, bias[:, None]], 1) if self.augment else weight
        return self._nonlinear(w @ self.projection.double().T)

    def _nonlinear(self, y: Tensor) -> Tensor:
        if self.order == 0:
            return (y > 0).to(y.dtype) * self.num_features**-0.5
        return F.relu(y) if self.order == 1 else F.relu(y).square()

    def _exact(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.augment:
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
            weight = torch.cat([weight, bias[:, None]], 1)
        norms = x.norm(dim=-1, keepdim=True) * weight.norm(dim=-1)  # (*, o)
        theta = torch.arccos((x @ weight.T / norms.clamp_min(1e-300)).clamp(-1, 1))
        rest = math.pi - theta
        j = (
            rest,
            theta.sin() + rest * theta.cos(),
            3 * theta.sin() * theta.cos() + rest * (1 + 2 * theta.cos() ** 2),
        )[self.order]
        return norms**self.order * j / (2 * math.pi)

    def _times_jacobian(self, left: Tensor, x: Tensor) -> Tensor:
        g = self.projection[:, : self.in_features]
        y = F.linear(x, g, self.projection[:, -1] if self.augment else None)
        slope = (torch.zeros_like(y), (y > 0).to(y.dtype), 2 * F.relu(y))[self.order]
        return (left * slope[..., None, :]) @ g

    def _config(self) -> dict[str, Any]:
        return {"order": self.order, "augment": self.augment, "projection": self._projection_name(self.kind)}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, order={self.order}, projection={self.kind.name}"
