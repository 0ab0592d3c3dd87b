"""The command line: thin, one function a command. Errors end in one line and exit code 2."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, track
    from rich.table import Table
except ImportError as missing:
    raise SystemExit(f"snnk: the command line needs {missing.name}; install it with: pip install 'snnk[cli]'") from None

import snnk
from snnk import _checks, stream
from snnk.activations import ACTIVATIONS
from snnk.experiments import EXPERIMENTS, estimate
from snnk.experiments.records import Results, save_figure
from snnk.models import MAPS, FitConfig, TableModel

# the base of all usage errors, by way of a public name: typer has used its own copy of click since 0.2x
UserError: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
console = Console()
app = typer.Typer(
    name="snnk",
    invoke_without_command=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Scalable neural network kernels: layers f(Wx + b) as phi(x) . psi(W, b).",
    epilog="Start with: snnk demo",
)

Out = Annotated[Path, typer.Option("--out", help="Folder for the JSON rows and the picture.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of data and features.", min=0, max=2**31)]


def _version(asked: bool) -> None:
    if asked:
        console.print(f"snnk {snnk.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _positive_list(text: str, name: str) -> tuple[int, ...]:
    try:
        return tuple(_checks.positive_int(int(part), name) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be positive integers with commas, such as 16,64,256; got {text!r}") from None


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number; got {value!r}")
    return value


def _table(title: str, columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> Table:
    """A table of `rows`; `columns` maps keys to headings."""
    table = Table(title=title, title_justify="left")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        values = (row[key] for key in columns)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else "-" if v is None else str(v) for v in values))
    return table


def _estimate(config: estimate.Config, out: Path) -> None:
    results = Results(out / "estimate.json", config, resume=False)
    rows = estimate.run(config, results)
    list(track(rows, "estimating", total=len(config.features), console=console, transient=True))
    console.print(
        _table(
            f"{config.activation}(w.x + {config.bias:g}), d = {config.dim}, |x| = {config.x_norm:g}, "
            f"|w| = {config.w_norm:g}: root mean squared error over {config.draws} draws",
            estimate.COLUMNS,
            results,
        )
    )
    console.print(f"A constant would have an error of {results.rows[0]['spread']:.3g}.", highlight=False)
    _wrote(save_figure(estimate.plot(results), out / "estimate.png"), results.path)


def _wrote(*paths: Path) -> None:
    console.print("wrote " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)


@app.command("estimate", epilog="Example: snnk estimate --activation gelu --dim 128 --features 64,256,1024 --bias 0")
def estimate_command(
    activation: Annotated[str, typer.Option(help=f"One of {', '.join(ACTIVATIONS)}.")] = "sin",
    dim: Annotated[int, typer.Option("--dim", "-d", help="Size of inputs and weights.")] = 64,
    x_norm: Annotated[float, typer.Option(help="Norm of the inputs.")] = 1.0,
    w_norm: Annotated[float, typer.Option(help="Norm of the weights.")] = 1.0,
    bias: Annotated[float, typer.Option(help="Bias b.")] = 0.5,
    features: Annotated[
        str, typer.Option("--features", "-m", help="Numbers of real features, with commas.")
    ] = "16,32,64,128,256,512,1024",
    draws: Annotated[int, typer.Option(help="Feature maps drawn for each number.")] = 50,
    seed: Seed = 0,
    out: Out = Path("results/estimate"),
) -> None:
    """Measured and predicted error of one layer f(w.x + b), ours and the paper's, against the number of features."""
    counts = tuple(_checks.even_features(m) for m in _positive_list(features, "--features"))
    _checks.choose(activation, ACTIVATIONS, "activation")
    config = estimate.Config(
        activation=activation,
        dim=_checks.positive_int(dim, "--dim"),
        x_norm=_checks.positive(x_norm, "--x-norm"),
        w_norm=_checks.positive(w_norm, "--w-norm"),
        bias=_finite(bias, "--bias"),
        features=counts,
        draws=_checks.positive_int(draws, "--draws"),
        seed=seed,
    )
    _estimate(config, out)


@app.command(epilog="Example: snnk reproduce pointwise --quick")
def reproduce(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A small configuration, seconds instead of minutes.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    out: Out = Path("results"),
) -> None:
    """Reproduce a figure or table of the paper; a run that was stopped goes on where it was."""
    if show:
        rows = [{"name": n, "stands": e.FIGURE, "needs": e.NEEDS, "time": e.TIME} for n, e in EXPERIMENTS.items()]
        console.print(_table("", {"name": "name", "stands": "stands for", "needs": "needs", "time": "time"}, rows))
        return
    if not name:
        raise ValueError(f"name an experiment: {', '.join(EXPERIMENTS)}; or see snnk reproduce --list")
    experiment = _checks.look_up(name, EXPERIMENTS, "experiment")
    config = experiment.QUICK if quick else experiment.Config()
    results = Results(out / f"{name}.json", config)
    list(track(experiment.run(config, results), name, total=experiment.total(config), console=console, transient=True))
    columns = {key: key.replace("_", " ") for key in results.rows[0]}
    console.print(_table(f"{name}: {experiment.FIGURE}", columns, results))
    console.print(_table("claims", {"paper": "paper", "ours": "ours", "holds": "holds"}, experiment.claims(results)))
    _wrote(save_figure(experiment.plot(results), out / f"{name}.png"), results.path)


