"""The output of commands. Names come from files, so text is shown as it is, without markup or escape sequences."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich import progress
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from snnk._text import printable

T = TypeVar("T")
console = Console()


def leads() -> bool:
    """Whether this process prints: under torchrun only the first one does."""
    return os.environ.get("RANK", "0") == "0"


def say(text: object) -> None:
    """Print lines. The terminal wraps long ones, so that names and paths can be copied whole."""
    if leads():
        console.print(printable(text, lines=True), highlight=False, markup=False, emoji=False, soft_wrap=True)


def show_json(found: Mapping[str, Any]) -> None:
    """Print figures for another program."""
    say(json.dumps(found, indent=2))


def wrote(*paths: Path) -> None:
    """Print the names of files that a command has written."""
    say("wrote " + ", ".join(map(printable, paths)))


def show_table(
    title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], justify: JustifyMethod = "right"
) -> None:
    """Print rows as a table.

    Args:
        title: the line above it.
        columns: the heading of each key; the first column is never broken into lines.
        rows: the cells by key.
        justify: "left" for a table of words.
    """
    table = Table(title=Text(printable(title)), title_justify="left")
    for i, heading in enumerate(columns.values()):
        table.add_column(Text(printable(heading)), justify=justify, no_wrap=i == 0)
    for row in rows:
        table.add_row(*(Text(_cell(row.get(key))) for key in columns))
    if leads():
        console.print(table)


def show_stages(found: Mapping[str, Any]) -> None:
    """Print size, latencies and loss of all stages of a served model."""
    from snnk.hf.serve.using import heads, rows

    names = heads(found)
    cells = [dict(zip(names, row, strict=True)) for row in rows(found)]
    show_table("from PyTorch to what is served", {name: name for name in names}, cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else printable(value)


def track(rows: Iterable[T], name: str, total: int) -> Iterable[T]:
    """The same rows, with a bar that moves as they are made."""
    return progress.track(rows, name, total=total, console=console, transient=True)


@contextmanager
def bar(unit: str) -> Iterator[Callable[..., None]]:
    """A progress bar; call `show(stage, done, total, note)` with it, where a total of 0 stands for an unknown one.

    Args:
        unit: what is counted, such as "rows", unless a call names another one; the speed is that of the present stage.
    """
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[text]}", markup=False),
        progress.TimeRemainingColumn(),
    )
    begun: dict[str, tuple[float, int]] = {}  # when each stage began, and how much was done before it
    with progress.Progress(
        *columns, console=console, transient=True, disable=not (leads() and console.is_terminal)
    ) as shown:
        task = shown.add_task("starting", total=None, text="")

        def show(stage: str, done: int, total: int, note: str = "", unit: str = unit) -> None:
            since, before = begun.setdefault(stage, (time.monotonic(), done))
            rate = (done - before) / max(time.monotonic() - since, 1e-9)
            text = f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"
            text += f", {rate:,.0f} per second" if rate >= 10 else f", {rate:.2g} per second" if rate else ""
            shown.update(task, description=stage, completed=done, total=total or None, text=text + note)

        yield show
