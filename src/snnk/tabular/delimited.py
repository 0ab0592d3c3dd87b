"""CSV and TSV files: how pyarrow reads them, and what is wrong with those that it cannot read.

The delimiter is found from the header line, and a decimal comma from the first cells. Files may be compressed with
gzip; their text must be UTF-8. pyarrow guesses the type of a column from the first megabyte. Whole numbers there do not
mean that all are whole, so they are read as float64, unless float64 would round one of them off.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

DELIMITERS = (",", "\t", ";")
HEADER_BYTES = 1 << 20
WHOLE = 2**53  # above it, float64 does not have every whole number
CONVERSION = re.compile(r"CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to (\w+).*?: invalid value '(.*)'")
KINDS = {"int64": "whole numbers", "double": "numbers", "bool": "truth values", "null": "no values"}


class Header(NamedTuple):
    """What the beginning of a file shows."""

    names: list[str]
    delimiter: str
    decimal: str  # "," if a file with another delimiter has numbers such as 1,5 and none such as 1.5


def read_header(path: Path) -> Header:
    """Names of the columns, and the delimiter: the one that the header has most of, outside of quotes.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "t.csv")
        >>> _ = path.write_text('a;"b,c";d\\n1;2,5;3\\n')
        >>> read_header(path)
        Header(names=['a', 'b,c', 'd'], delimiter=';', decimal=',')
    """
    with _open(path) as file:
        text = file.read(HEADER_BYTES).decode("utf-8-sig", "replace")
    line = re.split(r"[\r\n]", re.sub(r'"[^"]*"', "", text), maxsplit=1)[0]
    own = "\t" if ".tsv" in path.name.lower() else ","
    delimiter = max((own, *DELIMITERS), key=line.count)  # of equal counts, the first
    number = r'[-+]?\d+[{}]\d+"?'
    has = {mark: re.search(rf'[{delimiter}\n]"?{number.format(mark)}[{delimiter}\r\n]', text) for mark in ",."}
    decimal = "," if delimiter != "," and has[","] and not has["."] else "."
    return Header(next(csv.reader(io.StringIO(text), delimiter=delimiter), []), delimiter, decimal)


def reader_of(files: dict[str, Path], text: Collection[str], exact: Collection[str] = ()) -> Any:
    """How pyarrow reads files, whose delimiters must agree; an empty cell is a missing value, in texts, too.

    Columns in `text` are texts, and those in `exact` have the type that pyarrow guesses.
    """
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.dataset as ds

    (first, found), *others = ((name, read_header(path)) for name, path in files.items())
    for name, other in others:
        if other.delimiter != found.delimiter:
            raise ValueError(
                f"{first} has {found.delimiter!r} between its cells and {name} has {other.delimiter!r}; make them alike"
            )
    parse = pc.ParseOptions(delimiter=found.delimiter)

    def convert(types: dict[str, pa.DataType]) -> pc.ConvertOptions:
        return pc.ConvertOptions(strings_can_be_null=True, column_types=types, decimal_point=found.decimal)

    types = {name: pa.string() for name in text}
    with suppress(OSError, EOFError, StopIteration, zlib.error, pa.ArrowException):  # the dataset raises them again
        whole = _whole_numbers(next(iter(files.values())), parse, convert(types))
        types = {name: pa.float64() for name in whole if name not in exact} | types
    return ds.CsvFileFormat(parse_options=parse, convert_options=convert(types))


def _whole_numbers(path: Path, parse: Any, convert: Any) -> list[str]:
    """Columns with whole numbers in the first block of a file, of which float64 keeps every digit."""
    import pyarrow.compute as pc
    import pyarrow.csv
    import pyarrow.types as pt

    with _open(path) as file, pyarrow.csv.open_csv(file, parse_options=parse, convert_options=convert) as reader:
        first = reader.read_next_batch()
    found = []
    for name, column in zip(first.schema.names, first.columns, strict=True):
        if pt.is_integer(column.type):
            bounds = pc.min_max(column).as_py().values()
            if all(value is None or abs(value) <= WHOLE for value in bounds):
                found.append(name)
    return found


def explain(path: Path, name: str, error: Exception, schema: pa.Schema) -> str:
    """What is wrong with a file that pyarrow could not read, and what to do about it."""
    if "UTF8" in str(error) and (said := find_not_utf8(path, name)):
        return said
    if found := CONVERSION.search(str(error)):
        index, row, kind, value = found.groups()
        with suppress(OSError, EOFError, IndexError):
            column = read_header(path).names[int(index)]
            where = f"row {int(row) - 2} of {name}" if row else name
            return (
                f"column {column!r} has {value!r} at {where}, and {KINDS.get(kind, 'dates or times')} in the first "
                "rows; correct it, empty the cell, leave the column out with drop, or convert the file to Parquet"
            )
    types = ", ".join(f"{column.name}: {column.type}" for column in schema)
    return (
        f"{name} does not fit its columns, {types}: {error}. The types were guessed from the first rows; convert the "
        "file to Parquet, or write all values of a column in one form"
    )


def find_not_utf8(path: Path, name: str) -> str:
    """A sentence on the first byte of a file that is not UTF-8, or "" if there is none."""
    decoder, done, lines = codecs.getincrementaldecoder("utf-8")(), 0, 1
    with _open(path) as file:
        while data := file.read(1 << 20):
            before = decoder.getstate()[0]
            try:
                decoder.decode(data)
            except UnicodeDecodeError as error:
                wide = done == 0 and data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                byte, line = (before + data)[error.start], lines + data[: max(error.start - len(before), 0)].count(10)
                return (
                    f"{name} is not UTF-8 text: byte {done - len(before) + error.start}, in line {line}, is "
                    f"0x{byte:02X}; save it as UTF-8, for example with iconv -f {'utf-16' if wide else 'latin1'} "
                    f"-t utf-8"
                )
            done, lines = done + len(data), lines + data.count(10)
    if decoder.getstate()[0]:
        return f"{name} is not UTF-8 text: it ends within a character, at byte {done}; copy it again"
    return ""


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]
