import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from snnk.hf.general import ARTICLE, FILE, SLOT, fragments, general_texts


def test_texts_are_distinct_complete_and_of_many_words():
    texts = general_texts(6000)
    assert len(set(texts)) == 6000
    assert not [text for text in texts if SLOT.search(text) or text != text.strip() or "  " in text]
    words = re.findall(r"[a-z]+", " ".join(texts).lower())
    assert len(set(words)) > 4000 and 10 < len(words) / len(texts) < 25
    assert min(map(len, texts)) < 10 and max(map(len, texts)) > 500  # short and long


def test_texts_are_the_same_in_another_process():
    """Not by the hash of a string, which differs between processes."""
    code = "import hashlib; from snnk.hf.general import general_texts as t; import sys; "
    code += "sys.stdout.write(hashlib.sha256('\\n'.join(t(500, seed=3)).encode()).hexdigest())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == hashlib.sha256("\n".join(general_texts(500, seed=3)).encode()).hexdigest()
    assert not set(general_texts(500, seed=3)) >= set(general_texts(500, seed=4))


def test_every_slot_has_words_and_every_list_is_used():
    found = fragments()
    entries = [entry for part in found.values() for group in part.values() for entry in group]
    slots = {name for entry in entries for *_, name in SLOT.findall(entry) if name}
    assert slots == set(found["words"])
    assert all(int(low) < int(high) for entry in entries for low, high, _ in SLOT.findall(entry) if low)
    for part in found.values():
        assert all(len(group) == len(set(group)) > 5 and all(group) for group in part.values())
    assert len(found["sentences"]) + len(found["lines"]) >= 20  # kinds of text


def test_articles_agree():
    given = "a apple, A old man, a umbrella, a European, a used car, A Ukrainian, a one, a cat, a dish of banana oil"
    wanted = (
        "an apple, An old man, an umbrella, a European, a used car, A Ukrainian, a one, a cat, a dish of banana oil"
    )
    assert ARTICLE.sub(r"\1n", given) == wanted
    assert not re.findall(r"\ba (?:app|ele|ins|old)\w*", " ".join(general_texts(6000)), re.IGNORECASE)


def test_the_text_is_small_and_part_of_the_wheel(tmp_path):
    root = Path(__file__).parents[2]
    assert (root / "src" / "snnk" / "hf" / FILE).stat().st_size < 300_000
    hatch = pytest.importorskip("hatchling.builders.wheel")
    (wheel,) = hatch.WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    assert f"snnk/hf/{FILE}" in zipfile.ZipFile(wheel).namelist()
