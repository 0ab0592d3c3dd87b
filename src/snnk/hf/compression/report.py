"""The report on a compressed model: the measured latency, what page and card both state, and the model card.

Page (page.py) and card are made from report.json alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import unescape
from typing import Any

import torch
from transformers import PreTrainedModel

from snnk._text import markdown, printable
from snnk.hf.classify.means import PREFIXES
from snnk.hf.compression import figures
from snnk.hf.compression.plans import describe
from snnk.hf.compression.stages import Recovery
from snnk.hf.compression.timing import described
from snnk.hf.cost import counting_mode
from snnk.hf.model_blocks import KEPT
from snnk.hf.models import Batch
from snnk.hf.serve import using
from snnk.hf.serve.latency import clock_of, measure, run_torch

FORMAT = "snnk.CompressReport/1"
SECONDS, ROUNDS = 4.0, 25  # of the measurement of latency, at most
IMPORT = "import snnk.hf  # pip install 'snnk[hf]'; without it transformers refuses\n"
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")  # from the original's card


def latency(
    original: PreTrainedModel, compressed: PreTrainedModel, batches: Sequence[Batch], *, seconds: float | None = None
) -> dict[str, Any]:
    """Seconds of two models for the same batches, measured in turns for `seconds` at most (default: SECONDS).

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> found = latency(model, model, [{"input_ids": torch.ones(2, 5, dtype=torch.long)}], seconds=0.1)
        >>> found["rounds"] >= 3, found["speedup"] > 0
        (True, True)
    """
    chosen = batches[:: max(1, len(batches) // 4)][:4]

    def forward(model: PreTrainedModel) -> Callable[[], None]:
        runs = [run_torch(model, batch) for batch in chosen]

        def run() -> None:
            for each in runs:
                each()

        return run

    most = SECONDS if seconds is None else seconds
    with counting_mode(original), counting_mode(compressed), torch.inference_mode():
        runs = {"original": forward(original), "compressed": forward(compressed)}
        inputs = ", ".join(described(batch) for batch in chosen)
        found = measure(runs, inputs, clock=clock_of(original), seconds=most, most=ROUNDS)
    before, after = found.seconds.values()
    return {
        "original_seconds": before,
        "compressed_seconds": after,
        "speedup": before / after,
        "batches": len(chosen),
        "doubts": found.doubts(),
        **found.to_dict(),
    }


def recovery_of(report: Mapping[str, Any]) -> Recovery | None:
    found = report["report"].get("recovery")
    return None if found is None else Recovery(**found)


def headline(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(description, figure) of size, speed and agreement, for the first row of the page."""
    size, speed = report["bytes"], report["latency"]
    return [
        ("stored", f"{size['original'] / 1e6:.1f} &rarr; {size['compressed'] / 1e6:.1f} MB"),
        (f"as fast ({using.clock_of(speed)})", f"{speed['speedup']:.2f} &times;"),
        *_latency(report),
        *((what, figures.shown(value)) for what, value in figures.headline(report["held_out"][0])),
    ]


