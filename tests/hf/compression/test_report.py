import copy
import json
from dataclasses import asdict, replace

import pytest
import torch
from transformers import BertConfig, BertModel

from snnk._text import printable
from snnk.hf import compress_, plan
from snnk.hf.calibration import Calibration
from snnk.hf.compression.agreement import measure
from snnk.hf.compression.page import html
from snnk.hf.compression.report import headline, latency, model_card
from snnk.hf.compression.stages import Recovery
from snnk.hf.serve import latency as measured

from helpers import browser
from helpers.browser import needs_browser
from helpers.compression import TINY, check_page


@pytest.fixture(scope="module")
def stored():
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TINY)).eval()
    batches = [{"input_ids": torch.randint(43, (8, 10))} for _ in range(12)]
    chosen = plan(model, keep=0.5, blocks="ffn")
    original = copy.deepcopy(model)
    done = compress_(model, chosen, batches, refine=0, max_error=1e9).to_dict()
    done["blocks"] = [
        *done["blocks"][:1],
        {**done["blocks"][1], "kind": "dense", "num_features": None, "refused": True},
    ]
    done.pop("agreement")
    held = Calibration(batches[:2], "b.csv", "texts", 16, names=[f"text <{i}>" for i in range(16)])
    held_out = [measure(original, model, held)]
    return {
        "base_model": "org/<tiny> & co",
        "model_class": "BertModel",
        "sentence_transformers": False,
        "blocks_in_all": 2,
        "bytes": {"original": 4_000_000, "compressed": 1_500_000},
        "latency": latency(original, model, batches, seconds=0.05),
        "agreement": held_out[0]["figures"],
        "held_out": held_out,
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
    assert found.tags.count("table") == 7 and text.count("org/<tiny> & co") == 3
    assert "4.0 → 1.5 MB" in text and f"{stored['latency']['speedup']:.2f} ×" in text
    assert f"{stored['agreement']['cosine']:.4f}" in text and "as it was (refused)" in text
    for block in stored["report"]["blocks"]:
        assert f"{block['error']:.4f}" in text and f"{block['parameters']:,}" in text
    errors = [{**block, "error": 0.125} for block in stored["report"]["blocks"]]
    assert html({**stored, "report": {**stored["report"], "blocks": errors}}).count("width: 12.50%") == 2
    assert "1 of 2 blocks" in text and "column body" in text and "<means>" in text
    (held,) = stored["held_out"]
    assert held["inputs"] == 16 and "16 texts of b.csv" in text and "cosine, worst of 16" in text
    for value in (held["figures"]["same nearest"], held["quantiles"]["cosine"]["worst"]):
        assert f"{value:.4f}" in text
    assert len(held["worst"]) == 10
    for case in held["worst"]:
        assert case["text"] in text and f"{case['value']:.4f}" in text
    for word in ("held-out error", "multiply-adds", "atoms", "ranks"):
        assert found.texts.count(word) >= 1


def test_page_of_a_classifier_and_of_several_sets(stored):
    classes = [{"label": "<good>", "count": 1234, "same": 0.875}, {"label": 1, "count": 5, "same": 0.2}]
    case = {"text": "<b>a text</b>", "value": 1.5, "before": "<good>", "after": 1}
    (held,) = stored["held_out"]
    first = {**held, "classes": classes, "worst": [case], "quantiles": {"KL divergence": {"worst": 1.5}}}
    other = {**held, "name": "general.txt", "inputs": 99, "figures": {"cosine": 0.123456}, "worst": []}
    found = check_page(html({**stored, "held_out": [first, other]}))
    text = " ".join(found.texts)
    assert "1,234 0.8750" in text and "<b>a text</b> <good> 1 1.5000" in text
    assert "The worst 1 of 16 texts of b.csv" in text and "99 texts of general.txt" in text and "0.1235" in text
    card = model_card({**stored, "held_out": [first, other]})
    assert "| | 16 texts of b.csv | 99 texts of general.txt |\n|---|---|---|\n" in card
    assert f"| mean cosine | {held['figures']['cosine']:.4f} | 0.1235 |" in card and "a text" not in card


def test_blocks_of_attention(stored):
    first, second = stored["report"]["blocks"]
    block = {**first, "kind": "low-rank", "num_features": None, "ranks": [16, 12]}
    report = {**stored, "report": {**stored["report"], "blocks": [block, second]}}
    assert "ranks 16 and 12" in check_page(html(report)).texts and "| ranks 16 and 12 |" in model_card(report)


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
    assert "96 unlabelled texts (a.csv, column body)" in body
    assert f"| mean cosine | {stored['agreement']['cosine']:.4f} |" in body
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
        "held_out": [
            {
                **stored["held_out"][0],
                "name": evil,
                "classes": [{"label": evil, "count": 1, "same": 0.5}],
                "worst": [{"text": evil, "value": 0.5, "before": evil, "after": evil}],
            }
        ],
        "compared": evil,
        "saved_as": {"format": evil, "reason": evil, "padding": 0.0},
        "plan": {**stored["plan"], "blocks": [{**stored["plan"]["blocks"][0], "name": evil, "kind": evil}]},
        "report": {**stored["report"], "blocks": [block]},
    }
    assert check_page(html(other)).texts.count(printable(evil)) >= 3
    _, front, body = model_card(other).split("---\n", 2)
    assert front.splitlines()[0] == 'base_model: "<img src=x>|\\\\n# x `"'
    assert "<" not in body and body.count("\n# ") == 1 and body.count("`") - body.count("\\`") == 6
    row = next(line for line in body.splitlines() if line.startswith("| &lt;img"))
    assert row.replace("\\|", "").count("|") == 6


