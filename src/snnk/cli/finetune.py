"""`snnk finetune`: train a text or image classifier."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from snnk import _io
from snnk._checkpoint import checkpoint_of
from snnk.cli import _options
from snnk.cli._printing import bar, say, show_table, wrote
from snnk.finetune import METHODS, FinetuneConfig
from snnk.finetune.config import POOLING
from snnk.finetune.glue import GLUE

GROUP = _options.FINETUNE
EXAMPLES = (
    "snnk finetune my-model --train train.tsv --method snnk --out tuned",
    "snnk finetune org/name --glue rte --data-dir glue --method lora --epochs 5 --out tuned-rte",
)
RERUN = "with --resume continues from the last checkpoint, if there is one"

OWN = "Default: the method's own value (the paper's, where it gives one)."


def command(
    model: _options.Model,
    out: _options.NewFolder,
    train: Annotated[
        str | None,
        typer.Option(
            help=f"Labelled data: {_options.FILES}, a folder of images with one subfolder per class, or a name on the "
            "hub, name[:config]\\[@split]."
        ),
    ] = None,
    validation: Annotated[str | None, typer.Option(help="Like --train. Default: a tenth of the training rows.")] = None,
    test: Annotated[str | None, typer.Option(help="Like --train; measured once, at the end.")] = None,
    text: _options.Text = None,
    text_pair: _options.TextPair = None,
    label: Annotated[str, typer.Option(help="Column of the labels.")] = "label",
    glue: Annotated[
        str | None,
        typer.Option(
            help=f"Task of GLUE, with --data-dir: {', '.join(GLUE)}.", autocompletion=_options.complete(*GLUE)
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of GLUE's files; the dev file becomes the test data.")
    ] = None,
    method: Annotated[
        str, typer.Option(help=f"One of {', '.join(METHODS)}.", autocompletion=_options.complete(*METHODS))
    ] = "snnk",
    num_features: Annotated[
        int | None, typer.Option(help=f"Number of features, size of adapters, or rank. {OWN}")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers with adapters: all, top-6, or numbers separated by commas. Default: all; for uptrain, which "
            "replaces blocks there, the upper half."
        ),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="What the classifier reads. model: the model's own pooler; mean: the mean of all tokens; layers: "
            "means in four layers; neurons: these, and means of the neurons of all feed-forward blocks; pairs, "
            "neuron-pairs: comparisons of such means of two texts, which are read apart. Default: mean, or pairs for "
            "two texts, for sentence encoders, else model. For closed-form: neurons, or neuron-pairs for two texts "
            "and sentence encoders; layers for types of models without that; model for images.",
            autocompletion=_options.complete(*POOLING),
        ),
    ] = None,
    classifier_start: Annotated[
        str, typer.Option(help="First weights of the classifier: closed-form or random.")
    ] = "closed-form",
    task: _options.Task = "auto",
    learning_rate: Annotated[float | None, typer.Option(help=OWN)] = None,
    batch_size: Annotated[int | None, typer.Option(help=f"Rows per step of all processes together. {OWN}")] = None,
    epochs: Annotated[int | None, typer.Option(help=f"Most passes over the training rows. {OWN}")] = None,
    patience: Annotated[
        int | None,
        typer.Option(help=f"Epochs without a better validation score after which training stops. {OWN}"),
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help=OWN)] = None,
    schedule: Annotated[
        str | None, typer.Option(help=f"Learning rate over time: constant or linear (to 0). {OWN}")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Number of steps instead of epochs; 0 for the closed form alone.")
    ] = None,
    max_length: _options.MaxLength = 128,
    limit_train: Annotated[
        int | None, typer.Option(help="Train on this many rows, drawn at random; validate on others.")
    ] = None,
    dropout: Annotated[
        bool | None,
        typer.Option("--dropout/--no-dropout", help=f"Dropout of the base model while adapters are trained. {OWN}"),
    ] = None,
    bf16: Annotated[
        bool | None,
        typer.Option(
            "--bf16/--no-bf16", help="Compute in bfloat16. Default: if the processor has instructions for it."
        ),
    ] = None,
    seed: _options.Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoint of a run that was stopped.")
    ] = False,
) -> None:
    """Fine-tune a text or image classifier with adapters, poolers or standard methods. It also runs under torchrun."""
    options = {name: value for name, value in locals().items() if name != "resume"}
    _options.require("transformers", "peft", "accelerate", extra="peft")
    checkpoint = checkpoint_of(out)
    _io.check_out(out, new=not resume and not checkpoint.exists())
    from snnk.finetune import finetune

    config = FinetuneConfig(**{**options, "out": str(out)})
    with bar("steps") as show:

        def progress(step: int, total: int, loss: float, scores: dict[str, float]) -> None:
            best = ", ".join(f"{k} {v:.3f}" for k, v in scores.items() if k not in ("epoch", "step", "train_loss"))
            show("training", step, total, f", loss {loss:.4f}; validation: {best}")

        try:
            found = finetune(config, resume=resume, say=say, progress=progress)
        except KeyboardInterrupt:
            if checkpoint.exists():
                say(f"stopped; the same command with --resume continues from {checkpoint}")
            raise
    if found.main:
        _show(found.metrics)
        wrote(out)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _show(metrics: dict[str, Any]) -> None:
    epochs, best = metrics["training"]["epochs"], metrics["training"]["best"]
    names = list(metrics["scores"]["validation"])
    parts = {
        "validation, start": epochs[0],
        f"validation, epoch {epochs[best]['epoch']:g}": metrics["scores"]["validation"],
        "test": metrics["scores"].get("test"),
    }
    rows = [
        {"part": part, **{name: f"{scores[name]:.4f}" for name in names}}
        for part, scores in parts.items()
        if scores is not None
    ]
    columns = {name: name.replace("_", " ") for name in ("part", *names)}
    show_table(f"{metrics['base_model']}, {metrics['method']}", columns, rows)
