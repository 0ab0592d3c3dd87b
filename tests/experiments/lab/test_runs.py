"""`snnk reproduce` for one experiment and for all."""

import json
from dataclasses import replace

import pytest

from snnk.experiments import uci


def test_seeds_where_there_are_none(run, tmp_path):
    code, _, err = run("reproduce", "pointwise", "--seeds", "3", "--quick", "--out", str(tmp_path))
    assert code == 2 and "takes no --seeds" in err


@pytest.fixture
def two(monkeypatch):
    """Two experiments: one that needs data and takes seeds, and after it one with neither."""
    chosen = ["uci", "trainable-parameters"]
    monkeypatch.setattr("snnk.experiments.lab.runs.names", lambda: chosen)
    monkeypatch.setattr(uci, "QUICK", replace(uci.QUICK, widths=(8,), rows=300))


def test_all_with_seeds(run, tmp_path, two):
    code, out, err = run("reproduce", "--all", "--quick", "--seeds", "2", "--out", str(tmp_path))
    assert (code, err) == (0, "")
    assert "--seeds 2 does not apply to trainable-parameters: " in out
    stored = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("uci", "trainable-parameters")}
    assert {row["seed"] for row in stored["uci"]["rows"]} == {0, 1}
    assert stored["uci"]["source"] == {"model": "", "data": "made by --quick"}
    assert stored["trainable-parameters"]["source"] == {"model": "", "data": "none"}


def test_all_without_data_runs_what_it_can(run, tmp_path, two):
    args = ["--all", "--quick", "--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    code, out, err = run("reproduce", *args)
    assert code == 2 and err == "snnk: 1 of 2 were left out, for the reasons above: uci\n"
    assert "uci is left out: covertype: no covtype.parquet" in out and "archive.ics.uci.edu" in out
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"trainable-parameters"}
    stored = json.loads((tmp_path / "out" / "trainable-parameters.json").read_text())
    assert stored["source"] == {"model": "", "data": "none"}  # whatever --data-dir says


def test_all_stops_where_nothing_can_be_written(run, tmp_path, two):
    (tmp_path / "file").write_text("mine")
    code, out, err = run("reproduce", "--all", "--quick", "--out", str(tmp_path / "file" / "out"))
    assert code == 2 and "left out" not in out + err and str(tmp_path / "file") in err


def test_all_takes_no_model(run, tmp_path):
    code, _, err = run("reproduce", "--all", "--quick", "--model", "bert", "--out", str(tmp_path))
    assert code == 2 and "--all takes no --model" in err and not list(tmp_path.iterdir())
