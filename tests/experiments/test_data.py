"""Loaders of the experiments: whole, damaged, miscounted and missing files; and `snnk reproduce --all`."""

import gzip
import io
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from snnk.cli import main
from snnk.experiments import glue, load, names, uci, vision
from snnk.experiments.lab import data, tiny
from snnk.experiments.lab.data import HUB, Source
from snnk.experiments.lab.records import Results
from snnk.finetune.glue import GLUE, GLUE_HUB
from snnk.hf.data import read_columns

FEW = {"train": 6, "test": 4}
PIXELS = {s: np.random.default_rng(n).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for s, n in FEW.items()}


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    out, err = capsys.readouterr()
    return stop.value.code, " ".join(out.split()), err


def shrink(monkeypatch, name, rows, **others):
    monkeypatch.setitem(data.DATASETS, name, replace(data.DATASETS[name], rows=rows, **others))


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """MNIST's four files, gzipped."""
    shrink(monkeypatch, "mnist", FEW)
    for stem, rows in (("train", 6), ("t10k", 4)):
        images = np.random.default_rng(0).integers(0, 256, (rows, 28, 28))  # noise: zlib cannot make it short
        (tmp_path / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(rows))))
    return tmp_path


def cut(raw):
    return raw[: len(raw) // 2]


def changed(raw):
    return raw[:10] + bytes([raw[10] | 6]) + raw[11:]  # a kind of block that zlib does not know


def no_gzip(raw):
    return b"<html>not found</html>"


@pytest.mark.parametrize("harm", [cut, changed, no_gzip])
@pytest.mark.parametrize("stem", ["train-images-idx3", "t10k-labels-idx1"])
def test_a_damaged_download_is_one_line(capsys, tmp_path, digits, stem, harm):
    path = digits / f"{stem}-ubyte.gz"
    path.write_bytes(harm(path.read_bytes()))
    code, _, err = run(capsys, "reproduce", "mnist", "--data-dir", str(digits), "--out", str(tmp_path / "out"))
    assert code == 2 and err.count("\n") == 1 and f"{path} is damaged" in err and "get it anew" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("what", "told"), [("images-idx3", "inputs"), ("labels-idx1", "classes")])
