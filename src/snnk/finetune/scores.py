"""Scores of predictions: the metrics of GLUE, and macro F1 for more than two classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
CLASSIFICATION = ("accuracy", "macro_f1", "mcc")
REGRESSION = ("pearson", "spearman")
OFFSET = ("f1", "macro_f1", "mcc")  # metrics for which the most probable class may not be the best prediction
PLACES = 400  # thresholds that are tried


def accuracy(found: Array, labels: Array) -> float:
    return float((found == labels).mean())


def f1(found: Array, labels: Array, positive: int = 1) -> float:
    """The F1 score of class `positive`; 0 if neither predictions nor labels have it."""
    hits = int(((found == positive) & (labels == positive)).sum())
    count = int((found == positive).sum() + (labels == positive).sum())
    return 2 * hits / count if count else 0.0


def macro_f1(found: Array, labels: Array) -> float:
    return float(np.mean([f1(found, labels, int(c)) for c in np.union1d(found, labels)]))


def mcc(found: Array, labels: Array) -> float:
    """Matthews correlation for any number of classes; 0 if predictions or labels are constant."""
    size = int(max(found.max(), labels.max())) + 1
    table = np.bincount(labels * size + found, minlength=size * size).reshape(size, size).astype(np.float64)
    n, hits, rows, columns = table.sum(), np.trace(table), table.sum(1), table.sum(0)
    spread = (n * n - rows @ rows) * (n * n - columns @ columns)
    return float((hits * n - rows @ columns) / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(found: Array, labels: Array) -> float:
    """Pearson correlation; 0 if predictions or labels are constant."""
    a, b = found - found.mean(), labels - labels.mean()
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size > 0 else 0.0


def spearman(found: Array, labels: Array) -> float:
    return pearson(stats.rankdata(found), stats.rankdata(labels))


METRICS: dict[str, Callable[[Array, Array], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "mcc": mcc,
    "pearson": pearson,
    "spearman": spearman,
}


def best_offset(logits: Tensor, labels: Tensor, metric: str) -> float:
    """What to add to the logit of the second of two classes, so that predictions have the best metric.

    Example:
        >>> logits, labels = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
        >>> 2 < best_offset(logits, labels, "mcc") < 3
        True
    """
    gap = (logits[:, 1] - logits[:, 0]).double()
    ordered = gap.unique()  # between two neighbours of these, and at 0
    places = torch.cat([(ordered[1:] + ordered[:-1]) / 2, gap.new_zeros(1)])
    chosen = places[torch.linspace(0, len(places) - 1, min(len(places), PLACES)).long()]
    found = {-float(at): METRICS[metric]((gap > at).long().numpy(), labels.numpy()) for at in chosen}
    return max(found, key=lambda offset: (found[offset], -abs(offset)))


def score(logits: Tensor, labels: Tensor, metrics: Sequence[str]) -> dict[str, float]:
    """The metrics and the loss of logits (n, classes) or (n, 1) for labels (n,).

    Example:
        >>> score(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]), ["accuracy"])["accuracy"]
        0.5
    """
    logits = logits.double()
    if labels.is_floating_point():
        found = logits.squeeze(-1)
        loss = F.mse_loss(found, labels.double())
    else:
        found = logits.argmax(-1)
        loss = F.cross_entropy(logits, labels)
    return {**{name: METRICS[name](found.numpy(), labels.numpy()) for name in metrics}, "loss": float(loss)}
