"""Small blocks for all tests of sums."""

import pytest

from snnk.ridge import sums as ridge


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Every test crosses the edges of blocks and panels."""
    monkeypatch.setattr(ridge, "BLOCK_ROWS", 23)
    monkeypatch.setattr(ridge, "PANEL", 3)
