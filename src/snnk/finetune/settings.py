"""TrainingSettings: learning rates, schedules, and when training stops."""

from __future__ import annotations

import math
from dataclasses import dataclass

from snnk import _checks

OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}  # names in torch.optim
SCHEDULES = ("constant", "linear")


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; the defaults are the paper's for adapters.

    Args:
        learning_rate: the rate after warmup.
        batch_size: rows per step, over all processes together.
        epochs: passes over the data.
        optimizer: "adamw" or "adam".
        weight_decay: of the optimizer.
        schedule: "constant", or "linear" to 0, after `warmup`.
        warmup: fraction of all steps during which the rate rises linearly.
        clip: largest norm of the gradients, or None.
        max_steps: number of steps, instead of epochs; with 0 the model stays at its start.
        patience: epochs without a better validation score before training stops; None means that it never does.
        dropout: whether the base model drops values at random while its adapters or its head are trained. Without, a
            step takes less time. Dropout in the head stays.
        bf16: compute in bfloat16, by autocast.
        seed: of the order of rows and of dropout.

    Example:
        >>> TrainingSettings(learning_rate=1.0, schedule="linear", warmup=0.5).rate(step=3, total=4)
        0.5
    """

    learning_rate: float = 1e-3
    batch_size: int = 64
    epochs: int = 10
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: float = 0.06
    clip: float | None = None
    max_steps: int | None = None
    patience: int | None = 3
    dropout: bool = True
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _checks.positive(self.learning_rate, "learning_rate")
        for name in ("batch_size", "epochs", "max_steps", "patience"):
            value = getattr(self, name)
            if name == "max_steps" and type(value) is int and value <= 0:
                if value < 0:
                    raise ValueError(f"max_steps must be 0 or more; got {value}")
            elif value is not None:
                _checks.positive_int(value, name)
        _checks.choose(self.optimizer, OPTIMIZERS, "optimizer")
        _checks.choose(self.schedule, SCHEDULES, "schedule")
        if not 0 <= self.warmup < 1 or not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"warmup must be in [0, 1) and weight_decay at least 0; got {self.warmup} and {self.weight_decay}"
            )
        if self.clip is not None:
            _checks.positive(self.clip, "clip")

    def rate(self, step: int, total: int) -> float:
        """The learning rate of step 0, 1, ..., of `total`."""
        warm = math.ceil(self.warmup * total)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        return self.learning_rate * ((total - step) / (total - warm) if self.schedule == "linear" else 1.0)
