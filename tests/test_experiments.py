"""Loaders, the page of claims and the experiments that train small networks."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from snnk.cli import main
from snnk.experiments import EXPERIMENTS, data, mnist, trainable_parameters, uci
from snnk.experiments.page import write_page
from snnk.experiments.records import Results, Stored
from snnk.experiments.training import evaluate, fit_classifier


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def write_idx(path, array):
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    body = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """A folder like MNIST's, with 40 and 20 images of bars whose place is their class."""
    monkeypatch.setitem(data.DATASETS, "mnist", replace(data.DATASETS["mnist"], rows={"train": 40, "test": 20}))
    folder = tmp_path / "mnist"
    folder.mkdir()
    for stem, rows, end in (("train", 40, ".gz"), ("t10k", 20, "")):
        labels = np.arange(rows) % 10
        images = np.zeros((rows, 28, 28))
        images[np.arange(rows), 2 * labels] = 255
        write_idx(folder / f"{stem}-images-idx3-ubyte{end}", images)
        write_idx(folder / f"{stem}-labels-idx1-ubyte{end}", labels)
    return data.Source(str(tmp_path))


def test_mnist_from_files(digits):
    splits = data.mnist(digits)
    assert splits["train"].x.shape == (40, 784) and len(splits["test"]) == 20
    assert splits["train"].x.max() == 1 and splits["train"].y.tolist() == [i % 10 for i in range(40)]
    assert (splits["test"].x.reshape(20, 28, 28).sum(2).argmax(1) == 2 * splits["test"].y).all()


def test_a_file_cut_short_or_with_other_rows_is_refused(digits, tmp_path):
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="no complete idx file"):
        data.mnist(digits)
    write_idx(path, np.zeros(19))
    with pytest.raises(ValueError, match="19 rows instead of 20"):
        data.mnist(digits)


