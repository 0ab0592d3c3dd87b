"""Labelled data for fine-tuning: GLUE's files, tables of one's own, the hub, folders of images; as rows and batches.

A .tsv has no quotes, as GLUE's; a .csv has. Both and .jsonl may end in .gz. Labels are classes, or numbers where they
are written with a decimal point. Batches of an epoch are a function of seed and epoch alone, so that any process can
tell which they are.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snnk import _checks
from snnk.hf.data import IMAGES, open_image, pad_texts
from snnk.tables import Table

POOL = 50  # batches whose rows are sorted by length together
FEWEST = 4  # rows of a part of the data
NO_NUMBERS = {"nan", "na", "n/a", "none", "null", "inf", "-inf", "+inf"}  # what tables have in place of a number
GLUE_HUB = "nyu-mll/glue"
GLUE_WHERE = "gluebenchmark.com/tasks, a folder a task, such as CoLA/train.tsv and CoLA/dev.tsv"


@dataclass(frozen=True)
class Task:
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
    "cola": Task("CoLA", (8551, 1043), "sentence", None, "label", ("mcc", "accuracy"), COLA),
    "sst2": Task("SST-2", (67349, 872), "sentence", None, "label", large=True),
    "mrpc": Task("MRPC", (3668, 408), "#1 String", "#2 String", "Quality", ("f1", "accuracy")),
    # the paper's metric first
    "stsb": Task("STS-B", (5749, 1500), "sentence1", "sentence2", "score", ("spearman", "pearson")),
    "qqp": Task("QQP", (363846, 40430), "question1", "question2", "is_duplicate", ("f1", "accuracy"), large=True),
    "mnli": Task("MNLI", (392702, 9815), "sentence1", "sentence2", "gold_label", dev="dev_matched", large=True),
    "qnli": Task("QNLI", (104743, 5463), "question", "sentence", "label", large=True),
    "rte": Task("RTE", (2490, 277), "sentence1", "sentence2", "label"),
    "wnli": Task("WNLI", (635, 71), "sentence1", "sentence2", "label"),
}


@dataclass(frozen=True)
class Data:
    """Rows that are ready for a model, with their labels.

    Args:
        rows: tokenised texts, or files of images; whatever `collate` takes.
        labels: (n,), long for classes, float for regression.
        collate: a list of rows -> inputs of the model.
        lengths: of the rows, by which batches are grouped.

    Example:
        >>> data = Data([[1.0], [2.0]], torch.tensor([0, 1]), lambda rows: {"x": torch.tensor(rows)}, [1, 1])
        >>> data.batch([1])["labels"]
        tensor([1])
    """

    rows: Sequence[Any]
    labels: Tensor
    collate: Callable[[list[Any]], dict[str, Tensor]]
    lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Inputs and labels of some rows."""
        return {**self.collate([self.rows[i] for i in indices]), "labels": self.labels[list(indices)]}

    def take(self, indices: Sequence[int]) -> Data:
        """Some of the rows."""
        chosen = list(indices)
        return Data(
            [self.rows[i] for i in chosen], self.labels[chosen], self.collate, [self.lengths[i] for i in chosen]
        )

    def batches(self, size: int) -> list[list[int]]:
        """Indices of all rows, the longest together."""
        order = sorted(range(len(self)), key=lambda i: -self.lengths[i])
        return [order[start : start + size] for start in range(0, len(order), size)]

    def epoch(self, size: int, seed: int, epoch: int) -> list[list[int]]:
        """Indices of an epoch's batches: drawn at random, rows of a batch of similar length."""
        generator = random.Random(f"{seed} {epoch}")
        order = list(range(len(self)))
        generator.shuffle(order)
        found = []
        for start in range(0, len(order), size * POOL):
            part = sorted(order[start : start + size * POOL], key=lambda i: -self.lengths[i])
            found += [part[i : i + size] for i in range(0, len(part), size)]
        generator.shuffle(found)
        return found

    def split(self, share: float, seed: int) -> tuple[Data, Data]:
        """Two parts, the second with `share` of the rows, of each class alike."""
        generator = random.Random(f"{seed} split")
        groups: dict[Any, list[int]] = {}
        for i in range(len(self)):
            groups.setdefault(0 if self.labels.is_floating_point() else int(self.labels[i]), []).append(i)
        held: list[int] = []
        for rows in groups.values():
            generator.shuffle(rows)
            held += rows[: math.floor(share * len(rows) + 0.5)]
        if len(held) < FEWEST or len(self) - len(held) < FEWEST:
            raise ValueError(
                f"{share:g} of {len(self)} rows for validation leaves {len(self) - len(held)} and {len(held)} rows; "
                f"{FEWEST} of each are needed: give more data or another validation share"
            )
        out = set(held)
        return self.take([i for i in range(len(self)) if i not in out]), self.take(sorted(held))


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
        return {name: [v for batch in batches for v in batch.column(name).to_pylist()] for name in found.names}
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
            except ValueError as error:
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
        if name not in others and any(isinstance(v, str) and _as_number(v) is None for v in values[:100]):
            return name
    raise ValueError(f"no column of {source} has texts; its columns are {', '.join(columns) or 'none'}")


