"""Features of rows: standardised inputs, a map that is learnt from the first rows or drawn, and the transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array, check_consistent_length, check_random_state
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from snnk import _checks
from snnk.maps import FeatureMap
from snnk.sklearn import frames
from snnk.tabular.columns import MISSING, Columns
from snnk.tabular.config import LEARNED, MAPS, make_random_map
from snnk.tabular.learned import choose_bandwidth, learn
from snnk.tabular.model import ROWS
from snnk.tabular.sample import MOST_NUMBERS, MOST_ROWS, content_hash
from snnk.tabular.scaling import (
    CONSTANT,
    SMALLEST,
    Array,
    constant_scale,
    count_outliers,
    count_sizes,
    moments,
    standardise,
)
from snnk.tabular.scan import FEW_CLASSES

if TYPE_CHECKING:
    import pyarrow as pa

FLOATS = [np.float64, np.float32]  # features are computed in the dtype of the first rows
FEW_ROWS = 200  # with fewer, a tenth of them cannot choose among learnt features, and random ones are drawn


class _Features(BaseEstimator):  # type: ignore[misc]
    """The parameters of the feature map, and the features of standardised rows."""

    map_: FeatureMap
    mean_: Array
    scale_: Array
    columns_: Columns | None  # the encoding of a frame; None if X was an array or had numbers only

    def __init__(
        self,
        n_components: int = 512,
        *,
        feature_map: str = "learned",
        bandwidth: float | str = "auto",
        missing: str = "raise",
        standardize: bool = True,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.feature_map = feature_map
        self.bandwidth = bandwidth
        self.missing = missing
        self.standardize = standardize
        self.random_state = random_state

    def _read(self, X: Any, first: bool) -> Array | pa.Table:
        """Check rows: an array (n, d), which may have NaN for missing values, or the Arrow table of a frame."""
        missing = _checks.choose(self.missing, MISSING, "policy for missing values")
        columns = None if first else self.columns_
        if columns is not None and not hasattr(X, "__arrow_c_stream__"):
            names = ", ".join(c.name for c in columns.inputs)
            raise TypeError(f"X must be a frame with the columns {names}; got {type(X).__name__}")
        if columns is not None or (first and frames.needs_columns(X)):
            if not self.standardize:
                raise ValueError("frames with texts, categories or dates are standardised; use standardize=True")
            return frames.to_arrow(validate_data(self, X, skip_check_array=True, reset=first))
        finite = True if missing == "raise" else "allow-nan"
        try:
            return validate_data(self, X, dtype=FLOATS, ensure_all_finite=finite, reset=first)
        except ValueError as error:
            if missing == "raise" and "contains NaN" in str(error):
                raise ValueError(
                    f"{error}\nFor {type(self).__name__}, choose missing='mean' or missing='drop'."
                ) from None
            raise

    def _numbers(self, rows: Array | pa.Table, *, fitted: bool) -> tuple[Array, Array]:
        """Inputs before they are standardised, (k, d), of the rows to keep, and which these are (n,)."""
        if self.columns_ is not None:
            x, keep = frames.encode(self.columns_, rows, fitted=fitted)
            numbers = x.double().numpy()
        else:
            keep = np.ones(len(rows), bool) & ~(np.isnan(rows).any(1) & (self.missing == "drop"))
            numbers = rows if keep.all() else rows[keep]
        if not keep.any():
            raise ValueError("no rows are left: each has a missing value, and is dropped")
        return numbers, keep

    def _all_inputs(self, X: Any) -> Tensor:
        """Standardised inputs of rows to predict or to transform, none of which can be dropped."""
        X, keep = self._numbers(self._read(X, first=False), fitted=False)
        if not keep.all():
            raise ValueError(
                f"X has a missing value in row {int(keep.argmin())}; missing='drop' leaves out rows in fit only. Fill "
                "it, leave the row out, or fit with missing='mean'"
            )
        return self._inputs(X, keep)

    def _scale(self, X: Array, weight: Array | None, keep: Array) -> None:
        """Take mean and scale from rows X (n, d) with weights (n,)."""
        d = X.shape[1]
        self._dtype = getattr(torch, X.dtype.name)
        self.mean_, self.scale_ = np.zeros(d), np.ones(d)
        if self.standardize and self.columns_ is None:
            known = ~np.isnan(X)
            filled = np.where(known, X, 0.0)
            refuse_outliers(filled, "X", keep)
            weights = known if weight is None else known * weight[:, None]
            exponent, mean, variance = moments(filled, np.where(weights.any(0), weights, 1.0))
            deviation = np.sqrt(variance)
            self.mean_ = np.ldexp(mean, exponent)
            scale = np.maximum(np.ldexp(deviation, exponent), SMALLEST)
            self.scale_ = np.where(deviation > CONSTANT * np.abs(mean), scale, constant_scale(self.mean_))

    def _inputs(self, X: Array, keep: Array) -> Tensor:
        """Standardise rows (n, d), in the dtype of the map; all are checked before any is used.

        `keep` marks these rows among those that came in, for errors.
        """
        x = standardise(X.astype(np.float64, copy=False), self.mean_, self.scale_)
        x = np.where(np.isnan(X), 0.0, x)  # the mean
        # Above 1/eps, neither an angle nor a standardised value has a correct digit left.
        angles = self.feature_map != "random-relu" or self.standardize
        far = ~(np.abs(x) <= (1 / torch.finfo(self._dtype).eps if angles else torch.finfo(self._dtype).max))
        if far.any():
            row, column = np.unravel_index(int(far.argmax()), far.shape)
            place = np.flatnonzero(keep)[row]
            raise ValueError(
                f"X is {X[row, column]:g} at row {place}, column {column}: too far from the mean "
                f"{self.mean_[column]:g}, with scale {self.scale_[column]:g}, for {self._dtype}. Correct it, or scale "
                "the column"
            )
        return torch.from_numpy(x).to(self._dtype)

    def _make_map(
        self,
        x: Tensor,
        y: Tensor | None = None,
        weight: Array | None = None,
        factor: Array | None = None,
        *,
        classes: bool = False,
        reserved: float = 0.0,
    ) -> None:
        """Learn or draw the map for inputs x (n, d) and targets y (n, t).

        Nothing is learnt from the share `reserved` of the rows, those with the least hashes. The rows have weights (n,)
        and, times these, factors (n,) by their class.
        """
        n, d = _checks.positive_int(self.n_components, "n_components"), x.shape[1]
        name, bandwidth = _checks.choose(self.feature_map, MAPS, "feature map"), self._checked_bandwidth()
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        found: FeatureMap | None = None
        if y is not None and self._learns():
            weight, factor = (np.ones(len(x)) if w is None else w for w in (weight, factor))
            rows, weights = _learning_rows(x, y, weight, factor, reserved)
            if name in LEARNED and len(rows) >= FEW_ROWS:
                deep = name == "learned-deep"
                found = learn(x[rows], y[rows], n, classes=classes, weight=weights, deep=deep, seed=seed)
            elif bandwidth == "auto" and len(rows) >= 2:
                bandwidth = choose_bandwidth(x[rows], y[rows], min(n, 1024), seed)
        if found is None:
            name = "random-fourier" if name in LEARNED else name
            value = 1.0 if isinstance(bandwidth, str) else bandwidth
            even = n + n % 2  # cos and sin come in pairs; `_phi` leaves out the last feature of an odd number
            found = make_random_map(name, d, even, bandwidth=value, x_norm=d**0.5, seed=seed)
        self.map_ = found.to(self._dtype)

    def _learns(self) -> bool:
        """Whether the map depends on targets."""
        return self.feature_map in LEARNED or (self.feature_map == "random-fourier" and self.bandwidth == "auto")

    def _checked_bandwidth(self) -> float | str:
        bandwidth: Any = self.bandwidth
        if isinstance(bandwidth, str) and bandwidth == "auto":
            return bandwidth
        if not _checks.is_number(bandwidth):
            raise ValueError(f"bandwidth must be a number above 0 or 'auto'; got {bandwidth!r}")
        return _checks.positive(float(bandwidth), "bandwidth")

    def _phi(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.map_.phi(x)[:, : self.n_components]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing != "raise"
        return tags


def whole_numbers(weight: Array) -> bool:
    """Whether weights (n,) are numbers of equal rows."""
    return bool((weight == np.rint(weight)).all())


def repeat_rows(rows: Array, weight: Array, factor: Array, most: int) -> tuple[Array, Array]:
    """Indices of rows, each as often as its weight if that is a whole number, and weights (k,) of what is returned.

    Args:
        rows: indices (r,).
        weight, factor: weights and factors of all rows (n,), which are multiplied.
        most: number of rows above which none is repeated.
    """
    rows = rows[weight[rows] > 0]
    if whole_numbers(weight) and weight[rows].sum() <= most:
        rows = np.repeat(rows, weight[rows].astype(np.int64))
        return rows, factor[rows]
    return rows, (weight * factor)[rows]


def _learning_rows(x: Tensor, y: Tensor, weight: Array, factor: Array, reserved: float) -> tuple[Tensor, Tensor]:
    """Indices of rows to learn from, in an order that depends on their contents alone, and weights for the loss.

    Equal rows are neighbours, so that they are not on both sides of a split.
    """
    hashes = content_hash(x).numpy()
    order = np.lexsort((*y.numpy().T, hashes))
    most = min(MOST_ROWS, max(MOST_NUMBERS // x.shape[1], ROWS))
    rows, weights = repeat_rows(order[hashes[order] >= reserved * 2.0**63], weight, factor, most)
    return torch.from_numpy(rows[:most].copy()), torch.from_numpy(weights[:most].copy())


def refuse_outliers(values: Array, name: str, keep: Array | None = None) -> None:
    """Refuse rows (n, d) if a column has a few values that are so large that the others count for nothing."""
    for column, found in enumerate(values.T):
        outliers = count_outliers(count_sizes(found))
        if outliers:
            row = int(np.abs(found).argmax())
            place = row if keep is None else np.flatnonzero(keep)[row]
            raise ValueError(
                f"{name} has {outliers} of {len(values)} numbers in column {column} that are over a million times as "
                f"large as all others, up to {found[row]:g} in row {place}; the others would count for nothing. "
                "Correct them, or leave these rows out"
            )


def _targets(y: Any, n: int) -> tuple[Array, bool, Array]:
    """Targets (n, t) in float64, whether they are classes, and one column of them: numbers, or names of classes."""
    found = np.asarray(y)
    check_consistent_length(np.empty(n), found)
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim == 1:
        classes = np.unique(found) if type_of_target(found, input_name="y") in ("binary", "multiclass") else None
        if classes is not None and (found.dtype.kind in "OUSb" or len(classes) <= FEW_CLASSES):
            return one_hot(found, classes), True, found.astype(str)
    numbers = check_array(found, dtype=np.float64, ensure_2d=False, input_name="y").reshape(n, -1)
    return numbers, False, numbers[:, 0]


def one_hot(y: Array, classes: Array) -> Array:
    """Classes (n,) as rows (n, k) with a single 1."""
    return (y[:, None] == classes).astype(np.float64)


class SNNKFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Features):  # type: ignore[misc]
    """Features of rows, as inputs of any linear model.

    Args:
        n_components: number of features.
        feature_map: "learned" (cosines of binned inputs, trained on the rows with `y`), "learned-deep" (a second layer
            of them), "random-fourier" (cos and sin) or "random-relu". Without `y`, or with fewer than 200 rows, the
            first two draw those of "random-fourier".
        bandwidth: standard deviation of the angles of "random-fourier"; a larger one fits finer detail. "auto" chooses
            it by generalised cross-validation, or takes 1 without `y`.
        missing: what to do about NaN and missing values: "raise", "mean", or "drop" the rows in `fit`.
        standardize: whether to centre and scale the columns first.
        random_state: seed or generator of the map.

    Example:
        >>> SNNKFeatures(64, random_state=0).fit_transform(np.random.rand(10, 3)).shape
        (10, 64)
    """

    def fit(self, X: Any, y: Any = None) -> SNNKFeatures:
        """Learn or draw the features for rows X (n, d), and take their mean and scale.

        Args:
            X: rows.
            y: targets (n,) or (n, t). Texts, flags and at most 20 different whole numbers are taken for classes.
        """
        rows = self._read(X, first=True)
        found = None if y is None or not self._learns() else _targets(y, len(rows))
        # Without targets, so that `transform` of the same rows does not give their targets away.
        self.columns_ = frames.find_columns(rows, None, self.missing) if frames.is_table(rows) else None
        numbers, keep = self._numbers(rows, fitted=False)
        self._scale(numbers, None, keep)
        x = self._inputs(numbers, keep)
        if found is None:
            self._make_map(x)
        else:
            self._make_map(x, torch.from_numpy(found[0][keep]), classes=found[1])
        self._n_features_out = int(self.n_components)
        return self

    def transform(self, X: Any) -> Array:
        """Map rows (n, d) to features (n, n_components)."""
        check_is_fitted(self)
        return torch.cat([self._phi(x) for x in self._all_inputs(X).split(ROWS)]).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
