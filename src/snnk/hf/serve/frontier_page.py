"""report.html of `snnk.hf.frontier`: pictures and a table of all points, made from frontier.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snnk._text import html as escape
from snnk.hf.compression import figures
from snnk.hf.compression.bars import GREY, NEW
from snnk.hf.compression.page import STYLE, heading, scatter
from snnk.hf.serve.using import milliseconds

FORMAT = "snnk.Frontier/1"
EXPORTED = "#c2571a"  # colour of exported models
# The figure of the pictures is the first of these that all points have.
MAIN = ("ten nearest in common", "same nearest", "same best", "Spearman", "same next token", "relative squared error")
SHOWN = (
    *("cosine", "same nearest", "ten nearest in common", "rank agreement", "same best", "KL divergence", "Spearman"),
    *("relative squared error", "perplexity", "same next token"),
)


def main_figure(points: Sequence[Mapping[str, Any]], part: int = 0) -> str:
    """The name of the figure by which points are compared, on one of the sets of held-out inputs.

    Example:
        >>> main_figure([{"held_out": [{"figures": {"cosine": 1.0, "same nearest": 0.9}}]}])
        'same nearest'
    """
    common = [key for key in _figures(points[0], part) if all(key in _figures(point, part) for point in points)]
    return next((key for name in MAIN for key in common if key.rpartition(": ")[2] == name), common[0])


def headings(report: Mapping[str, Any], part: int = 0) -> list[str]:
    """Headings of `rows`."""
    times = [milliseconds(found) for found in report["latency"]]
    faster = [f"times as fast, {found['inputs']}" for found in report["latency"]]
    return ["", "MB", *times, *faster, *(_words(key) for key in _shown(report, part))]


def rows(report: Mapping[str, Any], part: int = 0) -> list[list[str]]:
    """Each point as text: its name, its size, its latencies, and its figures on one of the sets of held-out inputs."""
    first = report["points"][0]["seconds"]
    return [
        [
            point["name"],
            f"{point['bytes'] / 1e6:.1f}",
            *(f"{1e3 * seconds:.2f}" for seconds in point["seconds"]),
            *(f"{before / max(after, 1e-12):.2f}" for before, after in zip(first, point["seconds"], strict=True)),
            *(figures.shown(_figures(point, part).get(key)) for key in _shown(report, part)),
        ]
        for point in report["points"]
    ]


def html(report: Mapping[str, Any]) -> str:
    """The text of report.html, from the contents of frontier.json."""
    points, title = report["points"], f"{report['base_model']}, compressed to several sizes"
    key = main_figure(points)
    parts = []
    for i, found in enumerate(report["latency"]):
        groups = [
            (
                form or "",
                colour,
                [(p["name"], 1e3 * p["seconds"][i], _figures(p)[key]) for p in points if p["form"] == form],
            )
            for form, colour in _colours(points).items()
        ]
        across = f"milliseconds for {found['inputs']}, {found['threads']} thread(s), {found['clock']} time"
        parts.append(f"<h2>{escape(found['inputs'])}</h2>\n")
        parts.append(scatter(groups, across, _words(key)))
    for part, held in enumerate(points[0]["held_out"]):
        body = "".join(
            f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>\n'
            for name, *cells in rows(report, part)
        )
        parts.append(
            f"<h2>Agreement with the original on {escape(figures.described(held))}</h2>\n"
            f'<div class="wide" tabindex="0" role="region" aria-label="points"><table>{heading(headings(report, part))}'
            f"<tbody>\n{body}</tbody></table></div>\n"
        )
    found = report["latency"][0]
    facts = {
        "latency": f"medians in turns over {' and '.join(str(f['rounds']) for f in report['latency'])} rounds, by "
        f"{found['clock']} time on {found['threads']} thread(s); {found['processor']} ({found['instructions']})",
        "compared": report["compared"],
        "calibration": f"{report['calibration']['count']:,} {report['calibration']['kind']} of "
        f"{report['calibration']['file']}",
        "settings": ", ".join(f"{name} {value}" for name, value in report["settings"].items() if value is not None),
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    }
    table = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="left">{escape(value)}</td></tr>\n'
        for name, value in facts.items()
    )
    words = {key: figures.WORDS[key.rpartition(": ")[2]][1] for key in _shown(report, 0)}
    meanings = "".join(f"<dt>{escape(_words(key))}</dt><dd>{escape(text)}</dd>" for key, text in words.items())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>Each point is a model. The further left it is, the faster, and the higher, the closer to the original on inputs that
nothing was fitted to. A line is what snnk makes of
{escape(report["base_model"])}: blue in PyTorch, orange as it is exported.</p>
{"".join(f"<p><b>Warning:</b> {escape(doubt)}.</p>" for doubt in report["warnings"])}
{"".join(parts)}<h2>How it was measured</h2>
<table>{table}</table>
<dl>{meanings}</dl>
</body></html>
"""


def _colours(points: Sequence[Mapping[str, Any]]) -> dict[str | None, str]:
    forms = dict.fromkeys(point["form"] for point in points)
    return {form: NEW if form == "torch" else GREY if form is None else EXPORTED for form in forms}


def _figures(point: Mapping[str, Any], part: int = 0) -> Mapping[str, float]:
    found: Mapping[str, float] = point["held_out"][part]["figures"]
    return found


def _shown(report: Mapping[str, Any], part: int) -> list[str]:
    """The figures of the table, in the order of SHOWN."""
    keys = dict.fromkeys(key for point in report["points"] for key in _figures(point, part))
    classes = any(key.endswith("KL divergence") for key in keys)  # the cosine of two logits means little
    order = [name for name in SHOWN if name != "cosine" or not classes]
    return sorted((k for k in keys if k.rpartition(": ")[2] in order), key=lambda k: order.index(k.rpartition(": ")[2]))


def _words(key: str) -> str:
    label, mark, name = key.rpartition(": ")
    return label + mark + figures.WORDS.get(name, (name, ""))[0]
