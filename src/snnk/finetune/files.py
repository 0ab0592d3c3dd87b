"""Columns of labelled data: GLUE's files, tables of one's own, the hub.

A .tsv has no quotes, as GLUE's; a .csv has. Both and .jsonl may end in .gz.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snnk import _checks
from snnk.tabular.source import Table

GLUE_HUB = "nyu-mll/glue"
GLUE_WHERE = "gluebenchmark.com/tasks, a folder a task, such as CoLA/train.tsv and CoLA/dev.tsv"


@dataclass(frozen=True)
class GlueTask:
    """Where a GLUE task has its columns, and what it is measured by, the first of which chooses the best epoch."""

    folder: str
    rows: tuple[int, int]  # of train and dev
    text: str
    pair: str | None
    label: str
    metrics: tuple[str, ...] = ("accuracy",)
    columns: tuple[str, ...] | None = None  # of a file without a header
    dev: str = "dev"
    large: bool = False  # the paper regularises small ones more


COLA = ("source", "label", "star", "sentence")
GLUE = {
    "cola": GlueTask("CoLA", (8551, 1043), "sentence", None, "label", ("mcc", "accuracy"), COLA),
    "sst2": GlueTask("SST-2", (67349, 872), "sentence", None, "label", large=True),
    "mrpc": GlueTask("MRPC", (3668, 408), "#1 String", "#2 String", "Quality", ("f1", "accuracy")),
    # the paper's metric first
    "stsb": GlueTask("STS-B", (5749, 1500), "sentence1", "sentence2", "score", ("spearman", "pearson")),
    "qqp": GlueTask("QQP", (363846, 40430), "question1", "question2", "is_duplicate", ("f1", "accuracy"), large=True),
    "mnli": GlueTask("MNLI", (392702, 9815), "sentence1", "sentence2", "gold_label", dev="dev_matched", large=True),
    "qnli": GlueTask("QNLI", (104743, 5463), "question", "sentence", "label", large=True),
    "rte": GlueTask("RTE", (2490, 277), "sentence1", "sentence2", "label"),
    "wnli": GlueTask("WNLI", (635, 71), "sentence1", "sentence2", "label"),
}


def read_columns(
    source: str | Path, columns: Sequence[str] | None = None, *, glue: bool = False
) -> dict[str, list[Any]]:
    """All columns of a .tsv, .csv, .jsonl (also .gz) or .parquet, or of a data set of the hub: name[:config][@split].

    Args:
        source: the file or the name.
        columns: their names, of a .tsv or .csv without a header.
        glue: a .tsv of GLUE, whose lines may have more values than columns (MNLI, QQP): these are left out.
    """
    path = Path(source)
    kind, zipped = _kind(path)
    if not path.is_file():
        if path.exists() or kind in (*READERS, *ARROW) or len(path.parts) > 2:
            raise FileNotFoundError(
                f"no file {source}; expected {', '.join(FORMATS)}, a folder of images, or a hub name"
            )
        return hub_columns(str(source))
    if kind in ARROW and not zipped:
        found = Table(path)
        batches = [batch for _, part in found.blocks() for batch in part]
        try:
            return {name: [v for batch in batches for v in batch.column(name).to_pylist()] for name in found.names}
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} has a text that is not in UTF-8: {error}; write the file again") from error
    read = READERS.get(kind)
    if read is None:
        raise ValueError(f"{path} is none of {', '.join(READERS)}, plain or .gz, and .parquet; convert it to one")
    try:
        options: Any = {"mode": "rt", "encoding": "utf-8-sig", "newline": ""}
        with gzip.open(path, **options) if zipped else path.open(**options) as file:
            return read(file, path, columns, glue)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as {kind} in UTF-8: {error}") from error


def _kind(path: Path) -> tuple[str, bool]:
    """The ending that tells a file's format, in lower case, and whether .gz follows it."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix, name.endswith(".gz")


