"""`snnk predict`: predictions of a model of `snnk fit`, of `snnk finetune`, or of a Hugging Face classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snnk import _io
from snnk._text import printable
from snnk.cli import _options
from snnk.cli._printing import bar, say, wrote

GROUP = _options.FIT
EXAMPLES = (
    "snnk predict tuned rows.csv --key id --out predictions.csv",
    "snnk predict my-reranker pairs.parquet --text query --text-pair passage --out scores.parquet",
)


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder that snnk fit, finetune or compress has written, or a Hugging Face model with a head for "
            "classes (also a cross-encoder), or its name on the hub."
        ),
    ],
    data: Annotated[
        Path, typer.Argument(help=f"Rows: {_options.FILES}; a folder of images, or of tables for a model of snnk fit.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="New file with one line per row: .csv, .jsonl or .parquet. For a model of snnk fit: .csv; the line "
            "of a row that was dropped is empty."
        ),
    ],
    text: Annotated[
        str | None,
        typer.Option(help="Column of the texts. Default: as in the training, or the first column of strings."),
    ] = None,
    text_pair: Annotated[
        str | None, typer.Option(help="Column of second texts, for pairs. Default: as in the training.")
    ] = None,
    key: Annotated[str, typer.Option(help="Columns to copy into the output, separated by commas.")] = "",
    base: _options.Base = None,
    batch_size: Annotated[int, typer.Option(help="Rows that the model reads together.")] = 32,
    max_length: Annotated[
        int | None,
        typer.Option(help="Most tokens per row. Default: as in the training, or the model's own limit.", min=1),
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option(help="For a model of snnk fit, missing values: raise, drop or mean. Default: as in the fit."),
    ] = None,
) -> None:
    """Write predictions and probabilities for all rows of a file, and their accuracy or R2 if the rows have labels."""
    _io.check_out(out)
    options = {"text": text, "text_pair": text_pair, "key": key or None, "base": base, "max_length": max_length}
    if (Path(model) / "model.json").is_file() or (Path(model).is_dir() and not _has_transformer(Path(model))):
        others = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
        if others:
            raise ValueError(f"{model} is no model of texts or images; leave out {', '.join(others)}")
        return _predict_table(Path(model), data, out, missing)
    if missing is not None:
        raise ValueError(f"--missing is for models of snnk fit; {model} is none, leave it out")
    _options.require("transformers", extra="hf")
    from snnk.finetune import predict

    with bar("rows") as show:
        found = predict(
            model,
            data,
            out=out,
            **{**options, "key": key},  # type: ignore[arg-type]
            batch_size=batch_size,
            progress=lambda done, total: show("predicting", done, total),
        )
    _done(found.rows, found.score)
    if found.unknown and found.scored:
        say(
            f"warning: {found.unknown:,} of {found.scored + found.unknown:,} labels are no class of the model, or no "
            "numbers: these rows are left out of the score"
        )
    return wrote(out)


def _has_transformer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("metrics.json", "config.json", "modules.json"))


def _predict_table(model: Path, data: Path, out: Path, missing: str | None) -> None:
    from snnk.tabular import TableModel

    if out.suffix.lower() != ".csv":
        raise ValueError(f"the predictions of a model of snnk fit are written as .csv; got {out}")
    rows, score, unseen = TableModel.load(model).write_predictions(data, out, missing=missing)
    _done(rows, score)
    for name, number in unseen.items():
        say(f"{printable(name)}: {number:,} values not seen in training, or far outside its range, were ignored")
    wrote(out)


def _done(rows: int, score: dict[str, float]) -> None:
    say(f"{rows:,} predictions" + "".join(f", {name} {value:.4f}" for name, value in score.items()))
