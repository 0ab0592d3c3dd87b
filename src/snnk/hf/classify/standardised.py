r"""A linear layer of standardised inputs, for many features of different sizes.

    y = W z + b,    z_j = (x_j - mean_j) / (std_j sqrt(n_j))

n_j is the number of inputs in the block of input j, so that every block has the same share of |z|^2. A penalty on |W|^2
is then the same for all blocks, and so is a step of Adam, whatever their widths and units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# An input that varies by less than this part of its size gets no weight: it is nearly constant, and errors of float32,
# about 2e-6 of its size, would be no longer small beside its spread.
ROUNDED = 1e-3


class StandardisedLinear(nn.Linear):
    """Mean and scale are buffers that `standardise_` computes from data; before that the layer is linear in x itself.

    Args:
        blocks: numbers of inputs of the blocks, in the order of the inputs.
        out_features: number of outputs.
        **options: those of nn.Linear.

    Example:
        >>> layer = StandardisedLinear([1, 4], 2).standardise_(torch.randn(50, 5))
        >>> layer(torch.randn(3, 5)).shape, layer.in_features
        (torch.Size([3, 2]), 5)
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, blocks: Sequence[int], out_features: int, **options: Any) -> None:
        super().__init__(sum(blocks), out_features, **options)
        self.blocks = tuple(blocks)
        place: Any = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.register_buffer("mean", torch.zeros(self.in_features, **place))
        self.register_buffer("scale", torch.ones(self.in_features, **place))

    @torch.no_grad()
    def standardise_(self, x: Tensor) -> StandardisedLinear:
        """Take mean and scale from inputs x (n, in_features)."""
        mean, std = torch.empty_like(self.mean), torch.empty_like(self.mean)
        for part in torch.arange(self.in_features).split(2048):  # in float64, without a copy of all of x
            some = x[:, part].double()
            mean[part], std[part] = some.mean(0).to(mean), some.std(0, correction=0).to(std)
        widths = torch.cat([torch.full((n,), float(n)) for n in self.blocks]).to(std)
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(std > ROUNDED * mean.abs(), 1 / (std.clamp_min(1e-30) * widths.sqrt()), 0.0))
        return self

    def standardised(self, x: Tensor) -> Tensor:
        """z (*, in_features) of inputs x."""
        return (x - self.mean.to(x)) * self.scale.to(x)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.standardised(x), self.weight, self.bias)
