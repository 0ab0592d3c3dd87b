"""A trained network for tests of bundles."""

import pytest
import torch

from helpers.bundles import mlp, seeded


@pytest.fixture(scope="module")
def trained():
    """8 -> 32 -> 32 -> 2 with tanh, fitted to a curved target, and inputs (4000, 8)."""
    x = seeded(4000, 8, seed=3)
    y = torch.stack([torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2], x[:, 3:].norm(dim=1)], 1)
    net = mlp(8, 32, 32, 2)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net, x
