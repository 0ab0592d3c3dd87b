"""Rows of results in a new CSV, JSONL or Parquet file, written in parts; `snnk predict` writes all its outputs here."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from snnk import _io
from snnk._text import cell, quoting

FORMATS = (".csv", ".jsonl", ".parquet")
Columns = Mapping[str, Any]  # lists, or arrays of pyarrow, by name; all are of one length


def check_output(out: Path) -> None:
    """Raise an error if the format of a file, or its folder, is wrong."""
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"the output must end in {', '.join(FORMATS)}; got {out}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} for {out.name}; make it, or name another")


def key_names(key: str | Sequence[str]) -> list[str]:
    """Names of columns to copy, from a list, or from a text with commas between them.

    Example:
        >>> key_names("id,name,id"), key_names(["a,b"])
        (['id', 'name'], ['a,b'])
    """
    return list(dict.fromkeys(name for name in (key.split(",") if isinstance(key, str) else key) if name))


def check_keys(keys: Sequence[str], own: Sequence[str], source: object) -> None:
    """Raise an error if a copied column has the name of a column that the output has of its own."""
    twice = sorted({*keys} & {*own})
    if twice:
        raise ValueError(f"the output has a column {twice[0]!r} of its own; rename that of {source}, or leave it out")


def digits(values: Any) -> list[float]:
    """Probabilities (n,) of numpy as numbers with as few digits as float32 needs, for files that people read.

    Example:
        >>> import numpy as np
        >>> digits(np.array([1 / 3, 0.5]))
        [0.33333334, 0.5]
    """
    return [float(str(value)) for value in values.astype("float32")]


@contextmanager
def writing(
    out: Path, types: Mapping[str, Any], keys: Sequence[str], names: Sequence[str]
) -> Iterator[Callable[[Columns], None]]:
    """A function that adds columns of rows to a new file, which appears when the block ends.

    Args:
        out: the file, in the format of its name. None is an empty cell in CSV, and null in the others. NaN and
            infinity are null in JSONL, as JSON has neither.
        types: Arrow types of columns of a Parquet file. Default: by the values of the first part.
        keys: columns of the user, whose values stay as they are: they are to be found again. In all other columns of a
            CSV file, an apostrophe protects texts that a spreadsheet would run.
        names: texts that the cells may have; they decide how cells are quoted.

    Example:
        >>> import tempfile
        >>> out = Path(tempfile.mkdtemp(), "rows.csv")
        >>> with writing(out, {}, ["id"], []) as write:
        ...     write({"id": ["-a"], "predicted_y": ["-b"]})
        >>> out.read_text().split()
        ['id,predicted_y', "-a,'-b"]
    """
    kind = out.suffix.lower()
    with _io.replacing(out) as temporary, ExitStack() as held:
        if kind == ".parquet":
            yield _parquet(temporary, types, held)
            return
        file = held.enter_context(temporary.open("w", newline="", encoding="utf-8"))
        if kind == ".jsonl":

            def write_lines(columns: Columns) -> None:
                for row in zip(*map(_values, columns.values()), strict=True):
                    found = _finite(dict(zip(columns, row, strict=True)))
                    value = json.dumps(found, ensure_ascii=False, allow_nan=False, default=str)
                    file.write(f"{value}\n")

            yield write_lines
            return
        writer, header = csv.writer(file, quoting=quoting(names)), list[str]()

        def write_rows(columns: Columns) -> None:
            if not header:
                header.extend(columns)
                writer.writerow(map(cell, header))
            safe = [_values(c) if name in keys else [cell(v) for v in _values(c)] for name, c in columns.items()]
            writer.writerows(zip(*safe, strict=True))

        yield write_rows


def _values(column: Any) -> list[Any]:
    return column if isinstance(column, list) else column.to_pylist()


def _finite(value: Any) -> Any:
    """A value of JSON with None in place of NaN and infinity."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parquet(file: Path, types: Mapping[str, Any], held: ExitStack) -> Callable[[Columns], None]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as missing:
        raise ValueError("writing .parquet needs pyarrow; install it with: pip install 'snnk[tables]'") from missing
    writer: Any = None

    def write(columns: Columns) -> None:
        nonlocal writer
        try:
            if writer is None:
                schema = {name: types.get(name) or pa.array(values).type for name, values in columns.items()}
                writer = held.enter_context(pq.ParquetWriter(file, pa.schema(schema)))
            writer.write_table(pa.table(dict(columns), schema=writer.schema))
        except pa.ArrowException as error:
            raise ValueError(
                f"the kept columns have values of several types, which Parquet cannot hold: {error}; write .jsonl"
            ) from error

    return write
