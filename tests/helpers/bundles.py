"""Layers, networks and inputs for tests of bundles."""

import itertools
import math

import torch
from torch import nn

from snnk import SNNKLinear
from snnk.maps.projections import make_generator

F64 = {"dtype": torch.float64}
EXACT = {"atol": 1e-10, "rtol": 1e-10}
QUIET = {"on_error": "ignore"}
OURS = {"rho": "balanced", "antithetic": True}


def seeded(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **F64) * scale


def linear(inputs, outputs, seed=0, bias=True, gain=1.0):
    """A float64 layer whose rows have length about `gain`."""
    layer = nn.Linear(inputs, outputs, bias=bias, **F64)
    with torch.no_grad():
        layer.weight.copy_(seeded(outputs, inputs, seed=seed, scale=gain / math.sqrt(inputs)))
        if bias:
            layer.bias.copy_(seeded(outputs, seed=seed + 1, scale=0.3))
    return layer


def mlp(*widths, activation=nn.Tanh, gain=1.0):
    layers = []
    for i, (d, o) in enumerate(itertools.pairwise(widths)):
        layers += [linear(d, o, seed=10 * i, gain=gain), activation()]
    return nn.Sequential(*layers[:-1])


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


def snnk(inputs, outputs, m, feature_map, seed=0, **options):
    layer = SNNKLinear(inputs, outputs, m, feature_map, seed=seed, **F64, **options)
    with torch.no_grad():
        layer.weight.copy_(seeded(outputs, m, seed=seed + 5))
    return layer


def relative_error(estimate, exact):
    return float(((estimate - exact).square().sum() / (exact - exact.mean(0)).square().sum()).detach())


def held_out(n, seed):
    return torch.randperm(n, generator=make_generator(seed, stream=2))[: n // 5]
