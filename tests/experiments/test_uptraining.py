"""Uptraining: atoms in place of random features, and claims."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import BertForSequenceClassification

from snnk.experiments import uptraining
from snnk.experiments.lab.data import Source
from snnk.experiments.lab.records import Results
from snnk.finetune.methods import Setup
from snnk.hf import bundle_, find_ffns, replace_ffn_

from helpers.experiments import Rows

RANDOM, ATOMS = uptraining.KINDS


def up(k, score, size, kind=RANDOM, task="cola"):
    facts = {"blocks": 12, "metric": "mcc", "model": "some", "steps": 9, "paper_full": 59.5, "seed": 0}
    facts |= {"late_gain": 0.0, "trained": 7, "validation": score, "start_validation": 57.0}
    facts |= {"kind": kind if k else uptraining.FULLY, "stored_MB": size, "multiply_adds_G": size}
    return {"task": task, "replaced": k, "score": score, **facts}


def test_atoms_are_neurons_of_the_block_fitted_without_labels(files):
    original = BertForSequenceClassification.from_pretrained(files["model"]).eval()
    ids = torch.randint(3, 43, (32, 8), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids, "labels": ["unread"] * len(ids)}  # a model that is given them fails
    setup = Setup(4, 0, False, files["model"], lambda: iter([rows]), "top-1")
    fitted = uptraining.fit_atoms(copy.deepcopy(original), setup)
    old = find_ffns(original)
    below, changed = find_ffns(fitted)
    assert torch.equal(below.up_weight(), old[0].up_weight())
    assert changed.up_weight().shape[0] == 4
    assert all((old[1].up_weight() == row).all(1).any() for row in changed.up_weight())
    drawn = copy.deepcopy(original)
    replace_ffn_(drawn, "top-1", num_features=4)
    bundle_(drawn)
    with torch.no_grad():
        right, near, far = (model.bert(ids).last_hidden_state for model in (original, fitted, drawn))
    assert (near - right).norm() < (far - right).norm()


def test_a_sentence_encoder_compares_the_two_texts_of_a_row(files, tmp_path):
    encoder = shutil.copytree(files["model"], tmp_path / "encoder")
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    (encoder / "modules.json").write_text(json.dumps([module]))
    config = replace(uptraining.QUICK, tasks=("cola", "stsb"), replaced=(0, 1), pair_rows=30)
    source = Source(files["data_dir"], str(encoder))
    rows = list(uptraining.run(config, Results(tmp_path / "rows.json", config), source))
    assert [(r["task"], r["replaced"], r["pooling"]) for r in rows[:2]] == [("cola", 0, "mean"), ("stsb", 0, "pairs")]
    assert len(rows) == uptraining.total(config) == 6
    for row in rows:  # more steps per epoch of 40 texts than of 30 pairs, in batches of 32
        assert row["steps"] == (2 if row["task"] == "cola" else 1)
    body, head = (rows[i]["multiply_adds_G"] for i in (0, 1))
    assert body < head < 1.1 * body  # the classifier alone differs


def test_trainings_go_to_the_last_epoch(monkeypatch):
    asked = []
    monkeypatch.setattr(uptraining, "tuned", lambda files, variant, **options: asked.append((variant, options)))
    config = uptraining.Config()
    for k, kind in uptraining.cells((0, 3)):
        row = uptraining.uptrained({}, k, kind, config, "mcc", {}, limit_train=9)
        assert row["score"] is None
    assert [(options["method"], variant is not None) for variant, options in asked] == [
        ("full", False),
        ("uptrain", False),
        ("uptrain", True),
    ]
    for _, options in asked:
        assert options["patience"] >= options["epochs"] == config.epochs and options["limit_train"] == 9


def test_claims_about_half_of_the_blocks():
    claims = uptraining.claims(Rows([up(0, 60.0, 100.0), up(6, 58.5, 55.0), up(12, 0.0, 1.0)]))
    assert [c["holds"] for c in claims] == [True, True] and "k = 6 of 12: 45 % of the size" in claims[0]["ours"]
    claims = uptraining.claims(Rows([up(0, 60.0, 100.0), up(4, 57.0, 80.0)]))
    assert [c["holds"] for c in claims] == [False, False]
    assert "60.00 -> 57.00 (7 trained, no better than its start); some" in claims[1]["ours"]
    assert uptraining.claims(Rows([up(4, 57.0, 80.0)])) == []
    claims = uptraining.claims(Rows([up(0, 60.0, 100.0), up(4, 59.0, 70.0), up(6, None, None)]))  # no smaller k instead
    assert [(c["ours"], c["holds"]) for c in claims] == [("k = 6 of 12: diverged", False)]
    alone = [up(0, 60.0, 100.0), up(6, 58.5, 55.0, ATOMS)]  # which the paper does not have
    assert uptraining.claims(Rows(alone)) == []


@pytest.mark.parametrize(
    ("atoms", "random", "holds", "tie"),
    [(60.0, 50.0, True, False), (50.0, 60.0, False, False), (53.0, 50.0, False, True)],
)
def test_atoms_are_above_random_features_by_more_than_chance(atoms, random, holds, tie):
    rows = [up(0, 60.0, 100.0), up(6, random, 55.0), up(6, atoms, 55.0, ATOMS), up(12, 1.0, 9.0)]
    *_, claim = uptraining.claims(Rows(rows))
    assert claim["paper"] == "not in the paper: cola, k = 6 of 12: atoms above random features"
    assert claim["holds"] is holds and ("(a tie)" in claim["ours"]) is tie
    chance = 100 * (sum(1 - (r / 100) ** 2 for r in (atoms, random)) / 1043) ** 0.5
    assert claim["tolerance"] == f"{chance:.1f} points: less is a tie"
    rows[2]["late_gain"] = 0.6
    *_, claim = uptraining.claims(Rows(rows))
    assert claim["holds"] is None and "still rising" in claim["ours"]
    rows[1]["score"] = None
    *_, claim = uptraining.claims(Rows(rows))
    assert (claim["ours"], claim["holds"]) == ("diverged", False)
