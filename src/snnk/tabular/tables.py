"""Tables in, numbers out: Parquet, CSV, Arrow files or folders of them, and Hugging Face datasets, in blocks of rows.

A block is what is counted whole or not at all: a Parquet row group, a record batch of any other format. `scan` makes
the cheap first pass: means, scales and categories of the columns. `Columns.encode` turns a record batch into inputs x
and targets y; a missing or infinite value is counted where it stands and raised, dropped or replaced by the mean.

Numbers may have any size that float64 has: means and deviations are taken in units of a power of two, in which squares
neither overflow nor vanish. Categories are compared as exact text, whole numbers by their digits. Integers and decimals
of an input become float64: those that differ by less than 1e-12 of their size are refused.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
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
PIECE_BYTES = 1 << 26  # of a file that are hashed at once; workers share the pieces
REACH = 2.0**24  # standard deviations: further from its mean, an angle in float32 is off by a radian and more
WHOLE = 2**53  # above it float64 has whole numbers only, and not each of them
CONSTANT = 1e-12  # a standard deviation below this part of the mean is rounding
LARGEST, SMALLEST = sys.float_info.max, math.ulp(0.0)
EXPONENTS = 1100  # of float64 lie within plus and minus this
OUTLIER_BITS = 20  # by which outliers are larger than all other values
FEW_VALUES = 10  # of fewer, none is an outlier
PLAIN_UNITS = (2.0**-60, 2.0**60)  # deviations of a target whose products with features are safe in float32


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
        self._fragments: dict[str, Any] | None = None
        if hasattr(source, "with_format") and isinstance(getattr(source, "num_rows", None), int):  # a datasets.Dataset
            self.schema, self.format = source.with_format("arrow")[:0].schema, "dataset"
            self._files = {entry["filename"]: Path(entry["filename"]) for entry in source.cache_files}
        else:
            self._open(source)
        self._stamps = {name: _stamp(path) for name, path in self._files.items()}

    def _open(self, source: Any) -> None:
        """Find the files, and read their headers: a truncated file fails here, before any work."""
        if not isinstance(source, str | os.PathLike):
            raise TypeError(
                f"rows must come from a path or a datasets.Dataset; got {type(source).__name__}. "
                "Write it to Parquet, or for a frame in memory use snnk.sklearn"
            )
        import pyarrow as pa
        import pyarrow.dataset as ds

        path = Path(source)
        if not path.exists():
            raise FileNotFoundError(
                f"no file or folder {path}; expected one of {', '.join(FORMATS)} or a folder of them"
            )
        root = path if path.is_dir() else path.parent
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in FORMATS) if path.is_dir() else [path]
        files = [p for p in files if not p.is_dir()]  # such as the folder all.parquet that Spark writes
        for odd in files:
            if not odd.is_file():
                raise ValueError(f"{odd} is no regular file, or a link to nothing; remove it or name another source")
        kinds = {FORMATS.get(p.suffix.lower(), p.suffix) for p in files}
        if len(kinds) != 1 or not kinds <= set(FORMATS.values()):
            found = ", ".join(sorted(kinds)) or "nothing"
            raise ValueError(f"{path} holds {found}; expected files of one format: {', '.join(FORMATS)}")
        self.format = kinds.pop()
        self._files = {str(p.relative_to(root)): p for p in files}
        try:
            dataset = ds.dataset([str(p) for p in files], format=_csv() if self.format == "csv" else self.format)
            self.schema = dataset.schema
            fragments = {str(Path(f.path).relative_to(root)): f for f in dataset.get_fragments()}
            _same_schema(
                {name: fragment.physical_schema for name, fragment in fragments.items()},
                types=self.format != "csv",  # whose types are guessed from the first rows of each file
            )
            if self.format == "parquet":
                fragments = {
                    f"{name}[{i}]": part
                    for name, fragment in fragments.items()
                    for i, part in enumerate(fragment.split_by_row_group())
                }
        except (OSError, ValueError, pa.ArrowException) as error:  # pyarrow raises ValueErrors of its own, too
            raise ValueError(f"{path} cannot be read as {self.format}: {error}; correct it, or name another") from error
        self._fragments = fragments

    def fingerprint(
        self, rank: int = 0, size: int = 1, gather: Callable[[Any], list[Any]] = lambda value: [value]
    ) -> str:
        """Hash of the schema and of the whole contents: of every byte of the files, or of every row of a dataset.

        A checkpoint depends on it, so nothing less will do: a file can be replaced by one of equal size and time that
        differs in the middle. Hashing reads about 1 GB per second and core, and `size` workers share the pieces, so it
        costs 100 seconds of processor time for 100 GB, for which the two passes behind it take hours. The name of the
        folder is no part of it.
        """
        pieces: dict[int, str] = {}
        for index, (name, read) in enumerate(self._pieces()):
            if index % size == rank:
                digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=32)
                for data in read():
                    digest.update(data)
                pieces[index] = digest.hexdigest()
        total = hashlib.sha256(str(self.schema).encode())
        for _, found in sorted(item for part in gather(pieces) for item in part.items()):
            total.update(found.encode())
        return total.hexdigest()

    def _pieces(self) -> Iterator[tuple[str, Callable[[], Iterator[Any]]]]:
        """(name, reader of its bytes) of each piece of the contents, in an order that is always the same."""
        if self._fragments is None:
            rows = self.source.with_format("arrow")
            for start in range(0, len(rows), BATCH_ROWS):
                yield f"rows {start}", partial(_row_bytes, rows, start)
            return
        for name, path in self._files.items():
            size = self._stamps[name][0]
            for start in range(0, max(size, 1), PIECE_BYTES):
                yield f"{name} {size} {start}", partial(_file_bytes, path, start)

    def check_unchanged(self) -> None:
        """Raise if a file is not the one that was opened: rows of two versions must not be mixed."""
        for name, path in self._files.items():
            if _stamp(path) != self._stamps[name]:
                raise ValueError(f"{path} was changed or replaced while it was read; run the same command again")

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
                    yield name, self._batches(name, fragment, columns)
                index += 1
                continue
            for i, batch in enumerate(self._batches(name, fragment, columns)):
                if mine(index, label := f"{name}[{i}]"):
                    yield label, iter([batch])
                index += 1

    def _batches(self, name: str, fragment: Any, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        """Record batches of a part of the table; pyarrow's errors come out as a ValueError that names it."""
        import pyarrow as pa

        try:
            yield from fragment.to_batches(columns=columns, batch_size=BATCH_ROWS, schema=self.schema)
        except (OSError, ValueError, pa.ArrowException) as error:
            if self.format != "csv":
                raise ValueError(f"{name} is damaged: {error}; copy it or write it again") from error
            raise ValueError(  # a cell that does not fit the type of its column
                f"{name} does not fit its columns, {_types(self.schema)}: {error}. Types are those of the "
                "first rows; convert the file to Parquet, or write its numbers alike"
            ) from error

    @property
    def names(self) -> list[str]:
        return list(self.schema.names)


