"""Bars for pages: cells of tables, with their names and values as text."""

from __future__ import annotations

from collections.abc import Sequence

from snnk._text import html as escape

# colours of the style of page.py, which has others for dark screens
OLD, NEW, GREY = "var(--old)", "var(--new)", "var(--grey)"


def bars(
    names: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[float]]],
    labels: Sequence[str],
    full: float | None = None,
) -> str:
    """A table of horizontal bars: per name, one bar for each series (title, colour, values), and a label.

    Args:
        names: of the rows.
        series: the bars; their titles are shown above.
        labels: the text behind the bars of each row, which has the values for those who do not see the bars.
        full: a value that is marked by a dashed line, and that the bars do not end before. Default: the largest value.

    Example:
        >>> bars(["a"], [("before", "grey", [4.0]), ("after", "blue", [1.0])], ["1"]).count("<i ")
        2
    """
    most = max([full or 0.0, 1e-30, *(v for _, _, values in series for v in values)])
    keys = " &nbsp; ".join(
        f'<span class="key" style="background: {c}"></span> {escape(title)}' for title, c, _ in series
    )
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
    return f'<table class="bars"><caption>{keys}</caption><tbody>\n{"".join(rows)}</tbody></table>'
