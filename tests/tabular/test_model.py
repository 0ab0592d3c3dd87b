"""Predictions, and the files of a model, which load strictly."""

import json
import re
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from snnk.tabular import FitConfig, TableModel, fit
from snnk.tabular.source import Table

from helpers.tables import CONFIG, make_table, predictions


def test_prediction_tables(parquet, tmp_path):
    """They may have another order of columns, unseen categories, and missing targets and inputs."""
    rng = np.random.default_rng(0)
    a, kind = rng.normal(size=1000), rng.choice(["x", "z"], 1000)
    y = (a > 0).astype(float)
    pq.write_table(pa.table({"a": a, "k": kind, "y": y}), tmp_path / "t.parquet")
    fit(tmp_path / "t.parquet", tmp_path / "m", FitConfig("y", 64))
    model = TableModel.load(tmp_path / "m")
    y[::2], kind[:30] = np.nan, "new"
    pq.write_table(pa.table({"y": y, "k": kind, "a": a}), tmp_path / "p.parquet")
    found = model.write_predictions(tmp_path / "p.parquet", tmp_path / "p.csv")
    assert found.rows == 1000 and found.score["accuracy"] > 0.95 and found.unseen == {"k": 30} and not found.drift
    a[5] = np.nan
    pq.write_table(pa.table({"k": kind, "a": a}), tmp_path / "q.parquet")
    with pytest.raises(ValueError, match=r"a: 1\), the first at row 5"):
        model.write_predictions(tmp_path / "q.parquet", tmp_path / "q.csv")
    found = model.write_predictions(tmp_path / "q.parquet", tmp_path / "q.csv", missing="drop")
    assert found.rows == 999 and found.score == {} and (tmp_path / "q.csv").read_text().split("\n")[6] == ",,"
    with pytest.raises(ValueError, match=r"there is no folder .*no for p.csv"):
        model.write_predictions(parquet, tmp_path / "no" / "p.csv")


@pytest.mark.parametrize("count", [400, 10_000])
def test_rare_ones_are_no_drift_until_there_are_too_many(tmp_path, count):
    """A column of 1.3 % ones, each 8.8 standard deviations from the mean, as in the training; and twice as many."""
    rng = np.random.default_rng(0)

    def write(name, ones):
        x, rare = rng.normal(size=count), (np.arange(count) < ones).astype(float)
        pq.write_table(pa.table({"x": x, "rare": rng.permutation(rare), "y": x}), tmp_path / name)
        return tmp_path / name

    fit(write("t.parquet", round(0.013 * count)), tmp_path / "m", FitConfig("y", 32))
    model = TableModel.load(tmp_path / "m")
    same = model.write_predictions(write("same.parquet", round(0.0135 * count)), tmp_path / "p.csv")
    more = model.write_predictions(write("more.parquet", round(0.04 * count)), tmp_path / "q.csv")
    assert same.drift == [] and [found.column for found in more.drift] == ["rare"]
    assert re.search(r"rare: the mean is .*; 4 % of the values are over 8 of these away", str(more.drift[0]))


def test_a_table_without_rows_has_no_predictions(parquet, tmp_path):
    fit(parquet, tmp_path / "m", CONFIG)
    pq.write_table(make_table()[:0], tmp_path / "none.parquet")
    found = TableModel.load(tmp_path / "m").write_predictions(tmp_path / "none.parquet", tmp_path / "p.csv")
    assert found == (0, {}, {}, []) and (tmp_path / "p.csv").read_text().split() == ["predicted_y"]


def test_a_prediction_per_line(parquet, tmp_path):
    fit(parquet, tmp_path / "m", CONFIG)
    model = TableModel.load(tmp_path / "m")
    found = model.write_predictions(parquet, tmp_path / "p.csv")
    lines = (tmp_path / "p.csv").read_text().split()
    y, written = make_table()["y"].to_numpy(), np.array([float(v) for v in lines[1:]])
    assert lines[0] == "predicted_y" and found.rows == 3000 and found.unseen == {}
    assert found.score["R2"] == pytest.approx(1 - np.square(written - y).mean() / y.var(), rel=1e-9)
    pq.write_table(make_table().drop_columns(["x1", "y"]), tmp_path / "less.parquet")
    with pytest.raises(ValueError, match="no column 'x1'"):
        model.write_predictions(tmp_path / "less.parquet", tmp_path / "q.csv")
    with pytest.raises(ValueError, match="unknown policy for missing values 'zero'"):
        model.write_predictions(parquet, tmp_path / "q.csv", missing="zero")
    assert not (tmp_path / "q.csv").exists()


