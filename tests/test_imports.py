"""Which room may import which, what importing costs, and which names are public."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import snnk

ROOT = Path(snnk.__file__).parent
TESTS = Path(__file__).parent
# A room may import rooms of earlier levels. Rooms of one level do not import each other, but for the first level.
LEVELS = [
    {"_checkpoint", "_checks", "_deprecation", "_environment", "_html", "_io", "_rows", "_text"},
    {"maps", "ridge"},
    {"nn"},
    {"tabular", "hf"},
    {"sklearn", "peft"},
    {"finetune"},
    {"experiments"},
    {"cli"},
]
LEVEL = {room: i for i, rooms in enumerate(LEVELS) for room in rooms}
CORE = {
    "ACTIVATIONS",
    "FEATURE_MAPS",
    "PROJECTIONS",
    "URF",
    "ArcCosine",
    "PowerSeries",
    "ProjectedURF",
    "FeatureMap",
    "UnreachableError",
}
PUBLIC = {
    "snnk": {*CORE, "SNNKLinear", "SNNKAdapter", "Bundled", "bundle", "error_bound", "RidgeStats", "__version__"},
    "snnk.maps": {*CORE, "Activation", "Directions"},
    "snnk.nn": {"SNNKLinear", "SNNKAdapter", "Bundled", "bundle", "error_bound"},
    "snnk.ridge": {"RidgeStats"},
    "snnk.tabular": {"fit", "FitConfig", "Part", "Start", "TableModel", "merge", "prepare", "teach"},
    "snnk.hf": {
        "compress",
        "compress_",
        "export",
        "plan",
        "Plan",
        "audit",
        "load_calibration",
        "find_ffns",
        "replace_ffn_",
        "bundle_",
        "replace_pooler_",
        "merge_pooler_",
        "bundled_head_",
        "fit_classifier_",
        "frontier",
        "push_to_hub",
    },
    "snnk.sklearn": {"SNNKFeatures", "SNNKRegressor", "SNNKClassifier"},
    "snnk.peft": {"SNNKConfig", "fit_directions_", "to_lora"},
    "snnk.finetune": {"finetune", "FinetuneConfig", "load", "merge", "predict", "METHODS"},
}


def sources(folder=ROOT):
    """(path, syntax tree) of every Python file in a folder."""
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(folder.rglob("*.py"))]


def imported(tree):
    """Dotted names that import statements anywhere in a file name, whatever their form."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms(tree):
    """Rooms of snnk that a file imports; a public name taken from `snnk` itself counts as a room, and is none."""
    return {name.split(".")[1] for name in imported(tree) if name.startswith("snnk.")} - {"__version__"}


def test_imports_point_one_way():
    edges = set()
    for path, tree in sources():
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        edges |= {(room, target) for target in rooms(tree) if room not in ("__init__", target)}
    assert len(edges) > 20
    assert {target for _, target in edges} <= set(LEVEL), "import public names from their rooms, not from snnk"
    wrong = [(a, b) for a, b in edges if LEVEL[b] > LEVEL[a] or (LEVEL[a] == LEVEL[b] != 0)]
    assert wrong == []


def test_the_import_test_sees_every_form():
    forms = ("import snnk.nn", "from snnk import experiments", "from snnk.nn import X", "from snnk import URF")
    assert [rooms(ast.parse(form)) for form in forms] == [{"nn"}, {"experiments"}, {"nn"}, {"URF"}]


def test_no_test_file_imports_another():
    modules = {path.stem for path in TESTS.rglob("*.py") if path.stem.startswith(("test_", "conftest"))}
    for path, tree in sources(TESTS):
        parts = {part for name in imported(tree) for part in name.split(".")}
        assert not parts & modules, path


def test_no_module_shares_its_dotted_name_with_a_function_or_class():
    packages = [".".join(path.relative_to(ROOT.parent).parent.parts) for path in ROOT.rglob("__init__.py")]
    assert len(packages) > 8
    for package in map(importlib.import_module, sorted(packages)):
        folder = Path(package.__file__).parent
        names = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
        for name in names - {"__init__", "__main__"}:
            assert not isinstance(inspect.getattr_static(package, name, None), type | type(sources)), (package, name)


def test_no_two_public_classes_have_one_name():
    """Each experiment has a Config of its own."""
    found = Counter(
        node.name
        for path, tree in sources()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "experiments" not in path.parts
    )
    assert [name for name, count in found.items() if count > 1] == []


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names(package):
    """Each function and class is documented with an example."""
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    for name in PUBLIC[package] - {"__version__"}:
        found = getattr(module, name)
        if callable(found) and name not in ("FeatureMap", "UnreachableError"):  # an abstract class, and an error
            assert ">>>" in inspect.getdoc(found), name


# Imports in processes of their own: what is loaded after one may be loaded before the next, whose list is shorter.
CHAINS = [
    [
        ("import snnk", "torch numpy scipy transformers peft sklearn matplotlib typer rich accelerate pyarrow pandas"),
        ("from snnk.finetune import METHODS, FinetuneConfig", "torch transformers peft"),
        ("from snnk import URF, bundle, RidgeStats", "transformers peft sklearn matplotlib typer pyarrow pandas"),
        ("import snnk.tabular", "transformers peft sklearn matplotlib typer"),
        ("import snnk.sklearn", "transformers peft matplotlib typer"),
    ],
    [("import snnk.hf", "peft sklearn matplotlib typer")],
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain[-1][0])
def test_imports_are_light(chain):
    code = "import sys\n" + "".join(f"{line}\nprint(*sys.modules)\n" for line, _ in chain)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (line, without), modules in zip(chain, done.stdout.splitlines(), strict=True):
        assert {name.split(".")[0] for name in modules.split()} & set(without.split()) == set(), line
