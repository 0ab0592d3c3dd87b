"""Frames with categories, texts or dates, as inputs of a feature map: the encoding of `snnk fit`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from snnk.tabular.columns import Columns
from snnk.tabular.scaling import Array
from snnk.tabular.scan import MOST_CLASSES, Scan
from snnk.tabular.source import Table

if TYPE_CHECKING:
    import pyarrow as pa


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


def to_arrow(X: Any) -> pa.Table:
    """The rows of a frame as an Arrow table."""
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
    except ModuleNotFoundError as error:
        message = "frames with texts, categories or dates need pyarrow; install it with: pip install 'snnk[tables]'"
        raise ImportError(message) from error
    table = Table(X)
    found = pa.Table.from_batches([b for _, batches in table.blocks() for b in batches], table.schema)
    if not found.num_rows:
        raise ValueError(f"Found array with 0 sample(s) (shape={found.shape}) while a minimum of 1 is required.")
    for name, column in zip(found.column_names, found.columns, strict=True):
        if pa.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py():
            row = pc.index(pc.is_inf(column), True).as_py()
            raise ValueError(f"X is infinite at row {row}, column {name!r}; correct it, or make it a missing value")
    return found


def is_table(rows: Any) -> bool:
    """Whether rows are what `to_arrow` returned, not an array."""
    return not isinstance(rows, np.ndarray)


def find_columns(table: pa.Table, y: Array | None, missing: str) -> Columns:
    """The encoding of the columns of a table; `y` (n,) are numbers, or names of classes, if there are any."""
    import pyarrow as pa

    classes = y is not None and y.dtype.kind == "U"
    if y is None or (classes and not 2 <= len(np.unique(y)) <= MOST_CLASSES):
        y, classes = np.zeros(table.num_rows), False
    target = "y"
    while target in table.column_names:
        target += "_"
    whole = Table(table.append_column(target, pa.array(y)))
    found = Scan.start(whole, target).read(whole).columns("classification" if classes else "regression", "mean")
    return replace(found, missing=missing)  # `encode` names a missing value by its row in X


def encode(columns: Columns, table: pa.Table, *, fitted: bool) -> tuple[Tensor, Array]:
    """Inputs (k, width) of the rows that are kept, and which these are (n,).

    Rows that are `fitted` have codes of categories that do not depend on their own targets.
    """
    (batch,) = table.combine_chunks().to_batches()
    x, _, keep = columns.encode(batch, "X", with_target=False, fitted=fitted)
    return x, keep.numpy()
