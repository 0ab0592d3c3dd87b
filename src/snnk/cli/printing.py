"""What the commands print. Names come from files: text is shown as it is, without markup or escape sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from snnk._text import printable


def say(console: Console, text: Any) -> None:
    """Print lines; a terminal wraps them, so that names and paths stay whole."""
    console.print(printable(text, lines=True), highlight=False, markup=False, emoji=False, soft_wrap=True)


def wrote(console: Console, *paths: Path) -> None:
    say(console, "wrote " + ", ".join(map(printable, paths)))


def make_table(title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table of `rows`; `columns` maps keys to headings."""
    table = Table(title=Text(printable(title)), title_justify="left")
    for heading in columns.values():
        table.add_column(Text(printable(heading)), justify="right")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(key))) for key in columns))
    return table


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else printable(value)
