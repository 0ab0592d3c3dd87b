"""Hooks of mkdocs, which mkdocs.yml names.

- Mathematics between dollars becomes MathML, which browsers render by themselves: no script is loaded for it.
- SECURITY.md, CONTRIBUTING.md and CHANGELOG.md of the root folder become pages.
- Every package with a table in docs/api.md gets a page of the reference, with the docstring of each name of the table.
- The "Example:" of a docstring is code.
- Files outside docs/ that a page links to, such as the rows behind a figure, are copied to repository/.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"security.md": "SECURITY.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
MATHS = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def tables() -> dict[str, str]:
    """Package -> its section of docs/api.md, without the heading."""
    parts = re.split(r"^## `(.*)`$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def reference(package: str, section: str) -> str:
    """The page of a package: its table, then the docstring of every name in it."""
    names = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    documented = [name for name in names if name != "__version__"]  # a string has no docstring
    return "\n".join([f"# {package}", section, *(f"::: {package}.{name}" for name in documented)])


def source_of(file: File) -> Path | None:
    """Where the Markdown of a page is, relative to the root; None for a generated page."""
    if file.abs_src_path is None:
        return None
    return Path(file.abs_src_path).resolve().relative_to(ROOT)


def targets(source: Path, text: str) -> Iterator[tuple[str, str]]:
    """Relative links of a page, each with its path from the root."""
    for link in LINK.findall(text):
        yield link, posixpath.normpath(posixpath.join(source.parent.as_posix(), link))


def place(path: str) -> str:
    """Where a file of the project is in the site."""
    pages = {source: page for page, source in PAGES.items()} | {"README.md": "index.md"}
    return pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}")


class Examples(Extension):
    """mkdocstrings shows the section "Examples:" as code, and "Example:" as text."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def on_config(config: Any) -> Any:
    pages = next(part["Reference"] for part in config.nav if "Reference" in part)
    pages += [{package: f"reference/{package}.md"} for package in tables() if len(pages) <= len(tables())]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in list(files.documentation_pages()):
        source = source_of(file)
        if source is None:
            continue
        for link, path in targets(source, (ROOT / source).read_text(encoding="utf-8")):
            copy = place(path)
            if copy.startswith("repository/") and files.get_file_from_path(copy) is None:
                if not (ROOT / path).is_file():
                    raise PluginError(f"{source} links to {link}, which is no file")
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    for package, section in tables().items():
        files.append(File.generated(config, f"reference/{package}.md", content=reference(package, section)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    source = source_of(page.file)
    if source is None:
        return markdown
    moved = {link: place(path) for link, path in targets(source, markdown)}
    here = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda found: posixpath.relpath(moved[found[1]], here or "."), markdown)


def on_page_content(content: str, **_: Any) -> str:
    def render(found: re.Match[str]) -> str:
        maths = convert(html.unescape(found[3]).strip(), display="inline" if found[2] == "(" else "block")
        return maths.replace('stretchy="false">&#x0007C;', 'stretchy="false" lspace="0" rspace="0">&#x0007C;')  # norms

    return MATHS.sub(render, content)
