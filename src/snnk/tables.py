"""Tables in, numbers out: Parquet, CSV, Arrow files or folders of them, and Hugging Face datasets, in blocks of rows.

A block is what is counted whole or not at all: a Parquet row group, a record batch of any other format. `scan` makes
the cheap first pass: means, scales and categories of the columns. `Columns.encode` turns a record batch into inputs x
and targets y; a missing or infinite value is counted where it stands and raised, dropped or replaced by the mean.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from snnk import _checks

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, np.dtype[Any]]
MISSING = ("raise", "drop", "mean")
TASKS = ("auto", "regression", "classification")
FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".arrow": "ipc",
    ".feather": "ipc",
    ".ipc": "ipc",
}
MOST_CATEGORIES = 1000  # of one column; an identifier is not a category
FEW_CLASSES = 20  # an integer target with at most so many values is taken for classes
BATCH_ROWS = 1 << 16
GRID = 1 << 20  # steps in a standard deviation to which means are rounded
END_BYTES = 1 << 16  # of a file that are read to tell it from another


class Table:
    """Rows of a file, a folder of files, or a Hugging Face dataset, in blocks.

    Args:
        source: a path, or a `datasets.Dataset`.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet as pq, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "t.parquet")
        >>> pq.write_table(pa.table({"a": [1.0, 2.0, 3.0], "y": [0, 1, 1]}), path, row_group_size=2)
        >>> [label for label, _ in Table(path).blocks()]
        ['t.parquet[0]', 't.parquet[1]']
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        if hasattr(source, "with_format") and isinstance(getattr(source, "num_rows", None), int):  # a datasets.Dataset
            self.schema = source.with_format("arrow")[:0].schema
            self._fragments, self._files = None, []
            return
        if not isinstance(source, str | os.PathLike):
            raise TypeError(
                f"rows must come from a path or a datasets.Dataset; got {type(source).__name__}. "
                "Write it to Parquet, or for a frame in memory use snnk.estimators"
            )
        import pyarrow.dataset as ds

        path = Path(source)
        if not path.exists():
            raise FileNotFoundError(
                f"no file or folder {path}; expected one of {', '.join(FORMATS)} or a folder of them"
            )
        files = sorted(p for p in path.rglob("*") if p.suffix in FORMATS) if path.is_dir() else [path]
        kinds = {FORMATS.get(p.suffix, p.suffix) for p in files}
        if len(kinds) != 1 or not kinds <= set(FORMATS.values()):
            found = ", ".join(sorted(kinds)) or "nothing"
            raise ValueError(f"{path} holds {found}; expected files of one format: {', '.join(FORMATS)}")
        self.format = kinds.pop()
        root = path if path.is_dir() else path.parent
        try:
            dataset = ds.dataset([str(p) for p in files], format=_csv() if self.format == "csv" else self.format)
            self.schema = dataset.schema
            fragments = {str(Path(f.path).relative_to(root)): f for f in dataset.get_fragments()}
            if self.format != "csv":  # whose types are guessed from the first rows of the first file
                _same_schema({name: fragment.physical_schema for name, fragment in fragments.items()})
            if self.format == "parquet":  # a truncated file fails here, before any work
                fragments = {
                    f"{name}[{i}]": part
                    for name, fragment in fragments.items()
                    for i, part in enumerate(fragment.split_by_row_group())
                }
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise ValueError(f"{path} cannot be read as {self.format}: {error}") from error
        self._fragments, self._files = fragments, files

    def fingerprint(self) -> str:
        """Hash of the schema, and of the size and both ends of each file: a Parquet file's end has its statistics."""
        digest = hashlib.sha256(str(self.schema).encode())
        digest.update(str(getattr(self.source, "_fingerprint", "")).encode())  # of a datasets.Dataset
        for path in self._files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                digest.update(file.read(END_BYTES))
                file.seek(max(0, size - END_BYTES))
                digest.update(file.read())
        return digest.hexdigest()

    def blocks(
        self, mine: Callable[[int, str], bool] = lambda index, label: True, columns: list[str] | None = None
    ) -> Iterator[tuple[str, Iterator[pa.RecordBatch]]]:
        """(label, record batches) of each block whose (index, label) is `mine`, in an order that is always the same."""
        index = 0
        if self._fragments is None:
            rows = self.source.with_format("arrow")
            for start in range(0, len(rows), BATCH_ROWS):
                label = f"rows[{index}]"
                if mine(index, label):
                    yield label, iter(rows[start : start + BATCH_ROWS].select(columns or self.names).to_batches())
                index += 1
            return
        for name, fragment in self._fragments.items():
            if self.format == "parquet":
                if mine(index, name):
                    yield name, fragment.to_batches(columns=columns, batch_size=BATCH_ROWS, schema=self.schema)
                index += 1
                continue
            batches = enumerate(fragment.to_batches(columns=columns, batch_size=BATCH_ROWS, schema=self.schema))
            while True:
                try:
                    i, batch = next(batches)
                except StopIteration:
                    break
                except ValueError as error:  # pyarrow's own: a cell that does not fit the type of its column
                    raise ValueError(
                        f"{name} does not fit its columns, {_types(self.schema)}: {error}. Types are those of the "
                        "first rows; convert the file to Parquet, or write its numbers alike"
                    ) from error
                if mine(index, label := f"{name}[{i}]"):
                    yield label, iter([batch])
                index += 1

    @property
    def names(self) -> list[str]:
        return list(self.schema.names)


