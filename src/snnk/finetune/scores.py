"""Scores of predictions: those of GLUE, and macro F1 for more than two classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
CLASSIFICATION = ("accuracy", "macro_f1", "mcc")
REGRESSION = ("pearson", "spearman")


def accuracy(found: Array, wanted: Array) -> float:
    return float((found == wanted).mean())


def f1(found: Array, wanted: Array, positive: int = 1) -> float:
    """Of the class `positive`; 0 where it is neither found nor wanted."""
    hits = int(((found == positive) & (wanted == positive)).sum())
    count = int((found == positive).sum() + (wanted == positive).sum())
    return 2 * hits / count if count else 0.0


def macro_f1(found: Array, wanted: Array) -> float:
    return float(np.mean([f1(found, wanted, int(c)) for c in np.union1d(found, wanted)]))


def mcc(found: Array, wanted: Array) -> float:
    """Matthews' correlation for any number of classes; 0 where one side is constant."""
    size = int(max(found.max(), wanted.max())) + 1
    table = np.bincount(wanted * size + found, minlength=size * size).reshape(size, size).astype(np.float64)
    n, hits, rows, columns = table.sum(), np.trace(table), table.sum(1), table.sum(0)
    spread = (n * n - rows @ rows) * (n * n - columns @ columns)
    return float((hits * n - rows @ columns) / np.sqrt(spread)) if spread > 0 else 0.0


def pearson(found: Array, wanted: Array) -> float:
    """0 where one side is constant."""
    a, b = found - found.mean(), wanted - wanted.mean()
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size > 0 else 0.0


def spearman(found: Array, wanted: Array) -> float:
    return pearson(stats.rankdata(found), stats.rankdata(wanted))


METRICS: dict[str, Callable[[Array, Array], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "mcc": mcc,
    "pearson": pearson,
    "spearman": spearman,
}


def score(logits: Tensor, labels: Tensor, metrics: Sequence[str]) -> dict[str, float]:
    """The metrics, and the loss, of logits (n, classes) or (n, 1).

    Example:
        >>> import torch
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
