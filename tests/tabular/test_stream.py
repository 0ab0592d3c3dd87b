"""One pass over tables: the same numbers whatever the format, the number of workers, or the moment of a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

from snnk import ArcCosine
from snnk.ridge.sums import RidgeStats
from snnk.tabular import FitConfig, TableModel, fit
from snnk.tabular.scan import Scan
from snnk.tabular.source import Table
from snnk.tabular.stream import accumulate

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


def run_fit(source, out, *args, workers=1, wait=True, double=True):
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
    options = ["fit", str(source), "--target", "y", "--features", "64", "--lam", "0.01", "--out", str(out)]
    options += ["--double"] * double
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
    process = run_fit(parquet, tmp_path / "two", workers=2, wait=False)  # every worker is told that there is a model
    output = process.communicate(timeout=300)[0].decode()
    assert process.returncode and output.count("snnk: ") == output.count("holds a model already") >= 1
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"model.json", "model.safetensors", "report.json"}


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
            sum(len(json.loads(RidgeStats.load(p).note)["blocks"]) for p in out.glob(".checkpoint/part-*.safetensors"))
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
        if rows > when and (when < 0 or what == "fitting"):
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


def predictions(folder, source):
    return np.concatenate([p for p, _ in TableModel.load(folder).predict(source)])


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_change_float32_results_either(parquet, tmp_path, workers):
    """Products within blocks are rounded to float32, but about one origin and for the same rows, whoever makes them."""
    fit(parquet, tmp_path / "one", replace(CONFIG, block_dtype="float32"))
    run_fit(parquet, tmp_path / "many", double=False, workers=workers)
    one, many = (predictions(tmp_path / name, parquet) for name in ("one", "many"))
    np.testing.assert_allclose(one, many, rtol=0, atol=1e-10)
    assert (weights(tmp_path / "one") - weights(tmp_path / "many")).abs().max() <= 1e-9


def test_restarts_do_not_change_float32_results_either(parquet, tmp_path):
    config = replace(CONFIG, block_dtype="float32")
    fit(parquet, tmp_path / "calm", config)

    for count in (500, 1500, 2300):
        with pytest.raises(KeyboardInterrupt):
            fit(parquet, tmp_path / "m", config, checkpoint_seconds=0, progress=_after(count))
    shown = []
    fit(parquet, tmp_path / "m", config, progress=lambda what, rows, total: shown.append((rows, total)))
    assert shown[-1] == (3000, 3000)  # rows of earlier runs count as done
    calm, killed = (predictions(tmp_path / name, parquet) for name in ("calm", "m"))
    np.testing.assert_allclose(calm, killed, rtol=0, atol=1e-10)


def test_parts_of_another_configuration_are_never_added(parquet, tmp_path):
    """A folder of a machine that is not shared keeps parts that the first worker's clean-up does not reach."""
    with pytest.raises(KeyboardInterrupt):
        fit(parquet, tmp_path / "m", CONFIG, checkpoint_seconds=0, progress=_after(1000))
    (tmp_path / "m" / ".checkpoint" / "columns.json").unlink()
    with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
        fit(parquet, tmp_path / "m", replace(CONFIG, seed=5))


def _after(count):
    def stop(what, rows, total):
        if what == "fitting" and rows > count:
            raise KeyboardInterrupt

    return stop


def test_two_runs_in_one_folder(parquet, tmp_path):
    with pytest.raises(ValueError, match="another run is writing to"):
        fit(parquet, tmp_path / "m", CONFIG, progress=lambda *_: fit(parquet, tmp_path / "m", CONFIG))
    fit(parquet, tmp_path / "m", CONFIG)


@pytest.mark.parametrize("feature_map", ["fourier", "relu"])
def test_columns_with_large_offsets_or_no_spread(feature_map, tmp_path):
    """They take nothing from the other columns: seconds since 1970, and a constant that is no binary fraction."""
    t = make_table(2000)
    pq.write_table(t, tmp_path / "plain.parquet")
    shifted = t.set_column(0, "x0", pa.array(t["x0"].to_numpy() + 1.7e9)).append_column(
        "c", pa.array(np.full(2000, 0.1))
    )
    pq.write_table(shifted, tmp_path / "shifted.parquet")
    scores = []
    for name in ("plain", "shifted"):
        report = fit(tmp_path / f"{name}.parquet", tmp_path / name, FitConfig("y", 256, feature_map))
        scores.append(report["score"])
    assert scores[1] < 1.3 * scores[0]
    constant = TableModel.load(tmp_path / "shifted").columns.inputs[-1]
    assert constant.scale == 1 and abs(constant.mean - 0.1) < 1e-6


