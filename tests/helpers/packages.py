"""Tests of optional packages."""

from importlib.util import find_spec

import pytest


def need(*names):
    """Skip a test if a package is missing. It is not imported: OpenVINO and NNCF report each import to a server."""
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
