"""General English text of the project's own: for compression without texts, and beside texts of one kind.

general.txt has templates for sentences of many kinds (news, captions, reviews, questions, science, chat, law, code) and
lists of words for their slots. A template is drawn for every sentence, and a word for every slot, so that any number of
texts can be had, with far more words than kinds of sentence.
"""

from __future__ import annotations

import random
import re
from functools import cache
from importlib.resources import files

from snnk import _checks

SOURCE = "general text of snnk"
FILE = "general.txt"
SECTION = re.compile(r"\[(words|sentences|lines) (\w+)\]")
SLOT = re.compile(r"\{(?:(\d+)-(\d+)|(\w+))\}")
ARTICLE = re.compile(r"\b([Aa])(?= (?!(?i:one|uni|use|euro|uk|ura))[aeiouAEIOU])")
LONG, LONGEST = 0.25, 8  # share of texts of several sentences, and how many these are at most


@cache
def fragments() -> dict[str, dict[str, list[str]]]:
    """The sections of general.txt: "words", "sentences" and "lines", each as name -> entries."""
    found: dict[str, dict[str, list[str]]] = {"words": {}, "sentences": {}, "lines": {}}
    for part in re.split(r"\n\n(?=\[)", files("snnk.hf").joinpath(FILE).read_text(encoding="utf-8"))[1:]:
        head, _, body = part.partition("\n")
        section = SECTION.fullmatch(head)
        if section is None:
            raise ValueError(
                f"a section of {FILE} begins with [words NAME], [sentences KIND] or [lines KIND]; got {head}"
            )
        entries = " ".join(body.split()).split("; ") if section[1] == "words" else body.strip().split("\n")
        found[section[1]][section[2]] = entries
    return found


def general_texts(count: int, *, seed: int = 0) -> list[str]:
    """Texts of many kinds, in random order, no two of them equal.

    Args:
        count: number of texts; most are one sentence, some are titles, search queries or words, and some paragraphs.
        seed: of the draw.

    Example:
        >>> texts = general_texts(1000)
        >>> len(set(texts)), texts == general_texts(1000), texts == general_texts(1000, seed=1)
        (1000, True, False)
    """
    _checks.positive_int(count, "count")
    found, generator = fragments(), random.Random(seed)
    kinds = [(templates, part == "lines") for part in ("sentences", "lines") for templates in found[part].values()]
    texts: dict[str, None] = {}
    while len(texts) < count:
        templates, alone = generator.choice(kinds)
        # half of the longer texts have two or three sentences
        most = 1 if alone or generator.random() > LONG else generator.choice((3, LONGEST))
        number = generator.randint(min(most, 2), most)
        texts[" ".join(_sentence(generator.choice(templates), generator) for _ in range(number))] = None
    return list(texts)


def _sentence(template: str, generator: random.Random) -> str:
    text = ARTICLE.sub(r"\1n", _fill(template, generator))
    return text[0].upper() + text[1:] if template[0] == "{" and template[-1] in ".!?" else text


def _fill(template: str, generator: random.Random) -> str:
    words = fragments()["words"]

    def draw(slot: re.Match[str]) -> str:
        low, high, name = slot.groups()
        if name is None:
            return str(generator.randint(int(low), int(high)))
        return _fill(generator.choice(words[name]), generator)

    return SLOT.sub(draw, template)
