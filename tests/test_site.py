"""The documentation site: it builds strictly, has every public name, loads nothing from elsewhere, and fits a phone."""

import functools
import html
import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from helpers.browser import CHROMIUM, FLAGS, needs_browser
from helpers.documents import listed

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
pytest.importorskip("latex2mathml", reason="latex2mathml is not installed")

ROOT = Path(__file__).parent.parent
ELSEWHERE = re.compile(r"^(?:[a-z]+:)?//")
# what a browser loads by itself; a link that is followed by hand may lead elsewhere
LOADED = re.compile(r"""<(?:script|img|iframe|source|video|audio|object|embed)\b[^>]*?\b(?:src|data|srcset)="([^"]*)""")
SHEETS = re.compile(r"<link\b[^>]*>")
MEASURE = """
addEventListener("load", () => setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement
  const cut = [...page.querySelectorAll("article *")].filter(e => {
    const box = e.getBoundingClientRect()
    return box.width && box.right > root.clientWidth + 1 && !e.closest(".md-typeset__scrollwrap, pre, .highlight, math")
  }).map(e => e.tagName)
  const found = {width: root.clientWidth, scroll: root.scrollWidth, cut, text: page.body.innerText}
  document.querySelector("#found").textContent = JSON.stringify(found)
}, 500))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def test_every_public_name_has_its_entry(site):
    for package, names in listed().items():
        page = (site / "reference" / f"{package}.html").read_text()
        entries = set(re.findall(r'id="([\w.]+)"', page))
        missing = {name for name in names if f"{package}.{name}" not in entries} - {"__version__"}
        assert not missing, f"{package}: {missing}"


def test_nothing_is_loaded_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text()
        sheets = [tag for tag in SHEETS.findall(text) if re.search(r'rel="(?:stylesheet|icon|preload|preconnect)', tag)]
        loaded = LOADED.findall(text) + [re.search(r'href="([^"]*)', tag)[1] for tag in sheets]
        assert loaded and not [place for place in loaded if ELSEWHERE.match(place)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_mathematics_is_rendered(site):
    page = (site / "how-it-works.html").read_text()
    assert page.count("<math") > 30
    assert "arithmatex" not in page and "\\phi" not in re.sub(r"<annotation.*?</annotation>", "", page)


def test_examples_of_docstrings_are_code(site):
    page = (site / "reference" / "snnk.html").read_text()
    assert "&gt;&gt;&gt;" in page and not re.search(r"<p>&gt;&gt;&gt;", page)


@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["index.html", "how-it-works.html"])
def test_pages_fit_the_window(site, tmp_path, name, width):
    """In a real browser, without a network: no message on the console, and nothing is cut off."""
    (site / "frame.html").write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><style>body {{ margin: 0 }} iframe {{ border: 0; width: {width}px; '
        f'height: 900px }}</style><script>{MEASURE}</script><pre id="found"></pre><iframe src="{name}"></iframe>'
    )
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/frame.html"
        flags = [flag for flag in FLAGS if not flag.startswith("--host-resolver-rules")]
        blocked = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        window = [f"--user-data-dir={tmp_path}", f"--window-size={width},900", "--virtual-time-budget=20000"]
        command = [CHROMIUM, *flags, blocked, *window, "--dump-dom", address]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
        server.shutdown()
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the browser shows nothing: {done.stderr[-2000:]}"
    shown = json.loads(html.unescape(found[1]))
    assert re.findall(r"CONSOLE:\d+\] (.*)", done.stderr) == []
    assert shown["width"] == width and shown["scroll"] <= width and shown["cut"] == []
    assert "snnk" in shown["text"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Forbids a page to load anything from elsewhere, so that every attempt is a message on the console."""

    def end_headers(self):
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline' data: blob:")
        super().end_headers()

    def log_message(self, *args):
        """Write nothing per request."""
