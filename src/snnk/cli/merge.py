"""`snnk merge`: one model from the sums of the parts of a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from snnk import _io
from snnk.cli import _options
from snnk.cli._fitted import show_fitted
from snnk.cli._printing import bar

GROUP = _options.FIT
EXAMPLES = (
    "snnk merge day-1.stats day-2.stats --out model",
    "snnk merge parts/*.stats --out model",
)


def command(
    parts: Annotated[list[Path], typer.Argument(help="Files of snnk fit --stats-only.")],
    out: Annotated[Path, typer.Option(help="New folder for the model and its report.")],
) -> None:
    """Add the sums of parts of a table, and write the model of all rows."""
    _io.check_out(out)
    from snnk.tabular import merge

    with bar("parts") as show:

        def each() -> Iterator[Path]:
            for done, part in enumerate(parts):
                show("adding", done, len(parts))
                yield part

        total = merge(each())
        show("solving", 0, 0)
        report = total.save_model(out)
    show_fitted(report, out)
