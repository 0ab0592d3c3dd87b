"""Where model and data come from: files, the hub, or generated."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from snnk.experiments import glue, vision
from snnk.experiments.lab import data, tiny
from snnk.experiments.lab.data import HUB, Source
from snnk.finetune.glue import GLUE, GLUE_HUB
from snnk.hf.data import labelled_images, open_image, read_columns


def hub_of_glue(root, tasks):
    """nyu-mll/glue has one configuration per task, in Parquet files, with classes as numbers."""
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


def test_glue_is_looked_for_before_the_model(run, tmp_path):
    tiny.make_glue(tmp_path / "data" / "glue")
    (tmp_path / "data" / "glue" / "MRPC" / "dev.tsv").unlink()
    args = ["--data-dir", str(tmp_path / "data"), "--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    code, _, err = run("reproduce", "glue", *args)
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
        assert len(caplog.messages) == 4
        assert caplog.messages[0] == "CoLA: 80 and 24 rows of train and dev where GLUE has 8,551 and 1,043"


def test_where_model_and_data_come_from(tmp_path, run):
    made = tiny.make_glue(tmp_path / "made")
    with tiny.glue(glue.Config(), glue.QUICK, Source(made)) as found:
        assert found == {"model": "bert-base-uncased", "data_dir": made}
    with tiny.glue(replace(glue.QUICK, seeds=4), glue.QUICK, Source(model="own")) as found:
        assert found["model"] == "own" and Path(found["data_dir"], "MRPC", "dev.tsv").is_file()
    for name, message in (("glue", "gluebenchmark.com"), ("vision", "cifar10")):
        code, _, err = run("reproduce", name, "--out", str(tmp_path))
        assert code == 2 and message in err and "--data-dir" in err and not (tmp_path / f"{name}.json").exists()
    code, _, err = run("reproduce", "glue", "--data-dir", made, "--model", str(tmp_path))
    assert code == 2 and str(tmp_path) in err


def test_images_of_cifar_and_of_folders(tmp_path, monkeypatch):

    monkeypatch.setitem(data.DATASETS, "cifar10", replace(data.DATASETS["cifar10"], rows={"train": 6, "test": 6}))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    mosaic = pixels.reshape(2, 3, 32, 32, 3).swapaxes(1, 2).reshape(64, 96, 3)
    for name in ("data_batch_1", "test_batch"):
        Image.fromarray(mosaic).save(tmp_path / f"{name}.webp", lossless=True)
    np.savez(tmp_path / "labels.npz", train=np.arange(6) // 2, test=np.arange(6) // 2)
    config = replace(vision.Config(), train_rows=4, test_rows=6)
    with tiny.images(config, vision.QUICK, Source(str(tmp_path), "m")) as found:
        assert found["model"] == "m" and len(labelled_images(Path(found["train"]))[0]) == 4
        names, classes = labelled_images(Path(found["test"]))
        read = {(np.asarray(open_image(file)).tobytes(), int(c)) for file, c in zip(names, classes, strict=True)}
    assert read == {(image.tobytes(), i // 2) for i, image in enumerate(pixels)}
    tiny.write_images(tmp_path / "train", torch.from_numpy(pixels), [0, 1] * 3)
    tiny.write_images(tmp_path / "test", torch.from_numpy(pixels), [0, 1] * 3)
    with tiny.images(config, vision.QUICK, Source(str(tmp_path), "m")) as found:
        assert (found["train"], found["test"]) == (str(tmp_path / "train"), str(tmp_path / "test"))
