"""MNIST: a run on files, and its claims."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import Dropout, Parameter

from snnk.experiments import mnist
from snnk.experiments.lab.records import Results

from helpers.experiments import Rows

SHORT = replace(mnist.QUICK, features=(8,), rows=20, epochs=1, unit_sphere=(), trained_directions=(), variants=())


def test_mnist_resumes_and_reads_real_files(run, tmp_path, digits, monkeypatch):
    monkeypatch.setattr(mnist, "QUICK", SHORT)
    args = ["reproduce", "mnist", "--quick", "--data-dir", digits.data_dir, "--out", str(tmp_path / "out")]
    assert run(*args, "--seeds", "2")[0] == 0
    path = tmp_path / "out" / "mnist.json"
    stored = json.loads(path.read_text())
    assert stored["source"] == {"model": "", "data": "real"} and digits.data_dir not in path.read_text()
    names = ["MLP", "no such layer", "SNNK"]
    assert [(r["network"], r["seed"]) for r in stored["rows"]] == [(name, seed) for name in names for seed in (0, 1)]
    assert all(len(r["validation_accuracies"]) == 1 for r in stored["rows"])
    stored["rows"] = stored["rows"][:3]
    stored["rows"][0]["test_accuracy"] = 0.123
    path.write_text(json.dumps(stored))
    assert run(*args, "--seeds", "2")[0] == 0
    again = json.loads(path.read_text())["rows"]
    assert len(again) == 6 and again[0]["test_accuracy"] == 0.123
    assert again[2]["trained"] < again[0]["trained"]
    # rows without trained directions and variants are kept by a run with both
    monkeypatch.setattr(mnist, "QUICK", replace(SHORT, trained_directions=(8,), variants=("no dropout in front",)))
    assert run(*args, "--seeds", "2")[0] == 0
    more = json.loads(path.read_text())["rows"]
    assert more[:6] == again
    assert [(r["network"], r["seed"]) for r in more[6:]] == [
        ("SNNK, trained directions", 0),
        ("SNNK, trained directions", 1),
        ("no dropout in front", 0),
    ]
    frozen, trained = again[4], more[6]
    assert (trained["trained"], trained["frozen"]) == (frozen["trained"] + frozen["frozen"], 0)


def test_rows_chosen_by_loss_are_another_configuration(tmp_path):
    hashes = [Results(tmp_path / "mnist.json", replace(SHORT, choose=choose)).hash for choose in ("loss", "accuracy")]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("name", [mnist.SPHERE, *mnist.VARIANTS])
def test_variants_change_one_choice(name):
    sizes, h = (784, 32, 32, 10), torch.rand(5, 32, generator=torch.Generator().manual_seed(0))
    usual, changed = (mnist.build(which, 8, sizes, mnist.QUICK, seed=1) for which in (mnist.SNNK, name))
    (p, q), (a, b) = ((net[3].feature_map.projection, net[3].weight) for net in (usual, changed))
    same = {
        "projection": torch.equal(p, a),
        "A": torch.equal(q, b),
        "inputs": torch.allclose(changed[3](3 * h), 3 * changed[3](h), atol=1e-5),
        "dropout": changed[2].p == usual[2].p,
        "rate": name == mnist.SPHERE or mnist.VARIANTS[name][2] == 1,
        "frozen": isinstance(a, Parameter) == isinstance(p, Parameter),
    }
    # A = psi(W) follows the projection and the norm of W
    expected = {
        "inputs on the unit sphere": {"A", "inputs"},
        "inputs on the unit sphere and trained directions": {"A", "inputs", "frozen"},
        "A drawn as in nn.Linear": {"A"},
        "independent Gaussian rows": {"A", "projection"},
        "no dropout in front": {"dropout"},
        "0.3 times the learning rate": {"rate"},
    }
    assert {key for key, equal in same.items() if not equal} == expected[name]
    assert isinstance(changed[4], Dropout) and changed[4].p == mnist.QUICK.dropout


def row(m, accuracy, loss, name=None, seed=0, settled=0.98):
    counts = {"trained": m or 900, "frozen": 7 * (m or 0), "test_rows": 10_000, "seed": seed}
    return counts | {
        "network": name or ("SNNK" if m else "MLP"),
        "num_features": m,
        "test_accuracy": accuracy,
        "test_loss": 0.1,
        "train_losses": [1.0, loss],
        "validation_accuracies": [0.1, *[settled] * 5],
    }


def test_claims_of_mnist(tmp_path):
    rows = [row(None, 0.98, 0.1), row(16, 0.99, 0.09), row(32, 0.983, 0.08), row(64, 0.981, 0.08), row(128, 0.97, 0.05)]
    table = mnist.claims(Rows(rows, seed=0))
    assert [c["holds"] for c in table] == [True, False, False, True]
    assert table[0]["ours"] == (
        "98.30 %, MLP 98.00 %; mean of the last 5 validation accuracies 98.00 %, MLP 98.00 %; 1 seed; "
        "32 trained and 224 frozen against 900"
    )
    assert "98.10 %, MLP 98.00 % (a tie)" in table[1]["ours"] and "tie" not in table[2]["ours"]
    assert "10,000 answers, 0.19 points" in table[0]["tolerance"]
    assert "16: 0.0900 against 0.1000, 32: 0.0800 against 0.1000" in table[3]["ours"]
    # one number of features with a higher loss is enough
    assert not mnist.claims(Rows([*rows[:4], row(256, 0.99, 0.11)], seed=0))[-1]["holds"]
    lost = {**row(64, 0.1, None), "test_loss": None}
    table = mnist.claims(Rows([*rows[:3], lost], seed=0))
    assert [(c["ours"] == "diverged", c["holds"]) for c in table] == [(False, True), (True, False), (True, False)]
    mnist.plot(Rows([*rows[:3], lost], seed=0)).savefig(tmp_path / "mnist.png")
    assert mnist.claims(Rows(rows[1:], seed=0)) == mnist.claims(Rows(rows[:1], seed=0)) == []
    # rows with trained directions have claims of their own, and change no other
    directions = row(32, 0.99, 0.01, "SNNK, trained directions", settled=0.99)
    table = mnist.claims(Rows([*rows[:3], directions], seed=0))
    assert table[:2] == mnist.claims(Rows(rows[:3], seed=0)) and len(table) == 4
    assert table[2]["paper"].endswith("on MNIST, with trained directions") and "99.00 %" in table[2]["ours"]
    assert "validation accuracies 99.00 %, MLP 98.00 %" in table[2]["ours"]
    sphere = {**directions, "network": "inputs on the unit sphere"}
    assert [c["ours"] for c in mnist.claims(Rows([*rows[:3], sphere], seed=0))] == [c["ours"] for c in table]
    mnist.plot(Rows([*rows[:3], directions, sphere], seed=0)).savefig(tmp_path / "directions.png")
    # only seeds that both have are compared
    more = [row(None, 0.5, 0.5, seed=1), row(128, 0.6, 0.4, seed=2)]
    assert mnist.claims(Rows([*rows[:3], *more], seed=0)) == mnist.claims(Rows(rows[:3], seed=0))


def test_claims_on_the_layer_and_on_variants(tmp_path):
    rows = [row(None, 0.98, 0.1), row(32, 0.97, 0.1)]
    first = mnist.claims(Rows(rows, seed=0))
    for accuracy, holds in ((0.979, False), (0.97, True), (0.99, False)):
        found = Rows([*rows, row(None, accuracy, 0.02, "no such layer")], seed=0)
        table = mnist.claims(found)
        assert table[:2] == first and len(table) == 3 and table[2]["holds"] is holds
        assert f"without the layer {100 * accuracy:.2f} %, MLP 98.00 %" in table[2]["ours"]
        assert ("(a tie)" in table[2]["ours"]) == (accuracy == 0.979)
    # a variant is compared with the MLP of its own seeds only
    rows += [row(None, 0.95, 0.1, seed=1), row(32, 0.97, 0.1, seed=1)]
    for accuracy, holds in ((0.979, True), (0.97, False), (0.99, True)):
        found = Rows([*rows, row(32, accuracy, 0.1, "no dropout in front")], seed=0)
        *_, last = mnist.claims(found)
        assert last["holds"] is holds and "MLP 98.00 %" in last["ours"] and "no dropout in front" in last["paper"]
    mnist.plot(found).savefig(tmp_path / "variants.png")
