"""Parts of the HTML pages that snnk writes: the shell with its style, tables, bars, charts of lines and of points.

A page is one file that loads nothing else, has a dark form, and can be read on a screen of 400 pixels: bars are cells
of tables; charts have places in percent and text in pixels, so that they shrink and their text does not; tables with
many columns become lists. Every number of a chart is also text, for those who copy it or have it read aloud. All text
arguments are plain text, which is escaped here; `body` and the return values are HTML.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from snnk._text import html as escape

# Colours of what was there before, what is new, what is compared with it, and small print.
OLD, NEW, OTHER, GREY = "var(--old)", "var(--new)", "var(--other)", "var(--grey)"
SERIES = (OTHER, *(f"var(--series-{i})" for i in range(2, 6)))  # more colours that can be told apart
HEIGHT = 240  # pixels of a chart
NARROW, WIDE = 270, 700  # pixels of the width of a chart on small and large screens, between which labels have to fit
LETTER, LINE = 8, 15  # pixels of a letter and of a line of a chart's text
RADIUS = 5  # pixels of a point
SIDES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # of a point, for its number: above, right, below, left
UNITS = {3: "thousands", 6: "millions", 9: "billions"}  # of axes, by their power of ten

STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --back: #ffffff; --line: #d8dde4; --grey: #5b6472; --old: #8791a1;
  --new: #1f6fb2; --other: #b04a12; --series-2: #23763a; --series-3: #8a2f9e; --series-4: #8a6d00; --series-5: #c2185b }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ee; --back: #14181f; --line: #39414d; --grey: #a3acba; --old: #717d8e; --new: #5fa8e6;
    --other: #f0935b; --series-2: #5cc07a; --series-3: #d08ae6; --series-4: #d6b53a; --series-5: #f2749f } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 960px;
  margin: 2em auto; padding: 0 1em; overflow-wrap: break-word }
a { color: var(--new) } h1 { line-height: 1.2 } h2 { margin-top: 1.8em; font-size: 1.2em } h3 { font-size: 1em }
dt { font-weight: bold } dd { margin: 0 0 .5em }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 1em; margin: 1.5em 0 }
.cards div { border: 1px solid var(--line); border-radius: 8px; padding: .8em 1em }
.cards b { display: block; font-size: 1.35em } .cards span, small, caption, figcaption { color: var(--grey) }
table { border-collapse: collapse; width: 100%; font-size: .9em; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .4em } small { display: block }
th, td { text-align: right; padding: .3em .6em; border-bottom: 1px solid var(--line); font-weight: normal }
thead th { font-weight: bold; vertical-align: bottom }
th:first-child, td.left { text-align: left } th:first-child, .left, .long { overflow-wrap: anywhere }
tbody th, .long { min-width: 6em } .facts th { width: 14em; vertical-align: top }
.bars { margin-bottom: 1.2em } .bars, .bars caption { display: block } .bars tr { display: contents }
.bars tbody { display: grid; grid-template-columns: fit-content(20em) minmax(0, 1fr) fit-content(16em);
  align-items: center }
.bars th, .bars td { border: 0; padding: .3em .4em }
.bars td:last-child { text-align: left; overflow-wrap: anywhere; color: var(--grey) }
.track { position: relative; border-left: 1px solid var(--grey) }
.track i, .key { display: block; height: .8em; print-color-adjust: exact } .key { display: inline-block; width: .8em }
.track u { position: absolute; top: -.6em; bottom: -.6em; border-left: 2px dashed var(--grey) }
figure { margin: 1em 0; font-size: .9em }
figure > svg { display: block; overflow: visible; font: 13px system-ui, sans-serif; height: 240px;
  margin: 22px 56px 26px }
.square { max-width: 480px } .square > svg { height: auto; aspect-ratio: 1 }
figure text { fill: var(--grey); paint-order: stroke; stroke: var(--back); stroke-width: 3px }
figure text.name { fill: var(--text) }
.across { text-align: right } figure ol { columns: 20em 2; padding-left: 2.2em } figure li { break-inside: avoid }
@media (max-width: 600px) {
  .bars tbody { grid-template-columns: minmax(0, 1fr) fit-content(10em) } .bars th { grid-column: 1 / 3 }
  .many thead { display: none } .many tr { display: block; padding: .6em 0; border-bottom: 1px solid var(--line) }
  .many th { display: block; font-weight: bold } .many th, .many td { border: 0; padding: .1em 0 }
  .many td { display: flex; justify-content: space-between; gap: 1em }
  .many td::before { content: attr(data-head); flex: 0 1 auto; text-align: left; color: var(--grey) }
  figure .odd { display: none } .facts th { width: 8em } }
"""


