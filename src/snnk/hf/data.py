"""Files of texts, tables and images: the one reader that compression, fine-tuning and experiments share.

| ending | read as |
|---|---|
| .csv | values separated by commas, quoted where they have commas; the first line has the names of the columns |
| .tsv | values separated by tabs, without quotes, as GLUE's files are; for calibration they may also be quoted |
| .jsonl, .ndjson | one JSON object per line; keys are columns |
| .parquet, .pq, .arrow, .feather, .ipc | a table of Arrow |
| a folder | images (.png, .jpg, .jpeg) |

Files of text are UTF-8, with or without a byte order mark, and may end in .gz.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from snnk import _checks

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGES = (".png", ".jpg", ".jpeg")
LINES = (".tsv", ".csv", ".jsonl", ".ndjson")  # formats of text, which may be gzipped
ARROW = {".parquet": "Parquet", ".pq": "Parquet", ".arrow": "Arrow", ".feather": "Arrow", ".ipc": "Arrow"}
AT_ONCE = 65_536  # rows of a table of Arrow
HEAD = 100  # rows that decide whether a column has texts
Columns = Mapping[str, list[Any]]
TokenRow = dict[str, list[int]]  # the outputs of a tokenizer for one text: input_ids, attention_mask, ...


def read_columns(
    source: str | Path, header: Sequence[str] | None = None, *, spare: bool = False
) -> dict[str, list[Any]]:
    """All columns of a file, or of a data set of the hub, which is written name[:config][@split].

    Args:
        source: the file or the name.
        header: names of the columns of a .csv or .tsv without a header.
        spare: lines of a .tsv may have more values than columns, as GLUE's MNLI and QQP have; these are left out.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "rows.csv")
        >>> _ = path.write_text('text,label\\n"a, b",1\\nc,0\\n')
        >>> read_columns(path)
        {'text': ['a, b', 'c'], 'label': ['1', '0']}
    """
    path = Path(source)
    if not path.is_file():
        if path.exists() or file_format(path)[0] in (*LINES, *ARROW) or len(path.parts) > 2:
            expected = ", ".join((*LINES, ".parquet"))
            raise FileNotFoundError(f"no file {source}; expected {expected}, a folder of images, or a hub name")
        return hub_columns(str(source))
    return as_columns(read_rows(path, header, spare=spare), path)


def read_rows(
    path: Path,
    header: Sequence[str] | None = None,
    *,
    spare: bool = False,
    quoted: bool = False,
    only: Sequence[str] | None = None,
    at_once: int = AT_ONCE,
) -> Iterator[Any]:
    """Rows of a file, one by one: {column: value}, or whatever value a line of JSON has.

    Args:
        path: a file with one of the endings above.
        header, spare: of `read_columns`.
        quoted: values of a .tsv may be quoted, like those of a .csv. Quotes that are part of a text are kept: a file is
            read as lines with quotes of no meaning, as GLUE's are, unless only quotes make its rows complete.
        only: the columns that are needed; a table of Arrow is read without the others.
        at_once: rows of a table of Arrow that are decoded together.
    """
    kind = file_format(path)[0]
    if _is_arrow(path):
        return _arrow_rows(path, only, at_once)
    if kind in (".tsv", ".csv"):
        return _separated_rows(path, header, spare, quoted)
    if kind in (".jsonl", ".ndjson"):
        return _json_rows(path)
    raise ValueError(f"{path} is none of {', '.join(LINES)}, plain or .gz, and .parquet; convert it to one")


def as_columns(rows: Iterable[Any], source: object) -> dict[str, list[Any]]:
    """Rows {column: value} as columns, with None where a row has no value."""
    found: dict[str, list[Any]] = {}
    for count, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"{source}, row {count + 1}, must be an object; got {json.dumps(row):.60}")
        for name in [name for name in row if name not in found]:
            found[name] = [None] * count
        for name, values in found.items():
            values.append(row.get(name))
    return found


def file_format(path: Path) -> tuple[str, bool]:
    """The ending that names a file's format, in lower case, and whether .gz follows it.

    Example:
        >>> file_format(Path("a.TSV.gz"))
        ('.tsv', True)
    """
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix, name.endswith(".gz")


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a file of text, plain or .gz, with their ends; a ValueError if it is none."""
    kind, zipped = file_format(path)
    options: Any = {"mode": "rt", "encoding": "utf-8-sig", "newline": ""}
    try:
        with gzip.open(path, **options) if zipped else path.open(**options) as file:
            yield from file
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as {kind or 'text'} in UTF-8: {error}") from error


