r"""Ridge regression from sums alone (section 3.3; the appendix on training a bundled network): no row is seen twice.

    minimise over A, b:    sum_i w_i |y_i - A phi_i - b|^2 + lam |A|^2,    lam as scikit-learn's Ridge(alpha)

    S = sum_i w_i (phi_i - mean)(phi_i - mean)',    sum_i w_i (phi_i - mean)(y_i - mean)',    sum_i w_i (y_i - mean)^2

The solution at any lam follows from these (solutions.py), so statistics of parts add, those of removed rows are
subtracted, one eigendecomposition of S gives every lam, and the first k features use the corner of the same sums.

Sums in float64 of features in float32 hold nothing below float32. A computed feature is phi_j + e_j with
|e_j| <= r |phi_j|, and e differs from one processor to the next. Here r = u + ROUNDINGS u', where u is the unit
roundoff of the features' dtype, in which they are stored, and u' that of float32 or better, in which they are computed.
Rounding is relative to a feature, not to its spread, so that the errors of feature j have the sum of squares

    N_j = r^2 sum_i w_i phi_ij^2,    about 0,

and those along v have v' diag(N) v, as errors of different features are independent. Two floors follow:

1. The spectrum. If v' S v <= v' diag(N) v, the features vary along v no more than rounding makes them vary, and their
   share of y may be the processor's. This is asked of every feature alone, and of every eigenvector of S over the
   features that remain. Such directions get no weight.
2. lam. Exact features with errors of variance N_j / n have the expected squared error of a ridge regression with the
   penalty diag(N). A smaller lam than the least N_j fits errors, so searches for lam begin there. A lam that is given
   as a number is used as it is.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

import torch
from torch import Tensor

from snnk import _checks, _io
from snnk.ridge.solutions import LinearSolution, RidgeFactor, RidgeSolution, condition_of

F64 = torch.float64
BLOCK_ROWS, PANEL = 2048, 192  # fast at 1024 features; of 1024 to 8192 rows and 128 to 1025 columns
BLOCK_DTYPES = {"float64": F64, "float32": torch.float32}
FORMAT = {"format": "snnk.RidgeStats", "version": "1"}
ROUNDINGS = 32  # rounding errors in a feature, in units of u: a dot product of 1,000 terms has about its square root


class RidgeStats:
    """Mergeable float64 sums of rows (phi, y): all that ridge regression needs, with or without an intercept.

    Args:
        num_features, num_targets: columns m of phi and t of y.
        folds: 0, or the number K >= 2 of folds to keep apart for `solve("kfold")`; memory grows K times.
        block_dtype: float64; or float32, about twice as fast, for products within blocks of 2048 rows, which are added
            up in float64. Its error was below 2e-6 of sqrt(S_ii S_jj) on normal, cosine and ReLU features, so that
            directions below 5e-7 of the largest eigenvalue are left out, and residuals below 1e-6 of yy are noise.
        device: of the sums.

    `note` is a text that is saved with the sums, for example which rows they cover. Merging keeps
    the note if both have the same one, and empties it otherwise, because it would describe the rows of one only.

    Example:
        >>> phi, y = torch.eye(4), torch.arange(4.0)
        >>> stats = RidgeStats(4, 1).update(phi[:2], y[:2]) + RidgeStats(4, 1).update(phi[2:], y[2:])
        >>> [round(x, 6) for x in stats.solve(1.0).weight[0].tolist()]
        [-0.75, -0.25, 0.25, 0.75]
    """

    def __init__(
        self, num_features: int, num_targets: int, *, folds: int = 0, block_dtype: torch.dtype = F64, device: Any = None
    ) -> None:
        m = self.num_features = _checks.positive_int(num_features, "num_features")
        t = self.num_targets = _checks.positive_int(num_targets, "num_targets")
        if isinstance(folds, bool) or not isinstance(folds, int) or folds < 0 or folds == 1:
            raise ValueError(f"folds must be 0 or an integer of at least 2; got {folds!r}")
        if block_dtype not in BLOCK_DTYPES.values():
            raise ValueError(f"block_dtype must be torch.float64 or torch.float32; got {block_dtype!r}")
        self.folds, self.block_dtype, self.note = folds, block_dtype, ""
        # Sums over rows z = (1, phi - shift, y - shift), each fold apart: first n, phi, y; then phi'phi (upper triangle
        # only) and phi'y; last the number of rows, (r phi)^2 about 0 for the floor, y^2. A shift near the mean keeps
        # the digits that centring far from 0 would cancel. It is fixed at the first block (NaN before) rather than
        # followed, so that sums are linear in the rows: they add, subtract and all-reduce. Its values are float32:
        # both dtypes subtract the same.
        shape, device = (max(folds, 1), 2 + m, 1 + m + t), torch.empty(0, device=device).device  # a bad one raises here
        try:
            self.sums = torch.zeros(shape, dtype=F64, device=device)
        except (RuntimeError, TypeError) as error:  # torch raises these if the shape is too large
            size = f"{math.prod(shape) * F64.itemsize / 1e9:,.0f} GB"
            raise MemoryError(
                f"sums of {m} features need {size}, more than is available; use fewer features"
            ) from error
        self.shift = torch.full((m + t,), math.nan, dtype=F64, device=device)

    @property
    def rows(self) -> Tensor:
        """Number of rows of positive weight in each fold, a view."""
        return self.sums[:, -1, 0]

    def update(self, phi: Tensor, y: Tensor, weight: Tensor | None = None, fold: Tensor | None = None) -> RidgeStats:
        """Add rows phi (n, m), y (n, t) or (n,), weight (n,) >= 0, fold (n,) integers or in turn; NaN or inf raises."""
        return self._add(phi, y, weight, fold, 1)

    def downdate(self, phi: Tensor, y: Tensor, weight: Tensor | None = None, fold: Tensor | None = None) -> RidgeStats:
        """Remove rows, as if they had never been added; with folds, `fold` is the fold that each was added to."""
        if self.folds and fold is None:
            raise ValueError(f"downdate with {self.folds} folds needs fold=, the fold that each row was added to")
        return self._add(phi, y, weight, fold, -1)

    @torch.no_grad()
    def _add(self, phi: Tensor, y: Tensor, weight: Tensor | None, fold: Tensor | None, sign: int) -> RidgeStats:
        m, t, device = self.num_features, self.num_targets, self.sums.device
        y = y[:, None] if isinstance(y, Tensor) and y.ndim == 1 and t == 1 else y
        _finite(_checks.matrix(phi, m, "phi"), "phi")
        _finite(_checks.matrix(y, t, "y"), "y")
        n = len(phi)
        if phi.ndim != 2 or y.shape != (n, t):
            raise ValueError(f"phi must be (n, {m}) and y (n, {t}); got {tuple(phi.shape)} and {tuple(y.shape)}")
        if weight is not None:
            _finite(_checks.matrix(weight, n, "weight"), "weight")
            if weight.ndim != 1 or bool((weight < 0).any()):
                raise ValueError(f"weight must be ({n},) and >= 0; got shape {tuple(weight.shape)}, {weight.min():g}")
        in_turn = (torch.arange(n) + int(self.rows.sum())) % len(self.rows)
        fold = in_turn if fold is None else torch.as_tensor(fold)
        if fold.is_floating_point() or fold.shape != (n,) or bool(((fold < 0) | (fold >= len(self.rows))).any()):
            raise ValueError(f"fold must be ({n},) integers below folds={self.folds}; got {fold}")
        fold = fold.to(device, torch.int64)
        counted = fold if weight is None else fold[weight.to(device) > 0]
        self.rows.add_(torch.bincount(counted, minlength=len(self.rows)), alpha=sign)
        if n and bool(self.shift.isnan().any()):
            self.reshift_(torch.cat([x[:BLOCK_ROWS].to(self.shift).mean(0) for x in (phi, y)]))
        before = self._squares()
        buffer = torch.empty(min(n, BLOCK_ROWS), 1 + m + t, dtype=self.block_dtype, device=device)
        for start in range(0, n, BLOCK_ROWS):
            block, z = slice(start, start + BLOCK_ROWS), buffer[: n - start]
            z[:, 0] = 1
            for x, shift, out in ((phi, self.shift[:m], z[:, 1 : 1 + m]), (y, self.shift[m:], z[:, 1 + m :])):
                torch.sub(x[block].to(device), shift.to(z.dtype), out=out)
            if weight is not None:
                z.mul_(weight[block].to(self.sums).sqrt().to(z.dtype)[:, None])
            for f, sums in enumerate(self.sums):
                _accumulate(sums, z[fold[block] == f] if self.folds else z, sign)
        self.sums[:, -1, 1 : 1 + m].add_(self._squares() - before, alpha=_rounding(phi.dtype) ** 2)
        return self

    def _squares(self) -> Tensor:
        """Sums of squares of each feature about 0, for each fold: (folds, m)."""
        m, shift = self.num_features, self.shift[: self.num_features].nan_to_num(0.0)
        about_shift = self.sums[:, 1:-1, 1 : 1 + m].diagonal(dim1=1, dim2=2)
        return about_shift + (2 * self.sums[:, 0, 1 : 1 + m] + self.sums[:, 0, :1] * shift) * shift

    def merge(self, other: RidgeStats) -> RidgeStats:
        """Add the rows of other statistics to these, in place; `a + b` and `a - b` make new ones."""
        same = isinstance(other, RidgeStats) and other.sums.shape == self.sums.shape
        if not same or self.block_dtype != other.block_dtype:
            raise ValueError(f"num_features, num_targets, folds and block_dtype must agree; got {self} and {other}")
        if bool(self.shift.isnan().any()):
            self.shift.copy_(other.shift)
        if not torch.equal(self.shift, other.shift.to(self.shift)) and bool(other.rows.any()):
            other = copy.deepcopy(other).reshift_(self.shift)
        self.sums.add_(other.sums.to(self.sums))
        self.note = self.note if self.note == other.note else ""
        return self

    def __add__(self, other: RidgeStats) -> RidgeStats:
        return copy.deepcopy(self).merge(other)

    def __sub__(self, other: RidgeStats) -> RidgeStats:
        negative = copy.deepcopy(other)
        negative.sums.neg_()
        return copy.deepcopy(self).merge(negative)

    def tensors(self) -> list[Tensor]:
        """The sums themselves, for all_reduce: added up over workers they are merged, after `reshift_` to one shift."""
        return [self.sums]

    def reshift_(self, shift: Tensor) -> RidgeStats:
        """Express the sums about another origin (m + t,), in place; exact but for rounding, least near the means."""
        shift = _checks.finite(_checks.matrix(shift, self.shift.numel(), "shift"), "shift").float().to(self.shift)
        for sums in self.sums:
            _translate(sums, (self.shift - shift).nan_to_num(0.0))  # NaN: nothing to move yet
        self.shift.copy_(shift)
        return self

    def select(self, features: Tensor) -> RidgeStats:
        """The sums of some features only, by their indices, in that order, as if only these had been added."""
        m, device = self.num_features, self.sums.device
        features = torch.as_tensor(features, device=device)
        outside = features.is_floating_point() or features.ndim != 1 or not features.numel()
        if outside or int(features.min()) < 0 or int(features.max()) >= m or len(features.unique()) < len(features):
            raise ValueError(f"features must be different integers below {m}; got {features}")
        chosen = RidgeStats(
            len(features), self.num_targets, folds=self.folds, block_dtype=self.block_dtype, device=device
        )
        gram = self.sums[:, 1:-1, 1 : 1 + m]
        gram = (gram.triu() + gram.triu(1).mT)[:, features][:, :, features]
        targets = torch.arange(1 + m, 1 + m + self.num_targets, device=device)
        columns = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), 1 + features, targets])
        chosen.sums[:, 0], chosen.sums[:, -1] = self.sums[:, 0, columns], self.sums[:, -1, columns]
        chosen.sums[:, 1:-1, 1 : 1 + len(features)] = gram.triu()
        chosen.sums[:, 1:-1, 1 + len(features) :] = self.sums[:, 1 + features][:, :, targets]
        chosen.shift.copy_(self.shift[columns[1:] - 1])
        return chosen

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sums about the means: phi'phi (m, m), phi'y (m, t) and y^2 (t,), for other algorithms."""
        sums = self._sums(None)
        m, n, first = self.num_features, float(sums[0, 0]), sums[0, 1:]
        both = torch.addr(sums[1:-1, 1:], first[:m], first, alpha=-1 / n)
        gram = both[:, :m].triu()
        return gram + gram.triu(1).T, both[:, m:], sums[-1, 1 + m :] - first[m:].square() / n

    def factor(self, num_features: int | None = None, *, intercept: bool = True) -> RidgeFactor:
        """The costly part of `solve`, for the first `num_features` features: factor once, solve many."""
        return self._factor(self._sums(num_features, intercept=intercept), intercept)

    @overload
    def solve(
        self, lam: float | str = "gcv", *, num_features: int | None = None, intercept: bool = True
    ) -> RidgeSolution: ...
    @overload
    def solve(
        self, lam: Sequence[float], *, num_features: int | None = None, intercept: bool = True
    ) -> list[RidgeSolution]: ...
    def solve(self, lam: Any = "gcv", *, num_features: int | None = None, intercept: bool = True) -> Any:
        """The ridge solution; one lam serves all targets.

        Args:
            lam: a number >= 0; several, for a list of solutions; "gcv", the least generalised cross-validation; or
                "kfold", the least squared error on held-out folds.
            num_features: use only the first num_features features; default: all.
            intercept: fit b. Without it, nothing is centred and b is zero, as in Ridge(fit_intercept=False).

        Example:
            >>> phi = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
            >>> RidgeStats(3, 1).update(phi, 2 * phi[:, 1] + 1).solve(0.0).predict(torch.ones(1, 3))
            tensor([[3.]])
        """
        if isinstance(lam, str):
            _checks.choose(lam, ["gcv", "kfold"], "lam")
            score = self._held_out(num_features, intercept) if lam == "kfold" else None
            return self.factor(num_features, intercept=intercept).search(score)
        factor = self.factor(num_features, intercept=intercept)
        several = isinstance(lam, Iterable) and getattr(lam, "ndim", 1) > 0  # a tensor of no dimension is a number
        return [factor.solve(x) for x in lam] if several else factor.solve(lam)

    def discriminant(self, shrinkage: float = 0.0, *, num_features: int | None = None) -> LinearSolution:
        """Linear discriminant analysis from the same sums, for one-hot y: softmax of `predict(phi)` is the posterior.

        Args:
            shrinkage: 0 to 1, the share of the within-class covariance that is replaced by its mean variance, as in
                scikit-learn's LinearDiscriminantAnalysis(solver="lsqr"). Weights are about the mean of all rows.
            num_features: use only the first num_features features; default: all.

        Example:
            >>> phi, y = torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.eye(2)[[0, 0, 1, 1]]
            >>> RidgeStats(1, 2).update(phi, y).discriminant().predict(phi).argmax(1)
            tensor([0, 0, 1, 1])
        """
        if not 0 <= shrinkage <= 1:
            raise ValueError(f"shrinkage must be from 0 to 1; got {shrinkage!r}")
        sums = self._sums(num_features)
        k, n = len(sums) - 2, float(sums[0, 0])
        mean = sums[0, 1 : 1 + k] / n
        _translate(sums, torch.cat([-mean, self.shift[self.num_features :]]))
        counts, squares = sums[0, 1 + k :], sums[-1, 1 + k :]
        if float((squares - counts).abs().max()) > 1e-6 * n or abs(float(counts.sum()) - n) > 1e-6 * n:
            raise ValueError(f"y must be one-hot; its columns sum to {counts.tolist()}, squared to {squares.tolist()}")
        if float(counts.min()) < 1e-9 * n:
            raise ValueError(f"class {int(counts.argmin())} has no rows; leave it out of y, or add rows of it")
        means = sums[1:-1, 1 + k :] / counts  # (k, t)
        within = (sums[1:-1, 1 : 1 + k] - (means * counts) @ means.T) / n
        values, vectors, above = _spectrum(within, _noise(sums) / n)
        values = (1 - shrinkage) * values + shrinkage * values.mean()
        condition = condition_of(values)
        if not (shrinkage or bool(above.all())) or condition * self._tolerance(k) >= 1:
            raise ValueError(f"singular covariance, condition number {condition:.1e}: use shrinkage > 0")
        weight = ((vectors / values) @ (vectors.T @ means)).T.contiguous()
        bias = (counts / n).log() - (weight * means.T).sum(1) / 2 - weight @ (mean + self.shift[:k])
        return LinearSolution(weight, bias, condition)

    def _tolerance(self, k: int) -> float:
        """Eigenvalues below this part of the largest are rounding: k eps, or the largest error measured in float32."""
        double = k * torch.finfo(F64).eps
        return double if self.block_dtype == F64 else max(double, 4 * torch.finfo(torch.float32).eps)

    def _sums(self, num_features: int | None, folds: slice = slice(None), *, intercept: bool = True) -> Tensor:
        """A copy of the sums over folds, for the first features: (2 + k, 1 + k + t), about 0 without intercept."""
        m = self.num_features
        k = m if num_features is None else _checks.positive_int(num_features, "num_features")
        if k > m:
            raise ValueError(f"num_features must be at most {m}, the features of the sums; got {k}")
        if float(self.rows.min()) < 0 or not bool(self.rows.any()):
            raise ValueError(f"no rows to solve for, or more removed than added: {self.rows.tolist()} in the folds")
        weight = float(self.sums[:, 0, 0].sum())
        if weight <= 0:
            raise ValueError(f"weights of {int(self.rows.sum())} rows sum to {weight:g}, rounded: scale the weights up")
        sums = torch.cat([self.sums[folds, : 1 + k], self.sums[folds, -1:]], 1).sum(0)
        if not bool(sums.isfinite().all()):
            raise ValueError("the sums overflowed: scale phi and y down, or use block_dtype=torch.float64")
        sums = torch.cat([sums[:, : 1 + k], sums[:, 1 + m :]], 1)
        if not intercept:
            _translate(sums, self._origin(k))
        return sums

    def _origin(self, k: int) -> Tensor:
        """The shift of the first k features and of the targets: (k + t,)."""
        return torch.cat([self.shift[:k], self.shift[self.num_features :]])

    def _factor(self, sums: Tensor, intercept: bool) -> RidgeFactor:
        k, n, first = len(sums) - 2, float(sums[0, 0]), sums[0, 1:]
        if not intercept:
            first = torch.zeros_like(first)  # sums about 0, taken for centred ones
        centred = torch.addr(sums[1:-1, 1:], first[:k], first, alpha=-1 / n)  # (k, k + t)
        noise = _noise(sums)
        values, vectors, above = _spectrum(centred[:, :k], noise)
        keep = above & (values > self._tolerance(k) * values[-1])
        # Rows about their mean span one direction less; where almost all were removed, rounding stands above the rest.
        rows = int(sums[-1, 0])
        keep[: max(k - (rows - intercept), 0)] = False
        if not bool(keep.any()) and float(centred.diagonal().max()) > 0:
            warnings.warn(
                f"none of {k} features varies by more than its rounding, so that no feature gets a weight; take "
                "the mean of the features off before they are rounded, or compute them in float64",
                stacklevel=4,
            )
        vectors, target = vectors[:, keep], vectors[:, keep].T @ centred[:, k:]
        mean = first / n + self._origin(k) if intercept else first
        power = sums[-1, 1 + k :] - first[k:].square() / n
        precise = noise[(centred.diagonal() > noise) & (noise > 0)]
        floor = float(precise.min()) if len(precise) else 0.0
        return RidgeFactor(values[keep], vectors, target, mean, power, n, rows, condition_of(values), floor, intercept)

    def _held_out(self, num_features: int | None, intercept: bool) -> Callable[[Tensor], Tensor]:
        """Squared error on the folds left out, mean over rows and targets, as a function of lams (L,) -> (L,)."""
        if not self.folds:
            raise ValueError("lam='kfold' needs folds: make the statistics with folds=K, or use lam='gcv'")
        total, parts = self._sums(num_features, intercept=intercept), []
        k, n = len(total) - 2, float(total[0, 0])
        for f in range(self.folds):
            held = self._sums(num_features, slice(f, f + 1), intercept=intercept)
            if held[-1, 0] == total[-1, 0] or held[0, 0] >= n:
                raise ValueError(f"all rows are in fold {f}, or all weight: spread them over the {self.folds} folds")
            factor = self._factor(total - held, intercept)
            if intercept:
                _translate(held, (held - total)[0, 1:] / factor.total_weight)  # about the means of the training rows
            gram, cross, squares = held[1:-1, 1 : 1 + k], held[1:-1, 1 + k :], held[-1, 1 + k :]
            parts.append((factor, gram.triu() + gram.triu(1).T, cross, squares))

        def error(lam: float) -> float:
            terms = ((factor.solve(lam).weight.T, *held) for factor, *held in parts)
            return sum(float((yy + (a * (gram @ a - 2 * cross)).sum(0)).mean()) for a, gram, cross, yy in terms) / n

        return lambda lams: torch.tensor([error(lam) for lam in lams.tolist()], dtype=F64)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that `save` writes."""
        return {"sums": self.sums, "shift": self.shift}

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Write the sums and `note` as a safetensors file; a file of that name is replaced at once or not at all.

        `extra` has further tensors for the same file, which the caller reads.
        """
        metadata = {**FORMAT, "block_dtype": str(self.block_dtype).removeprefix("torch."), "note": self.note}
        _io.write_tensors(path, {**self.state_dict(), **extra}, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: Any = None, extra: Iterable[str] = ()) -> RidgeStats:
        """Statistics that `save` wrote. The header is checked in full before any sum is read.

        `extra` names tensors that the file may have besides the sums.
        """
        with _io.open_tensors(path, device) as file:
            metadata, names = file.metadata() or {}, sorted(set(file.keys()) - set(extra))
            if {**metadata, **FORMAT} != metadata or names != ["shift", "sums"]:
                raise ValueError(f"{path} must be {FORMAT} with tensors shift, sums; got {metadata} with {names}")
            block_dtype = _checks.look_up(metadata.get("block_dtype"), BLOCK_DTYPES, f"block_dtype in {path}")
            found = {name: entry for name, entry in _io.tensor_header(file).items() if name in names}
            f, left, right = found["sums"][1] if len(found["sums"][1]) == 3 else (0, 0, 0)
            m, t = left - 2, right - left + 1
            if min(f, m, t) < 1 or found != {"shift": ("F64", (m + t,)), "sums": ("F64", (f, 2 + m, 1 + m + t))}:
                raise ValueError(f"{path}: shapes of shift and sums do not fit together; got {found}")
            stats = cls(m, t, folds=f if f > 1 else 0, block_dtype=block_dtype, device="meta")
            stats.shift, stats.sums = (file.get_tensor(name) for name in names)
        if not bool(stats.sums.isfinite().all()):
            raise ValueError(f"{path} holds NaN or infinite sums; make the statistics again")
        noted = stats.sums[:, -1, 1 : 1 + m]
        if not bool(noted.any()):  # earlier files have no precision: it is float32 or better
            noted.copy_(stats._squares() * _rounding(torch.float32) ** 2)
        stats.note = metadata.get("note", "")
        return stats

    def __repr__(self) -> str:
        layout = f"num_features={self.num_features}, num_targets={self.num_targets}, folds={self.folds}"
        return f"RidgeStats({layout}, block_dtype={self.block_dtype}, rows={int(self.rows.sum())})"