def _csv() -> Any:
    """CSV in which an empty cell is a missing value, also in a column of text."""
    import pyarrow.csv as pc
    import pyarrow.dataset as ds

    return ds.CsvFileFormat(convert_options=pc.ConvertOptions(strings_can_be_null=True))


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes with a file's contents: a copy with an old time of modification still has a new inode or ctime."""
    try:
        found = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _file_bytes(path: Path, start: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            left = PIECE_BYTES
            while left and (data := file.read(min(left, 1 << 20))):
                left -= len(data)
                yield data
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def _row_bytes(rows: Any, start: int) -> Iterator[pa.Buffer]:
    """The values of a block of rows of a dataset, whatever else the buffers behind them hold."""
    import pyarrow as pa

    block, sink = rows[start : start + BATCH_ROWS].combine_chunks(), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, block.schema) as writer:
        writer.write_table(block)
    yield sink.getvalue()


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name}: {column.type}" for column in schema)


def _same_schema(schemas: dict[str, pa.Schema], types: bool) -> None:
    """Refuse files that differ in the names of their columns or, if asked, in the types."""
    (first, expected), *others = ((name, {c.name: c.type for c in schema}) for name, schema in schemas.items())
    for name, found in others:
        for column in sorted({*found, *expected}):
            kinds = [str(s[column]) if column in s else "absent" for s in (expected, found)]
            if not types and "absent" not in kinds:
                continue
            if kinds[0] != kinds[1]:
                raise ValueError(
                    f"column {column!r} is {kinds[0]} in {first} and {kinds[1]} in {name}; make the files alike"
                )


def standardised(values: Array, mean: Any, scale: Any) -> Array:
    """(values - mean) / scale in float64, also where the difference overflows or `scale` is subnormal."""
    exponent = np.frexp(scale)[1]
    with np.errstate(over="ignore"):  # a value too far away becomes infinite, and is refused by its size
        return (np.ldexp(values, -exponent) - np.ldexp(mean, -exponent)) / np.ldexp(scale, -exponent)


