"""Frames with categories, texts, dates or flags, as inputs of a feature map: the encoding of `snnk fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from snnk.tabular.columns import Columns
from snnk.tabular.scaling import Array
from snnk.tabular.scan import Scan
from snnk.tabular.source import Table

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = "X"  # what errors call the frame


def needs_columns(X: Any) -> bool:
    """Whether X is a frame with columns other than numbers and flags, which an array cannot hold."""
    if not hasattr(X, "__arrow_c_stream__"):
        return False
    dtypes = getattr(X, "dtypes", None)
    return dtypes is None or not all(map(_is_number, dtypes))


def _is_number(dtype: Any) -> bool:
    kind = getattr(dtype, "kind", None)  # of pandas and numpy; Polars has methods
    if kind is not None:
        return kind in "biuf"
    return bool(dtype.is_integer() or dtype.is_float() or str(dtype) == "Boolean")


def is_table(rows: Any) -> bool:
    """Whether rows are what `to_arrow` returned, not an array."""
    return not isinstance(rows, np.ndarray)


def to_arrow(X: Any) -> pa.Table:
    """A frame as an Arrow table, which shares its memory where it can."""
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        message = "frames with texts, categories or dates need pyarrow; install it with: pip install 'snnk[tables]'"
        raise ImportError(message) from error
    try:
        return pa.table(X)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ValueError(f"X cannot be read as columns of one type each: {error}; convert the column") from error


def find_columns(table: pa.Table, y: Array | None, missing: str) -> Columns:
    """The encoding of the columns of a table; `y` (n,) are numbers or names of classes, if there are any."""
    import pyarrow as pa

    target = "y"
    while target in table.column_names:
        target += "_"
    y = np.zeros(table.num_rows) if y is None else y
    whole = Table(table.append_column(target, pa.array(y)))
    task = "regression" if y.dtype.kind == "f" else "classification"
    return Scan.start(whole, target).read(whole).columns(task, missing)


def encode(columns: Columns, table: pa.Table) -> tuple[Tensor, Array]:
    """Inputs (k, width) of the rows that are kept, and which these are (n,)."""
    absent = [c.name for c in columns.inputs if c.name not in table.column_names]
    if absent:
        raise ValueError(f"X has no column {', '.join(map(repr, absent))}; it has {', '.join(table.column_names)}")
    (batch,) = table.combine_chunks().to_batches() or [None]
    if batch is None:
        raise ValueError("X has no rows; give at least one")
    x, _, keep = columns.encode(batch, ROWS, with_target=False)
    return x, keep.numpy()
