"""CIFAR-100, and the claims about vision."""

from dataclasses import replace

import numpy as np
import pytest

from snnk.experiments import vision
from snnk.experiments.lab.data import Source
from snnk.experiments.lab.records import Results

from helpers.experiments import shrink, table_row


def test_vision_runs_on_cifar100(tmp_path, monkeypatch):
    shrink(monkeypatch, "cifar100", {"train": 80, "test": 24})
    folder = tmp_path / "cifar100"
    folder.mkdir()
    for split, rows in (("train", 80), ("test", 24)):
        records = np.zeros((rows, 3074), np.uint8)
        records[:, 1] = 50 + np.arange(rows) % 2
        records[::2, 2:1026] = 200  # red
        (folder / f"{split}.bin").write_bytes(records.tobytes())
    config = replace(vision.QUICK, methods=("linear-probe", "bundled"))
    monkeypatch.setattr(vision, "QUICK", config)
    results = Results(tmp_path / "rows.json", config)
    rows = list(vision.run(config, results, Source(str(folder))))
    assert [(r["task"], r["method"]) for r in rows] == [("cifar100", "linear-probe"), ("cifar100", "bundled")]
    assert rows[0]["score"] > 90
    (claim,) = vision.claims(results)
    assert (
        claim["paper"] == "cifar100: bundled 82.73, closely matching the baseline"
        and claim["tolerance"] == "1.0 points"
    )
    results.rows = [{**row, "task": task} for row in rows for task in ("cifar10", "cifar100")]
    assert [axes.get_title() for axes in vision.plot(results).axes] == ["cifar10", "cifar100"]


@pytest.mark.parametrize(
    ("task", "method", "score", "holds"),
    [
        ("cifar10", "snnk-pooler", 89.0, True),
        ("cifar10", "snnk-pooler", 88.9, False),
        ("cifar100", "snnk-pooler", 90.1, True),
        ("cifar100", "snnk-pooler", 90.0, False),  # "outperforms"
        ("cifar100", "bundled", 89.0, True),
        ("cifar100", "bundled", None, False),
    ],
)
def test_claims_of_vision(tmp_path, task, method, score, holds):
    results = Results(tmp_path / "rows.json", replace(vision.QUICK, test_rows=10**6))
    for name, value in (("linear-probe", 90.0), (method, score)):
        results.rows.append(table_row(task, name, value))
    (claim,) = vision.claims(results)
    assert claim["holds"] is holds and claim["paper"].startswith(f"{task}: {method}")
    assert ("diverged" in claim["ours"]) == (score is None)