def test_images_and_labels_are_both_counted(digits, what, told):
    images = np.zeros((3, 28, 28) if what == "images-idx3" else 3)
    (digits / f"t10k-{what}-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    with pytest.raises(ValueError, match=rf"mnist, test, {told}: 3 rows instead of 4; get it anew: yann\.lecun\.com"):
        data.mnist(Source(str(digits)))


def write_mosaics(folder, **labels):
    for name, rows, split in (("data_batch_1", 2, "train"), ("test_batch", 2, "test")):
        tiles = PIXELS[split].reshape(rows, -1, 32, 32, 3).swapaxes(1, 2)
        Image.fromarray(tiles.reshape(64, -1, 3)).save(folder / f"{name}.webp", lossless=True)
    np.savez(folder / "labels.npz", **{"train": np.arange(6), "test": np.arange(4), **labels})


def test_cifar10_counts_and_damage(tmp_path, monkeypatch):
    shrink(monkeypatch, "cifar10", FEW)
    source = Source(str(tmp_path))
    write_mosaics(tmp_path, train=np.arange(9))
    assert data.cifar10(source)["train"].y.tolist() == list(range(6))
    write_mosaics(tmp_path, test=np.arange(3))
    with pytest.raises(ValueError, match="cifar10, test, classes: 3 rows instead of 4"):
        data.cifar10(source)
    for name in ("labels.npz", "test_batch.webp"):
        write_mosaics(tmp_path)
        (tmp_path / name).write_bytes(cut((tmp_path / name).read_bytes()))
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            data.cifar10(source)
    write_mosaics(tmp_path)
    np.savez(tmp_path / "labels.npz", train=np.arange(6))
    with pytest.raises(ValueError, match=r"labels\.npz is damaged .*test"):
        data.cifar10(source)


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return {"bytes": file.getvalue(), "path": "a.png"}


def write_cifar100(folder, kind):
    """Files as the public CIFAR-100 has them; the fine class of image i is i, the coarse one 19."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, pixels in PIXELS.items():
        fine = np.arange(len(pixels), dtype=np.uint8)
        if kind == "binary":
            head = np.stack([np.full_like(fine, 19), fine], 1)
            body = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
            (folder / f"{split}.bin").write_bytes(np.concatenate([head, body], 1).tobytes())
        else:
            columns = {"img": [encoded(p) for p in pixels], "fine_label": fine, "coarse_label": np.full_like(fine, 19)}
            pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize("kind", ["binary", "parquet"])
def test_cifar100(tmp_path, monkeypatch, kind):
    shrink(monkeypatch, "cifar100", FEW)
    write_cifar100(tmp_path / "cifar100", kind)
    for source in (Source(str(tmp_path)), Source(str(tmp_path / "cifar100"))):
        assert data.image_task(source) == "cifar100"
        splits = data.cifar100(source)
        for split, rows in FEW.items():
            assert torch.equal(splits[split].x, torch.from_numpy(PIXELS[split]))
            assert splits[split].y.tolist() == list(range(rows)) and splits[split].y.dtype == torch.int64
    path = next((tmp_path / "cifar100").glob("train*"))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=f"{path.name} is damaged"):
        data.cifar100(source)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"no train\.bin or train\.parquet .*cs\.toronto\.edu"):
        data.cifar100(source)


def test_cifar100_must_be_complete(tmp_path, monkeypatch):
    write_cifar100(tmp_path, "binary")
    with pytest.raises(ValueError, match="cifar100, train, classes: 6 rows instead of 50,000"):
        data.cifar100(Source(str(tmp_path)))


def test_which_images(tmp_path):
    def task(*parts):
        return data.image_task(Source(str(tmp_path.joinpath(*parts))))

    assert data.image_task(Source()) == data.image_task(Source(HUB)) == "cifar10"
    assert data.image_task(Source("uoft-cs/cifar100")) == "cifar100"
    write_cifar100(tmp_path / "both" / "cifar100", "binary")
    write_mosaics(tmp_path / "both")
    assert task() == "cifar10" and task("both") == "cifar10" and task("both", "cifar100") == "cifar100"
    for part in ("train", "val"):
        tiny.write_images(tmp_path / "imagenet" / part, torch.from_numpy(PIXELS["test"]), [0, 1, 0, 1])
    assert task("imagenet") == "imagenet"
    with tiny.images(vision.Config(), vision.QUICK, Source(str(tmp_path / "imagenet"), "m")) as found:
        assert Path(found["test"]) == tmp_path / "imagenet" / "val"
    config = vision.Config()
    sizes = [config.features("snnk-relu", name) for name in ("imagenet", "ImageNet-1k", "cifar100", "flowers")]
    assert sizes == [32, 32, 16, 16] and config.features("houlsby", "imagenet") == 48


def test_vision_runs_on_cifar100(tmp_path, monkeypatch):
    shrink(monkeypatch, "cifar100", {"train": 80, "test": 24})
    folder = tmp_path / "cifar100"
    folder.mkdir()
    for split, rows in (("train", 80), ("test", 24)):
        records = np.zeros((rows, 3074), np.uint8)
        records[:, 1] = 50 + np.arange(rows) % 2
        records[::2, 2:1026] = 200  # red
        (folder / f"{split}.bin").write_bytes(records.tobytes())
    config = replace(vision.QUICK, methods=("linear-probe", "bundled"))
    monkeypatch.setattr(vision, "QUICK", config)
    results = Results(tmp_path / "rows.json", config)
    rows = list(vision.run(config, results, Source(str(folder))))
    assert [(r["task"], r["method"], r["paper"]) for r in rows] == [
        ("cifar100", "linear-probe", None),
        ("cifar100", "bundled", 82.73),
    ]
    assert rows[0]["score"] > 90
    (claim,) = vision.claims(results)
    assert (
        claim["paper"] == "cifar100: bundled 82.73, closely matching the baseline"
        and claim["tolerance"] == "1.0 points"
    )
    results.rows = [{**row, "task": task} for row in rows for task in ("cifar10", "cifar100")]
    assert [axes.get_title() for axes in vision.plot(results).axes] == ["cifar10", "cifar100"]


@pytest.mark.parametrize(
    ("task", "method", "score", "holds"),
    [
        ("cifar10", "snnk-pooler", 89.0, True),
        ("cifar10", "snnk-pooler", 88.9, False),
        ("cifar100", "snnk-pooler", 90.1, True),
        ("cifar100", "snnk-pooler", 90.0, False),  # "outperforms"
        ("cifar100", "bundled", 89.0, True),
        ("cifar100", "bundled", None, False),
    ],
)
def test_claims_of_vision(tmp_path, task, method, score, holds):
    results = Results(tmp_path / "rows.json", replace(vision.QUICK, test_rows=10**6))
    for name, value in (("linear-probe", 90.0), (method, score)):
        key = {"part": "table", "task": task, "method": name, "seed": 0, "model": "some", "steps": 1, "trained": 7}
        results.rows.append({**key, "score": value, "validation": value, "start_validation": 0.0})
    (claim,) = vision.claims(results)
    assert claim["holds"] is holds and claim["paper"].startswith(f"{task}: {method}")
    assert ("diverged" in claim["ours"]) == (score is None)


def write_table(path, header, rows):
    text = "".join(line + "\n" for line in ([header] if header else []) + [",".join(row) for row in rows])
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def test_higgs_has_no_header(tmp_path, monkeypatch):
    shrink(monkeypatch, "higgs", {"all": 3})
    rows = [["1.000000000000000000e+00", "8.692932128906250000e-01", "-6e-1"], ["0", "0.5", "2"], ["1.0", "3", "4"]]
    for place in (tmp_path, tmp_path / "higgs"):
        place.mkdir(exist_ok=True)
        write_table(place / "HIGGS.csv.gz", None, rows)
        split = data.higgs(Source(str(tmp_path)))
        (place / "HIGGS.csv.gz").unlink()
        assert split.y.tolist() == [1, 0, 1]
        assert torch.allclose(split.x, torch.tensor([[0.8692932, -0.6], [0.5, 2.0], [3.0, 4.0]]))
    write_table(tmp_path / "HIGGS.csv", None, rows[:2])
    with pytest.raises(ValueError, match="higgs, all, classes: 2 rows instead of 3"):
        data.higgs(Source(str(tmp_path)))


def test_hepmass_has_a_header_and_two_files(tmp_path, monkeypatch):
    shrink(monkeypatch, "hepmass", {"train": 2, "test": 1})
    header = "# label,f0,mass"
    write_table(tmp_path / "all_train.csv.gz", header, [["1.0", "-0.5", "1000"], ["0.0", "0.25", "500"]])
    write_table(tmp_path / "all_test.csv", header, [["1.0", "7", "750.0"]])
    split = data.hepmass(Source(str(tmp_path)))
    assert split.y.tolist() == [1, 0, 1] and split.x.tolist() == [[-0.5, 1000], [0.25, 500], [7, 750]]
    raw = (tmp_path / "all_train.csv.gz").read_bytes()
    for harmed in (cut(raw), no_gzip(raw)):
        (tmp_path / "all_train.csv.gz").write_bytes(harmed)
        with pytest.raises(ValueError, match=r"all_train\.csv\.gz is damaged"):
            data.hepmass(Source(str(tmp_path)))
    (tmp_path / "all_test.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"hepmass: no all_test\.parquet or all_test\.csv .*/347/hepmass"):
        data.hepmass(Source(str(tmp_path)))


def test_uci_is_not_on_the_hub(capsys, tmp_path):
    code, _, err = run(capsys, "reproduce", "uci", "--data-dir", "hub", "--out", str(tmp_path))
    assert code == 2 and err.count("\n") == 1
    assert "not loaded from the hub" in err and "archive.ics.uci.edu" in err and "--data-dir" in err


def test_mnist_of_the_hub_is_flat_and_in_zero_to_one(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for split in FEW:
        for label in range(2):
            folder = tmp_path / "hub" / split / str(label)
            folder.mkdir(parents=True)
            Image.fromarray(np.full((28, 28), 255 * label, np.uint8)).save(folder / "a.png")
    shrink(monkeypatch, "mnist", dict.fromkeys(FEW, 2), hub=str(tmp_path / "hub"))
    for part in data.mnist(Source(HUB)).values():
        assert part.x.shape == (2, 784) and part.x.dtype == torch.float32 and part.y.tolist() == [0, 1]
        assert part.x.unique(dim=1).flatten().tolist() == [0, 1]


def test_rows_of_the_hub_are_counted(tmp_path, monkeypatch):
    """A local folder in the place of a hub name takes the same path through the library."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    for split, pixels in PIXELS.items():
        for i, image in enumerate(pixels):
            (folder / split / str(i % 2)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / split / str(i % 2) / f"{i}.png")
    names = {"hub": str(folder), "columns": ("image", "label")}
    shrink(monkeypatch, "cifar10", {"train": 2, "test": 2}, hub_rows=FEW, **names)
    for source in (Source(HUB), Source(str(folder))):
        splits = data.cifar10(source)
        assert {split: len(part) for split, part in splits.items()} == FEW
        assert {x.numpy().tobytes() for x in splits["test"].x} == {x.tobytes() for x in PIXELS["test"]}
    shrink(monkeypatch, "cifar10", FEW, hub_rows={"train": 6, "test": 5}, **names)
    with pytest.raises(ValueError, match="cifar10, test, classes: 4 rows instead of 5"):
        data.cifar10(Source(HUB))
    assert data.DATASETS["cifar100"].hub_rows is None  # then `rows` are the hub's


def hub_of_glue(root, tasks):
    """The layout of nyu-mll/glue: a configuration a task, Parquet files, classes as numbers."""
    root.mkdir(parents=True)
    lines = ["---", "configs:"]
    for task, texts in tasks.items():
        lines += [f"- config_name: {task}", "  data_files:"]
        for split in ("train", "validation_matched" if task == "mnli" else "validation"):
            labels = pa.array([3.8, 0.0, 5.0], pa.float32()) if task == "stsb" else pa.array([0, 1, 0], pa.int64())
            columns = {name: [f'{split} "{name}\ta', "b\nc", " d"] for name in texts}
            (root / task).mkdir(exist_ok=True)
            pq.write_table(pa.table({**columns, "label": labels, "idx": [0, 1, 2]}), root / task / f"{split}.parquet")
            lines += [f"  - split: {split}", f"    path: {task}/{split}.parquet"]
    (root / "README.md").write_text("\n".join([*lines, "---", ""]))


def test_glue_from_the_hub_is_as_from_files(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)  # where a folder of the hub's name is found first
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    pairs = {"stsb": ("sentence1", "sentence2"), "mnli": ("premise", "hypothesis"), "cola": ("sentence",)}
    hub_of_glue(tmp_path / GLUE_HUB, pairs)
    config = replace(glue.Config(), tasks=tuple(pairs))
    with caplog.at_level(logging.WARNING, "snnk"), tiny.glue(config, glue.QUICK, Source(HUB, "m")) as files:
        for task, texts in pairs.items():
            row = GLUE[task]
            folder = Path(files["data_dir"], row.folder)
            for part, split in (("train", "train"), (row.dev, row.dev.replace("dev", "validation"))):
                found = read_columns(folder / f"{part}.tsv", row.columns)
                assert found[row.text] == [f'{split} "{texts[0]} a', "b c", "d"]
                assert found[row.label] == (["3.800", "0.000", "5.000"] if task == "stsb" else ["0", "1", "0"])
                assert row.pair is None or found[row.pair][0] == f'{split} "{texts[1]} a'
    assert "MNLI: 3 and 3 rows of train and dev where GLUE has 392,702 and 9,815" in caplog.messages


def test_glue_is_looked_for_before_the_model(capsys, tmp_path):
    tiny.make_glue(tmp_path / "data" / "glue")
    (tmp_path / "data" / "glue" / "MRPC" / "dev.tsv").unlink()
    args = ["--data-dir", str(tmp_path / "data"), "--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    code, _, err = run(capsys, "reproduce", "glue", *args)
    assert code == 2 and "no dev.tsv or dev.tsv.gz of MRPC" in err and "gluebenchmark.com" in err
    assert str(tmp_path / "data" / "glue") in err


def test_one_folder_for_all(tmp_path, caplog):
    tiny.make_glue(tmp_path / "glue")
    for place in (tmp_path, tmp_path / "glue"):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "snnk"),
            tiny.glue(glue.Config(), glue.QUICK, Source(str(place), "m")) as files,
        ):
            assert files == {"model": "m", "data_dir": str(tmp_path / "glue")}
        assert len(caplog.messages) == 3
        assert caplog.messages[0] == "CoLA: 80 and 24 rows of train and dev where GLUE has 8,551 and 1,043"


