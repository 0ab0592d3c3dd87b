"""report.html: the page with pictures on a compressed model, made from report.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from snnk._html import NEW, OLD, bars, facts, glossary, lines, page, table
from snnk._text import html as escape
from snnk.hf.compression import figures
from snnk.hf.compression.report import calibration_of, error_of, headline, recovery_of, sentence, what_of
from snnk.hf.serve.using import INT8, cache_note, pictures

ONE = "compressed; the dashed line is the original"
LEGEND = '<p>The words are explained <a href="#words">below</a>.</p>'
# Words of all pages on models, and those of this one.
COMMON = {
    "keep": "The part of the parameters of the blocks that stays. The rest of the model, such as its embeddings, stays "
    "as it is, so that the whole becomes less small than this.",
    "cosine": "Likeness of the directions of two vectors, from -1 to 1, which is the same direction. Here the vectors "
    "are the outputs of two models for the same input, unless something else is named.",
    "nearest neighbours": "The other held-out inputs whose vectors have the largest cosine to that of an input: what a "
    "search would return. The same neighbours for both models mean the same results.",
    "held-out inputs": "Texts or images that nothing was fitted to. All figures of agreement are measured on them, "
    "without labels, against the original's outputs.",
    "calibration": "The unlabelled inputs that the smaller model was fitted to.",
    "latency": "The time for one batch. Processor time counts the work of all threads; elapsed time is what a clock "
    "shows. 1 x 32 tokens is one text of 32 tokens.",
}
WORDS = {
    "block": "A part of a layer: its feed-forward block or its attention block.",
    "atoms": "The neurons of a feed-forward block that were kept, moved and refitted.",
    "ranks": "Dimensions per head that an attention block keeps: for queries and keys, and for values.",
    "parameters": "Numbers that the model stores.",
    "multiply-adds": "Multiply-add operations of the matrices per token. Most of the running time is spent on them.",
    "held-out error": "Squared error of a block over the variance of its target, which is what it must add to restore "
    "the original's residual stream (the vector per token that each block adds to). It is measured on calibration "
    "inputs that the block was not fitted to: 0 is exact, and 1 is as wrong as a constant.",
    "predicted error": "What the plan expected of the block alone, in the original model. The held-out error is "
    "often larger: there the block also has to repair what earlier blocks lost.",
    "distillation": "Training of everything that was replaced to return the original's outputs. The distance between "
    "the outputs of the two is 0 if they are equal. Its length is chosen by inputs that are neither trained on nor "
    "among those of the figures of agreement.",
}


def html(report: Mapping[str, Any]) -> str:
    """The text of report.html, from the contents of report.json."""
    blocks = report["report"]["blocks"]
    planned = {block["name"]: block for block in report["plan"]["blocks"]}
    names = [block["name"] for block in blocks]
    before = [block["parameters_before"] for block in blocks]
    after = [block["parameters"] for block in blocks]
    left = [f"{a:,} of {b:,}" for a, b in zip(after, before, strict=True)]
    errors = [block["error"] or 0.0 for block in blocks]
    cards = "".join(f"<div><b>{value}</b><span>{escape(what)}</span></div>" for what, value in headline(report))
    whole = _whole(report)
    overall = bars([w[0] for w in whole], [(ONE, NEW, [w[1] for w in whole])], [w[2] for w in whole], 1)
    heads = [
        *("block", "is now", "parameters before", "parameters after", "multiply-adds before", "multiply-adds after"),
        *("predicted error", "held-out error", "seconds"),
    ]
    body = f"""<p>{escape(sentence(report))}</p>
{warnings(report)}
<div class="cards">{cards}</div>
{LEGEND}
{_served(report)}{lost(report)}
<h2>The whole model, as shares of the original</h2>
{overall}
<h2>Parameters of each block</h2>
{bars(names, [("before", OLD, before), ("after", NEW, after)], left)}
<h2>Held-out error of each block</h2>
{bars(names, [("error; the dashed line is 1, the error of a constant", NEW, errors)], [error_of(b) for b in blocks], 1)}
{_distilled(report)}<h2>Blocks</h2>
{table(heads, (_row(block, planned[block["name"]]) for block in blocks))}
<h2>How it was made</h2>
{facts(_facts(report))}
"""
    body += glossary({**COMMON, **WORDS, **INT8}, body)
    return page(f"{report['base_model']}, compressed by snnk", f"{report['base_model']}, compressed", body)


def warnings(report: Mapping[str, Any]) -> str:
    """The warnings of a report, as paragraphs; a warning about several models is one."""
    found: dict[str, list[str]] = {}
    for doubt in report.get("warnings", ()):
        about, mark, text = doubt.partition(": ")
        found.setdefault(text if mark else about, []).append(about if mark else "")
    doubts = (f"{', '.join(about)}: {text}" if any(about) else text for text, about in found.items())
    return "".join(f"<p><b>Warning:</b> {escape(doubt)}.</p>\n" for doubt in doubts)


def _served(report: Mapping[str, Any]) -> str:
    """The stages up to the exported graph, if there is one."""
    found = report.get("served")
    if found is None:
        return ""
    text = "Latency and loss of each stage; the loss is that against the original, on held-out inputs."
    text += cache_note({**report, **found})
    return f"<h2>From the original to what is served</h2>\n<p>{text}</p>\n{pictures(found)}\n"


def _distilled(report: Mapping[str, Any]) -> str:
    """The course of the distillation, if there was one."""
    found = recovery_of(report)
    if found is None:
        return ""
    names = {"held_out": ("held out", NEW), "training": ("in training", OLD)}
    series = [
        (title, colour, [(point["step"], point[name]) for point in found.curve if name in point])
        for name, (title, colour) in names.items()
    ]
    picture = lines(series, "steps", "distance to the original") if found.steps else ""
    return f"<h2>Distance to the original in the distillation</h2>\n<p>{escape(found)}</p>\n{picture}\n"


def lost(report: Mapping[str, Any]) -> str:
    """Figures of agreement of all sets of held-out inputs, each class, and the inputs that lost most."""
    sets = report["held_out"]
    titles = [figures.described(held) for held in sets]
    found = figures.lines(sets)
    agreed = table(
        ["agreement with the original", *titles],
        ([line.name, *map(figures.shown, line.values)] for line in found),
        (line.meaning for line in found),
    )
    parts = [
        f"""<h2>What was lost</h2>
