"""Pages in a real browser, Chromium, which the command line drives; the tests of pages skip where it is not installed.

The page is shown in a frame, since a window of Chromium is at least 500 pixels wide. A policy forbids it to load
anything, so that every attempt is an error on the console, with its address.
"""

import html
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--enable-logging=stderr", "--v=0", "--host-resolver-rules=MAP * ~NOTFOUND"),
)
LEAST = 9  # CSS pixels of any text
SCREENS = [(400, False), (1280, True)]  # widths of pages that are tested, and whether the screen is dark
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; font-src data:"
MEASURE = """
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement, width = root.clientWidth
  const all = [...page.querySelectorAll("body *")], box = e => e.getBoundingClientRect()
  const named = e => `${e.tagName} ${e.getAttribute("class") ?? ""}`.trim()
  const pictures = [...page.querySelectorAll("svg")].filter(e => !e.parentElement.closest("svg"))
  const style = e => page.defaultView.getComputedStyle(e)
  const own = e => [...e.childNodes].some(n => n.nodeType == Node.TEXT_NODE && n.data.trim())
  const size = e => parseFloat(style(e).fontSize) *
    (e.getScreenCTM ? Math.hypot(e.getScreenCTM().c, e.getScreenCTM().d) : 1)
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3  // lines of text have a margin above and below
  const covered = pictures.flatMap(svg => {
    const texts = [...svg.querySelectorAll("text")].filter(e => box(e).width)
    return texts.flatMap((e, i) => texts.slice(i + 1).filter(o => meet(box(e), box(o))).map(
      o => `${e.textContent} and ${o.textContent}`))
  })
  const found = {
    width, scroll: Math.max(root.scrollWidth, page.body.scrollWidth),
    outside: all.filter(e => box(e).width && (box(e).right > width + 1 || box(e).left < -1)).map(named),
    cut: all.filter(e => style(e).overflowX != "visible" && e.clientWidth && e.scrollWidth > e.clientWidth + 1 &&
      !e.closest("svg")).map(named),
    heights: all.filter(e => own(e) && box(e).width).map(size), covered,
    pictures: pictures.length, silent: pictures.filter(e => !(e.getAttribute("aria-label") ||
      e.getAttribute("aria-labelledby") || e.querySelector(":scope > title, :scope > desc"))).length,
    back: style(page.body).backgroundColor,
    text: page.body.innerText,
  }
  document.querySelector("#found").textContent = JSON.stringify(found)
})
"""

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser is installed: none of {', '.join(NAMES)}")


@dataclass(frozen=True)
class Shown:
    """A page as the browser shows it.

    Attributes:
        console: messages of the browser and of scripts, among them all attempts to load something.
        width, scroll: CSS pixels of the window, and of everything in it.
        outside: elements that reach beyond the window.
        cut: elements that hide a part of what is in them, or have to be scrolled.
        heights: CSS pixels of all texts.
        covered: pairs of texts of a picture that cover each other.
        pictures, silent: how many SVGs there are, and how many of them have no text in their place.
        back: colour behind the text, such as "rgb(255, 255, 255)".
        text: what can be read on the page.
    """

    console: list[str]
    width: int
    scroll: int
    outside: list[str]
    cut: list[str]
    heights: list[float]
    covered: list[str]
    pictures: int
    silent: int
    back: str
    text: str


def show(path, width=400, *, dark=False):
    """Open a page, which is one file, in a window of this many CSS pixels."""
    with tempfile.TemporaryDirectory() as folder:
        wrapper = _wrapped(Path(path), width, 900, Path(folder))
        done = _run(folder, dark, f"--window-size={max(width, 500)},900", "--dump-dom", wrapper.as_uri())
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the browser shows nothing: {done.stderr[-2000:]}"
    console = re.findall(r"CONSOLE:\d+\] (.*)", done.stderr)
    return Shown(console=console, **json.loads(html.unescape(found[1])))


def photograph(path, picture, width=400, height=900, *, dark=False):
    """Write a PNG of the upper part of a page; beside a page of less than 500 pixels there is an empty strip."""
    with tempfile.TemporaryDirectory() as folder:
        wrapper = _wrapped(Path(path), width, height, Path(folder))
        size = f"--window-size={max(width, 500)},{height}"
        _run(folder, dark, size, f"--screenshot={Path(picture).resolve()}", wrapper.as_uri())


def check_page(path, width=400, *, dark=False):
    """Assert that a page loads nothing, has no error, fits the window, and has legible pictures with a text each.

    Args:
        path: of the HTML file.
        width: CSS pixels of the window.
        dark: whether the screen is dark; the page must be so too, or light on a light one.

    Returns:
        What the browser shows, as `Shown`.
    """
    found = show(path, width, dark=dark)
    assert found.width == width, f"the window has {found.width} pixels"
    assert found.console == [], f"messages of the browser: {found.console}"
    assert found.scroll <= width and found.outside == [], f"{found.scroll} pixels in {width}: {found.outside}"
    assert found.cut == [], f"cut: {found.cut}"
    assert min(found.heights) >= LEAST, f"small text: {min(found.heights)} pixels"
    assert found.covered == [], f"texts that cover each other: {found.covered}"
    light = sum(map(int, re.findall(r"\d+", found.back))) / 3
    assert light < 64 if dark else light > 192, f"the background is {found.back}"
    assert found.silent == 0, f"{found.silent} of {found.pictures} pictures have no text in their place"
    return found


def _wrapped(path, width, height, folder):
    """A page with the given one in a frame."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    head, mark, rest = path.read_text(encoding="utf-8").partition("<head>")
    assert mark, f"{path} has no <head>"
    frame = html.escape(head + mark + policy + rest)
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><style>body {{ margin: 0 }} iframe {{ border: 0; width: {width}px; '
        f'height: {height}px }} pre {{ display: none }}</style><script>{MEASURE}</script><pre id="found"></pre>'
        f'<iframe srcdoc="{frame}"></iframe>',
        encoding="utf-8",
    )
    return wrapper


def _run(folder, dark, *args):
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [CHROMIUM, *FLAGS, scheme, f"--user-data-dir={folder}/profile", *args]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
