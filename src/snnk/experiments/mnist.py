"""MNIST (section "Toy experiments", appendix figure on random features): the hidden layer of an MLP as ReLU-SNNK.

784 -> 512 -> 512 -> 10 with ReLU; the 512 x 512 layer and its ReLU become phi(h) A^T with 8 to 512 features. Dropout of
0.2 after every layer but the last, Adam with 1e-3, batches of 32, 25 epochs; a stratified quarter of the training set
chooses the epoch, as the appendix on data sets says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

from torch import nn

from snnk.experiments import data
from snnk.experiments.records import Results, Row
from snnk.experiments.training import fit_classifier
from snnk.layers import SNNKLinear

FIGURE = "figure: MNIST ablation"
NEEDS = "MNIST"
TIME = "1 hour; --quick 5 s"
MLP = "MLP"


@dataclass(frozen=True)
class Config:
    """The paper's setting."""

    hidden: int = 512
    features: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
    feature_map: str = "relu"
    epochs: int = 25
    batch_size: int = 32
    learning_rate: float = 1e-3
    dropout: float = 0.2
    validation: float = 0.25
    rows: int = 0  # of the training set; 0 for all
    seeds: int = 1
    seed: int = 0


QUICK = Config(hidden=32, features=(8, 32), epochs=2, rows=800)


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return (1 + len(config.features)) * config.seeds


def network(inputs: int, outputs: int, num_features: int | None, config: Config, seed: int) -> nn.Module:
    """The MLP, or with `num_features` the one with an SNNK layer in it."""
    width = config.hidden
    if num_features is None:
        hidden: list[nn.Module] = [nn.Linear(width, width), nn.ReLU()]
    else:
        hidden = [SNNKLinear(width, width, num_features, config.feature_map, seed=seed)]
    dropout = nn.Dropout(config.dropout)
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), dropout, *hidden, dropout, nn.Linear(width, outputs))


def run(config: Config, results: Results, source: data.Source = data.NOWHERE) -> Iterator[Row]:
    """One row for each network and seed."""
    wanted = [(seed, m) for seed in range(config.seed, config.seed + config.seeds) for m in (None, *config.features)]
    if source.data_dir is None and data.is_quick(config, QUICK):
        made = data.made(config.rows + 200, 784, 10, seed=config.seed)
        splits = {"train": data.Split(made.x[200:], made.y[200:]), "test": data.Split(made.x[:200], made.y[:200])}
    else:
        splits = data.mnist(source)
    for seed, m in wanted:
        name = MLP if m is None else "SNNK"
        row = results.find(network=name, num_features=m, seed=seed)
        if row is None:
            kept, held = data.stratified(splits["train"].y, config.validation, seed)
            if config.rows:
                kept = kept[: config.rows]
            parts = {"train": splits["train"].take(kept), "validation": splits["train"].take(held)}
            found = fit_classifier(
                partial(network, splits["train"].x.shape[1], 10, m, config, seed),
                {**parts, "test": splits["test"]},
                epochs=config.epochs,
                batch_size=config.batch_size,
                learning_rate=config.learning_rate,
                seed=seed,
            )
            row = results.add({"network": name, "num_features": m, **found, "seed": seed})
        yield row


def _mean(results: Results, key: str, m: int | None) -> float | None:
    values = [r[key] for r in results if r["num_features"] == m]
    return mean(values) if values else None


def plot(results: Results) -> Any:
    """Accuracy against features, and training loss over epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = sorted({r["num_features"] for r in results if r["num_features"]})
    left.plot(counts, [100 * (_mean(results, "test_accuracy", m) or 0) for m in counts], "o-", label="SNNK")
    base = _mean(results, "test_accuracy", None)
    if base is not None:
        left.axhline(100 * base, color="tab:gray", ls="--", label=MLP)
    left.set_xscale("log", base=2)
    left.set_xlabel("random features")
    left.set_ylabel("test accuracy, %")
    for r in results:
        if r["seed"] == results.config["seed"]:
            label = MLP if r["num_features"] is None else f"{r['num_features']} features"
            style = {"color": "black", "lw": 2} if r["num_features"] is None else {}
            right.plot(range(1, 1 + len(r["train_losses"])), r["train_losses"], label=label, **style)
    right.set_yscale("log")
    right.set_xlabel("epoch")
    right.set_ylabel("training loss, with dropout")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def claims(results: Results) -> list[Row]:
    """The paper's statements beside what the rows say."""
    base, base_loss = (_mean(results, key, None) for key in ("test_accuracy", "test_loss"))
    if base is None or base_loss is None:
        return []
    table = []
    for m in sorted({r["num_features"] for r in results if r["num_features"]}):
        accuracy = _mean(results, "test_accuracy", m) or 0.0
        if m >= 32:
            table.append(
                {
                    "paper": f"SNNK with {m} features is above the MLP on MNIST",
                    "ours": f"{100 * accuracy:.2f} %, MLP {100 * base:.2f} %",
                    "holds": accuracy > base,
                }
            )
    last = {m: [r["train_losses"][-1] for r in results if r["num_features"] == m] for m in (None, 32)}
    if last[None] and last[32]:
        snnk, mlp = mean(last[32]), mean(last[None])
        table.append(
            {
                "paper": "lower training losses than the MLP's (32 features, last epoch)",
                "ours": f"{snnk:.4f}, MLP {mlp:.4f}",
                "holds": snnk < mlp,
            }
        )
    return table