def test_r2_is_about_the_mean_of_the_rows_predicted(parquet, tmp_path):
    """The mean of these rows differs from that of the rows in training."""
    fit(parquet, tmp_path / "m", CONFIG)
    some = make_table().filter(pa.compute.greater(make_table()["y"], 1.0))
    pq.write_table(some, tmp_path / "some.parquet")
    score = TableModel.load(tmp_path / "m").write_predictions(tmp_path / "some.parquet", tmp_path / "p.csv").score
    y, found = some["y"].to_numpy(), predictions(tmp_path / "m", tmp_path / "some.parquet")
    assert score["R2"] == pytest.approx(1 - np.square(found - y).sum() / np.square(y - y.mean()).sum(), rel=1e-9)


def test_the_map_is_made_for_the_norm_of_the_rows(parquet, tmp_path):
    """A number has mean square 1, and a one-hot category has length 1."""
    fit(parquet, tmp_path / "m", CONFIG)
    model, table = TableModel.load(tmp_path / "m"), Table(parquet)
    x = torch.cat([model.columns.encode(batch, label)[0] for label, batches in table.blocks() for batch in batches])
    assert float(model.feature_map.x_norm) ** 2 == pytest.approx(float(x.square().sum(1).mean()), rel=1e-4)


def test_a_model_is_never_overwritten_and_loads_strictly(parquet, tmp_path):
    out = tmp_path / "m"
    fit(parquet, out, CONFIG)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="holds a model already"):
        fit(parquet, out, CONFIG)
    assert (out / "model.safetensors").read_bytes() == before
    stored = json.loads((out / "model.json").read_text())
    stored["config"]["num_features"] = 32
    (out / "model.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"does not fit model.json: .*weight"):
        TableModel.load(out)
    with pytest.raises(ValueError, match="holds no model of snnk fit"):
        TableModel.load(tmp_path)


def leaves(value, path=()):
    """The paths of all values in JSON, including containers."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def test_wrong_types_at_every_key_of_a_model(parquet, tmp_path):
    """Each is refused with the name of the file, or does not change the outputs."""
    out, x = tmp_path / "m", torch.linspace(-1, 1, 7)[None]
    fit(parquet, out, CONFIG)
    whole = (out / "model.json").read_text()
    expected, tried = TableModel.load(out).outputs(x), 0
    deep = {"lam", "seed", "task", "missing", "drop", "bandwidth", "block_dtype", "target", "name", "mean", "scale"}
    for path in leaves(json.loads(whole)):
        for wrong in (None, [], {}, "x", -1, True, float("nan"), float("inf"), 10**400, 10**7, [[]]):
            stored = json.loads(whole)
            parent = stored
            for key in path[:-1]:
                parent = parent[key]
            if path:
                parent[path[-1]] = wrong
            else:
                stored = wrong
            (out / "model.json").write_text(json.dumps(stored))
            if stored == json.loads(whole):
                continue
            tried += 1
            try:
                found = TableModel.load(out).outputs(x)
            except ValueError as error:
                assert str(out) in str(error), error
                continue
            assert path[-1] in deep or path[0] == "quality" or isinstance(wrong, str), (path, wrong)
            if path[-1] != "scale":  # of the target, in which the outputs are
                assert torch.equal(found, expected), (path, wrong)
    assert tried > 500
    for content in ("", "{", "[" * 100_000, '{"format": 1}', "\udcff"):
        (out / "model.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match=r"model.json is not"):
            TableModel.load(out)


@pytest.mark.parametrize("change", ["half", "empty", "gone", "nan", "inf", "dtype", "extra", "missing"])
@pytest.mark.once
def test_damaged_weights_are_named(change, parquet, tmp_path):
    out = tmp_path / "m"
    fit(parquet, out, CONFIG)
    path = out / "model.safetensors"
    tensors = load_file(path)
    if change in ("nan", "inf"):
        tensors["weight"][0, 3] = float(change)
    elif change == "dtype":
        tensors["weight"] = tensors["weight"].float()
    elif change == "extra":
        tensors["more"] = torch.zeros(3)
    elif change == "missing":
        del tensors["feature_map.center"]
    save_file(tensors, path)
    if change in ("half", "empty"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if change == "half" else 0])
    elif change == "gone":
        path.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=r"model.safetensors"):
        TableModel.load(out)


def test_sizes_are_compared_before_anything_is_drawn(parquet, tmp_path, run):
    """Both fail at once; drawing the features would take much longer."""
    out = tmp_path / "m"
    fit(parquet, out, CONFIG)
    stored = json.loads((out / "model.json").read_text())
    stored["config"]["num_features"] = 10**7
    (out / "model.json").write_text(json.dumps(stored))
    began = time.process_time()
    with pytest.raises(ValueError, match=r"model.safetensors does not fit model.json: feature_map.projection"):
        TableModel.load(out)
    errors = [
        run("fit", parquet, "--target", "y", "--num-features", many, "--out", tmp_path / "many")[2]
        for many in (10**9, 10**12, 10**30)
    ]
    assert "sums of 1000000000 features need 8,000,000,032 GB" in errors[0]
    assert [error.count("\n") for error in errors] == [1, 1, 1]
    assert time.process_time() - began < 3 and not (tmp_path / "many").exists()
