"""The documents agree with the code: public names, paths, links, dotted names, pictures; and their code runs."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from helpers.documents import Reader, listed, make_folder
from walkthrough import PAGES as WALKED
from walkthrough import blocks, commands, missing

ROOT = Path(__file__).parent.parent
GENERATED = ROOT / "docs" / "results"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if GENERATED not in path.parents),
]
SLOW = ("calibration.md", "budget.md", "sentence-transformers.md")  # many compressions
RUN = [ROOT / name for name in WALKED]
HOMES = ("snnk.maps", "snnk.nn", "snnk.ridge")  # packages behind the names of `snnk`


def short(path):
    return path.relative_to(ROOT).as_posix()


def test_api_lists_every_public_name():
    rows = listed()
    for name in {*rows, *HOMES}:
        public = set(importlib.import_module(name).__all__) - (set(rows["snnk"]) if name in HOMES else set())
        assert public == set(rows.get(name, [])), name


def test_public_names_have_docstrings():
    for package, names in listed().items():
        for name in names:
            found = getattr(importlib.import_module(package), name)
            if callable(found):
                assert found.__doc__ and len(found.__doc__.splitlines()[0]) > 10, name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_and_names_exist(page):
    text = page.read_text()
    for picture in re.findall(r'<img src="([^"]+)"', text):
        assert (page.parent / picture).is_file(), picture
    for path in re.findall(r"`((?:src|tests|tools|docs|benchmarks)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    for script in re.findall(r"python ((?:benchmarks|tools)/\w+\.py)", text):
        assert (ROOT / script).exists(), script
    for dotted in set(re.findall(r"\bsnnk(?:\.\w+)+", text)) - {"snnk.md"}:
        assert resolves(dotted), dotted


def resolves(dotted):
    parts = dotted.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 1):
        if hasattr(found, part):
            found = getattr(found, part)
        elif importlib.util.find_spec(".".join(parts[: i + 1])):
            found = importlib.import_module(".".join(parts[: i + 1]))
        else:
            return False
    return True


def test_the_picture_of_imports_is_that_of_the_code():
    from PIL import Image

    spec = importlib.util.spec_from_file_location("import_graph", ROOT / "tools" / "import_graph.py")
    graph = importlib.util.module_from_spec(spec)
    sys.modules["import_graph"] = graph
    spec.loader.exec_module(graph)
    found = graph.edges(ROOT / "src" / "snnk")
    assert graph.levels(found)["cli"] == max(graph.levels(found).values())
    with Image.open(ROOT / "docs" / "imports.png") as picture:
        assert picture.info["Description"] == graph.describe(found), "run: python tools/import_graph.py"


def test_the_picture_of_speed_is_that_of_the_rows():
    from PIL import Image

    spec = importlib.util.spec_from_file_location("speed_picture", ROOT / "tools" / "speed_picture.py")
    speed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(speed)
    with Image.open(ROOT / "docs" / "speed.png") as picture:
        assert picture.info["Description"] == speed.describe(speed.points(speed.ROWS)), "run: tools/speed_picture.py"


def test_a_circle_of_imports_is_named():
    spec = importlib.util.spec_from_file_location("import_graph", ROOT / "tools" / "import_graph.py")
    graph = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(graph)
    with pytest.raises(ValueError, match="circle: a, b"):
        graph.levels({("a", "b"): True, ("b", "a"): True, ("b", "c"): True})


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_lead_to_files_and_headings(page):
    for link, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)]+))?\)", page.read_text()):
        target = (page.parent / link) if link else page
        assert target.exists(), f"{link} does not exist"
        if anchor:
            assert anchor in headings(target), f"{link} has no heading #{anchor}"


def headings(page):
    """Anchors of the headings of a page, by the rule that GitHub and mkdocs share for plain words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return [re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which all pages are tried, and what their commands printed there."""
    return make_folder(tmp_path_factory.mktemp("reader")), {}


MARKED = [pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else [], id=short(page)) for page in RUN]


@pytest.mark.parametrize("page", MARKED)
def test_the_code_of_pages_runs(page, run, quick, folder, monkeypatch, capsys):
    """As a reader pastes it, one block after another. A block of kind text shows what the block before it prints."""
    place, done = folder
    monkeypatch.chdir(place)
    monkeypatch.setattr("snnk.hf.compression.opening.MORE_TOKENS", 1000)  # few steps of distillation
    reader = Reader(run, done)
    try:
        for block in blocks(page):
            if block.why is not None:
                continue
            assert block.kind, f"{page.name}, line {block.line}: a block has no language"
            if block.kind == "text":
                lacking = missing(block.text, reader.said)
                assert not lacking, f"{page.name}, line {block.line}: {lacking} is not in {reader.said}"
            reader.run(page, block, capsys)
    finally:
        reader.close()


def test_no_command_writes_where_another_one_has_written():
    """A reader pastes all pages in one folder; the same command on two pages is run once."""
    pasted = {
        command for page in RUN for block in blocks(page) if block.kind == "bash" for command in commands(block.text)
    }
    outputs = [found[1] for command in pasted if (found := re.search(r"--out (\S+)", command))]
    assert len(outputs) > 15 and sorted(outputs) == sorted(set(outputs))


def test_every_page_for_beginners_is_walked_through():
    folders = [ROOT / "docs" / name for name in ("tutorials", "howto")]
    pages = [
        ROOT / "README.md",
        ROOT / "docs" / "start.md",
        *(path for folder in folders for path in folder.glob("*.md")),
    ]
    assert sorted(RUN) == sorted(pages)


def test_few_blocks_are_not_run():
    """Each has its reason in a comment above it; a block of a kind that nothing runs has one as well."""
    left = {short(page): sum(block.why is not None for block in blocks(page)) for page in RUN}
    assert sum(left.values()) <= 6, left
    kinds = {block.kind for page in RUN for block in blocks(page) if block.why is None}
    assert kinds <= {"bash", "python", "text"}


def test_the_tests_that_the_page_on_robustness_names_exist():
    rows = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "robustness.md").read_text())
    assert len(rows) > 80
    for path, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), (path, name)
    files = re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "docs" / "robustness.md").read_text(), flags=re.MULTILINE)
    assert all((ROOT / "src" / "snnk" / file).exists() for file in files)
