"""Rows of results: they are taken over, put aside and brought back, and name where they were made."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from snnk.experiments.lab import estimate, records
from snnk.experiments.lab.records import Results, Stored


def test_rows_are_resumed_for_the_same_configuration_only(tmp_path):
    config = estimate.Config(in_features=4, num_features=(4, 8), draws=1)
    path = tmp_path / "rows.json"
    rows = estimate.run(config, Results(path, config))
    next(rows)  # stopped after the first
    stored = json.loads(path.read_text())
    stored["rows"][0]["urf"] = -1.0
    path.write_text(json.dumps(stored))
    again = list(estimate.run(config, Results(path, config)))
    assert again[0]["urf"] == -1.0 and again[1]["urf"] > 0
    other = estimate.Config(in_features=4, num_features=(4, 8), draws=2)
    assert next(estimate.run(other, Results(path, other)))["urf"] > 0
    (kept,) = tmp_path.glob("rows.*.json")  # rows of the first configuration are not lost
    assert Stored(kept).rows[0]["urf"] == -1.0 and len(Stored(path).rows) == 1


def test_rows_of_other_commits_and_seeds_are_taken_over(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Config:
        size: int = 3
        seeds: int = 1

    path = tmp_path / "rows.json"
    monkeypatch.setattr(records, "_commit", lambda: "first")
    Results(path, Config(seeds=2), source={"model": "some"}).add({"seed": 0, "bad": [1.0, float("nan")]})
    monkeypatch.setattr(records, "_commit", lambda: "second")
    again = Results(path, Config(), source={"model": "some"})
    again.add({"seed": 1})
    stored = Stored(path)
    assert [stored.environments[row.pop("environment")]["commit"] for row in stored] == ["first", "second"]
    assert stored.rows == [{"seed": 0, "bad": [1.0, None], "commit": "first"}, {"seed": 1, "commit": "second"}]
    assert Stored(path).config == {"size": 3, "seeds": 2}
    for config, source in ((Config(size=4), "some"), (Config(), "other")):
        assert Results(path, config, source={"model": source}).aside is not None
    assert len(list(tmp_path.iterdir())) == 1  # nothing is moved before the first row


def test_a_run_of_some_methods_leaves_the_others_in_the_file(tmp_path):
    @dataclass(frozen=True)
    class Config:
        tasks: tuple[str, ...] = ("cola", "stsb")
        methods: tuple[str, ...] = ("lora", "full")

    path = tmp_path / "rows.json"
    Results(path, Config()).add({"method": "lora"})
    Results(path, Config(tasks=("mrpc", "cola"), methods=("full",))).add({"method": "full"})
    assert Stored(path).config == {"tasks": ["cola", "stsb", "mrpc"], "methods": ["lora", "full"]}
    assert [row["method"] for row in Stored(path)] == ["lora", "full"]
    stored = json.loads(path.read_text())
    for wrong in (3, None, "lora", [1]):
        path.write_text(json.dumps({**stored, "config": {**stored["config"], "methods": wrong}}))
        with pytest.raises(ValueError, match="is not a result file of snnk"):
            Results(path, Config())


def test_rows_that_were_put_aside_come_back(tmp_path):
    """Two configurations that take turns in one file, as a run and its --quick form do, lose nothing."""
    config, other = estimate.Config(in_features=4), estimate.Config(in_features=5)
    path = tmp_path / "rows.json"
    for seed in range(3):
        for own in (config, other):
            results = Results(path, own)
            assert [row["seed"] for row in results] == list(range(seed))
            results.add({"seed": seed, "dim": own.in_features})
            assert len(list(tmp_path.iterdir())) == (1 if (seed, own) == (0, config) else 2)
    back = Results(path, config)
    assert back.back is not None and back.aside is not None
    (tmp_path / f"rows.{Stored(path).hash}.json").write_text("mine")  # as an older version may have left it
    back.write()  # with nothing to add
    assert (tmp_path / f"rows.{Results(path, other, resume=False).hash}.json").read_text() == "mine"
    assert [row["dim"] for row in Stored(path)] == [4] * 3 and len(list(tmp_path.iterdir())) == 3
    assert Results(path, config).back is None and Results(path, config, resume=False).rows == []


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_rows_name_the_processor_and_what_torch_makes_of_it(capability):
    code = "from snnk.experiments.lab.records import environment as e; print(e()['capability'], bool(e()['processor']))"
    options = {"env": {**os.environ, "ATEN_CPU_CAPABILITY": capability}, "capture_output": True, "text": True}
    assert subprocess.run([sys.executable, "-c", code], **options).stdout.split() == [capability.upper(), "True"]


def test_rows_of_a_file_without_environments(tmp_path):
    """Older files have one environment, which is that of all rows."""
    results = Results(tmp_path / "rows.json", estimate.Config(in_features=4))
    results.add({"seed": 0})
    stored = json.loads(results.path.read_text())
    del stored["environments"], stored["rows"][0]["environment"]
    results.path.write_text(json.dumps(stored))
    (row,) = Stored(results.path)
    assert Stored(results.path).environments == {row["environment"]: stored["environment"]}


def test_a_full_disk_leaves_the_rows(tmp_path, monkeypatch):
    config = estimate.Config(in_features=4)
    results = Results(tmp_path / "rows.json", config)
    results.add({"seed": 0})

    def fail(self, text, encoding):
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "write_text", fail)
        results.add({"seed": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["rows.json"]
    assert [row["seed"] for row in Results(tmp_path / "rows.json", config)] == [0]
