"""How to train: rates, schedules and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from snnk import _checks

SCHEDULES = ("constant", "linear")
OPTIMIZERS: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; the defaults are the paper's for adapters.

    Args:
        learning_rate, batch_size, epochs: the batch is that of all processes together.
        optimizer: "adamw" or "adam".
        weight_decay: of the optimizer.
        schedule: "constant" or "linear" (to 0), after a share `warmup` of all steps.
        clip: norm to which gradients are cut, or None.
        max_steps: steps in all, instead of epochs; 0 leaves the model as it starts.
        patience: epochs without a better validation score after which to stop, or None for never.
        bf16: compute in bfloat16, by autocast.
        seed: of the order of rows and of dropout.
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
        """Learning rate of step 0, 1, ..."""
        warm = math.ceil(self.warmup * total)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        return self.learning_rate * ((total - step) / (total - warm) if self.schedule == "linear" else 1.0)