def _csv() -> Any:
    """CSV in which an empty cell is a missing value, also in a column of text."""
    import pyarrow.csv as pc
    import pyarrow.dataset as ds

    return ds.CsvFileFormat(convert_options=pc.ConvertOptions(strings_can_be_null=True))


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name}: {column.type}" for column in schema)


def _same_schema(schemas: dict[str, pa.Schema]) -> None:
    (first, expected), *others = schemas.items()
    for name, schema in others:
        found = {column.name: column.type for column in schema}
        for column in sorted({*found, *expected.names}):
            kinds = [str(s.field(column).type) if column in s.names else "absent" for s in (expected, schema)]
            if kinds[0] != kinds[1]:
                raise ValueError(
                    f"column {column!r} is {kinds[0]} in {first} and {kinds[1]} in {name}; make the files alike"
                )


@dataclass(frozen=True)
class Column:
    """A number with its mean and scale, or a category with its values."""

    name: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] | None = None

    @property
    def width(self) -> int:
        return 1 if self.categories is None else len(self.categories)


@dataclass(frozen=True)
class Columns:
    """How rows become numbers: input columns, the target, and what to do with missing values."""

    inputs: tuple[Column, ...]
    target: Column
    missing: str = "raise"

    @property
    def width(self) -> int:
        return sum(c.width for c in self.inputs)

    @property
    def names(self) -> list[str]:
        return [c.name if c.categories is None else f"{c.name}={v}" for c in self.inputs for v in c.categories or ("",)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Columns:
        def column(c: dict[str, Any]) -> Column:
            values = c["categories"]
            return Column(
                str(c["name"]), float(c["mean"]), float(c["scale"]), None if values is None else tuple(values)
            )

        missing = _checks.choose(stored["missing"], MISSING, "policy for missing values")
        return cls(tuple(column(c) for c in stored["inputs"]), column(stored["target"]), missing)

    def encode(
        self, batch: pa.RecordBatch, label: str, with_target: bool = True, unseen: Counter[str] | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Inputs (n, width) float32, targets (n, t) float64 or None, and which rows of the batch were kept, bool.

        A number to predict has the mean of its column taken off. `unseen` counts categories that the first pass did
        not see, by column; they stay all zeros.
        """
        rows = batch.num_rows
        x = np.zeros((rows, self.width), np.float32)
        keep, place = np.ones(rows, bool), 0
        for column in self.inputs:
            values, bad = read_column(batch, column)
            if bad.any() and self.missing == "raise":
                raise ValueError(_missing_message({column.name: int(bad.sum())}, f"row {int(bad.argmax())} of {label}"))
            if self.missing == "drop":
                keep &= ~bad
            if column.categories is None:
                x[:, place] = np.where(bad, 0.0, (values - column.mean) / column.scale)
            else:
                known = values >= 0
                if unseen is not None:
                    unseen[column.name] += int((~known & ~bad).sum())
                x[np.flatnonzero(known), place + values[known].astype(int)] = 1.0
            place += column.width
        y = None
        if with_target:
            values, bad = read_column(batch, self.target)
            bad |= values < 0 if self.target.categories is not None else False
            if bad.any() and self.missing != "drop":
                raise ValueError(
                    _missing_message({self.target.name: int(bad.sum())}, f"row {int(bad.argmax())} of {label}")
                )
            keep &= ~bad
            if self.target.categories is None:
                y = torch.from_numpy(values[keep].astype(np.float64) - self.target.mean)[:, None]
            else:
                y = torch.eye(self.target.width, dtype=torch.float64)[torch.from_numpy(values[keep].astype(np.int64))]
        return torch.from_numpy(x[keep]), y, torch.from_numpy(keep)


def _missing_message(counts: dict[str, int], first: str) -> str:
    listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
    return (
        f"missing, NaN or infinite values ({listed}), the first at {first}; clean them, or choose 'drop' (the row) or "
        "'mean' as the policy for missing values (a target can only be dropped)"
    )


def read_column(batch: pa.RecordBatch, column: Column) -> tuple[Array, Array]:
    """Values of a column as float64 (numbers) or category indices, -1 if unknown, and which are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    data = batch.column(column.name)
    if column.categories is None:
        values = _numbers(data, column.name)
        return values, ~np.isfinite(values)
    if pa.types.is_floating(data.type):  # classes are whole numbers; NaN is missing, a fraction is no class
        numbers = data.to_numpy(zero_copy_only=False)
        fractions = np.isfinite(numbers) & (numbers != np.rint(numbers))
        data = pa.array(np.where(fractions, -1e18, numbers), mask=~np.isfinite(numbers))
    text = _as_text(data)
    index = pc.index_in(text, value_set=pa.array(column.categories, pa.string()))
    missing = pc.is_null(text).to_numpy(zero_copy_only=False)
    return pc.fill_null(index, -1).to_numpy(zero_copy_only=False), missing


def _numbers(data: pa.Array, name: str) -> Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return pc.cast(data, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except ValueError as error:  # pyarrow's own
        raise ValueError(f"column {name!r} is {data.type} here, which is no number: {error}") from error


def _as_text(data: pa.Array) -> pa.Array:
    """Category values as strings; whole numbers and booleans as integers first, so that 1, 1.0 and true agree."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    if pt.is_boolean(data.type) or pt.is_floating(data.type) or pt.is_decimal(data.type):
        data = pc.cast(data, pa.int64(), safe=False)
    return pc.cast(data, pa.string())


@dataclass
class _Moments:
    """Count, mean and sum of squared deviations of a number column, or the values of a category; mergeable."""

    category: bool
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    bad: int = 0
    where: tuple[int, int, str] | None = None  # the first missing value: number of its block, row in it, block's name
    values: set[str] = field(default_factory=set)
    integral: bool = True

    def add(self, data: pa.Array, name: str, place: tuple[int, int, str]) -> None:
        """Add values whose first one stands at `place`."""
        import pyarrow.compute as pc

        if self.category:
            bad = pc.is_null(data).to_numpy(zero_copy_only=False)
            self.values |= set(pc.unique(_as_text(data.drop_null())).to_pylist())
        else:
            values = _numbers(data, name)
            bad = ~np.isfinite(values)
            good = values[~bad]
            if len(good):
                mean = float(good.mean())
                self.combine(len(good), mean, float(np.square(good - mean).sum()))
            if len(self.values) <= FEW_CLASSES and self.integral:
                self.integral = bool((good == np.rint(good)).all())
                self.values |= {str(int(v)) for v in np.unique(good)[: FEW_CLASSES + 1]} if self.integral else set()
        if bad.any() and not self.bad:
            self.where = (place[0], place[1] + int(bad.argmax()), place[2])
        self.bad += int(bad.sum())
        if self.category and len(self.values) > MOST_CATEGORIES:
            raise ValueError(f"column {name!r} has more than {MOST_CATEGORIES} categories; leave it out with drop")

    def combine(self, count: int, mean: float, squares: float) -> None:
        total = self.count + count
        delta = mean - self.mean
        self.mean += delta * count / total
        self.squares += squares + delta**2 * self.count * count / total
        self.count = total

    def merge(self, other: _Moments) -> None:
        if other.count:
            self.combine(other.count, other.mean, other.squares)
        self.values |= other.values
        self.integral &= other.integral
        self.where = min((w for w in (self.where, other.where) if w), default=None)
        self.bad += other.bad


@dataclass
class Scan:
    """The first pass over some blocks; scans of different blocks merge into one."""

    moments: dict[str, _Moments]
    rows: int = 0

    def merge(self, other: Scan) -> Scan:
        for name, moment in self.moments.items():
            moment.merge(other.moments[name])
        self.rows += other.rows
        return self


def plan_columns(table: Table, target: str, drop: tuple[str, ...] = ()) -> Scan:
    """An empty scan of the columns that will be used: all but those dropped; unusable types are refused by name."""
    import pyarrow.types as pt

    if target in drop:
        raise ValueError(f"the target {target!r} cannot be left out with drop")
    for name in (target, *drop):
        if name not in table.names:
            raise ValueError(f"no column {name!r}; the table has {', '.join(table.names)}")
    moments = {}
    for column in table.schema:
        if column.name in drop:
            continue
        kind = column.type
        text = pt.is_string(kind) or pt.is_large_string(kind) or pt.is_dictionary(kind)
        number = (
            pt.is_null(kind)
            or pt.is_integer(kind)
            or pt.is_floating(kind)
            or pt.is_boolean(kind)
            or pt.is_decimal(kind)
        )
        if not (text or number):
            raise ValueError(
                f"column {column.name!r} is {kind}, neither a number nor a category; cast it or leave it out with drop"
            )
        moments[column.name] = _Moments(category=text)
    if len(moments) < 2:
        raise ValueError(f"no input columns are left beside the target {target!r}")
    return Scan(moments)


def scan(
    table: Table,
    empty: Scan,
    mine: Callable[[int, str], bool] = lambda index, label: True,
    progress: Callable[[int], None] = lambda rows: None,
) -> Scan:
    """Add the blocks that are `mine` to a scan; `progress` is told the rows so far."""
    order: dict[str, int] = {}

    def numbered(index: int, label: str) -> bool:
        order[label] = index
        return mine(index, label)

    for label, batches in table.blocks(numbered, list(empty.moments)):
        before = 0
        for batch in batches:
            for name, moment in empty.moments.items():
                moment.add(batch.column(name), name, (order[label], before, label))
            before += batch.num_rows
            empty.rows += batch.num_rows
            progress(empty.rows)
    return empty


def make_columns(done: Scan, target: str, task: str = "auto", missing: str = "raise") -> Columns:
    """Columns from a finished scan; `task` is "regression", "classification" or "auto"."""
    _checks.choose(task, TASKS, "task")
    _checks.choose(missing, MISSING, "policy for missing values")
    if not done.rows:
        raise ValueError("the table has no rows")
    bad = {name: m.bad for name, m in done.moments.items() if m.bad}
    if bad and (missing == "raise" or (missing == "mean" and target in bad)):
        (_, row, label), name = min((m.where, name) for name, m in done.moments.items() if m.where)
        raise ValueError(_missing_message(bad, f"row {row} of {label}, column {name!r}"))

    def number(name: str) -> Column:
        m = done.moments[name]
        # rounded, so that the last bits of a sum, which depend on the order of the workers, are gone
        scale = float(np.float32(math.sqrt(m.squares / max(m.count, 1))))
        if scale <= 1e-12 * abs(m.mean):  # constant but for rounding
            scale = 1.0
        return Column(name, round(m.mean / scale * GRID) * scale / GRID, scale)

    def category(name: str) -> Column:
        values = done.moments[name].values
        as_numbers = done.moments[name].category is False
        return Column(name, categories=tuple(sorted(values, key=int if as_numbers else None)))

    m = done.moments[target]
    few = m.integral and len(m.values) <= FEW_CLASSES
    classes = task == "classification" or (task == "auto" and (m.category or few))
    if task == "regression" and m.category:
        raise ValueError(f"target {target!r} is a category; regression needs a number")
    if task == "classification" and not (m.category or few):
        raise ValueError(f"target {target!r} has more than {FEW_CLASSES} values or fractions; make it a text column")
    inputs = tuple(
        category(name) if moment.category else number(name) for name, moment in done.moments.items() if name != target
    )
    if classes and len(m.values) < 2:
        raise ValueError(
            f"target {target!r} has one class only, {', '.join(m.values) or 'none'}; nothing can be learnt"
        )
    return Columns(inputs, category(target) if classes else Column(target, number(target).mean), missing)
