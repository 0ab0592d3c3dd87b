"""`snnk reproduce`: figures and tables of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snnk.cli import _options
from snnk.cli._printing import say, show_table, track, wrote
from snnk.experiments import HOLDS, load, names

if TYPE_CHECKING:
    from snnk.experiments.lab.runs import Reproduction

GROUP = _options.MEASURE
EXAMPLES = (
    "snnk reproduce pointwise --quick",
    'snnk reproduce adapters --data-dir glue --methods "lora; snnk-tuned, pairs" --tasks "cola; stsb"',
)
RERUN = "continues with the rows that are missing"


def command(
    name: Annotated[
        str, typer.Argument(help=f"One of {', '.join(names())}.", autocompletion=_options.complete(*names()))
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Run a small configuration, which takes seconds.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Run all experiments; exit with code 2 if the data of some are missing.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Write README.md, the page of all claims, from the rows in --out.")
    ] = False,
    data_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder of a data set, or of the folders mnist, covertype, higgs, hepmass, glue, cifar10, cifar100. "
            "Or hub, or the name of a data set on the hub, to download it (UCI's are not there)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a pretrained model, or its name on the hub; not allowed with --all."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of runs, each with its own seed; --all applies it where it has a meaning.", min=1),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Only these tasks, with semicolons between them; for experiments that have tasks."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Only these methods, with semicolons between them; for experiments that have methods."),
    ] = None,
    out: _options.Results = Path("results"),
) -> None:
    """Reproduce figures and tables of the paper. A run that was stopped continues with the rows that are missing."""
    if show:
        columns = {"name": "name", "FIGURE": "stands for", "NEEDS": "needs", "TIME": "time"}
        show_table("experiments", columns, [{"name": each, **vars(load(each))} for each in names()], "left")
        return
    if page:
        from snnk.experiments.lab.page import write_page

        wrote(write_page(out))
        return
    if not name and not everything:
        raise ValueError(f"name an experiment: {', '.join(names())}; snnk reproduce --list describes them")
    if name and everything:
        raise ValueError(f"got {name!r} and --all; leave one of them out")
    if everything and model is not None:
        raise ValueError(f"--all takes no --model: {model} fits texts or images; run the experiments one by one")
    if everything and (tasks or methods):
        raise ValueError(f"--all takes no --tasks and no --methods; got {tasks or methods}: name an experiment")
    from snnk.experiments.lab.runs import reproduce, reproduce_all

    if name:
        part = {"tasks": _listed(tasks), "methods": _listed(methods)}
        options: Any = {"data_dir": data_dir, "model": model, "quick": quick, "seeds": seeds, **part}
        _show(reproduce(name, out, **options, say=say, track=track))
        return
    for found in reproduce_all(out, data_dir=data_dir, quick=quick, seeds=seeds, say=say, track=track):
        _show(found)


def _listed(words: str | None) -> list[str] | None:
    return None if words is None else [word.strip() for word in words.split(";") if word.strip()]


def _show(found: Reproduction) -> None:
    rows = found.results
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list | dict))
    columns = {key: key.replace("_", " ") for key in keys if key not in ("commit", "environment")}
    show_table(f"{found.name}: {found.figure}", columns, rows)
    if found.claims:
        say("claims of the paper, what we found, and whether it holds")
    for claim in found.claims:
        say(f"- {claim['paper']}\n  {claim['ours']}: {HOLDS[claim['holds']]} (tolerance: {claim['tolerance']})")
    say(f"{found.name}: {found.seconds:.0f} s")
    wrote(found.picture, rows.path)
