"""`snnk compress`: a smaller transformer from a pretrained one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snnk import _io
from snnk._checkpoint import checkpoint_of
from snnk.cli import _options
from snnk.cli._printing import bar, say, show_stages, show_table, wrote
from snnk.cli._tuned import whole_model

GROUP = _options.COMPRESS
RERUN = "continues from its checkpoint"
EXAMPLES = (
    "snnk compress my-model --calibration sentences.txt --keep 0.33 --out my-model-small",
    "snnk compress my-reranker --calibration pairs.csv --text query --text-pair passage --to onnx-int8 --out served",
)


def command(
    model: _options.Model,
    out: _options.NewFolder,
    calibration: _options.Calibration = None,
    keep: Annotated[
        float | None, typer.Option(help="Part of the blocks' parameters that stays. Default: 0.33 without a target.")
    ] = None,
    target_size: Annotated[str | None, typer.Option(help="Size of the whole model, such as 200MB.")] = None,
    target_speedup: Annotated[
        float | None,
        typer.Option(
            help="Factor by which the model becomes faster, such as 1.5, from times measured on this machine."
        ),
    ] = None,
    target_latency: Annotated[
        str | None,
        typer.Option(help="Time of the whole model per batch, such as 3ms, from times measured on this machine."),
    ] = None,
    tokens: Annotated[
        str,
        typer.Option(
            help="Batch that is timed for --target-speedup and --target-latency: inputs x tokens per text. For images, "
            "only the first number counts."
        ),
    ] = "1x32",
    layers: Annotated[str, typer.Option(help="all, top-6 (the last six), or numbers separated by commas.")] = "all",
    blocks: _options.Blocks = "all",
    feature_map: Annotated[
        str,
        typer.Option(
            help="What feed-forward blocks become: atoms (neurons kept from the model itself), random-relu or "
            "random-fourier.",
            autocompletion=_options.complete(*_options.WORDS["features of blocks"]),
        ),
    ] = "atoms",
    plan: Annotated[
        Path | None,
        typer.Option(
            help="plan.json of another run. It replaces --keep, the targets, --layers, --blocks, --feature-map and "
            "--joint."
        ),
    ] = None,
    joint: Annotated[
        bool | None,
        typer.Option(
            "--joint/--equal",
            help="Choose the sizes of all blocks together, from the calibration, or keep the same share of each. "
            "Default: together, if there are enough tokens; the same share with --blocks ffn.",
        ),
    ] = None,
    refine: Annotated[
        int | None,
        typer.Option(
            help="Gradient steps per block that move atoms; 0 for the closed form alone. Default: 120, or 0 for a "
            "decoder that is distilled.",
            min=0,
        ),
    ] = None,
    recover: Annotated[
        str,
        typer.Option(help="Steps of distillation from the original afterwards; auto for as many as help; 0 for none."),
    ] = "auto",
    recover_minutes: Annotated[float, typer.Option(help="Most minutes of distillation with --recover auto.")] = 5.0,
    max_error: Annotated[
        float | None, typer.Option(help="A block with a larger error on held-out inputs stays as it was.")
    ] = None,
    text: _options.Text = None,
    text_pair: _options.TextPair = None,
    max_length: _options.MaxLength = 128,
    widen: Annotated[
        bool | None,
        typer.Option(
            "--widen/--no-widen",
            help="Mix general text and words of the vocabulary into the texts to fit to, so that the model holds for "
            "other texts too. Default: for texts, except for decoders.",
        ),
    ] = None,
    show_texts: _options.ShowTexts = True,
    format: Annotated[
        str,
        typer.Option(
            help="plain (loads without snnk: one size for all blocks), snnk (needs snnk), or auto: plain if the result "
            "fits the configuration of the model's family.",
            autocompletion=_options.complete("auto", "plain", "snnk"),
        ),
    ] = "auto",
    base: _options.Base = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="Also export the result, in a form of snnk export: openvino-int8, onnx-int8, openvino, onnx or "
            "onnx-int8-static. The report has size, latency and agreement of every stage, and the two targets of time "
            "are those of the exported model.",
            autocompletion=_options.complete(*_options.WORDS["form"]),
        ),
    ] = None,
    max_loss: _options.MaxLoss = 0.05,
    seed: _options.Seed = 0,
) -> None:
    """Compress a Hugging Face model in minutes, without labels or a GPU."""
    options = {name: value for name, value in locals().items() if name not in ("model", "calibration", "out", "base")}
    options["tokens"] = _options.batch(tokens)
    options["recover"] = _options.steps(recover)
    _io.check_out(out, new=not checkpoint_of(out).exists())
    _options.require("transformers", extra="hf")
    from snnk.hf import compress
    from snnk.hf.compression import figures
    from snnk.hf.compression.pipeline import default_settings
    from snnk.hf.compression.settings import check_settings

    check_settings({**default_settings(), **options}, calibration)  # before an adapter is merged
    merging = whole_model(model, base, calibration, text, text_pair, max_loss=max_loss, seed=seed)
    with merging as (folder, options["text"], options["text_pair"]), bar("blocks") as show:

        def progress(what: str, done: int, total: int, note: str = "") -> None:
            show(what, done, total, note, unit="steps" if note else "blocks")  # the distillation alone has notes

        found = compress(folder, calibration, out=out, say=say, progress=progress, **options)
    size, speed = found["bytes"], found["latency"]
    each = 1e3 / speed["batches"]
    rows = [
        {"what": "stored MB", "before": size["original"] / 1e6, "after": size["compressed"] / 1e6},
        {
            "what": f"ms per batch ({speed['clock']} time, {speed['threads']} threads)",
            "before": each * speed["original_seconds"],
            "after": each * speed["compressed_seconds"],
        },
        {"what": "times as fast", "before": 1.0, "after": speed["speedup"]},
    ]
    if (timing := found["timing"]) is not None:
        what = f"ms for {timing['inputs']} with {timing['runtime']}, predicted {1e3 * timing['predicted_seconds']:.2f}"
        times = {"before": 1e3 * timing["original_seconds"], "after": 1e3 * timing["compressed_seconds"]}
        rows.append({"what": what, **times})
    show_table(found["base_model"], {"what": "", "before": "original", "after": "compressed"}, rows)
    for doubt in speed["doubts"]:
        say(f"warning: latency: {doubt}")
    if "served" in found:
        show_stages(found["served"])
    held = found["held_out"]
    columns = {str(i): figures.described(part) for i, part in enumerate(held)}
    lines = [{"what": line.name, **dict(zip(columns, line.values, strict=True))} for line in figures.lines(held)]
    show_table("agreement with the original, held out", {"what": "", **columns}, lines)
    wrote(out, out / "report.html")
    if any(part["worst"] for part in held):
        say("report.json and report.html show the held-out texts that lost most; --hide-texts leaves them out")
