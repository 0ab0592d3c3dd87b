"""Ridge regression and classification on features, in closed form from sums."""

from __future__ import annotations

import copy
import numbers
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_X_y, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor

from snnk import _checks
from snnk.ridge.solutions import LinearSolution
from snnk.ridge.sums import RidgeStats
from snnk.sklearn import frames
from snnk.sklearn.features import _Features, one_hot, refuse_outliers, repeat_rows, whole_numbers
from snnk.tabular.calibration import BOUNDS, FLOORS, PlattScaling
from snnk.tabular.learned import LearnedFeatures
from snnk.tabular.model import ROWS
from snnk.tabular.quality import FEWEST
from snnk.tabular.sample import MOST_ROWS, Held, content_hash
from snnk.tabular.scaling import Array, standardise, target_unit

FARTHEST = 2.0**60  # in units of the first batch; products of larger targets with features could overflow in float32
FOLDS = 5  # of a calibration on few rows
MOST_REPEATED = 1 << 16  # rows of a calibration, if weights are numbers of rows
RESERVED, MOST_RESERVED, ENOUGH = 0.1, 0.25, 200  # shares of rows that features are not learnt from, and their number
TANGENT = 2.0  # least-squares scores p and 1 - p have the log-odds 2 (2 p - 1) near p = 1/2


class _Solved(NamedTuple):
    """What follows from the sums of the rows so far."""

    solution: LinearSolution
    alpha: float
    calibration: PlattScaling | None


class _Rows(NamedTuple):
    """Rows that were added to the sums."""

    x: Tensor  # (n, d) standardised
    y: Tensor  # (n, t) in units of the target
    weight: Array  # (n,)
    factor: Array  # (n,)


def _checked_weight(sample_weight: Any, n: int) -> Array | None:
    if sample_weight is None:
        return None
    return _check_sample_weight(sample_weight, np.empty((n, 1)), dtype=np.float64, ensure_non_negative=True)


def _class_weights(stats: RidgeStats) -> Tensor:
    """Sums of the weights of rows by class, (k,), from the sums of one-hot classes."""
    m = stats.num_features
    return stats.sums[0, 0, 1 + m :] + stats.sums[0, 0, 0] * stats.shift[m:]


