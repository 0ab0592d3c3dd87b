"""The first pass over a table: means, scales and categories of its columns.

    columns = Scan.start(table, "price").read(table).columns()

Scans of different blocks merge into one, so workers share the pass. Means and scales are rounded, so that they do not
depend on the order in which blocks were merged. Integers and decimals become float64; a column whose values differ by
less than 1e-12 of their size is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from snnk import _checks
from snnk.tabular.codes import Tally, Target, row_folds
from snnk.tabular.columns import MISSING, Column, Columns, missing_message
from snnk.tabular.delimited import WHOLE
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
from snnk.tabular.values import (
    CYCLES,
    TIMES,
    as_numbers,
    as_text,
    as_ticks,
    fold_values,
    is_soft,
    kind_of,
    plain,
    soft_fields,
)

if TYPE_CHECKING:
    import pyarrow as pa

TASKS = ("auto", "regression", "classification")
MOST_CLASSES = 1000  # of a target
MOST_CATEGORIES = 256  # of a column that becomes a one-hot vector; a column with more of them gets codes
PARTS = {"day": 1440, "week": 7, "year": 12}  # of a cycle; times in one of them only do not go through it
SECONDS = "seconds"  # the first and the last time of a column
FEW_CLASSES = 20  # a target with at most this number of different integers is taken for classes
GRID = 1 << 20  # means are rounded to this part of a standard deviation
NUMBER = r"^\s*[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?\s*$"
SPOILED = 0.9  # share of numbers above which a column of texts is one of numbers that was spoiled


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

    kind: str
    count: int = 0
    exponent: int = 0
    mean: float = 0.0
    squares: float = 0.0
    missing: int = 0
    first_missing: Place | None = None
    values: set[str] = field(default_factory=set)  # categories, or whole numbers, as long as there are few
    whole: bool = True  # whether all numbers are whole
    coarse: bool = False  # whether there is a float above 2^53
    bounds: tuple[Any, Any] | None = None  # the least and the largest integer or decimal, exactly
    sizes: Array = field(default_factory=lambda: count_sizes(np.zeros(0)))
    largest: tuple[float, Place] | None = None  # minus the largest absolute value, and its first place
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)  # first and last part of each cycle of times
    guessed: bool = False  # whether pyarrow guessed the type: one text makes texts of all numbers of a CSV file
    texts: int = 0  # number of texts of such a column
    numbers: int = 0  # how many of them are numbers
    first_text: tuple[Place, str] | None = None  # and the first that is none

    @property
    def category(self) -> bool:
        return self.kind == "category"

    @property
    def few(self) -> bool:
        """Whether numbers may be classes."""
        return self.whole and len(self.values) <= FEW_CLASSES

    @property
    def many(self) -> bool:
        """Whether there are too many categories for a one-hot vector."""
        return self.category and len(self.values) > MOST_CATEGORIES

    @property
    def countless(self) -> bool:
        """Whether there are so many categories that they are not listed any more."""
        return len(self.values) > MOST_CLASSES

    def add(self, data: pa.Array, name: str, place: Place) -> Array:
        """Add values, the first of which is at `place`; returns which of them are missing, (n,) bool."""
        import pyarrow.compute as pc

        soft = is_soft(data.type)
        data = data if soft else plain(data, name, place.label)
        if soft:
            fields = soft_fields(data)
            bad = np.isnan(np.sum(list(fields.values()), axis=0))
            self.values |= fields.keys()
        elif self.category:
            text = as_text(data, name, place.label)
            bad = pc.is_null(text).to_numpy(zero_copy_only=False)
            if self.guessed:
                self._note_spoiled(text, place)
            if not self.countless:
                self.values |= set(pc.unique(text.drop_null())[: 2 * MOST_CLASSES].to_pylist())
        else:
            bad = self._add_numbers(data, name, place)
        if bad.any() and not self.missing:
            self.first_missing = place._replace(row=place.row + int(bad.argmax()))
        self.missing += int(bad.sum())
        return bad

    def _note_spoiled(self, text: pa.Array, place: Place) -> None:
        """Count the texts that are numbers, and keep the first that is none."""
        import pyarrow.compute as pc

        number = pc.fill_null(pc.match_substring_regex(text, NUMBER), True).to_numpy(zero_copy_only=False)
        self.numbers += int(number.sum()) - text.null_count
        self.texts += len(text) - text.null_count
        if not number.all():
            row = int(number.argmin())
            found = place._replace(row=place.row + row), text[row].as_py()
            self.first_text = min(self.first_text or found, found)

    def refuse_spoiled(self, name: str) -> None:
        """Refuse texts of a CSV file that are different numbers, but for a few."""
        if self.first_text and len(self.values) > FEW_CLASSES and self.numbers >= SPOILED * self.texts:
            place, value = self.first_text
            raise ValueError(
                f"column {name!r} has {value[:40]!r} at {place}, and numbers in {self.numbers:,} rows; correct it, "
                "empty the cell, or leave the column out with drop. If it is a category, convert the file to Parquet"
            )

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
        if self.kind in TIMES:
            self._widen(tuple(pc.min_max(as_ticks(data)).as_py().values()))
            self._note_cycles(good)
            return bad
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

    def _note_cycles(self, seconds: Array) -> None:
        found = {c: np.floor(np.mod(seconds, CYCLES[c]) / CYCLES[c] * count) for c, count in PARTS.items()}
        self._add_parts({name: (float(v.min()), float(v.max())) for name, v in ({SECONDS: seconds} | found).items()})

    def _add_parts(self, parts: dict[str, tuple[float, float]]) -> None:
        for name, (low, high) in parts.items():
            first, last = self.parts.get(name, (low, high))
            self.parts[name] = min(low, first), max(high, last)

    def _cycles(self) -> tuple[str, ...]:
        """The cycles that times go through: those that are not longer than their span."""
        start, end = self.parts.get(SECONDS, (0.0, 0.0))
        known: tuple[str, ...] = {"time": ("day",), "duration": ()}.get(self.kind, tuple(CYCLES))
        passed = [cycle for cycle in known if self.kind == "time" or end - start >= CYCLES[cycle]]
        return tuple(cycle for cycle in passed if cycle in self.parts and self.parts[cycle][0] < self.parts[cycle][1])

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
        self._add_parts(other.parts)
        self.values |= other.values
        self.whole &= other.whole
        self.coarse |= other.coarse
        self.first_missing = min((p for p in (self.first_missing, other.first_missing) if p), default=None)
        self.missing += other.missing
        self.texts += other.texts
        self.numbers += other.numbers
        self.first_text = min((f for f in (self.first_text, other.first_text) if f), default=None)

    def column(self, name: str) -> Column:
        """The column of these numbers or times, with its mean and scale rounded."""
        found = self._numbers(name)
        return replace(found, time=self.kind, cycles=self._cycles()) if self.kind in TIMES else found

    def _numbers(self, name: str) -> Column:
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
            if self.kind in TIMES and self.bounds and self.bounds[0] != self.bounds[1]:
                raise ValueError(
                    f"column {name!r} has times that differ by less than float64 keeps of them; make it a duration "
                    "since a time near them, or leave the column out with drop"
                )
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
        tallies: sums of the target by category, of each input that is one, by name.
        rows: number of rows so far.
        blocks: sizes of the blocks so far, by label.
    """

    target: str
    statistics: dict[str, Statistics]
    tallies: dict[str, Tally]
    rows: int = 0
    blocks: dict[str, BlockSize] = field(default_factory=dict)

    @classmethod
    def start(cls, table: Table, target: str, drop: tuple[str, ...] = ()) -> Scan:
        """An empty scan of all columns but those in `drop`; columns that cannot be used raise a ValueError."""
        if target in drop:
            raise ValueError(f"the target {target!r} cannot be left out with drop")
        for name in (target, *drop):
            if name not in table.names:
                raise _checks.no_column(name, table.names, table.source)
        statistics = {}
        for column in table.schema:
            if column.name in drop:
                continue
            soft = column.name == target and is_soft(column.type)
            kind = "category" if soft else kind_of(column.type)
            if not kind:
                raise ValueError(
                    f"column {column.name!r} of {table.source} is {column.type}, neither a number nor a category nor a "
                    "time; cast it or leave it out with drop"
                )
            if column.name == target and kind in TIMES:
                raise ValueError(
                    f"the target {target!r} of {table.source} is {column.type}, and only numbers and classes can be "
                    "predicted; make it a number, such as the hours since a fixed time"
                )
            statistics[column.name] = Statistics(kind, guessed=table.format == "csv")
        if len(statistics) < 2:
            raise ValueError(f"no input columns are left beside the target {target!r}")
        return cls(target, statistics, {n: Tally() for n, s in statistics.items() if s.category and n != target})

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
                if self.statistics[self.target].category and self.statistics[self.target].countless:
                    raise ValueError(f"target {self.target!r} has more than {MOST_CLASSES} classes; join some of them")
                if self.tallies:
                    self._tally(batch, label)
                if sample is not None:
                    sample.add(batch, index_of[label], rows)
                rows += batch.num_rows
                complete += int((~bad).sum())
                self.rows += batch.num_rows
                progress(self.rows)
            self.blocks[label] = BlockSize(index_of[label], rows, complete)
        return self

    def _tally(self, batch: pa.RecordBatch, label: str) -> None:
        """Add rows to the sums of the target by category."""
        kinds = {name: s.kind for name, s in self.statistics.items() if name != self.target}
        values = {name: fold_values(batch.column(name), kind, name, label) for name, kind in kinds.items()}
        folds, (target, good) = row_folds(values, batch.num_rows), self._targets(batch, label)
        for name, tally in self.tallies.items():
            rows = np.flatnonzero(good & (values[name] != 0))
            numbers = None if target.numbers is None else target.numbers[rows]
            tally.add(values[name][rows], folds[rows], Target(numbers, target.names, target.chosen[rows]))

    def _targets(self, batch: pa.RecordBatch, label: str) -> tuple[Target, Array]:
        """The targets of a batch, and which of them are not missing."""
        import pyarrow.compute as pc

        name, statistics = self.target, self.statistics[self.target]
        if is_soft(batch.column(name).type):  # a row counts for its likeliest class
            fields = soft_fields(batch.column(name))
            found = np.stack(list(fields.values()), 1)
            return Target(None, list(fields), found.argmax(1)), ~np.isnan(found.sum(1))
        data = plain(batch.column(name), name, label)
        numbers, good = None, None
        if not statistics.category:
            numbers = as_numbers(data, name, label)
            good = np.isfinite(numbers)
            if not statistics.few:
                return Target(numbers, None, np.zeros(len(numbers), np.int64)), good
        encoded = as_text(data, name, label).dictionary_encode()
        index = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        return Target(numbers, encoded.dictionary.to_pylist(), index), index >= 0 if good is None else good

    def merge(self, other: Scan) -> Scan:
        """Add the scan of other blocks of the same table."""
        for name, statistics in self.statistics.items():
            statistics.merge(other.statistics[name])
        for name, tally in self.tallies.items():
            tally.merge(other.tallies[name])
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
        for name, found in self.statistics.items():
            found.refuse_spoiled(name)
        classes = self._has_classes(task)
        target = self.statistics[self.target]
        if classes and len(target.values) < 2:
            raise ValueError(
                f"target {self.target!r} has one class only, {', '.join(target.values)}; nothing can be learnt"
            )
        own = target.category_column(self.target) if classes else target.column(self.target)
        inputs = tuple(self._input(name, own, missing) for name in self.statistics if name != self.target)
        if not any(column.width for column in inputs):
            raise ValueError(
                "no input columns have a value that is in several rows, or all rows of a category are equal but for "
                "the target; name a table that has other columns, or add one that tells rows apart, such as a time "
                "or a random number"
            )
        if not classes:
            own = replace(own, scale=float(target_unit(own.scale)))
        return Columns(inputs, own, missing)

    def _input(self, name: str, target: Column, missing: str) -> Column:
        """An input column, for the target with its mean and its deviation."""
        found = self.statistics[name]
        codes = self.tallies[name].codes(target.categories, target.mean, target.scale) if found.many else None
        if codes is not None or (found.category and found.countless):  # without codes, it is an identifier
            column = Column(name, categories=(), codes=codes)
        else:
            column = found.category_column(name) if found.category else found.column(name)
        some = 0 < found.missing < self.rows
        return replace(column, indicator=True) if missing == "mean" and some else column

    def _has_classes(self, task: str) -> bool:
        """Whether the target has classes; a ValueError if it does not suit the task."""
        name, target = self.target, self.statistics[self.target]
        if not (target.count or target.values):
            raise ValueError(f"target {name!r} has no values: each row has a missing, NaN or infinite one")
        classes = task == "classification" or (task == "auto" and (target.category or target.few))
        if classes and not target.category and target.coarse:
            raise ValueError(
                f"target {name!r} has floating numbers above 2^53, where float64 does not have every whole number, so "
                "different classes may be equal; make it a column of integers or texts, or choose the task 'regression'"
            )
        if task == "regression" and target.category:
            raise ValueError(f"target {name!r} is a category; regression needs a number")
        if task == "classification" and not (target.category or target.few):
            raise ValueError(f"target {name!r} has more than {FEW_CLASSES} values or fractions; make it a text column")
        return classes
