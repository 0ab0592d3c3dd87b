"""A teacher for `fit`: any predictor, however slow, whose predictions become the target of a table.

    teach("rows.parquet", "taught.parquet", predict, "risk", classes=["low", "high"])      # every row is predicted once
    fit("taught.parquet", "model", FitConfig("risk"))

A column of a teacher's predictions is a target like any other: numbers, or names of classes. Probabilities of classes
are a struct column with one number per class, and the model is fitted to the probabilities themselves, which hold more
than the name of the likeliest class. The accuracy and the other figures of such a fit compare the model with its
teacher, and not with the truth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from snnk import _io
from snnk.tabular.source import Source, Table

if TYPE_CHECKING:
    import pyarrow as pa

Teacher = Callable[["pa.RecordBatch"], Any]


def teach(
    data: Source,
    out: str | os.PathLike[str],
    teacher: Teacher,
    target: str,
    *,
    classes: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write a Parquet file of a table whose target is what a teacher predicts; returns the number of rows.

    Args:
        data: rows without labels; see `snnk.tabular.fit`. A column with the name of the target is left out.
        out: the new file, which appears when all rows are written.
        teacher: maps a record batch (`batch.to_pandas()` gives a frame) to an array: (n,) numbers or names of classes,
            or (n, k) probabilities.
        target: name of the column of predictions.
        classes: names of the classes, in the order of the probabilities.
        progress: called with the rows that are done and the number of rows, or 0 if that is unknown.

    Example:
        >>> import pyarrow as pa, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "taught.parquet")
        >>> rows = pa.table({"a": [1.0, 2.0, 3.0]})
        >>> teach(rows, path, lambda batch: 10 * batch["a"].to_numpy(), "y")
        3
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    _io.check_out(out)
    table = Table(data)
    names = [name for name in table.names if name != target]
    done, total, writer = 0, table.count_rows(), None
    with _io.replacing(out) as temporary:
        try:
            for label, batches in table.blocks(columns=names):
                for batch in batches:
                    found = _column(teacher(batch), batch.num_rows, classes, label)
                    taught = pa.Table.from_arrays([*batch.columns, found], [*names, target])
                    writer = writer or pq.ParquetWriter(temporary, taught.schema)
                    writer.write_table(taught.cast(writer.schema))
                    done += batch.num_rows
                    progress(done, total)
            table.check_unchanged()
            if writer is None:
                raise ValueError(f"{table.source} has no rows to teach with; name another")
        finally:
            if writer is not None:
                writer.close()
    return done


def _column(found: Any, rows: int, classes: Sequence[str] | None, label: str) -> pa.Array:
    """The predictions for a batch as a column."""
    import pyarrow as pa

    values = np.asarray(found)
    shape = (rows,) if classes is None else (rows, len(classes))
    if values.shape != shape:
        kind = "one prediction per row; for probabilities, name the classes" if classes is None else "probabilities"
        raise ValueError(f"the teacher must return {shape}, {kind}; got {values.shape} for {label}")
    if classes is None:
        return pa.array(values.tolist() if values.dtype == object else values)
    if len(set(classes)) < len(classes) or len(classes) < 2:
        raise ValueError(f"classes must be two or more different names; got {list(classes)}")
    columns = [pa.array(column.astype(np.float64)) for column in values.T]
    return pa.StructArray.from_arrays(columns, names=list(map(str, classes)))
