"""What every test has."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """The global generator starts anew, so that no test or doctest depends on those before it."""
    torch.manual_seed(0)
