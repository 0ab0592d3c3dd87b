"""UCI data sets (section "Experiments on UCI datasets"): cross-entropy against parameters of a three-layer MLP.

dim -> 512 -> d -> classes with ReLU and dropout, the middle width d varied; for SNNK the middle layer and its ReLU
become phi(h) A^T. The paper names neither dropout rate, optimiser, split nor number of features: here they are 0.2 and
Adam with 1e-3, as in its MNIST experiment, a held-out fifth, and 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import nn

from snnk.experiments import data
from snnk.experiments.records import Results, Row
from snnk.experiments.training import fit_classifier
from snnk.layers import SNNKLinear

FIGURE = "figure: UCI data sets"
NEEDS = "CoverType; HIGGS, HEPMASS"
TIME = "30 minutes; --quick 5 s"
READERS: dict[str, Callable[[data.Source], data.Split]] = {
    "covertype": data.covertype,
    "higgs": data.higgs,
    "hepmass": data.hepmass,
}


@dataclass(frozen=True)
class Config:
    """The paper's layers; rows and epochs are ours, so that it takes minutes on a CPU."""

    datasets: tuple[str, ...] = ("covertype",)
    first: int = 512
    widths: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    num_features: int = 64
    feature_map: str = "relu"
    epochs: int = 3
    batch_size: int = 512
    learning_rate: float = 1e-3
    dropout: float = 0.2
    rows: int = 0  # of each data set; 0 for all
    seeds: int = 1
    seed: int = 0


QUICK = Config(first=32, widths=(8, 32), num_features=16, epochs=1, rows=2000)


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return 2 * len(config.datasets) * len(config.widths) * config.seeds


def network(kind: str, inputs: int, classes: int, width: int, config: Config, seed: int) -> nn.Module:
    if kind == "MLP":
        middle: list[nn.Module] = [nn.Linear(config.first, width), nn.ReLU()]
    else:
        middle = [SNNKLinear(config.first, width, config.num_features, config.feature_map, seed=seed)]
    dropout = nn.Dropout(config.dropout)
    first = nn.Linear(inputs, config.first)
    return nn.Sequential(first, nn.ReLU(), dropout, *middle, dropout, nn.Linear(width, classes))


def splits_of(name: str, config: Config, source: data.Source) -> dict[str, data.Split]:
    """Standardised train, validation and test rows: 70, 10 and 20 %."""
    if source.data_dir is None and data.is_quick(config, QUICK):
        whole = data.made(config.rows, 54, 7, config.seed)
    else:
        whole = READERS[name](source)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(config.seed))
    whole = whole.take(order[: config.rows or len(whole)])
    n = len(whole)
    cuts = {"test": slice(0, n // 5), "validation": slice(n // 5, 3 * n // 10), "train": slice(3 * n // 10, n)}
    parts = {key: data.Split(whole.x[rows], whole.y[rows]) for key, rows in cuts.items()}
    center, spread = parts["train"].x.mean(0), parts["train"].x.std(0).clamp_min(1e-6)
    return {key: data.Split((part.x - center) / spread, part.y) for key, part in parts.items()}


def run(config: Config, results: Results, source: data.Source = data.NOWHERE) -> Iterator[Row]:
    """One row for each data set, network, width and seed."""
    for name in config.datasets:
        splits = splits_of(name, config, source)
        inputs, classes = splits["train"].x.shape[1], int(splits["train"].y.max()) + 1
        for seed in range(config.seed, config.seed + config.seeds):
            for width in config.widths:
                for kind in ("MLP", "SNNK"):
                    key = {"dataset": name, "network": kind, "width": width, "seed": seed}
                    row = results.find(**key)
                    if row is None:
                        found = fit_classifier(
                            partial(network, kind, inputs, classes, width, config, seed),
                            splits,
                            epochs=config.epochs,
                            batch_size=config.batch_size,
                            learning_rate=config.learning_rate,
                            seed=seed,
                        )
                        row = results.add({**key, **found})
                    yield row


def _curve(results: Results, name: str, kind: str) -> list[tuple[int, float, float]]:
    """(parameters, loss, accuracy) by width, mean over seeds."""
    rows = [r for r in results if r["dataset"] == name and r["network"] == kind]
    found = []
    for width in sorted({r["width"] for r in rows}):
        same = [r for r in rows if r["width"] == width]
        found.append((same[0]["trained"], *(mean(r[key] for r in same) for key in ("test_loss", "test_accuracy"))))
    return found


def plot(results: Results) -> Any:
    """Test loss against trained parameters."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r["dataset"] for r in results))
    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for kind, color in (("MLP", "tab:gray"), ("SNNK", "tab:blue")):
            curve = _curve(results, name, kind)
            axes.plot([c[0] for c in curve], [c[1] for c in curve], "o-", color=color, label=kind)
        axes.set_xscale("log")
        axes.set_xlabel("trained parameters")
        axes.set_ylabel("test cross-entropy")
        axes.set_title(name)
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    return figure


def claims(results: Results) -> list[Row]:
    """SNNK against the MLP of the same width, and against the least MLP that is as good."""
    table = []
    for name in dict.fromkeys(r["dataset"] for r in results):
        mlp, snnk = (_curve(results, name, kind) for kind in ("MLP", "SNNK"))
        if not mlp or not snnk:
            continue
        best, ours = min(mlp, key=lambda c: c[1]), min(snnk, key=lambda c: c[1])
        table.append(
            {
                "paper": f"{name}: matches or outperforms the MLP with a fraction of the parameters",
                "ours": f"SNNK {ours[1]:.4f} ({100 * ours[2]:.2f} %) with {ours[0]:,} trained; "
                f"best MLP {best[1]:.4f} ({100 * best[2]:.2f} %) with {best[0]:,}",
                "holds": ours[1] <= best[1] and ours[0] < best[0],
            }
        )
    return table