@dataclass(frozen=True)
class Labels:
    """What a label column holds: names of classes in order, or numbers (`names` is None).

    Example:
        >>> labels = Labels.of(["b", "a", "b"], "f")
        >>> labels.names, labels.encode(["a", "b"], "g")
        (('a', 'b'), tensor([0, 1]))
        >>> Labels.of(["1.5", "2.0"], "f").names is None
        True
    """

    names: tuple[str, ...] | None

    @classmethod
    def of(cls, values: Sequence[Any], source: Any, regression: bool | None = None) -> Labels:
        """Tell classes from numbers: a decimal point makes a number, unless `regression` says otherwise."""
        _complete(values, source)
        numbers = [_as_number(v) for v in values]
        if regression is None:
            numeric = [v for v, number in zip(values, numbers, strict=True) if number is not None]
            odd = {str(v) for v, number in zip(values, numbers, strict=True) if number is None}
            decimal = any(isinstance(v, float) or (isinstance(v, str) and not _is_integer(v)) for v in numeric)
            if decimal and odd and {v.strip().lower() for v in odd} <= NO_NUMBERS:
                raise ValueError(f"labels of {source} are numbers but for {', '.join(sorted(odd))}; leave these out")
            regression = decimal and not odd
        if regression:
            return cls(None)
        names = sorted(
            {_name(v) for v in values}, key=lambda n: (not _is_integer(n), int(n) if _is_integer(n) else 0, n)
        )
        if len(names) < 2:
            raise ValueError(f"all labels of {source} are {names[0]!r}; at least two classes are needed")
        if len(names) > max(2, len(values) // 2):
            raise ValueError(
                f"{source} has {len(names)} classes in {len(values)} rows; name the label column, or ask for regression"
            )
        return cls(tuple(names))

    def encode(self, values: Sequence[Any], source: Any) -> Tensor:
        """(n,) class numbers or floats."""
        _complete(values, source)
        if self.names is None:
            wrong = Counter(str(v) for v in values if _as_number(v) is None)
            if wrong:
                raise ValueError(f"labels of {source} must be finite numbers; got {', '.join(list(wrong)[:5])}")
            return torch.tensor([_as_number(v) for v in values], dtype=torch.float32)
        index = {name: i for i, name in enumerate(self.names)}
        unknown = Counter(_name(v) for v in values if _name(v) not in index)
        if unknown:
            raise ValueError(
                f"{source} has the labels {', '.join(list(unknown)[:5])}, which are not in the training data: "
                f"{', '.join(self.names[:20])}"
            )
        return torch.tensor([index[_name(v)] for v in values])


def _name(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _is_integer(text: str) -> bool:
    return text.lstrip("+-").isdecimal()


def _as_number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _complete(values: Sequence[Any], source: Any) -> None:
    if not values:
        raise ValueError(f"{source} is empty: it has no rows")
    missing = [i for i, v in enumerate(values) if v is None or v == "" or v != v]
    if missing:
        raise ValueError(
            f"{source} has {len(missing)} rows of {len(values)} without a label, the first is row {missing[0] + 1}; "
            "leave them out"
        )


def encode_texts(
    tokenizer: Any, texts: Sequence[Any], pairs: Sequence[Any] | None, labels: Tensor, max_length: int
) -> Data:
    """Tokenise texts, or pairs of them, into rows that are padded batch by batch.

    Args:
        tokenizer: the model's.
        texts, pairs: n strings each.
        labels: (n,).
        max_length: tokens of one row.
    """
    special = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    if max_length <= special:  # the tokenizer would not cut at all
        raise ValueError(f"max_length must be above the {special} special tokens of a row; got {max_length}")
    rows: list[dict[str, list[int]]] = []
    for start in range(0, len(texts), 1000):
        part = [["" if t is None else str(t) for t in col[start : start + 1000]] for col in (texts, pairs or [])]
        found = tokenizer(part[0], part[1] or None, truncation=True, max_length=max_length)
        rows += [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    empty = sum(not row["input_ids"] for row in rows)
    if empty:
        raise ValueError(f"{empty} of {len(rows)} texts have no tokens at all; leave them out")
    return Data(rows, labels, lambda part: pad_texts(part, tokenizer), [len(row["input_ids"]) for row in rows])


def image_files(folder: Path) -> tuple[list[Path], list[str]]:
    """Images of a folder with one subfolder a class, and their classes."""
    files = sorted(p for p in folder.glob("*/**/*") if p.suffix.lower() in IMAGES)
    if not files:
        raise ValueError(f"{folder} has no images ({', '.join(IMAGES)}) in subfolders, one for each class")
    return files, [file.relative_to(folder).parts[0] for file in files]


def encode_images(processor: Any, files: Sequence[Path], labels: Tensor) -> Data:
    """Images that are opened when their batch comes."""

    def collate(part: list[Path]) -> dict[str, Tensor]:
        return {
            "pixel_values": processor(images=[open_image(file) for file in part], return_tensors="pt")["pixel_values"]
        }

    return Data(list(files), labels, collate, [1] * len(files))


def glue_files(task: str, folder: Path) -> tuple[Task, Path, Path]:
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
