"""Training of small networks, as the toy experiments of the paper do it: Adam, the best epoch by validation."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk.experiments.data import Split
from snnk.experiments.records import Row


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
) -> Row:
    """Train on "train", keep the epoch of least loss on "validation", and measure that one on "test"."""
    start = time.perf_counter()
    train = splits["train"]
    losses: list[float] = []
    validation: list[float] = []
    best: dict[str, Tensor] = {}
    with torch.random.fork_rng():  # dropout knows no generator of its own
        torch.manual_seed(seed)
        model = make()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=learning_rate, fused=True)
        for _ in range(epochs):
            model.train()
            total = 0.0
            for rows in torch.randperm(len(train)).split(batch_size):
                loss = F.cross_entropy(model(train.x[rows]), train.y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(rows)
            losses.append(total / len(train))
            validation.append(evaluate(model, splits["validation"])[0])
            if validation[-1] == min(validation):
                best = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(best)
    test_loss, accuracy = evaluate(model, splits["test"])
    return {
        "trained": sum(p.numel() for p in trained),
        "frozen": sum(b.numel() for b in model.buffers()),
        "best_epoch": 1 + min(range(epochs), key=lambda i: validation[i]),
        "test_loss": test_loss,
        "test_accuracy": accuracy,
        "train_losses": [round(x, 5) for x in losses],
        "validation_losses": [round(x, 5) for x in validation],
        "seconds": time.perf_counter() - start,
    }
