"""`snnk frontier`: size, latency and agreement of a model at several budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snnk import _io
from snnk._checkpoint import checkpoint_of
from snnk.cli import _options
from snnk.cli._printing import bar, say, show_table, wrote

GROUP = _options.COMPRESS
RERUN = "keeps the budgets that are finished"
EXAMPLES = (
    "snnk frontier my-model --calibration sentences.txt --out curve",
    "snnk frontier my-model --calibration sentences.txt --keep 0.4,0.2 --to openvino-int8 --out curve",
)


def command(
    model: _options.Model,
    out: Annotated[Path, typer.Option("--out", help="New folder for frontier.json and report.html.")],
    calibration: _options.Calibration = None,
    keep: Annotated[
        str, typer.Option(help="Budgets with commas between them, each the part of the blocks' parameters that stays.")
    ] = "0.5,0.33,0.25,0.15",
    to: Annotated[
        str | None,
        typer.Option(
            help="Also export the original and every budget, and compare these: one or more forms of snnk export, "
            "such as openvino-int8,onnx-int8. Default: int8 of the original alone, if a runtime "
            "for it is installed.",
            autocompletion=_options.complete(*_options.WORDS["form"]),
        ),
    ] = None,
    rivals: Annotated[
        bool,
        typer.Option(
            "--rivals/--no-rivals",
            help="Points to compare with, if their packages are installed: int8 of the original, and static embeddings "
            "(model2vec, wordllama) for sentence encoders.",
        ),
    ] = True,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the compressed models, in folders such as keep-0.33.")
    ] = False,
    tokens: Annotated[
        str,
        typer.Option(help="Batches whose latency is measured, separated by commas: inputs x tokens per text of each."),
    ] = "1x32,32x32",
    threads: Annotated[int, typer.Option(help="Threads while latency is measured.", min=1)] = 1,
    layers: Annotated[str, typer.Option(help="all, top-6 (the last six), or numbers separated by commas.")] = "all",
    blocks: _options.Blocks = "all",
    refine: Annotated[
        int | None,
        typer.Option(help="Gradient steps per block; 0 for the closed form alone. Default: as for compress.", min=0),
    ] = None,
    recover: Annotated[
        str, typer.Option(help="Steps of distillation per budget; auto for as many as help; 0 for none.")
    ] = "auto",
    recover_minutes: Annotated[
        float, typer.Option(help="Most minutes of distillation per budget with --recover auto.")
    ] = 5.0,
    text: _options.Text = None,
    text_pair: _options.TextPair = None,
    max_length: _options.MaxLength = 128,
    seed: _options.Seed = 0,
) -> None:
    """Compress a model with several budgets in one run, and compare size, latency and agreement."""
    options = {name: value for name, value in locals().items() if name not in ("model", "calibration", "out")}
    options["recover"] = _options.steps(recover)
    options["to"] = None if to is None else to.split(",")
    options["tokens"] = [_options.batch(part) for part in tokens.split(",")]
    try:
        options["keep"] = [float(part) for part in keep.split(",")]
    except ValueError:
        raise ValueError(f"--keep must be numbers with commas between them, such as 0.5,0.25; got {keep!r}") from None
    _io.check_out(out, new=not checkpoint_of(out).exists())
    _options.require("transformers", extra="hf")
    from snnk.hf import frontier
    from snnk.hf.serve import frontier_page as page

    with bar("blocks") as show:

        def progress(what: str, done: int, total: int, note: str = "") -> None:
            show(what, done, total, note, unit="steps" if note else "blocks")  # the distillation alone has notes

        found = frontier(model, calibration, out=out, say=say, progress=progress, **options)
    batches = len(found["latency"])
    shown = [0, 1, *range(2 + batches, 3 + 2 * batches)]  # no milliseconds and one figure: the page has all columns
    columns = {str(i): page.headings(found)[i] for i in shown}
    rows = [{str(i): cells[i] for i in shown} for cells in page.rows(found)]
    show_table(found["base_model"], columns, rows)
    wrote(out / "frontier.json", out / "report.html")