def constant_scale(mean: Any) -> Any:
    """A scale for a column of one value but for rounding, which stays small whatever the size of the value."""
    return np.ldexp(1.0, np.maximum(np.frexp(mean)[1] - 1, 0))


def size_counts(values: Array) -> Array:
    """How many values other than 0 have each binary exponent; counts of different rows add."""
    return np.bincount(np.frexp(values[values != 0])[1] + EXPONENTS, minlength=2 * EXPONENTS)


def count_outliers(counts: Array) -> int:
    """Number of values that dwarf all others: at most a hundredth, or one, and a million times as large.

    Mean and scale of a column would be theirs, and the differences among all other values would be lost in them.
    """
    sizes = np.flatnonzero(counts)
    for i in np.flatnonzero(np.diff(sizes) > OUTLIER_BITS):
        rest, above = int(counts[: sizes[i] + 1].sum()), int(counts[sizes[i] + 1 :].sum())
        if rest >= FEW_VALUES and above <= max(rest // 99, 1):
            return above
    return 0


def plain_unit(scale: Any) -> Any:
    """The unit in which a target is fitted: 1 for targets of ordinary size, else the power of two below `scale`."""
    ordinary = (scale >= PLAIN_UNITS[0]) & (scale <= PLAIN_UNITS[1])
    return np.where(ordinary, 1.0, np.ldexp(1.0, np.frexp(scale)[1] - 1))


@dataclass(frozen=True)
class Column:
    """A number with its mean and scale, or a category with its values. A target's scale is the unit of the fit."""

    name: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] | None = None

    @property
    def width(self) -> int:
        return 1 if self.categories is None else len(self.categories)

    @classmethod
    def from_dict(cls, stored: Any) -> Column:
        """Check what a file says, to the last type."""
        if not isinstance(stored, dict) or set(stored) != {"name", "mean", "scale", "categories"}:
            raise ValueError(f"a column must have name, mean, scale and categories; got {_short(stored)}")
        name, categories = stored["name"], stored["categories"]
        if not isinstance(name, str):
            raise ValueError(f"the name of a column must be a text; got {_short(name)}")
        for key in ("mean", "scale"):
            value = stored[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
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
    def from_dict(cls, stored: Any) -> Columns:
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
        with_target: bool = True,
        unseen: Counter[str] | None = None,
        first_row: int = 0,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Inputs (n, width) float32, targets (n, t) float64 or None, and which rows of the batch were kept, bool.

        A number to predict has the mean of its column taken off, and is in units of its scale. A number more than 2^24
        standard deviations away, of which float32 features would keep no digit, is treated as an infinite one. `unseen`
        counts categories that the first pass did not see, by column; they stay all zeros. The batch begins at row
        `first_row` of the block `label`.
        """
        rows = batch.num_rows
        x = np.zeros((rows, self.width), np.float32)
        keep, place = np.ones(rows, bool), 0
        for column in self.inputs:
            values, bad = read_column(batch, column, label)
            if column.categories is None:
                scaled = standardised(np.where(bad, column.mean, values), column.mean, column.scale)
                far = np.abs(scaled) > REACH
                if far.any() and not bad.any() and self.missing == "raise":
                    row = int(far.argmax())
                    raise ValueError(
                        f"column {column.name!r} is {values[row]:g} at row {first_row + row} of {label}, more than "
                        f"2^24 standard deviations ({column.scale:g}) from its mean in training ({column.mean:g}); "
                        "correct it, or choose 'drop' or 'mean' as the policy for missing values"
                    )
                bad = bad | far
                x[:, place] = np.where(bad, 0.0, scaled)
            else:
                known = values >= 0
                if unseen is not None:
                    unseen[column.name] += int((~known & ~bad).sum())
                x[np.flatnonzero(known), place + values[known].astype(int)] = 1.0
            if bad.any() and self.missing == "raise":
                where = f"row {first_row + int(bad.argmax())} of {label}"
                raise ValueError(_missing_message({column.name: int(bad.sum())}, where))
            if self.missing == "drop":
                keep &= ~bad
            place += column.width
        y = None
        if with_target:
            values, bad = read_column(batch, self.target, label)
            if bad.any() and self.missing != "drop":
                where = f"row {first_row + int(bad.argmax())} of {label}"
                raise ValueError(_missing_message({self.target.name: int(bad.sum())}, where))
            keep &= ~bad
            if self.target.categories is None:
                y = torch.from_numpy(standardised(values[keep], self.target.mean, self.target.scale))[:, None]
            else:
                unknown = ~bad & (values < 0)
                if unknown.any():  # dropping such rows would lose a class without a word
                    raise ValueError(
                        f"column {self.target.name!r} has a class at row {first_row + int(unknown.argmax())} of "
                        f"{label} that the first pass did not see: the table was changed. Run the same command again"
                    )
                y = torch.eye(self.target.width, dtype=torch.float64)[torch.from_numpy(values[keep].astype(np.int64))]
        return torch.from_numpy(x[keep]), y, torch.from_numpy(keep)


def _missing_message(counts: dict[str, int], first: str) -> str:
    listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
    return (
        f"missing, NaN or infinite values ({listed}), the first at {first}; clean them, or choose 'drop' (the row) or "
        "'mean' as the policy for missing values (a target can only be dropped)"
    )


def read_column(batch: pa.RecordBatch, column: Column, label: str) -> tuple[Array, Array]:
    """Values of a column as float64 (numbers) or category indices, -1 if unknown, and which are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    data = _plain(batch.column(column.name), column.name, label)
    if column.categories is None:
        values = _numbers(data, column.name, label)
        return values, ~np.isfinite(values)
    text = _as_text(data, column.name, label)
    index = pc.index_in(text, value_set=pa.array(column.categories, pa.string()))
    missing = pc.is_null(text).to_numpy(zero_copy_only=False)
    return pc.fill_null(index, -1).to_numpy(zero_copy_only=False), missing


def _kind(kind: pa.DataType) -> str:
    """How values of a type are used: as a "number", as a "category", or "" for not at all."""
    import pyarrow.types as pt

    if pt.is_dictionary(kind):
        return "category" if _kind(kind.value_type) else ""
    if pt.is_string(kind) or pt.is_large_string(kind):
        return "category"
    number = (pt.is_null, pt.is_integer, pt.is_floating, pt.is_boolean, pt.is_decimal)
    return "number" if any(check(kind) for check in number) else ""


def _plain(data: pa.Array, name: str, label: str) -> pa.Array:
    """Values as they are, of a dictionary those that it stands for; a type that cannot be used is refused."""
    import pyarrow as pa
    import pyarrow.types as pt

    if not _kind(data.type):
        raise ValueError(
            f"column {name!r} is {data.type} in {label}, neither a number nor a category; cast it in the table"
        )
    if pt.is_dictionary(data.type):
        data = data.dictionary_decode()
    if pt.is_decimal(data.type) and data.type.bit_width < 128:  # pyarrow computes with wider ones alone
        data = data.cast(pa.decimal128(38, data.type.scale))
    return data


def _numbers(data: pa.Array, name: str, label: str) -> Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        return pc.cast(data, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"column {name!r} is {data.type} in {label}, which is no number: {error}") from error


def _as_text(data: pa.Array, name: str, label: str) -> pa.Array:
    """Category values as strings, exactly; whole numbers as digits, so that 1, 1.0, 1.00 and true agree."""
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
        text.validate(full=True)  # a file can hold bytes that are no UTF-8
        return text
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"column {name!r} of {label} cannot be read as text: {error}; correct the table") from error


