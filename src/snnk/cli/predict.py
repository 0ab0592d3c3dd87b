"""`snnk predict`: predictions of a model of `snnk fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snnk import _io
from snnk._text import printable
from snnk.cli import _options
from snnk.cli._printing import say, wrote

GROUP = _options.FIT
EXAMPLES = (
    "snnk predict model test.parquet --out predictions.csv",
    "snnk predict model test.csv --missing mean --out predictions.csv",
)


def command(
    model: Annotated[Path, typer.Argument(help="Folder that snnk fit has written.")],
    data: _options.Table,
    out: Annotated[
        Path, typer.Option(help="New CSV file with one prediction per row; it is empty for a row that was dropped.")
    ],
    missing: Annotated[
        str | None, typer.Option(help="Missing values: raise, drop or mean. Default: as in the fit.")
    ] = None,
) -> None:
    """Write the predictions of a fitted model for a table, and their accuracy or R2 if the table has the target."""
    _io.check_out(out)
    from snnk.tabular import TableModel

    rows, score, unseen = TableModel.load(model).write_predictions(data, out, missing=missing)
    say(f"{rows:,} predictions" + "".join(f", {name} {value:.4f}" for name, value in score.items()))
    for name, number in unseen.items():
        say(f"{printable(name)}: {number:,} values not seen in training, or far outside its range, were ignored")
    wrote(out)
