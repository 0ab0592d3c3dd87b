"""`snnk doctor`, also where packages are missing or outside of their range."""

import json
import re
import sys
from email.message import Message
from pathlib import Path

import pytest

from snnk import _environment
from snnk.cli import doctor

ROOT = Path(__file__).parents[2]
REQUIRES = [
    "torch>=2.4",
    "snnk[tables]; extra == 'cli'",
    "rich>=13; extra == 'cli'",
    "pyarrow>=15; extra == 'tables'",
    "old-one<2,>=1; python_version < '3' and extra == 'tables'",
    "transformers>=5; extra == 'hf'",
]
INSTALLED = {"snnk": "0.1.0", "torch": "2.13.0+cpu", "rich": "15.0", "pyarrow": "26.0.1"}


@pytest.fixture
def installed(monkeypatch):
    """Packages and requirements in place of the real ones; the dict can be changed."""
    versions, message = dict(INSTALLED), Message()
    for extra in doctor.EXTRAS:
        message["Provides-Extra"] = extra
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(doctor.metadata, "metadata", lambda name: message)
    monkeypatch.setattr(_environment, "version_of", lambda name: versions.get(name, ""))
    return versions


def test_missing_packages_come_with_the_line_that_installs_them(run, installed):
    code, out, _ = run("doctor")
    assert code == 0 and "everything that is installed is in its supported range" in out
    assert "pip install 'snnk[hf]'" in out and "snnk[cli]" not in out and "snnk[tables]" not in out
    assert "missing: transformers" in out
    del installed["pyarrow"]
    found = json.loads(run("doctor", "--json")[1])
    assert found["extras"]["cli"] == {"missing": ["pyarrow"], "install": "pip install 'snnk[cli]'"}
    assert found["extras"]["tables"]["missing"] == ["pyarrow"] and "old-one" not in found["packages"]
    assert found["packages"]["pyarrow"] == {"version": None, "supported": ">=15"}


@pytest.mark.parametrize(("version", "code"), [("4.57.1", 1), ("5.0.0rc1", 1), ("5.0.0", 0), ("6.1.0.dev0", 0)])
def test_a_version_outside_of_its_range_is_a_problem(run, installed, version, code):
    installed["transformers"] = version
    found, out, err = run("doctor")
    advice = f"transformers {version} is outside of the supported range >=5: pip install 'transformers>=5'"
    assert found == code and err == "" and (advice in out) == bool(code)


def test_a_torch_that_cannot_be_imported_is_a_problem(run, installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, _ = run("doctor")
    assert code == 1 and "problem: torch cannot be imported" in out


def test_an_installation_from_before_an_extra_is_a_problem(run, installed, monkeypatch):
    monkeypatch.setattr(doctor.metadata, "metadata", lambda name: Message())
    code, out, _ = run("doctor")
    assert code == 1 and "the installed snnk has no extra serve: install it again" in out


def test_the_extras_are_those_of_the_project():
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert {*doctor.EXTRAS, "docs", "dev"} == set(re.findall(r"^(\w+) = \[", text, flags=re.MULTILINE))


def test_the_machine():
    found = doctor.examine()["machine"]
    assert found["cores"] >= found["usable_cores"] >= 1 and found["torch_threads"] >= 1
    assert found["memory_bytes"] is None or found["memory_bytes"] > found["available_bytes"] > 0
