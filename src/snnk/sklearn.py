"""scikit-learn estimators: random features, and linear models on them in closed form (section 3.3 of the paper).

    make_pipeline(StandardScaler(), SNNKFeatures(1024), Ridge())      # or in one estimator: SNNKRegressor(1024)

The regressor and the classifier standardise their inputs and keep float64 sums, not the data. `partial_fit` adds rows
to the sums; the mean and the scale of the inputs are those of the first batch. It leaves the solution to the next
prediction, so that a batch may be too small to solve with. `fit` solves at once.

Numbers may have any size that float64 has. A target below about 1e-18 or above 1e18 is fitted in a unit of its own
(`unit_`). An input so far from the others that features would keep no digit of it raises a ValueError with its row and
column.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from snnk import _checks
from snnk.maps import FeatureMap
from snnk.ridge.solutions import LinearSolution
from snnk.ridge.sums import RidgeStats
from snnk.tabular.config import make_random_map
from snnk.tabular.model import ROWS
from snnk.tabular.scaling import (
    CONSTANT,
    SMALLEST,
    Array,
    constant_scale,
    count_outliers,
    count_sizes,
    moments,
    standardise,
    target_unit,
)

__all__ = ["SNNKClassifier", "SNNKFeatures", "SNNKRegressor"]

FARTHEST = 2.0**60  # in units of the first batch; products of larger targets with features could overflow in float32
FLOATS = [np.float64, np.float32]  # features are computed in the dtype of the first rows


class _Features(BaseEstimator):  # type: ignore[misc]
    """The parameters of the feature map, and the features of standardised rows."""

    map_: FeatureMap
    mean_: Array
    scale_: Array

    def __init__(
        self,
        n_components: int = 1024,
        *,
        feature_map: str = "random-fourier",
        bandwidth: float = 1.0,
        standardize: bool = True,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.feature_map = feature_map
        self.bandwidth = bandwidth
        self.standardize = standardize
        self.random_state = random_state

    def _start(self, X: Array, weight: Array | None = None) -> None:
        """Draw the map, and take mean and scale from rows X (n, d) with weights (n,)."""
        d = X.shape[1]
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        n = _checks.positive_int(self.n_components, "n_components")
        even = n + n % 2  # cos and sin come in pairs; `_phi` leaves out the last feature of an odd number
        fm = make_random_map(self.feature_map, d, even, bandwidth=self.bandwidth, x_norm=d**0.5, seed=seed)
        self.map_ = fm.to(getattr(torch, X.dtype.name))
        self.mean_, self.scale_ = np.zeros(d), np.ones(d)
        if self.standardize:
            _refuse_outliers(X, "X")
            exponent, mean, variance = moments(X, weight)
            deviation = np.sqrt(variance)
            self.mean_ = np.ldexp(mean, exponent)
            scale = np.maximum(np.ldexp(deviation, exponent), SMALLEST)
            self.scale_ = np.where(deviation > CONSTANT * np.abs(mean), scale, constant_scale(self.mean_))

    def _inputs(self, X: Array) -> torch.Tensor:
        """Standardise rows (n, d), in the dtype of the map; all are checked before any is used."""
        x, dtype = standardise(X.astype(np.float64, copy=False), self.mean_, self.scale_), self.map_.projection.dtype
        # Above 1/eps, neither an angle nor a standardised value has a correct digit left.
        angles = self.feature_map == "random-fourier" or self.standardize
        far = ~(np.abs(x) <= (1 / torch.finfo(dtype).eps if angles else torch.finfo(dtype).max))
        if far.any():
            row, column = np.unravel_index(int(far.argmax()), far.shape)
            raise ValueError(
                f"X is {X[row, column]:g} at row {row}, column {column}: too far from the mean {self.mean_[column]:g}, "
                f"with scale {self.scale_[column]:g}, for {dtype}. Correct it, or scale the column"
            )
        return torch.from_numpy(x).to(dtype)

    def _phi(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.map_.phi(x)[:, : self.n_components]


def _refuse_outliers(values: Array, name: str) -> None:
    """Refuse rows (n, d) if a column has a few values that are so large that the others count for nothing."""
    for column, found in enumerate(values.T):
        outliers = count_outliers(count_sizes(found))
        if outliers:
            row = int(np.abs(found).argmax())
            raise ValueError(
                f"{name} has {outliers} of {len(values)} numbers in column {column} that are over a million times as "
                f"large as all others, up to {found[row]:g} in row {row}; the others would count for nothing. "
                "Correct them, or leave these rows out"
            )


class SNNKFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Features):  # type: ignore[misc]
    """Random features of rows, as inputs of any linear model.

    Args:
        n_components: number of features.
        feature_map: "random-fourier" (cos and sin) or "random-relu".
        bandwidth: standard deviation of the angles of "random-fourier"; a larger one fits finer detail.
        standardize: whether to centre and scale the columns first.
        random_state: seed or generator of the map.

    Example:
        >>> SNNKFeatures(64, random_state=0).fit_transform(np.random.rand(10, 3)).shape
        (10, 64)
    """

    def fit(self, X: Any, y: Any = None) -> SNNKFeatures:
        """Draw the features for rows X (n, d), and take their mean and scale; `y` is ignored."""
        self._start(validate_data(self, X, dtype=FLOATS))
        self._n_features_out = int(self.n_components)
        return self

    def transform(self, X: Any) -> Array:
        """Map rows (n, d) to features (n, n_components)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=FLOATS, reset=False)
        return self._phi(self._inputs(X)).numpy().astype(X.dtype, copy=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class _Closed(_Features):
    """Sums of features and targets, and their solution in closed form."""

    stats_: RidgeStats
    unit_: Array  # the unit of each target in the sums and in `solution_`: 1 for numbers of ordinary size
    _solved: tuple[LinearSolution, float] | None  # None until the sums of the rows so far are solved

    def __init__(
        self,
        n_components: int = 1024,
        *,
        feature_map: str = "random-fourier",
        bandwidth: float = 1.0,
        alpha: float | str = 1e-3,
        standardize: bool = True,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        super().__init__(
            n_components,
            feature_map=feature_map,
            bandwidth=bandwidth,
            standardize=standardize,
            random_state=random_state,
        )
        self.alpha = alpha

    @property
    def solution_(self) -> LinearSolution:
        """Weights and bias for all rows so far."""
        return self._solution()[0]

    @property
    def alpha_(self) -> float:
        """The penalty of `solution_`."""
        return self._solution()[1]

    def _solution(self) -> tuple[LinearSolution, float]:
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def _solve(self) -> tuple[LinearSolution, float]:
        """The solution of the sums, and its penalty."""
        solution = self.stats_.solve(self._checked_alpha())
        return solution, solution.lam

    def _checked_alpha(self) -> float | str:
        alpha: Any = self.alpha
        if isinstance(alpha, str) and alpha == "gcv":
            return alpha
        if not isinstance(alpha, numbers.Real) or not 0 <= float(alpha) < float("inf"):
            raise ValueError(f"alpha must be a number >= 0 or 'gcv'; got {alpha!r}")
        return float(alpha)

    def _add(self, X: Array, y: Array, weight: Array | None, first: bool) -> None:
        """Add rows X (n, d), y (n, t) to the sums; the first ones also start them."""
        self._checked_alpha()  # before any row is counted
        _refuse_outliers(y, "y")
        if first:
            block = torch.float32 if X.dtype == np.float32 else torch.float64  # products have the digits of X
            n = _checks.positive_int(self.n_components, "n_components")
            stats = RidgeStats(n, y.shape[1], block_dtype=block)  # too many features fail before they are drawn
            self._start(X, weight)
            self.stats_, self.unit_ = stats, np.zeros(y.shape[1])
        largest = np.abs(y).max(0)
        # The unit of a target is 0 until its first nonzero value, which determines it.
        unit = np.where(self.unit_ > 0, self.unit_, np.where(largest > 0, target_unit(largest), 0.0))
        scaled = standardise(y, 0.0, np.where(unit > 0, unit, 1.0))
        if not (np.abs(scaled) <= FARTHEST).all():
            raise ValueError(
                f"y has a number of {largest.max():g}, more than {FARTHEST:g} times those of the first batch; begin "
                "with a batch that is like the others, or scale y"
            )
        x = self._inputs(X)
        self.unit_, self._solved = unit, None
        for start in range(0, len(x), ROWS):
            part = slice(start, start + ROWS)
            w = None if weight is None else torch.from_numpy(weight[part])
            self.stats_.update(self._phi(x[part]), torch.from_numpy(scaled[part]), w)

    def _outputs(self, X: Any) -> Array:
        """Predictions or scores (n, t) for rows (n, d)."""
        check_is_fitted(self, "stats_")
        X = validate_data(self, X, dtype=FLOATS, reset=False)
        parts = [self.solution_.predict(self._phi(x).double()) for x in self._inputs(X).split(ROWS)]
        with np.errstate(over="ignore"):
            outputs = torch.cat(parts).numpy() * np.where(self.unit_ > 0, self.unit_, 1.0)
        if not np.isfinite(outputs).all():
            row = int(np.isfinite(outputs).all(1).argmin())
            raise ValueError(
                f"the prediction for row {row} is beyond the largest float64; X is far from the rows of training"
            )
        return outputs


class SNNKRegressor(RegressorMixin, _Closed):  # type: ignore[misc]
    """Ridge regression on random features: one pass, no iterations, exact `partial_fit`.

    Args:
        n_components, feature_map, bandwidth, standardize, random_state: as for SNNKFeatures.
        alpha: penalty, or "gcv" to choose it by generalised cross-validation.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(500, 2))
        >>> bool(SNNKRegressor(128, random_state=0).fit(X, np.sin(X[:, 0])).score(X, np.sin(X[:, 0])) > 0.99)
        True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> SNNKRegressor:
        """Fit rows X (n, d) with targets y (n,) or (n, t)."""
        self._fit(X, y, sample_weight, first=True)._solution()
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> SNNKRegressor:
        """Add rows; the next prediction solves for all rows so far."""
        return self._fit(X, y, sample_weight, first=not hasattr(self, "stats_"))

    def _fit(self, X: Any, y: Any, sample_weight: Any, first: bool) -> SNNKRegressor:
        X, y = validate_data(self, X, y, dtype=FLOATS, multi_output=True, y_numeric=True, reset=first)
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, X, dtype=np.float64)
        self._flat = y.ndim == 1
        self._add(X, y.astype(np.float64).reshape(len(y), -1), weight, first)
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
    """Least squares to one-hot classes, or a linear discriminant, on random features.

    Args:
        n_components, feature_map, bandwidth, standardize, random_state: as for SNNKFeatures.
        alpha: penalty, or "gcv" to choose it; with `discriminant`, its shrinkage, a number from 0 to 1.
        discriminant: compute a linear discriminant from the same sums instead of least squares.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(500, 2))
        >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
        >>> bool(SNNKClassifier(128, random_state=0).fit(X, y).score(X, y) > 0.95)
        True
    """

    classes_: Array
    class_count_: Array  # number of rows of each class, or the sum of their weights

    def __init__(
        self,
        n_components: int = 1024,
        *,
        feature_map: str = "random-fourier",
        bandwidth: float = 1.0,
        alpha: float | str = 1e-3,
        discriminant: bool = False,
        standardize: bool = True,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        super().__init__(
            n_components,
            feature_map=feature_map,
            bandwidth=bandwidth,
            alpha=alpha,
            standardize=standardize,
            random_state=random_state,
        )
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
        return self._fit(X, y, sample_weight, classes, first=not hasattr(self, "stats_"))

    def _fit(self, X: Any, y: Any, sample_weight: Any, classes: Any, first: bool) -> SNNKClassifier:
        X, y = validate_data(self, X, y, dtype=FLOATS, reset=first)
        check_classification_targets(y)
        if first:
            self.classes_ = np.unique(y if classes is None else classes)
            if len(self.classes_) < 2:
                raise ValueError(f"the classifier needs at least two classes; got 1 class, {self.classes_[0]!r}")
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y has classes {unknown} that are not among {self.classes_}; name all in the first call")
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, X, dtype=np.float64)
        one_hot = (y[:, None] == self.classes_).astype(np.float64)
        self._add(X, one_hot, weight, first)
        count = one_hot.sum(0) if weight is None else weight @ one_hot
        self.class_count_ = count if first else self.class_count_ + count
        return self

    def _solve(self) -> tuple[LinearSolution, float]:
        if not self.discriminant:
            return super()._solve()
        shrinkage, missing = float(self._checked_alpha()), self.classes_[self.class_count_ == 0]
        if len(missing):
            raise ValueError(f"a discriminant needs rows of every class; got none of {missing}: add some first")
        return self.stats_.discriminant(shrinkage), shrinkage

    def _checked_alpha(self) -> float | str:
        if not self.discriminant:
            return super()._checked_alpha()
        alpha: Any = self.alpha
        if not isinstance(alpha, numbers.Real) or not 0 <= float(alpha) <= 1:
            raise ValueError(f"alpha of a discriminant is its shrinkage, a number from 0 to 1; got {alpha!r}")
        return float(alpha)

    def decision_function(self, X: Any) -> Array:
        """Scores of the classes, (n, classes); for two classes their difference, (n,)."""
        outputs = self._outputs(X)
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict(self, X: Any) -> Array:
        """The class (n,) with the largest score for each row."""
        best = self._outputs(X).argmax(1)
        return self.classes_[best]
