"""The processes of a torchrun cluster that share a fit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Workers:
    """The processes of a torchrun cluster, or this process alone; each has its own GPU if the machine has GPUs."""

    def __init__(self) -> None:
        self.started = False
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            # Gathered values are on the CPU, and sums are on the device of the features.
            dist.init_process_group("gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl")
            self.started = True
        self.on = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if self.on else (0, 1)

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every worker, by rank."""
        if not self.on:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Return when every worker has called this."""
        self.gather(None)

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the workers, in place."""
        if self.on:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def close(self) -> None:
        """End the process group, if this object started it."""
        if self.started:
            dist.destroy_process_group()