def _accumulate(sums: Tensor, z: Tensor, sign: int) -> None:
    """Add the rows z = (1, phi, y), sign +1, or remove them, by panels of columns that leave out the lower triangle."""
    width = len(sums) - 1
    with torch.autocast(z.device.type, enabled=False):  # it would round float32 products to bfloat16
        for i in range(0, width, PANEL):
            j = min(i + PANEL, width)
            panel, left, right = sums[i:j, i:], z[:, i:j].T, z[:, i:]
            if z.dtype == sums.dtype:
                panel.addmm_(left, right, alpha=sign)
            else:
                panel.add_(left @ right, alpha=sign)
    sums[-1, width:].add_(z[:, width:].to(sums).square().sum(0), alpha=sign)


def _translate(sums: Tensor, delta: Tensor) -> None:
    """Turn sums over (1, phi, y) into those over (1, phi + delta, y + delta), in place."""
    k, n, first = len(sums) - 2, sums[0, 0].clone(), sums[0, 1:].clone()
    sums[-1, 1 + k :].add_((2 * first[k:] + n * delta[k:]) * delta[k:])
    sums[1:-1, 1:].addr_(delta[:k], first).addr_(first[:k] + n * delta[:k], delta)
    sums[0, 1:].add_(n * delta)


def _noise(sums: Tensor) -> Tensor:
    """N at the top of this file: (k,)."""
    return sums[-1, 1 : len(sums) - 1].clamp_min(0)


def _spectrum(gram: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and vectors of a Gram matrix, upper triangle, and which of them are above rounding."""
    precise = (gram.diagonal() > noise).to(gram)
    values, vectors = torch.linalg.eigh(gram * precise * precise[:, None], UPLO="U")
    return values, vectors, values > vectors.square().T @ noise


def _rounding(dtype: torch.dtype) -> float:
    """r at the top of this file."""
    stored, computed = (torch.finfo(d).eps / 2 for d in (dtype, torch.promote_types(dtype, torch.float32)))
    return stored + ROUNDINGS * computed


def _finite(x: Tensor, name: str) -> None:
    # A sum is fifty times faster than a look at each value, and not finite where any value is not.
    if not bool(torch.isfinite(x.sum())):
        _checks.finite(x, name)
