"""The configuration of a fit, and its random features."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from snnk import _checks
from snnk.maps import FEATURE_MAPS, RANDOM_MAPS, FeatureMap
from snnk.ridge.sums import BLOCK_DTYPES
from snnk.tabular.columns import MISSING, Columns
from snnk.tabular.scaling import LARGEST
from snnk.tabular.scan import TASKS

LEARNED = ("learned", "learned-deep")
MOST_DEEP = 8192  # features of a second layer, whose matrix has their square
MAPS = (*LEARNED, *RANDOM_MAPS)
OLD_WORDS = {"random-fourier": "fourier", "random-relu": "relu"}  # in files from before the rename


def make_random_map(
    name: str, in_features: int, num_features: int, *, bandwidth: float, x_norm: float, seed: int
) -> FeatureMap:
    """Draw random features for inputs of a typical norm; only "random-fourier" has a bandwidth."""
    make = FEATURE_MAPS[_checks.choose(name, RANDOM_MAPS, "feature map")]
    options = {"bandwidth": bandwidth, "x_norm": x_norm} if name == "random-fourier" else {}
    return make(in_features, num_features, seed=seed, **options)


def check_deep(num_features: int) -> None:
    """A ValueError if a second layer cannot have that many features."""
    if num_features > MOST_DEEP:
        raise ValueError(
            f"learned-deep has at most {MOST_DEEP} features; got {num_features}. Use fewer, or feature map 'learned'"
        )


@dataclass(frozen=True)
class FitConfig:
    """The settings of one fit.

    Args:
        target: name of the target column.
        num_features: number m of features; even for "random-fourier".
        feature_map: "learned" (trained on a sample of the rows), "learned-deep" (a second layer of them: more accurate
            with very many rows, at about twice the time), "random-fourier" (cos and sin) or "random-relu".
        bandwidth: for "random-fourier", the standard deviation of the angles; a larger one fits finer detail. "auto"
            chooses it by generalised cross-validation on a sample.
        lam: the penalty of the ridge regression, or "gcv" to choose it by generalised cross-validation.
        task: "regression", "classification", or "auto", by the type and the values of the target.
        missing: the policy for missing values: "raise", "drop" (the row) or "mean".
        drop: names of columns to leave out.
        block_dtype: "float32" or "float64", for features and their products within a block; sums are always float64.
        seed: seed of the random features.

    Example:
        >>> FitConfig("price", num_features=1024, drop=("id",)).lam
        'gcv'
    """

    target: str
    num_features: int = 512
    feature_map: str = "learned"
    bandwidth: float | str = "auto"
    lam: float | str = "gcv"
    task: str = "auto"
    missing: str = "raise"
    drop: tuple[str, ...] = ()
    block_dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.target, str):
            raise TypeError(f"target must be the name of a column; got {self.target!r}")
        if not isinstance(self.drop, tuple) or not all(isinstance(name, str) for name in self.drop):
            raise TypeError(f"drop must be a tuple of names of columns; got {self.drop!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an integer; got {self.seed!r}")
        _checks.choose(self.feature_map, MAPS, "feature map")
        m = _checks.positive_int(self.num_features, "num_features")
        object.__setattr__(self, "num_features", m)  # JSON has no numpy integers
        if self.feature_map == "random-fourier":
            _checks.even_features(m)
        if self.feature_map == "learned-deep":
            check_deep(m)
        if self.bandwidth != "auto":
            if isinstance(self.bandwidth, str):
                raise ValueError(f"bandwidth must be a number above 0 or 'auto'; got {self.bandwidth!r}")
            _checks.positive(self.bandwidth, "bandwidth")
        _checks.choose(self.task, TASKS, "task")
        _checks.choose(self.missing, MISSING, "policy for missing values")
        _checks.choose(self.block_dtype, BLOCK_DTYPES, "block_dtype")
        lam = None if isinstance(self.lam, bool) else self.lam
        if lam != "gcv" and not (isinstance(lam, int | float) and 0 <= lam <= LARGEST):
            raise ValueError(f"lam must be 'gcv' or a number >= 0; got {self.lam!r}")

    @classmethod
    def from_dict(cls, stored: Any) -> FitConfig:
        """A configuration from a file, which must have every setting and no other key. Old words load."""
        known = {f.name for f in fields(cls)}
        if not isinstance(stored, dict) or set(stored) != known:
            raise ValueError(f"settings must be {', '.join(sorted(known))}; got others")
        if not isinstance(stored["drop"], list):
            raise TypeError(f"drop must be a list; got {stored['drop']!r}")
        word = stored["feature_map"]
        word = next((new for new, old in OLD_WORDS.items() if old == word), word)
        return cls(**{**stored, "drop": tuple(stored["drop"]), "feature_map": word})

    def make_map(self, columns: Columns) -> FeatureMap:
        """Draw the random feature map for the inputs of some columns."""
        chosen = self.feature_map == "random-fourier" and isinstance(self.bandwidth, str)
        if self.feature_map not in RANDOM_MAPS or chosen:
            raise ValueError("learnt features, and a bandwidth of 'auto', come from rows; use snnk.tabular.prepare")
        return make_random_map(
            self.feature_map,
            columns.width,
            self.num_features,
            bandwidth=1.0 if isinstance(self.bandwidth, str) else self.bandwidth,
            x_norm=columns.norm,
            seed=self.seed,
        )
