"""Parts of pages: their escapes, their axes, their texts, and how a browser shows them."""

import itertools
import re

import pytest

from snnk import _html
from snnk._html import NEW, OLD, OTHER, bars, diagonal, facts, glossary, lines, page, scatter, table, ticks

from helpers import browser
from helpers.browser import needs_browser
from helpers.compression import check_page as check_text

EVIL = '<img src="http://example.org/x.png"> & "quotes"'


def all_parts(name="name", count=8):
    """A page with every part in it."""
    groups = [
        ("torch", NEW, [(f"{name} {i}", i + 0.5, 1 - 0.05 * (count - i) ** 2 / count) for i in range(count)]),
        ("int8", OTHER, [(f"{name} {i}, int8 of another runtime", 0.2 * i, 0.8 + 0.02 * i) for i in range(count)]),
        ("", OLD, [("rival", 0.01, 0.5)]),
    ]
    curves = [("held out", NEW, [(i, 1 / (i + 1)) for i in range(count)]), ("training", OLD, [(0, 0.9), (count, 0.13)])]
    heads = ["block", *(f"{name} of a column with many words {i}" for i in range(7))]
    body = [
        bars([f"{name} {i}" for i in range(count)], [("error", NEW, [i / 20 for i in range(count)])], ["0"] * count, 1),
        lines(curves, "steps", "distance"),
        scatter(groups, "milliseconds of processor time for 32 x 32 tokens on 1 thread", "ten nearest in common"),
        table(heads, [[f"encoder.layer.{i}.attention.{name}", *["1,234,567"] * 7] for i in range(3)]),
        diagonal([(x, 1.1 * x, x, 1.2 * x) for x in (1.2e6, 3e6)], "predicted", "observed"),
        diagonal([(x, x, x, x) for x in (-1.000005, -1.00001)], "predicted", "observed"),
        facts({"versions": "a " * 60 + "x" * 90}),
    ]
    return page("title", name, "\n".join(body) + glossary({name: "A word of this page."}, "".join(body)))


def test_every_part_escapes_its_text():
    assert EVIL not in all_parts(EVIL) and "<img" not in all_parts(EVIL).replace("&lt;img", "")
    found = check_text(all_parts("a < b"))
    assert len(found.pictures) == 4 and any("a < b 3" in text for text in found.texts)


def test_bars_of_nothing_and_above_the_mark():
    assert "nan" not in bars(["a"], [("x", "red", [0.0])], ["-"])
    wide = bars(["a", "b"], [("x", "red", [2.0, 0.5])], ["2", "0.5"], full=1)
    assert "width: 100.00%" in wide and "width: 25.00%" in wide and "left: calc(50.00% - 1px)" in wide
    low = bars(["a"], [("x", "red", [0.25])], ["0.25"], full=1)  # not to the largest
    assert "width: 25.00%" in low and "left: calc(100.00% - 1px)" in low


def test_bars_have_their_values_as_text():
    found = check_text(bars(["<a>"], [("<before>", "red", [4.0]), ("after", "blue", [1.0])], ["1 of 4"]))
    assert {"<a>", "1 of 4", " after"} <= set(found.texts) and any("<before>" in text for text in found.texts)


def test_lines_are_described_and_listed():
    found = check_text(lines([("a < b", "blue", [(0, 0.4), (20, 0.1)]), ("c", "red", [(20, 0.3)])], "steps", "error"))
    assert found.pictures[0]["aria-label"] == "a < b from 0.4000 to 0.1000; c from 0.3000 to 0.3000"
    assert [text for text in found.texts if text.startswith("0.") or text == "-"][-4:] == [
        *("0.4000", "-"),
        *("0.1000", "0.3000"),
    ]
    assert "<svg" in lines([("empty", "blue", [])], "steps", "error")


def test_labels_at_the_ends_of_lines_do_not_cover_each_other():
    series = [("a", "blue", [(0, 1.0), (9, 0.5)]), ("b", "grey", [(0, 1.0), (9, 0.501)]), ("c", "red", [(9, 0.502)])]
    at = sorted(float(y) for y in re.findall(r'class="name" x="[\d.]+%" y="([\d.]+)"', lines(series, "steps", "error")))
    assert len(at) == 3 and min(b - a for a, b in itertools.pairwise(at)) >= _html.LINE


