import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import snnk
from snnk.cli import main
from snnk.experiments import load, names
from snnk.experiments.lab import estimate, records
from snnk.experiments.lab.data import NO_DATA
from snnk.experiments.lab.records import Results, Stored


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_version_and_help(capsys):
    assert run(capsys, "--version")[:2] == (0, f"snnk {snnk.__version__}\n")
    for args in ([], ["--help"]):
        code, out, _ = run(capsys, *args)
        assert code == 0 and all(command in out for command in ("estimate", "reproduce", "demo"))
    assert "Example: snnk estimate" in run(capsys, "estimate", "--help")[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["estimate", "--bogus"], "--bogus"),
        (["estimate", "--dim", "x"], "--dim"),
        (["estimate", "--dim", "0"], "--dim must be a positive integer"),
        (["estimate", "--activation", "gelo"], "did you mean 'gelu'"),
        (["estimate", "--features", "3"], "must be even"),
        (["estimate", "--features", "a,4"], "with commas"),
        (["estimate", "--x-norm", "-1"], "positive number"),
        (["nothing"], "nothing"),
        (["reproduce", "pointwize"], "did you mean 'pointwise'"),
        (["reproduce"], "name an experiment"),
    ],
)
def test_bad_arguments_end_in_one_line(capsys, args, message):
    code, out, err = run(capsys, *args)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("snnk: ") and message in err


def test_estimate_writes_rows_and_picture(capsys, tmp_path):
    args = ["estimate", "--dim", "8", "-m", "16,64", "--draws", "3", "--activation", "tanh", "--out", str(tmp_path)]
    code, out, _ = run(capsys, *args)
    assert code == 0 and "predicted" in out
    stored = json.loads((tmp_path / "estimate.json").read_text())
    assert [row["num_features"] for row in stored["rows"]] == [16, 64]
    assert stored["config"]["activation"] == "tanh" and stored["environment"]["snnk"] == snnk.__version__
    assert all(row["urf"] > 0 and row["seed"] == 0 for row in stored["rows"])
    assert (tmp_path / "estimate.png").read_bytes()[:4] == b"\x89PNG"
    assert {path.name for path in tmp_path.iterdir()} == {"estimate.json", "estimate.png"}


def test_reproduce_pointwise(capsys, tmp_path):
    code, out, _ = run(capsys, "reproduce", "pointwise", "--quick", "--out", str(tmp_path))
    assert code == 0 and "claims" in out
    rows = json.loads((tmp_path / "pointwise.json").read_text())["rows"]
    assert len(rows) == load("pointwise").total(load("pointwise").QUICK)
    mean = {(r["layer"], r["estimator"], r["projections"]): r["mean"] for r in rows}
    assert mean["sine", "ours", 128] < mean["sine", "paper", 128] < mean["sine", "paper", 2]
    assert mean["sine", "ours, calibrated", 32] < mean["sine", "ours", 32]
    assert mean["arc-cosine", "paper", 32] < mean["arc-cosine", "paper", 2]


def test_rows_that_are_there_are_told_of(capsys, tmp_path, monkeypatch):
    def stop(config, results, source):
        raise ValueError("stopped")

    module = load("pointwise")
    monkeypatch.setattr(module, "run", stop)
    for config, line in ((module.QUICK, "1 rows are there from commit abc"), (module.Config(), "it goes to")):
        Results(tmp_path / "pointwise.json", config, resume=False, source=NO_DATA).add({"commit": "abc"})
        code, out, err = run(capsys, "reproduce", "pointwise", "--quick", "--out", str(tmp_path))
        assert code == 2 and "stopped" in err and line in out
    assert len(list(tmp_path.iterdir())) == 1  # moved only when a row comes


def test_reproduce_refuses_at_once_what_would_fail_later(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = run(capsys, "reproduce", "mnist", "--quick", "--out", str(tmp_path / "file" / "x"))
    assert code == 2 and f"{tmp_path / 'file'} is no folder that can be written to" in err
    code, _, err = run(capsys, "reproduce", "mnist", "--all", "--quick", "--out", str(tmp_path))
    assert code == 2 and "got 'mnist' and --all" in err


def test_ctrl_c_says_how_to_go_on(capsys, tmp_path, monkeypatch):
    def stop(config, results, source):
        raise KeyboardInterrupt

    monkeypatch.setattr(load("pointwise"), "run", stop)
    code, _, err = run(capsys, "reproduce", "pointwise", "--quick", "--out", str(tmp_path))
    assert code == 130 and "interrupted; the same command goes on where it was" in err


def test_reproduce_list(capsys):
    code, out, _ = run(capsys, "reproduce", "--list")
    assert code == 0 and all(name in out for name in names())


def test_unwritable_folder_and_foreign_file(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = run(
        capsys, "estimate", "--dim", "4", "-m", "4", "--draws", "1", "--out", str(tmp_path / "file" / "x")
    )
    assert code == 2 and err.count("\n") == 1 and (tmp_path / "file").read_text() == "mine"
    for foreign in ("{}", '{"config": [], "environment": {}, "rows": []}'):
        (tmp_path / "estimate.json").write_text(foreign)
        code, _, err = run(capsys, "estimate", "--dim", "4", "-m", "4", "--draws", "1", "--out", str(tmp_path))
        assert code == 2 and "not a result file of snnk" in err
        assert (tmp_path / "estimate.json").read_text() == foreign


def test_rows_are_resumed_for_the_same_configuration_only(tmp_path):
    config = estimate.Config(dim=4, features=(4, 8), draws=1)
    path = tmp_path / "rows.json"
    rows = estimate.run(config, Results(path, config))
    next(rows)  # stopped after the first
    stored = json.loads(path.read_text())
    stored["rows"][0]["urf"] = -1.0
    path.write_text(json.dumps(stored))
    again = list(estimate.run(config, Results(path, config)))
    assert again[0]["urf"] == -1.0 and again[1]["urf"] > 0
    other = estimate.Config(dim=4, features=(4, 8), draws=2)
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


def test_rows_that_were_put_aside_come_back(tmp_path):
    """Two configurations that take turns in one file, as a run and its --quick form do, lose nothing."""
    config, other = estimate.Config(dim=4), estimate.Config(dim=5)
    path = tmp_path / "rows.json"
    for seed in range(3):
        for own in (config, other):
            results = Results(path, own)
            assert [row["seed"] for row in results] == list(range(seed))
            results.add({"seed": seed, "dim": own.dim})
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
    """As older ones are: all rows have that of the file."""
    results = Results(tmp_path / "rows.json", estimate.Config(dim=4))
    results.add({"seed": 0})
    stored = json.loads(results.path.read_text())
    del stored["environments"], stored["rows"][0]["environment"]
    results.path.write_text(json.dumps(stored))
    (row,) = Stored(results.path)
    assert Stored(results.path).environments == {row["environment"]: stored["environment"]}


def test_a_full_disk_leaves_the_rows(tmp_path, monkeypatch):
    config = estimate.Config(dim=4)
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
