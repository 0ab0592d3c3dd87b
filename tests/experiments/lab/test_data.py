"""Loaders of data sets: whole, damaged, miscounted and missing files."""

import gzip
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from snnk.experiments import load, names, vision
from snnk.experiments.lab import data, tiny
from snnk.experiments.lab.data import HUB, Source

from helpers.experiments import shrink, write_idx

FEW = {"train": 6, "test": 4}


PIXELS = {s: np.random.default_rng(n).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for s, n in FEW.items()}


def test_mnist_from_files(digits):
    splits = data.mnist(digits)
    assert splits["train"].x.shape == (40, 784) and len(splits["test"]) == 20
    assert splits["train"].x.max() == 1 and splits["train"].y.tolist() == [i % 10 for i in range(40)]
    assert (splits["test"].x.reshape(20, 28, 28).sum(2).argmax(1) == 2 * splits["test"].y).all()


def test_a_file_cut_short_or_with_other_rows_is_refused(digits, tmp_path):
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="not a complete idx file"):
        data.mnist(digits)
    write_idx(path, np.zeros(19))
    with pytest.raises(ValueError, match="19 rows instead of 20"):
        data.mnist(digits)


def test_missing_data_says_what_and_where(run, tmp_path):
    code, _, err = run("reproduce", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"))
    assert code == 2 and err.count("\n") == 1
    assert "train-images-idx3-ubyte" in err and str(tmp_path) in err and "yann.lecun.com" in err
    code, _, err = run("reproduce", "uci", "--out", str(tmp_path / "out"))
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
            folder = tmp_path / "images" / split / str(label)
            folder.mkdir(parents=True)
            Image.fromarray(np.full((28, 28), 255 * label, np.uint8)).save(folder / "a.png")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    known = replace(data.DATASETS["mnist"], hub=str(tmp_path / "images"), rows={"train": 2, "test": 2})
    monkeypatch.setitem(data.DATASETS, "mnist", known)
    splits = data.mnist(data.Source(data.HUB))
    assert splits["train"].x.shape == (2, 784) and (splits["train"].x.mean(1).long() == splits["train"].y).all()


def test_stratified_halves_are_disjoint_and_fair():
    y = torch.arange(100) % 4
    kept, held = data.stratified(y, 0.25, seed=0)
    assert sorted(torch.cat([kept, held]).tolist()) == list(range(100))
    assert torch.bincount(y[held]).tolist() == [6, 6, 6, 6]


def test_models_of_one_name_are_not_one_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data.Source("d", "org/bert").names["model"] == "org/bert" != data.Source("d", "bert").names["model"]
    assert data.Source("d", ".").names["model"] == data.Source("d", str(tmp_path)).names["model"] == tmp_path.name


@pytest.fixture
def noise(tmp_path, monkeypatch):
    """MNIST's four files, gzipped, with images of noise, which zlib cannot shorten."""
    shrink(monkeypatch, "mnist", FEW)
    for stem, rows in (("train", 6), ("t10k", 4)):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte.gz", np.random.default_rng(0).integers(0, 256, (rows, 28, 28)))
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte.gz", np.arange(rows))
    return tmp_path


def cut(raw):
    return raw[: len(raw) // 2]


def changed(raw):
    return raw[:10] + bytes([raw[10] | 6]) + raw[11:]  # a kind of block that zlib does not know


def no_gzip(raw):
    return b"<html>not found</html>"


@pytest.mark.parametrize("harm", [cut, changed, no_gzip])
@pytest.mark.parametrize("stem", ["train-images-idx3", "t10k-labels-idx1"])
def test_a_damaged_download_is_one_line(run, tmp_path, noise, stem, harm):
    path = noise / f"{stem}-ubyte.gz"
    path.write_bytes(harm(path.read_bytes()))
    code, _, err = run("reproduce", "mnist", "--data-dir", str(noise), "--out", str(tmp_path / "out"))
    assert code == 2 and err.count("\n") == 1 and f"{path} is damaged" in err and "get it anew" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("what", "told"), [("images-idx3", "inputs"), ("labels-idx1", "classes")])
def test_images_and_labels_are_both_counted(noise, what, told):
    images = np.zeros((3, 28, 28) if what == "images-idx3" else 3)
    write_idx(noise / f"t10k-{what}-ubyte.gz", images)
    with pytest.raises(ValueError, match=rf"mnist, test, {told}: 3 rows instead of 4; get it anew: yann\.lecun\.com"):
        data.mnist(Source(str(noise)))


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


def test_uci_is_not_on_the_hub(run, tmp_path):
    code, _, err = run("reproduce", "uci", "--data-dir", "hub", "--out", str(tmp_path))
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