<p>Both models were run on inputs that nothing was fitted to. Compared: {escape(report["compared"])}.</p>
{agreed}"""
    ]
    for held, title in zip(sets, titles, strict=True):
        if held["classes"]:
            heads = ["class", "predicted by the original", "part of these with the same prediction"]
            rows = ([str(c["label"]), f"{c['count']:,}", figures.shown(c["same"])] for c in held["classes"])
            parts.append(f"<h3>Each class, {escape(title)}</h3>\n{table(heads, rows)}")
        if held["worst"]:
            parts.append(f"<h3>The worst {len(held['worst'])} of {escape(title)}</h3>\n{_worst(held)}")
    return "".join(parts)


def _worst(held: Mapping[str, Any]) -> str:
    both = any(case["before"] is not None for case in held["worst"])
    rows = (
        [
            case["text"],
            *((_output(case["before"]), _output(case["after"])) if both else ()),
            figures.shown(case["value"]),
        ]
        for case in held["worst"]
    )
    return table(["input", *(["original", "compressed"] if both else []), figures.measure_of(held)], rows)


def _output(value: str | int | float | None) -> str:
    """A class, by name or number, or a single number."""
    return figures.shown(value) if value is None or isinstance(value, float) else str(value)


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


def _row(done: Mapping[str, Any], planned: Mapping[str, Any]) -> list[str]:
    work = planned["multiply_adds_before"] if done["refused"] else planned["multiply_adds"]
    predicted = "-" if planned["predicted_error"] is None else f"{planned['predicted_error']:.4f}"
    numbers = [done["parameters_before"], done["parameters"], planned["multiply_adds_before"], work]
    return [
        *(done["name"], what_of(done)),
        *(f"{n:,}" for n in numbers),
        *(predicted, error_of(done), f"{done['seconds']:.1f}"),
    ]


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    speed = report["latency"]
    return {
        "calibration": f"{calibration_of(report)}, {report['report']['tokens']:,} tokens to fit to, "
        f"{report['report']['held_out_tokens']:,} to measure the errors of blocks",
        "agreement": f"measured on {' and '.join(map(figures.described, report['held_out']))}",
        "latency": f"{speed['original_seconds']:.4f} s before, {speed['compressed_seconds']:.4f} s after, for "
        f"{speed['inputs']}; {speed['clock']} time, medians of {speed['rounds']} rounds in turns"
        + "".join(f"; {doubt}" for doubt in speed["doubts"]),
        **({"format": f"{saved['format']}: {saved['reason']}"} if (saved := report.get("saved_as")) else {}),
        "settings": ", ".join(f"{key} {value}" for key, value in report["settings"].items() if value is not None),
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "time": f"{report['report']['seconds']:.0f} s",
    }
