"""The documents agree with the code: public names, paths, dotted names and the picture of imports."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "docs/api.md", "docs/figures.md", "docs/tuned.md", "docs/serving.md")
]
HOMES = ("snnk.maps", "snnk.nn", "snnk.ridge")  # packages behind the names of `snnk`


def listed():
    """Package -> names in its table of docs/api.md."""
    parts = re.split(r"^## `(.*)`$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)[1:]
    tables = zip(parts[::2], parts[1::2], strict=True)
    rows = {name: re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) for name, text in tables}
    assert all(len(set(names)) == len(names) for names in rows.values())
    return rows


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
    for link in re.findall(r"\]\(([^)#:]+)[^)]*\)", text):
        assert (page.parent / link).exists(), link
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


def test_a_circle_of_imports_is_named():
    spec = importlib.util.spec_from_file_location("import_graph", ROOT / "tools" / "import_graph.py")
    graph = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(graph)
    with pytest.raises(ValueError, match="circle: a, b"):
        graph.levels({("a", "b"): True, ("b", "a"): True, ("b", "c"): True})


def code_blocks():
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", code_blocks(), ids=lambda text: text.split()[1].strip(","))
def test_the_code_of_the_readme_runs(block, tmp_path, monkeypatch, capsys):
    import torch
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=40, **sizes)).eval()
    ids = torch.randint(40, (20, 8, 12))
    batches = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"model": model, "batches": batches, "train_loader": batches})


def test_the_tests_that_the_page_on_robustness_names_exist():
    rows = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "robustness.md").read_text())
    assert len(rows) > 80
    for path, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), (path, name)
    files = re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "docs" / "robustness.md").read_text(), flags=re.MULTILINE)
    assert all((ROOT / "src" / "snnk" / file).exists() for file in files)