def test_targets_far_from_zero(tmp_path):
    t = make_table(2000)
    far = t.set_column(5, "y", pa.array(t["y"].to_numpy() + 1e9))
    found = []
    for name, table in (("near", t), ("far", far)):
        pq.write_table(table, tmp_path / f"{name}.parquet")
        report = fit(tmp_path / f"{name}.parquet", tmp_path / name, FitConfig("y", 128))
        _, score, _ = TableModel.load(tmp_path / name).write_predictions(
            tmp_path / f"{name}.parquet", tmp_path / f"{name}.csv"
        )
        found.append((report["score"], score["R2"]))
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_the_first_bad_value_is_named_by_its_place(tmp_path):
    a, b = np.zeros(150_000), np.zeros(150_000)
    a[140_000], b[130_000] = np.nan, np.inf
    pq.write_table(pa.table({"a": a, "b": b, "y": a * 0 + 1}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"a: 1, b: 1, y: 1\), the first at row 130000 of t.parquet\[0\], column 'b'"):
        fit(tmp_path / "t.parquet", tmp_path / "m", CONFIG)


def test_empty_cells_of_a_csv_are_missing(tmp_path):
    lines = ["a,k,y", *(f"{i},{'red' if i % 2 else 'blue'},{i % 7}.5" for i in range(100)), "1,,2.5"]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"\(k: 1\), the first at row 100 of t.csv"):
        fit(tmp_path / "t.csv", tmp_path / "m", CONFIG)
    report = fit(tmp_path / "t.csv", tmp_path / "m", replace(CONFIG, missing="drop"))
    assert report["rows"] == 100 and TableModel.load(tmp_path / "m").columns.inputs[1].categories == ("blue", "red")


