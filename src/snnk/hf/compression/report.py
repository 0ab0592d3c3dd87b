"""The report on a compressed model: a page with pictures, a model card, and the measured latency.

Page and card are made from report.json alone. The page is one file that loads nothing else; its pictures are SVG.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import unescape
from typing import Any

import torch
from transformers import PreTrainedModel

from snnk._text import html as escape
from snnk._text import markdown, printable
from snnk.hf.compression.planning import KEPT
from snnk.hf.cost import counting_mode, in_turns
from snnk.hf.models import Batch, place

FORMAT = "snnk.CompressReport/1"
SECONDS = 4.0  # approximate duration of the measurement of latency
OLD, NEW, GREY = "#b9c0cb", "#1f6fb2", "#5b6472"
FIGURES = (  # measures of agreement in order of preference: one of each row is shown in the headline
    {
        "cosine": "mean cosine to the original",
        "Pearson": "correlation with the original",
        "original perplexity": "perplexity of the original, held out",
    },
    {
        "perplexity": "perplexity, held out",
        "same best": "same best class",
        "rank agreement": "rank agreement",
        "relative squared error": "squared error over variance",
        "KL divergence": "KL divergence",
    },
    {"same next token": "same next token as the original"},
)
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")  # from the original's card


def latency(
    original: PreTrainedModel, compressed: PreTrainedModel, batches: Sequence[Batch], *, seconds: float = SECONDS
) -> dict[str, Any]:
    """Seconds of two models for the same batches, measured in turns by `in_turns`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> found = latency(model, model, [{"input_ids": torch.ones(2, 5, dtype=torch.long)}], seconds=0.1)
        >>> found["rounds"] >= 3, found["speedup"] > 0
        (True, True)
    """
    chosen = batches[:: max(1, len(batches) // 4)][:4]

    def forward(model: PreTrainedModel) -> Callable[[], None]:
        def run() -> None:
            for batch in chosen:
                float(model(**place(batch, model))[0].flatten()[0])  # waits for an accelerator

        return run

    with counting_mode(original), counting_mode(compressed), torch.inference_mode():
        (before, after), rounds = in_turns([forward(original), forward(compressed)], seconds=seconds)
    return {
        "original_seconds": before,
        "compressed_seconds": after,
        "speedup": before / after,
        "rounds": rounds,
        "batches": len(chosen),
        "threads": torch.get_num_threads(),
    }


def html(report: Mapping[str, Any]) -> str:
    """The text of report.html, from the contents of report.json."""
    blocks = report["report"]["blocks"]
    planned = {block["name"]: block for block in report["plan"]["blocks"]}
    names = [block["name"] for block in blocks]
    before = [planned[b["name"]]["parameters_before"] for b in blocks]
    after = [b["parameters"] for b in blocks]
    left = [f"{a:,} of {b:,}" for a, b in zip(after, before, strict=True)]
    errors = [b["error"] or 0.0 for b in blocks]
    cards = "".join(f"<div><b>{value}</b><span>{escape(what)}</span></div>" for what, value in headline(report))
    rows = "".join(_row(b, planned[b["name"]]) for b in blocks)
    whole = _whole(report)
    overall = bars([w[0] for w in whole], [("compressed", NEW, [w[1] for w in whole])], [w[2] for w in whole], 1)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(report["base_model"])}, compressed by snnk</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 960px; margin: 2em auto; padding: 0 1em }}
.cards {{ display: flex; flex-wrap: wrap; gap: 1em; margin: 1.5em 0 }}
.cards div {{ flex: 1 1 170px; border: 1px solid #d8dde4; border-radius: 8px; padding: .8em 1em }}
.cards b {{ display: block; font-size: 1.35em }} .cards span {{ color: {GREY} }}
table {{ border-collapse: collapse; width: 100%; font-size: .9em; font-variant-numeric: tabular-nums }}
th, td {{ text-align: right; padding: .3em .6em; border-bottom: 1px solid #e4e8ed }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {{ text-align: left }}
table.blocks td {{ white-space: nowrap }}
svg {{ width: 100%; height: auto }} h2 {{ margin-top: 1.8em; font-size: 1.15em }}
</style></head><body>
<h1>{escape(report["base_model"])}, compressed</h1>
<p>{escape(_sentence(report))}</p>
<div class="cards">{cards}</div>
<h2>The whole model, in parts of the original (dashed)</h2>
{overall}
<h2>Parameters of each block</h2>
{bars(names, [("before", OLD, before), ("after", NEW, after)], left)}
<h2>Held-out error of each block</h2>
<p>Squared error over the variance of the target, which is what the block must add to restore the original's residual
stream.</p>
{bars(names, [("held-out error", NEW, errors)], [_error(b) for b in blocks])}
<h2>Blocks</h2>
<table class="blocks"><tr><th>block</th><th>is now</th><th>parameters before</th><th>after</th>
<th>multiply-adds before</th><th>after</th><th>predicted error</th><th>held-out error</th><th>seconds</th></tr>
{rows}</table>
<h2>How it was made</h2>
<table>{"".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in _facts(report).items())}</table>
</body></html>
"""


