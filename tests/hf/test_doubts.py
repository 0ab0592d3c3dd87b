import re

import pytest

from snnk.hf import doubts
from snnk.hf.calibration import load_calibration

from helpers.texts import make_english


@pytest.mark.parametrize("tokens", [100, 2000, 7679])
def test_the_number_that_the_warning_asks_for_is_enough(tokens):
    texts = 150
    found = doubts.few(tokens, 384, texts)
    wanted = int(re.search(r"give ([\d,]+) or more", found)[1].replace(",", ""))
    assert f"{tokens:,} tokens" in found and "384 features" in found
    assert doubts.few(tokens * wanted // texts, 384, wanted) is None
    assert doubts.few(tokens * (wanted - 20) // texts, 384, wanted - 20) is not None
    assert doubts.few(20 * 384, 384, texts) is None


def test_pieces_of_words():
    assert doubts.pieces(["one two", "three"], 6) == 2.0
    assert doubts.pieces(["Straße läuft"], 4) == 2.0
    assert doubts.pieces(["今天天气很好 ok"], 9) is None  # no spaces between words
    assert doubts.pieces([], 0) is None


def test_another_language_breaks_words():
    assert doubts.broken(1.3, 1.2) is None and doubts.broken(None, 1.2) is None and doubts.broken(3.0, None) is None
    found = doubts.broken(2.51, 1.23)
    assert "2.5 pieces" in found and "into 1.2" in found and "column" in found


def test_pieces_are_counted_in_whole_texts_alone(tmp_path):
    """If a text were cut off, all of its words but not all of its tokens would be counted."""
    (tmp_path / "texts.txt").write_text("the dog\n" * 20 + f"{'the dog ' * 100}\n" * 20)
    found = load_calibration(tmp_path / "texts.txt", make_english(cls_token="[CLS]", pad_token="[PAD]"), max_length=16)
    assert found.pieces == 1.0


def test_narrow_texts():
    assert doubts.narrow({"cosine": 0.9}, {"cosine": 0.85}) is None
    found = doubts.narrow({"cosine": 0.95}, {"cosine": 0.85})
    assert "0.950" in found and "0.850" in found and "texts of more kinds" in found
    assert "same best 0.990" in doubts.narrow({"same best": 0.99, "KL divergence": 0.1}, {"same best": 0.9})
    assert "end: cosine" in doubts.narrow({"end: cosine": 0.99}, {"end: cosine": 0.9})
    assert "Spearman" in doubts.narrow({"Pearson": 0.9, "Spearman": 0.9}, {"Pearson": 0.1, "Spearman": 0.1})
    assert "same next token" in doubts.narrow({"same next token": 0.9}, {"same next token": 0.6})
    assert doubts.narrow({"cosine": 0.9999}, {"cosine": 0.99}) is None  # both are as good as equal
    assert doubts.narrow({"KL divergence": 0.1}, {"KL divergence": 9.0}) is None


def test_predictions_of_one_class_say_little_about_agreement():
    rows = [{"label": "yes", "count": 9, "same": 1.0}, {"label": "no", "count": 491, "same": 1.0}]
    assert "'no' for 491 of 500 held-out inputs" in doubts.one_class(rows)
    assert (
        doubts.one_class([{**rows[0], "count": 11}, {**rows[1], "count": 489}]) is None and doubts.one_class([]) is None
    )


def test_few_inputs_to_measure_on_and_outputs_worse_than_a_constant():
    assert "on 15 held-out texts" in doubts.scarce(15, "texts") and doubts.scarce(100, "texts") is None
    assert "1.55 times" in doubts.ruined({"relative squared error": 1.55})
    assert doubts.ruined({"relative squared error": 0.9}) is None
