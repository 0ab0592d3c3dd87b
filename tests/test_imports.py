"""Who may import whom, and what importing snnk may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import snnk

ROOT = Path(snnk.__file__).parent
# a module may import from its own level or an earlier one
LEVELS = [
    {"_checks", "_environment", "_io", "_text"},
    {"maps", "ridge"},
    {"nn"},
    {"tabular", "hf"},
    {"sklearn", "peft"},
    {"finetune"},
    {"experiments"},
    {"cli"},
]


def level(module):
    return next(i for i, names in enumerate(LEVELS) if module in names)


def imported(node):
    """Modules of ours that an import statement names, whatever its form."""
    if isinstance(node, ast.Import):
        return [a.name.split(".")[1] for a in node.names if a.name.startswith("snnk.")]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, "imports are absolute"
    parts = (node.module or "").split(".")
    if parts[0] != "snnk":
        return []
    names = parts[1:2] or [a.name for a in node.names]
    return [n for n in names if (ROOT / f"{n}.py").exists() or (ROOT / n).is_dir() or n in snnk.__all__]


def test_imports_point_one_way():
    seen = 0
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for target in imported(node):
                seen += 1
                is_module = (ROOT / f"{target}.py").exists() or (ROOT / target).is_dir()
                assert is_module, f"{path.name}: import {target} from its module"
                assert level(target) <= level(name), f"{path.name} imports snnk.{target}"
    assert seen > 20


def test_the_import_test_sees_every_form():
    forms = (
        "import snnk.nn",
        "from snnk import experiments",
        "from snnk.nn import X",
        "from snnk import URF",
    )
    found = [imported(node) for form in forms for node in ast.parse(form).body]
    assert found == [["nn"], ["experiments"], ["nn"], ["URF"]]


def test_importing_snnk_is_light():
    code = "import sys, snnk; print([m for m in sys.modules if m.split('.')[0] in sys.argv[1].split(',')])"
    heavy = "transformers,peft,sklearn,matplotlib,typer,rich,accelerate,pyarrow,pandas"
    done = subprocess.run([sys.executable, "-c", code, heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names():
    assert all(hasattr(snnk, name) for name in snnk.__all__)
    assert sorted(snnk.__all__) == sorted(set(snnk.__all__))
    undocumented = [n for n in snnk.__all__ if isinstance(getattr(snnk, n), type) and not getattr(snnk, n).__doc__]
    assert undocumented == []
