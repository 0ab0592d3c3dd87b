"""Fixtures that tests of several rooms use."""

import pytest

from snnk.cli import main


@pytest.fixture
def run(capsys):
    """Call `snnk` with arguments of any type; returns the exit code, stdout and stderr."""

    def call(*args):
        capsys.readouterr()  # saving a model in a fixture draws a bar
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call
