r"""Fourier features with the best psi for Gaussian inputs: past the paper, for any activation and any norms.

URF's psi is (nearly) unbiased for every single x, and pays for that with a variance like exp(2 omega |x||w|). If only
the mean squared error over inputs matters, the features phi(x) = [cos G(x - c), sin G(x - c)] are given and psi may be
anything, so take the least-squares one. For x ~ N(c, s^2 I) all of it is known in closed form:

    psi(w, b) = K^{-1} k(w, b),   K = E[phi phi^T],   k = E[phi f(w.x + b)],   error = E f^2 - k . psi.

cos and sin do not mix in K, whose entries are (exp(-s^2|g-h|^2/2) +- exp(-s^2|g+h|^2/2)) / 2. Given t = w.(x - c) the
angle g.(x - c) is Gaussian, so k is an integral over t alone, done by quadrature with f as it is: no Fourier
transform, no series, no reach. The price: psi takes a solve with K, and inputs far from that Gaussian have
another error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snnk import _checks
from snnk.maps.activations import ActivationLike, resolve_activation
from snnk.maps.base import WARN, FeatureMap, at_least_float, named_in_files
from snnk.maps.projections import ProjectionLike, resolve_projection

NODES = 257  # of the trapezoid rule: exact to rounding for smooth f, and as good as any for one with a kink
WIDTH = 7.5  # standard deviations
CHUNK = 1 << 22  # entries of the (outputs, projections, nodes) array held at once
BANDWIDTHS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.5, 2.5)


@named_in_files
class ProjectedURF(FeatureMap):
    """Bounded cos and sin features whose psi has the least mean squared error over Gaussian inputs.

    Args:
        in_features: size d of inputs and weights.
        num_features: number m of real features, two per projection.
        activation: name, Activation, torch module or elementwise callable.
        x_norm, w_norm: typical |x - mean| and |w|; `calibrate` measures them.
        bandwidth: standard deviation of the angles; default: the best of a grid for weights of the typical norm.
        projection: name in PROJECTIONS, a Projection, or a callable. Rows of one length would have angles of one
            frequency only, which in few dimensions fits next to nothing.
        on_error: see FeatureMap.
        normalize: see FeatureMap.
        seed, device, dtype: of the map.

    Example:
        >>> fm = ProjectedURF(8, 64, "relu")
        >>> bool(fm.predicted_error() < 1e-2)
        True
    """

    center: Tensor
    summary: Tensor

    def __init__(
        self,
        in_features: int,
        num_features: int,
        activation: ActivationLike = "gelu",
        *,
        x_norm: float = 1.0,
        w_norm: float = 1.0,
        bandwidth: float | None = None,
        projection: ProjectionLike = "orthogonal_chi",
        on_error: str = "raise",
        normalize: str | None = None,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, _checks.even_features(num_features), normalize=normalize, on_error=on_error, seed=seed
        )
        self.activation = resolve_activation(activation)
        self.kind = resolve_projection(projection)
        self.bandwidth = None if bandwidth is None else _checks.positive(bandwidth, "bandwidth")
        self.norms = _checks.positive(x_norm, "x_norm"), _checks.positive(w_norm, "w_norm")
        rows = num_features // 2
        self.register_buffer("projection", torch.empty(rows, in_features, device=device, dtype=dtype))
        self.register_buffer("center", torch.empty(in_features, device=device, dtype=dtype))
        self.register_buffer("summary", torch.empty(2, device=device, dtype=dtype))  # x_norm, w_norm
        self.reset_parameters()

    @property
    def x_norm(self) -> Tensor:
        """The typical |x - mean| that the map was made for."""
        return self.summary[0]

    @property
    def w_norm(self) -> Tensor:
        """The typical |w| that the map was made for."""
        return self.summary[1]

    def _reset(self) -> None:
        self._build(*self.norms, torch.zeros(self.in_features), None, None)

    def calibrate(
        self, x: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> ProjectedURF:
        """Set mean, norms and bandwidth from inputs (n, d) and a layer's weights, either of which may be missing.

        What is missing is taken from the constructor's arguments, not from an earlier call.
        """
        x, weight, bias = self._calibration(x, weight, bias)
        x_norm, w_norm = self.norms
        center = torch.zeros(self.in_features, dtype=torch.float64, device="cpu")
        if x is not None:
            center, x_norm = self._center_and_norm(x)
        if weight is not None:
            w_norm = float(weight.square().sum(1).mean().sqrt().clamp_min(1e-6))
        with torch.no_grad(), torch.device("cpu"):
            self._build(x_norm, w_norm, center, weight, bias)
        return self

    def _build(self, x_norm: float, w_norm: float, center: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        generator = self._generator()
        g = self.kind(self.num_features // 2, self.in_features, generator).double() / x_norm
        if weight is None or bias is None:
            weight = torch.randn(8, self.in_features, generator=generator, dtype=torch.float64)
            weight, bias = weight / weight.norm(dim=1, keepdim=True) * w_norm, torch.zeros(8, dtype=torch.float64)
        step = -(-len(weight) // 16)  # a few weights are enough to choose one number
        w, b = weight[::step], bias[::step] + weight[::step] @ center.double()
        best, few = self.bandwidth, g[:256]
        if best is None:
            errors = [float(self._solve(few * width, x_norm, w, b)[1].mean()) for width in BANDWIDTHS]
            best = BANDWIDTHS[int(np.argmin(errors))]
        self._fill(projection=g * best, center=center, summary=torch.tensor([x_norm, w_norm]))

    def _phi(self, x: Tensor) -> Tensor:
        y = F.linear(x - self.center.to(x.dtype), self.projection)
        angle = at_least_float(y)
        return torch.cat([angle.cos(), angle.sin()], -1).mul_(len(self.projection) ** -0.5).to(y.dtype)

    def _psi(self, weight: Tensor, bias: Tensor, check: bool) -> Tensor:
        psi, error, second, scale = self._fit(weight, bias)
        if check and self.on_error != "ignore" and len(weight):
            mean, spread = float(error.detach().mean()), float(scale.detach().mean())
            if mean > max(WARN * spread, 1e-5 * float(second.detach().mean())):
                self._judge(mean, spread, "Use more features, or fit psi from data.")
        return psi * len(self.projection) ** 0.5

    def _fit(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shifted = bias + weight @ self.center.double()
        return self._solve(self.projection.double(), float(self.x_norm), weight, shifted)

    def _solve(self, g: Tensor, x_norm: float, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """psi without its sqrt(P), (o, 2P); expected squared error, mean square and variance of f, each (o,)."""
        variance = x_norm**2 / self.in_features
        inner = variance * g @ g.T
        size = inner.diagonal()
        near = torch.exp(inner - (size[:, None] + size) / 2)  # exp(-s^2 |g - h|^2 / 2)
        far = torch.exp(-inner - (size[:, None] + size) / 2)
        # features are rounded to their dtype: counted as noise, so that psi does not rest on digits that are not there
        noise = max(1e-12, 10 * torch.finfo(self.projection.dtype).eps ** 2) * torch.eye(
            len(g), dtype=g.dtype, device=g.device
        )
        towers = [torch.linalg.cholesky((near + sign * far) / 2 + noise) for sign in (1, -1)]
        nodes = torch.linspace(-WIDTH, WIDTH, NODES, dtype=g.dtype, device=g.device)
        weights = torch.softmax(-nodes.square() / 2, 0)
        norms = weight.norm(dim=1, keepdim=True)
        along = variance**0.5 * (weight @ g.T) / norms.clamp_min(1e-30)  # (o, P), part of the angle that t explains
        damping = torch.exp(-(size - along.square()) / 2)
        f = self.activation(variance**0.5 * norms * nodes + bias[:, None])  # (o, nodes)
        if not bool(f.isfinite().all()):
            raise ValueError(f"{self.activation.name} must give a finite number for each that w.x + b can be")
        step = max(1, CHUNK // (len(g) * NODES))
        k_cos, k_sin = torch.empty_like(along), torch.empty_like(along)
        for start in range(0, len(weight), step):
            part = slice(start, start + step)
            angle = along[part, :, None] * nodes  # (o', P, nodes)
            weighted = f[part] * weights
            k_cos[part] = torch.einsum("opn,on->op", angle.cos(), weighted)
            k_sin[part] = torch.einsum("opn,on->op", angle.sin(), weighted)
        k = [k_cos * damping, k_sin * damping]
        psi = torch.cat([torch.cholesky_solve(kk.T, tower).T for kk, tower in zip(k, towers, strict=True)], 1)
        second = f.square() @ weights
        error = (second - (torch.cat(k, 1) * psi).sum(1)).clamp_min(0)
        return psi, error, second, second - (f @ weights).square()

    def _exact(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self.activation(x @ weight.T + bias)

    def predicted_error(self, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Expected squared error for each output, (o,), over isotropic Gaussian inputs of the typical norm.

        For other inputs, such as the features of another map, it can be far off, and so can psi: measure, or fit.

        Without a weight: one output of the typical norm.
        """
        if weight is None:
            weight = self.projection.new_ones(1, self.in_features) * (self.w_norm / self.in_features**0.5)
        w, b = _checks.layer_weights(weight, bias, self.in_features)
        return self._fit(self._normalized(w), b)[1]

    def _times_jacobian(self, left: Tensor, x: Tensor) -> Tensor:
        cos, sin = (part[..., None, :] for part in self._phi(x).chunk(2, -1))
        even, odd = left.chunk(2, -1)  # (*, out, P)
        return (odd * cos - even * sin) @ self.projection

    def _config(self) -> dict[str, Any]:
        config = {"x_norm": self.norms[0], "w_norm": self.norms[1], "bandwidth": self.bandwidth}
        names = {
            "activation": self._activation_name(self.activation),
            "projection": self._projection_name(self.kind),
            "on_error": self.on_error,
        }
        return {**config, **names}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation.name}, projection={self.kind.name}"
