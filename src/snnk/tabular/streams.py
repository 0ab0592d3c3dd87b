"""Rows of Arrow data in memory or on the way: frames, tables, relations, iterables of record batches.

Anything with `__arrow_c_stream__` is read (pandas, Polars, DuckDB, pyarrow), and any iterable of record batches or of
such frames. A fit reads its rows several times. So a reader or a generator, which can be read once, is refused, and a
callable that returns a new one is asked for.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1 << 16


class Stream:
    """The rows of a source in chunks of `BATCH_ROWS`, whatever the sizes of its own batches; each pass is a new one.

    Args:
        source: an object with `__arrow_c_stream__`, an iterable of record batches, or a callable that returns one.

    Example:
        >>> import pyarrow as pa
        >>> stream = Stream(lambda: (pa.record_batch({"a": [i]}) for i in range(3)))
        >>> [chunk["a"].to_pylist() for chunk in stream.chunks()], stream.rows
        ([[0, 1, 2]], 3)
    """

    def __init__(self, source: Any) -> None:
        import pyarrow as pa

        if not callable(source) and is_one_shot(source):
            raise ValueError(
                f"a {type(source).__name__} can be read once, and its rows are needed several times; give a callable "
                "that returns a new one each time, such as lambda: make_reader()"
            )
        self._source = source
        self.name = f"the {type(source).__name__}" if not callable(source) else "the callable"
        self.rows = 0  # of the last complete pass
        self._fixed = isinstance(source, pa.Table | pa.RecordBatch)  # their values cannot change
        self._seen: dict[int, bytes] = {}  # digests of chunks
        # of the first pass, so that a query does not run for its schema alone
        self._next: tuple[pa.Schema, Iterator[pa.RecordBatch]] | None = self._open()
        self.schema: pa.Schema = self._next[0]

    def chunks(self) -> Iterator[pa.Table]:
        """A pass over the rows."""
        import pyarrow as pa

        schema, batches = self._next or self._open()
        self._next = None
        if schema != self.schema:
            raise ValueError(f"{self.name} has columns {schema} now, and had {self.schema}; give the same rows again")
        held: list[pa.RecordBatch] = []
        size, rows = 0, 0
        for batch in batches:
            start = 0
            while size + batch.num_rows - start >= BATCH_ROWS:
                held.append(batch.slice(start, BATCH_ROWS - size))
                start += BATCH_ROWS - size
                yield pa.Table.from_batches(held, schema)
                held, size, rows = [], 0, rows + BATCH_ROWS
            if start < batch.num_rows:
                held.append(batch.slice(start))
                size += batch.num_rows - start
        if size:
            yield pa.Table.from_batches(held, schema)
        if self.rows and self.rows != rows + size:
            raise ValueError(f"{self.name} has {rows + size} rows now, and had {self.rows}; {SAME}")
        self.rows = rows + size

    def check(self, index: int, chunk: pa.Table) -> pa.Table:
        """Raise an error if a chunk is not the one that an earlier pass had in its place."""
        if not self._fixed and self._seen.setdefault(index, found := digest(chunk)) != found:
            raise ValueError(f"{self.name} has other values in rows {index * BATCH_ROWS} and up than before; {SAME}")
        return chunk

    def _open(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """The schema and the batches of a new pass."""
        import pyarrow as pa

        source = self._source() if callable(self._source) else self._source
        try:
            found = _frame(source)
            if found is not None:
                schema, batches = found
            else:
                batches = (batch for item in source for batch in _batches(item))
                first = next(batches, None)
                if first is None:
                    raise ValueError(f"{self.name} has no record batches; a table without rows is one of no rows")
                schema, batches = first.schema, _chain(first, batches)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.name} cannot be read as Arrow data: {error}; correct it, or cast it") from error
        refuse_duplicates(schema.names, self.name)
        plain = pa.schema([(c.name, _plain_type(c.type)) for c in schema])
        return plain, (self._like(batch, plain) for batch in batches)

    def _like(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        import pyarrow as pa

        try:
            if sorted(batch.schema.names) != sorted(schema.names):
                raise ValueError(f"it has columns {', '.join(batch.schema.names)}")
            if batch.schema == schema:
                return batch
            return pa.record_batch([_cast(batch.column(c.name), c.type) for c in schema], schema=schema)
        except (pa.ArrowException, ValueError) as error:
            raise ValueError(f"a batch of {self.name} is not like the first one: {error}; make them alike") from error


SAME = "it must give the same rows in the same order each time. Sort it, or write it to Parquet"


def is_stream(source: Any) -> bool:
    """Whether `Stream` takes an object; texts, bytes and dictionaries are iterable, but no batches."""
    if isinstance(source, str | bytes | dict | type):
        return False
    return callable(source) or hasattr(source, "__arrow_c_stream__") or isinstance(source, Iterable)


def is_one_shot(source: Any) -> bool:
    """Whether an object is spent after one pass: a reader, an iterator, a generator."""
    return hasattr(source, "__next__") or type(source).__name__ in ("ArrowArrayStream", "ArrayStream")


def refuse_duplicates(names: Iterable[str], where: str) -> None:
    """Raise an error if two columns have one name."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{where} has several columns with the name {', '.join(map(repr, twice))}; rename all but one")


def digest(chunk: pa.Table) -> bytes:
    """A hash of the values of a table; it does not depend on its batches, dictionaries or what is under nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.types as pt

    found = hashlib.blake2b(digest_size=32)
    for column in chunk.columns:
        values = column.combine_chunks()
        if pt.is_dictionary(values.type):
            values = pc.cast(values, values.type.value_type)
        block, sink = pa.table([values.drop_null()], names=["values"]), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, block.schema) as writer:
            writer.write_table(block.combine_chunks())
        found.update(sink.getvalue())
        if values.null_count:
            found.update(pc.is_null(values).to_numpy(zero_copy_only=False).tobytes())
    return found.digest()


def _frame(source: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]] | None:
    """Schema and batches of a frame, a table or a reader; None for other objects."""
    import pyarrow as pa

    if hasattr(source, "iloc") and hasattr(source, "columns"):  # pandas, whose index is no column
        refuse_duplicates(list(map(str, source.columns)), "the frame")
        table = pa.Table.from_pandas(source, preserve_index=False)
        return table.schema, iter(table.to_batches())
    if isinstance(source, pa.ChunkedArray | pa.Array) or not hasattr(source, "__arrow_c_stream__"):
        return None
    reader = pa.RecordBatchReader.from_stream(source)
    return reader.schema, iter(reader)


def _batches(item: Any) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    if isinstance(item, pa.RecordBatch):
        yield item
    elif (found := _frame(item)) is not None:
        yield from found[1]
    else:
        raise TypeError(f"rows must come as record batches, tables or frames; got {type(item).__name__}")


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa
    import pyarrow.types as pt

    if pt.is_dictionary(values.type) and pt.is_string_view(values.type.value_type):  # pyarrow cannot take from views
        values = pa.DictionaryArray.from_arrays(values.indices, values.dictionary.cast(pa.string()))
    return values.cast(kind)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Texts as plain ones: pyarrow hardly computes with the views of Polars, and dictionaries differ by batch."""
    import pyarrow as pa
    import pyarrow.types as pt

    inner = kind.value_type if pt.is_dictionary(kind) else kind
    return pa.string() if pt.is_string_view(inner) or pt.is_string(inner) or pt.is_large_string(inner) else kind
