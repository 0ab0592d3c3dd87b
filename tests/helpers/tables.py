"""A table and its configuration, and fits that are interrupted or run in other processes."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from snnk.tabular import FitConfig, TableModel, fit

CONFIG = FitConfig("y", 64, feature_map="random-fourier", bandwidth=1.0, block_dtype="float64", lam=1e-2)
FILES = {"model.json", "model.safetensors", "report.html", "report.json"}  # of a model


def make_table(rows=3000, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(5, 3, size=(rows, 3))
    kind = rng.choice(["red", "green", "blue"], rows)
    y = np.sin(x[:, 0] / 3) + 0.3 * x[:, 1] * (kind == "red") + 0.01 * rng.normal(size=rows)
    columns = {f"x{i}": x[:, i] for i in range(3)}
    return pa.table({**columns, "count": rng.integers(0, 9, rows), "kind": kind, "y": y})


def weights(folder):
    """[A, b] of a model, (t, m + 1)."""
    model = TableModel.load(folder)
    return torch.cat([model.weight, model.bias[:, None]], 1)


def predictions(folder, source):
    return np.concatenate([p for p, _ in TableModel.load(folder).predict(source)])


def after(count):
    """A progress function that interrupts the second pass after more than `count` rows."""

    def stop(what, rows, total):
        if what == "fitting" and rows > count:
            raise KeyboardInterrupt

    return stop


# Does what torchrun does, but imports everything once, and forks.
WORKERS = """
import os, signal, socket, sys
import pyarrow.compute, pyarrow.dataset, pyarrow.parquet, safetensors.torch, torch.distributed
import snnk.tabular
from snnk.cli import main

count, *args = sys.argv[1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
running = []
for rank in range(int(count)):
    running.append(os.fork())
    if not running[-1]:
        signal.alarm(600)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv = ["snnk", *args]
        main(args)
        sys.exit()
while running:
    pid, status = os.wait()
    running.remove(pid)
    if status:
        for other in running:
            os.kill(other, signal.SIGTERM)
        sys.exit(1)
"""


def run_fit(source, out, *args, workers=1, wait=True, double=True, torchrun=False):
    """`snnk fit` in processes of its own."""
    launch = [sys.executable, "-m", "snnk.cli"]
    if torchrun:
        launch[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    elif workers > 1:
        launch[1:] = ["-c", WORKERS, str(workers)]
    options = ["fit", str(source), "--target", "y", "--num-features", "64", "--lam", "0.01", "--out", str(out)]
    options += ["--feature-map", "random-fourier", "--bandwidth", "1"]
    options += ["--block-dtype", "float64"] * double
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*launch, *options, *args], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if wait:
        output = process.communicate(timeout=300)[0].decode()
        assert process.returncode == 0, output
    return process


def make_classes(rows=3000, seed=0):
    """A table with four classes, one of which has 0.4 % of the rows; columns matter in the order of their names."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)) * [1, 10, 0.1, 1]
    kind = rng.choice(["red", "green", "blue"], rows)
    value = 3 * x[:, 0] + 0.15 * x[:, 1] + (kind == "red") + 0.4 * rng.logistic(size=rows)
    y = np.where(value < -1, "low", np.where(value < 2, "middle", "high"))
    y[rng.choice(rows, rows // 250, replace=False)] = "rare"
    return pa.table({**{f"x{i}": x[:, i] for i in range(4)}, "kind": kind, "y": y})


def split_fit(table, folder, rows, **config):
    """A model fitted to the first rows of a table, and the other rows as inputs and targets of the model."""
    pq.write_table(table[:rows], folder / "train.parquet")
    settings = {"num_features": 64, "feature_map": "random-fourier", "bandwidth": 1.0, "block_dtype": "float64"}
    fit(folder / "train.parquet", folder / "model", FitConfig("y", **settings | config))
    model = TableModel.load(folder / "model")
    x, y, _ = model.columns.encode(table[rows:].combine_chunks().to_batches()[0], "rows")
    return model, x, y
