"""One pass over tables: the same numbers whatever the format, the number of workers, or the moment of a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from snnk import ArcCosine
from snnk.models import FitConfig, TableModel
from snnk.ridge import RidgeStats
from snnk.stream import accumulate, fit

CONFIG = FitConfig("y", 64, block_dtype="float64", lam=1e-2)


def make_table(rows=3000, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(5, 3, size=(rows, 3))
    kind = rng.choice(["red", "green", "blue"], rows)
    y = np.sin(x[:, 0] / 3) + 0.3 * x[:, 1] * (kind == "red") + 0.01 * rng.normal(size=rows)
    columns = {f"x{i}": x[:, i] for i in range(3)}
    return pa.table({**columns, "count": rng.integers(0, 9, rows), "kind": kind, "y": y})


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(make_table(), path, row_group_size=400)
    return path


def weights(folder):
    model = TableModel.load(folder)
    return torch.cat([model.weight, model.bias[:, None]], 1)


def test_fit_equals_ridge_on_the_whole_table(parquet, tmp_path):
    """Against features and a solve written out by hand."""
    report = fit(parquet, tmp_path / "m", CONFIG)
    model, t = TableModel.load(tmp_path / "m"), make_table()
    numbers = np.stack([t[c].to_numpy() for c in ("x0", "x1", "x2", "count")], 1)
    kinds = np.array(["blue", "green", "red"])
    onehot = (t["kind"].to_numpy()[:, None] == kinds).astype(float)
    x = np.concatenate([(numbers - numbers.mean(0)) / numbers.std(0), onehot], 1)
    phi = model.feature_map.phi(torch.from_numpy(x).float()).double().numpy()
    y = t["y"].to_numpy()
    centred = phi - phi.mean(0)
    a = np.linalg.solve(centred.T @ centred + 1e-2 * np.eye(64), centred.T @ (y - y.mean()))
    np.testing.assert_allclose(model.weight[0], a, atol=1e-3)
    assert model.columns.names == ["x0", "x1", "x2", "count", "kind=blue", "kind=green", "kind=red"]
    assert report["rows"] == 3000 and report["blocks"] == 8 and report["task"] == "regression"
    predictions = np.concatenate([p for p, _ in model.predict(parquet)])
    assert np.mean((predictions - y) ** 2) < 0.2 * y.var()
    assert not (tmp_path / "m" / ".checkpoint").exists()


def test_every_format_gives_the_same_model(parquet, tmp_path):
    t = make_table()
    pa.csv.write_csv(t, tmp_path / "data.csv")
    pa.feather.write_feather(t, tmp_path / "data.feather")
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    pq.write_table(t.slice(0, 1000), folder / "a.parquet")
    pq.write_table(t.slice(1000), folder / "b.parquet")
    fit(parquet, tmp_path / "m", CONFIG)
    expected = weights(tmp_path / "m")
    for i, source in enumerate((tmp_path / "data.csv", tmp_path / "data.feather", tmp_path / "folder")):
        fit(source, tmp_path / f"m{i}", CONFIG)
        assert torch.allclose(weights(tmp_path / f"m{i}"), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("labels", [["no", "yes"], [1, 2], [True, False]])
def test_classes(labels, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 2))
    truth = (x[:, 0] * x[:, 1] > 0).astype(int)
    y = [labels[i] for i in truth]
    pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "y": y}), tmp_path / "t.parquet")
    report = fit(tmp_path / "t.parquet", tmp_path / "m", FitConfig("y", 128, feature_map="relu"))
    assert report["task"] == "classification" and report["score"] > 0
    model = TableModel.load(tmp_path / "m")
    found = [p for batch, _ in model.predict(tmp_path / "t.parquet") for p in batch]
    expected = [str(int(v)) if not isinstance(v, str) else v for v in y]
    assert np.mean([a == b for a, b in zip(found, expected, strict=True)]) > 0.9


def test_dataloader(tmp_path):
    x, y = torch.randn(500, 4), torch.randn(500, 2)
    fm = ArcCosine(4, 32)
    stats = accumulate(fm, DataLoader(TensorDataset(x, y), batch_size=64))
    whole = RidgeStats(32, 2).update(fm.phi(x), y)
    assert torch.allclose(stats.solve(0.1).weight, whole.solve(0.1).weight, atol=1e-8)
    with pytest.raises(ValueError, match="no batches"):
        accumulate(fm, [])


def run_fit(source, out, *args, workers=1, wait=True):
    """The command in processes of its own."""
    launch = [sys.executable, "-m", "snnk.cli"]
    if workers > 1:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={workers}",
            "-m",
            "snnk.cli",
        ]
    options = ["fit", str(source), "--target", "y", "--features", "64", "--lam", "0.01", "--double", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*launch, *options, *args], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if wait:
        output = process.communicate(timeout=300)[0].decode()
        assert process.returncode == 0, output
    return process


def test_two_workers_give_the_result_of_one(parquet, tmp_path):
    fit(parquet, tmp_path / "one", CONFIG)
    run_fit(parquet, tmp_path / "two", workers=2)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert (one - two).abs().max() <= 1e-10 * one.abs().max()
    assert json.loads((tmp_path / "two" / "report.json").read_text())["workers"] == 2


def test_killed_and_started_again(tmp_path):
    """SIGKILL at three different moments; then the answer of an undisturbed run, every block counted once."""
    path = tmp_path / "data.parquet"
    pq.write_table(make_table(60000), path, row_group_size=200)
    fit(path, tmp_path / "calm", CONFIG)
    out, counted = tmp_path / "killed", []
    for pause in (0.3, 0.1, 0.4):
        process = run_fit(path, out, "--checkpoint-seconds", "0", wait=False)
        parts = len(list(out.glob(".checkpoint/part-*")))
        while process.poll() is None and len(list(out.glob(".checkpoint/part-*"))) <= parts:
            time.sleep(0.02)  # until it has counted something of its own
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if (out / "model.json").exists():
            break
        counted.append(
            sum(len(json.loads(RidgeStats.load(p).note)) for p in out.glob(".checkpoint/part-*.safetensors"))
        )
    assert counted and counted == sorted(counted) and 0 < counted[0] < 300
    if not (out / "model.json").exists():
        run_fit(path, out)
    assert json.loads((out / "report.json").read_text())["rows"] == 60000
    calm, killed = weights(tmp_path / "calm"), weights(out)
    assert (calm - killed).abs().max() <= 1e-10 * calm.abs().max()


def test_checkpoint_of_another_configuration(parquet, tmp_path):
    """Refused once rows are counted, also for a table rewritten in place; before that it is begun anew."""

    def stop(what, rows, total):
        if rows > when:
            raise KeyboardInterrupt

    def interrupted(config):
        with pytest.raises(KeyboardInterrupt):
            fit(parquet, tmp_path / "m", config, checkpoint_seconds=0, progress=stop)

    when = -1
    interrupted(CONFIG)
    when = 1000
    interrupted(replace(CONFIG, seed=1))
    for config in (replace(CONFIG, lam=1.0, seed=2), CONFIG):
        with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
            fit(parquet, tmp_path / "m", config)
    old = parquet.read_bytes()
    pq.write_table(make_table(seed=1), parquet, row_group_size=400)
    with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
        fit(parquet, tmp_path / "m", replace(CONFIG, seed=1))
    parquet.write_bytes(old)
    fit(parquet, tmp_path / "m", replace(CONFIG, seed=1, lam=1.0))  # the penalty is not part of the sums
    fit(parquet, tmp_path / "calm", replace(CONFIG, seed=1, lam=1.0))
    assert torch.allclose(weights(tmp_path / "m"), weights(tmp_path / "calm"), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"feature_map": "rleu"}, "unknown feature map 'rleu'; did you mean 'relu'"),
        ({"num_features": 63}, "num_features must be even"),
        ({"num_features": 0}, "num_features must be a positive integer"),
        ({"bandwidth": 0.0}, "bandwidth must be a positive number"),
        ({"task": "ranking"}, "unknown task 'ranking'"),
        ({"missing": "zero"}, "unknown policy for missing values 'zero'"),
        ({"lam": "best"}, "lam must be 'gcv' or a number >= 0; got 'best'"),
        ({"lam": -1.0}, "lam must be 'gcv' or a number >= 0; got -1.0"),
        ({"block_dtype": "float16"}, "unknown block_dtype 'float16'"),
    ],
)
def test_bad_configurations(wrong, message):
    with pytest.raises(ValueError, match=message):
        FitConfig("y", **wrong)


def test_unwritable_folder(parquet, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=r"cannot write to the folder .*file/m: Not a directory; name another"):
        fit(parquet, tmp_path / "file" / "m", CONFIG)


def test_hugging_face_dataset(parquet, tmp_path):
    datasets = pytest.importorskip("datasets")
    source = datasets.Dataset(make_table())
    fit(source, tmp_path / "m", CONFIG)
    fit(parquet, tmp_path / "p", CONFIG)
    assert torch.allclose(weights(tmp_path / "m"), weights(tmp_path / "p"), rtol=1e-8, atol=1e-10)
    turned = source.select(range(2999, -1, -1))  # an index of rows in front of the table
    found = np.concatenate([p for p, _ in TableModel.load(tmp_path / "m").predict(turned)])
    same = np.concatenate([p for p, _ in TableModel.load(tmp_path / "p").predict(parquet)])
    np.testing.assert_allclose(found[::-1], same, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("missing", ["raise", "drop", "mean"])
def test_missing_values(missing, tmp_path):
    t = make_table(500).to_pandas()
    t.loc[7, "x0"], t.loc[450, "x1"], t.loc[9, "kind"] = np.nan, np.inf, None
    pq.write_table(pa.Table.from_pandas(t, preserve_index=False), tmp_path / "t.parquet", row_group_size=100)
    config = FitConfig("y", 64, missing=missing)
    if missing == "raise":
        with pytest.raises(ValueError, match=r"x0: 1, x1: 1, kind: 1\), the first at row 7 of t.parquet\[0\]"):
            fit(tmp_path / "t.parquet", tmp_path / "m", config)
        return
    report = fit(tmp_path / "t.parquet", tmp_path / "m", config)
    assert report["rows"] == (497 if missing == "drop" else 500)
    kept = [int(keep.sum()) for _, keep in TableModel.load(tmp_path / "m").predict(tmp_path / "t.parquet")]
    assert sum(kept) == report["rows"]


def test_bad_tables(parquet, tmp_path):
    out = tmp_path / "m"
    with pytest.raises(ValueError, match="no column 'z'; the table has x0, x1, x2, count, kind, y"):
        fit(parquet, out, FitConfig("z"))
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        fit(tmp_path / "nothing", out, CONFIG)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds nothing; expected files of one format"):
        fit(tmp_path / "empty", out, CONFIG)
    (tmp_path / "cut.parquet").write_bytes(parquet.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"cut.parquet cannot be read as parquet"):
        fit(tmp_path / "cut.parquet", out, CONFIG)
    assert not out.exists()
    pq.write_table(pa.table({"t": pa.array([0, 1], pa.timestamp("s")), "y": [0.0, 1.0]}), tmp_path / "time.parquet")
    with pytest.raises(ValueError, match=r"column 't' is timestamp\[.*neither a number nor a category"):
        fit(tmp_path / "time.parquet", out, CONFIG)
    pq.write_table(make_table(0), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="no rows"):
        fit(tmp_path / "none.parquet", tmp_path / "m0", CONFIG)
    ids = pa.table({"id": [f"k{i}" for i in range(1200)], "y": np.arange(1200.0)})
    pq.write_table(ids, tmp_path / "ids.parquet")
    with pytest.raises(ValueError, match="'id' has more than 1000 categories"):
        fit(tmp_path / "ids.parquet", tmp_path / "m1", CONFIG)


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


def test_predict_command(parquet, tmp_path, capsys):
    from snnk.cli import main

    fit(parquet, tmp_path / "m", CONFIG)
    for expected in (0, 2):  # the second time the file is there
        with pytest.raises(SystemExit) as stop:
            main(["predict", str(tmp_path / "m"), str(parquet), "--out", str(tmp_path / "p.csv")])
        assert stop.value.code == expected
    out, err = capsys.readouterr()
    lines = (tmp_path / "p.csv").read_text().split()
    y, found = make_table()["y"].to_numpy(), np.array([float(v) for v in lines[1:]])
    assert lines[0] == "predicted_y" and f"R2 {1 - np.square(found - y).mean() / y.var():.4f}" in out
    assert "exists already" in err
    pq.write_table(make_table().drop_columns(["x1", "y"]), tmp_path / "less.parquet")
    with pytest.raises(ValueError, match="no column 'x1'"):
        TableModel.load(tmp_path / "m").write_predictions(tmp_path / "less.parquet", tmp_path / "q.csv")
    assert not (tmp_path / "q.csv").exists()
