"""Safe display of text that comes from files: names of columns, classes, folders and models.

Such text is data. On a terminal it sends no escape sequence, and in a model card it makes no heading, link or HTML.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Iterable
from html import escape
from typing import Any, Literal

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, marks that reorder text, halves of characters, line ends
LONGEST = 4000  # characters of an error message
# A cell that begins like this is a formula to a spreadsheet (OWASP, "CSV Injection"), unless it is a plain number. Some
# spreadsheets cut cells at semicolons and tabs, even between quotes.
FORMULA = re.compile(r"(^|[;\t])(?=[=+\-@\t\r\n])")
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def printable(text: object, *, lines: bool = False) -> str:
    r"""Return text with every control character and every invisible mark written out as an escape.

    Args:
        text: a value of any type, converted by `str`.
        lines: keep line breaks.

    Example:
        >>> printable("\x1b[31mred\n"), printable("a\nb\r", lines=True)
        ('\\x1b[31mred\\n', 'a\nb\\r')
    """
    found = str(text)
    if found.isascii() and found.isprintable():
        return found
    return "".join(_shown(c) if unicodedata.category(c) in HIDDEN and not (lines and c == "\n") else c for c in found)


def _joined(text: object) -> str:
    return re.sub(r"[ \t\r\n]+", " ", str(text)).strip(" ")


def _shown(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def one_line(text: object) -> str:
    """Return printable text on one line; a very long message loses its middle."""
    found = printable(_joined(text))
    return found if len(found) <= LONGEST else f"{found[: LONGEST * 3 // 4]} ... {found[-LONGEST // 4 :]}"


def html(text: object) -> str:
    """Return text for an element or an attribute of an HTML page."""
    return escape(printable(text))


def markdown(text: object) -> str:
    r"""Return text for one line of Markdown or one cell of a table; it makes no HTML, emphasis, code, link or picture.

    Example:
        >>> markdown("[a](http://b) | <i>")
        '\\[a\\](http\\://b) \\| &lt;i>'
    """
    found = printable(_joined(text)).replace("\\", "\\\\")
    found = re.sub(r"([`*\[\]|~$@])", r"\\\1", found.replace("&", "&amp;").replace("<", "&lt;"))
    found = re.sub(r"^([#+=>-]|\d+[.)])(?=\s|$)", lambda mark: f"{mark[0][:-1]}\\{mark[0][-1]}", found)
    return found.replace("://", "\\://").replace("www.", "www\\.")


def code(text: object) -> str:
    """Return text as code in a line of Markdown, between more backticks than it has in a row itself.

    Example:
        >>> code("a"), code("a`b")
        ('`a`', '`` a`b ``')
    """
    found = printable(_joined(text)) or " "
    fence = "`" * (max(map(len, re.findall("`+", found)), default=0) + 1)
    return f"{fence}{found}{fence}" if len(fence) == 1 else f"{fence} {found} {fence}"


def cell(value: Any) -> Any:
    """Return a value for a cell of a CSV file, with an apostrophe before what a spreadsheet would run as a formula.

    Example:
        >>> cell("=1+1"), cell("a;=1+1"), cell("-1.5"), cell(2)
        ("'=1+1", "a;'=1+1", '-1.5', 2)
    """
    return FORMULA.sub(r"\1'", value) if isinstance(value, str) and not NUMBER.fullmatch(value) else value


def quoting(names: Iterable[str]) -> Literal[0, 1]:
    """Return the quoting of csv for cells with these names: some spreadsheets cut cells without quotes at ; and tab."""
    return csv.QUOTE_ALL if any(mark in name for name in names for mark in ";\t") else csv.QUOTE_MINIMAL
