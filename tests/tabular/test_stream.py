"""A fit is the ridge regression on the whole table, and its folder is complete or can be continued."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from snnk import ArcCosine
from snnk.ridge.sums import RidgeStats
from snnk.tabular import FitConfig, TableModel, fit
from snnk.tabular.stream import accumulate

from helpers.tables import CONFIG, make_table


def test_fit_equals_ridge_on_the_whole_table(parquet, tmp_path):
    """The features and the solution are written out here."""
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


@pytest.mark.parametrize("labels", [["no", "yes"], [1, 2], [True, False]])
def test_classes(labels, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 2))
    truth = (x[:, 0] * x[:, 1] > 0).astype(int)
    y = [labels[i] for i in truth]
    pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "y": y}), tmp_path / "t.parquet")
    report = fit(tmp_path / "t.parquet", tmp_path / "m", FitConfig("y", 128, feature_map="random-relu"))
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


def test_unwritable_folder(parquet, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=r"cannot write to the folder .*file/m: Not a directory; name another"):
        fit(parquet, tmp_path / "file" / "m", CONFIG)


def test_two_runs_in_one_folder(parquet, tmp_path):
    with pytest.raises(ValueError, match="another run is writing to"):
        fit(parquet, tmp_path / "m", CONFIG, progress=lambda *_: fit(parquet, tmp_path / "m", CONFIG))
    fit(parquet, tmp_path / "m", CONFIG)


def test_a_full_disk(parquet, tmp_path):
    """The error names the file; the run goes on when there is room again."""
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


@pytest.mark.once
def test_a_finished_folder_is_cleared_of_the_files_of_a_killed_run(parquet, tmp_path):
    out = tmp_path / "m"
    fit(parquet, out, CONFIG)
    names = {path.name for path in out.iterdir()}
    (out / ".checkpoint").mkdir()
    for left in (".checkpoint/part-1.safetensors", ".lock", f".report.json.{'0' * 32}.tmp"):
        (out / left).write_text("left")
    with pytest.raises(ValueError, match="holds a model already"):
        fit(parquet, out, CONFIG)
    assert {path.name for path in out.iterdir()} == names