@app.command("fit", epilog="Example: snnk fit train.parquet --target price --features 4096 --out model")
def fit_command(
    data: Annotated[Path, typer.Argument(help="Parquet, CSV or Arrow file, or a folder of them.")],
    target: Annotated[str, typer.Option(help="Column to predict.")],
    out: Annotated[Path, typer.Option(help="Folder for the model; a run that was killed goes on from it.")],
    features: Annotated[int, typer.Option(help="Number of random features.")] = 4096,
    feature_map: Annotated[str, typer.Option("--map", help=f"One of {', '.join(MAPS)}.")] = "fourier",
    bandwidth: Annotated[float, typer.Option(help="Of fourier: larger fits finer detail.")] = 1.0,
    lam: Annotated[str, typer.Option(help="Ridge penalty: a number, or gcv to choose it from the sums.")] = "gcv",
    task: Annotated[str, typer.Option(help="auto, regression or classification.")] = "auto",
    missing: Annotated[str, typer.Option(help="Missing values: raise, drop (the row) or mean.")] = "raise",
    drop: Annotated[str, typer.Option(help="Columns to leave out, with commas.")] = "",
    double: Annotated[bool, typer.Option("--double", help="float64 within blocks too; half the speed.")] = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Time between checkpoints.")] = 60.0,
    seed: Seed = 0,
) -> None:
    """Train on a table of any length in closed form: one pass, no backpropagation; also under torchrun."""
    config = FitConfig(
        target=target,
        num_features=_checks.positive_int(features, "--features"),
        feature_map=_checks.choose(feature_map, MAPS, "feature map"),
        bandwidth=_checks.positive(bandwidth, "--bandwidth"),
        lam=lam if lam == "gcv" else _number(lam, "--lam"),
        task=task,
        missing=missing,
        drop=tuple(name for name in drop.split(",") if name),
        block_dtype="float64" if double else "float32",
        seed=seed,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    first = os.environ.get("RANK", "0") == "0"  # of a torchrun cluster, only one talks
    start = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not first) as bar:
        task_id = bar.add_task("starting", total=None, speed="")

        def show(what: str, rows: int, total: int) -> None:
            speed = f"{rows:,} rows, {rows / max(time.monotonic() - start, 1e-9):,.0f} rows/s" if rows else ""
            bar.update(task_id, description=what, completed=rows, total=total or None, speed=speed)

        report = stream.fit(data, out, config, checkpoint_seconds=checkpoint_seconds, progress=show)
    if first:
        shown = ("task", "rows", "inputs", "num_features", "lam", "score", "degrees_of_freedom", "condition", "seconds")
        rows = [{"what": key.replace("_", " "), "value": report[key]} for key in shown]
        console.print(_table(f"fit of {target}", {"what": "", "value": ""}, rows))
        _wrote(out / "model.safetensors", out / "model.json", out / "report.json")


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number or gcv; got {text!r}") from None


@app.command(epilog="Example: snnk predict model test.parquet --out predictions.csv")
def predict(
    model: Annotated[Path, typer.Argument(help="Folder that snnk fit wrote.")],
    data: Annotated[Path, typer.Argument(help="Parquet, CSV or Arrow file, or a folder of them.")],
    out: Annotated[Path, typer.Option(help="CSV file for the predictions, one a row; empty where a row was dropped.")],
) -> None:
    """Predictions of a fitted model for a table; with the target among its columns, their accuracy or R2 too."""
    if out.exists():
        raise ValueError(f"{out} exists already; name another file")
    loaded = TableModel.load(model)
    count, score = loaded.write_predictions(data, out)
    told = "".join(f", {name} {value:.4f}" for name, value in score.items())
    console.print(f"{count:,} predictions{told}", highlight=False)
    _wrote(out)


@app.command(epilog="Example: snnk demo --out demo")
def demo(out: Out = Path("demo")) -> None:
    """Estimate the paper's sine layer with few features: a table and a picture, in a few seconds."""
    _estimate(estimate.Config(draws=10, features=(16, 64, 256, 1024)), out)


def main(args: list[str] | None = None) -> None:
    """Entry point: like `app()`, but every user error is one line on stderr and exit code 2."""
    try:
        code = typer.main.get_command(app).main(args=args, prog_name="snnk", standalone_mode=False)
    except UserError as error:
        sys.exit(_fail(error.format_message()))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except (ValueError, TypeError, OSError) as error:
        sys.exit(_fail(str(error)))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    sys.stderr.write(f"snnk: {' '.join(message.split())}\n")
    return 2


if __name__ == "__main__":
    main()
