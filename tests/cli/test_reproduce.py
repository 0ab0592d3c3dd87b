import json

from snnk.experiments import load, names
from snnk.experiments.lab.data import NO_DATA
from snnk.experiments.lab.records import Results


def test_reproduce_pointwise(run, tmp_path):
    code, out, _ = run("reproduce", "pointwise", "--quick", "--out", tmp_path)
    assert code == 0 and "claims" in out
    rows = json.loads((tmp_path / "pointwise.json").read_text())["rows"]
    assert len(rows) == load("pointwise").total(load("pointwise").QUICK)
    mean = {(r["layer"], r["estimator"], r["projections"]): r["mean"] for r in rows}
    assert mean["sine", "ours", 128] < mean["sine", "paper", 128] < mean["sine", "paper", 2]
    assert mean["sine", "ours, calibrated", 32] < mean["sine", "ours", 32]
    assert mean["arc-cosine", "paper", 32] < mean["arc-cosine", "paper", 2]


def test_rows_that_are_there_are_reported(run, tmp_path, monkeypatch):
    def stop(config, results, source):
        raise ValueError("stopped")

    module = load("pointwise")
    monkeypatch.setattr(module, "run", stop)
    for config, line in ((module.QUICK, "1 rows are there from commit abc"), (module.Config(), "it goes to")):
        Results(tmp_path / "pointwise.json", config, resume=False, source=NO_DATA).add({"commit": "abc"})
        code, out, err = run("reproduce", "pointwise", "--quick", "--out", tmp_path)
        assert code == 2 and "stopped" in err and line in out
    assert len(list(tmp_path.iterdir())) == 1  # moved only when a row comes


def test_reproduce_refuses_at_once_what_would_fail_later(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = run("reproduce", "mnist", "--quick", "--out", tmp_path / "file" / "x")
    assert code == 2 and f"{tmp_path / 'file'} is no folder that can be written to" in err
    for options in (["estimators"], ["--all"]):
        code, _, err = run("reproduce", *options, "--quick", "--out", tmp_path / "file")
        assert code == 2 and f"the output {tmp_path / 'file'} exists and is not a folder; choose" in err
    code, _, err = run("reproduce", "mnist", "--all", "--quick", "--out", tmp_path)
    assert code == 2 and "got 'mnist' and --all" in err


def test_ctrl_c_says_how_to_go_on(run, tmp_path, monkeypatch):
    def stop(config, results, source):
        raise KeyboardInterrupt

    monkeypatch.setattr(load("pointwise"), "run", stop)
    code, _, err = run("reproduce", "pointwise", "--quick", "--out", tmp_path)
    assert code == 130 and "interrupted; the same command continues with the rows that are missing" in err


def test_reproduce_list(run):
    code, out, _ = run("reproduce", "--list")
    assert code == 0 and all(name in out for name in names())


def test_some_tasks_and_methods(run, tmp_path, monkeypatch):
    seen = []

    def stop(config, results, source):
        seen.append((config.tasks, config.methods))
        raise ValueError("stopped")

    adapters = load("adapters")
    monkeypatch.setattr(adapters, "run", stop)
    options = ["--quick", "--out", tmp_path]
    run("reproduce", "adapters", "--methods", "lora; snnk", *options)
    run("reproduce", "adapters", "--tasks", "cola", *options)
    assert seen == [(("cola",), ("lora", "snnk")), (("cola",), adapters.QUICK.methods)]
    for wrong, message in (
        (["adapters", "--methods", "lora; lola"], "--methods takes some of snnk; snnk-relu; lora; houlsby; got lola"),
        (["adapters", "--tasks", ";"], "--tasks takes some of cola; got none"),
        (["pointwise", "--tasks", "cola"], "pointwise has no tasks to choose from; leave --tasks out"),
        (["--all", "--tasks", "cola"], "--all takes no --tasks and no --methods; got cola"),
    ):
        code, _, err = run("reproduce", *wrong, *options)
        assert code == 2 and message in err
    assert len(seen) == 2
