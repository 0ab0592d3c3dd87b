"""Run experiments into a folder: the Python twin of `snnk reproduce`.

Example:
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     found = reproduce("estimators", folder, quick=True)
    >>> len(found.results.rows), found.picture.name
    (8, 'estimators.png')
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from snnk import _io
from snnk.experiments import Experiment, load, names
from snnk.experiments.lab.data import NO_DATA, Source, needs_data
from snnk.experiments.lab.records import Results, Row, reading, save_figure

LOG = logging.getLogger("snnk")
Say = Callable[[str], None]
Track = Callable[[Iterator[Row], str, int], Iterable[Row]]  # rows, name and number of rows -> the same rows


@dataclass(frozen=True)
class Reproduction:
    """The outcome of one experiment.

    Args:
        name: of the experiment.
        figure: the figure or table of the paper.
        results: all rows, stored in `results.path`.
        claims: the paper's statements beside our figures.
        picture: path of the plot.
        seconds: time that this run took.
    """

    name: str
    figure: str
    results: Results
    claims: list[Row]
    picture: Path
    seconds: float


def all_rows(rows: Iterator[Row], name: str, total: int) -> Iterable[Row]:
    return rows


def reproduce(
    name: str,
    out: str | Path = "results",
    *,
    data_dir: str | None = None,
    model: str | None = None,
    quick: bool = False,
    seeds: int | None = None,
    tasks: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    say: Say = LOG.info,
    track: Track = all_rows,
) -> Reproduction:
    """Run an experiment, or the part of it that has no rows yet.

    Args:
        name: one of `snnk.experiments.names()`.
        out: folder for NAME.json and NAME.png.
        data_dir: folder of a data set or of several, or "hub"; None if the experiment needs none.
        model: folder or hub name of a pretrained model; None for the experiment's own.
        quick: run the small configuration, which takes seconds.
        seeds: number of runs, each with its own seed; None for the experiment's own number.
        tasks, methods: run only these, in this order; None for all. The rows that are there already stay.
        say: receives messages about rows that were found.
        track: wraps the rows, to show progress.
    """
    experiment, out = load(name), Path(out)
    config = experiment.QUICK if quick else experiment.Config()
    if seeds is not None:
        if not _takes_seeds(experiment):
            raise ValueError(f"{name} takes no --seeds: it averages over its random draws, or it has none")
        config = replace(config, seeds=seeds)
    config = _part_of(config, name, tasks=tasks, methods=methods)
    _io.check_out(out, new=False)
    source, file, picture = Source(data_dir, model), out / f"{name}.json", out / f"{name}.png"
    with _io.locked_output(file):
        _io.remove_leftovers(picture)
        start = time.perf_counter()
        results = Results(file, config, source=source.names if needs_data(experiment.NEEDS) else NO_DATA)
        there = bool(results.rows)
        _describe(results, say)
        with reading(file) if there else nullcontext():
            for _ in track(experiment.run(config, results, source), name, experiment.total(config)):
                pass
        if results.back is not None:  # no row was missing, so that none was written
            results.write()
        with reading(file, ValueError) if there else nullcontext():
            claims, figure = experiment.claims(results), experiment.plot(results)
        save_figure(figure, picture)
        return Reproduction(name, experiment.FIGURE, results, claims, picture, time.perf_counter() - start)


def _describe(results: Results, say: Say) -> None:
    """Report the rows that an earlier run has left."""
    for commit, count in Counter(row.get("commit") or "none" for row in results).items():
        say(f"{count} rows are there from commit {commit}; for others name another --out")
    file = results.path
    if results.aside is not None:
        say(f"{file} is of another configuration: with the first new row it goes to {results.aside}")
    if results.back is not None:
        say(f"rows of this configuration are in {results.back}: they come back to {file}")


def reproduce_all(
    out: str | Path = "results",
    *,
    data_dir: str | None = None,
    quick: bool = False,
    seeds: int | None = None,
    say: Say = LOG.info,
    track: Track = all_rows,
) -> Iterator[Reproduction]:
    """Run every experiment. Those whose data are missing are skipped, and an error at the end names them."""
    _io.check_out(out, new=False)
    known = {name: load(name) for name in names()}
    if seeds is not None:
        without = [name for name, experiment in known.items() if not _takes_seeds(experiment)]
        say(f"--seeds {seeds} does not apply to {', '.join(without)}: nothing is random there, or draws are averaged")
    skipped = []
    for name, experiment in known.items():
        count = seeds if _takes_seeds(experiment) else None
        try:
            yield reproduce(name, out, data_dir=data_dir, quick=quick, seeds=count, say=say, track=track)
        except (ImportError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # of the disk: all others would fail too
                raise
            skipped.append(name)
            say(f"{name} is left out: {' '.join(str(error).split())}")
    if skipped:
        raise ValueError(f"{len(skipped)} of {len(known)} were left out, for the reasons above: {', '.join(skipped)}")


def _part_of(config: Any, name: str, **parts: Sequence[str] | None) -> Any:
    """The configuration with only these tasks and methods; a ValueError for what the experiment does not have."""
    for part, wanted in parts.items():
        if wanted is None:
            continue
        known = getattr(config, part, None)
        if known is None:
            raise ValueError(f"{name} has no {part} to choose from; leave --{part} out")
        unknown = [word for word in wanted if word not in known]
        if unknown or not wanted:
            raise ValueError(f"--{part} takes some of {'; '.join(known)}; got {'; '.join(unknown) or 'none'}")
        config = replace(config, **{part: tuple(wanted)})
    return config


def _takes_seeds(experiment: Experiment) -> bool:
    return "seeds" in {field.name for field in fields(experiment.QUICK)}