def page(title: str, heading: str, body: str) -> str:
    """The text of a whole page.

    Args:
        title: the name of the window.
        heading: the first line of the page.
        body: HTML of the rest.

    Example:
        >>> "<h1>a &amp; b</h1>" in page("a and b", "a & b", "<p>text</p>")
        True
    """
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{escape(heading)}</h1>
{body}
</body></html>
"""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """A table; one with more than three columns becomes a list on a narrow screen.

    Args:
        heads: of the columns.
        rows: cells, of which the first names the row.
        notes: small print below the first cell of each row. Default: none.

    Example:
        >>> table(["block", "error"], [["a", "0.1"]]).count("<td")
        1
    """
    below = iter(notes)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}{_small(next(below, ""))}</th>'
        + "".join(_cell(head, cell) for head, cell in zip(heads[1:], cells, strict=True))
        + "</tr>\n"
        for name, *cells in rows
    )
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    many = ' class="many"' if len(heads) > 3 else ""
    return f"<table{many}><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"


def _cell(head: str, text: str) -> str:
    long = ' class="long"' if len(text) > 16 else ""  # may be broken anywhere, which numbers may not
    return f'<td{long} data-head="{escape(head)}">{escape(text)}</td>'


def _small(note: str) -> str:
    return f"<small>{escape(note)}</small>" if note else ""


def facts(found: Mapping[str, str]) -> str:
    """A table of names and sentences.

    Example:
        >>> facts({"seed": "0"}).count("<tr>")
        1
    """
    rows = (
        f'<tr><th scope="row">{escape(name)}</th><td class="left">{escape(value)}</td></tr>\n'
        for name, value in found.items()
    )
    return f'<table class="facts"><tbody>\n{"".join(rows)}</tbody></table>\n'


def glossary(words: Mapping[str, str], body: str) -> str:
    """The section that explains the words of a page, which is named "words": `<a href="#words">` leads to it.

    Args:
        words: meanings. A name may have several words with commas between them.
        body: HTML of the rest of the page. Only words that it, or the meaning of such a word, has are explained.

    Example:
        >>> words = {"cosine": "Likeness of two vectors.", "vector": "A list of numbers.", "loss": "What is lost."}
        >>> glossary(words, "<p>Cosines of texts</p>").count("<dt>")
        2
    """
    kept: set[str] = set()
    new, text = [re.sub("<[^>]*>", " ", body)], ""
    while new:
        text += " ".join(new)
        found = {name for name in words.keys() - kept if any(_has(text, escape(w)) for w in name.split(", "))}
        new = [words[name] for name in found]
        kept |= found
    meanings = (f"<dt>{escape(name)}</dt><dd>{escape(words[name])}</dd>\n" for name in words if name in kept)
    return f'<h2 id="words">Words on this page</h2>\n<dl>\n{"".join(meanings)}</dl>\n'


def _has(text: str, word: str) -> bool:
    """Whether a text has a word, in singular or plural."""
    return bool(re.search(rf"(?<!\w){re.escape(word.removesuffix('s'))}s?(?!\w)", text, re.IGNORECASE))


def bars(
    names: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[float]]],
    labels: Sequence[str],
    full: float | None = None,
) -> str:
    """A table of horizontal bars, which begin at 0: per name, one bar for each series, and a label.

    Args:
        names: of the rows.
        series: (title, colour, values) of the bars; their titles are shown above.
        labels: the text behind the bars of each row, which has the values for those who do not see the bars.
        full: a value that is marked by a dashed line, and that the bars do not end before, such as 1 for errors.
            Default: the largest value.

    Example:
        >>> bars(["a"], [("before", OLD, [4.0]), ("after", NEW, [1.0])], ["1"]).count("<i ")
        2
    """
    most = max([full or 0.0, 1e-30, *(v for _, _, values in series for v in values)])
    mark = "" if full is None else f'<u style="left: calc({100 * full / most:.2f}% - 1px)"></u>'
    rows = []
    for row, (name, label) in enumerate(zip(names, labels, strict=True)):
        drawn = "".join(
            f'<i style="width: {100 * values[row] / most:.2f}%; background: {colour}"></i>'
            for _, colour, values in series
        )
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td aria-hidden="true"><div class="track">{drawn}{mark}</div></td>'
            f"<td>{escape(label)}</td></tr>\n"
        )
    keys = _keys((title, colour) for title, colour, _ in series)
    return f'<table class="bars"><caption>{keys}</caption><tbody>\n{"".join(rows)}</tbody></table>\n'


def lines(series: Sequence[tuple[str, str, Sequence[tuple[float, float]]]], across: str, up: str) -> str:
    """A chart of lines through points; both axes begin at 0, and a table below it has all points.

    Args:
        series: (title, colour, points), where a point is (x, y). The y of the last point of each is written beside it.
        across, up: what x and y are, such as "steps" and "distance".

    Example:
        >>> lines([("held out", NEW, [(0, 0.4), (10, 0.2), (20, 0.1)])], "steps", "distance").count('class="drawn"')
        2
    """
    series = [(title, colour, points) for title, colour, points in series if points]
    right = ticks(0, max((x for *_, points in series for x, _ in points), default=1))
    top = ticks(0, max((y for *_, points in series for _, y in points), default=1))
    drawn, ends = [], []
    for _, colour, points in series:
        at = [(_percent(x, right), _percent(y, top)) for x, y in points]
        drawn.append(_path(at, colour))
        ends.append((HEIGHT * (1 - at[-1][1] / 100), at[-1][0], points[-1][1]))
    below = -math.inf
    for y, x, value in sorted(ends):
        below = max(y, below + LINE)  # one label below the other
        drawn.append(f'<text class="name" x="{x:.2f}%" y="{below:.1f}" dx="6" dy="4">{_four(value)}</text>')
    said = [f"{title} from {_four(found[0][1])} to {_four(found[-1][1])}" for title, _, found in series]
    xs = sorted({x for *_, points in series for x, _ in points})
    found = [dict(points) for *_, points in series]
    rows = ([f"{x:,g}", *(_four(own[x]) if x in own else "-" for own in found)] for x in xs)
    numbers = table([across, *(title for title, *_ in series)], rows)
    keys = _keys((title, colour) for title, colour, _ in series)
    below_it = f"<details><summary>The numbers of this picture</summary>\n{numbers}</details>"
    return _chart("; ".join(said), keys, "".join(drawn), right, top, across, up, below_it)


def scatter(groups: Sequence[tuple[str, str, Sequence[tuple[str, float, float]]]], across: str, up: str) -> str:
    """A chart of named points, with a numbered list of them below it; a line joins the points of a group.

    x begins at 0. The axis of y covers a tenth of the largest value at least, so that small differences look small; if
    it does not begin at 0, a sentence says so.

    Args:
        groups: (title, colour, points), where a point is (name, x, y); a group without a title has no line.
        across, up: what x and y are.

    Example:
        >>> picture = scatter([("ours", NEW, [("a", 1.0, 0.9), ("b", 2.0, 0.95)])], "milliseconds", "cosine")
        >>> picture.count("<circle"), picture.count("<li>"), "begins at 0.85" in picture
        (2, 2, True)
    """
    points = [(point, colour) for _, colour, own in groups for point in own]
    high = max((y for (*_, y), _ in points), default=1)
    low = min([y for (*_, y), _ in points] + [high - 0.1 * abs(high)])
    right, top = ticks(0, max((x for (_, x, _), _ in points), default=1)), ticks(low, high)
    drawn = [
        _path([(_percent(x, right), _percent(y, top)) for _, x, y in sorted(own, key=lambda point: point[1:])], colour)
        for title, colour, own in groups
        if title
    ]
    places = [(_percent(x, right), HEIGHT * (1 - _percent(y, top) / 100)) for (_, x, y), _ in points]
    drawn += [
        f'<circle cx="{x:.2f}%" cy="{y:.1f}" r="{RADIUS}" fill="{colour}"/>'
        for (x, y), (_, colour) in zip(places, points, strict=True)
    ]
    for number, ((x, _), (aside, y)) in enumerate(zip(places, _beside(places), strict=True), 1):
        drawn.append(
            f'<text class="name" x="{x:.2f}%" y="{y:.1f}" dx="{aside}" dy="4" text-anchor="middle">{number}</text>'
        )
    said = "; ".join(f"{name}: {x:.4g}, {_four(y)}" for (name, x, y), _ in points)
    listed = "".join(
        f'<li><span class="key" style="background: {colour}"></span> {escape(name)}: {x:.4g}, {_four(y)}</li>'
        for (name, x, y), colour in points
    )
    note = "" if top[0] == 0 else f"<p>The vertical axis begins at {top[0]:g}, not at 0.</p>"
    below = f"{note}\n<p>The points, each with its horizontal and its vertical value:</p><ol>{listed}</ol>"
    keys = _keys((title, colour) for title, colour, own in groups if title and own)
    return _chart(f"{across}, {up}: {said}", keys, "".join(drawn), right, top, across, up, below)


def diagonal(
    points: Sequence[tuple[float, float, float, float]],
    across: str,
    up: str,
    ends: tuple[float, float] | None = None,
    title: str = "",
) -> str:
    """A chart of points and of the dashed line on which both values are equal.

    Args:
        points: (x, y, low, high): a point, and the ends of the line through it, which may be y itself.
        across, up: what x and y are, such as "predicted" and "observed".
        ends: of both axes. Default: those of the points; if these do not begin at 0, a sentence says so.
        title: what a point and its line are.

    Example:
        >>> picture = diagonal([(0.2, 0.25, 0.2, 0.3), (0.8, 0.7, 0.6, 0.9)], "predicted", "observed", (0, 1))
        >>> picture.count("<circle"), picture.count("<line class")
        (2, 3)
    """
    least, most = ends or (min(min(p) for p in points), max(max(p) for p in points))
    if not most - least > 1e-9 * max(abs(least), abs(most)):  # one value only, up to rounding
        least, most = least - (abs(least) or 1), most + (abs(most) or 1)
    axis = ticks(least, most)
    drawn = [
        '<line class="drawn" x1="0" y1="100%" x2="100%" y2="0" stroke="var(--old)" stroke-width="2" '
        'stroke-dasharray="6 5"/>'
    ]
    for x, y, low, high in points:
        left, at, bottom, top = (_percent(value, axis) for value in (x, y, low, high))
        drawn.append(
            f'<line class="drawn" x1="{left:.2f}%" y1="{100 - bottom:.2f}%" x2="{left:.2f}%" y2="{100 - top:.2f}%" '
            f'stroke="{NEW}" stroke-width="2"/>'
            f'<circle cx="{left:.2f}%" cy="{100 - at:.2f}%" r="{RADIUS}" fill="{NEW}"/>'
        )
    said = "; ".join(f"{across} {x:.4g}, {up} {y:.4g}" for x, y, *_ in points)
    note = "" if axis[0] == 0 else f"<p>Both axes begin at {axis[0]:,g}, not at 0.</p>"
    keys = _keys([(title or up, NEW), (f"{up} = {across}", OLD)])
    return _chart(said, keys, "".join(drawn), axis, axis, across, up, note, "square")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values from below `low` to above `high`, at most `most` steps apart.

    Example:
        >>> ticks(0, 0.43), ticks(0.86, 1.0), ticks(0, 0)
        ([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], [0.85, 0.9, 0.95, 1.0], [0.0, 1.0])
    """
    if not high - low > 1e-290:  # smaller ones have no steps
        high, most = low + 1, 1
    small = 10 ** math.floor(math.log10((high - low) / most))
    for step in (factor * small for factor in (1, 2, 5, 10, 20)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def _chart(
    said: str,
    keys: str,
    drawn: str,
    right: Sequence[float],
    top: Sequence[float],
    across: str,
    up: str,
    below: str,
    kind: str = "wide",
) -> str:
    """A figure: its legend, what is drawn over the lines of its axes, and the numbers below it."""
    (beside, of_up), (under, of_across) = _labels(top), _labels(right)
    axes = [
        f'<line x1="0" x2="100%" y1="{y:.2f}%" y2="{y:.2f}%" stroke="var(--line)"/>'
        f'<text x="0" y="{y:.2f}%" dx="-8" dy="4" text-anchor="end">{label}</text>'
        for value, label in zip(top, beside, strict=True)
        for y in [100 - _percent(value, top)]
    ]
    full = LETTER * (len("".join(under)) + len(under)) > NARROW  # a narrow screen has room for every second one
    axes += [
        f'<text x="{_percent(value, right):.2f}%" y="100%" dy="20" text-anchor="middle"{hidden}>{label}</text>'
        for i, (value, label) in enumerate(zip(right, under, strict=True))
        for hidden in [' class="odd"' if full and i % 2 else ""]
    ]
    room = 10 + math.ceil(LETTER * max(map(len, beside)))
    return (
        f'<figure class="{kind}"><figcaption>{keys}</figcaption><div>{escape(up + of_up)} &uarr;</div><svg role="img" '
        f'style="margin-left: {room}px; width: calc(100% - {room + 56}px)" aria-label="{escape(said)}">'
        f'{"".join(axes)}{drawn}</svg><div class="across">{escape(across + of_across)} &rarr;</div>{below}</figure>\n'
    )


def _labels(axis: Sequence[float]) -> tuple[list[str], str]:
    """The values of an axis as short texts, and their unit as an addition to the title of the axis."""
    largest = max(map(abs, axis))
    power = 0 if 0.01 <= largest < 1e5 else max(3 * math.floor(math.log10(largest) / 3), -300)
    unit = f", in {UNITS.get(power, f'units of 1e{power}')}" if power else ""
    return [f"{value / 10.0**power:,.10g}" for value in axis], unit


def _path(at: Sequence[tuple[float, float]], colour: str) -> str:
    """Lines from each place to the next, in percent of the chart, from its lower left corner."""
    return "".join(
        f'<line class="drawn" x1="{x:.2f}%" y1="{100 - y:.2f}%" x2="{to:.2f}%" y2="{100 - top:.2f}%" '
        f'stroke="{colour}" stroke-width="2"/>'
        for (x, y), (to, top) in pairwise(at)
    )


def _percent(value: float, axis: Sequence[float]) -> float:
    return 100 * (value - axis[0]) / (axis[-1] - axis[0])


def _beside(places: Sequence[tuple[float, float]]) -> list[tuple[int, float]]:
    """Where the numbers of points are written: near the points, over no other point and over no other number.

    Args:
        places: x in percent of the width, and y in pixels.

    Returns:
        Pixels from the point to the right, and y in pixels, of each number.
    """
    taken = [(x, 0, y, RADIUS) for x, y in places]  # and what they cover to either side
    found = []
    for x, y in places:
        around = ((way * far, up * far) for far in range(14, 14 * len(places) + 99, 5) for way, up in SIDES)
        aside, at = next((dx, y + dy) for dx, dy in around if not any(_meet((x, dx, y + dy, LETTER), o) for o in taken))
        taken.append((x, aside, at, LETTER))
        found.append((aside, at))
    return found


def _meet(one: tuple[float, int, float, int], two: tuple[float, int, float, int]) -> bool:
    """Whether two things cover each other, each (percent, pixels to the right, y, half its size), at some width."""
    (x, dx, y, size), (other_x, other_dx, other_y, other_size) = one, two
    near = size + other_size
    apart = [width * (x - other_x) / 100 + dx - other_dx for width in (NARROW, WIDE)]
    return abs(y - other_y) < near and (min(map(abs, apart)) < near or apart[0] * apart[1] < 0)


def _keys(found: Iterable[tuple[str, str]]) -> str:
    return " &nbsp; ".join(f'<span class="key" style="background: {c}"></span> {escape(title)}' for title, c in found)


def _four(value: float) -> str:
    """Four decimals, or three digits of a small value."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.2e}"
