"""The data of a run: files, columns, labels, and the part of train that is held out for validation."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from snnk.finetune.config import FinetuneConfig
from snnk.finetune.data import FEWEST, Data, Labels, encode_images, encode_texts
from snnk.finetune.glue import glue_files
from snnk.finetune.scores import CLASSIFICATION, REGRESSION
from snnk.hf.data import (
    HEAD,
    Columns,
    arrow_columns,
    column_of,
    is_text,
    labelled_images,
    read_columns,
    text_column,
)
from snnk.hf.models import read_config, token_limit

PARTS = ("train", "validation", "test")
HELD_OUT = 0.1  # fraction of train for validation, unless there is a file for it
MOST_SPARE = 1000  # of the rows that limit_train leaves out, at most so many for validation


@dataclass(frozen=True)
class Inputs:
    """The data of one run; `described` is what metrics.json has on it, and `columns` says where it was read."""

    train: Data
    validation: Data
    test: Data | None
    labels: Labels
    metrics: tuple[str, ...]
    described: dict[str, Any]
    columns: str | None = None


class _Rows(NamedTuple):
    source: str
    inputs: list[Any]  # texts, or files of images
    pairs: list[Any] | None
    labels: list[Any]

    def take(self, chosen: list[int]) -> _Rows:
        """The rows with these indices."""
        columns = (None if column is None else [column[i] for i in chosen] for column in self[1:])
        return _Rows(self.source, *columns)  # type: ignore[arg-type]

    def draw(self, count: int | None, seed: int) -> tuple[_Rows, _Rows]:
        """That many rows, drawn at random, and others, at most MOST_SPARE."""
        if count is None or count >= len(self.labels):
            return self, self.take([])
        generator, order = random.Random(f"{seed} limit"), range(len(self.labels))
        chosen = set(generator.sample(order, count))
        others = [i for i in order if i not in chosen]
        spare = generator.sample(others, min(len(others), MOST_SPARE))
        return self.take(sorted(chosen)), self.take(sorted(spare))


def is_images(config: FinetuneConfig) -> bool:
    return config.train is not None and Path(config.train).is_dir()


def read(config: FinetuneConfig, processor: Any, images: bool) -> Inputs:
    """All data of a run, tokenised; the validation part is taken from train unless there is a file for it."""
    described: dict[str, Any] = {}
    task = header = columns = None
    if config.glue is not None:
        task, file, dev = glue_files(config.glue, Path(str(config.data_dir)))
        described, header = {"task": config.glue, "large": task.large}, task.columns
        sources = [str(file), config.validation, config.test or str(dev)]
        text, pair, label = task.text, task.pair, task.label
    else:
        sources = [str(config.train), config.validation, config.test]
        text, pair, label = config.text or "", config.text_pair, config.label

    def read_part(source: str) -> _Rows:
        nonlocal text, columns
        if images:
            if not Path(source).is_dir():
                raise ValueError(f"train is a folder of images, and the others must be too; got {source}")
            files, values = labelled_images(Path(source))
            return _Rows(source, files, None, values)
        found = read_columns(source, header, spare=task is not None)
        if config.glue == "cola" and "index" in found.get("source", [])[:1]:
            raise ValueError(f"{source} is GLUE's test file, which has no labels; use the dev file")
        if not text:
            strings = [name for name, is_string in arrow_columns(source).items() if is_string]
            text = text_column(found, source, others=(label, pair), strings=strings)
            columns = _columns(found, text, pair, label)
        labels = column_of(found, label, source, "name that of the labels with label (--label)")
        pairs = None if pair is None else column_of(found, pair, source)
        return _Rows(source, column_of(found, text, source), pairs, labels)

    train = read_part(str(sources[0]))
    others = [None if source is None else read_part(source) for source in sources[1:]]
    labels = Labels.of(train.labels, train.source, None if config.task == "auto" else config.task == "regression")
    length = min(config.max_length, getattr(processor, "model_max_length", config.max_length))
    if not images:
        length = min(length, token_limit(read_config(config.model)) or length)

    def encode(rows: _Rows) -> Data:
        encoded = labels.encode(rows.labels, rows.source)
        if images:
            return encode_images(processor, rows.inputs, encoded)
        return encode_texts(processor, rows.inputs, rows.pairs, encoded, length)

    train, spare = train.draw(config.limit_train, config.seed)
    data = encode(train)
    held, test = (None if rows is None else encode(rows) for rows in others)
    if held is None and len(data) >= FEWEST and len(spare.labels) >= max(FEWEST, HELD_OUT * len(data)):
        held = encode(spare)
    elif held is None:
        data, held = data.split(HELD_OUT, config.seed)
    described |= {"text": text or None, "text_pair": pair, "label": label, "max_length": None if images else length}
    described |= {part: None if s is None else Path(s).name for part, s in zip(PARTS, sources, strict=True)}
    described["rows"] = {"train": len(data), "validation": len(held), "test": None if test is None else len(test)}
    metrics = task.metrics if task else REGRESSION if labels.names is None else CLASSIFICATION
    return Inputs(data, held, test, labels, metrics, described, columns)


def _columns(found: Columns, text: str, pair: str | None, label: str) -> str:
    """Which columns are read, as nobody named that of the texts, and which others could have been meant."""
    said = f"texts are read from the column {text!r}" + (f" and second texts from {pair!r}" if pair else "")
    left = {name: values for name, values in found.items() if name not in (text, pair, label)}
    others = [name for name in left if any(map(is_text, left[name][:HEAD]))]
    advice = f"; others with texts: {', '.join(map(repr, others))} (--text, --text-pair)" if others else ""
    return f"{said}, labels from {label!r}{advice}"
