"""MNIST: a run on files, and its claims."""

import json
from dataclasses import replace

from snnk.experiments import mnist

from helpers.experiments import Rows

SHORT = replace(mnist.QUICK, features=(8,), rows=20, epochs=1, trained_directions=(), other_rates=())
PAPER = {"learning_rate": 1e-3, "other_rates": (), "seed": 0}


def test_mnist_resumes_and_reads_real_files(run, tmp_path, digits, monkeypatch):
    monkeypatch.setattr(mnist, "QUICK", SHORT)
    args = ["reproduce", "mnist", "--quick", "--data-dir", digits.data_dir, "--out", str(tmp_path / "out")]
    assert run(*args, "--seeds", "2")[0] == 0
    path = tmp_path / "out" / "mnist.json"
    stored = json.loads(path.read_text())
    assert stored["source"] == {"model": "", "data": "real"} and digits.data_dir not in path.read_text()
    assert [(r["network"], r["seed"]) for r in stored["rows"]] == [
        *(("MLP", 0), ("MLP", 1), ("SNNK", 0), ("SNNK", 1)),
        *(("no such layer", 0), ("no such layer", 1)),
    ]
    stored["rows"] = stored["rows"][:3]
    stored["rows"][0]["test_accuracy"] = 0.123
    path.write_text(json.dumps(stored))
    assert run(*args, "--seeds", "2")[0] == 0
    again = json.loads(path.read_text())["rows"]
    assert len(again) == 6 and again[0]["test_accuracy"] == 0.123
    assert again[4]["trained"] < again[2]["trained"]
    again = again[:4]
    # rows without trained directions, and from before rows had a learning rate, are kept by a run with both
    for r in again:
        del r["learning_rate"]
    path.write_text(json.dumps({**stored, "rows": again}))
    monkeypatch.setattr(mnist, "QUICK", replace(SHORT, trained_directions=(8,), other_rates=(1e-4,)))
    assert run(*args, "--seeds", "1")[0] == 0
    more = json.loads(path.read_text())["rows"]
    assert more[:4] == again
    assert [(r["network"], r["learning_rate"]) for r in more[4:]] == [
        ("SNNK, trained directions", 1e-3),
        ("no such layer", 1e-3),
        ("MLP", 1e-4),
        ("SNNK", 1e-4),
    ]
    frozen, trained = again[2], more[4]
    assert (trained["trained"], trained["frozen"]) == (frozen["trained"] + frozen["frozen"], 0)


def test_claims_of_mnist(tmp_path):
    def row(m, accuracy, loss, rate=1e-3, validation=0.1):
        name = "SNNK" if m else "MLP"
        counts = {"trained": m or 900, "frozen": 7 * (m or 0), "test_rows": 10_000, "seed": 0}
        counts |= {"learning_rate": rate, "validation_losses": [validation, 0.3]}
        return (
            {"network": name, "num_features": m, "test_accuracy": accuracy, "test_loss": 0.1}
            | counts
            | {"train_losses": [1.0, loss]}
        )

    rows = [row(None, 0.98, 0.1), row(16, 0.99, 0.09), row(32, 0.983, 0.08), row(64, 0.981, 0.08), row(128, 0.97, 0.05)]
    table = mnist.claims(Rows(rows, **PAPER))
    assert [c["holds"] for c in table] == [True, False, False, True]
    assert table[0]["ours"] == "98.30 %, MLP 98.00 %; 32 trained and 224 frozen against 900"
    assert "98.10 %, MLP 98.00 % (a tie)" in table[1]["ours"] and "tie" not in table[2]["ours"]
    assert "10,000 answers, 0.19 points" in table[0]["tolerance"]
    assert "16: 0.0900, 32: 0.0800" in table[3]["ours"]
    # one number of features with a higher loss is enough
    assert not mnist.claims(Rows([*rows[:4], row(256, 0.99, 0.11)], **PAPER))[-1]["holds"]
    lost = {**row(64, 0.1, None), "test_loss": None}
    table = mnist.claims(Rows([*rows[:3], lost], **PAPER))
    assert [(c["ours"] == "diverged", c["holds"]) for c in table] == [(False, True), (True, False), (True, False)]
    mnist.plot(Rows([*rows[:3], lost], **PAPER)).savefig(tmp_path / "mnist.png")
    assert mnist.claims(Rows(rows[1:], **PAPER)) == mnist.claims(Rows(rows[:1], **PAPER)) == []
    # rows with trained directions have claims of their own, and change no other
    directions = {**row(32, 0.99, 0.01), "network": "SNNK, trained directions"}
    table = mnist.claims(Rows([*rows[:3], directions], **PAPER))
    assert table[:2] == mnist.claims(Rows(rows[:3], **PAPER)) and len(table) == 4
    assert table[2]["paper"].endswith("on MNIST, with trained directions") and "99.00 %" in table[2]["ours"]
    mnist.plot(Rows([*rows[:3], directions], **PAPER)).savefig(tmp_path / "directions.png")
    without = {**row(None, 0.979, 0.02), "network": "no such layer"}
    table = mnist.claims(Rows([*rows[:3], without], **PAPER))
    assert table[:2] == mnist.claims(Rows(rows[:3], **PAPER)) and len(table) == 3 and not table[2]["holds"]
    assert "MLP 98.00 %, without the layer 97.90 % (a tie)" in table[2]["ours"]
    better = {**without, "test_accuracy": 0.97}
    assert mnist.claims(Rows([*rows[:3], better], **PAPER))[2]["holds"]
    mnist.plot(Rows([*rows[:3], without], **PAPER)).savefig(tmp_path / "without.png")
    # the validation rows choose the lower rate for SNNK and the paper's for the MLP; the test rows choose nothing
    rates = {**PAPER, "other_rates": (3e-4,)}
    more = [row(None, 0.99, 0.2, 3e-4, validation=0.2), row(32, 0.985, 0.01, 3e-4, validation=0.09)]
    table = mnist.claims(Rows([rows[0], row(32, 0.97, 0.08), *more], **rates))
    assert [c["holds"] for c in table] == [False, True, True, True]
    assert table[2]["paper"].endswith("on MNIST, with a learning rate per network") and "98.50 %" in table[2]["ours"]
    mnist.plot(Rows([rows[0], row(32, 0.97, 0.08), *more], **rates)).savefig(tmp_path / "rates.png")
    # a rate that not all seeds and networks have is not compared
    second = {**row(32, 0.97, 0.08), "seed": 1}
    table = mnist.claims(Rows([rows[0], {**rows[0], "seed": 1}, row(32, 0.97, 0.08), second, *more], **rates))
    assert len(table) == 2 and "20,000 answers" in table[0]["tolerance"]
    assert len(mnist.claims(Rows([rows[0], row(32, 0.97, 0.08), more[0]], **rates))) == 2