def _digits(value: Any) -> str | None:
    """A float or Decimal as text: None if it is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else str(value)


@dataclass
class _Moments:
    """Count, mean and sum of squared deviations of a number column, or the values of a category; mergeable.

    `mean` is in units of 2^exponent and `squares` in their squares, so that neither overflows or vanishes.
    """

    category: bool
    count: int = 0
    exponent: int = 0
    mean: float = 0.0
    squares: float = 0.0
    bad: int = 0
    where: tuple[int, int, str] | None = None  # the first missing value: number of its block, row in it, block's name
    values: set[str] = field(default_factory=set)
    integral: bool = True
    coarse: bool = False  # whether a float is so large that its neighbours are further than 1 away
    bounds: tuple[Any, Any] | None = None  # least and largest integer or decimal, exactly
    sizes: Array = field(default_factory=lambda: size_counts(np.zeros(0)))
    largest: tuple[float, tuple[int, int, str]] | None = None  # minus the largest size, and where it first stands

    def add(self, data: pa.Array, name: str, place: tuple[int, int, str]) -> Array:
        """Add values whose first one stands at `place`; returns which are missing."""
        import pyarrow.compute as pc

        data = _plain(data, name, place[2])
        if self.category:
            text = _as_text(data, name, place[2])
            bad = pc.is_null(text).to_numpy(zero_copy_only=False)
            self.values |= set(pc.unique(text.drop_null()).to_pylist())
        else:
            bad = self._add_numbers(data, name, place)
        if bad.any() and not self.bad:
            self.where = (place[0], place[1] + int(bad.argmax()), place[2])
        self.bad += int(bad.sum())
        if self.category and len(self.values) > MOST_CATEGORIES:
            raise ValueError(f"column {name!r} has more than {MOST_CATEGORIES} categories; leave it out with drop")
        return bad

    def _add_numbers(self, data: pa.Array, name: str, place: tuple[int, int, str]) -> Array:
        import pyarrow.compute as pc
        import pyarrow.types as pt

        number, start, label = place
        values = _numbers(data, name, label)
        bad = ~np.isfinite(values)
        good = values[~bad]
        if not len(good):
            return bad
        row = int(np.where(bad, 0, np.abs(values)).argmax())
        top = abs(float(values[row]))
        self.sizes = self.sizes + size_counts(good)
        self._note_largest((-top, (number, start + row, label)))
        exponent = math.frexp(top or SMALLEST)[1]
        scaled = np.ldexp(good, -exponent)
        mean = float(scaled.mean())
        self.combine(len(good), exponent, mean, float(np.square(scaled - mean).sum()))
        if pt.is_floating(data.type):
            whole = bool((good == np.rint(good)).all())
            self.coarse |= top > WHOLE
        else:
            least, largest = pc.min_max(data).as_py().values()
            self._widen((least, largest))
            whole = not pt.is_decimal(data.type) or bool((good == np.rint(good)).all())
        self.integral &= whole
        if self.integral and len(self.values) <= FEW_CLASSES:
            distinct = pc.unique(data)[: 3 * FEW_CLASSES]
            texts = _as_text(distinct, name, label).drop_null().to_pylist()
            self.integral = all(text.lstrip("-").isdigit() for text in texts)  # of decimals, which float64 rounds
            self.values |= set(texts)
        return bad

    def _note_largest(self, found: tuple[float, tuple[int, int, str]]) -> None:
        self.largest = min(self.largest or found, found)

    def _widen(self, bounds: tuple[Any, Any]) -> None:
        old = self.bounds or bounds
        self.bounds = min(old[0], bounds[0]), max(old[1], bounds[1])

    def combine(self, count: int, exponent: int, mean: float, squares: float) -> None:
        if not self.count:
            self.exponent = exponent
        top = max(self.exponent, exponent)
        self.mean, mean = math.ldexp(self.mean, self.exponent - top), math.ldexp(mean, exponent - top)
        self.squares = math.ldexp(self.squares, 2 * (self.exponent - top))
        total, delta = self.count + count, mean - self.mean
        self.mean += delta * count / total
        self.squares += math.ldexp(squares, 2 * (exponent - top)) + delta**2 * self.count * count / total
        self.count, self.exponent = total, top

    def merge(self, other: _Moments) -> None:
        if other.count:
            self.combine(other.count, other.exponent, other.mean, other.squares)
        if other.bounds:
            self._widen(other.bounds)
        if other.largest:
            self._note_largest(other.largest)
        self.sizes = self.sizes + other.sizes
        self.values |= other.values
        self.integral &= other.integral
        self.coarse |= other.coarse
        self.where = min((w for w in (self.where, other.where) if w), default=None)
        self.bad += other.bad

    def column(self, name: str) -> Column:
        """Mean and scale, rounded: the last bits of a sum, which depend on the order of the workers, are gone."""
        outliers = count_outliers(self.sizes)
        if outliers and self.largest:
            size, (_, row, label) = self.largest
            raise ValueError(
                f"column {name!r} has {outliers} of {self.count} numbers that are over a million times as large as all "
                f"others, up to {-size:g} in row {row} of {label}; the others would count for nothing. Correct them, "
                "make them missing values, or leave the column or these rows out"
            )
        spread = math.sqrt(self.squares / max(self.count, 1))
        if spread <= CONSTANT * abs(self.mean):
            if self.bounds and self.bounds[0] != self.bounds[1]:
                raise ValueError(
                    f"column {name!r} has numbers from {self.bounds[0]} to {self.bounds[1]}, which differ by less than "
                    "float64 keeps of them; subtract an offset, make them texts, or leave the column out with drop"
                )
            mean = _ldexp(self.mean, self.exponent)
            scale = float(constant_scale(mean))
            return Column(name, _ldexp(round(mean / scale * GRID) / GRID, math.frexp(scale)[1] - 1), scale)
        fraction, exponent = math.frexp(spread)
        spread = math.ldexp(float(np.float32(fraction)), exponent)
        mean = round(self.mean / spread * GRID) * spread / GRID
        return Column(name, _ldexp(mean, self.exponent), max(_ldexp(spread, self.exponent), SMALLEST))


def _ldexp(value: float, exponent: int) -> float:
    """value 2^exponent, which rounding may have moved past the largest number."""
    with np.errstate(over="ignore"):
        return float(np.clip(np.ldexp(value, exponent), -LARGEST, LARGEST))


@dataclass
class Scan:
    """The first pass over some blocks; scans of different blocks merge into one."""

    moments: dict[str, _Moments]
    rows: int = 0
    blocks: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # number, rows, rows without a missing value

    def merge(self, other: Scan) -> Scan:
        for name, moment in self.moments.items():
            moment.merge(other.moments[name])
        self.rows += other.rows
        self.blocks |= other.blocks
        return self


def plan_columns(table: Table, target: str, drop: tuple[str, ...] = ()) -> Scan:
    """An empty scan of the columns that will be used: all but those dropped; unusable types are refused by name."""
    if target in drop:
        raise ValueError(f"the target {target!r} cannot be left out with drop")
    for name in (target, *drop):
        if name not in table.names:
            raise ValueError(
                f"no column {name!r} in {table.source}; it has {', '.join(table.names) or 'none'}{_delimiter(table)}"
            )
    moments = {}
    for column in table.schema:
        if column.name in drop:
            continue
        kind = _kind(column.type)
        if not kind:
            raise ValueError(
                f"column {column.name!r} of {table.source} is {column.type}, neither a number nor a category; cast it "
                "or leave it out with drop"
            )
        moments[column.name] = _Moments(category=kind == "category")
    if len(moments) < 2:
        raise ValueError(f"no input columns are left beside the target {target!r}")
    return Scan(moments)


def _delimiter(table: Table) -> str:
    one = table.names[0] if len(table.names) == 1 and table.format == "csv" else ""
    return "; write the file with commas between its cells" if ";" in one or "\t" in one else ""


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
        before, complete = 0, 0
        for batch in batches:
            place, bad = (order[label], before, label), np.zeros(batch.num_rows, bool)
            for name, moment in empty.moments.items():
                bad |= moment.add(batch.column(name), name, place)
            before += batch.num_rows
            complete += int((~bad).sum())
            empty.rows += batch.num_rows
            progress(empty.rows)
        empty.blocks[label] = (order[label], before, complete)
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

    def category(name: str) -> Column:
        values = done.moments[name].values
        as_numbers = done.moments[name].category is False
        return Column(name, categories=tuple(sorted(values, key=int if as_numbers else None)))

    m = done.moments[target]
    if not (m.count or m.values):
        raise ValueError(f"target {target!r} has no values: each row has a missing, NaN or infinite one")
    few = m.integral and len(m.values) <= FEW_CLASSES
    classes = task == "classification" or (task == "auto" and (m.category or few))
    if classes and not m.category and m.coarse:
        raise ValueError(
            f"target {target!r} has floating numbers above 2^53, where float64 has not every whole number, so classes "
            "cannot be told apart; make it a column of integers or texts, or choose the task 'regression'"
        )
    if task == "regression" and m.category:
        raise ValueError(f"target {target!r} is a category; regression needs a number")
    if task == "classification" and not (m.category or few):
        raise ValueError(f"target {target!r} has more than {FEW_CLASSES} values or fractions; make it a text column")
    inputs = tuple(
        category(name) if moment.category else moment.column(name)
        for name, moment in done.moments.items()
        if name != target
    )
    if not any(column.width for column in inputs):
        raise ValueError("no input columns have a value; name a table that has some")
    if classes and len(m.values) < 2:
        raise ValueError(f"target {target!r} has one class only, {', '.join(m.values)}; nothing can be learnt")
    if classes:
        return Columns(inputs, category(target), missing)
    found = m.column(target)
    return Columns(inputs, Column(target, found.mean, float(plain_unit(found.scale))), missing)
