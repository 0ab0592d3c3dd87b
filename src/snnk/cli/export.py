"""`snnk export`: a model as ONNX Runtime or OpenVINO serve it."""

from __future__ import annotations

from typing import Annotated

import typer

from snnk import _io
from snnk.cli import _options
from snnk.cli._printing import say, show_stages, show_table, wrote
from snnk.cli._tuned import whole_model

GROUP = _options.COMPRESS
EXAMPLES = (
    "snnk export my-model-small --to onnx-int8 --out served",
    "snnk export my-model --to openvino-int8 --calibration sentences.txt --out served",
)


def command(
    model: _options.Model,
    out: _options.NewFolder,
    to: Annotated[
        str,
        typer.Option(
            help="openvino or onnx (for ONNX Runtime), in float32; openvino-int8 or onnx-int8-static (scales "
            "from --calibration), or onnx-int8 (scales per batch).",
            autocompletion=_options.complete(*_options.WORDS["form"]),
        ),
    ],
    calibration: _options.Calibration = None,
    max_loss: _options.MaxLoss = 0.05,
    text: _options.Text = None,
    text_pair: _options.TextPair = None,
    max_length: _options.MaxLength = 128,
    show_texts: _options.ShowTexts = True,
    base: _options.Base = None,
    seed: _options.Seed = 0,
) -> None:
    """Export a Hugging Face model, compressed or not, to ONNX or OpenVINO, in float32 or int8."""
    options = {name: value for name, value in locals().items() if name not in ("model", "calibration", "out", "base")}
    _io.check_out(out)
    _options.require("transformers", extra="hf")
    from snnk.hf import export
    from snnk.hf.compression import figures
    from snnk.hf.serve import using
    from snnk.hf.serve.served import check_settings

    check_settings(to=to, max_loss=max_loss)  # before an adapter is merged
    merging = whole_model(model, base, calibration, text, text_pair, max_loss=max_loss, seed=seed)
    with merging as (folder, options["text"], options["text_pair"]):
        found = export(folder, calibration, out=out, say=say, **options)
    show_stages(found)
    held = found["held_out"]
    columns = {str(i): figures.described(part) for i, part in enumerate(held)}
    lines = [{"what": line.name, **dict(zip(columns, line.values, strict=True))} for line in figures.lines(held)]
    show_table("agreement with PyTorch, held out", {"what": "", **columns}, lines)
    if note := using.cache_note(found):
        say(note.strip())
    wrote(out / found["file"], out / "report.html")
