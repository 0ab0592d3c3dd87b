"""Small data sets in the formats of MNIST and others, and rows of results made by hand."""

import gzip
from dataclasses import replace

import numpy as np

from snnk.experiments.lab import data
from snnk.experiments.lab.records import Results

MEASURED = ("seconds", "start_seconds", "peak_GB", "commit", "environment")  # what differs between two runs


class Rows(Results):
    """Rows made by hand, of one seed unless the configuration has others."""

    def __init__(self, rows, **config):
        self.rows, self.config = rows, {"seed": 0, "epochs": 3, **config}


def shrink(monkeypatch, name, rows, **others):
    """Let a data set have other numbers of rows than it has."""
    monkeypatch.setitem(data.DATASETS, name, replace(data.DATASETS[name], rows=rows, **others))


def write_idx(path, array):
    """Write an array of bytes in the format of MNIST, gzipped if the name ends in .gz."""
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    body = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)


def table_row(task, method, score, features=None, trained=10, seed=0):
    facts = {"metric": "mcc", "model": "some", "steps": 9, "pooler_trained": True, "late_gain": 0.0}
    facts |= {
        "validation": score,
        "validation_loss": 1.0,
        "start_validation": 0.0,
        "learning_rate": 1e-3,
        "trained": trained,
    }
    return {"task": task, "method": method, "features": features, "score": score, "seed": seed, **facts}