def _separated_rows(path: Path, header: Sequence[str] | None, spare: bool, quoted: bool) -> Iterator[dict[str, str]]:
    csv.field_size_limit(2**31 - 1)  # Python's own limit of 131,072 characters is too low for a long document
    tabs, lines = file_format(path)[0] == ".tsv", read_lines(path)
    plain = tabs and not (quoted and _needs_quotes(path, header))
    rows: Iterator[list[str]] = csv.reader(
        lines, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL
    )
    if plain and quoted:
        rows, spare = (list(map(_unquoted, row)) for row in rows), True
    try:
        names = list(header) if header else next(rows, [])
        twice = [name for name, times in Counter(names).items() if name and times > 1]  # tables may end in empty ones
        if twice:
            raise ValueError(f"{path} has several columns {', '.join(map(repr, twice))}; give each a name of its own")
        for number, row in enumerate(rows, 1 if header else 2):
            if not row:
                continue
            if len(row) < len(names) or (len(row) > len(names) and not (spare and tabs)):
                advice = "take tabs out of values" if tabs else 'quote values with commas: "a, b"'
                raise ValueError(
                    f"{path}, row {number}, has {len(row)} values for the {len(names)} columns {', '.join(names)}; "
                    + (advice if len(row) > len(names) else "complete it")
                )
            yield dict(zip(names, row, strict=False))
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as {file_format(path)[0]}: {error}") from error


def _needs_quotes(path: Path, header: Sequence[str] | None) -> bool:
    """Whether the rows of a .tsv are complete as quoted values, with tabs or line breaks in them, and as lines are not.

    Lone quotes of a text in GLUE would otherwise make one value of all lines up to the next quote.
    """
    lines = (line for line in read_lines(path) if line.strip("\r\n"))
    count = len(header) if header else next(lines, "").count("\t") + 1
    if count > 1 and all(line.count("\t") + 1 == count for line in lines):
        return False
    try:
        rows = (row for row in csv.reader(read_lines(path), delimiter="\t", strict=True) if row)
        count = len(header or next(rows, []))
        return all(len(row) == count for row in rows)
    except csv.Error:
        return False


def _unquoted(value: str) -> str:
    """A value without the quotes around it, if these are all that it has, or inner ones are doubled."""
    inner = value[1:-1]
    return inner.replace('""', '"') if value == f'"{inner}"' and '"' not in inner.replace('""', "") else value


def _json_rows(path: Path) -> Iterator[Any]:
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
                raise ValueError(f"{path}, line {number}, is no JSON: {error}") from error


def _is_arrow(path: Path) -> bool:
    kind, zipped = file_format(path)
    return kind in ARROW and not zipped


