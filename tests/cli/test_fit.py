"""`snnk fit` and `snnk merge` on the terminal."""

import json
import re
import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from snnk.tabular import TableModel

from helpers.tables import make_table, weights

RANDOM = (
    "--feature-map",
    "random-fourier",
    "--bandwidth",
    1,
    "--num-features",
    32,
    "--lam",
    0.01,
    "--block-dtype",
    "float64",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A table, and its parts in files of their own; file names are relative to this folder."""
    monkeypatch.chdir(tmp_path)
    table = make_table(600)
    pq.write_table(table, "all.parquet", row_group_size=100)
    for i in range(3):
        pq.write_table(table.slice(200 * i, 200), f"day-{i}.parquet")
    return tmp_path


def test_figures_importances_and_files_are_shown(run, folder):
    code, out, err = run("fit", "all.parquet", "--target", "y", *RANDOM, "--out", "model")
    quality = TableModel.load("model").quality
    assert code == 0, err
    for name, key in (("R2", "r2"), ("RMSE", "root_mean_squared_error"), ("held-out rows", "rows")):
        assert re.search(rf"{name} │ +{re.escape(f'{quality[key]:.4g}')} │", out), name
    columns = [row["column"] for row in quality["importances"]["columns"]]
    shown = [re.search(rf"│ +{name} │ +-?[0-9.e-]+ │", out) for name in columns]
    assert len(columns) == 5 and all(shown) and [m.start() for m in shown] == sorted(m.start() for m in shown)
    assert "wrote model/model.safetensors, model/model.json, model/report.json, model/report.html" in out


def test_classes_and_their_imbalance(run, folder):
    rare = ["yes" if i % 200 == 0 else "no" for i in range(600)]
    pq.write_table(make_table(600).append_column("rare", pa.array(rare)), "rare.parquet")
    code, out, err = run("fit", "rare.parquet", "--target", "rare", *RANDOM, "--out", "model")
    quality = TableModel.load("model").quality
    assert code == 0, err
    for name, key in (("accuracy", "accuracy"), ("log-loss", "log_loss")):
        assert re.search(rf"│ +{name} │ +{re.escape(f'{quality[key]:.4g}')} │", out), name
    assert "AUC" in out and quality["warnings"]
    for warning in quality["warnings"]:
        assert f"warning: {warning}\n" in out


def test_the_defaults_learn_features(run, folder):
    code, _, err = run("fit", "day-0.parquet", "--target", "y", "--num-features", 16, "--out", "model")
    assert code == 0, err
    report = json.loads((folder / "model" / "report.json").read_text())
    assert report["config"]["feature_map"] == "learned" and report["config"]["lam"] == "gcv"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lam", "small"), "--lam must be a number or gcv; got 'small'"),
        (("--bandwidth", "wide"), "--bandwidth must be a number or auto; got 'wide'"),
        (("--feature-map", "learnt"), "did you mean 'learned'"),
        (("--like", "start.stats"), "--like is for the sums of a part: add --stats-only"),
        (("--start-only", "--stats-only"), "--start-only writes no sums"),
    ],
)
def test_bad_options(options, message, run, folder):
    code, _, err = run("fit", "all.parquet", "--target", "y", *options, "--out", "model")
    assert code == 2 and message in err and not (folder / "model").exists()


def follow(run, line, **words):
    """Run a command line that was printed, with words in place of its capitals."""
    for name, word in words.items():
        line = re.sub(rf"\b{name}\b", word, line)
    program, *args = shlex.split(line)
    assert program == "snnk"
    code, out, err = run(*args)
    assert code == 0, err
    return out


def test_parts_are_merged_by_following_the_messages(run, folder):
    """The model is that of one fit."""
    assert run("fit", "all.parquet", "--target", "y", *RANDOM, "--out", "whole")[0] == 0
    _, out, _ = run("fit", "all.parquet", "--target", "y", *RANDOM, "--start-only", "--out", "start.stats")
    line = re.search(r"next, for each part: (snnk fit .*)\n", out)[1]
    for i in range(3):
        out = follow(run, line.replace("PART.stats", f"day-{i}.stats"), PART=f"day-{i}.parquet")
        assert "sums of 200 rows" in out
    line = re.search(r"at the end: (snnk merge .*)\n", out)[1]
    out = follow(run, line.replace("PART.stats ...", "day-2.stats start.stats day-0.stats day-1.stats"), MODEL="model")
    assert "wrote model/model.safetensors" in out and re.search(r"rows │ +600 │", out)
    assert torch.allclose(weights("model"), weights("whole"), rtol=0, atol=1e-10)


def test_the_first_part_can_be_the_start(run, folder):
    _, out, _ = run("fit", "day-0.parquet", "--target", "y", *RANDOM, "--stats-only", "--out", "day-0.stats")
    line = re.search(r"for other parts: (snnk fit .*)\n", out)[1]
    follow(run, line.replace("PART.stats", "day-1.stats"), PART="day-1.parquet")
    code, out, err = run("merge", "day-0.stats", "day-1.stats", "--out", "model")
    assert code == 0 and re.search(r"rows │ +400 │", out), err


def test_settings_beside_like_are_refused(run, folder):
    """Also if they are the defaults, as the start may have others."""
    run("fit", "all.parquet", "--target", "y", *RANDOM, "--start-only", "--out", "start.stats")
    part = ("fit", "day-0.parquet", "--like", "start.stats", "--stats-only", "--out", "a.stats")
    code, _, err = run(*part, "--target", "y", "--num-features", 512, "--seed", 0)
    assert code == 2 and "start.stats has its own settings; leave out --num-features, --seed" in err
    code, _, err = run(*part, "--target", "x0")
    assert code == 2 and "start.stats is for the target 'y'; got --target 'x0'" in err
    assert not (folder / "a.stats").exists()


def test_nothing_is_overwritten_or_counted_twice(run, folder):
    run("fit", "day-0.parquet", "--target", "y", *RANDOM, "--stats-only", "--out", "day-0.stats")
    before = (folder / "day-0.stats").read_bytes()
    for options in (("--stats-only",), ("--start-only",)):
        code, _, err = run("fit", "day-1.parquet", "--target", "y", *options, "--out", "day-0.stats")
        assert code == 2 and "exists already" in err
    assert (folder / "day-0.stats").read_bytes() == before
    code, _, err = run("merge", "day-0.stats", "day-0.stats", "--out", "model")
    assert code == 2 and "day-0.stats cannot be added: 200 of its rows are counted already" in err
    assert run("merge", "day-0.stats", "--out", "model")[0] == 0
    code, _, err = run("merge", "day-0.stats", "--out", "model")
    assert code == 2 and "exists already" in err
    (folder / "cut.stats").write_bytes(before[:-8])
    code, _, err = run("merge", "day-0.stats", "cut.stats", "--out", "other")
    assert code == 2 and "cut.stats is not a whole safetensors file" in err and not (folder / "other").exists()


def test_values_that_the_start_does_not_have_are_shown(run, folder):
    table = make_table(600)
    pq.write_table(table.filter(pa.compute.not_equal(table["kind"], "red")), "sample.parquet")
    run("fit", "sample.parquet", "--target", "y", *RANDOM, "--start-only", "--out", "start.stats")
    args = ("fit", "all.parquet", "--target", "y", "--like", "start.stats", "--stats-only", "--out", "all.stats")
    _, out, _ = run(*args)
    number = table["kind"].to_pylist().count("red")
    said = f"warning: {number} values of 'kind' are not among those of the start and count as no category"
    assert said in out
    _, out, _ = run("merge", "all.stats", "--out", "model")
    assert f"warning: {number} values of 'kind' are not among those of the start" in out


def test_parts_are_no_work_for_torchrun(run, folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("fit", "all.parquet", "--target", "y", "--stats-only", "--out", "a.stats")
    assert code == 2 and "leave torchrun out, and run one per part" in err


def test_the_message_on_missing_values_names_the_option(run, folder):
    """It is followed, once for each of the two values that it names."""
    (folder / "gaps.csv").write_text("a,y\n" + "".join(f"{'' if i == 5 else i},{i % 7}.5\n" for i in range(60)))
    code, _, err = run("fit", "gaps.csv", "--target", "y", *RANDOM, "--out", "model")
    assert code == 2 and "the first at row 5 of gaps.csv[0], column 'a'" in err and "--missing" in err
    for policy, rows in (("drop", 59), ("mean", 60)):
        assert f"'{policy}'" in err
        code, _, err_of = run("fit", "gaps.csv", "--target", "y", *RANDOM, "--missing", policy, "--out", policy)
        assert code == 0, err_of
        assert json.loads((folder / policy / "report.json").read_text())["rows"] == rows


def test_a_file_of_another_format_is_named_with_what_to_do(run, folder):
    (folder / "rows.jsonl").write_text('{"a": 1, "y": 2}\n')
    code, _, err = run("fit", "rows.jsonl", "--target", "y", "--out", "model")
    assert code == 2 and "rows.jsonl is .jsonl; expected files of one format: .parquet" in err and "convert it" in err