def _latency(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The latency that the plan was made for, predicted and measured, if there is one."""
    found = report.get("timing")
    if found is None:
        return []
    before, planned, after = (1e3 * found[f"{name}_seconds"] for name in ("original", "predicted", "compressed"))
    what = f"for {found['inputs']} with {found['runtime']}; predicted {planned:.2f} ms"
    return [(what, f"{before:.2f} &rarr; {after:.2f} ms")]


def model_card(report: Mapping[str, Any], original_card: str = "") -> str:
    """The model card of a compressed model, with licence and language of the original's card."""
    card = front_matter(original_card)
    library = "sentence-transformers" if report["sentence_transformers"] else "transformers"
    front = {"base_model": printable(report["base_model"]), "library_name": library, "tags": ["snnk", "compressed"]}
    yaml = [f"{key}: {json.dumps(value)}" for key, value in front.items()] + card  # JSON is YAML
    measured = [f"| {markdown(what)} | {unescape(value)} |" for what, value in headline(report)]
    blocks = [
        f"| {markdown(b['name'])} | {markdown(what_of(b))} | {b['parameters_before']:,} | {b['parameters']:,} | "
        f"{error_of(b)} |"
        for b in report["report"]["blocks"]
    ]
    saved = report.get("saved_as", {"format": "snnk", "reason": ""})
    classifier = str(report["model_class"]).startswith(PREFIXES)
    load = (
        'from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer("this folder")'
        if report["sentence_transformers"]
        else 'from snnk.finetune import load\n\nmodel, tokenizer = load("this folder")'
        if classifier
        else f"from transformers import {report['model_class']}\n\n"
        f'model = {report["model_class"]}.from_pretrained("this folder")'
    )
    sets = report["held_out"]
    agreed = [
        f"| {markdown(line.name)} | {' | '.join(map(figures.shown, line.values))} |" for line in figures.lines(sets)
    ]
    lines = "\n".join
    return f"""---
{lines(yaml)}
---

# {markdown(report["base_model"])}, compressed

{markdown(sentence(report))}

{"".join(f"**Warning:** {markdown(doubt)}.{2 * chr(10)}" for doubt in report.get("warnings", ()))}| measured | |
|---|---|
{lines(measured)}

## How to load it

```python
{load if saved["format"] == "plain" else IMPORT + load}
```

{markdown(format_of(saved))}

{_served(report)}## What was replaced

| block | is now | parameters before | after | held-out error |
|---|---|---|---|---|
{lines(blocks)}

An error is the squared error over the variance of the target, which is what the block must add to restore the
original's residual stream.

## Calibration data and measured loss

Fitted to {markdown(calibration_of(report))}. {markdown(recovery_of(report) or "There was no distillation.")}

Agreement with the original, on inputs that nothing was fitted to, without labels:

| | {" | ".join(markdown(figures.described(held)) for held in sets)} |
|---|{"---|" * len(sets)}
{lines(agreed)}

Compared: {markdown(report["compared"])}. Measure the loss on your own task before you rely on it.

report.html explains the figures and shows pictures, report.json has all figures, and plan.json has the plan.
"""


def _served(report: Mapping[str, Any]) -> str:
    """How the graph is loaded, and the stages up to it, if the model was exported."""
    found = report.get("served")
    if found is None:
        return ""
    heads = using.heads(found)
    rows = "\n".join(f"| {' | '.join(map(markdown, row))} |" for row in using.rows(found))
    return f"""## How to serve it

```python
{using.loader({**report, **found})}
```

The graph is {markdown(found["file"])}.{using.cache_note({**report, **found})} The loss is that against the original, on
held-out inputs.

| {" | ".join(map(markdown, heads))} |
|{"---|" * len(heads)}
{rows}

"""


def format_of(saved: Mapping[str, Any]) -> str:
    """How the files of a model are loaded, and why so, in sentences."""
    why = f" ({saved['reason']})" if saved["reason"] else ""
    if saved["format"] == "plain":
        return f"The files are a plain checkpoint{why}: they need no snnk, and AutoModel.from_pretrained works too."
    return (
        f"The files need snnk{why}: AutoModel.from_pretrained works too, once snnk.hf is imported. Without it, "
        "transformers warns that the quantization type snnk is unknown and then refuses the sizes of the weights."
    )


def front_matter(card: str) -> list[str]:
    """Lines of a card's front matter that stay true for the compressed model, above all the licence."""
    found = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    lines = found[1].split("\n") if found else []
    plain = (re.fullmatch(rf"({'|'.join(CARRIED)}): *(\w[\w./:-]*(?<!:)) *", line) for line in lines)
    return [f"{key}: {value}" for key, value in {m[1]: m[2] for m in plain if m}.items()]  # each key once


def sentence(report: Mapping[str, Any]) -> str:
    blocks = report["report"]["blocks"]
    changed = [b for b in blocks if b["kind"] != KEPT]
    return (
        f"{len(changed)} of {report['blocks_in_all']} blocks of {report['base_model']} ({report['model_class']}) were "
        f"replaced by smaller ones, fitted to {calibration_of(report)}, by snnk {report['versions']['snnk']}."
    )


def calibration_of(report: Mapping[str, Any]) -> str:
    used = report["calibration"]
    column = "" if used["column"] is None else f", column {used['column']}"
    general = f", and {used['general_texts']:,} general {used['kind']} of snnk" if used.get("general_texts") else ""
    return f"{used['count']:,} unlabelled {used['kind']} ({used['file']}{column}){general}"


def what_of(block: Mapping[str, Any]) -> str:
    if block["refused"]:
        return "as it was (refused)"
    if block["kind"] == KEPT:
        return "as it was"
    return describe(block["kind"], block["num_features"], block.get("ranks"))


def error_of(block: Mapping[str, Any]) -> str:
    return "-" if block["error"] is None else f"{block['error']:.4f}"