def test_missing_data_says_what_and_where(capsys, tmp_path):
    code, _, err = run(capsys, "reproduce", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    assert code == 2 and err.count("\n") == 1
    assert "train-images-idx3-ubyte" in err and str(tmp_path) in err and "yann.lecun.com" in err
    code, _, err = run(capsys, "reproduce", "uci", "--out", str(tmp_path / "out"))
    assert code == 2 and "--data-dir" in err and "archive.ics.uci.edu" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end", [".csv", ".csv.gz", ".parquet"])
def test_tables_of_uci(tmp_path, monkeypatch, end):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setitem(data.DATASETS, "covertype", replace(data.DATASETS["covertype"], rows={"all": 3}))
    rows = [[1.5, -2e-3, 7], [0.0, 4.0, 1], [3.0, 5.0, 2]]
    path = tmp_path / f"covtype{end}"
    if end == ".parquet":
        columns = list(zip(*rows, strict=True))
        pq.write_table(pa.table({"Cover_Type": columns[2], "a": columns[0], "b": columns[1]}), path)
    else:
        text = "\n".join(",".join(map(str, row)) for row in rows) + "\n"
        path.write_bytes(gzip.compress(text.encode()) if end.endswith("gz") else text.encode())
    split = data.covertype(data.Source(str(tmp_path)))
    assert torch.allclose(split.x, torch.tensor([row[:2] for row in rows])) and split.y.tolist() == [6, 0, 1]


def test_cifar_tiles(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setitem(data.DATASETS, "cifar10", replace(data.DATASETS["cifar10"], rows={"train": 6, "test": 6}))
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    mosaic = images.reshape(2, 3, 32, 32, 3).swapaxes(1, 2).reshape(64, 96, 3)
    for name in ("data_batch_1", "test_batch"):
        Image.fromarray(mosaic).save(tmp_path / f"{name}.webp", lossless=True)
    np.savez(tmp_path / "labels.npz", train=np.arange(9), test=np.arange(6))
    splits = data.cifar10(data.Source(str(tmp_path)))
    assert (splits["train"].x.numpy() == images).all() and splits["train"].y.tolist() == list(range(6))


def test_images_through_datasets(tmp_path, monkeypatch):
    """A local folder in the place of a hub name takes the same path through the library."""
    from PIL import Image

    for split in ("train", "test"):
        for label in range(2):
            folder = tmp_path / split / str(label)
            folder.mkdir(parents=True)
            Image.fromarray(np.full((28, 28), 255 * label, np.uint8)).save(folder / "a.png")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(data.DATASETS, "mnist", replace(data.DATASETS["mnist"], hub=str(tmp_path)))
    splits = data.mnist(data.Source(data.HUB))
    assert splits["train"].x.shape == (2, 784) and (splits["train"].x.mean(1).long() == splits["train"].y).all()


def test_stratified_halves_are_disjoint_and_fair():
    y = torch.arange(100) % 4
    kept, held = data.stratified(y, 0.25, seed=0)
    assert sorted(torch.cat([kept, held]).tolist()) == list(range(100))
    assert torch.bincount(y[held]).tolist() == [6, 6, 6, 6]


def test_training_keeps_the_best_epoch():
    """The reported figures are those of the epoch of least validation loss, and the classes are learnt."""
    whole = data.made(1200, 6, 3, seed=0)
    parts = {key: whole.take(torch.arange(*span)) for key, span in (("train", (0, 800)), ("test", (800, 1200)))}
    parts["validation"] = parts["test"]
    made = []

    def make():
        made.append(mnist.network(6, 3, 32, mnist.Config(hidden=32), seed=0))
        return made[0]

    before = torch.random.get_rng_state()
    row = fit_classifier(make, parts, epochs=6, batch_size=32, learning_rate=1e-2, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    assert row["best_epoch"] == 1 + int(np.argmin(row["validation_losses"])) and len(row["train_losses"]) == 6
    assert row["test_loss"] == pytest.approx(min(row["validation_losses"]), abs=1e-4)
    assert (row["test_loss"], row["test_accuracy"]) == evaluate(made[0], parts["test"])
    assert row["test_accuracy"] > 0.7 and row["train_losses"][-1] < row["train_losses"][0]


def test_parameters_of_the_papers_networks():
    dense, ours = (
        sum(p.numel() for p in mnist.network(784, 10, m, mnist.Config(), 0).parameters()) for m in (None, 32)
    )
    assert dense == 784 * 512 + 512 + 512 * 512 + 512 + 5130
    assert ours == 784 * 512 + 512 + 512 * 32 + 5130
    assert [
        sum(p.numel() for p in uci.network(kind, 54, 7, 64, uci.Config(), 0).parameters()) for kind in ("MLP", "SNNK")
    ] == [54 * 512 + 512 + 512 * 64 + 64 + 64 * 7 + 7, 54 * 512 + 512 + 64 * 64 + 64 * 7 + 7]


def test_mnist_resumes_and_reads_real_files(capsys, tmp_path, digits, monkeypatch):
    monkeypatch.setattr(mnist, "QUICK", replace(mnist.QUICK, features=(8,), rows=20, epochs=1))
    args = ["reproduce", "mnist", "--quick", "--data-dir", digits.data_dir, "--out", str(tmp_path / "out")]
    assert run(capsys, *args, "--seeds", "2")[0] == 0
    path = tmp_path / "out" / "mnist.json"
    stored = json.loads(path.read_text())
    assert stored["source"] == {"model": "", "data": "real"} and digits.data_dir not in path.read_text()
    assert [(r["network"], r["seed"]) for r in stored["rows"]] == [("MLP", 0), ("SNNK", 0), ("MLP", 1), ("SNNK", 1)]
    stored["rows"] = stored["rows"][:3]
    stored["rows"][0]["test_accuracy"] = -1.0
    path.write_text(json.dumps(stored))
    assert run(capsys, *args, "--seeds", "2")[0] == 0
    again = json.loads(path.read_text())["rows"]
    assert len(again) == 4 and again[0]["test_accuracy"] == -1.0


def test_seeds_where_there_are_none(capsys, tmp_path):
    code, _, err = run(capsys, "reproduce", "pointwise", "--seeds", "3", "--quick", "--out", str(tmp_path))
    assert code == 2 and "takes no --seeds" in err


def test_claims_come_from_rows():
    class Rows(Results):
        def __init__(self, rows):
            self.rows, self.config = rows, {"seed": 0}

    def row(m, accuracy, loss):
        return {"num_features": m, "test_accuracy": accuracy, "test_loss": 0.1, "train_losses": [loss], "seed": 0}

    table = mnist.claims(Rows([row(None, 0.98, 0.1), row(16, 0.99, 0.2), row(32, 0.981, 0.2), row(64, 0.97, 0.2)]))
    assert [c["holds"] for c in table] == [True, False, False]
    assert "98.10 %" in table[0]["ours"] and "0.2000" in table[2]["ours"]


def test_page_has_every_claim_and_what_is_missing(capsys, tmp_path):
    code, _, _ = run(capsys, "reproduce", "uci", "--quick", "--seeds", "2", "--out", str(tmp_path))
    assert code == 0 and len(Stored(tmp_path / "uci.json").rows) == 2 * uci.total(uci.QUICK)
    page = write_page(tmp_path).read_text()
    for claim in uci.claims(Stored(tmp_path / "uci.json")):
        assert claim["paper"] in page and claim["ours"] in page
    assert "![uci](uci.png)" in page and "- mnist: " in page.split("## Not run here")[1]
    assert "- uci: " not in page
    (tmp_path / "empty").mkdir()
    for folder, message in ((tmp_path / "empty", "no rows"), (tmp_path / "none", "no folder")):
        code, _, err = run(capsys, "reproduce", "--page", "--out", str(folder))
        assert code == 2 and message in err


def test_every_experiment_has_its_parts():
    for name, module in EXPERIMENTS.items():
        assert module.FIGURE and module.NEEDS and module.TIME and module.__doc__, name
        assert module.total(module.QUICK) > 0 and hash(module.QUICK) is not None


def test_trainable_parameters(tmp_path):
    config = trainable_parameters.QUICK
    results = Results(tmp_path / "rows.json", config)
    rows = {r["method"]: r["trained"] for r in trainable_parameters.run(config, results) if r["model"] == "BERT"}
    assert len(results.rows) == trainable_parameters.total(config)
    assert rows["SNNK adapters"] == 24 * (768 * 16 + 768) == 313_344
    assert rows["Houlsby adapters"] == 24 * (2 * 768 * 48 + 48 + 768)
    assert rows["Pfeiffer adapters"] == rows["Houlsby adapters"] / 2
    assert rows["LoRA"] == 12 * 2 * 2 * 768 * 8
    assert rows["SNNK pooler and classifier, merged"] == 512 * 2 + 2
    holds = {c["paper"]: c["holds"] for c in trainable_parameters.claims(results)}
    assert [claim for claim, held in holds.items() if not held] == ["BERT, pooler and classifier: 0.059 M"]


def test_the_page_of_the_project_is_what_its_rows_say(tmp_path):
    folder = Path(__file__).parent.parent / "docs" / "results"
    shutil.copytree(folder, tmp_path / "results")
    (tmp_path / "results" / "README.md").unlink()
    assert write_page(tmp_path / "results").read_text() == (folder / "README.md").read_text()
