"""Memory of a fit does not depend on the number of rows, once its samples are full."""

import gc
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from snnk.tabular import FitConfig, Part, fit, prepare

BATCH, FEW, MANY = 1000, 10, 60
CONFIG = FitConfig("y", 24, feature_map="random-fourier", bandwidth=1.0)


def batch(index):
    """Rows with numbers, a category of few values and one of many."""
    rng = np.random.default_rng(index)
    x = rng.normal(size=(BATCH, 3))
    k = rng.integers(0, 300, BATCH)
    columns = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "few": k % 3, "k": [f"k{i}" for i in k]}
    return pa.record_batch({**columns, "y": np.sin(x[:, 0]) + k / 300})


def bytes_held():
    """Bytes of Python objects and numpy arrays, of Arrow, and of tensors; the same on every machine."""
    gc.collect()
    tensors = {}
    for found in gc.get_objects():
        if type(found) is torch.Tensor and found.device.type == "cpu":
            storage = found.untyped_storage()
            tensors[storage.data_ptr()] = storage.nbytes()
    return tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() + sum(tensors.values())


class Watch:
    """The most bytes at the end of each pass over the rows."""

    def __init__(self, batches):
        self.rows, self.most = batches * BATCH, 0

    def __call__(self, what, done, total):
        if done == self.rows:
            self.most = max(self.most, bytes_held())


def fit_stream(batches, folder, watch):
    fit(lambda: (batch(i) for i in range(batches)), folder / "m", CONFIG, progress=watch)


def fit_file(batches, folder, watch):
    with pq.ParquetWriter(folder / "t.parquet", batch(0).schema) as writer:
        for i in range(batches):
            writer.write_batch(batch(i))
    fit(folder / "t.parquet", folder / "m", CONFIG, progress=watch)


def sum_parts(batches, folder, watch):
    part = Part(prepare(lambda: (batch(i) for i in range(FEW)), CONFIG))
    part.read((batch(i) for i in range(batches)), progress=watch)


@pytest.fixture
def small(monkeypatch):
    """Samples that the first rows fill."""
    monkeypatch.setattr("snnk.tabular.streams.BATCH_ROWS", BATCH)
    monkeypatch.setattr("snnk.tabular.source.BATCH_ROWS", BATCH)
    for name in ("start.MOST_ROWS", "start.ROWS", "sample.MOST_HELD"):
        monkeypatch.setattr(f"snnk.tabular.{name}", 128)


@pytest.mark.parametrize("run", [fit_stream, fit_file, sum_parts])
def test_not_a_byte_is_kept_per_row(run, tmp_path, small):
    """Not even a flag: six times the rows need less than one byte more for each further row."""
    most = {}
    tracemalloc.start()
    try:
        for index, batches in enumerate((2, FEW, MANY)):  # the first fills caches of modules
            (tmp_path / str(index)).mkdir()
            before, watch = bytes_held(), Watch(batches)
            run(batches, tmp_path / str(index), watch)
            most[batches] = watch.most - before
            assert watch.most
    finally:
        tracemalloc.stop()
    assert most[MANY] - most[FEW] < (MANY - FEW) * BATCH, most
