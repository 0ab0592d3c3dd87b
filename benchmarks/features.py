"""Ways to find features for a closed form, tried against each other on rows that were held out of the training rows.

    python benchmarks/features.py --covertype FILE [--flights FILE] [--out FILE]
    python benchmarks/features.py --quick

The files are those of benchmarks/tables.py. No test row of that benchmark is read: a tenth of its training rows, at
most 40,000, are validation rows here. All ways have the same number of features, and the same closed form behind them,
of all training rows. Features are found on as many rows as `snnk fit` would take. Inputs are encoded as in `snnk fit`,
and "bins" are its piecewise linear codes of numbers. Every way has a process of its own with one thread; its processor
time is that of finding the features and of the closed form.

- "learned" is the default of `snnk fit`, and "random" its random Fourier features; their bandwidth, and that of all
  other random features here, is the best of six by generalised cross-validation.
- "gradients, k rounds" are random features whose frequencies are multiplied k times by the root of the mean outer
  product of the gradients of the fit before (recursive feature machines; Radhakrishnan et al., 2024).
- "learned from gradients" begins the training of "learned" at such frequencies.
- "greedy" takes four times as many random features of all bandwidths, and chooses those that lower the squared error
  most, one after the other, from their Gram matrix on 50,000 rows. "learned, greedy" chooses half of learnt features.
- "second layer" has random features of learnt features, or of learnt outputs, in place of some learnt features.
  "second layer, learnt" trains two layers of cosines together, as `snnk fit --feature-map learned-deep` does.
- "learned, twice the features" shows what time buys without any of them.

--quick has small tables of scikit-learn.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tables import load
from torch import Tensor

from snnk.experiments.lab.records import Results, Row
from snnk.ridge.atoms import choose_atoms
from snnk.ridge.sums import RidgeStats
from snnk.tabular import learned
from snnk.tabular.calibration import PlattScaling, log_loss, roc_auc
from snnk.tabular.learned import BANDWIDTHS, LearnedFeatures, find_bins, learn
from snnk.tabular.model import ROWS
from snnk.tabular.sample import MOST_ROWS
from snnk.tabular.scan import Scan
from snnk.tabular.source import Table

MOST_VALIDATION = 40_000
CHOICE_ROWS, BANDWIDTH_ROWS, GRADIENT_ROWS = 50_000, 20_000, 50_000
CANDIDATES = 4  # times the number of features
SMALL = ("digits", "breast_cancer", "diabetes")
Phi = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    features: int = 512
    seeds: int = 1


@dataclass(frozen=True)
class Rows:
    """Encoded rows: x (n, d) float32 and targets y (n, t), standardised or one-hot."""

    x: Tensor
    y: Tensor
    classes: bool

    def first(self, n: int) -> Rows:
        return Rows(self.x[:n], self.y[:n], self.classes)


# Random features: their frequencies W (h, d) for cos(W e + b), with e = x or (x, bins).


@dataclass(frozen=True)
class Cosines:
    """cos(W e(x) + b)."""

    encode: Phi
    weight: Tensor
    phase: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(self.encode(x), self.weight, self.phase).cos()


def encoder(rows: Rows, binned: bool) -> tuple[Phi, int]:
    if not binned:
        return lambda x: x.clamp(-learned.REACH, learned.REACH), rows.x.shape[1]
    source, edges = find_bins(rows.x[:100_000])
    fm = learned._with_bins(rows.x.shape[1], 2, (source, edges))
    return fm.encode, fm.projection.shape[1]


def draw(encode: Phi, width: int, m: int, seed: int, root: Tensor | None = None, scale: float = 1.0) -> Cosines:
    """m features with Gaussian frequencies, multiplied by `root` (width, width)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(m, width, generator=generator)
    weight = scale * (weight if root is None else weight @ root)
    return Cosines(encode, weight, 2 * math.pi * torch.rand(m, generator=generator))


def typical(encode: Phi, rows: Rows, root: Tensor | None = None) -> float:
    """One over the typical length of inputs, so that a bandwidth is the standard deviation of angles."""
    e = encode(rows.x[:ROWS])
    e = e - e.mean(0)
    e = e if root is None else e @ root
    return 1 / float(e.square().sum(1).mean().sqrt())


def choose_scale(encode: Phi, width: int, rows: Rows, m: int, seed: int, root: Tensor | None = None) -> float:
    unit, part = typical(encode, rows, root), rows.first(BANDWIDTH_ROWS)
    scores = {b: sums(draw(encode, width, m, seed, root, b * unit), part).solve("gcv").score or 0.0 for b in BANDWIDTHS}
    return unit * min(scores, key=lambda b: scores[b])


@torch.no_grad()
def sums(phi: Phi, rows: Rows) -> RidgeStats:
    stats: RidgeStats | None = None
    for x, y in zip(rows.x.split(ROWS), rows.y.split(ROWS), strict=True):
        found = phi(x)
        stats = stats or RidgeStats(found.shape[1], y.shape[1], block_dtype=torch.float32)
        stats.update(found, y)
    assert stats is not None
    return stats


