"""report.html of `snnk.hf.frontier`: pictures and a table of all points, made from frontier.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from snnk._html import GREY, NEW, SERIES, facts, glossary, page, scatter, table
from snnk._text import html as escape
from snnk.hf.compression import figures
from snnk.hf.compression.page import COMMON, LEGEND, warnings
from snnk.hf.serve.forms import FORMS
from snnk.hf.serve.using import INT8, clock_of, milliseconds

FORMAT = "snnk.Frontier/1"
LOWER = ("KL divergence", "relative squared error", "perplexity")  # figures of which less is better
STATIC = {
    "with its tokenizer": "A static model, which has one vector per token and no layers: much faster, and much less "
    "like the original. Its time includes that of its tokenizer.",
}
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
    return ["model", "MB", *times, *faster, *(_words(key) for key in _shown(report, part))]


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
        across = f"milliseconds for {found['inputs']} ({clock_of(found)})"
        parts.append(f"<h2>Latency and agreement, {escape(found['inputs'])}</h2>\n")
        parts.append(scatter(groups, across, _words(key)))
    for part, held in enumerate(points[0]["held_out"]):
        parts.append(f"<h2>Agreement with the original on {escape(figures.described(held))}</h2>\n")
        parts.append(table(headings(report, part), rows(report, part)))
    found = report["latency"][0]
    measured = {
        "latency": f"medians in turns over {' and '.join(str(f['rounds']) for f in report['latency'])} rounds, by "
        f"{clock_of(found)}; {found['processor']} ({found['instructions']})",
        "compared": report["compared"],
        "calibration": f"{report['calibration']['count']:,} {report['calibration']['kind']} of "
        f"{report['calibration']['file']}",
        "settings": ", ".join(f"{name} {value}" for name, value in report["settings"].items() if value is not None),
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    }
    meanings = {_words(key): figures.WORDS[key.rpartition(": ")[2]][1] for key in _shown(report, 0)}
    better = "lower" if key.rpartition(": ")[2] in LOWER else "higher"
    cautions = f'<h2 id="warnings">Warnings</h2>\n{told}\n' if (told := warnings(report)) else ""
    note = '<p>There are <a href="#warnings">warnings</a> about these figures.</p>\n' if told else ""
    body = f"""<p>Each point is a model. A point further to the left is faster, and a {better} one is closer to the
original, measured on inputs that nothing was fitted to. A line joins what snnk makes of
{escape(report["base_model"])}, one line per form in which the models run.</p>
{note}{LEGEND}
{"".join(parts)}{cautions}<h2>How it was measured</h2>
{facts(measured)}
"""
    body += glossary({**COMMON, **meanings, **INT8, **STATIC}, body)
    return page(title, title, body)


def _colours(points: Sequence[Mapping[str, Any]]) -> dict[str | None, str]:
    """The colour of each form, the same on every page; models of other packages are grey."""
    known = {"torch": NEW, **dict(zip(FORMS, SERIES, strict=True))}
    return {form: known.get(form, GREY) for form in dict.fromkeys(point["form"] for point in points)}


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
