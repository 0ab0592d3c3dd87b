"""Data and models of several tests."""

import numpy as np
import pytest

from snnk.experiments.lab import data, tiny

from helpers.experiments import shrink, write_idx


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """A folder like MNIST's, with 40 and 20 images of bars whose place is their class."""
    shrink(monkeypatch, "mnist", {"train": 40, "test": 20})
    folder = tmp_path / "mnist"
    folder.mkdir()
    for stem, rows, end in (("train", 40, ".gz"), ("t10k", 20, "")):
        labels = np.arange(rows) % 10
        images = np.zeros((rows, 28, 28))
        images[np.arange(rows), 2 * labels] = 255
        write_idx(folder / f"{stem}-images-idx3-ubyte{end}", images)
        write_idx(folder / f"{stem}-labels-idx1-ubyte{end}", labels)
    return data.Source(str(tmp_path))


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A tiny BERT and files in the format of GLUE."""
    found = tmp_path_factory.mktemp("tiny")
    return {"model": tiny.make_bert(found / "tiny-bert"), "data_dir": tiny.make_glue(found)}
