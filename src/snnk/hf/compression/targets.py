r"""Targets of the fit of a block, and the weights by which their errors count.

Let r be the residual stream around a block in the model as compressed so far, and s the stream behind it in the
original. The target is y = s - r, over the factor of the block's output if it has one. A token is weighted by
1 / variance of s, and a coordinate by the scale of the LayerNorm behind, so that an error counts by how much it changes
the input of the next layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from snnk.hf.model_blocks import FFN, ModelBlock
from snnk.ridge.sums import RidgeStats

ROWS = 2048  # tokens whose features are in memory at once


def importance(block: ModelBlock, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of tokens (n,) and of outputs (out,): how much an error changes the input of the next layer."""
    spread = stream.float().var(-1, correction=0)
    rows = 1 / spread.clamp_min(1e-6 * float(spread.mean()) + 1e-30)
    columns = gain(block).to(stream.device)
    return rows, columns if block.scale is None else columns * block.scale.detach().abs().float()


def gain(block: ModelBlock) -> Tensor:
    """The factors (out,) by which the next layer reads the stream; ones without a norm behind the block.

    Not every norm keeps them as its `weight`: Gemma's are 1 + weight.
    """
    width = block.out_features
    if block.norm is None:
        return torch.ones(width)
    probe, half = torch.ones(width), width // 2
    probe[:half] = -(width - half) / max(half, 1)  # of mean 0, without zeros
    probe *= 1000 / probe.square().mean().sqrt()  # large, so that the norm's epsilon does not count
    inputs = torch.stack([probe, -probe]).to(next(block.norm.parameters(), probe))
    found = block.norm.forward(inputs).detach().float()
    return 500 * (found[0] - found[1]).abs() / probe.abs().to(found.device)


@dataclass(frozen=True)
class Tokens:
    """Rows for the fit of a block: inputs x (n, d), targets y (n, out), weights (n,) and scales of outputs (out,)."""

    x: Tensor
    y: Tensor
    weight: Tensor
    scale: Tensor

    def error(self, ffn: FFN) -> float:
        """Weighted squared error of the block in its present state, over the variance of the targets."""
        return self.error_of(torch.cat([ffn.forward(x.to(dtype_of(ffn))).float() for x in self.x.split(ROWS)]))

    def error_of(self, outputs: Tensor) -> float:
        """Weighted squared error of outputs (n, out), over the variance of the targets."""
        weight = self.weight[:, None] * self.scale.square()
        mean = (self.weight[:, None] * self.y).sum(0) / self.weight.sum()
        wrong, power = (float((weight * (self.y - x).square()).sum()) for x in (outputs, mean))
        return wrong / max(power, 1e-30)

    def sums(self, phi: Callable[[Tensor], Tensor], num_features: int) -> RidgeStats:
        """Sums of the features phi(x) against the targets."""
        stats = RidgeStats(num_features, self.y.shape[1], block_dtype=torch.float32)
        for x, y, w in zip(self.x.split(ROWS), self.y.split(ROWS), self.weight.split(ROWS), strict=True):
            stats.update(phi(x).cpu(), y.cpu(), w.cpu())
        return stats


def make_tokens(block: ModelBlock, inputs: list[Tensor], residuals: list[Tensor], streams: list[Tensor]) -> Tokens:
    """The rows of a block from its inputs, the stream around it, and the original's stream behind it, per batch."""
    stream = torch.cat(streams).float()
    weight, scale = importance(block, stream)
    y = stream - torch.cat(residuals).float()
    if block.scale is not None:  # the factor of the block's output
        factor = block.scale.detach().float()
        y = y / torch.where(factor.abs() < 1e-6, torch.full_like(factor, math.inf), factor)
    return Tokens(torch.cat(inputs), y, weight, scale)


def dtype_of(ffn: FFN) -> torch.dtype:
    """The dtype of a block in its present state."""
    weight: Tensor = ffn.slot("down").bias if ffn.kind == "drop" else ffn.slot("down").weight
    return weight.dtype
