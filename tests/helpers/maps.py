"""Inputs and estimates for tests of feature maps."""

import torch

F64 = {"dtype": torch.float64}


def unit(n, d, seed, norm=1.0):
    """n random rows of that norm, (n, d)."""
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True) * norm


def estimate(fm, x, w, b=None):
    return fm.phi(x) @ fm.psi(w, b).T
