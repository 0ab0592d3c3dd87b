r"""Random Maclaurin features (Kar & Karnick 2012; the appendix on polynomial kernels), the paper's brute-force variant.

f(z) = sum_n a_n z^n is split into its positive and negative coefficients. A feature draws a degree N with probability
p_N, proportional to 2^-(N+1) over the degrees that the part has (for tanh: odd ones only, the appendix's rejection
sampling), and N Rademacher vectors r_j:

    phi(x) = sqrt(|a_N| / p_N) prod_j r_j.x / sqrt(P),    psi(w) = sign(a_N) times the same of w.

Both parts share their Rademacher vectors. A bias enters as one more coordinate, 1 for x and b for w.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snnk import _checks
from snnk.maps.activations import ACTIVATIONS, ActivationLike, resolve_activation
from snnk.maps.base import FeatureMap, named_in_files


@named_in_files
class PowerSeries(FeatureMap):
    """Unbiased features of the Taylor polynomial of an activation at 0.

    Args:
        in_features: size d of inputs and weights.
        num_features: number m of features; even if the series has coefficients of both signs.
        activation: one with a Taylor series; `coefficients` replace it.
        coefficients: a_0, a_1, ... of any polynomial.
        max_degree: where the series is cut; its remainder is all the bias there is.
        normalize: see FeatureMap.
        seed, device, dtype: of the Rademacher vectors.

    Example:
        >>> PowerSeries(8, 64, "tanh").phi(torch.randn(5, 8)).shape
        torch.Size([5, 64])
    """

    degrees: Tensor
    scale: Tensor
    signs: Tensor

    def __init__(
        self,
        in_features: int,
        num_features: int,
        activation: ActivationLike = "tanh",
        *,
        coefficients: Sequence[float] | None = None,
        max_degree: int = 11,
        normalize: str | None = None,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, num_features, normalize=normalize, seed=seed)
        if coefficients is None:
            self.activation = resolve_activation(activation)
            if self.activation.taylor is None:
                known = ", ".join(a.name for a in ACTIVATIONS.values() if a.taylor)
                raise ValueError(f"{self.activation.name} has no Taylor series at 0; known: {known}")
            coefficients = self.activation.taylor(_checks.positive_int(max_degree, "max_degree") + 1).tolist()
        a = np.asarray(coefficients, float)
        if a.ndim != 1 or not np.isfinite(a).all() or not a.any():
            raise ValueError(f"coefficients must be finite numbers, not all zero; got {coefficients!r}")
        self.coefficients = tuple(a[: int(np.flatnonzero(a)[-1]) + 1].tolist())
        parts = self._parts()
        if len(parts) == 2:
            _checks.even_features(num_features)
        rows, degree = num_features // len(parts), max(len(self.coefficients) - 1, 1)
        self.register_buffer("projection", torch.empty(degree, rows, in_features + 1, device=device, dtype=dtype))
        self.register_buffer("degrees", torch.empty(len(parts), rows, device=device, dtype=torch.int64))
        self.register_buffer("scale", torch.empty(len(parts), rows, device=device, dtype=dtype))
        self.register_buffer("signs", torch.empty(len(parts), 1, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def unbiased(self) -> bool:
        return True

    def _parts(self) -> list[tuple[float, Tensor]]:
        """(sign, coefficients' sizes) of the positive and negative part, without an empty one."""
        a = torch.tensor(self.coefficients, dtype=torch.float64, device="cpu")
        return [(s, (s * a).clamp_min(0)) for s in (1.0, -1.0) if (s * a > 0).any()]

    def _reset(self) -> None:
        generator = self._generator()
        degree, rows, width = self.projection.shape
        signs = torch.randint(0, 2, (degree, rows, width), generator=generator) * 2.0 - 1
        degrees, scales = [], []
        for _, size in self._parts():
            p = torch.where(size > 0, 0.5 ** (torch.arange(len(size)) + 1.0).double(), 0.0)
            p = p / p.sum()
            n = torch.multinomial(p, rows, replacement=True, generator=generator)
            degrees.append(n)
            scales.append((size[n] / p[n] / rows).sqrt())
        self._fill(
            projection=signs,
            degrees=torch.stack(degrees),
            scale=torch.stack(scales),
            signs=torch.tensor([[s] for s, _ in self._parts()]),
        )

    def _monomials(self, x: Tensor, last: Tensor, projection: Tensor) -> Tensor:
        """prod_{j <= N} r_j.(x, last) for each part and row: (*, d), (*, 1) -> (*, parts, rows)."""
        factors = F.linear(x, projection[..., :-1].flatten(0, 1)).unflatten(
            -1, projection.shape[:2]
        )  # (*, degree, rows)
        factors = factors + projection[..., -1].to(factors.dtype) * last[..., None]
        powers = torch.cat([torch.ones_like(factors[..., :1, :]), factors.cumprod(-2)], -2)  # (*, degree + 1, rows)
        return powers[..., self.degrees, torch.arange(self.degrees.shape[1], device=x.device)]

    def _phi(self, x: Tensor) -> Tensor:
        features = self._monomials(x, torch.ones_like(x[..., :1]), self.projection)
        return (features * self.scale.to(features.dtype)).flatten(-2)

    def _psi(self, weight: Tensor, bias: Tensor, check: bool) -> Tensor:
        features = self._monomials(weight, bias[:, None], self.projection.double())
        return (features * (self.scale * self.signs).double()).flatten(-2)

    def _exact(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The Taylor polynomial itself, which is what the features are unbiased for."""
        z = x @ weight.T + bias
        total = torch.zeros_like(z)
        for a in reversed(self.coefficients):
            total = total * z + a
        return total

    def _times_jacobian(self, left: Tensor, x: Tensor) -> Tensor:
        """The sum over j < N of r_j times the product of the other factors, without dividing by one that may be 0."""
        r, (degree, rows, _) = self.projection, self.projection.shape
        factors = F.linear(x, r[..., :-1].flatten(0, 1), r[..., -1].flatten()).unflatten(-1, (1, degree, rows))
        used = torch.arange(degree, device=x.device)[:, None] < self.degrees[:, None, :]  # (parts, degree, rows)
        factors = torch.where(used, factors, 1.0)  # (*, parts, degree, rows)
        one = torch.ones_like(factors[..., :1, :])
        before = torch.cat([one, factors[..., :-1, :]], -2).cumprod(-2)
        after = torch.cat([one, factors[..., 1:, :].flip(-2)], -2).cumprod(-2).flip(-2)
        others = before * after * (used * self.scale[:, None, :])
        left = torch.einsum("...opr,...pjr->...ojr", left.unflatten(-1, self.degrees.shape), others)
        return left.flatten(-2) @ r[..., :-1].flatten(0, 1)

    def _config(self) -> dict[str, Any]:
        return {"coefficients": self.coefficients}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, degree={len(self.coefficients) - 1}"
