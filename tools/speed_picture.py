"""Draw docs/speed.png: speed against agreement with the original, of int8, of ours, and of both together.

    python tools/speed_picture.py [--rows benchmarks/results/serving-minilm.json] [--out docs/speed.png]

The rows are those of benchmarks/serving.py. The points are stored as text inside the picture, by which
tests/test_docs.py notices a picture that is out of date.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "serving-minilm.json"
BATCH = "ms_32x32"
LINES = {  # label -> (model is compressed, runtime, precision), colour
    "original, PyTorch": ((False, "torch", "float32"), "0.35"),
    "int8 alone (OpenVINO)": ((False, "openvino", "int8"), "#c44e52"),
    "snnk alone (PyTorch)": ((True, "torch", "float32"), "#4c72b0"),
    "snnk and int8 (OpenVINO)": ((True, "openvino", "int8"), "#2a7f3f"),
}


def points(path: Path) -> dict[str, list[tuple[str, float, float, float]]]:
    """Label -> points: name, times as fast as the original, neighbours in common and Spearman, both in percent."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    first = next(row for row in rows if (row["keep"], row["runtime"], row["precision"]) == (1, "torch", "float32"))
    found = {}
    for label, (wanted, _) in LINES.items():
        chosen = [row for row in rows if (row["keep"] < 1, row["runtime"], row["precision"]) == wanted]
        found[label] = [
            (
                f"keep {row['keep']:g}" if row["keep"] < 1 else "",
                first[BATCH] / row[BATCH],
                100 * row["ten_nearest_in_common"],
                row["spearman"],
            )
            for row in sorted(chosen, key=lambda row: -row["keep"])
        ]
    return found


def describe(found: dict[str, list[tuple[str, float, float, float]]]) -> str:
    """The points as text."""
    return "; ".join(
        f"{label} {name}: {speed:.2f} times, {near:.1f}, {score:.2f}"
        for label, chosen in found.items()
        for name, speed, near, score in chosen
    )


def draw(found: dict[str, list[tuple[str, float, float, float]]]) -> Figure:
    """Two panels over the same speeds: the score of a task, and the neighbours of texts."""
    figure = Figure(figsize=(6.2, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("Spearman correlation, STS-B, %", "ten nearest neighbours kept, %")
    for axes, title, column in zip(panels, titles, (3, 2), strict=True):
        for (label, chosen), marker in zip(found.items(), "oD^s", strict=True):
            speeds, values = [point[1] for point in chosen], [point[column] for point in chosen]
            axes.plot(
                speeds, values, f"{marker}-", color=LINES[label][1], label=label, markersize=7, zorder=4 - len(chosen)
            )
            for i, (name, speed, value) in enumerate(zip([point[0] for point in chosen], speeds, values, strict=True)):
                if label == "snnk alone (PyTorch)" and i:
                    continue  # the same numbers, too close to each other
                axes.annotate(
                    name.removeprefix("keep ") if i else name,  # the first point explains the numbers of the others
                    *((speed, value), (0 if i else -8, -18 - 13 * (i % 2))),
                    textcoords="offset points",
                    ha="center",
                    fontsize=11,
                    color=LINES[label][1],
                )
        axes.set(
            title=title, xlabel="times as fast as the original", xlim=(0, 13), ylim=(0, 104), xticks=range(0, 13, 2)
        )
        axes.title.set_fontsize(11.5)
        axes.xaxis.label.set_fontsize(11.5)
        axes.tick_params(labelsize=11)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize=11, loc="lower left", frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "speed.png")
    args = parser.parse_args()
    found = points(args.rows)
    draw(found).savefig(args.out, dpi=160, metadata={"Description": describe(found), "Software": None})


if __name__ == "__main__":
    main()