def random(rows: Rows, m: int, seed: int, binned: bool = False) -> Phi:
    encode, width = encoder(rows, binned)
    return draw(encode, width, m, seed, scale=choose_scale(encode, width, rows, m, seed))


def gradient_root(phi: Cosines, rows: Rows) -> Tensor:
    """The root of the mean outer product of the gradients of the fit on e, (width, width), of mean diagonal 1."""
    part = rows.first(GRADIENT_ROWS)
    weight = sums(phi, part).solve("gcv").weight.float()  # (t, h)
    total = torch.zeros(phi.weight.shape[1], phi.weight.shape[1], dtype=torch.float64)
    with torch.no_grad():
        for x in part.x.split(ROWS):
            slope = -F.linear(phi.encode(x), phi.weight, phi.phase).sin()
            for row in weight:  # the gradient of one output, (n, width)
                gradient = (slope * row) @ phi.weight
                total += (gradient.T @ gradient).double()
    values, vectors = torch.linalg.eigh(total / total.diagonal().mean())
    return ((vectors * values.clamp_min(0).sqrt()) @ vectors.T).float()


def gradients(rows: Rows, m: int, seed: int, rounds: int, binned: bool = False) -> Phi:
    encode, width = encoder(rows, binned)
    phi = draw(encode, width, m, seed, scale=choose_scale(encode, width, rows, m, seed))
    for index in range(rounds):
        root = gradient_root(phi, rows)
        phi = draw(encode, width, m, seed + index + 1, root, choose_scale(encode, width, rows, m, seed, root))
    return phi


def greedy(rows: Rows, m: int, seed: int, binned: bool = False, rounds: int = 0) -> Phi:
    encode, width = encoder(rows, binned)
    root = None
    if rounds:
        found = gradients(rows, m, seed, rounds, binned)
        assert isinstance(found, Cosines)
        root = gradient_root(found, rows)
    unit, each = typical(encode, rows, root), CANDIDATES * m // len(BANDWIDTHS)
    drawn = [draw(encode, width, each, seed + i, root, b * unit) for i, b in enumerate(BANDWIDTHS)]
    weight, phase = torch.cat([p.weight for p in drawn]), torch.cat([p.phase for p in drawn])
    order = chosen(Cosines(encode, weight, phase), rows, m)
    return Cosines(encode, weight[order], phase[order])


def chosen(phi: Phi, rows: Rows, m: int) -> Tensor:
    """The m features that are chosen from the Gram matrix."""
    stats = sums(phi, rows.first(CHOICE_ROWS))
    gram, cross, _ = stats.centred()
    return choose_atoms(gram, cross, m, max(stats.solve("gcv").lam, 1e-6 * float(gram.diagonal().mean())))[0]


# Learnt features.


def learnt(rows: Rows, m: int, seed: int, deep: bool = False) -> Phi:
    return learn(rows.x, rows.y, m, classes=rows.classes, seed=seed, deep=deep).phi


def twice(rows: Rows, m: int, seed: int) -> Phi:
    return learnt(rows, 2 * m, seed)


def learnt_greedy(rows: Rows, m: int, seed: int) -> Phi:
    phi = learnt(rows, 2 * m, seed)
    order = chosen(phi, rows, m)
    return lambda x: phi(x)[:, order]


def behind(rows: Rows, m: int, seed: int, share: float, outputs: bool) -> Phi:
    """Learnt features, and behind them random ones: of their cosines, or of the inputs and their outputs."""
    more = round(share * m)
    first = learn(rows.x, rows.y, m - more, classes=rows.classes, seed=seed)
    t = first.outputs if isinstance(first, LearnedFeatures) else 0

    def inner(x: Tensor) -> Tensor:
        found = first.phi(x)
        return torch.cat([x.clamp(-3, 3), found[:, -t:] / found[:, -t:].std()], 1) if outputs and t else found

    with torch.no_grad():
        width = inner(rows.x[:ROWS]).shape[1]
    second = draw(inner, width, more, seed, scale=choose_scale(inner, width, rows, more, seed))
    return lambda x: torch.cat([first.phi(x), second(x)], 1)


def from_gradients(rows: Rows, m: int, seed: int) -> Phi:
    """The training of "learned" with other first frequencies."""
    found = gradients(rows.first(100_000), m, seed, 1, binned=True)
    assert isinstance(found, Cosines)
    make = learned._with_bins

    def begin(*args: Any, **options: Any) -> LearnedFeatures:
        fm = make(*args, **options)
        if fm.outputs:
            fm.projection.copy_(found.weight[: len(fm.phase)])
            fm.phase.copy_(found.phase[: len(fm.phase)])
        return fm

    with mock.patch.object(learned, "_with_bins", begin):
        return learnt(rows, m, seed)