class _Closed(_Features):
    """Sums of features and targets, and their solution in closed form."""

    stats_: RidgeStats
    unit_: Array  # the unit of each target in the sums and in `solution_`: 1 for numbers of ordinary size
    _count: float  # number of rows, each counted as often as its weight
    _whole: bool  # whether all weights are whole numbers
    _solved: _Solved | None  # None until the sums of the rows so far are solved

    def __init__(
        self,
        n_components: int = 512,
        *,
        feature_map: str = "learned",
        bandwidth: float | str = "auto",
        alpha: float | str = "gcv",
        missing: str = "raise",
        standardize: bool = True,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        super().__init__(
            n_components,
            feature_map=feature_map,
            bandwidth=bandwidth,
            missing=missing,
            standardize=standardize,
            random_state=random_state,
        )
        self.alpha = alpha

    @property
    def solution_(self) -> LinearSolution:
        """Weights and bias for all rows so far."""
        return self._solution().solution

    @property
    def alpha_(self) -> float:
        """The penalty of `solution_`."""
        return self._solution().alpha

    def _solution(self) -> _Solved:
        if self._solved is None:
            stats = self.stats_
            if self._whole and self._count != float(stats.rows.sum()):
                stats = copy.deepcopy(stats)
                stats.rows.fill_(self._count)  # rows of weight 2 count twice in the score of GCV, too
            self._solved = self._solve(stats)
        return self._solved

    def _solve(self, stats: RidgeStats) -> _Solved:
        solution = stats.solve(self._checked_alpha())
        return _Solved(solution, solution.lam, None)

    def _checked_alpha(self) -> float | str:
        alpha: Any = self.alpha
        if isinstance(alpha, str) and alpha == "gcv":
            return alpha
        if not isinstance(alpha, numbers.Real) or not 0 <= float(alpha) < float("inf"):
            raise ValueError(f"alpha must be a number >= 0 or 'gcv'; got {alpha!r}")
        return float(alpha)

    def _add(self, rows: Any, y: Array, weight: Array | None, factor: Array | None, first: bool, names: Array) -> _Rows:
        """Add rows with targets y (n, t) to the sums; the first ones also start them.

        Args:
            rows: what `_read` returned.
            y: targets.
            weight, factor: weights of the rows and, times these, factors by their class, (n,).
            first: whether these rows start the sums.
            names: one column of targets (n,), numbers or names of classes, for the encoding of a frame.
        """
        self._checked_alpha()  # before any row is counted
        refuse_outliers(y, "y")
        if first:
            m = _checks.positive_int(self.n_components, "n_components")
            block = getattr(rows, "dtype", np.float64)  # products have the digits of X
            stats = RidgeStats(m, y.shape[1], block_dtype=torch.float32 if block == np.float32 else torch.float64)
            self.columns_ = frames.find_columns(rows, names, self.missing) if frames.is_table(rows) else None
            if self.columns_ is not None and weight is not None:  # errors have named the rows as they came
                counted, _ = repeat_rows(np.arange(len(rows)), weight, weight, MOST_ROWS)
                self.columns_ = frames.find_columns(rows.take(counted), names[counted], self.missing)
        numbers, keep = self._numbers(rows, fitted=True)
        y = y[keep]
        weight, factor = (None if w is None else w[keep] for w in (weight, factor))
        if first:
            self._scale(numbers, weight, keep)
        x = self._inputs(numbers, keep)
        largest = np.abs(y).max(0)
        # The unit of a target is 0 until its first nonzero value, which determines it.
        old = np.zeros(y.shape[1]) if first else self.unit_
        unit = np.where(old > 0, old, np.where(largest > 0, target_unit(largest), 0.0))
        scaled = torch.from_numpy(standardise(y, 0.0, np.where(unit > 0, unit, 1.0)))
        if not bool((scaled.abs() <= FARTHEST).all()):
            raise ValueError(
                f"y has a number of {largest.max():g}, more than {FARTHEST:g} times those of the first batch; begin "
                "with a batch that is like the others, or scale y"
            )
        added = _Rows(x, scaled, *(np.ones(len(x)) if w is None else w for w in (weight, factor)))
        if first:
            self._learn(added)
            self.stats_, self._count, self._whole = stats, 0.0, True
        self.unit_, self._solved = unit, None
        self._count += float(added.weight.sum())
        self._whole &= whole_numbers(added.weight)
        both = None if weight is None and factor is None else torch.from_numpy(added.weight * added.factor)
        for start in range(0, len(x), ROWS):
            part = slice(start, start + ROWS)
            self.stats_.update(self._phi(x[part]), scaled[part], None if both is None else both[part])
        return added

    def _learn(self, first: _Rows) -> None:
        """Make the map from the first rows."""
        self._make_map(*first)

    def _outputs(self, X: Any) -> Array:
        """Predictions or scores (n, t) for rows (n, d)."""
        check_is_fitted(self, "stats_")
        parts = [self.solution_.predict(self._phi(x).double()) for x in self._all_inputs(X).split(ROWS)]
        with np.errstate(over="ignore"):
            outputs = torch.cat(parts).numpy() * np.where(self.unit_ > 0, self.unit_, 1.0)
        if not np.isfinite(outputs).all():
            row = int(np.isfinite(outputs).all(1).argmin())
            raise ValueError(
                f"the prediction for row {row} is beyond the largest float64; X is far from the rows of training"
            )
        return outputs


class SNNKRegressor(RegressorMixin, _Closed):  # type: ignore[misc]
    """Ridge regression on features: exact `partial_fit`, and no iterations but those that learn the features.

    Args:
        n_components, bandwidth, missing, standardize, random_state: as for SNNKFeatures.
        feature_map: "learned" (from the rows of `fit`, or the first batch of `partial_fit`; fewer than 200 rows have
            random ones), "learned-deep" (two layers), "random-fourier" or "random-relu".
        alpha: penalty, or "gcv" to choose it by generalised cross-validation.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(500, 2))
        >>> bool(SNNKRegressor(128, random_state=0).fit(X, np.sin(X[:, 0])).score(X, np.sin(X[:, 0])) > 0.99)
        True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SNNKRegressor:
        """Fit rows X (n, d) with targets y (n,) or (n, t)."""
        self._fit(X, y, sample_weight, first=True, least=2 if self.alpha == "gcv" else 1)._solution()
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> SNNKRegressor:
        """Add rows; the next prediction solves for all rows so far."""
        return self._fit(X, y, sample_weight, first=not hasattr(self, "stats_"))

    def _fit(self, X: Any, y: Any, sample_weight: Any, first: bool, least: int = 1) -> SNNKRegressor:
        rows = self._read(X, first)
        options = {"multi_output": True, "y_numeric": True, "ensure_min_samples": least, "estimator": self}
        _, y = check_X_y(np.zeros((len(rows), 1)), y, **options)
        weight = _checked_weight(sample_weight, len(rows))
        targets = y.astype(np.float64).reshape(len(y), -1)
        self._add(rows, targets, weight, None, first, targets[:, 0])
        self._flat = y.ndim == 1
        return self

    def predict(self, X: Any) -> Array:
        """Predict the targets, (n,) or (n, t), of rows (n, d)."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self._flat else outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class SNNKClassifier(ClassifierMixin, _Closed):  # type: ignore[misc]
    """Least squares to one-hot classes, or a linear discriminant, on features, with calibrated probabilities.

    The probabilities are those of `snnk.tabular.calibration`: the softmax of the logarithms of the scores times one
    number, plus one number per class, of largest likelihood on rows that determined neither the scores nor the
    features. Up to 4,096 rows are kept for that, those with the least hashes. Scores without them come from the sums
    minus these rows, in five parts if there are few. If features are learnt, these rows are a tenth of all, or up to a
    quarter of less than 2,000. Where these rows are too few for a number per class, the frequencies of the classes give
    it. `predict` returns the class of largest probability.

    Args:
        n_components, bandwidth, missing, standardize, random_state: as for SNNKFeatures.
        feature_map: as for SNNKRegressor.
        alpha: penalty, or "gcv" to choose it; with `discriminant`, its shrinkage, a number from 0 to 1.
        class_weight: factors of the weights of rows, by class: None, a dict, or "balanced" for factors that give all
            classes the same weight. Probabilities are those of rows that are weighted so.
        discriminant: compute a linear discriminant from the same sums instead of least squares.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(500, 2))
        >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
        >>> model = SNNKClassifier(128, random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.95), model.predict_proba(X[:3]).shape
        (True, (3, 2))
    """

    classes_: Array
    class_count_: Array  # number of rows of each class, or the sum of their weights
    _held: Held  # a few rows for the calibration; its targets are (one-hot class, weight, factor)
    _reserved: float  # the share of rows that features were not learnt from, those with the least hashes

    def __init__(
        self,
        n_components: int = 512,
        *,
        feature_map: str = "learned",
        bandwidth: float | str = "auto",
        alpha: float | str = "gcv",
        class_weight: str | dict[Any, float] | None = None,
        discriminant: bool = False,
        missing: str = "raise",
        standardize: bool = True,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        super().__init__(
            n_components,
            feature_map=feature_map,
            bandwidth=bandwidth,
            alpha=alpha,
            missing=missing,
            standardize=standardize,
            random_state=random_state,
        )
        self.class_weight = class_weight
        self.discriminant = discriminant

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SNNKClassifier:
        """Fit rows X (n, d) with classes y (n,)."""
        self._fit(X, y, sample_weight, None, first=True)._solution()
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> SNNKClassifier:
        """Add rows; the next prediction solves for all rows so far.

        Args:
            X, y: rows (n, d) and their classes (n,).
            classes: all classes; the first call needs them unless its rows have all.
            sample_weight: weights of the rows (n,).
        """
        if self.class_weight == "balanced":
            raise ValueError(
                "class_weight='balanced' is not supported for partial_fit, where later rows are not known; compute "
                "weights with sklearn.utils.class_weight.compute_class_weight and give them as a dict"
            )
        return self._fit(X, y, sample_weight, classes, first=not hasattr(self, "stats_"))

    def _fit(self, X: Any, y: Any, sample_weight: Any, classes: Any, first: bool) -> SNNKClassifier:
        rows = self._read(X, first)
        shape: tuple[int, ...] = getattr(y, "shape", ())
        if len(shape) == 2 and shape[1] > 1:
            raise ValueError(
                f"y should be a 1d array of classes; got an array of shape {shape}. For several targets use "
                "sklearn.multioutput.MultiOutputClassifier"
            )
        _, y = check_X_y(np.zeros((len(rows), 1)), y, estimator=self)
        check_classification_targets(y)
        if first:
            self.classes_ = np.unique(y if classes is None else classes)
            if len(self.classes_) < 2:
                raise ValueError(f"the classifier needs at least two classes; got 1 class, {self.classes_[0]!r}")
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y has classes {unknown} that are not among {self.classes_}; name all in the first call")
        targets, weight = one_hot(y, self.classes_), _checked_weight(sample_weight, len(rows))
        factor = self._factors(targets, y, weight)
        added = self._add(rows, targets, weight, factor, first, y.astype(str))
        count = added.weight @ added.y.numpy()
        self.class_count_ = count if first else self.class_count_ + count
        held = Held.empty(added.x.shape[1], len(self.classes_) + 2) if first else self._held
        hashes = content_hash(added.x)
        least = hashes.argsort(stable=True)[: held.most]
        extra = torch.from_numpy(np.stack([added.weight, added.factor], 1))
        self._held = held.merge(Held(hashes[least], added.x[least], torch.cat([added.y, extra], 1)[least]))
        return self

    def _factors(self, targets: Array, y: Array, weight: Array | None) -> Array | None:
        """Factors of the rows (n,) by `class_weight`; "balanced" takes weights for numbers of rows."""
        if self.class_weight is None:
            return None
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            count = targets.sum(0) if weight is None else weight @ targets
            found = count.sum() / (len(count) * np.where(count > 0, count, 1.0))
        else:
            found = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        return found[targets.argmax(1)]

    def _learn(self, first: _Rows) -> None:
        n = float(first.weight.sum()) if whole_numbers(first.weight) else len(first.x)
        self._reserved = min(max(ENOUGH / max(n, 1), RESERVED), MOST_RESERVED)
        self._make_map(*first, classes=True, reserved=self._reserved)

    def _solve(self, stats: RidgeStats) -> _Solved:
        if self.discriminant:
            shrinkage, missing = float(self._checked_alpha()), self.classes_[self.class_count_ == 0]
            if len(missing):
                raise ValueError(f"a discriminant needs rows of every class; got none of {missing}: add some first")
            solution = stats.discriminant(shrinkage)
            return _Solved(solution, shrinkage, self._calibrate(stats, shrinkage))
        solved = super()._solve(stats)
        return solved._replace(calibration=self._calibrate(stats, solved.alpha))

    def _calibrate(self, stats: RidgeStats, alpha: float) -> PlattScaling:
        """The calibration on held rows, with scores from the sums without them."""
        k = len(self.classes_)
        held = self._held.whole()
        hashes, x, both = held.tensors()
        y, weight, factor = both[:, :k], both[:, k].numpy(), both[:, k + 1].numpy()
        label = y.argmax(1).numpy()
        order = np.lexsort((label, hashes.numpy()))
        if isinstance(self.map_, LearnedFeatures):
            clean = hashes.numpy() < self._reserved * 2.0**63
            clean |= ~np.isin(label, label[clean])  # a class without such rows has its others, as it must have some
            order = order[clean[order]]
        rows, weights = repeat_rows(order, weight, factor, MOST_REPEATED if self._whole else 0)
        total = self._count if self._whole else float(stats.rows.sum())
        parts = np.array_split(np.arange(len(rows)), FOLDS if len(rows) * 2 * FOLDS > total else 1)
        if held.inputs < FEWEST or len(rows) < FEWEST:
            return PlattScaling(1.0 if self.discriminant else TANGENT, (0.0,) * k)
        scores = torch.empty(len(rows), k, dtype=torch.float64)
        for part in parts:
            left = copy.deepcopy(stats)
            pieces = [torch.from_numpy(part[i : i + ROWS]) for i in range(0, len(part), ROWS)]
            for piece in pieces:
                own = torch.from_numpy(rows)[piece]
                left.downdate(self._phi(x[own]), y[own], torch.from_numpy(weights)[piece])
            if self.discriminant and float(_class_weights(left).min()) < 1e-8 * float(left.sums[0, 0, 0]):
                return PlattScaling(1.0, (0.0,) * k)  # a class would have no rows; softmax of the scores is a posterior
            solution = left.discriminant(alpha) if self.discriminant else left.solve(alpha)
            for piece in pieces:
                scores[piece] = solution.predict(self._phi(x[torch.from_numpy(rows)[piece]]).double())
        floors = (0.0,) if self.discriminant else FLOORS
        labels, counted = torch.from_numpy(label[rows]), torch.from_numpy(weights)
        return PlattScaling.fit(self._bounded(scores), labels, counted, floors)

    def _bounded(self, scores: Tensor) -> Tensor:
        """Scores that no row can have far from 0 to 1, between which least squares looks for probabilities.

        Where features fit almost every row, a few scores of other rows are huge, and would determine the calibration.
        """
        return scores if self.discriminant else scores.clamp(*BOUNDS)

    def _checked_alpha(self) -> float | str:
        if not self.discriminant:
            return super()._checked_alpha()
        alpha: Any = self.alpha
        if not isinstance(alpha, numbers.Real) or not 0 <= float(alpha) <= 1:
            raise ValueError(f"alpha of a discriminant is its shrinkage, a number from 0 to 1; got {alpha!r}")
        return float(alpha)

    @property
    def calibration_(self) -> PlattScaling:
        """How scores become probabilities, for all rows so far."""
        found = self._solution().calibration
        assert found is not None
        return found

    def _logits(self, X: Any) -> Tensor:
        scores = torch.from_numpy(self._outputs(X))  # first, as it raises an error if there is no fit
        return self.calibration_.logits(self._bounded(scores))

    def decision_function(self, X: Any) -> Array:
        """Logarithms of the probabilities, but for one number per row, (n, classes); for two the log-odds, (n,)."""
        logits = self._logits(X).numpy()
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, (n, classes), in the order of `classes_`."""
        return self._logits(X).softmax(1).numpy()

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the probabilities, (n, classes)."""
        return self._logits(X).log_softmax(1).numpy()

    def predict(self, X: Any) -> Array:
        """The class (n,) with the largest probability for each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]
