"""Every experiment has the parts that the command and the page use."""

from dataclasses import FrozenInstanceError

import pytest

from snnk.experiments import load, names


def test_every_experiment_has_its_parts():
    for name in names():
        module = load(name)
        assert module.FIGURE and module.NEEDS and module.TIME and module.__doc__, name
        assert isinstance(module.QUICK, module.Config) and module.Config() != module.QUICK, name
        assert module.total(module.QUICK) > 0
        with pytest.raises(FrozenInstanceError):
            module.QUICK.seed = 1
