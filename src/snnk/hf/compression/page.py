"""report.html: the page with pictures on a compressed model, made from report.json alone.

The page is one file that loads nothing else. Its bars are cells of tables, with their names and values as text, so that
they can be read aloud, copied, and read on a narrow screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from snnk._text import html as escape
from snnk.hf.compression import figures
from snnk.hf.compression.bars import GREY, NEW, OLD, bars
from snnk.hf.compression.report import calibration_of, error_of, headline, recovery_of, sentence, what_of
from snnk.hf.serve.using import cache_note, pictures

STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --back: #fff; --line: #d8dde4; --grey: #5b6472; --old: #b9c0cb;
  --new: #1f6fb2 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ee; --back: #14181f; --line: #39414d; --grey: #a3acba; --old: #5b6472; --new: #5fa8e6 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 960px;
  margin: 2em auto; padding: 0 1em; overflow-wrap: break-word }
h2 { margin-top: 1.8em; font-size: 1.2em } dt { font-weight: bold } dd { margin: 0 0 .5em }
.cards { display: flex; flex-wrap: wrap; gap: 1em; margin: 1.5em 0 }
.cards div { flex: 1 1 150px; border: 1px solid var(--line); border-radius: 8px; padding: .8em 1em }
.cards b { display: block; font-size: 1.35em } .cards span, small, caption { color: var(--grey) }
.wide { overflow-x: auto } .wide svg { min-width: 640px; width: 100%; height: auto }
table { border-collapse: collapse; width: 100%; font-size: .9em; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .4em } small { display: block }
th, td { text-align: right; padding: .3em .6em; border-bottom: 1px solid var(--line); font-weight: normal }
thead th { font-weight: bold; vertical-align: bottom }
thead th, .text { overflow-wrap: anywhere } th:first-child, td:first-child, .left { text-align: left }
.blocks th, .blocks td { white-space: nowrap }
.bars th, .bars td { border: 0; padding: .1em .4em; width: 1% } .bars td:nth-child(2) { width: 98% }
.bars td:last-child { text-align: left; white-space: nowrap; color: var(--grey) } .bars th { white-space: nowrap }
.track { position: relative; border-left: 1px solid var(--grey) }
.track i, .key { display: block; height: .8em; print-color-adjust: exact } .key { display: inline-block; width: .8em }
.track u { position: absolute; top: 0; bottom: 0; border-left: 2px dashed var(--grey) }
@media (max-width: 600px) { .bars tr { display: grid; grid-template-columns: 1fr 6.5em } .bars td { width: auto }
  .bars th { grid-column: 1 / 3; white-space: normal; width: auto } .bars td:last-child { white-space: normal } }
"""
ONE = "compressed; the dashed line is the original"
WORDS = {  # of the page
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
    "held-out inputs": "Texts or images that nothing was fitted to. All figures of agreement are measured on them, "
    "without labels, against the original's outputs.",
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
    facts = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td class="left">{escape(value)}</td></tr>\n'
        for key, value in _facts(report).items()
    )
    table = [
        *("block", "is now", "parameters before", "after", "multiply-adds before", "after", "predicted error"),
        *("held-out error", "seconds"),
    ]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report["base_model"])}, compressed by snnk</title>
<style>{STYLE}</style></head><body>
<h1>{escape(report["base_model"])}, compressed</h1>
<p>{escape(sentence(report))}</p>
{"".join(f"<p><b>Warning:</b> {escape(doubt)}.</p>" for doubt in report.get("warnings", ()))}
<div class="cards">{cards}</div>
{_served(report)}{lost(report)}
<h2>The whole model, in parts of the original</h2>
{overall}
<h2>Parameters of each block</h2>
{bars(names, [("before", OLD, before), ("after", NEW, after)], left)}
<h2>Held-out error of each block</h2>
{bars(names, [("error; the dashed line is 1, the error of a constant", NEW, errors)], [error_of(b) for b in blocks], 1)}
{_distilled(report)}<h2>Blocks</h2>
<div class="wide" tabindex="0" role="region" aria-label="blocks"><table class="blocks">{heading(table)}<tbody>
{"".join(_row(block, planned[block["name"]]) for block in blocks)}</tbody></table></div>
<h2>How it was made</h2>
<table>{facts}</table>
<h2>Words on this page</h2>
<dl>{"".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in WORDS.items())}</dl>
</body></html>
"""


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
    picture = curve(series, "steps") if found.steps else ""
    return f"<h2>Distance to the original in the distillation</h2>\n<p>{escape(found)}</p>\n{picture}\n"


def lost(report: Mapping[str, Any]) -> str:
    """Figures of agreement of all sets of held-out inputs, each class, and the inputs that lost most."""
    sets = report["held_out"]
    titles = [figures.described(held) for held in sets]
    rows = "".join(
        f'<tr><th scope="row">{escape(line.name)}'
        + (f"<small>{escape(line.meaning)}</small></th>" if line.meaning else "</th>")
        + "".join(f"<td>{figures.shown(value)}</td>" for value in line.values)
        + "</tr>\n"
        for line in figures.lines(sets)
    )
    parts = [
        f"""<h2>What was lost</h2>