def test_page_and_card_explain_the_format(stored):
    """A report from before there were formats has none."""
    old, reason = model_card(stored), "its sizes are fields of bert"
    assert "import snnk.hf" in old and "The files need snnk: AutoModel" in old and "plain:" not in html(stored)
    for name, sentence in (("plain", "The files are a plain checkpoint"), ("snnk", "The files need snnk")):
        report = {**stored, "saved_as": {"format": name, "reason": reason, "padding": 0.0}}
        card, page = model_card(report), " ".join(check_page(html(report)).texts)
        assert f"{sentence} ({reason}): " in card and ("import snnk.hf" in card) == (name == "snnk")
        assert f"{name}: {reason}" in page


def test_latency_takes_turns(monkeypatch):
    monkeypatch.setattr(measured, "TURN", 1e-9)
    monkeypatch.setattr(measured, "WARM", 0.0)
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
    assert "".join(order[::4]) == "aaabbb" + "baabba"
    assert found["speedup"] == found["original_seconds"] / found["compressed_seconds"] > 0


def test_headline(stored):
    found = dict(headline(stored))
    assert found["stored"] == "4.0 &rarr; 1.5 MB"
    assert found["cosine, worst of 16"] == f"{stored['held_out'][0]['quantiles']['cosine']['worst']:.4f}"


def test_the_course_of_the_distillation(stored):
    points = ({"step": 0, "held_out": 0.4}, *({"step": s, "training": 0.3, "held_out": 4 / s} for s in (16, 48)))
    better = Recovery((16, 32), 48, points, "the time is over", 20, 2, 61.0)
    course = (
        "48 steps of distillation in 61 s took the distance to the original, on inputs held out for this, from 0.4000"
    )
    cases = [
        (better, f"{course} to 0.0833. There were no more, as the time is over."),
        (replace(better, kept=16), "48 steps of distillation in 61 s, of which the first 16 are kept, took"),
        (replace(better, kept=0), "(0.4000 before, 0.0833 after): the model is as it was fitted."),
        (Recovery((), 0, points[:1], "time is short"), "No step of distillation was taken, as time is short."),
        (None, "There was no distillation."),
    ]
    for recovery, sentence in cases:
        report = copy.deepcopy(stored)
        report["report"]["recovery"] = None if recovery is None else json.loads(json.dumps(asdict(recovery)))
        page, card = check_page(html(report)), model_card(report)
        assert sentence in card and len(page.pictures) == (1 if recovery and recovery.stages else 0)
        assert (sentence in " ".join(page.texts)) == (recovery is not None)


def test_warnings_about_several_models_are_one(stored):
    doubts = ["keep 0.5: few & rough: give more", "keep 0.3: few & rough: give more", "keep 0.3: slow", "all is well"]
    texts = " ".join(check_page(html({**stored, "warnings": doubts})).texts)
    assert texts.count("Warning:") == 3 and "all is well." in texts and "keep 0.3: slow." in texts
    assert "keep 0.5, keep 0.3: few & rough: give more." in texts


def served(names):
    """Stages of an export as a report has them."""
    stages = [{"name": name, "bytes": 10**8 // (i + 1), "loss": 0.01 * i} for i, name in enumerate(names)]
    runs = {name: {"processor_seconds": 0.004 / (i + 1)} for i, name in enumerate(names)}
    latency = [
        {"inputs": f"{n} x 32 tokens", "clock": "processor", "threads": 1, "runs": runs, "rounds": 9} for n in (1, 32)
    ]
    return {"to": "onnx", "cache": True, "no_cache": "", "stages": stages, "latency": latency}


@needs_browser
@pytest.mark.parametrize(("width", "dark"), browser.SCREENS)
def test_the_page_in_a_browser(stored, tmp_path, width, dark):
    """With every part that a page can have, and with long names."""
    long = "a" * 200
    report = copy.deepcopy(stored) | {"base_model": long, "warnings": [f"<b>{long}"]}
    report["served"] = served(["original", "compressed", "onnx", "onnx int8 dynamic"])
    points = [{"step": s, "training": 3e-6, "held_out": 4e-6 / (s + 1)} for s in range(0, 120_000, 20_000)]
    report["report"]["recovery"] = asdict(
        Recovery((20_000,) * 5, 100_000, tuple(points), "the time is over", 20, 2, 61.0)
    )
    for block in (*report["report"]["blocks"], *report["plan"]["blocks"]):
        block["name"] += ".a_rather_long_name.of_a_part"
    (held,) = report["held_out"]
    held["classes"] = [{"label": long, "count": 10**6, "same": 0.5}, {"label": "b", "count": 5, "same": 0.2}]
    held["worst"] = [{"text": "many words " * 40, "value": 1.5, "before": long, "after": "b"}]
    (tmp_path / "report.html").write_text(html(report))
    found = browser.check_page(tmp_path / "report.html", width, dark=dark)
    assert found.pictures == 1 and "in units of 1e-6" in found.text and "onnx int8 dynamic" in found.text
