"""The command `snnk finetune`: options in, a bar and a table out; the work is `snnk.finetune.finetune`."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from snnk import _io
from snnk.cli import printing

# names of METHODS and GLUE, which would cost the help seconds of imports
METHOD_NAMES = (
    "snnk, snnk-tuned, snnk-relu, snnk-cos, snnk-pooler, bundled, uptrain, lora, houlsby, bitfit, ia3, "
    "linear-probe, full"
)
TASK_NAMES = "cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli"
NEEDS = ("transformers", "peft", "accelerate")


def finetune_command(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, or its name on the hub.")],
    out: Annotated[Path, typer.Option(help="New folder for the tuned model, its figures and its card.")],
    train: Annotated[
        str | None,
        typer.Option(
            help="Labelled data: .tsv, .csv, .jsonl (also .gz), .parquet, a folder of images with one subfolder a "
            "class, or a hub name[:config]\\[@split]."
        ),
    ] = None,
    validation: Annotated[str | None, typer.Option(help="As --train; without it a tenth of train is held out.")] = None,
    test: Annotated[str | None, typer.Option(help="As --train; measured once, at the end.")] = None,
    text: Annotated[str | None, typer.Option(help="Column of the texts; else the first with strings.")] = None,
    text_pair: Annotated[str | None, typer.Option(help="Column of second texts.")] = None,
    label: Annotated[str, typer.Option(help="Column of the labels.")] = "label",
    task: Annotated[str | None, typer.Option(help=f"GLUE task, with --data-dir: {TASK_NAMES}.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder of GLUE's files; the dev file is the test.")] = None,
    method: Annotated[str, typer.Option(help=f"One of {METHOD_NAMES}.")] = "snnk",
    features: Annotated[int | None, typer.Option(help="Features, adapter size or rank.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Of uptrain: all, top-6, or numbers with commas; else the upper half.")
    ] = None,
    pooling: Annotated[str, typer.Option(help="model, or mean (of all tokens, for sentence encoders).")] = "model",
    classifier_start: Annotated[str, typer.Option(help="closed-form or random.")] = "closed-form",
    # two flags, as a column for the second name would leave the help no room
    regression: Annotated[
        bool, typer.Option("--regression", help="Labels are numbers; else told from decimal points.")
    ] = False,
    classification: Annotated[
        bool, typer.Option("--classification", help="Labels are classes, also 0.0 and 1.0.")
    ] = False,
    learning_rate: Annotated[
        float | None, typer.Option(help="These five: else the method's own, the paper's where it has them.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Of all processes together.")] = None,
    epochs: Annotated[int | None, typer.Option(help="At most.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of the optimizer.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of the rate: constant or linear (to 0).")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Instead of epochs; 0: the closed form only.")] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of one text or pair, at most what the model takes.")] = 128,
    limit_train: Annotated[int | None, typer.Option(help="Take so many rows of train only.")] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything random.", min=0, max=2**31)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint of a stopped run.")] = False,
) -> None:
    """Fine-tune a text or image classifier by adapters, poolers or the usual ways; also under torchrun."""
    options = dict(locals())
    del options["classification"], options["resume"]
    if regression and classification:
        raise ValueError("--regression and --classification exclude each other; give one")
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"this command needs {', '.join(missing)}; install it with: pip install 'snnk[cli,peft]'")
    if not resume and not Path(f"{out}.checkpoint").exists():
        _io.check_out(out)  # before seconds of imports
    from snnk.finetune import FinetuneConfig, finetune

    config = FinetuneConfig(
        **{**options, "out": str(out), "regression": regression if regression or classification else None}
    )
    console = Console()
    first = os.environ.get("RANK", "0") == "0"  # of a torchrun cluster, only one talks

    def say(line: str) -> None:
        if first:
            printing.say(console, line)

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (first and console.is_terminal)) as bar:
        row = bar.add_task("loading", total=None, told="")
        begun: list[tuple[float, int]] = []

        def show(step: int, total: int, loss: float, scores: dict[str, float]) -> None:
            begun[:] = begun or [(time.monotonic(), step)]
            rate = (step - begun[0][1]) / max(time.monotonic() - begun[0][0], 1e-9)
            best = ", ".join(f"{k} {v:.3f}" for k, v in scores.items() if k not in ("epoch", "step", "train_loss"))
            told = f"{step}/{total}, loss {loss:.4f}, {rate:.1f} steps/s; validation: {best}"
            bar.update(row, description="training", completed=step, total=total, told=told)

        try:
            found = finetune(config, resume=resume, say=say, progress=show)
        except KeyboardInterrupt:
            if Path(f"{out}.checkpoint").exists():
                say(f"stopped; the same command with --resume goes on from {out}.checkpoint")
            raise
    if found.main:
        console.print(_table(found.metrics))
        printing.wrote(console, out)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _table(metrics: dict[str, Any]) -> Any:
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
    return printing.make_table(f"{metrics['base_model']}, {metrics['method']}", columns, rows)
