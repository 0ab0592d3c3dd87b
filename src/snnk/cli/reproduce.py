"""What `snnk reproduce` does, beside the command's options."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from snnk import _io
from snnk.cli.printing import make_table, say
from snnk.experiments import EXPERIMENTS
from snnk.experiments.data import NO_DATA, Source, needs_data
from snnk.experiments.records import Results, reading, save_figure


def list_experiments(console: Console) -> None:
    """One line for each experiment: what it stands for, what it needs, how long it takes."""
    table = Table()
    table.add_column("name", no_wrap=True)
    for heading in ("stands for", "needs", "time"):
        table.add_column(heading)
    for name, experiment in EXPERIMENTS.items():
        table.add_row(name, experiment.FIGURE, experiment.NEEDS, experiment.TIME)
    console.print(table)


def reproduce_all(
    source: Source, out: Path, console: Console, *, quick: bool, seeds: int | None
) -> Iterator[tuple[Path, Path]]:
    """Run each experiment that can be; those without their data are left out, and an error at the end names them."""
    if seeds is not None:
        none = [name for name in EXPERIMENTS if not _takes_seeds(name)]
        say(console, f"--seeds {seeds} is not for {', '.join(none)}, where nothing is random or all is averaged")
    left = []
    for name in EXPERIMENTS:
        try:
            count = seeds if _takes_seeds(name) else None
            yield run_one(name, source, out, console, quick=quick, seeds=count)
        except (ImportError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk: the others would meet it too
                raise
            left.append(name)
            say(console, f"{name} is left out: {' '.join(str(error).split())}")
    if left:
        raise ValueError(f"{len(left)} of {len(EXPERIMENTS)} were left out, for the reasons above: {', '.join(left)}")


def _takes_seeds(name: str) -> bool:
    return "seeds" in {field.name for field in fields(EXPERIMENTS[name].QUICK)}


def run_one(
    name: str, source: Source, out: Path, console: Console, *, quick: bool, seeds: int | None
) -> tuple[Path, Path]:
    """Run an experiment, or what is left of it; returns its picture and its rows."""
    experiment = EXPERIMENTS[name]
    config = experiment.QUICK if quick else experiment.Config()
    if seeds is not None:
        if not _takes_seeds(name):
            raise ValueError(f"{name} takes no --seeds: what is random in it is averaged already, or nothing is")
        config = replace(config, seeds=seeds)
    names = source.names if needs_data(experiment.NEEDS) else NO_DATA
    file, picture = out / f"{name}.json", out / f"{name}.png"
    with _io.locked_output(file):
        _io.remove_leftovers(picture)
        return _reproduce(name, config, source, names, file, picture, console)


def _reproduce(
    name: str,
    config: Any,
    source: Source,
    names: Mapping[str, str],
    file: Path,
    picture: Path,
    console: Console,
) -> tuple[Path, Path]:
    experiment = EXPERIMENTS[name]
    results = Results(file, config, source=names)
    there = bool(results.rows)
    for commit, count in Counter(row.get("commit") or "none" for row in results).items():
        say(console, f"{count} rows are there from commit {commit}; for others name another --out")
    if results.aside is not None:
        say(console, f"{results.path} is of another configuration: with the first new row it goes to {results.aside}")
    if results.back is not None:
        say(console, f"rows of this configuration are in {results.back}: they come back to {results.path}")
    start = time.perf_counter()
    rows = experiment.run(config, results, source)
    with reading(file) if there else nullcontext():
        list(track(rows, name, total=experiment.total(config), console=console, transient=True))
    if results.back is not None:  # there was nothing to add
        results.write()
    keys = dict.fromkeys(key for row in results for key, value in row.items() if not isinstance(value, list | dict))
    for key in ("commit", "environment"):
        keys.pop(key, None)
    console.print(make_table(f"{name}: {experiment.FIGURE}", {key: key.replace("_", " ") for key in keys}, results))
    columns = {key: key for key in ("paper", "ours", "tolerance", "holds")}
    with reading(file, ValueError) if there else nullcontext():
        console.print(make_table("claims", columns, experiment.claims(results)))
        figure = experiment.plot(results)
    say(console, f"{name}: {time.perf_counter() - start:.0f} s")
    return save_figure(figure, picture), results.path