<p>Both models were run on inputs that nothing was fitted to. Compared: {escape(report["compared"])}.</p>
<table>{heading(["agreement with the original", *titles])}<tbody>
{rows}</tbody></table>
"""
    ]
    for held, title in zip(sets, titles, strict=True):
        if held["classes"]:
            rows = "".join(
                f'<tr><th scope="row">{escape(c["label"])}</th><td>{c["count"]:,}</td>'
                f"<td>{figures.shown(c['same'])}</td></tr>\n"
                for c in held["classes"]
            )
            head = heading(["class", "predicted by the original", "part of these with the same prediction"])
            parts.append(f"<h3>Each class, {escape(title)}</h3>\n<table>{head}<tbody>\n{rows}</tbody></table>\n")
        if held["worst"]:
            parts.append(f"<h3>The worst {len(held['worst'])} of {escape(title)}</h3>\n{_worst(held)}")
    return "".join(parts)


def _worst(held: Mapping[str, Any]) -> str:
    both = any(case["before"] is not None for case in held["worst"])
    rows = "".join(
        f'<tr><td class="text">{escape(case["text"])}</td>'
        + (f"<td>{_output(case['before'])}</td><td>{_output(case['after'])}</td>" if both else "")
        + f"<td>{figures.shown(case['value'])}</td></tr>\n"
        for case in held["worst"]
    )
    outputs = ["original", "compressed"] if both else []
    return f"<table>{heading(['input', *outputs, figures.measure_of(held)])}<tbody>\n{rows}</tbody></table>\n"


def heading(cells: Iterable[str]) -> str:
    """The first row of a table."""
    found = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in cells)
    return f"<thead><tr>{found}</tr></thead>"


def _output(value: str | float | None) -> str:
    """A class, by name or number, or a single number."""
    return figures.shown(value) if value is None or isinstance(value, float) else escape(value)


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
    lines = [f"{title} from {found[0][1]:.4f} to {found[-1][1]:.4f}" for title, _, found in series if found]
    what = f"{'; '.join(lines)}, in {last:,.0f} {unit}"
    ends: list[tuple[float, float, str, float]] = []  # y and x of the last point, colour and value
    parts = [
        f'<div class="wide"><svg viewBox="0 0 900 250" role="img" aria-label="{escape(what)}" '
        'font-family="sans-serif" font-size="15">'
    ]
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
            ends.append((at[-1][1], at[-1][0], colour, found[-1][1]))
    below = 0.0
    for y, x, colour, value in sorted(ends):
        below = max(y + 4, below + 16)  # one label above the other
        parts.append(f'<text x="{x + 6:.1f}" y="{below:.1f}" fill="{colour}">{value:.4f}</text>')
    return "".join([*parts, "</svg></div>"])


def scatter(groups: Sequence[tuple[str, str, Sequence[tuple[str, float, float]]]], across: str, up: str) -> str:
    """An SVG of named points: per group (title, colour, points) its points (name, x, y) and a line through them.

    Args:
        groups: the points; x begins at 0, and y a little below the lowest point.
        across, up: what x and y are.

    Example:
        >>> picture = scatter([("ours", "blue", [("a", 1.0, 0.9), ("b", 2.0, 0.95)])], "ms", "cosine")
        >>> picture.count("<circle"), picture.count("<polyline")
        (2, 1)
    """
    left, right, top, bottom = 70, 780, 40, 330
    found = [point for *_, points in groups for point in points]
    most = max((x for _, x, _ in found), default=0) or 1
    low, high = min((y for *_, y in found), default=0), max((y for *_, y in found), default=1)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1
    low, high = low - room, high + room

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * x / most, bottom - (bottom - top) * (y - low) / (high - low)

    named = "; ".join(f"{name}: {x:.4g}, {y:.4g}" for name, x, y in found)
    parts = [
        f'<div class="wide"><svg viewBox="0 0 960 380" role="img" aria-label="{escape(f"{across}, {up}: {named}")}" '
        f'font-family="sans-serif" font-size="14"><text x="{left}" y="{top - 24}" fill="{GREY}">{escape(up)}</text>'
        f'<text x="{right}" y="{bottom + 40}" text-anchor="end" fill="{GREY}">{escape(across)}</text>'
    ]
    for part in (0, 0.25, 0.5, 0.75, 1):
        x, y = place(most * part, low + (high - low) * part)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{OLD}" stroke-width="0.5"/>')
        value = low + (high - low) * part
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{GREY}">{value:.3f}</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle" fill="{GREY}">{most * part:.3g}</text>')
    labels: list[tuple[float, float, str, str]] = []
    for title, colour, points in groups:
        at = [place(x, y) for _, x, y in sorted(points, key=lambda point: point[1:])]
        if title and len(at) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for name, x, y in points:
            across_at, up_at = place(x, y)
            parts.append(f'<circle cx="{across_at:.1f}" cy="{up_at:.1f}" r="5" fill="{colour}"></circle>')
            labels.append((up_at, across_at, name, colour))
    written: list[tuple[float, float]] = []
    for y, x, name, colour in sorted(labels):
        while any(abs(y - other) < 15 and abs(x - far) < 8 * len(name) for other, far in written):
            y += 5  # one label below the other
        written.append((y, x))
        parts.append(f'<text x="{x + 9:.1f}" y="{y + 5:.1f}" fill="{colour}">{escape(name)}</text>')
    return "".join([*parts, "</svg></div>"])


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
    cells = [*(f"{n:,}" for n in numbers), predicted, error_of(done), f"{done['seconds']:.1f}"]
    first = f'<th scope="row">{escape(done["name"])}</th><td class="left">{escape(what_of(done))}</td>'
    return f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"


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