@pytest.mark.parametrize("width", [_html.NARROW, 400, 560, _html.WIDE, 2 * _html.WIDE])
def test_numbers_of_points_cover_neither_points_nor_each_other(width):
    """Ten points in one place, a row of points that touch each other, and a lonely one."""
    points = [(1.0, 0.9)] * 10 + [(2 + 0.05 * i, 0.95) for i in range(10)] + [(3.0, 0.5)]
    text = scatter([("", "blue", [(f"name {i}", x, y) for i, (x, y) in enumerate(points)])], "ms", "cosine")
    circles = [(float(x) / 100 * width, float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)"', text)]
    labels = [
        (float(x) / 100 * width + float(dx), float(y), int(number))
        for x, y, dx, number in re.findall(
            r'class="name" x="([\d.]+)%" y="([-\d.]+)" dx="([-\d.]+)".*?>(\d+)</text>', text
        )
    ]
    assert len(circles) == len(labels) == 21 and [label[2] for label in labels] == list(range(1, 22))
    for i, (x, y, _) in enumerate(labels):
        others = [(a, b, 8) for a, b, _ in labels[:i]] + [(a, b, 5) for a, b in circles]
        assert not [o for o in others if abs(x - o[0]) < 8 + o[2] - 0.1 and abs(y - o[1]) < 8 + o[2] - 0.1], i
    assert abs(labels[-1][0] - circles[-1][0]) + abs(labels[-1][1] - circles[-1][1]) == pytest.approx(14, abs=0.2)


@pytest.mark.parametrize(
    "axis, labels, unit",
    [
        ([0, 0.5, 1], ["0", "0.5", "1"], ""),
        ([0, 50_000], ["0", "50,000"], ""),
        ([100_000, 150_000], ["100", "150"], ", in thousands"),
        ([-2e6, 0, 1.5e6], ["-2", "0", "1.5"], ", in millions"),
        ([0, 5e-7, 1e-6], ["0", "0.5", "1"], ", in units of 1e-6"),
        ([0, 2e300], ["0", "2"], ", in units of 1e300"),
    ],
)
def test_axes_have_short_labels(axis, labels, unit):
    assert _html._labels(axis) == (labels, unit)


def test_the_meanings_of_words_are_those_of_the_page():
    words = {"cosine": "An angle.", "block, layer": "A part of the < model >.", "model": "All parts.", "R2": "A share."}
    found = check_text(glossary(words, '<p class="cosine" title="R2">Two layers and r2d2</p>')).texts
    assert [text for text in found if text in words] == ["block, layer", "model"]
    found = check_text(glossary({"a < b": "Less.", "b": "Other."}, "<td>a &lt; b</td>")).texts
    assert "a < b" in found and "Less." in found


def test_the_axis_of_points_does_not_exaggerate():
    near = scatter([("", "blue", [("a", 1.0, 1.0), ("b", 2.0, 0.999)])], "ms", "cosine")
    assert "begins at 0.9, not at 0" in near
    at = [float(y) for y in re.findall(r'cy="([\d.]+)"', near)]
    assert at[1] - at[0] == pytest.approx(0.01 * _html.HEIGHT, abs=0.11)  # as 0.001 is of 0.1
    assert "begins" not in scatter([("", "blue", [("a", 1.0, 1.0), ("b", 2.0, 0.001)])], "ms", "cosine")


@pytest.mark.parametrize("low, high", [(0, 1), (0, 7e-9), (0.86, 1), (-3, 12), (0, 123_456), (0.5, 0.5), (0.1, 0.3)])
def test_ticks_are_round_and_cover_all_values(low, high):
    found = ticks(low, high)
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert found[0] <= low and found[-1] >= high and 1 <= len(steps) <= 5
    assert all(abs(step - steps[0]) <= 1e-6 * steps[0] for step in steps)
    assert f"{steps[0]:.3e}"[0] in "125" and float(f"{steps[0]:.3e}".split("e")[0][1:]) == 0


def test_colours_can_be_told_from_the_background():
    """Ratios of contrast of WCAG 2.1: 4.5 for text and 3 for parts of pictures, in both colour schemes."""
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", text)) for text in _html.STYLE.split("@media")[:2]]
    assert [len(scheme) for scheme in schemes] == [7, 7]

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    for scheme in schemes:
        for name, least in {"text": 4.5, "grey": 4.5, "new": 4.5, "other": 4.5, "old": 3}.items():
            one, two = sorted((light(scheme[name]), light(scheme["back"])))
            assert two / one >= least, (name, scheme)


@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_every_part(tmp_path, width):
    (tmp_path / "page.html").write_text(all_parts())
    found = browser.check_page(tmp_path / "page.html", width)
    assert found.pictures == 4 and len(found.heights) > 30
    assert ("name 3, int8" in found.text) and "The vertical axis begins at" in found.text


@needs_browser
def test_dark_screens_have_dark_pages(tmp_path):
    (tmp_path / "page.html").write_text(page("title", "heading", "<p>text</p>"))
    light, dark = (browser.show(tmp_path / "page.html", dark=dark).back for dark in (False, True))
    assert light == "rgb(255, 255, 255)" and dark == "rgb(20, 24, 31)"


@needs_browser
@pytest.mark.parametrize(
    "part, message",
    [
        ('<img src="http://example.org/a.png">', "http://example.org/a.png"),
        ('<link rel="stylesheet" href="other.css">', "other.css"),
        ("<style>body { background: url(https://example.org/b.png) }</style>", "https://example.org/b.png"),
        ("<script>nothing()</script>", "nothing is not defined"),
        ('<div style="width: 500px">wide</div>', "516 pixels in 400"),
        (
            '<svg viewBox="0 0 960 90" width="100%" aria-label="a"><text y="40" font-size="14">a</text></svg>',
            "small text",
        ),
        ('<svg><text y="40" font-size="14">a</text></svg>', "1 of 1 pictures"),
        ('<p style="font-size: 8px">small</p>', "small text: 8"),
        ('<div style="overflow-x: auto"><div style="width: 380px">wide</div></div>', "cut: ['DIV']"),
        ('<svg aria-label="a"><text y="40">one</text><text y="44">two</text></svg>', "one and two"),
        ("<style>body { background: #333 }</style><p>dark</p>", "the background is rgb(51, 51, 51)"),
    ],
)
def test_the_browser_finds_faults(tmp_path, part, message):
    (tmp_path / "page.html").write_text(page("title", "heading", part))
    with pytest.raises(AssertionError, match=re.escape(message)):
        browser.check_page(tmp_path / "page.html")
