"""Every experiment has the parts that the command and the page use, and runs with data that it makes."""

import json
from dataclasses import FrozenInstanceError

import pytest

from snnk.experiments import load, names

# test_glue.py and test_bundled_transformers.py run these
ELSEWHERE = {"adapters", "bundled-transformers", "compression", "glue", "uptraining", "uptraining-images", "vision"}


def test_every_experiment_has_its_parts():
    for name in names():
        module = load(name)
        assert module.FIGURE and module.NEEDS and module.TIME and module.__doc__, name
        assert isinstance(module.QUICK, module.Config) and module.Config() != module.QUICK, name
        assert module.total(module.QUICK) > 0
        with pytest.raises(FrozenInstanceError):
            module.QUICK.seed = 1


@pytest.mark.parametrize("name", [name for name in names() if name not in ELSEWHERE])
def test_the_quick_form_writes_all_its_rows_and_a_picture(name, run, tmp_path):
    module = load(name)
    code, _, err = run("reproduce", name, "--quick", "--out", tmp_path)
    assert code == 0, err
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert len(rows) == module.total(module.QUICK) and (tmp_path / f"{name}.png").stat().st_size
