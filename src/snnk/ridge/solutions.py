r"""Solutions of ridge regression at any penalty, from one eigendecomposition of the centred sums of sums.py.

    A' = V (s + lam)^-1 c,    degrees of freedom = 1 + sum s / (s + lam),    b = mean y - A mean phi
    RSS = yy - sum c^2 / s + sum (c^2 / s) (lam / (s + lam))^2,    GCV = rows RSS / (rows - degrees of freedom)^2

Here S = V diag(s) V' is the centred Gram matrix, c = V' sum_i w_i (phi_i - mean)(y_i - mean)', and yy is the sum of
squares of centred y.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from snnk import _checks

F64 = torch.float64
TIE = 1e-6  # scores that are closer than this part of the least one are taken for equal
Rows = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, eq=False)
class LinearSolution:
    """`weight` (t, k) and `bias` (t,) in float64; `condition` is that of the matrix that was solved with."""

    weight: Tensor
    bias: Tensor
    condition: float

    def predict(self, phi: Tensor) -> Tensor:
        """weight phi + bias: (*, k) -> (*, t), computed in float64, returned in the dtype of phi."""
        phi = _checks.matrix(phi, self.weight.shape[1], "phi")
        return F.linear(phi.to(self.weight), self.weight, self.bias).to(phi.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class RidgeSolution(LinearSolution):
    """A ridge fit: a LinearSolution and what is known about it.

    Args:
        gram_condition: condition number without lam.
        rank: directions above rounding, of k; the others get no weight.
        lam, degrees_of_freedom: the penalty, and the trace of the hat matrix with the intercept.
        residual: (t,), mean squared residual on the rows of the sums.
        score: GCV or held-out squared error, mean over targets; None where lam was given.
        path: (lam, score, degrees of freedom) at each lam of the search.
    """

    gram_condition: float
    rank: int
    lam: float
    degrees_of_freedom: float
    residual: Tensor
    score: float | None = None
    path: Rows = ()

    def __repr__(self) -> str:
        fit = f"degrees_of_freedom={self.degrees_of_freedom:.1f}, residual={float(self.residual.mean()):.4g}"
        rest = f"rank={self.rank}, condition={self.condition:.1e}, gram_condition={self.gram_condition:.1e}"
        return f"RidgeSolution(weight={[*self.weight.shape]}, lam={self.lam:.4g}, score={self.score}, {fit}, {rest})"


@dataclass(frozen=True, eq=False)
class RidgeFactor:
    """The eigendecomposition of a centred Gram: made once by `RidgeStats.factor`, then any lam costs one product."""

    values: Tensor  # (r,) s above rounding; below it a direction is noise, and so is its share of y
    vectors: Tensor  # (k, r) V
    target: Tensor  # (r, t) c
    mean: Tensor  # (k + t,) of phi and y
    power: Tensor  # (t,) yy
    total_weight: float
    rows: int
    condition: float
    floor: float  # the least lam of a search; see the top of sums.py
    intercept: bool = True

    def curves(self, lams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Degrees of freedom (L,), sums of squared residuals (L, t) and GCV (L,), mean over targets, at lams (L,).

        Each is a sum of terms >= 0, so that nothing cancels as lam goes to 0. GCV counts rows, whatever their weights.
        """
        rank, lams = len(self.values), lams.to(self.values)[:, None]
        shrunk = lams / (self.values + lams)  # (L, r)
        explained = self.target.square() / self.values[:, None]
        # What no lam can fit, and the rows it takes: nothing at all where the features can fit every row.
        spare = max(self.rows - self.intercept - rank, 0)
        outside = (self.power - explained.sum(0)).clamp_min(0) * (spare > 0)
        rss = outside + shrunk.square() @ explained
        return self.intercept + rank - shrunk.sum(1), rss, self.rows * rss.mean(1) / (spare + shrunk.sum(1)).square()

    def search(self, score: Callable[[Tensor], Tensor] | None = None) -> RidgeSolution:
        """The solution of least GCV, or of least score(lams): (L,) -> (L,).

        Four lam per decade from the floor upwards are tried, then more near the best. Where the curve is flat, the
        largest lam is taken: which of equal scores is the least would be up to rounding.
        """
        if self.rows < 2:
            raise ValueError(f"a search for lam needs at least 2 rows; got {self.rows}. Give lam as a number")
        top = math.log10(max(float(self.values[-1]) if len(self.values) else self.floor, 1e-300))
        low = max(top - 16, math.log10(max(self.floor, 1e-300)))
        high = max(top, low) + 4
        least, steps = low, math.ceil(4 * (high - low)) + 1
        path: list[tuple[float, float, float]] = []
        for _ in range(4):
            lams = torch.logspace(low, high, steps, dtype=F64)
            freedom, _, scores = self.curves(lams)
            scores = scores if score is None else score(lams)
            path += zip(lams.tolist(), scores.tolist(), freedom.tolist(), strict=True)
            best, width = int(scores.argmin()), (high - low) / (steps - 1)
            low, high, steps = max(low + (best - 1) * width, least), low + (best + 1) * width, 21
        lowest = min(score for _, score, _ in path)
        lam, value, _ = max(row for row in path if row[1] <= lowest + TIE * abs(lowest))
        return self.solve(lam, value, tuple(sorted(path)))

    def solve(self, lam: float, score: float | None = None, path: Rows = ()) -> RidgeSolution:
        """The solution at one lam; `score` and `path` are handed on to it."""
        k, rank, expected = len(self.vectors), len(self.values), "lam must be a number >= 0, several, 'gcv' or 'kfold'"
        try:
            lam = float(lam)
        except (TypeError, ValueError):
            raise TypeError(f"{expected}; got {lam!r}") from None
        if not 0 <= lam < math.inf:
            raise ValueError(f"{expected}; got {lam}")
        if lam == 0 and rank < k:
            raise ValueError(
                f"lam = 0 needs full rank; got {rank} of {k} features, condition number {self.condition:.1e}. "
                "Use lam > 0, lam='gcv' or fewer features"
            )
        weight = (self.vectors @ (self.target / (self.values + lam)[:, None])).T.contiguous()
        bias = self.mean[k:] - weight @ self.mean[:k]
        condition = condition_of(F.pad(self.values, (k - rank, 0)) + lam)
        freedom, rss, _ = self.curves(torch.tensor([lam], dtype=F64))
        residual = rss[0] / self.total_weight
        return RidgeSolution(weight, bias, condition, self.condition, rank, lam, float(freedom), residual, score, path)


def condition_of(values: Tensor) -> float:
    """The condition number of a matrix with these eigenvalues, ascending."""
    return float(values[-1] / values[0]) if len(values) and values[0] > 0 else math.inf
