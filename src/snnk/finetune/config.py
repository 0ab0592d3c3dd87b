"""FinetuneConfig: the model, the data and the options of one run of `finetune`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from snnk import _checks
from snnk.finetune.methods import METHODS
from snnk.finetune.settings import TrainingSettings

POOLING = ("model", "mean", "layers", "pairs", "neurons", "neuron-pairs")
STARTS = ("closed-form", "random")
TASKS = ("auto", "regression", "classification")


@dataclass(frozen=True)
class FinetuneConfig:
    """The model, the data and the options of one run. Where the default is None, the method has its own.

    Args:
        model: folder of a Hugging Face model, or its name on the hub.
        out: new folder for the result.
        method: a name in METHODS.
        train, validation, test: files (.tsv, .csv, .jsonl, each also as .gz; .parquet), names of data sets on the hub,
            or folders of images with one subfolder per class. Without `validation`, a tenth of train is held out.
        text, text_pair, label: names of columns. By default `text` is the first column of strings, and there is no
            `text_pair`.
        glue, data_dir: a task of GLUE and the folder of its files, instead of `train`. Its dev file is the test.
        task: "regression" if labels are numbers, "classification" if they are classes. Default: "auto", where labels
            with a decimal point are numbers.
        pooling: "model"; or "mean" of all tokens, for encoders whose pooler was never trained; or "layers", the means
            of four layers side by side; or "neurons", these and the means of the neurons of all feed-forward blocks;
            or, for pairs of texts, which are read apart and compared, "pairs" of four layers and "neuron-pairs".
            Default: for folders of sentence-transformers "mean" or "pairs", and with closed-form "neurons" or
            "neuron-pairs"; else the method's own, "model" or "neurons". Types of models without neurons to read have
            "layers" instead, and images "model".
        num_features: number of features, adapter size or rank.
        layers: the layers that get adapters, by default all, or those whose feed-forward blocks `uptrain` replaces, by
            default the upper half: "all", "top-6" or "3,4,5". Frozen layers of an encoder below the first adapter are
            run once, and not in every step, if there is no dropout in them, one process, and memory for their outputs.
        classifier_start: "closed-form" on the frozen features, or "random".
        max_length: tokens per row; tokenizer and model may allow fewer.
        limit_train: use only this many rows of train, drawn at random. Of the others, up to 1,000 are held out for
            validation, if there are enough.
        learning_rate, batch_size, epochs, max_steps, patience, weight_decay, schedule, dropout, seed: see
            `TrainingSettings`.
        bf16: compute in bfloat16. Default: if the processor has instructions for it.

    Example:
        >>> config = FinetuneConfig("bert-base-uncased", "tuned", train="train.tsv", method="lora", epochs=3)
        >>> config.settings(images=False, large=False).learning_rate  # the method's own
        0.0005
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
    glue: str | None = None
    data_dir: str | None = None
    task: str = "auto"
    pooling: str | None = None
    num_features: int | None = None
    layers: str | None = None
    classifier_start: str = "closed-form"
    max_length: int = 128
    limit_train: int | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    epochs: int | None = None
    max_steps: int | None = None
    patience: int | None = None
    weight_decay: float | None = None
    schedule: str | None = None
    dropout: bool | None = None
    bf16: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _checks.choose(self.method, METHODS, "method")
        if self.pooling is not None:
            _checks.choose(self.pooling, POOLING, "pooling")
        _checks.choose(self.classifier_start, STARTS, "classifier start")
        for name in ("num_features", "max_length", "limit_train"):
            if (value := getattr(self, name)) is not None:
                _checks.positive_int(value, name)
        _checks.choose(self.task, TASKS, "task")
        if (self.glue is None) == (self.train is None) or (self.glue is None) != (self.data_dir is None):
            raise ValueError(
                "give either train (a file, a folder or a name on the hub), or glue and data_dir for GLUE's files"
            )
        if self.glue is not None:
            given = {"text": self.text, "text_pair": self.text_pair}
            given |= {} if self.label == "label" else {"label": self.label}
            given |= {} if self.task == "auto" else {"task": self.task}
            listed = [f"{name}={value!r}" for name, value in given.items() if value is not None]
            if listed:
                raise ValueError(f"glue {self.glue!r} has columns and labels of its own; leave out {', '.join(listed)}")
        method = METHODS[self.method]
        if self.num_features is not None and method.features is None:
            raise ValueError(f"method {self.method!r} has no features to count; leave their number out")
        if self.layers is not None:
            if not method.layered:
                known = ", ".join(name for name, row in METHODS.items() if row.layered)
                raise ValueError(f"only {known} take layers; got {self.layers!r} for {self.method!r}")
            from snnk.hf.finding import parse_layers  # late: it loads torch and transformers

            parse_layers(self.layers)
        if method.own_pooler and self.pooling not in (None, "model"):
            raise ValueError(f"method {self.method!r} replaces the model's own pooler: use it with pooling 'model'")
        if method.replaces_blocks and self.pooling is not None and self.pooling != "model":
            from snnk.hf.classify.means import READINGS, other_pooling  # late: it loads torch and transformers

            if READINGS[self.pooling].neurons:
                raise ValueError(
                    f"method {self.method!r} replaces the blocks whose neurons pooling {self.pooling!r} reads: use "
                    f"{other_pooling(self.pooling, neurons=False)!r}"
                )
        self.settings(images=False, large=False)

    def settings(self, *, images: bool, large: bool) -> TrainingSettings:
        """The method's settings for such data, and the options of this configuration in place of its defaults."""
        method = METHODS[self.method]
        chosen = {**method.settings, **(method.large if large else {}), **(method.images if images else {})}
        if method.head_only:
            chosen["dropout"] = False
        chosen |= {f.name: v for f in fields(TrainingSettings) if (v := getattr(self, f.name, None)) is not None}
        return TrainingSettings(**chosen)