WAYS: dict[str, Callable[[Rows, int, int], Phi]] = {
    "learned": learnt,
    "random": random,
    "random of bins": partial(random, binned=True),
    **{f"gradients, {k} rounds": partial(gradients, rounds=k) for k in (1, 2, 3)},
    **{f"gradients of bins, {k} rounds": partial(gradients, rounds=k, binned=True) for k in (1, 3)},
    "learned from gradients": from_gradients,
    "greedy": greedy,
    "greedy of bins": partial(greedy, binned=True),
    "greedy of bins, gradients": partial(greedy, binned=True, rounds=1),
    "learned, greedy": learnt_greedy,
    "second layer, of features": partial(behind, share=0.5, outputs=False),
    "second layer, of outputs": partial(behind, share=0.25, outputs=True),
    "second layer, learnt": partial(learnt, deep=True),
    "learned, twice the features": twice,
}


def split(table: str, files: dict[str, str], seed: int) -> tuple[Rows, Rows]:
    """Encoded training and validation rows of a table; ", 100,000" behind its name limits the training rows."""
    import pyarrow as pa

    name, _, limit = table.partition(", ")
    task = load(name, files, seed, 600_000)
    held = min(len(task.train) // 10, MOST_VALIDATION)
    train, left = task.train[held:], task.train[:held]
    train = train[: int(limit.replace(",", ""))] if limit else train
    frames = [task.x.iloc[rows].assign(target=task.y[rows]) for rows in (train, left)]
    tables = [pa.Table.from_pandas(frame, preserve_index=False) for frame in frames]
    columns = (
        Scan.start(Table(tables[0]), "target")
        .read(Table(tables[0]))
        .columns("classification" if task.classes else "regression")
    )
    found = []
    for part, fitted in zip(tables, (True, False), strict=True):
        pairs = [columns.encode(b, "rows", fitted=fitted)[:2] for b in part.to_batches(1 << 16)]
        found.append(
            Rows(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs if y is not None]), task.classes)
        )
    return found[0], found[1]


def measure(key: Row, config: Config, files: dict[str, str]) -> Row:
    torch.set_num_threads(1)
    rows, left = split(key["table"], files, key["seed"])
    began = time.process_time()
    with torch.set_grad_enabled(key["way"].startswith(("learned", "second"))):
        phi = WAYS[key["way"]](rows.first(MOST_ROWS), config.features, key["seed"])
    found = time.process_time() - began
    solution = sums(phi, rows).solve("gcv")
    seconds = time.process_time() - began
    with torch.no_grad():
        scores = torch.cat([solution.predict(phi(x).double()) for x in left.x.split(ROWS)])
    row = {**key, "rows": len(rows.x), "validation_rows": len(left.x), "features": solution.weight.shape[1]}
    row |= {"processor_seconds": seconds, "finding_seconds": found}
    row["explained"] = 1 - float((scores - left.y).square().sum() / (left.y - rows.y.mean(0)).square().sum())
    if not left.classes:
        return row
    labels = left.y.argmax(1)
    row["accuracy"] = float((scores.argmax(1) == labels).double().mean())
    half = len(scores) // 2  # probabilities are calibrated on one half and measured on the other
    p = PlattScaling.fit(scores[:half].clamp(-1, 2), labels[:half]).probabilities(scores[half:].clamp(-1, 2))
    row["auc"], row["log_loss"] = roc_auc(p, labels[half:]), log_loss(p, labels[half:])
    return row


def keys(tables: list[str], ways: list[str], seeds: int) -> Iterator[Row]:
    yield from ({"table": t, "way": w, "seed": s} for t in tables for s in range(seeds) for w in ways)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tables and few features")
    for name in ("covertype", "flights"):
        parser.add_argument(f"--{name}", help=f"Parquet file of {name}")
    parser.add_argument("--ways", help="names of ways with semicolons between them; default: all")
    parser.add_argument("--tables", help="names of tables with semicolons between them; default: all that are there")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/features.json"))
    args = parser.parse_args()
    files = {name: value for name in ("covertype", "flights") if (value := getattr(args, name))}
    config = Config(features=64) if args.quick else Config(seeds=args.seeds)
    tables = [f"{name}{few}" for name in files for few in (", 100,000", "")] + list(SMALL[-1:] if args.quick else SMALL)
    tables = args.tables.split(";") if args.tables else tables
    ways = args.ways.split(";") if args.ways else list(WAYS)
    os.environ["OMP_NUM_THREADS"] = "1"
    results = Results(args.out, config)
    missing = [key for key in keys(tables, ways, config.seeds) if not results.find(**key)]
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(partial(measure, config=config, files=files), missing):
            results.add(row)
            figure = f"accuracy {row['accuracy']:.4f}, log-loss {row['log_loss']:.4f}, " if "accuracy" in row else ""
            sys.stdout.write(
                f"{row['table']}, {row['way']}: {figure}explained {row['explained']:.4f} in "
                f"{row['processor_seconds']:.1f} s\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
