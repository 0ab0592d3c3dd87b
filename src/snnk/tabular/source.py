"""Tables as blocks of rows: Parquet, CSV, TSV and Arrow files, folders of them, frames, streams and datasets.

A block is the unit that a fit counts as a whole or not at all: a row group of a Parquet file, a record batch of another
file, or 65,536 rows of any other source. Blocks have labels and an order, which are the same in every run.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from snnk.tabular import delimited
from snnk.tabular.streams import BATCH_ROWS, Stream, digest, is_stream, refuse_duplicates

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".csv.gz": "csv",
    ".tsv": "csv",
    ".tsv.gz": "csv",
    ".arrow": "ipc",
    ".feather": "ipc",
    ".ipc": "ipc",
}
PIECE_BYTES = 1 << 26  # number of bytes of a file that are hashed at once; workers share these pieces


class Dataset(Protocol):
    """The part of `datasets.Dataset` that is used here."""

    @property
    def num_rows(self) -> int: ...
    def with_format(self, type: str) -> Any: ...


class ArrowStream(Protocol):
    """Frames, tables and readers that give Arrow data."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


Rows = ArrowStream | Iterable[Any]  # the items are record batches or frames
Source = str | os.PathLike[str] | Dataset | Rows | Callable[[], Rows]


class Table:
    """The rows of a file, of a folder of files, of a frame, a stream or a Hugging Face dataset, in blocks.

    Args:
        source: a path; a `datasets.Dataset`; anything with `__arrow_c_stream__`, such as a frame of pandas or Polars, a
            relation of DuckDB or a table of pyarrow; a list of record batches; or a callable without arguments that
            returns a new reader or iterator of record batches whenever it is called.
        text: columns of CSV files that are read as the text that the file has, without a guess of their type: 007
            stays 007.
        exact: columns of CSV files whose whole numbers stay integers. Others become float64, as any later row may have
            a fraction.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet as pq, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "t.parquet")
        >>> pq.write_table(pa.table({"a": [1.0, 2.0, 3.0], "y": [0, 1, 1]}), path, row_group_size=2)
        >>> [label for label, _ in Table(path).blocks()]
        ['t.parquet[0]', 't.parquet[1]']
    """

    def __init__(self, source: Source, text: Collection[str] = (), exact: Collection[str] = ()) -> None:
        self.source = str(source) if isinstance(source, str | os.PathLike) else f"the {type(source).__name__}"
        self._fragments: dict[str, Any] = {}
        self._files: dict[str, Path] = {}
        self._rows: Any = None  # the dataset, if the source is one
        self._stream: Stream | None = None
        if isinstance(source, str | os.PathLike):
            self._open(Path(source), text, exact)
        elif hasattr(source, "with_format") and isinstance(getattr(source, "num_rows", None), int):
            self._rows, self.format = source.with_format("arrow"), "dataset"
            self.schema: pa.Schema = self._rows[:0].schema
            cached: list[dict[str, str]] = getattr(source, "cache_files", [])
            self._files = {entry["filename"]: Path(entry["filename"]) for entry in cached}
        elif is_stream(source):
            self._stream, self.format = Stream(source), "stream"
            self.source, self.schema = self._stream.name, self._stream.schema
        else:
            raise TypeError(
                "rows must come from a path, a frame or another object with __arrow_c_stream__, record batches, a "
                f"callable that returns some, or a datasets.Dataset; got {type(source).__name__}"
            )
        self._stamps = {name: _stamp(path) for name, path in self._files.items()}

    def _open(self, path: Path, text: Collection[str], exact: Collection[str]) -> None:
        """Find the files and read their headers, so that a truncated file fails before any work."""
        import pyarrow as pa
        import pyarrow.dataset as ds

        if not path.exists():
            raise FileNotFoundError(
                f"no file or folder {path}; expected one of {', '.join(FORMATS)} or a folder of them"
            )
        root = path if path.is_dir() else path.parent
        files = sorted(p for p in path.rglob("*") if _ending(p) in FORMATS) if path.is_dir() else [path]
        files = [p for p in files if not p.is_dir()]  # Spark writes folders with names such as all.parquet
        for odd in files:
            if not odd.is_file():
                raise ValueError(f"{odd} is no regular file, or a link to nothing; remove it or name another source")
        kinds = {FORMATS.get(_ending(p), p.suffix) for p in files}
        if len(kinds) != 1 or not kinds <= set(FORMATS.values()):
            folder, expected = path.is_dir(), f"expected files of one format: {', '.join(FORMATS)}"
            found = ", ".join(sorted(kinds)) or ("nothing" if folder else "a file without an ending")
            advice = "" if folder else "; convert it, for example with DuckDB, pandas or Polars"
            raise ValueError(f"{path} {'holds' if folder else 'is'} {found}; {expected}{advice}")
        self.format = kinds.pop()
        self._files = {str(p.relative_to(root)): p for p in files}
        try:
            reader = delimited.reader_of(self._files, text, exact) if self.format == "csv" else self.format
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
        except (OSError, EOFError, zlib.error, ValueError, pa.ArrowException) as error:  # also plain ValueErrors
            self._refuse_duplicates()
            said = self._not_utf8() or f"{path} cannot be read as {self.format}: {error}; correct it, or name another"
            raise ValueError(said) from error
        self._fragments = fragments
        refuse_duplicates(self.names, str(path))
        if self.format == "csv" and any(pa.types.is_binary(column.type) for column in self.schema):
            raise ValueError(self._not_utf8() or f"{path} has bytes that are no text; correct it, or name another")

    def _refuse_duplicates(self) -> None:
        """Raise an error that names the columns of a file that have one name; pyarrow's own does not."""
        import pyarrow as pa

        for name, path in self._files.items():
            found: list[str] = []
            with suppress(OSError, EOFError, zlib.error, pa.ArrowException):
                found = _names(path, self.format)
            refuse_duplicates(found, name)

    def _not_utf8(self) -> str:
        """A sentence on the first byte of a CSV file that is no text, or ""."""
        with suppress(OSError, EOFError, zlib.error):
            for name, path in self._files.items() if self.format == "csv" else ():
                if said := delimited.find_not_utf8(path, name):
                    return said
        return ""

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.schema.names)

    def count_rows(self) -> int:
        """Number of rows, or 0 where it is not known before they are read."""
        if self.format == "csv":
            return 0
        if self._stream is not None:
            return self._stream.rows
        return len(self._rows) if self._rows is not None else sum(f.count_rows() for f in self._fragments.values())

    def blocks(
        self, mine: Callable[[int, str], bool] = lambda index, label: True, columns: list[str] | None = None
    ) -> Iterator[tuple[str, Iterator[pa.RecordBatch]]]:
        """Yield (label, record batches) of the blocks for which `mine(index, label)` is true, always in one order."""
        index = 0
        for read in self._chunks():
            if mine(index, label := f"rows[{index}]"):
                yield label, iter(read().select(columns or self.names).combine_chunks().to_batches())
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
            if self.format != "csv" or isinstance(error, OSError):
                raise ValueError(f"{name} is damaged: {error}; copy it or write it again") from error
            raise ValueError(delimited.explain(self._files[name], name, error, self.schema)) from error

    def _chunks(self) -> Iterator[Callable[[], pa.Table]]:
        """Functions that read the blocks of a dataset or of a stream, always in one order."""
        if self._rows is not None:
            for start in range(0, len(self._rows), BATCH_ROWS):
                yield partial(self._rows.__getitem__, slice(start, start + BATCH_ROWS))
        if self._stream is not None:
            for index, chunk in enumerate(self._stream.chunks()):
                yield partial(self._stream.check, index, chunk)

    def check_unchanged(self) -> None:
        """Raise if a file is not the one that was opened: rows of two versions must not be mixed."""
        for name, path in self._files.items():
            if _stamp(path) != self._stamps[name]:
                raise ValueError(f"{path} was changed or replaced while it was read; run the same command again")

    def fingerprint(
        self, rank: int = 0, size: int = 1, gather: Callable[[Any], list[Any]] = lambda value: [value]
    ) -> str:
        """Hash the schema and all contents: every byte of the files, or every row of another source.

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
        for index, read in enumerate(self._chunks()):
            yield f"rows {index * BATCH_ROWS}", partial(_row_bytes, read)
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


def _row_bytes(read: Callable[[], pa.Table]) -> Iterator[bytes]:
    yield digest(read())


def _ending(path: Path) -> str:
    """The ending of a name in small letters, with that in front of .gz."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()


def _names(path: Path, kind: str) -> list[str]:
    """Names of the columns of a file, as they are there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "csv":
        return delimited.read_header(path).names
    if kind == "parquet":
        return list(pq.read_schema(path).names)
    with pa.ipc.open_file(path) as file:
        return list(file.schema.names)


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
