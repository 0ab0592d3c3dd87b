"""Draw docs/imports.png: which package of src/snnk imports which, as the source has it.

    python tools/import_graph.py [--out docs/imports.png]

An arrow points from a package to one that it imports; it is dashed if every such import stands inside a function, so
that it costs nothing until the function runs. A package stands one step above the highest package that it imports. An
arrow is left out where a path of other arrows leads to the same package. All imports are stored as text inside the
picture, by which tests/test_docs.py notices a picture that is out of date.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

ROOT = Path(__file__).resolve().parent.parent
CELLAR = (
    "_checkpoint",
    "_checks",
    "_deprecation",
    "_environment",
    "_html",
    "_io",
    "_rows",
    "_text",
)  # drawn as one box
Edges = dict[tuple[str, str], bool]  # (package, imported package) -> whether it is imported at the top of a module


def edges(source: Path) -> Edges:
    """All imports between packages of snnk."""
    found: Edges = {}
    for path in sorted(source.rglob("*.py")):
        package = _box(path.relative_to(source).parts[0].removesuffix(".py"))
        if package == "__init__":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        late = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            for name in _imported(node):
                other = _box(name)
                if other != package:
                    found[package, other] = found.get((package, other), False) or id(node) not in late
    return dict(sorted(found.items()))


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("snnk."))
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "snnk":
        parts = node.module.split(".")
        yield from parts[1:2] or [alias.name for alias in node.names if alias.name != "__version__"]


def _box(name: str) -> str:
    return "_checks, _io, ..." if name in CELLAR else name


def levels(found: Edges) -> dict[str, int]:
    """The height of each package: 0 for those that import none. Raises ValueError if imports go round in a circle."""
    below: dict[str, set[str]] = {}
    for package, other in found:
        below.setdefault(package, set()).add(other)
        below.setdefault(other, set())
    heights: dict[str, int] = {}
    while len(heights) < len(below):
        ready = [name for name in below if name not in heights and below[name] <= heights.keys()]
        if not ready:
            raise ValueError(f"imports go round in a circle: {', '.join(sorted(below.keys() - heights.keys()))}")
        heights |= {name: 1 + max((heights[other] for other in below[name]), default=-1) for name in ready}
    return heights


def describe(found: Edges) -> str:
    """The arrows as text."""
    return "; ".join(f"{package} -> {other}{'' if top else ' (late)'}" for (package, other), top in found.items())


def _leads(found: Edges, start: str, end: str) -> bool:
    """Whether `start`, which is not `end`, imports `end`, directly or by way of others."""
    return any(a == start and (b == end or _leads(found, b, end)) for a, b in found)


def draw(found: Edges) -> Figure:
    """Boxes by height, arrows downwards."""
    heights = levels(found)
    rows = {h: sorted(name for name, own in heights.items() if own == h) for h in set(heights.values())}
    places = {}
    for h, row in rows.items():  # every second row is moved or widened, so that long arrows pass beside its boxes
        for i, name in enumerate(row):
            across = (2.6 + 1.2 * (h % 2)) * (i - (len(row) - 1) / 2)
            places[name] = (across if len(row) > 1 else 0.9 * (h % 2), float(h))
    figure = Figure(figsize=(6, 0.5 + 0.75 * len(rows)), layout="constrained")
    axes = figure.subplots()
    boxes = {}
    for name, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.4", "facecolor": "#dce9f5", "edgecolor": "0.3"}
        boxes[name] = axes.text(x, y, name, ha="center", va="center", family="monospace", bbox=box, zorder=1)
    for package, other in found:
        if not any((package, middle) in found and _leads(found, middle, other) for middle in heights):
            ends = {"patchA": boxes[package].get_bbox_patch(), "patchB": boxes[other].get_bbox_patch()}
            line = {"linestyle": "-" if found[package, other] else "--", "color": "0.25", "zorder": 2}
            arrow: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 2, "shrinkB": 2}
            if heights[package] - heights[other] > 2:  # a long arrow bends around the boxes between its ends
                arrow["connectionstyle"] = "arc3,rad=-0.2"
            axes.add_patch(FancyArrowPatch(places[package], places[other], **arrow, **line, **ends))
    axes.set_xlim(min(x for x, _ in places.values()) - 1, max(x for x, _ in places.values()) + 1)
    axes.set_ylim(-0.5, max(rows) + 0.5)
    axes.axis("off")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "imports.png")
    found = edges(ROOT / "src" / "snnk")
    draw(found).savefig(parser.parse_args().out, dpi=120, metadata={"Description": describe(found), "Software": None})


if __name__ == "__main__":
    main()
