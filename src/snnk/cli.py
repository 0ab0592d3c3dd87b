"""The command line: thin, one function a command. Errors end in one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
except ImportError as missing:
    raise SystemExit(f"snnk: the command line needs {missing.name}; install it with: pip install 'snnk[cli]'") from None

import snnk
from snnk import _checks
from snnk.activations import ACTIVATIONS
from snnk.experiments import EXPERIMENTS, estimate
from snnk.experiments.records import Results, save_figure

# the base of all usage errors, by way of a public name: typer has used its own copy of click since 0.2x
UserError: type[Any] = typer.BadParameter.__mro__[2]
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
Seed = Annotated[int, typer.Option("--seed", help="Seed of data and features.")]


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


def _table(title: str, columns: dict[str, str], rows: Iterable[dict[str, Any]]) -> Table:
    """A table of `rows`; `columns` maps keys to headings."""
    table = Table(title=title, title_justify="left")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in (row[key] for key in columns)))
    return table


def _estimate(config: estimate.Config, out: Path) -> None:
    results = Results(out / "estimate.json", config)
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
        bias=bias,
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
