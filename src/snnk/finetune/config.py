"""FinetuneConfig: everything that decides about a run of `finetune`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from snnk import _checks
from snnk.finetune.methods import METHODS
from snnk.finetune.pooling import POOLING
from snnk.finetune.settings import TrainingSettings
from snnk.hf.architectures import parse_layers

STARTS = ("closed-form", "random")


@dataclass(frozen=True)
class FinetuneConfig:
    """What to tune, on what, how, and where to put it; None takes the method's default.

    Args:
        model: folder of a Hugging Face model, or its name on the hub.
        out: new folder for the result.
        method: a name in METHODS.
        train, validation, test: files (.tsv, .csv, .jsonl, also .gz; .parquet), hub names, or folders of images with
            one subfolder a class. Without `validation`, `validation_share` of train is cut off for it.
        text, text_pair, label: names of columns; the first of strings, none, and "label".
        task, data_dir: a GLUE task and the folder of its files, instead of the above; its dev file is the test.
        regression: labels are numbers, or with False classes; else that is told from how they are written.
        pooling: "model", or "mean" of all tokens, for encoders whose pooler was never trained.
        features: features, adapter size or rank.
        layers: of `uptrain`, which feed-forward blocks: "all", "top-6" or "3,4,5"; else the upper half.
        classifier_start: "closed-form" on the frozen features, or "random".
        max_length: tokens of one row, at most what tokenizer and model take.
        limit_train: use so many rows only, drawn at random.
        resume: go on from the checkpoint of a run that was stopped.
        learning_rate ... seed: see `TrainingSettings`.
    """

    model: str
    out: str
    method: str = "snnk"
    train: str | None = None
    validation: str | None = None
    test: str | None = None
    text: str | None = None
    text_pair: str | None = None
    label: str = "label"
    task: str | None = None
    data_dir: str | None = None
    regression: bool | None = None
    pooling: str = "model"
    features: int | None = None
    layers: str | None = None
    classifier_start: str = "closed-form"
    max_length: int = 128
    limit_train: int | None = None
    validation_share: float = 0.1
    learning_rate: float | None = None
    batch_size: int | None = None
    epochs: int | None = None
    max_steps: int | None = None
    weight_decay: float | None = None
    schedule: str | None = None
    patience: int | None = None
    bf16: bool = False
    seed: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        _checks.choose(self.method, METHODS, "method")
        _checks.choose(self.pooling, POOLING, "pooling")
        _checks.choose(self.classifier_start, STARTS, "classifier start")
        for name in ("features", "max_length", "limit_train"):
            if (value := getattr(self, name)) is not None:
                _checks.positive_int(value, name)
        if not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share must be between 0 and 1; got {self.validation_share}")
        if (self.task is None) == (self.train is None) or (self.task is None) != (self.data_dir is None):
            raise ValueError(
                "give either train, a file, a folder or a hub name; or task and data_dir, for GLUE's files"
            )
        if self.task is not None:
            given = {"text": self.text, "text_pair": self.text_pair, "regression": self.regression}
            given |= {} if self.label == "label" else {"label": self.label}
            told = [f"{name}={value!r}" for name, value in given.items() if value is not None]
            if told:
                raise ValueError(f"task {self.task!r} has columns and labels of its own; leave out {', '.join(told)}")
        method = METHODS[self.method]
        if self.features is not None and method.features is None:
            raise ValueError(f"method {self.method!r} has no features to choose a number of; leave it out")
        if self.layers is not None and self.method != "uptrain":
            raise ValueError(f"layers are chosen for method 'uptrain' only; got {self.layers!r} for {self.method!r}")
        if self.layers is not None:
            parse_layers(self.layers)
        if method.own_pooler and self.pooling != "model":
            raise ValueError(f"method {self.method!r} replaces the model's own pooler: use it with pooling 'model'")
        self.settings(images=False, large=False)

    def settings(self, *, images: bool, large: bool) -> TrainingSettings:
        """The method's defaults, with what was asked for."""
        method = METHODS[self.method]
        chosen = {**method.settings, **(method.large if large else {}), **(method.images if images else {})}
        chosen |= {f.name: v for f in fields(TrainingSettings) if (v := getattr(self, f.name, None)) is not None}
        return TrainingSettings(**chosen)
