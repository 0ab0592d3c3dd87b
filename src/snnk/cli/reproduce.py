"""What `snnk reproduce` prints, beside the command's options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from snnk.cli.printing import make_table, say, wrote
from snnk.experiments import load, names
from snnk.experiments.lab.records import Row
from snnk.experiments.lab.runs import Reproduction, reproduce, reproduce_all


def list_experiments(console: Console) -> None:
    """Print one line per experiment: what it stands for, what it needs, how long it takes."""
    table = Table()
    table.add_column("name", no_wrap=True)
    for heading in ("stands for", "needs", "time"):
        table.add_column(heading)
    for name in names():
        experiment = load(name)
        table.add_row(name, experiment.FIGURE, experiment.NEEDS, experiment.TIME)
    console.print(table)


def run(
    name: str, out: Path, console: Console, *, data_dir: str | None, model: str | None, quick: bool, seeds: int | None
) -> None:
    """Run one experiment, or all if `name` is empty, and print rows and claims."""

    def show(rows: Iterator[Row], name: str, total: int) -> Iterable[Row]:
        return track(rows, name, total=total, console=console, transient=True)

    tell = partial(say, console)
    if name:
        found = reproduce(name, out, data_dir=data_dir, model=model, quick=quick, seeds=seeds, say=tell, track=show)
        _print(found, console)
    else:
        for found in reproduce_all(out, data_dir=data_dir, quick=quick, seeds=seeds, say=tell, track=show):
            _print(found, console)


def _print(found: Reproduction, console: Console) -> None:
    keys = dict.fromkeys(
        key for row in found.results for key, value in row.items() if not isinstance(value, list | dict)
    )
    columns = {key: key.replace("_", " ") for key in keys if key not in ("commit", "environment")}
    console.print(make_table(f"{found.name}: {found.figure}", columns, found.results))
    console.print(make_table("claims", {key: key for key in ("paper", "ours", "tolerance", "holds")}, found.claims))
    say(console, f"{found.name}: {found.seconds:.0f} s")
    wrote(console, found.picture, found.results.path)