def headline(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(description, figure) of size, speed and agreement, for the first row of the page."""
    size, speed = report["bytes"], report["latency"]
    found = [
        ("stored", f"{size['original'] / 1e6:.1f} &rarr; {size['compressed'] / 1e6:.1f} MB"),
        (f"as fast, {speed['threads']} thread(s)", f"{speed['speedup']:.2f} &times;"),
    ]
    agreed = report["agreement"]
    first = {figure.rpartition(": ")[2]: figure for figure in reversed(agreed)}  # the first of several outputs
    for row in FIGURES:
        name = next((name for name in row if name in first), None)
        if name is not None:
            found.append((first[name].removesuffix(name) + row[name], f"{agreed[first[name]]:.4f}"))
    return found


def bars(
    names: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[float]]],
    labels: Sequence[str],
    full: float | None = None,
) -> str:
    """An SVG of horizontal bars: per name, one bar for each series (title, colour, values), and a label at the last.

    Example:
        >>> bars(["a"], [("before", "grey", [4.0]), ("after", "blue", [1.0])], ["1"]).count("<rect")
        4
    """
    left, right, thick, gap = 190, 720, 14, 10
    most = full or max((v for _, _, values in series for v in values), default=0.0) or 1.0
    most = max(most, *(v for _, _, values in series for v in values), 1e-30)
    step = thick * len(series) + gap
    height = 26 + step * len(names)
    parts = [f'<svg viewBox="0 0 900 {height}" role="img" font-family="sans-serif" font-size="13">']
    for i, (title, colour, _) in enumerate(series):
        x = left + 130 * i
        parts.append(f'<rect x="{x}" y="3" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="14" fill="{GREY}">{escape(title)}</text>')
    if full is not None:
        mark = left + (right - left) * full / most
        parts.append(
            f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="20" y2="{height}" stroke="{OLD}" stroke-dasharray="4 3"/>'
        )
    for row, name in enumerate(names):
        top = 26 + step * row
        parts.append(
            f'<text x="{left - 8}" y="{top + step / 2:.1f}" text-anchor="end" fill="#1c2430">{escape(name)}</text>'
        )
        for i, (_, colour, values) in enumerate(series):
            width = (right - left) * values[row] / most
            y = top + thick * i
            parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{thick - 1}" fill="{colour}"/>')
        end = left + (right - left) * series[-1][2][row] / most
        y = top + thick * len(series) - 3
        parts.append(f'<text x="{end + 6:.1f}" y="{y}" fill="{GREY}">{escape(labels[row])}</text>')
    return "".join([*parts, "</svg>"])


def curve(series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], unit: str) -> str:
    """An SVG of lines: per series (title, colour, points) one line through its points (x, y); y begins at 0.

    Args:
        series: the lines. The y of the last point of each is written beside it.
        unit: what x counts, such as "steps".

    Example:
        >>> curve([("held out", "blue", [(0, 0.4), (10, 0.2), (20, 0.1)])], "steps").count("<polyline")
        1
    """
    left, right, top, bottom = 60, 800, 26, 220
    points = [point for *_, found in series for point in found]
    last = max((x for x, _ in points), default=0) or 1
    most = max((y for _, y in points), default=0) or 1
    parts = ['<svg viewBox="0 0 900 250" role="img" font-family="sans-serif" font-size="13">']
    for part in (0, 0.5, 1):  # lines of equal height, and their values
        y = bottom - (bottom - top) * part
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{OLD}" stroke-width="0.5"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{most * part:.3g}</text>')
    for part in (0, 0.5, 1):
        x = left + (right - left) * part
        text = f"{last * part:,.0f} {escape(unit)}"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle" fill="{GREY}">{text}</text>')
    for i, (title, colour, found) in enumerate(series):
        parts.append(f'<rect x="{left + 180 * i}" y="3" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 180 * i + 17}" y="14" fill="{GREY}">{escape(title)}</text>')
        at = [(left + (right - left) * x / last, bottom - (bottom - top) * y / most) for x, y in found]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if at:
            x, y = at[-1]
            parts.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{colour}">{found[-1][1]:.4f}</text>')
    return "".join([*parts, "</svg>"])


def model_card(report: Mapping[str, Any], original_card: str = "") -> str:
    """The model card of a compressed model, with licence and language of the original's card."""
    card = front_matter(original_card)
    library = "sentence-transformers" if report["sentence_transformers"] else "transformers"
    front = {"base_model": printable(report["base_model"]), "library_name": library, "tags": ["snnk", "compressed"]}
    yaml = [f"{key}: {json.dumps(value)}" for key, value in front.items()] + card  # JSON is YAML
    figures = [f"| {markdown(what)} | {unescape(value)} |" for what, value in headline(report)]
    blocks = [
        f"| {markdown(b['name'])} | {markdown(_what(b))} | {b['parameters_before']:,} | {b['parameters']:,} | "
        f"{_error(b)} |"
        for b in report["report"]["blocks"]
    ]
    load = (
        'from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer("this folder")'
        if report["sentence_transformers"]
        else f"from transformers import {report['model_class']}\n\n"
        f'model = {report["model_class"]}.from_pretrained("this folder")'
    )
    agreed = ", ".join(f"{name} {value:.4f}" for name, value in report["agreement"].items())
    lines = "\n".join
    return f"""---
{lines(yaml)}
---

# {markdown(report["base_model"])}, compressed

{markdown(_sentence(report))}

| measured | |
|---|---|
{lines(figures)}

## How to load it

```python
import snnk.hf  # pip install 'snnk[hf]'; without it transformers refuses
{load}
```

AutoModel.from_pretrained works too, once `snnk.hf` is imported.

## What was replaced

| block | is now | parameters before | after | held-out error |
|---|---|---|---|---|
{lines(blocks)}

An error is the squared error over the variance of the target, which is what the block must add to restore the
original's residual stream.

## Calibration data and measured loss

Fitted to {markdown(_calibration(report))}. On {report["report"]["held_out_tokens"]:,} held-out tokens of the same data,
against the original: {markdown(agreed)}. Compared: {markdown(report["compared"])}. Measure the loss on your own task
before you rely on it.

report.html shows pictures, report.json has all figures, and plan.json has the plan.
"""


def front_matter(card: str) -> list[str]:
    """Lines of a card's front matter that stay true for the compressed model, above all the licence."""
    found = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    lines = found[1].split("\n") if found else []
    plain = (re.fullmatch(rf"({'|'.join(CARRIED)}): *(\w[\w./:-]*(?<!:)) *", line) for line in lines)
    return [f"{key}: {value}" for key, value in {m[1]: m[2] for m in plain if m}.items()]  # each key once


def _sentence(report: Mapping[str, Any]) -> str:
    blocks = report["report"]["blocks"]
    changed = [b for b in blocks if b["kind"] != KEPT]
    return (
        f"{len(changed)} of {report['blocks_in_all']} feed-forward blocks of {report['base_model']} "
        f"({report['model_class']}) were replaced by fewer features, fitted to {_calibration(report)}, "
        f"by snnk {report['versions']['snnk']}."
    )


def _calibration(report: Mapping[str, Any]) -> str:
    used = report["calibration"]
    column = "" if used["column"] is None else f", column {used['column']}"
    return f"{used['count']:,} unlabelled {used['kind']} ({used['file']}{column})"


def _whole(report: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """(description, part of the original, label) of the whole model."""
    done, planned, size, speed = report["report"], report["plan"]["blocks"], report["bytes"], report["latency"]
    kept = {b["name"]: b["refused"] for b in done["blocks"]}
    work = sum(b["multiply_adds_before"] for b in planned)
    left = sum(b["multiply_adds_before"] if kept[b["name"]] else b["multiply_adds"] for b in planned)
    pairs: Iterable[tuple[str, float, float]] = [
        ("stored bytes", size["original"], size["compressed"]),
        ("parameters", done["model_parameters_before"], done["model_parameters"]),
        ("multiply-adds of blocks", work, left),
        ("latency", speed["original_seconds"], speed["compressed_seconds"]),
    ]
    return [(name, b / a, f"{b / a:.3f}") for name, a, b in pairs]


def _row(done: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    work = planned["multiply_adds_before"] if done["refused"] else planned["multiply_adds"]
    predicted = "" if planned["predicted_error"] is None else f"{planned['predicted_error']:.4f}"
    numbers = [done["parameters_before"], done["parameters"], planned["multiply_adds_before"], work]
    cells = [escape(done["name"]), escape(_what(done)), *(f"{n:,}" for n in numbers), predicted, _error(done)]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in [*cells, f"{done['seconds']:.1f}"]) + "</tr>\n"


def _what(block: Mapping[str, Any]) -> str:
    if block["refused"]:
        return "as it was (refused)"
    if block["kind"] == KEPT:
        return "as it was"
    return str(block["kind"]) if block["num_features"] is None else f"{block['num_features']} {block['kind']}"


def _error(block: Mapping[str, Any]) -> str:
    return "-" if block["error"] is None else f"{block['error']:.4f}"


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    speed = report["latency"]
    return {
        "calibration": f"{_calibration(report)}, {report['report']['tokens']:,} tokens to fit to, "
        f"{report['report']['held_out_tokens']:,} held out",
        "agreement, held out": ", ".join(f"{name} {value:.4f}" for name, value in report["agreement"].items()),
        "compared": report["compared"],
        "latency": f"{speed['original_seconds']:.4f} s before, {speed['compressed_seconds']:.4f} s after, for "
        f"{speed['batches']} batches; medians of {speed['rounds']} rounds in turns",
        "settings": ", ".join(f"{key} {value}" for key, value in report["settings"].items() if value is not None),
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "time": f"{report['report']['seconds']:.0f} s",
    }
