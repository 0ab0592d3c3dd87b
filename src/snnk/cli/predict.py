"""`snnk predict`: predictions of a model of `snnk fit`, of `snnk finetune`, or of a Hugging Face classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snnk import _io
from snnk._text import printable
from snnk.cli import _options
from snnk.cli._printing import bar, say, wrote

GROUP = _options.PREDICT
EXAMPLES = (
    "snnk predict model rows.csv --key id --out predictions.csv",
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
            help="New file with one line per row: .csv, .jsonl or .parquet. The prediction for a row that was dropped "
            "is empty."
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
    probabilities: Annotated[
        bool, typer.Option(help="For a model of snnk fit, whether to write the probabilities of classes.")
    ] = True,
) -> None:
    """Write predictions and probabilities for all rows of a file, and their accuracy or R2 if the rows have labels."""
    _io.check_out(out)
    options = {"text": text, "text_pair": text_pair, "base": base, "max_length": max_length}
    if (Path(model) / "model.json").is_file() or (Path(model).is_dir() and not _has_transformer(Path(model))):
        others = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
        if others:
            raise ValueError(f"{model} is no model of texts or images; leave out {', '.join(others)}")
        return _predict_table(Path(model), data, out, missing, key, probabilities)
    tables = {"--missing": missing is not None, "--no-probabilities": not probabilities}
    if any(tables.values()):
        given = " and ".join(name for name, used in tables.items() if used)
        raise ValueError(f"{given} is for models of snnk fit; {model} is none, leave it out")
    _options.require("transformers", extra="hf")
    from snnk.finetune import predict

    with bar("rows") as show:
        found = predict(
            model,
            data,
            out=out,
            key=key,
            **options,  # type: ignore[arg-type]
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


def _predict_table(model: Path, data: Path, out: Path, missing: str | None, key: str, probabilities: bool) -> None:
    from snnk.tabular import TableModel

    fitted = TableModel.load(model)
    target = fitted.columns.target
    with bar("rows") as show:
        rows, score, unseen, drift = fitted.write_predictions(
            data,
            out,
            missing=missing,
            key=key,
            probabilities=probabilities,
            progress=lambda done, total: show("predicting", done, total),
        )
    _done(rows, score)
    if wrong := unseen.pop(target.name, 0):
        say(
            f"warning: {wrong:,} rows have a {printable(target.name)} that was not seen in training: they count as "
            "wrong in the accuracy, and not in AUC and log-loss"
        )
    for name, number in unseen.items():
        say(f"{printable(name)}: {number:,} values not seen in training, or far outside its range, were ignored")
    for found in drift:
        say(f"warning: drift in {found}")
    if probabilities and target.categories is not None and fitted.calibration is None:
        say("the model has no calibration: its probabilities are its scores, cut to the range from 0 to 1")
    wrote(out)


def _done(rows: int, score: dict[str, float]) -> None:
    shown = (f", {name} {value:{'.4g' if name == 'RMSE' else '.4f'}}" for name, value in score.items())
    say(f"{rows:,} predictions{''.join(shown)}")
