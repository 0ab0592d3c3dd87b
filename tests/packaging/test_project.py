"""The files around the package: versions of Python, the workflow of the public CI, and the changelog."""

import ast
import re
from pathlib import Path

import pytest
import yaml

import snnk

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def test_the_versions_of_python_are_the_same_everywhere():
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT) == PYTHONS
    assert f'requires-python = ">={PYTHONS[0]}"' in PROJECT and f'python_version = "{PYTHONS[0]}"' in PROJECT
    assert workflow()["jobs"]["test"]["strategy"]["matrix"]["python"] == PYTHONS


def test_all_files_have_the_syntax_of_the_oldest_python():
    folders = [ROOT / name for name in ("src", "tests", "examples", "benchmarks", "tools")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > 300
    for path in paths:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))


def workflow():
    return yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))


def steps(job):
    return [step["run"] for step in workflow()["jobs"][job]["steps"] if "run" in step]


def test_the_workflow_runs_what_every_ci_runs():
    assert steps("test") == [".ci/run"]
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == "make test"
    pytest_of = re.search(r"^PYTEST := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    assert steps("versions")[-1] == pytest_of.replace("$(BIN)", ".venv/bin")
    for target in ("test", "docs"):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert steps("docs") == ["make docs"]


def test_the_workflow_has_the_oldest_and_the_newest_versions():
    rows = workflow()["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert [row["python"] for row in rows] == [PYTHONS[0], PYTHONS[-1]]
    assert [row["resolution"] for row in rows] == ["lowest-direct", "highest"]


@pytest.mark.parametrize("file", ["CHANGELOG.md", "CITATION.cff"])
def test_the_version_is_that_of_the_package(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.search(r"^(?:## |version: )(\d+\.\d+\.\d+)", text, flags=re.MULTILINE)
    assert found and found[1] == snnk.__version__


def test_the_pages_have_every_extra_with_its_size():
    extras = re.findall(
        r"^(\w+) = \[", PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0], flags=re.MULTILINE
    )
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    sizes = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| (\d*) ?\|", page, flags=re.MULTILINE))
    assert set(sizes) == set(extras) and all(sizes[name] for name in sizes if name != "dev")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in re.search(r"pip install '\.\[([\w,]+)\]'", readme)[1].split(","):
        assert re.search(rf"`{name}`[^;.]*\b{sizes[name]}\b", readme), f"the README has no size of {name}"


def test_the_changelog_begins_with_what_people_look_for():
    """A summary of each version, then what is new by job, and old names at the end."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _, *versions = re.split(r"^## ", text, flags=re.MULTILINE)
    for version in versions:
        heading, summary = version.split("\n", 2)[0], version.split("\n###", 1)[0].split("\n", 1)[1].strip()
        assert re.fullmatch(r"\d+\.\d+\.\d+ \((?:unreleased|\d{4}-\d\d-\d\d)\)", heading)
        assert 20 <= len(summary.split()) <= 150, f"{heading} needs a summary"
