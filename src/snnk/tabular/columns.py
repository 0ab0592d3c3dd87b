"""How rows of a table become inputs x and targets y.

Numbers are standardised. A few categories become one-hot vectors, and many become the numbers of `snnk.tabular.codes`.
Categories are compared as exact text, whole numbers by their digits. Dates and times become seconds, which are
standardised, and sine and cosine of the day, the week and the year that they go through. A missing, NaN or infinite
value raises an error that names its place, drops its row, or becomes the mean: zeros, and a one in an input that says
so if the table of the fit had some.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snnk import _checks
from snnk.tabular.codes import FOLDS, Codes, rates, row_folds
from snnk.tabular.scaling import LARGEST, Array, standardise
from snnk.tabular.values import (
    CYCLES,
    TIMES,
    as_numbers,
    as_text,
    fold_values,
    is_soft,
    plain,
    soft_fields,
)

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = ("raise", "drop", "mean")
POLICY = "the policy for missing values (missing, or --missing) to 'drop' (the row) or 'mean'"
SOFT_ROUNDING = 1e-4  # of the sum of probabilities, which a teacher may compute in half precision
REACH = 2.0**24  # in standard deviations; beyond it, the error of an angle in float32 is a radian or more
KEYS = {"name", "mean", "scale", "categories"}


@dataclass(frozen=True)
class Column:
    """A number, a category, or a date or time; the scale of a target is the unit of the fit.

    Args:
        name: of the column.
        mean, scale: of numbers, or of seconds.
        categories: the values of a category that becomes a one-hot vector; none if there are `codes`.
        time: the kind of time, one of `TIMES`, or "".
        cycles: periods of times that become sine and cosine, of `CYCLES`.
        codes: of a category with many values.
        indicator: whether there is an input for missing values.
    """

    name: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] | None = None
    time: str = ""
    cycles: tuple[str, ...] = ()
    codes: Codes | None = None
    indicator: bool = False

    @property
    def kind(self) -> str:
        """How values are used: as a "number", as a "category", or as a kind of time."""
        return self.time or ("number" if self.categories is None else "category")

    @property
    def width(self) -> int:
        """Number of inputs, or of outputs, that the column becomes."""
        own = 1 + 2 * len(self.cycles) if self.categories is None else len(self.categories)
        return own + (self.codes.width if self.codes else 0) + self.indicator

    def names(self, classes: tuple[str, ...] | None) -> list[str]:
        """Names of the inputs, for a target with some classes or None."""
        found = [self.name] if self.categories is None else [f"{self.name}={value}" for value in self.categories]
        found += [f"{self.name}: {wave} of {cycle}" for cycle in self.cycles for wave in ("sine", "cosine")]
        found += [f"{self.name}: {what}" for what in (*rates(classes), "log frequency") if self.codes]
        return found + [f"{self.name}: missing"] * self.indicator

    def to_dict(self) -> dict[str, Any]:
        """The column as JSON; what a plain number or category does not have is left out."""
        categories = None if self.categories is None else list(self.categories)
        found: dict[str, Any] = {"name": self.name, "mean": self.mean, "scale": self.scale, "categories": categories}
        if self.time:
            found |= {"time": self.time, "cycles": list(self.cycles)}
        if self.codes:
            found["codes"] = self.codes.to_dict()
        return found | ({"indicator": True} if self.indicator else {})

    @classmethod
    def from_dict(cls, stored: Any) -> Column:
        """A column from a file; every key and every type is checked."""
        if not isinstance(stored, dict) or not KEYS <= set(stored) <= KEYS | {"time", "cycles", "codes", "indicator"}:
            raise ValueError(f"a column must have name, mean, scale and categories; got {_short(stored)}")
        name, categories = stored["name"], stored["categories"]
        if not isinstance(name, str):
            raise ValueError(f"the name of a column must be a text; got {_short(name)}")
        for key in ("mean", "scale"):
            value = stored[key]
            if not _checks.is_number(value) or not abs(value) <= LARGEST:
                raise ValueError(f"the {key} of column {name!r} must be a finite number; got {_short(value)}")
        if not stored["scale"] > 0:
            raise ValueError(f"the scale of column {name!r} must be above 0; got {stored['scale']!r}")
        if categories is not None:
            texts = isinstance(categories, list) and all(isinstance(value, str) for value in categories)
            if not texts or len(set(categories)) < len(categories):
                raise ValueError(f"the categories of column {name!r} must be different texts; got {_short(categories)}")
            categories = tuple(categories)
        time, cycles = stored.get("time", ""), stored.get("cycles", [])
        if ("time" in stored or "cycles" in stored) and (
            not isinstance(time, str)
            or time not in TIMES
            or not isinstance(cycles, list)
            or cycles != [cycle for cycle in CYCLES if cycle in cycles]
            or categories is not None
        ):
            raise ValueError(f"column {name!r} has a kind of time that is not known: {_short((time, cycles))}")
        codes = Codes.from_dict(stored["codes"], name) if "codes" in stored else None
        if codes is not None and categories != ():
            raise ValueError(f"column {name!r} has codes, and therefore must have an empty list of categories")
        if stored.get("indicator", True) is not True:
            raise ValueError(f"the indicator of column {name!r} must be true; got {_short(stored['indicator'])}")
        return cls(
            name,
            float(stored["mean"]),
            float(stored["scale"]),
            categories,
            time,
            tuple(cycles),
            codes,
            "indicator" in stored,
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Encoded(NamedTuple):
    """The rows of a batch that are kept, as numbers."""

    x: Tensor  # (n, width) float32
    y: Tensor | None  # (n, t) float64
    keep: Tensor  # (rows of the batch,) bool


@dataclass(frozen=True)
class Columns:
    """The encoding of a table: its input columns, its target, and the policy for missing values."""

    inputs: tuple[Column, ...]
    target: Column
    missing: str = "raise"

    @property
    def width(self) -> int:
        """Number of inputs of the feature map."""
        return sum(c.width for c in self.inputs)

    @property
    def names(self) -> list[str]:
        """Names of the inputs of the feature map, such as "age" and "colour=red"."""
        return [name for column in self.inputs for name in column.names(self.target.categories)]

    @property
    def texts(self) -> list[str]:
        """Names of the columns that are texts. Another CSV file may look as if they were numbers or flags."""
        texts = [column.name for column in self.inputs if column.kind == "category"]
        named = any(not name.lstrip("-").isdigit() for name in self.target.categories or ())
        return [*texts, self.target.name] if named else texts

    @property
    def norm(self) -> float:
        """A typical length of encoded rows: numbers have mean square 1, and one-hot categories have length 1."""
        return math.sqrt(len(self.inputs))

    def describe_unseen(self, unseen: Mapping[str, int]) -> list[str]:
        """A sentence per column on values that `encode` counted: unknown categories, or numbers that are too far away.

        Example:
            >>> columns = Columns((Column("size"),), Column("y"), "mean")
            >>> columns.describe_unseen({"size": 2})[0][:69]
            "2 numbers of 'size' are more than 2^24 standard deviations (1) from t"
        """
        kinds = {column.name: column for column in self.inputs}
        found = []
        for name, number in sorted(unseen.items()):
            if not number:
                continue
            column = kinds[name]
            if column.categories is None:
                what = "numbers" if column.kind == "number" else "times"
                found.append(
                    f"{number:,} {what} of {name!r} are more than 2^24 standard deviations ({column.scale:g}) from the "
                    f"mean of the start ({column.mean:g}) and count as missing. Correct them, or make the start from "
                    "rows that have some of them."
                )
            else:
                found.append(
                    f"{number:,} values of {name!r} are not among those of the start and count as no category. A start "
                    "from more rows has more of them."
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        """The columns as JSON."""
        inputs = [column.to_dict() for column in self.inputs]
        return {"inputs": inputs, "target": self.target.to_dict(), "missing": self.missing}

    @classmethod
    def from_dict(cls, stored: Any) -> Columns:
        """Columns from a file; every key and every type is checked."""
        if not isinstance(stored, dict) or set(stored) != {"inputs", "target", "missing"}:
            raise ValueError(f"columns must have inputs, target and missing; got {_short(stored)}")
        if not isinstance(stored["inputs"], list | tuple) or not stored["inputs"]:
            raise ValueError(f"inputs must be a list of columns; got {_short(stored['inputs'])}")
        inputs, target = tuple(map(Column.from_dict, stored["inputs"])), Column.from_dict(stored["target"])
        if len({c.name for c in (*inputs, target)}) <= len(inputs):
            raise ValueError("two columns have the same name")
        columns = cls(inputs, target, _checks.choose(stored["missing"], MISSING, "policy for missing values"))
        if target.time or target.codes or target.indicator:
            raise ValueError("the target is neither a number nor has it classes")
        expected = len(rates(target.categories)) + 1
        if any(column.codes and column.codes.width != expected for column in inputs):
            raise ValueError(f"the codes of a column are not {expected} wide, as those for the target must be")
        if not columns.width or not target.width:
            raise ValueError("no inputs or no classes: all lists of categories are empty")
        return columns

    def encode(
        self,
        batch: pa.RecordBatch,
        label: str,
        *,
        first_row: int = 0,
        with_target: bool = True,
        fitted: bool | None = None,
        unseen: Counter[str] | None = None,
    ) -> Encoded:
        """Turn a record batch into inputs and targets.

        A number to predict is standardised by the mean and the scale of the target. An input that is more than 2^24
        standard deviations from its mean counts as infinite, because float32 features would keep no digit of it. A
        category that the first pass did not see becomes zeros, or the code of a category without rows.

        Args:
            batch: rows of the table.
            label, first_row: the block of the batch, and the row of the block at which it begins; errors name them.
            with_target: whether to encode the target, too.
            fitted: whether the rows are to be fitted, and not predicted. Columns with codes then have those from which
                the targets of the fold of the row are left out. Default: if the target is encoded.
            unseen: a counter, by column, of values unlike those of the first pass: categories that it did not see,
                and numbers that are too far away.
        """
        x = np.zeros((batch.num_rows, self.width), np.float32)
        keep, place = np.ones(batch.num_rows, bool), 0
        hashes: dict[str, Array] = {}
        folds: Array | int = FOLDS
        if (with_target if fitted is None else fitted) and any(column.codes for column in self.inputs):
            hashes = {c.name: fold_values(batch.column(c.name), c.kind, c.name, label) for c in self.inputs}
            folds = row_folds(hashes, batch.num_rows)
        for column in self.inputs:
            part = x[:, place : place + column.width]
            if column.codes is not None:
                values = hashes.get(column.name)
                if values is None:
                    values = fold_values(batch.column(column.name), "category", column.name, label)
                bad = values == 0
                codes, known = column.codes.encode(values, folds)
                part[:, : column.codes.width] = np.where(bad[:, None], 0.0, codes)
                if unseen is not None:
                    unseen[column.name] += int((~known & ~bad).sum())
            elif column.categories is not None:
                values, bad = read_column(batch, column, label)
                known = values >= 0
                if unseen is not None and column.categories:
                    unseen[column.name] += int((~known & ~bad).sum())
                part[np.flatnonzero(known), values[known].astype(int)] = 1.0
            else:
                values, bad = read_column(batch, column, label)
                bad = self._encode_numbers(part, column, values, bad, label, first_row, unseen)
            if column.indicator:
                part[:, -1] = bad
            if self.missing == "raise":
                _refuse_missing(column, bad, label, first_row)
            if self.missing == "drop":
                keep &= ~bad
            place += column.width
        y = self._encode_target(batch, label, first_row, keep) if with_target else None
        return Encoded(torch.from_numpy(x if keep.all() else x[keep]), y, torch.from_numpy(keep))

    def _encode_numbers(
        self,
        part: Array,
        column: Column,
        values: Array,
        bad: Array,
        label: str,
        first_row: int,
        unseen: Counter[str] | None,
    ) -> Array:
        """Fill the inputs of a number or a time; returns which values are missing or too far away."""
        scaled = standardise(np.where(bad, column.mean, values), column.mean, column.scale)
        far = np.abs(scaled) > REACH
        if far.any() and not bad.any() and self.missing == "raise":
            row = int(far.argmax())
            raise ValueError(
                f"column {column.name!r} is {values[row]:g} at row {first_row + row} of {label}, more than "
                f"2^24 standard deviations ({column.scale:g}) from its mean in training ({column.mean:g}); "
                f"correct it, or set {POLICY}"
            )
        if unseen is not None:
            unseen[column.name] += int(far.sum())
        bad = bad | far
        part[:, 0] = np.where(bad, 0.0, scaled)
        for i, cycle in enumerate(column.cycles):
            angle = 2 * math.pi / CYCLES[cycle] * np.mod(np.where(bad, 0.0, values), CYCLES[cycle])
            part[:, 1 + 2 * i] = np.where(bad, 0.0, np.sin(angle))
            part[:, 2 + 2 * i] = np.where(bad, 0.0, np.cos(angle))
        return bad

    def _encode_target(self, batch: pa.RecordBatch, label: str, first_row: int, keep: Array) -> Tensor:
        """Targets (n, t) of the rows to keep; rows without a target are taken out of `keep`."""
        target = self.target
        values, bad = read_column(batch, target, label)
        if self.missing != "drop":
            _refuse_missing(target, bad, label, first_row)
        keep &= ~bad
        if target.categories is not None and is_soft(batch.column(target.name).type):
            found = _probabilities(batch.column(target.name), target)
            wrong = keep & ~((found >= 0).all(1) & (np.abs(found.sum(1) - 1) <= SOFT_ROUNDING))
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(
                    f"the probabilities of {target.name!r} at row {first_row + row} of {label} must be at least 0 and "
                    f"have the sum 1; got {found[row].tolist()}"
                )
            return torch.from_numpy(found[keep] / found[keep].sum(1, keepdims=True))
        if target.categories is None:
            return torch.from_numpy(standardise(values[keep], target.mean, target.scale))[:, None]
        unknown = ~bad & (values < 0)
        if unknown.any():  # dropping such rows would lose a class without notice
            raise ValueError(
                f"column {target.name!r} has a class at row {first_row + int(unknown.argmax())} of {label} that was "
                "not there in the first pass. If the table was changed, run the same command again; for the sums of a "
                "part, make the start from rows with all classes"
            )
        return torch.eye(target.width, dtype=torch.float64)[torch.from_numpy(values[keep].astype(np.int64))]


def _refuse_missing(column: Column, bad: Array, label: str, first_row: int) -> None:
    if bad.any():
        where = f"row {first_row + int(bad.argmax())} of {label}"
        raise ValueError(missing_message({column.name: int(bad.sum())}, where))


def missing_message(counts: dict[str, int], first: str) -> str:
    """An error message for missing values, with their number per column and the place of the first."""
    listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
    return (
        f"missing, NaN or infinite values ({listed}), the first at {first}; clean them, or set {POLICY} (a target can "
        "only be dropped)"
    )


def read_column(batch: pa.RecordBatch, column: Column, label: str) -> tuple[Array, Array]:
    """Values (n,) of a column, float64 numbers or indices of categories (-1 if unknown), and which are missing (n,).

    The numbers of times are seconds.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.categories is not None and is_soft(batch.column(column.name).type):
        found = _probabilities(batch.column(column.name), column)
        return found.argmax(1), np.isnan(found.sum(1))
    data = plain(batch.column(column.name), column.name, label, column.kind)
    if column.categories is None:
        values = as_numbers(data, column.name, label)
        return values, ~np.isfinite(values)
    text = as_text(data, column.name, label)
    index = pc.index_in(text, value_set=pa.array(column.categories, pa.string()))
    missing = pc.is_null(text).to_numpy(zero_copy_only=False)
    return pc.fill_null(index, -1).to_numpy(zero_copy_only=False), missing


def _probabilities(data: pa.StructArray, target: Column) -> Array:
    """Probabilities (n, k) by the classes of the target."""
    fields, classes = soft_fields(data), target.categories or ()
    if sorted(fields) != sorted(classes):
        raise ValueError(
            f"{target.name!r} has probabilities of {', '.join(fields)}; expected those of {', '.join(classes)}"
        )
    return np.stack([fields[name] for name in classes], 1)
