"""The first pass over a table: means, scales and categories of its columns.

    columns = Scan.start(table, "price").read(table).columns()

Scans of different blocks merge into one, so workers share the pass. Means and scales are rounded, so that they do not
depend on the order in which blocks were merged. Integers and decimals become float64; a column whose values differ by
less than 1e-12 of their size is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from snnk import _checks
from snnk.tabular.columns import MISSING, Column, Columns, as_numbers, as_text, kind_of, missing_message, plain
from snnk.tabular.sample import Sample
from snnk.tabular.scaling import (
    CONSTANT,
    LARGEST,
    SMALLEST,
    Array,
    constant_scale,
    count_outliers,
    count_sizes,
    moments,
    target_unit,
)
from snnk.tabular.source import Table

if TYPE_CHECKING:
    import pyarrow as pa

TASKS = ("auto", "regression", "classification")
MOST_CATEGORIES = 1000  # per column; a column with more of them is taken for an identifier
FEW_CLASSES = 20  # a target with at most this number of different integers is taken for classes
GRID = 1 << 20  # means are rounded to this part of a standard deviation
WHOLE = 2**53  # above it, float64 does not have every whole number


class Place(NamedTuple):
    """A row of a table; places are ordered as the rows are."""

    block: int
    row: int  # in its block
    label: str  # of the block

    def __str__(self) -> str:
        return f"row {self.row} of {self.label}"


class BlockSize(NamedTuple):
    """The number of a block in the table, and how many rows it has."""

    block: int
    rows: int
    complete: int  # rows without a missing value


@dataclass
class Statistics:
    """The statistics of one column; statistics of different rows merge.

    `mean` is in units of 2^exponent, and `squares`, the sum of squared deviations, in units of 2^(2 exponent).
    """

    category: bool
    count: int = 0
    exponent: int = 0
    mean: float = 0.0
    squares: float = 0.0
    missing: int = 0
    first_missing: Place | None = None
    values: set[str] = field(default_factory=set)  # categories, or a few of the different whole numbers
    whole: bool = True  # whether all numbers are whole
    coarse: bool = False  # whether there is a float above 2^53
    bounds: tuple[Any, Any] | None = None  # the least and the largest integer or decimal, exactly
    sizes: Array = field(default_factory=lambda: count_sizes(np.zeros(0)))
    largest: tuple[float, Place] | None = None  # minus the largest absolute value, and its first place

    def add(self, data: pa.Array, name: str, place: Place) -> Array:
        """Add values, the first of which is at `place`; returns which of them are missing, (n,) bool."""
        import pyarrow.compute as pc

        data = plain(data, name, place.label)
        if self.category:
            text = as_text(data, name, place.label)
            bad = pc.is_null(text).to_numpy(zero_copy_only=False)
            self.values |= set(pc.unique(text.drop_null()).to_pylist())
            if len(self.values) > MOST_CATEGORIES:
                raise ValueError(f"column {name!r} has more than {MOST_CATEGORIES} categories; leave it out with drop")
        else:
            bad = self._add_numbers(data, name, place)
        if bad.any() and not self.missing:
            self.first_missing = place._replace(row=place.row + int(bad.argmax()))
        self.missing += int(bad.sum())
        return bad

    def _add_numbers(self, data: pa.Array, name: str, place: Place) -> Array:
        import pyarrow.compute as pc
        import pyarrow.types as pt

        values = as_numbers(data, name, place.label)
        bad = ~np.isfinite(values)
        good = values[~bad]
        if not len(good):
            return bad
        row = int(np.where(bad, 0, np.abs(values)).argmax())
        largest = abs(float(values[row]))
        self._note_largest((-largest, place._replace(row=place.row + row)))
        self.sizes = self.sizes + count_sizes(good)
        exponent, mean, variance = moments(good)
        self._combine(len(good), int(exponent), float(mean), float(variance) * len(good))
        if pt.is_floating(data.type):
            self.coarse |= largest > WHOLE
        else:
            self._widen(tuple(pc.min_max(data).as_py().values()))
        fractions = pt.is_floating(data.type) or pt.is_decimal(data.type)
        self.whole &= not fractions or bool((good == np.rint(good)).all())
        if self.whole and len(self.values) <= FEW_CLASSES:
            texts = as_text(pc.unique(data)[: 3 * FEW_CLASSES], name, place.label).drop_null().to_pylist()
            self.whole = all(text.lstrip("-").isdigit() for text in texts)  # float64 may round off a decimal's fraction
            self.values |= set(texts)
        return bad

    def _note_largest(self, found: tuple[float, Place]) -> None:
        self.largest = min(self.largest or found, found)

    def _widen(self, bounds: tuple[Any, ...]) -> None:
        low, high = self.bounds or bounds
        self.bounds = min(low, bounds[0]), max(high, bounds[1])

    def _combine(self, count: int, exponent: int, mean: float, squares: float) -> None:
        """Combine two counts, means and sums of squared deviations (Chan, Golub and LeVeque)."""
        top = max(self.exponent, exponent) if self.count else exponent
        old, mean = math.ldexp(self.mean, self.exponent - top), math.ldexp(mean, exponent - top)
        total, delta = self.count + count, mean - old
        self.squares = (
            math.ldexp(self.squares, 2 * (self.exponent - top))
            + math.ldexp(squares, 2 * (exponent - top))
            + delta**2 * self.count * count / total
        )
        self.mean = old + delta * count / total
        self.count, self.exponent = total, top

    def merge(self, other: Statistics) -> None:
        """Add the statistics of other rows."""
        if other.count:
            self._combine(other.count, other.exponent, other.mean, other.squares)
        if other.bounds:
            self._widen(other.bounds)
        if other.largest:
            self._note_largest(other.largest)
        self.sizes = self.sizes + other.sizes
        self.values |= other.values
        self.whole &= other.whole
        self.coarse |= other.coarse
        self.first_missing = min((p for p in (self.first_missing, other.first_missing) if p), default=None)
        self.missing += other.missing

    def column(self, name: str) -> Column:
        """The column of these numbers, with its mean and scale rounded."""
        outliers = count_outliers(self.sizes)
        if outliers and self.largest:
            size, place = self.largest
            raise ValueError(
                f"column {name!r} has {outliers} of {self.count} numbers that are over a million times as large as all "
                f"others, up to {-size:g} in {place}; the others would count for nothing. Correct them, "
                "make them missing values, or leave the column or these rows out"
            )
        deviation = math.sqrt(self.squares / max(self.count, 1))
        if deviation <= CONSTANT * abs(self.mean):
            if self.bounds and self.bounds[0] != self.bounds[1]:
                raise ValueError(
                    f"column {name!r} has numbers from {self.bounds[0]} to {self.bounds[1]}, which differ by less than "
                    "float64 keeps of them; subtract an offset, make them texts, or leave the column out with drop"
                )
            mean = _ldexp(self.mean, self.exponent)
            scale = float(constant_scale(mean))
            return Column(name, _ldexp(round(mean / scale * GRID) / GRID, math.frexp(scale)[1] - 1), scale)
        fraction, exponent = math.frexp(deviation)
        deviation = math.ldexp(float(np.float32(fraction)), exponent)
        mean = round(self.mean / deviation * GRID) * deviation / GRID
        return Column(name, _ldexp(mean, self.exponent), max(_ldexp(deviation, self.exponent), SMALLEST))

    def category_column(self, name: str) -> Column:
        """The column of these categories; numbers are in their order, texts in that of the alphabet."""
        return Column(name, categories=tuple(sorted(self.values, key=None if self.category else int)))


def _ldexp(value: float, exponent: int) -> float:
    """value 2^exponent, at most the largest number; rounding may have moved it beyond."""
    with np.errstate(over="ignore"):
        return float(np.clip(np.ldexp(value, exponent), -LARGEST, LARGEST))


@dataclass
class Scan:
    """The statistics of some blocks of a table.

    Args:
        target: name of the target column.
        statistics: those of each column, by name.
        rows: number of rows so far.
        blocks: sizes of the blocks so far, by label.
    """

    target: str
    statistics: dict[str, Statistics]
    rows: int = 0
    blocks: dict[str, BlockSize] = field(default_factory=dict)

    @classmethod
    def start(cls, table: Table, target: str, drop: tuple[str, ...] = ()) -> Scan:
        """An empty scan of all columns but those in `drop`; columns that cannot be used raise a ValueError."""
        if target in drop:
            raise ValueError(f"the target {target!r} cannot be left out with drop")
        for name in (target, *drop):
            if name not in table.names:
                raise ValueError(f"no column {name!r} in {table.source}; it has {', '.join(table.names) or 'none'}")
        statistics = {}
        for column in table.schema:
            if column.name in drop:
                continue
            kind = kind_of(column.type)
            if not kind:
                raise ValueError(
                    f"column {column.name!r} of {table.source} is {column.type}, neither a number nor a category; "
                    "cast it or leave it out with drop"
                )
            statistics[column.name] = Statistics(category=kind == "category")
        if len(statistics) < 2:
            raise ValueError(f"no input columns are left beside the target {target!r}")
        return cls(target, statistics)

    def read(
        self,
        table: Table,
        mine: Callable[[int, str], bool] = lambda index, label: True,
        progress: Callable[[int], None] = lambda rows: None,
        sample: Sample | None = None,
    ) -> Scan:
        """Add the blocks of a table for which `mine(index, label)` is true.

        `progress` gets the rows so far, and `sample` all rows.
        """
        index_of: dict[str, int] = {}

        def indexed(index: int, label: str) -> bool:
            index_of[label] = index
            return mine(index, label)

        for label, batches in table.blocks(indexed, list(self.statistics)):
            rows, complete = 0, 0
            for batch in batches:
                place, bad = Place(index_of[label], rows, label), np.zeros(batch.num_rows, bool)
                for name, statistics in self.statistics.items():
                    bad |= statistics.add(batch.column(name), name, place)
                if sample is not None:
                    sample.add(batch, index_of[label], rows)
                rows += batch.num_rows
                complete += int((~bad).sum())
                self.rows += batch.num_rows
                progress(self.rows)
            self.blocks[label] = BlockSize(index_of[label], rows, complete)
        return self

    def merge(self, other: Scan) -> Scan:
        """Add the scan of other blocks of the same table."""
        for name, statistics in self.statistics.items():
            statistics.merge(other.statistics[name])
        self.rows += other.rows
        self.blocks |= other.blocks
        return self

    def columns(self, task: str = "auto", missing: str = "raise") -> Columns:
        """The columns of the whole table.

        Args:
            task: "regression", "classification", or "auto", by the type and the values of the target.
            missing: the policy for missing values: "raise", "drop" or "mean".
        """
        _checks.choose(task, TASKS, "task")
        _checks.choose(missing, MISSING, "policy for missing values")
        if not self.rows:
            raise ValueError("the table has no rows")
        bad = {name: s.missing for name, s in self.statistics.items() if s.missing}
        if bad and (missing == "raise" or (missing == "mean" and self.target in bad)):
            place, name = min((s.first_missing, name) for name, s in self.statistics.items() if s.first_missing)
            raise ValueError(missing_message(bad, f"{place}, column {name!r}"))
        classes = self._has_classes(task)
        inputs = tuple(
            s.category_column(name) if s.category else s.column(name)
            for name, s in self.statistics.items()
            if name != self.target
        )
        if not any(column.width for column in inputs):
            raise ValueError("no input columns have a value; name a table that has some")
        target = self.statistics[self.target]
        if classes and len(target.values) < 2:
            raise ValueError(
                f"target {self.target!r} has one class only, {', '.join(target.values)}; nothing can be learnt"
            )
        if classes:
            return Columns(inputs, target.category_column(self.target), missing)
        found = target.column(self.target)
        return Columns(inputs, Column(self.target, found.mean, float(target_unit(found.scale))), missing)

    def _has_classes(self, task: str) -> bool:
        """Whether the target has classes; a ValueError if it does not suit the task."""
        name, target = self.target, self.statistics[self.target]
        if not (target.count or target.values):
            raise ValueError(f"target {name!r} has no values: each row has a missing, NaN or infinite one")
        few = target.whole and len(target.values) <= FEW_CLASSES
        classes = task == "classification" or (task == "auto" and (target.category or few))
        if classes and not target.category and target.coarse:
            raise ValueError(
                f"target {name!r} has floating numbers above 2^53, where float64 does not have every whole number, so "
                "different classes may be equal; make it a column of integers or texts, or choose the task 'regression'"
            )
        if task == "regression" and target.category:
            raise ValueError(f"target {name!r} is a category; regression needs a number")
        if task == "classification" and not (target.category or few):
            raise ValueError(f"target {name!r} has more than {FEW_CLASSES} values or fractions; make it a text column")
        return classes