def test_files_of_a_folder_must_be_alike(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    pq.write_table(pa.table({"a": [1, 2], "y": [0.5, 1.5]}), folder / "1.parquet")
    pq.write_table(pa.table({"a": [1.5, 2.5], "y": [0.5, 1.5]}), folder / "2.parquet")
    with pytest.raises(
        ValueError, match=r"column 'a' is int64 in 1.parquet and double in 2.parquet; make the files alike"
    ):
        fit(folder, tmp_path / "m", CONFIG)
    pq.write_table(pa.table({"a": [1, 2], "b": [1, 2], "y": [0.5, 1.5]}), folder / "2.parquet")
    with pytest.raises(ValueError, match=r"column 'b' is absent in 1.parquet and int64 in 2.parquet"):
        fit(folder, tmp_path / "m", CONFIG)


def test_prediction_tables(parquet, tmp_path):
    """Another order of columns, categories never seen, NaN among labels and inputs."""
    rng = np.random.default_rng(0)
    a, kind = rng.normal(size=1000), rng.choice(["x", "z"], 1000)
    y = (a > 0).astype(float)
    pq.write_table(pa.table({"a": a, "k": kind, "y": y}), tmp_path / "t.parquet")
    fit(tmp_path / "t.parquet", tmp_path / "m", FitConfig("y", 64))
    model = TableModel.load(tmp_path / "m")
    y[::2], kind[:30] = np.nan, "new"
    pq.write_table(pa.table({"y": y, "k": kind, "a": a}), tmp_path / "p.parquet")
    count, score, unseen = model.write_predictions(tmp_path / "p.parquet", tmp_path / "p.csv")
    assert count == 1000 and score["accuracy"] > 0.95 and unseen == {"k": 30}
    a[5] = np.nan
    pq.write_table(pa.table({"k": kind, "a": a}), tmp_path / "q.parquet")
    with pytest.raises(ValueError, match=r"a: 1\), the first at row 5"):
        model.write_predictions(tmp_path / "q.parquet", tmp_path / "q.csv")
    count, score, _ = model.write_predictions(tmp_path / "q.parquet", tmp_path / "q.csv", missing="drop")
    assert count == 999 and score == {} and (tmp_path / "q.csv").read_text().split("\n")[6] == '""'
    with pytest.raises(ValueError, match=r"there is no folder .*no for p.csv"):
        model.write_predictions(parquet, tmp_path / "no" / "p.csv")


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
    with pytest.raises(ValueError, match=r"no column 'z' in .*; it has x0, x1, x2, count, kind, y"):
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
    with pytest.raises(ValueError, match="the target 'y' cannot be left out with drop"):
        fit(parquet, out, FitConfig("y", drop=("y",)))
    one = make_table(50).set_column(5, "y", pa.array(["same"] * 50))
    pq.write_table(one, tmp_path / "one.parquet")
    with pytest.raises(ValueError, match="'y' has one class only, same"):
        fit(tmp_path / "one.parquet", tmp_path / "m2", CONFIG)
    with pytest.raises(ValueError, match=r"column 't' of .* is timestamp\[.*neither a number nor a category"):
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


def test_what_no_table_can_be_made_of(tmp_path):
    pandas = pytest.importorskip("pandas")
    for source in (pandas.DataFrame({"y": [1.0]}), iter([1]), make_table()):
        with pytest.raises(TypeError, match=rf"a path or a datasets.Dataset; got {type(source).__name__}"):
            fit(source, tmp_path / "m", CONFIG)
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset(make_table())
    for source in (rows.to_iterable_dataset(), datasets.DatasetDict(train=rows)):
        with pytest.raises(TypeError, match=f"got {type(source).__name__}"):
            fit(source, tmp_path / "m", CONFIG)


def test_a_table_without_rows_has_no_predictions(parquet, tmp_path):
    fit(parquet, tmp_path / "m", CONFIG)
    pq.write_table(make_table()[:0], tmp_path / "none.parquet")
    found = TableModel.load(tmp_path / "m").write_predictions(tmp_path / "none.parquet", tmp_path / "p.csv")
    assert found == (0, {}, {}) and (tmp_path / "p.csv").read_text().split() == ["predicted_y"]


def test_columns_do_not_depend_on_who_read_which_block(parquet):
    """Means of shares of the table differ in their last bits; the columns that come of them do not."""
    table, found, means = Table(parquet), [], set()
    for workers in (1, 2, 3, 5):
        shares = [
            Scan.start(table, "y").read(table, lambda i, _, n=workers, r=rank: i % n == r) for rank in range(workers)
        ]
        for other in shares[1:]:
            shares[0].merge(other)
        found.append(shares[0].columns())
        means.add(shares[0].statistics["x0"].mean)
    assert len(means) > 1 and all(columns == found[0] for columns in found)


def test_columns_of_a_sorted_table(tmp_path):
    """Blocks whose means are far apart, and fractions and missing values that one share of them has alone."""
    t = make_table(2000).sort_by("x0")
    x = t["x0"].to_numpy().copy()
    x[1900:] = np.nan
    whole = np.arange(2000.0) // 500
    whole[0] = 0.5
    t = t.set_column(0, "x0", pa.array(x)).set_column(5, "y", pa.array(whole))
    pq.write_table(t, tmp_path / "t.parquet", row_group_size=100)
    table = Table(tmp_path / "t.parquet")
    first, second = (Scan.start(table, "y").read(table, lambda i, _, r=r: i % 2 == r) for r in (1, 0))
    columns = first.merge(second).columns(missing="mean")
    assert columns.target.categories is None  # 0.5 is no class
    assert columns.inputs[0].scale == pytest.approx(np.nanstd(x), rel=1e-6)
    assert columns.inputs[0].mean == pytest.approx(np.nanmean(x), abs=2e-6 * np.nanstd(x))
    rows = [columns.encode(batch, label)[0] for label, batches in table.blocks() for batch in batches]
    encoded = torch.cat(rows)[:, 0]
    assert float(encoded.mean()) == pytest.approx(0, abs=1e-5) and bool((encoded[1900:] == 0).all())


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    t = pa.table({"a": np.arange(240.0), "y": np.tile(np.arange(12), 20)})
    pq.write_table(t, tmp_path / "t.parquet", row_group_size=100)
    table = Table(tmp_path / "t.parquet")
    columns = Scan.start(table, "y").read(table).columns()
    assert columns.target.categories == tuple(str(i) for i in range(12))


@pytest.mark.parametrize(
    "change",
    [
        {"num_features": 32},
        {"feature_map": "relu"},
        {"bandwidth": 0.5},
        {"missing": "drop"},
        {"drop": ("x2",)},
        {"block_dtype": "float32"},
        {"target": "x1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_checkpoint_is_for_one_configuration(parquet, tmp_path, change):
    with pytest.raises(KeyboardInterrupt):
        fit(parquet, tmp_path / "m", CONFIG, checkpoint_seconds=0, progress=_after(1000))
    with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
        fit(parquet, tmp_path / "m", replace(CONFIG, **change))


def test_r2_is_about_the_mean_of_the_rows_predicted(parquet, tmp_path):
    """Rows whose mean is another than that of the rows trained on."""
    fit(parquet, tmp_path / "m", CONFIG)
    some = make_table().filter(pa.compute.greater(make_table()["y"], 1.0))
    pq.write_table(some, tmp_path / "some.parquet")
    _, score, _ = TableModel.load(tmp_path / "m").write_predictions(tmp_path / "some.parquet", tmp_path / "p.csv")
    y, found = some["y"].to_numpy(), predictions(tmp_path / "m", tmp_path / "some.parquet")
    assert score["R2"] == pytest.approx(1 - np.square(found - y).sum() / np.square(y - y.mean()).sum(), rel=1e-9)


def test_the_map_is_made_for_the_norm_of_the_rows(parquet, tmp_path):
    """A number has mean square 1, and a category as a whole has length 1, however many values it has."""
    fit(parquet, tmp_path / "m", CONFIG)
    model, table = TableModel.load(tmp_path / "m"), Table(parquet)
    x = torch.cat([model.columns.encode(batch, label)[0] for label, batches in table.blocks() for batch in batches])
    assert float(model.feature_map.summary[0]) ** 2 == pytest.approx(float(x.square().sum(1).mean()), rel=1e-4)


def write_rows(path, sign):
    """240 KB of CSV in which the sign changes one digit per row in the middle, and neither size nor ends."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=10_000)
    y = np.where((np.arange(10_000) > 3000) & (np.arange(10_000) < 5000), sign, 1) * np.sin(x)
    path.write_text("x,y\n" + "".join(f"{a:+.8f},{b:+.8f}\n" for a, b in zip(x, y, strict=True)))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_that_is_replaced_between_a_kill_and_the_restart(kind, tmp_path):
    """Same size, same ends, same time of modification: a checkpoint of the old contents is refused."""
    path, out = tmp_path / f"t.{kind}", tmp_path / "m"

    def write(sign):
        write_rows(tmp_path / "t.csv", sign)
        if kind == "parquet":  # as many bytes, and no statistics in its footer
            table = pa.csv.read_csv(tmp_path / "t.csv")
            pq.write_table(table, path, 1000, compression="none", use_dictionary=False, write_statistics=False)
        os.utime(path, ns=(10**18, 10**18))

    def stop(what, rows, total):
        if (out / ".checkpoint").exists() and list((out / ".checkpoint").glob("part-*")):
            raise KeyboardInterrupt

    write(1)
    size = path.stat().st_size
    if kind == "csv":  # which is one block: all is counted, and the run ends before it has solved
        with pytest.raises(ValueError, match="lam = 0 needs full rank"):
            fit(path, out, FitConfig("y", 512, lam=0.0))
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(path, out, CONFIG, checkpoint_seconds=0, progress=stop)
    config = FitConfig("y", 512) if kind == "csv" else CONFIG
    write(-1)
    assert path.stat().st_size == size > 1 << 17
    with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
        fit(path, out, config)
    write(1)
    fit(path, out, config)
    fit(path, tmp_path / "calm", config)
    np.testing.assert_allclose(predictions(out, path), predictions(tmp_path / "calm", path), atol=1e-9)


def test_a_table_that_is_replaced_while_it_is_read(parquet, tmp_path):
    """By another of the same size and time, in the first pass and in the second."""
    for when in ("reading columns", "fitting"):
        out = tmp_path / when

        def swap(what, rows, total, when=when):
            if what == when and rows > 1000:
                other = tmp_path / "other"
                other.write_bytes(parquet.read_bytes())
                os.utime(other, ns=(parquet.stat().st_atime_ns, parquet.stat().st_mtime_ns))
                other.replace(parquet)

        with pytest.raises(ValueError, match=r"data.parquet was changed or replaced while it was read; run the same"):
            fit(parquet, out, CONFIG, checkpoint_seconds=0, progress=swap)
        fit(parquet, out, CONFIG)  # the advice
    fit(parquet, tmp_path / "calm", CONFIG)
    assert torch.allclose(weights(out), weights(tmp_path / "calm"), rtol=1e-9, atol=1e-12)


def test_fingerprints(parquet, tmp_path, monkeypatch):
    """Workers that share the pieces find that of one; one row of a dataset changes it, and a copy does not."""
    monkeypatch.setattr("snnk.tabular.source.PIECE_BYTES", 5000)
    one = Table(parquet).fingerprint()
    pieces = []
    for rank in range(3):
        Table(parquet).fingerprint(rank, 3, lambda found: pieces.append(found) or [found])
    assert sum(map(len, pieces)) > 10 and Table(parquet).fingerprint(0, 3, lambda found: pieces) == one
    content = bytearray(parquet.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / parquet.name).write_bytes(parquet.read_bytes())
    assert Table(tmp_path / "other" / parquet.name).fingerprint() == one
    (tmp_path / "other" / parquet.name).write_bytes(content)
    assert Table(tmp_path / "other" / parquet.name).fingerprint() != one
    datasets = pytest.importorskip("datasets")
    rows = make_table()
    x = rows["x0"].to_numpy().copy()
    found = [Table(datasets.Dataset(rows)).fingerprint()]
    x[1500] += 1e-9
    for table in (make_table(), rows.set_column(0, "x0", pa.array(x))):
        found.append(Table(datasets.Dataset(table)).fingerprint())
    assert found[0] == found[1] != found[2]


@pytest.fixture
def interrupted(parquet, tmp_path):
    """A folder with a checkpoint of 4 of 8 blocks, with the file of its sums."""
    out = tmp_path / "m"
    with pytest.raises(KeyboardInterrupt):
        fit(parquet, out, CONFIG, checkpoint_seconds=0, progress=_after(1600))
    (part,) = out.glob(".checkpoint/part-*.safetensors")
    return out, part


def forget_a_block(content, part):
    stats = RidgeStats.load(part)
    note = json.loads(stats.note)
    note["blocks"].pop(1)
    stats.note = json.dumps(note)
    stats.save(part)
    return part.read_bytes()


def change_a_sum(content, part):
    stats = RidgeStats.load(part)
    stats.sums[0, 5, 9] += 1.0
    stats.save(part)
    return part.read_bytes()


def with_note(note):
    def change(content, part):
        stats = RidgeStats.load(part)
        stats.note = note
        stats.save(part)
        return part.read_bytes()

    return change


DAMAGE = {
    "one block is forgotten": forget_a_block,
    "one sum is another": change_a_sum,
    "half of it": lambda content, part: content[: len(content) // 2],
    "nothing": lambda content, part: b"",
    "no note": with_note(""),
    "a deep note": with_note("[" * 100_000),
    "a note of another kind": with_note("[1, 2]"),
    "blocks that are no list": with_note('{"key": "a", "blocks": {"b": 1}, "rows": 5}'),
    "rows that are no number": with_note('{"key": "a", "blocks": [], "rows": "5"}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_part_of_a_checkpoint_is_named(damage, parquet, tmp_path, interrupted):
    out, part = interrupted
    part.write_bytes(DAMAGE[damage](part.read_bytes(), part))
    with pytest.raises(ValueError, match=rf"{part.name} .*Remove it and run the same command again"):
        fit(parquet, out, CONFIG)
    part.unlink()  # the advice
    fit(parquet, out, CONFIG)
    fit(parquet, tmp_path / "calm", CONFIG)
    assert torch.allclose(weights(out), weights(tmp_path / "calm"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("change", ["", "{", "[" * 100_000, "null", "mean", "blocks", "\xff"])
def test_a_damaged_first_pass_is_named(change, parquet, tmp_path, interrupted):
    out, _ = interrupted
    path = out / ".checkpoint" / "columns.json"
    stored = json.loads(path.read_text())
    if change == "mean":
        stored["columns"]["inputs"][0]["mean"] += 1e-3
    if change == "blocks":
        stored["blocks"]["data.parquet[3]"] -= 1
    content = json.dumps(stored) if change in ("mean", "blocks") else change
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"columns.json is .*Remove it and run the same command again"):
        fit(parquet, out, CONFIG)
    path.unlink()
    fit(parquet, out, CONFIG)
    fit(parquet, tmp_path / "calm", CONFIG)
    assert torch.allclose(weights(out), weights(tmp_path / "calm"), rtol=1e-9, atol=1e-12)


def leaves(value, path=()):
    """Paths of all values in JSON, the containers too."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def test_wrong_types_at_every_key_of_a_model(parquet, tmp_path):
    """Each is refused with the file's name, or does not matter to the outputs."""
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
            assert path[-1] in deep or isinstance(wrong, str), (path, wrong)
            if path[-1] != "scale":  # of the target, in which the outputs are
                assert torch.equal(found, expected), (path, wrong)
    assert tried > 500
    for content in ("", "{", "[" * 100_000, '{"format": 1}', "\udcff"):
        (out / "model.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match=r"model.json is not"):
            TableModel.load(out)


@pytest.mark.parametrize("change", ["half", "empty", "gone", "nan", "inf", "dtype", "extra", "missing"])
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


def test_sizes_are_compared_before_anything_is_drawn(parquet, tmp_path, capsys):
    """Within a second, which drawing would take many times over."""
    from snnk.cli import main

    out = tmp_path / "m"
    fit(parquet, out, CONFIG)
    stored = json.loads((out / "model.json").read_text())
    stored["config"]["num_features"] = 10**7
    (out / "model.json").write_text(json.dumps(stored))
    began = time.process_time()
    with pytest.raises(ValueError, match=r"model.safetensors does not fit model.json: weight"):
        TableModel.load(out)
    for many in (10**9, 10**12, 10**30):
        with pytest.raises(SystemExit):
            main(["fit", str(parquet), "--target", "y", "--features", str(many), "--out", str(tmp_path / "many")])
    err = capsys.readouterr().err
    assert err.count("\n") == 3 and "sums of 1000000000 features need 8,000,000,032 GB" in err
    assert time.process_time() - began < 3 and not (tmp_path / "many").exists()


def test_a_full_disk(parquet, tmp_path):
    """One line that names the file; when there is room again, the run goes on."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # a file of more bytes cannot be written
    try:
        with pytest.raises(OSError, match=r"part-\w+.safetensors.*run the command again"):
            fit(parquet, tmp_path / "m", CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.rglob("*.tmp"))
    fit(parquet, tmp_path / "m", CONFIG)


@pytest.mark.parametrize("when", [0, 1600])
def test_a_folder_that_is_removed_during_the_run(when, parquet, tmp_path):
    out = tmp_path / "m"

    def remove(what, rows, total):
        if what == "fitting" and rows > when:
            shutil.rmtree(out, ignore_errors=True)

    with pytest.raises(ValueError, match=r"m/.checkpoint was removed during the run; run the same command again"):
        fit(parquet, out, CONFIG, checkpoint_seconds=0, progress=remove)
    fit(parquet, out, CONFIG)


def test_a_finished_folder_is_cleared_of_what_a_killed_run_left(parquet, tmp_path):
    out = tmp_path / "m"
    fit(parquet, out, CONFIG)
    names = {path.name for path in out.iterdir()}
    (out / ".checkpoint").mkdir()
    for left in (".checkpoint/part-1.safetensors", ".lock", f".report.json.{'0' * 32}.tmp"):
        (out / left).write_text("left")
    with pytest.raises(ValueError, match="holds a model already"):
        fit(parquet, out, CONFIG)
    assert {path.name for path in out.iterdir()} == names


def test_the_row_of_a_late_batch_is_that_of_the_block(parquet, tmp_path):
    """Blocks of more than one batch are counted through."""
    x = np.random.default_rng(0).normal(size=150_000)
    pq.write_table(pa.table({"x": x, "y": np.sin(x)}), tmp_path / "t.parquet")
    fit(tmp_path / "t.parquet", tmp_path / "m", FitConfig("y", 8))
    x[140_000] = np.nan
    pq.write_table(pa.table({"x": x}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"the first at row 140000 of t.parquet\[0\]"):
        TableModel.load(tmp_path / "m").write_predictions(tmp_path / "t.parquet", tmp_path / "p.csv")
