"""`snnk fit`: train on a table in closed form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snnk.cli import _options
from snnk.cli._printing import bar, show_table, wrote

GROUP = _options.FIT
EXAMPLES = (
    "snnk fit train.parquet --target price --out model",
    "snnk fit train.csv --target species --features 16384 --missing mean --out model",
)
RERUN = "continues from the last checkpoint"


def command(
    data: _options.Table,
    target: Annotated[str, typer.Option(help="Column to predict.")],
    out: Annotated[Path, typer.Option(help="Folder for the model; a run that was stopped continues from it.")],
    features: Annotated[int, typer.Option(help="Number of random features.")] = 4096,
    feature_map: Annotated[str, typer.Option("--map", help="random-fourier or random-relu.")] = "random-fourier",
    bandwidth: Annotated[float, typer.Option(help="For random-fourier: a larger bandwidth fits finer detail.")] = 1.0,
    lam: Annotated[
        str, typer.Option(help="Ridge penalty: a number, or gcv for the best by generalised cross-validation.")
    ] = "gcv",
    task: Annotated[str, typer.Option(help="auto, regression or classification.")] = "auto",
    missing: Annotated[
        str, typer.Option(help="Missing values: raise (an error), drop (the row) or mean (of the column).")
    ] = "raise",
    drop: Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")] = "",
    double: Annotated[
        bool, typer.Option("--double", help="Compute features in float64 too, at half the speed.")
    ] = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    seed: _options.Seed = 0,
) -> None:
    """Train on a table of any length in closed form: one pass, no backpropagation. It also runs under torchrun."""
    from snnk.tabular import FitConfig, fit

    config = FitConfig(
        target=target,
        num_features=features,
        feature_map=feature_map,
        bandwidth=bandwidth,
        lam=lam if lam == "gcv" else _number(lam),
        task=task,
        missing=missing,
        drop=tuple(name for name in drop.split(",") if name),
        block_dtype="float64" if double else "float32",
        seed=seed,
    )
    with bar("rows") as show:
        report = fit(data, out, config, checkpoint_seconds=checkpoint_seconds, progress=show)
    shown = ["task", "rows", "inputs", "num_features", "lam", "score", "degrees_of_freedom", "condition", "seconds"]
    rows = [{"what": key.replace("_", " "), "value": report[key]} for key in shown]
    if report["unit"] != 1:
        rows.append({"what": "unit of the target", "value": report["unit"]})
    show_table(f"fit of {target}", {"what": "", "value": ""}, rows)
    wrote(*(out / name for name in ("model.safetensors", "model.json", "report.json")))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--lam must be a number or gcv; got {text!r}") from None