@pytest.fixture
def two(monkeypatch):
    """Of the experiments one that needs data and takes seeds, and after it one with neither."""
    chosen = ["uci", "trainable-parameters"]
    monkeypatch.setattr("snnk.experiments.lab.runs.names", lambda: chosen)
    monkeypatch.setattr(uci, "QUICK", replace(uci.QUICK, widths=(8,), rows=300))


def test_all_with_seeds(capsys, tmp_path, two):
    code, out, err = run(capsys, "reproduce", "--all", "--quick", "--seeds", "2", "--out", str(tmp_path))
    assert (code, err) == (0, "")
    assert "--seeds 2 does not apply to trainable-parameters: " in out
    stored = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("uci", "trainable-parameters")}
    assert {row["seed"] for row in stored["uci"]["rows"]} == {0, 1}
    assert stored["uci"]["source"] == {"model": "", "data": "made by --quick"}
    assert stored["trainable-parameters"]["source"] == {"model": "", "data": "none"}


def test_all_without_data_runs_what_it_can(capsys, tmp_path, two):
    args = ["--all", "--quick", "--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    code, out, err = run(capsys, "reproduce", *args)
    assert code == 2 and err == "snnk: 1 of 2 were left out, for the reasons above: uci\n"
    assert "uci is left out: covertype: no covtype.parquet" in out and "archive.ics.uci.edu" in out
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"trainable-parameters"}
    stored = json.loads((tmp_path / "out" / "trainable-parameters.json").read_text())
    assert stored["source"] == {"model": "", "data": "none"}  # whatever --data-dir says


def test_all_stops_where_nothing_can_be_written(capsys, tmp_path, two):
    (tmp_path / "file").write_text("mine")
    code, out, err = run(capsys, "reproduce", "--all", "--quick", "--out", str(tmp_path / "file" / "out"))
    assert code == 2 and "left out" not in out + err and str(tmp_path / "file") in err


def test_all_takes_no_model(capsys, tmp_path):
    code, _, err = run(capsys, "reproduce", "--all", "--quick", "--model", "bert", "--out", str(tmp_path))
    assert code == 2 and "--all takes no --model" in err and not list(tmp_path.iterdir())


def test_needs_say_whether_there_are_data():
    without = {name for name in names() if not data.needs_data(load(name).NEEDS)}
    assert without == {
        "pointwise",
        "siren",
        "qpnn",
        "trainable-parameters",
        "bundled-transformers",
        "bundled-latency",
        "estimators",
    }
