"""Tables as blocks of rows: Parquet, CSV and Arrow files, folders of them, and Hugging Face datasets.

A block is the unit that a fit counts as a whole or not at all: a row group of a Parquet file, or one record batch of
any other source. Blocks have labels and an order, which are the same in every run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".arrow": "ipc",
    ".feather": "ipc",
    ".ipc": "ipc",
}
BATCH_ROWS = 1 << 16
PIECE_BYTES = 1 << 26  # number of bytes of a file that are hashed at once; workers share these pieces


class Dataset(Protocol):
    """The part of `datasets.Dataset` that is used here."""

    @property
    def num_rows(self) -> int: ...
    @property
    def cache_files(self) -> list[dict[str, str]]: ...
    def with_format(self, type: str) -> Any: ...


Source = str | os.PathLike[str] | Dataset


class Table:
    """The rows of a file, of a folder of files, or of a Hugging Face dataset, in blocks.

    Args:
        source: a path, or a `datasets.Dataset`.
        text: columns of CSV files that are read as the text that the file has, without a guess of their type: 007
            stays 007.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet as pq, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "t.parquet")
        >>> pq.write_table(pa.table({"a": [1.0, 2.0, 3.0], "y": [0, 1, 1]}), path, row_group_size=2)
        >>> [label for label, _ in Table(path).blocks()]
        ['t.parquet[0]', 't.parquet[1]']
    """

    def __init__(self, source: Source, text: Collection[str] = ()) -> None:
        self.source = source
        self._fragments: dict[str, Any] = {}
        self._rows: Any = None  # the dataset, if the source is one
        if isinstance(source, str | os.PathLike):
            self._open(Path(source), text)
        elif hasattr(source, "with_format") and isinstance(getattr(source, "num_rows", None), int):
            self._rows, self.format = source.with_format("arrow"), "dataset"
            self.schema: pa.Schema = self._rows[:0].schema
            self._files = {entry["filename"]: Path(entry["filename"]) for entry in source.cache_files}
        else:
            raise TypeError(
                f"rows must come from a path or a datasets.Dataset; got {type(source).__name__}. "
                "Write it to Parquet, or use snnk.sklearn for a frame in memory"
            )
        self._stamps = {name: _stamp(path) for name, path in self._files.items()}

    def _open(self, path: Path, text: Collection[str]) -> None:
        """Find the files and read their headers, so that a truncated file fails before any work."""
        import pyarrow as pa
        import pyarrow.csv as pc
        import pyarrow.dataset as ds

        if not path.exists():
            raise FileNotFoundError(
                f"no file or folder {path}; expected one of {', '.join(FORMATS)} or a folder of them"
            )
        root = path if path.is_dir() else path.parent
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in FORMATS) if path.is_dir() else [path]
        files = [p for p in files if not p.is_dir()]  # Spark writes folders with names such as all.parquet
        for odd in files:
            if not odd.is_file():
                raise ValueError(f"{odd} is no regular file, or a link to nothing; remove it or name another source")
        kinds = {FORMATS.get(p.suffix.lower(), p.suffix) for p in files}
        if len(kinds) != 1 or not kinds <= set(FORMATS.values()):
            found = ", ".join(sorted(kinds)) or "nothing"
            raise ValueError(f"{path} holds {found}; expected files of one format: {', '.join(FORMATS)}")
        self.format = kinds.pop()
        self._files = {str(p.relative_to(root)): p for p in files}
        reader = self.format
        if reader == "csv":  # an empty cell is a missing value in columns of text, too
            types = {name: pa.string() for name in text}
            reader = ds.CsvFileFormat(convert_options=pc.ConvertOptions(strings_can_be_null=True, column_types=types))
        try:
            dataset = ds.dataset([str(p) for p in files], format=reader)
            self.schema = dataset.schema
            fragments = {str(Path(f.path).relative_to(root)): f for f in dataset.get_fragments()}
            _check_schemas(
                {name: fragment.physical_schema for name, fragment in fragments.items()},
                types=self.format != "csv",  # pyarrow guesses the types of a CSV file from its first rows
            )
            if self.format == "parquet":
                fragments = {
                    f"{name}[{i}]": part
                    for name, fragment in fragments.items()
                    for i, part in enumerate(fragment.split_by_row_group())
                }
        except (OSError, ValueError, pa.ArrowException) as error:  # pyarrow also raises plain ValueErrors
            raise ValueError(f"{path} cannot be read as {self.format}: {error}; correct it, or name another") from error
        self._fragments = fragments

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.schema.names)

    def count_rows(self) -> int:
        """Number of rows, or 0 for CSV files, which would have to be read for it."""
        if self.format == "csv":
            return 0
        return len(self._rows) if self._rows is not None else sum(f.count_rows() for f in self._fragments.values())

    def blocks(
        self, mine: Callable[[int, str], bool] = lambda index, label: True, columns: list[str] | None = None
    ) -> Iterator[tuple[str, Iterator[pa.RecordBatch]]]:
        """Yield (label, record batches) of the blocks for which `mine(index, label)` is true, always in one order."""
        index = 0
        for start in self._starts():
            if mine(index, label := f"rows[{index}]"):
                yield label, iter(self._rows[start : start + BATCH_ROWS].select(columns or self.names).to_batches())
            index += 1
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
        """Record batches of a part of the table; an error of pyarrow becomes a ValueError that names the part."""
        import pyarrow as pa

        try:
            yield from fragment.to_batches(columns=columns, batch_size=BATCH_ROWS, schema=self.schema)
        except (OSError, ValueError, pa.ArrowException) as error:
            if self.format != "csv":
                raise ValueError(f"{name} is damaged: {error}; copy it or write it again") from error
            types = ", ".join(f"{column.name}: {column.type}" for column in self.schema)
            raise ValueError(
                f"{name} does not fit its columns, {types}: {error}. The types were guessed from the first rows; "
                "convert the file to Parquet, or write all numbers of a column in one form"
            ) from error

    def _starts(self) -> range:
        """The first row of each block of a dataset."""
        return range(0, 0 if self._rows is None else len(self._rows), BATCH_ROWS)

    def check_unchanged(self) -> None:
        """Raise if a file is not the one that was opened: rows of two versions must not be mixed."""
        for name, path in self._files.items():
            if _stamp(path) != self._stamps[name]:
                raise ValueError(f"{path} was changed or replaced while it was read; run the same command again")

    def fingerprint(
        self, rank: int = 0, size: int = 1, gather: Callable[[Any], list[Any]] = lambda value: [value]
    ) -> str:
        """Hash the schema and all contents: every byte of the files, or every row of a dataset.

        A checkpoint is valid for one content only, and a file can be replaced by one of equal size and time that
        differs in the middle. Hashing reads about 1 GB per second and core, which is little beside the two passes of a
        fit. The name of the folder is not part of the hash.

        Args:
            rank, size: number of this worker, and number of workers; they share the pieces.
            gather: returns the values that all workers pass to it.
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
        """Yield (name, reader of its bytes) of each piece of the contents, always in one order."""
        for start in self._starts():
            yield f"rows {start}", partial(_row_bytes, self._rows, start)
        for name, path in self._files.items() if self._rows is None else ():
            size = self._stamps[name][0]
            for start in range(0, max(size, 1), PIECE_BYTES):
                yield f"{name} {size} {start}", partial(_file_bytes, path, start)


def _stamp(path: Path) -> tuple[int, ...]:
    """Size, times and inode of a file. A copy with an old time of modification still has a new inode or ctime."""
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
    """The values of a block of a dataset. Its buffers may hold other rows, which do not count."""
    import pyarrow as pa

    block, sink = rows[start : start + BATCH_ROWS].combine_chunks(), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, block.schema) as writer:
        writer.write_table(block)
    yield sink.getvalue()


def _check_schemas(schemas: dict[str, pa.Schema], types: bool) -> None:
    """Refuse files whose columns differ in name or, if `types` is true, in type."""
    (first, expected), *others = ((name, {c.name: c.type for c in schema}) for name, schema in schemas.items())
    for name, found in others:
        for column in sorted({*found, *expected}):
            kinds = [str(s[column]) if column in s else "absent" for s in (expected, found)]
            if kinds[0] != kinds[1] and (types or "absent" in kinds):
                raise ValueError(
                    f"column {column!r} is {kinds[0]} in {first} and {kinds[1]} in {name}; make the files alike"
                )
