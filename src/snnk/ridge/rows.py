r"""The eigendecomposition of solutions.py from the rows themselves, where rows are few and features are many.

    X = U s^1/2 V',    coordinates Z = X V = U s^1/2    X: centred rows (n, k)

Ridge regression on the coordinates Z (n, r), r <= min(n, k), is ridge regression on X: the same predictions for every
lam, and the weights V w. U and s come from the smaller one of X X' (n, n) and X' X (k, k), and V is never made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from snnk.ridge.solutions import F64, RidgeFactor, condition_of

COLUMNS = 2048  # that are in float64 at a time
# A direction below this part of the largest eigenvalue may be rounding alone. Features in float32 have relative errors
# of about 2e-6 (see sums.py), which are at most 2e-3 of the spread of a feature that varies by 1e-3 of its size.
TOLERANCE = 4e-6


@dataclass(frozen=True, eq=False)
class RowFactor:
    """The factor of the regression on coordinates of the rows.

    Args:
        factor: a RidgeFactor whose features are the coordinates.
        coordinates: Z (n, r) of the rows, in float64.
        rows, mean: X before it was centred, (n, k), and its mean, (k,); zeros without intercept.
    """

    factor: RidgeFactor
    coordinates: Tensor
    rows: Tensor
    mean: Tensor

    def weight(self, weight: Tensor) -> Tensor:
        """The weights (t, k) of the features for weights (t, r) of the coordinates, in float64."""
        combined = ((self.coordinates / self.factor.values) @ weight.T).T  # U s^-1/2 w, (t, n)
        parts = (combined @ (part.double() - mean) for part, mean in _columns(self.rows, self.mean))
        return torch.cat(list(parts), 1)


def factor_rows(x: Tensor, y: Tensor, *, intercept: bool = True) -> RowFactor:
    """Decompose rows x (n, k) with targets y (n, t), for any lam.

    Example:
        >>> x, y = torch.randn(20, 300), torch.randn(20, 1)
        >>> found = factor_rows(x, y)
        >>> weight = found.weight(found.factor.solve(1.0).weight)
        >>> weight.shape, float(((x - x.mean(0)).double() @ weight.T + y.mean() - y).square().mean()) < 1e-3
        (torch.Size([1, 300]), True)
    """
    n, k = x.shape
    mean = torch.cat([part.double().mean(0) for part in x.split(COLUMNS, 1)]) * intercept
    y = y.double()
    middle = y.mean(0) * intercept
    if n <= k:
        gram = torch.zeros(n, n, dtype=F64, device=x.device)
        for part, own in _columns(x, mean):
            part = part.double() - own
            gram.addmm_(part, part.T)
        values, left = torch.linalg.eigh(gram)
        keep = _kept(values)
        coordinates = left[:, keep] * values[keep].sqrt()
    else:
        centred = x.double() - mean
        values, right = torch.linalg.eigh(centred.T @ centred)
        keep = _kept(values)
        coordinates = centred @ right[:, keep]
    target = coordinates.T @ (y - middle)
    values, r = values[keep], int(keep.sum())
    factor = RidgeFactor(
        values,
        torch.eye(r, dtype=F64, device=x.device),
        target,
        torch.cat([torch.zeros(r, dtype=F64, device=x.device), middle]),
        (y - middle).square().sum(0),
        float(n),
        n,
        condition_of(values),
        TOLERANCE * float(values[-1]) if r else 0.0,
        intercept,
    )
    return RowFactor(factor, coordinates, x, mean)


def _columns(x: Tensor, mean: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(COLUMNS, 1), mean.split(COLUMNS), strict=True))


def _kept(values: Tensor) -> Tensor:
    return values > TOLERANCE * values[-1].clamp_min(0)
