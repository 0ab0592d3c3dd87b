"""`snnk fit`: train on a table in closed form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snnk import _io
from snnk._text import printable
from snnk.cli import _options
from snnk.cli._fitted import show_fitted
from snnk.cli._printing import bar, say, wrote

if TYPE_CHECKING:
    from snnk.tabular import FitConfig

GROUP = _options.FIT
EXAMPLES = (
    "snnk fit train.parquet --target price --out model",
    "snnk fit day-1.csv --target price --like start.stats --stats-only --out day-1.stats",
)
RERUN = "continues from the last checkpoint, or starts anew with --stats-only and --start-only"
# Options whose values a start has
OF_THE_START = "num_features", "feature_map", "bandwidth", "lam", "task", "missing", "drop", "block_dtype", "seed"


def command(
    context: typer.Context,
    data: _options.Table,
    target: Annotated[str, typer.Option(help="Column to predict.")],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the model; a run that was stopped continues from it. With --stats-only or --start-only, "
            "a new file."
        ),
    ],
    num_features: Annotated[int, typer.Option(help="Number of features.")] = 512,
    feature_map: Annotated[
        str,
        typer.Option(
            help="learned (from a sample of the rows), learned-deep (in two layers, for very many rows), "
            "random-fourier or random-relu.",
            autocompletion=_options.complete(*_options.WORDS["features of tables"]),
        ),
    ] = "learned",
    bandwidth: Annotated[
        str,
        typer.Option(
            help="For random-fourier: a number, which fits finer detail if it is larger, or auto for the best by "
            "generalised cross-validation on a sample."
        ),
    ] = "auto",
    lam: Annotated[
        str, typer.Option(help="Ridge penalty: a number, or gcv for the best by generalised cross-validation.")
    ] = "gcv",
    task: _options.Task = "auto",
    missing: Annotated[
        str, typer.Option(help="Missing values: raise (an error), drop (the row) or mean (of the column).")
    ] = "raise",
    drop: Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")] = "",
    block_dtype: Annotated[
        str,
        typer.Option(
            help="Type in which features and the sums of a block of rows are computed: float32, or float64 at half the "
            "speed.",
            autocompletion=_options.complete(*_options.WORDS["block_dtype"]),
        ),
    ] = "float32",
    checkpoint_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60.0,
    seed: _options.Seed = 0,
    stats_only: Annotated[
        bool,
        typer.Option(
            "--stats-only", help="Write the sums of these rows, for snnk merge, instead of a model: one part of many."
        ),
    ] = False,
    like: Annotated[
        Path | None,
        typer.Option(
            help="With --stats-only: file of --start-only, or of another part, whose columns and features to use. "
            "Parts add only if they share them. Default: those of these rows."
        ),
    ] = None,
    start_only: Annotated[
        bool,
        typer.Option(
            "--start-only", help="Write columns and features only, from all rows or a sample of them, for --like."
        ),
    ] = False,
) -> None:
    """Train on a table of any length in closed form: one pass, no backpropagation. It also runs under torchrun."""
    if stats_only and start_only:
        raise ValueError("--start-only writes no sums: leave it out, or --stats-only")
    if like is not None and not stats_only:
        raise ValueError("--like is for the sums of a part: add --stats-only, and later merge the parts by snnk merge")
    if (stats_only or start_only) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--stats-only and --start-only run in one process: leave torchrun out, and run one per part")
    if like is not None:
        given = [f"--{name.replace('_', '-')}" for name in OF_THE_START if _is_given(context, name)]
        if given:
            raise ValueError(
                f"{like} has its own settings; leave out {', '.join(given)}, or make another start that has them: "
                "--start-only in place of --stats-only and --like"
            )
    from snnk.tabular import FitConfig, fit, prepare

    config = FitConfig(
        target=target,
        num_features=num_features,
        feature_map=feature_map,
        bandwidth=bandwidth if bandwidth == "auto" else _number(bandwidth, "--bandwidth", "auto"),
        lam=lam if lam == "gcv" else _number(lam, "--lam", "gcv"),
        task=task,
        missing=missing,
        drop=tuple(name for name in drop.split(",") if name),
        block_dtype=block_dtype,
        seed=seed,
    )
    if stats_only:
        return _write_sums(data, config, like, out)
    if start_only:
        _io.check_out(out)
        with bar("rows") as show:
            prepare(data, config, progress=show).save(out)
        wrote(out)
        return say(
            f"next, for each part: snnk fit PART --target {printable(target)} --like {printable(out)} --stats-only "
            "--out PART.stats"
        )
    with bar("rows") as show:
        report = fit(data, out, config, checkpoint_seconds=checkpoint_seconds, progress=show)
    return show_fitted(report, out)


def _write_sums(data: Path, config: FitConfig, like: Path | None, out: Path) -> None:
    """Write the sums of a part, with the start in the file `like`, or else with one from its own rows."""
    from snnk.tabular import Part, Start, prepare

    target = config.target
    _io.check_out(out)
    with bar("rows") as show:
        start = prepare(data, config, progress=show) if like is None else Start.load(like)
        if start.config.target != target:
            raise ValueError(f"{like} is for the target {start.config.target!r}; got --target {target!r}")
        part = Part(start).read(data, progress=show)
        part.save(out)
    say(f"sums of {part.rows:,} rows")
    for said in start.columns.describe_unseen(part.unseen):
        say(f"warning: {printable(said)}")
    wrote(out)
    if like is None:
        say(
            f"columns and features come from these rows; for other parts: snnk fit PART --target {printable(target)} "
            f"--like {printable(out)} --stats-only --out PART.stats"
        )
    say("at the end: snnk merge PART.stats ... --out MODEL")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _number(text: str, option: str, word: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} must be a number or {word}; got {text!r}") from None
