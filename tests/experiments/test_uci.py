"""UCI data sets: which of them run, and the claims."""

from dataclasses import replace

import numpy as np
import pytest

from snnk.experiments import uci
from snnk.experiments.lab import data
from snnk.experiments.lab.records import Results

from helpers.experiments import Rows


def test_uci_runs_what_the_folder_has(tmp_path, monkeypatch):
    """HIGGS without CoverType; half of HEPMASS is an error about HEPMASS."""
    rows = np.random.default_rng(0).normal(size=(60, 29))
    rows[:, 0] = rows[:, 1] > 0
    monkeypatch.setitem(data.DATASETS, "higgs", replace(data.DATASETS["higgs"], rows={"all": 60}))
    np.savetxt(tmp_path / "HIGGS.csv", rows, delimiter=",")
    config = replace(uci.QUICK, widths=(4,), rows=0)
    results, source = Results(tmp_path / "uci.json", config), data.Source(str(tmp_path))
    found = list(uci.run(config, results, source))
    assert [(r["dataset"], r["network"]) for r in found] == [("higgs", "MLP"), ("higgs", "SNNK")]
    assert uci.left(results) == ["covertype: 0 of 2 rows", "hepmass: 0 of 2 rows"]
    (tmp_path / "all_train.csv").write_text("")
    with pytest.raises(FileNotFoundError, match="hepmass: no all_test"):
        list(uci.run(config, results, source))


def test_claims_of_uci(tmp_path):
    def row(kind, width, trained, validation, loss):
        counts = {"trained": trained, "frozen": 400 * (kind == "SNNK"), "best_epoch": 2, "seed": 0}
        losses = {"validation_losses": [9.0, validation, None], "test_loss": loss, "test_accuracy": 0.5}
        return {"dataset": "covertype", "network": kind, "width": width, **counts, **losses}

    # the least test loss is not the least validation loss: the width is chosen by the latter
    snnk = [row("SNNK", 8, 100, 0.52, 0.40), row("SNNK", 16, 200, 0.500, 0.51)]
    small, near, large = (
        row("MLP", 8, 150, 0.60, 0.60),
        row("MLP", 16, 300, 0.504, 0.507),
        row("MLP", 32, 900, 0.3, 0.3),
    )
    same, least = uci.claims(Rows([*snnk, small, near, large]))
    assert same["holds"] and "at 2 of 2 widths" in same["ours"] and same["tolerance"] == "1 % of the test loss"
    assert "16: SNNK 0.5100 (50.00 %) with 200 trained and 400 frozen, MLP 0.5070" in same["ours"]
    assert least["holds"] and "SNNK, width 16 by validation" in least["ours"]
    assert "least MLP as good, width 16: 0.5070 (50.00 %) with 300 trained; stored 600, not fewer" in least["ours"]
    same, least = uci.claims(Rows([*snnk, row("MLP", 8, 150, 0.49, 0.6), row("MLP", 16, 300, 0.4, 0.5)]))
    assert not same["holds"] and "at 1 of 2 widths" in same["ours"]  # 0.51 is 2 % above 0.5
    assert not least["holds"] and "width 8: 0.6000 (50.00 %) with 150 trained; stored 600, not" in least["ours"]
    _, least = uci.claims(Rows([*snnk, small]))
    assert least["holds"] and "no MLP up to width 8 is as good" in least["ours"]
    lost = [{**r, "validation_losses": [None] * 3, "test_loss": None} for r in snnk]
    table = uci.claims(Rows([*lost, small, near]))
    assert [(c["ours"], c["holds"]) for c in table] == [("diverged", False)] * 2
    assert "width 16 by" in uci.claims(Rows([lost[0], snnk[1], small, near]))[1]["ours"]
    figure = uci.plot(Rows([*snnk, *lost, small, near]))
    figure.savefig(tmp_path / "uci.png")
    assert len(figure.axes[0].lines) == 3  # trained, and for SNNK with the frozen ones
    assert uci.claims(Rows([small])) == []
