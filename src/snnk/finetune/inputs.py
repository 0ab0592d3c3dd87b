"""The data of a run: which files, which columns, and the part that is held out for validation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snnk.finetune.config import FinetuneConfig
from snnk.finetune.data import Data, Labels, encode_images, encode_texts
from snnk.finetune.glue import glue_files
from snnk.finetune.scores import CLASSIFICATION, REGRESSION
from snnk.hf.data import column_of, labelled_images, read_columns, text_column
from snnk.hf.models import read_config, token_limit

PARTS = ("train", "validation", "test")
HELD_OUT = 0.1  # fraction of train for validation, unless there is a file for it


@dataclass(frozen=True)
class Inputs:
    """Data of one run."""

    train: Data
    validation: Data
    test: Data | None
    labels: Labels
    metrics: tuple[str, ...]
    described: dict[str, Any]


def is_images(config: FinetuneConfig) -> bool:
    return config.train is not None and Path(config.train).is_dir()


def read(config: FinetuneConfig, processor: Any, images: bool) -> Inputs:
    """All data of a run, tokenised; the validation part is cut from train unless there is a file for it."""
    described: dict[str, Any] = {}
    if config.task is not None:
        task, file, dev = glue_files(config.task, Path(str(config.data_dir)))
        described = {"task": config.task, "large": task.large}
        sources, columns = [str(file), config.validation, config.test or str(dev)], task.columns
        text, pair, label = task.text, task.pair, task.label
    else:
        sources, columns = [str(config.train), config.validation, config.test], None
        text, pair, label = config.text or "", config.text_pair, config.label
    tables: list[tuple[Any, Any, list[Any], str] | None] = []
    for source in sources:
        if source is None:
            tables.append(None)
        elif images:
            if not Path(source).is_dir():
                raise ValueError(f"train is a folder of images, so must the others be; got {source}")
            files, values = labelled_images(Path(source))
            tables.append((files, None, values, source))
        else:
            found = read_columns(source, columns, spare=config.task is not None)
            if config.task == "cola" and "index" in found.get("source", [])[:1]:
                raise ValueError(f"{source} is GLUE's test file, which has no labels; take the dev file")
            text = text or text_column(found, source, others=(label, pair))
            values = column_of(found, label, source)
            pairs = None if pair is None else column_of(found, pair, source)
            tables.append((column_of(found, text, source), pairs, values, source))
    first = tables[0]
    if first is None:  # cannot be: train is required
        raise ValueError("there is no training data")
    names = Labels.of(first[2], first[3], config.regression)
    length = min(config.max_length, getattr(processor, "model_max_length", config.max_length))
    if not images:
        length = min(length, token_limit(read_config(config.model)) or length)

    def encode(rows: tuple[Any, Any, list[Any], str]) -> Data:
        labels = names.encode(rows[2], rows[3])
        if images:
            return encode_images(processor, rows[0], labels)
        return encode_texts(processor, rows[0], rows[1], labels, length)

    data = encode(_limited(first, config))
    held, test = (None if rows is None else encode(rows) for rows in tables[1:])
    if held is None:
        data, held = data.split(HELD_OUT, config.seed)
    metrics: tuple[str, ...] = REGRESSION if names.names is None else CLASSIFICATION
    if config.task is not None:
        metrics = task.metrics
    described |= {"text": text or None, "text_pair": pair, "label": label}
    described |= {part: None if s is None else Path(s).name for part, s in zip(PARTS, sources, strict=True)}
    described["rows"] = {"train": len(data), "validation": len(held), "test": None if test is None else len(test)}
    return Inputs(data, held, test, names, metrics, described)


def _limited(rows: tuple[Any, Any, list[Any], str], config: FinetuneConfig) -> tuple[Any, Any, list[Any], str]:
    count = len(rows[2])
    if config.limit_train is None or config.limit_train >= count:
        return rows
    chosen = sorted(random.Random(f"{config.seed} limit").sample(range(count), config.limit_train))

    def pick(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in chosen]

    return pick(rows[0]), None if rows[1] is None else pick(rows[1]), pick(rows[2]), rows[3]