def _separated(file: Iterable[str], path: Path, columns: Sequence[str] | None, glue: bool) -> dict[str, list[Any]]:
    csv.field_size_limit(2**31 - 1)  # of Python 131,072 characters: a long document has more
    tabs = _kind(path)[0] == ".tsv"
    rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(file)
    header = list(columns) if columns else next(rows, [])
    twice = [name for name, times in Counter(header).items() if name and times > 1]  # tables may end in empty ones
    if twice:
        raise ValueError(f"{path} has several columns {', '.join(map(repr, twice))}; give each a name of its own")
    found: dict[str, list[Any]] = {name: [] for name in header}
    for number, row in enumerate(rows, 1 if columns else 2):
        if not row:
            continue
        if len(row) < len(header) or (len(row) > len(header) and not (glue and tabs)):
            advice = "take tabs out of values" if tabs else 'quote values with commas: "a, b"'
            raise ValueError(
                f"{path}, row {number}, has {len(row)} values for the {len(header)} columns {', '.join(header)}; "
                + (advice if len(row) > len(header) else "complete it")
            )
        for name, value in zip(header, row, strict=False):
            found[name].append(value)
    return found


def _jsonl(file: Iterable[str], path: Path, columns: Sequence[str] | None, glue: bool) -> dict[str, list[Any]]:
    rows = []
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
                raise ValueError(f"{path}, line {number}, is no JSON: {error}") from error
            if not isinstance(rows[-1], Mapping):
                raise ValueError(f"{path}, line {number}, must be an object; got {line!r:.60}")
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)}


READERS: dict[str, Callable[[Iterable[str], Path, Sequence[str] | None, bool], dict[str, list[Any]]]] = {
    ".tsv": _separated,
    ".csv": _separated,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
}
ARROW = (".parquet", ".pq", ".arrow", ".feather")
FORMATS = (*READERS, ".parquet")


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
    except Exception as error:  # of the network, of the hub, of its cache: many kinds, one meaning
        raise ValueError(f"there is no file {source}, and the hub did not give it: {error}") from error
    return {column: list(found[column]) for column in found.column_names}


def column_of(columns: Mapping[str, list[Any]], name: str, source: Any) -> list[Any]:
    """A column, or an error that shows those there are."""
    _has_rows(columns, source)
    if name not in columns:
        raise ValueError(f"no column {name!r} in {source}; its columns are {', '.join(map(repr, columns)) or 'none'}")
    return columns[name]


def _has_rows(columns: Mapping[str, list[Any]], source: Any) -> None:
    if not any(columns.values()):
        raise ValueError(f"{source} is empty: it has no rows")


def text_column(columns: Mapping[str, list[Any]], others: Sequence[str | None], source: Any) -> str:
    """The first column of strings that are no numbers, as users mean when they name none; `others` are not meant."""
    _has_rows(columns, source)
    for name, values in columns.items():
        if name not in others and any(isinstance(v, str) and as_number(v) is None for v in values[:100]):
            return name
    raise ValueError(f"no column of {source} has texts; its columns are {', '.join(columns) or 'none'}")


def glue_files(task: str, folder: Path) -> tuple[GlueTask, Path, Path]:
    """The task's row, its training file and its dev file, plain or .gz, in `folder` or the task's folder in it."""
    row = _checks.look_up(task, GLUE, "task")
    found = []
    for part in ("train", row.dev):
        places = [d / f"{part}.tsv{end}" for d in (folder / row.folder, folder) for end in ("", ".gz")]
        file = next((p for p in places if p.is_file()), None)
        if file is None:
            raise FileNotFoundError(
                f"no {part}.tsv or {part}.tsv.gz of {row.folder} in {folder} or {places[0].parent}; "
                f"get it from {GLUE_WHERE}"
            )
        found.append(file)
    return row, found[0], found[1]


def miscounted(task: str, folder: Path) -> str | None:
    """A line on files with other rows than GLUE's, which may be a subset on purpose; None where they are the same."""
    row, *files = glue_files(task, folder)
    rows = tuple(len(column_of(read_columns(file, row.columns, glue=True), row.label, file)) for file in files)
    if rows == row.rows:
        return None
    ours, theirs = (f"{train:,} and {dev:,}" for train, dev in (rows, row.rows))
    return f"{row.folder}: {ours} rows of train and dev where GLUE has {theirs}"


def as_number(value: Any) -> float | None:
    """A finite number, or None where the value is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
