"""What every test has."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """The global generator starts anew, so that no test or doctest depends on those before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def brief(request, monkeypatch):
    """Examples of docstrings measure latency as briefly as they can."""
    if request.node.name.startswith("snnk.hf."):
        for name, seconds in {"compression.report": 0, "compression.timing": 0.05, "serve.frontier": 0}.items():
            monkeypatch.setattr(f"snnk.hf.{name}.SECONDS", seconds)
        monkeypatch.setattr("snnk.hf.serve.served.SECONDS", 0)
