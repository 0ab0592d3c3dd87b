"""Who may import whom, and what importing snnk may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import snnk

ROOT = Path(snnk.__file__).parent
# a module may import from its own level or an earlier one
LEVELS = [
    {"_checks"},
    {"_series"},
    {"activations", "projections", "ridge"},
    {"features"},
    {"layers"},
    {"bundle", "adapters", "tables"},
    {"models"},
    {"stream"},
    {"estimators", "peft", "hf"},
    {"experiments"},
    {"cli"},
]


def level(module):
    return next(i for i, names in enumerate(LEVELS) if module in names)


def test_imports_point_one_way():
    seen = 0
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "snnk":
                targets = node.module.split(".")[1:2] or [
                    a.name for a in node.names if (ROOT / f"{a.name}.py").exists()
                ]
                for target in targets:
                    seen += 1
                    assert level(target) <= level(name), f"{path.name} imports snnk.{target}"
    assert seen > 10


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
