"""Random projections G in R^(m x d) whose rows stand for g ~ N(0, I_d) in the paper's Lambda_g (section 3.1).

Orthogonal rows come in blocks of d; blocks are independent.
`gaussian_rows` is true where a single row is exactly N(0, I_d), which unbiasedness needs; rows of length
sqrt(d) are uniform on that sphere instead, which biases an estimate of cos(z) by about z^2/(d + 2) and lowers its
mean squared error, because the heavy tail of exp(g.w) is in the length of g.

Everything is drawn on the CPU in float32 from an explicit generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from snnk._checks import look_up, positive_int

Draw = Callable[[int, int, Generator], Tensor]


def make_generator(seed: int, stream: int = 0) -> Generator:
    """A CPU generator for `seed`, mixed with a fixed constant.

    Unmixed, URF(..., seed=0) would draw the very numbers that torch.manual_seed(0); torch.randn(...) gave to a user's
    inputs or weights, and the estimate of such pairs would be far off.
    """
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03 + 0x5EED5EED) % 2**63)


@dataclass(frozen=True)
class Projection:
    """A way to draw (m, d) projections.

    Args:
        name: how it is printed.
        draw: (m, d, generator) -> (m, d) float32 tensor on the CPU.
        gaussian_rows: each row alone is exactly N(0, I_d).
        sphere_rows: each row is uniform on the sphere of radius sqrt(d) and rows of a block of d are orthogonal, so
            that a whole block has no error in x.w; error predictions and arc-cosine scales use it.
    """

    name: str
    draw: Draw = field(repr=False)
    gaussian_rows: bool = False
    sphere_rows: bool = False

    def __reduce__(self) -> Any:
        named = PROJECTIONS.get(self.name) is self  # kept as its name in a pickle: a lambda cannot be
        return (resolve_projection, (self.name,)) if named else super().__reduce__()

    def __call__(self, m: int, d: int, generator: Generator) -> Tensor:
        positive_int(m, "number of projections")
        positive_int(d, "in_features")
        with torch.device("cpu"):  # whatever device a caller's context asks for: the generator is on the CPU
            g = self.draw(m, d, generator)
        if g.shape != (m, d):
            raise ValueError(f"projection {self.name!r} must return shape {(m, d)}; got {tuple(g.shape)}")
        return g


def _normal(m: int, d: int, generator: Generator) -> Tensor:
    return torch.randn(m, d, generator=generator, dtype=torch.float32)


def _chi(m: int, d: int, generator: Generator) -> Tensor:
    """Lengths of m standard Gaussian vectors of R^d, (m, 1)."""
    return _normal(m, d, generator).norm(dim=1, keepdim=True)


def haar(rows: int, d: int, generator: Generator) -> Tensor:
    """The first `rows` <= d rows of a Haar-distributed orthogonal matrix, float64.

    QR is Haar only after the columns are multiplied by the signs of R's diagonal; without them, features are biased by
    20 to 30 % at d = 4..16.
    """
    q, r = torch.linalg.qr(_normal(d, rows, generator).double())
    signs = torch.where(torch.diagonal(r) < 0, -1.0, 1.0).double()
    return (q * signs).T


def _blocks(m: int, size: int, block: Callable[[int], Tensor]) -> Tensor:
    """Stack blocks of at most `size` rows until there are m."""
    return torch.cat([block(min(size, m - start)) for start in range(0, m, size)]).float()


def _orthogonal(m: int, d: int, generator: Generator) -> Tensor:
    return _blocks(m, d, lambda rows: haar(rows, d, generator)) * math.sqrt(d)


def _orthogonal_chi(m: int, d: int, generator: Generator) -> Tensor:
    return _blocks(m, d, lambda rows: haar(rows, d, generator)) * _chi(m, d, generator)


ProjectionLike = str | Projection | Draw

PROJECTIONS: dict[str, Projection] = {
    p.name: p
    for p in (
        Projection("iid", _normal, gaussian_rows=True),
        Projection("orthogonal", _orthogonal, sphere_rows=True),
        Projection("orthogonal_chi", _orthogonal_chi, gaussian_rows=True),
    )
}


def resolve_projection(projection: ProjectionLike) -> Projection:
    """A Projection from a name, a Projection or a callable (m, d, generator) -> (m, d)."""
    if isinstance(projection, Projection):
        return projection
    if callable(projection):
        return Projection(getattr(projection, "__name__", type(projection).__name__), projection)
    return look_up(projection, PROJECTIONS, "projection")
