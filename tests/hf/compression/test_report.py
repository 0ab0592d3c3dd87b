import copy

import pytest
import torch
from transformers import BertConfig, BertModel

from snnk._text import printable
from snnk.hf import compress_, plan
from snnk.hf.compression.report import bars, headline, html, latency, model_card
from snnk.hf.cost import in_turns

from helpers.compression import TINY, check_page


@pytest.fixture(scope="module")
def stored():
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TINY)).eval()
    batches = [{"input_ids": torch.randint(43, (8, 10))} for _ in range(12)]
    chosen = plan(model, keep=0.5)
    original = copy.deepcopy(model)
    done = compress_(model, chosen, batches, refine=0, max_error=1e9).to_dict()
    done["blocks"] = [
        *done["blocks"][:1],
        {**done["blocks"][1], "kind": "dense", "num_features": None, "refused": True},
    ]
    agreement = done.pop("agreement")
    return {
        "base_model": "org/<tiny> & co",
        "model_class": "BertModel",
        "sentence_transformers": False,
        "blocks_in_all": 2,
        "bytes": {"original": 4_000_000, "compressed": 1_500_000},
        "latency": latency(original, model, batches, seconds=0.05),
        "agreement": agreement,
        "compared": "<means>",
        "calibration": {"file": "a.csv", "kind": "texts", "count": 96, "column": "body"},
        "settings": {"keep": 0.5, "plan": None},
        "versions": {"snnk": "0"},
        "plan": chosen.to_dict(),
        "report": done,
    }


def test_page(stored):
    found = check_page(html(stored))
    text = " ".join(found.texts)
    assert found.tags.count("svg") == 3 and text.count("org/<tiny> & co") == 3
    assert "4.0 → 1.5 MB" in text and f"{stored['latency']['speedup']:.2f} ×" in text
    assert f"{stored['agreement']['cosine']:.4f}" in text and "as it was (refused)" in text
    for block in stored["report"]["blocks"]:
        assert f"{block['error']:.4f}" in text and f"{block['parameters']:,}" in text
    assert "1 of 2 feed-forward blocks" in text and "column body" in text and "<means>" in text


def test_card(stored):
    lines = "license: mit", "language: en", "tags:", "- old", "base_model: x", "license_link: !!python/x"
    old = "\n".join(["---", *lines, "---", "# Old", "license: no"])
    card = model_card(stored, old)
    _, front, body = card.split("---\n", 2)
    assert front.splitlines() == [
        'base_model: "org/<tiny> & co"',
        'library_name: "transformers"',
        'tags: ["snnk", "compressed"]',
        "license: mit",
        "language: en",
    ]
    assert "import snnk.hf" in body and 'BertModel.from_pretrained("this folder")' in body
    assert "96 unlabelled texts (a.csv, column body)" in body and f"cosine {stored['agreement']['cosine']:.4f}" in body
    assert "&" not in model_card({**stored, "base_model": "x", "compared": "y"})
    assert "SentenceTransformer(" in model_card({**stored, "sentence_transformers": True})
    assert "Compared: &lt;means>." in body


def test_names_from_elsewhere_are_escaped(stored):
    """A plan, a file and a folder may be called anything."""
    evil = "<img src=x>|\n# x `"
    block = {**stored["report"]["blocks"][0], "name": evil, "kind": evil}
    other = {
        **stored,
        "base_model": evil,
        "calibration": {**stored["calibration"], "file": evil, "column": evil},
        "settings": {"plan": evil},
        "compared": evil,
        "plan": {**stored["plan"], "blocks": [{**stored["plan"]["blocks"][0], "name": evil, "kind": evil}]},
        "report": {**stored["report"], "blocks": [block]},
    }
    assert check_page(html(other)).texts.count(printable(evil)) >= 3
    _, front, body = model_card(other).split("---\n", 2)
    assert front.splitlines()[0] == 'base_model: "<img src=x>|\\\\n# x `"'
    assert "<" not in body and body.count("\n# ") == 1 and body.count("`") - body.count("\\`") == 8
    row = next(line for line in body.splitlines() if line.startswith("| &lt;img"))
    assert row.replace("\\|", "").count("|") == 6


def test_headline_of_a_classifier(stored):
    found = dict(headline({**stored, "agreement": {"cosine": 0.9, "KL divergence": 0.1, "same best": 0.75}}))
    assert found["same best class"] == "0.7500" and "KL divergence" not in found


def test_headline_of_single_numbers_and_of_several_outputs(stored):
    numbers = {"Pearson": 0.9, "Spearman": 0.8, "relative squared error": 0.25}
    found = dict(headline({**stored, "agreement": numbers}))
    assert found["correlation with the original"] == "0.9000" and found["squared error over variance"] == "0.2500"
    assert not any("cosine" in what for what in found)
    several = {f"{name}: {what}": value for name in ("start", "end") for what, value in numbers.items()}
    assert dict(headline({**stored, "agreement": several}))["start: correlation with the original"] == "0.9000"
    page, card = html({**stored, "agreement": several}), model_card({**stored, "agreement": several})
    assert all(f"{what} {value:.4f}" in text for what, value in several.items() for text in (page, card))


def test_seconds_and_speedup_are_one_measurement(monkeypatch):
    """Medians of 2 and 3 s, where one is as often faster as slower: what is reported says the second."""
    spent = iter([1, 1, 6, 2, 9, 3, 1, 1])  # a warm-up; 2 : 6, 9 : 3, 1 : 1, in turns
    clock = [0.0]

    def run():
        clock[0] += next(spent)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert in_turns([run, run], most=3) == ([2.0, 2.0], 3)


def test_latency_takes_turns():
    order = []

    class Model(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name, self.weight = name, torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            assert not self.training
            order.append(self.name)
            return (x,)

    a, b = Model("a"), Model("b")
    found = latency(a, b, [{"x": torch.ones(1)}] * 9, seconds=0)
    assert found["rounds"] == 3 and found["batches"] == 4 and a.training
    assert "".join(order[::4]) == "abbaabba"
    assert found["speedup"] == found["original_seconds"] / found["compressed_seconds"] > 0


def test_bars_of_nothing_and_above_the_mark():
    assert "nan" not in bars(["a"], [("x", "red", [0.0])], ["-"])
    wide = bars(["a"], [("x", "red", [2.0])], ["2"], full=1)
    assert 'width="530.0"' in wide and 'x1="455.0"' in wide