@contextmanager
def _reading_arrow(path: Path) -> Iterator[tuple[Any, Any]]:
    """pyarrow and pyarrow.parquet; their errors become a ValueError that names the file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as missing:
        raise ValueError(f"reading {path} needs pyarrow; install it with: pip install 'snnk[tables]'") from missing
    try:
        yield pa, pq
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:  # damaged, or texts that are not UTF-8
        kind = ARROW[file_format(path)[0]]
        raise ValueError(f"{path} cannot be read as {kind}: {error}; write the file again") from error


def arrow_columns(source: str | Path) -> dict[str, bool]:
    """The columns of a table of Arrow, and whether they are strings by its schema; {} for all other sources."""
    path = Path(source)
    schema, _ = arrow_schema(path)
    if schema is None:
        return {}
    with _reading_arrow(path) as (pa, _):
        types = {field.name: field.type for field in schema}
        plain = {name: kind.value_type if pa.types.is_dictionary(kind) else kind for name, kind in types.items()}
        return {name: kind in (pa.string(), pa.large_string(), pa.string_view()) for name, kind in plain.items()}


def arrow_schema(path: Path) -> tuple[Any, int]:
    """The schema of a table of Arrow and the number of its rows, or 0 if that is unknown; (None, 0) for other files."""
    if not _is_arrow(path) or not path.is_file():
        return None, 0
    with _reading_arrow(path) as (pa, pq):
        if ARROW[file_format(path)[0]] == "Parquet":
            file = pq.ParquetFile(path)
            return file.schema_arrow, file.metadata.num_rows
        return pa.ipc.open_file(path).schema, 0


def _arrow_rows(path: Path, only: Sequence[str] | None, at_once: int) -> Iterator[dict[str, Any]]:
    with _reading_arrow(path) as (pa, pq):
        if ARROW[file_format(path)[0]] == "Parquet":
            batches = pq.ParquetFile(path).iter_batches(at_once, columns=None if only is None else list(only))
        else:
            fields = None if only is None else [pa.ipc.open_file(path).schema.get_field_index(name) for name in only]
            file = pa.ipc.open_file(path, options=pa.ipc.IpcReadOptions(included_fields=fields))
            wholes = map(file.get_batch, range(file.num_record_batches))
            batches = (whole[i : i + at_once] for whole in wholes for i in range(0, len(whole), at_once))
        for batch in batches:
            names = batch.schema.names if only is None else only
            values = (batch.column(name).to_pylist() for name in names)
            yield from (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))


def hub_columns(source: str) -> dict[str, list[Any]]:
    """All columns of a data set of the hub: name[:config][@split]."""
    name, _, split = source.partition("@")
    name, _, config = name.partition(":")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as missing:
        raise ImportError(f"there is no file {source}; as a hub name it needs: pip install datasets") from missing
    try:
        found = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # network, hub and cache raise errors of many types
        raise ValueError(f"there is no file {source}, and the hub did not give it: {error}") from error
    return {column: list(found[column]) for column in found.column_names}


def column_of(columns: Columns, name: str, source: object, advice: str = "") -> list[Any]:
    """A column; the error of a missing one lists those that there are, and ends with the advice."""
    _has_rows(columns, source)
    if name not in columns:
        error = _checks.no_column(name, columns, source)
        raise ValueError(f"{error}; {advice}") if advice else error
    return columns[name]


def text_column(
    columns: Columns, source: object, *, others: Sequence[str | None] = (), strings: Sequence[str] = ()
) -> str:
    """The name of the first column of texts, which are strings that are no numbers in one of the first rows.

    Args:
        columns: of a file, or the first rows of them.
        source: the file, for errors.
        others: names that are not meant, such as that of the labels.
        strings: columns that are strings by the schema of the file: they are texts even if the first rows are empty,
            and the first of them is the answer if all look like numbers.
    """
    _has_rows(columns, source)
    heads = {name: [v for v in values[:HEAD] if v not in (None, "")] for name, values in columns.items()}
    texts = [name for name, head in heads.items() if any(map(is_text, head)) or (name in strings and not head)]
    found = next((name for name in (*texts, *strings) if name not in others), None)
    if found is None:
        raise ValueError(f"no column of {source} has texts; its columns are {', '.join(columns)}")
    return found


def _has_rows(columns: Columns, source: object) -> None:
    if not any(columns.values()):
        raise ValueError(f"{source} is empty: it has no rows")


def is_text(value: object) -> bool:
    """Whether a value is a string that is neither empty nor a number."""
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


def find_images(folder: Path) -> list[Path]:
    """The images of a folder and its subfolders, sorted."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES)
    if not files:
        raise ValueError(f"{folder} has no images, which end in {', '.join(IMAGES)}")
    return files


def labelled_images(folder: Path) -> tuple[list[Path], list[str]]:
    """The images in the subfolders of a folder, and the names of these subfolders, which are their classes."""
    files = [file for file in find_images(folder) if file.parent != folder]
    if not files:
        raise ValueError(f"{folder} has no images ({', '.join(IMAGES)}) in subfolders, one for each class")
    return files, [file.relative_to(folder).parts[0] for file in files]


def read_images(files: Iterable[Path], processor: BaseImageProcessor) -> dict[str, Tensor]:
    """Images as one batch of a model's inputs."""
    return {"pixel_values": processor(images=[open_image(file) for file in files], return_tensors="pt")["pixel_values"]}


def open_image(file: Path) -> Image:
    """An image of PIL, in RGB."""
    try:
        import PIL.Image
    except ImportError as missing:
        raise ImportError(f"reading {file} needs pillow; install it with: pip install pillow") from missing
    if not file.is_file():  # a pipe would never end
        raise ValueError(f"{file} is no image, but a folder, a pipe, a device or a link to nothing; remove it")
    try:
        with PIL.Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"{file} cannot be read as an image: {error}") from error


def tokenize(tokenizer: PreTrainedTokenizerBase, *texts: Sequence[str] | None, max_length: int) -> list[TokenRow]:
    """Texts, or texts and their pairs, as rows of a tokenizer's outputs, without padding."""
    found: Any = tokenizer(*texts, truncation=True, max_length=max_length)
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that pads batches: the tokenizer's padding token, or its end of text, or 0."""
    return next((int(i) for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def pad_texts(rows: list[TokenRow], tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """One batch, padded on the right: the tokenizer of a GPT has no padding, and is not to be changed."""
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": pad_id(tokenizer)}
    batch = {
        key: torch.tensor([row[key] + [fill.get(key, 0)] * (width - len(row[key])) for row in rows]) for key in rows[0]
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch.setdefault("attention_mask", (torch.arange(width) < lengths[:, None]).long())
    return batch
