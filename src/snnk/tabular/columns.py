"""How rows of a table become inputs x and targets y.

Numbers are standardised and categories become one-hot vectors. Categories are compared as exact text, whole numbers by
their digits. A missing, NaN or infinite value raises an error that names its place, drops its row, or becomes the mean.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snnk import _checks
from snnk.tabular.scaling import LARGEST, Array, standardise

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = ("raise", "drop", "mean")
REACH = 2.0**24  # in standard deviations; beyond it, the error of an angle in float32 is a radian or more


@dataclass(frozen=True)
class Column:
    """A number with its mean and scale, or a category with its values; the scale of a target is the unit of the fit."""

    name: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] | None = None

    @property
    def width(self) -> int:
        """Number of inputs, or of outputs, that the column becomes."""
        return 1 if self.categories is None else len(self.categories)

    @classmethod
    def from_dict(cls, stored: Any) -> Column:
        """A column from a file; every key and every type is checked."""
        if not isinstance(stored, dict) or set(stored) != {"name", "mean", "scale", "categories"}:
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
        return cls(name, float(stored["mean"]), float(stored["scale"]), categories)


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
        return [c.name if c.categories is None else f"{c.name}={v}" for c in self.inputs for v in c.categories or ("",)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

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
        unseen: Counter[str] | None = None,
    ) -> Encoded:
        """Turn a record batch into inputs and targets.

        A number to predict is standardised by the mean and the scale of the target. An input that is more than 2^24
        standard deviations from its mean counts as infinite, because float32 features would keep no digit of it. A
        category that the first pass did not see becomes zeros.

        Args:
            batch: rows of the table.
            label, first_row: the block of the batch, and the row of the block at which it begins; errors name them.
            with_target: whether to encode the target.
            unseen: a counter, by column, of values unlike those of the first pass: categories that it did not see,
                and numbers that are too far away.
        """
        x = np.zeros((batch.num_rows, self.width), np.float32)
        keep, place = np.ones(batch.num_rows, bool), 0
        for column in self.inputs:
            values, bad = read_column(batch, column, label)
            if column.categories is None:
                scaled = standardise(np.where(bad, column.mean, values), column.mean, column.scale)
                far = np.abs(scaled) > REACH
                if far.any() and not bad.any() and self.missing == "raise":
                    row = int(far.argmax())
                    raise ValueError(
                        f"column {column.name!r} is {values[row]:g} at row {first_row + row} of {label}, more than "
                        f"2^24 standard deviations ({column.scale:g}) from its mean in training ({column.mean:g}); "
                        "correct it, or choose 'drop' or 'mean' as the policy for missing values"
                    )
                if unseen is not None:
                    unseen[column.name] += int(far.sum())
                bad = bad | far
                x[:, place] = np.where(bad, 0.0, scaled)
            else:
                known = values >= 0
                if unseen is not None:
                    unseen[column.name] += int((~known & ~bad).sum())
                x[np.flatnonzero(known), place + values[known].astype(int)] = 1.0
            if self.missing == "raise":
                _refuse_missing(column, bad, label, first_row)
            if self.missing == "drop":
                keep &= ~bad
            place += column.width
        y = self._encode_target(batch, label, first_row, keep) if with_target else None
        return Encoded(torch.from_numpy(x[keep]), y, torch.from_numpy(keep))

    def _encode_target(self, batch: pa.RecordBatch, label: str, first_row: int, keep: Array) -> Tensor:
        """Targets (n, t) of the rows to keep; rows without a target are taken out of `keep`."""
        target = self.target
        values, bad = read_column(batch, target, label)
        if self.missing != "drop":
            _refuse_missing(target, bad, label, first_row)
        keep &= ~bad
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
        f"missing, NaN or infinite values ({listed}), the first at {first}; clean them, or choose 'drop' (the row) or "
        "'mean' as the policy for missing values (a target can only be dropped)"
    )


def read_column(batch: pa.RecordBatch, column: Column, label: str) -> tuple[Array, Array]:
    """Values (n,) of a column, float64 numbers or indices of categories (-1 if unknown), and which are missing (n,)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    data = plain(batch.column(column.name), column.name, label)
    if column.categories is None:
        values = as_numbers(data, column.name, label)
        return values, ~np.isfinite(values)
    text = as_text(data, column.name, label)
    index = pc.index_in(text, value_set=pa.array(column.categories, pa.string()))
    missing = pc.is_null(text).to_numpy(zero_copy_only=False)
    return pc.fill_null(index, -1).to_numpy(zero_copy_only=False), missing


def kind_of(data_type: pa.DataType) -> str:
    """How values of a type are used: as a "number", as a "category", or "" if they cannot be used."""
    import pyarrow.types as pt

    if pt.is_dictionary(data_type):
        return "category" if kind_of(data_type.value_type) else ""
    if pt.is_string(data_type) or pt.is_large_string(data_type):
        return "category"
    number = (pt.is_null, pt.is_integer, pt.is_floating, pt.is_boolean, pt.is_decimal)
    return "number" if any(check(data_type) for check in number) else ""


def plain(data: pa.Array, name: str, label: str) -> pa.Array:
    """Values without a dictionary, in a type that pyarrow computes with; other types raise a ValueError."""
    import pyarrow as pa
    import pyarrow.types as pt

    if not kind_of(data.type):
        raise ValueError(
            f"column {name!r} is {data.type} in {label}, neither a number nor a category; cast it in the table"
        )
    if pt.is_dictionary(data.type):
        data = data.dictionary_decode()
    if pt.is_decimal(data.type) and data.type.bit_width < 128:  # pyarrow does not compute with narrow decimals
        data = data.cast(pa.decimal128(38, data.type.scale))
    return data


def as_numbers(data: pa.Array, name: str, label: str) -> Array:
    """Values as float64, with NaN for missing ones."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return pc.cast(data, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"column {name!r} is {data.type} in {label}, which is no number: {error}") from error


def as_text(data: pa.Array, name: str, label: str) -> pa.Array:
    """Categories as exact text; whole numbers become digits, so that 1, 1.0, 1.00 and true are one category."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    try:
        if pt.is_boolean(data.type):
            data = pc.cast(data, pa.int8())
        if pt.is_floating(data.type) or pt.is_decimal(data.type):
            encoded = data.dictionary_encode()
            return pa.array(map(_digits, encoded.dictionary.to_pylist()), pa.string()).take(encoded.indices)
        text = pc.cast(data, pa.string())
        text.validate(full=True)  # a file can hold bytes that are not UTF-8
        return text
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"column {name!r} of {label} cannot be read as text: {error}; correct the table") from error


def _digits(value: float | Decimal | None) -> str | None:
    if value is None or not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else str(value)
