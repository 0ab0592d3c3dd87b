"""Text that comes from files (names of columns, classes, folders and models) where people read it.

Such text is data: on a terminal it sends no escape sequence, in a card it makes no heading, link or HTML.
"""

from __future__ import annotations

import re
import unicodedata
from html import escape
from typing import Any

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, marks that reorder text, halves of characters, line ends
LONGEST = 4000


def printable(text: Any, *, lines: bool = False) -> str:
    r"""Text with every control character, and every mark that is not seen, written out as an escape.

    Args:
        text: any value; its `str` is taken.
        lines: keep line breaks, of a text that is several lines of our own.

    Example:
        >>> printable("\x1b[31mred\n"), printable("a\nb\r", lines=True)
        ('\\x1b[31mred\\n', 'a\nb\\r')
    """
    found = str(text)
    if found.isascii() and found.isprintable():
        return found
    return "".join(_shown(c) if unicodedata.category(c) in HIDDEN and not (lines and c == "\n") else c for c in found)


def _joined(text: Any) -> str:
    return re.sub(r"[ \t\r\n]+", " ", str(text)).strip(" ")


def _shown(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def one_line(text: Any) -> str:
    """The same of an error message: on one line, and without the middle of one that goes on for pages."""
    found = printable(_joined(text))
    return found if len(found) <= LONGEST else f"{found[: LONGEST * 3 // 4]} ... {found[-LONGEST // 4 :]}"


def html(text: Any) -> str:
    """Text for an element or an attribute of a page."""
    return escape(printable(text))


def markdown(text: Any) -> str:
    r"""Text for one line of Markdown: without HTML, emphasis, code, links or pictures, and inside its cell of a table.

    Example:
        >>> markdown("[a](http://b) | <i>")
        '\\[a\\](http\\://b) \\| &lt;i>'
    """
    found = printable(_joined(text)).replace("\\", "\\\\")
    found = re.sub(r"([`*\[\]|~$@])", r"\\\1", found.replace("&", "&amp;").replace("<", "&lt;"))
    found = re.sub(r"^([#+=>-]|\d+[.)])(?=\s|$)", lambda mark: f"{mark[0][:-1]}\\{mark[0][-1]}", found)
    return found.replace("://", "\\://").replace("www.", "www\\.")


def code(text: Any) -> str:
    """Text as code in a line of Markdown, between more backticks than it has in a row.

    Example:
        >>> code("a"), code("a`b")
        ('`a`', '`` a`b ``')
    """
    found = printable(_joined(text)) or " "
    fence = "`" * (max(map(len, re.findall("`+", found)), default=0) + 1)
    return f"{fence}{found}{fence}" if len(fence) == 1 else f"{fence} {found} {fence}"
