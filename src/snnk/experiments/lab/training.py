"""Shared by the experiments on small networks: layers, training with Adam, and claims over several seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from snnk import _checks
from snnk.experiments.lab.data import Split
from snnk.experiments.lab.records import Row, claim
from snnk.maps import Directions
from snnk.nn.linear import SNNKLinear


def uniform(*shape: int, bound: float, generator: Generator) -> Tensor:
    """Uniform random numbers in [-bound, bound]."""
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


def grid(size: int, box: float = 1.0) -> Tensor:
    """The points (size^2, 2) of a grid on [-box, box]^2; the first coordinate varies slowest."""
    t = torch.linspace(-box, box, size)
    return torch.stack(torch.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2)


def neurons(rows: Tensor, out_features: int, activation: str, bound: float, generator: Generator) -> nn.Sequential:
    """Layers phi(h) = f(G h + c) with given rows G (m, in) and random phases c, both frozen, and a trained matrix A.

    Example:
        >>> neurons(torch.ones(4, 3), 5, "sin", 0.1, torch.Generator())(torch.zeros(2, 3)).shape
        torch.Size([2, 5])
    """
    m, in_features = rows.shape
    feature_map = Directions(in_features, m, activation).set_(rows)
    feature_map.projection[:, -1] = uniform(m, bound=math.pi, generator=generator)
    linear = nn.utils.skip_init(nn.Linear, m, out_features, bias=False)
    linear.weight = nn.Parameter(uniform(out_features, m, bound=bound, generator=generator))
    return nn.Sequential(feature_map, linear)


def mlp(
    sizes: tuple[int, int, int, int],
    num_features: int | None,
    config: Any,
    seed: int,
    *,
    train_directions: bool = False,
    without: bool = False,
) -> nn.Sequential:
    """Three layers with ReLU and dropout. With `num_features`, an SNNK layer replaces the middle one and its ReLU.

    Args:
        sizes: inputs, two widths and classes.
        num_features: None for the MLP.
        config: has `feature_map` and `dropout`.
        seed: of the feature map.
        train_directions: train the projection of the feature map too.
        without: leave the middle layer out.
    """
    inputs, first, width, classes = sizes
    dropout = nn.Dropout(config.dropout)
    if without:
        return nn.Sequential(nn.Linear(inputs, first), nn.ReLU(), dropout, nn.Linear(first, classes))
    if num_features is None:
        middle: list[nn.Module] = [nn.Linear(first, width), nn.ReLU()]
    else:
        layer = SNNKLinear(first, width, num_features, config.feature_map, seed=seed)
        if train_directions:
            layer.feature_map.train_directions_()
        middle = [layer]
    return nn.Sequential(nn.Linear(inputs, first), nn.ReLU(), dropout, *middle, dropout, nn.Linear(width, classes))


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, batch_size: int = 4096) -> tuple[float, float]:
    """Cross-entropy and accuracy."""
    model.eval()
    loss = right = 0.0
    for x, y in zip(split.x.split(batch_size), split.y.split(batch_size), strict=True):
        logits = model(x)
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
        right += float((logits.argmax(1) == y).sum())
    return loss / len(split), right / len(split)


def fit_classifier(
    make: Callable[[], nn.Module],
    splits: dict[str, Split],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    choose: str = "loss",
) -> Row:
    """Train on the split "train", keep the best epoch on "validation", and evaluate it on "test".

    Args:
        make: returns the network.
        splits: "train", "validation" and "test".
        epochs, batch_size, learning_rate: of Adam.
        seed: of the order of the rows and of dropout.
        choose: the best epoch has the least "loss" or the highest "accuracy"; with the latter, rows have accuracies.
    """
    _checks.choose(choose, ("loss", "accuracy"), "choose")
    start = time.perf_counter()
    train = splits["train"]
    losses: list[float] = []
    validation: list[float] = []
    accuracies: list[float] = []
    best: dict[str, Tensor] = {}
    best_epoch, highest = 0, -math.inf
    with torch.random.fork_rng():  # dropout draws from the global generator
        torch.manual_seed(seed)
        model = make()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=learning_rate, fused=True)
        for epoch in range(1, epochs + 1):
            model.train()
            total = 0.0
            for rows in torch.randperm(len(train)).split(batch_size):
                loss = F.cross_entropy(model(train.x[rows]), train.y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(rows)
            losses.append(total / len(train))
            held_loss, held_accuracy = evaluate(model, splits["validation"])
            validation.append(held_loss)
            accuracies.append(held_accuracy)
            score = held_accuracy if choose == "accuracy" else -held_loss
            if not math.isfinite(held_loss):
                score = -math.inf  # an epoch that diverged is no improvement
            if not best or score > highest:
                best = {key: value.clone() for key, value in model.state_dict().items()}
                best_epoch, highest = epoch, score
        model.load_state_dict(best)
    test_loss, accuracy = evaluate(model, splits["test"])
    return {
        "trained": sum(p.numel() for p in trained),
        "frozen": sum(b.numel() for b in model.buffers()),
        "best_epoch": best_epoch,
        "test_loss": test_loss,
        "test_accuracy": accuracy,
        "test_rows": len(splits["test"]),
        "train_losses": [round(x, 5) for x in losses],
        "validation_losses": [round(x, 5) for x in validation],
        **({"validation_accuracies": [round(x, 5) for x in accuracies]} if choose == "accuracy" else {}),
        "seconds": time.perf_counter() - start,
    }


def means(rows: Iterable[Row], *keys: str) -> dict[str, float]:
    """Means of figures over rows; NaN if one is null, as a run that diverged for one seed has no mean.

    Example:
        >>> means([{"loss": 1.0, "psnr": None}, {"loss": 2.0, "psnr": 30.0}], "loss", "psnr")
        {'loss': 1.5, 'psnr': nan}
    """
    rows = list(rows)
    return {key: mean(math.nan if r[key] is None else r[key] for r in rows) for key in keys}


def against(rows: Sequence[Row], networks: Sequence[str], **where: Any) -> Iterator[tuple[str, list[Row], list[Row]]]:
    """Per network: its rows and those of the first network, the baseline, for the seeds that both have."""
    chosen = [r for r in rows if all(r[key] == value for key, value in where.items())]
    by_seed = {name: {r["seed"]: r for r in chosen if r["network"] == name} for name in networks}
    base = by_seed[networks[0]]
    for name in networks[1:]:
        seeds = sorted(by_seed[name].keys() & base.keys())
        if seeds:
            yield name, [by_seed[name][s] for s in seeds], [base[s] for s in seeds]


def judged(paper: str, ours: str, holds: bool, tolerance: str, *figures: dict[str, float]) -> Row:
    """A claim that does not hold if one of its figures is NaN.

    Example:
        >>> judged("accurate", "a loss of nan", True, "none", {"loss": math.nan})["ours"]
        'diverged'
    """
    lost = any(math.isnan(x) for found in figures for x in found.values())
    return claim(paper, "diverged" if lost else ours, holds and not lost, tolerance)
