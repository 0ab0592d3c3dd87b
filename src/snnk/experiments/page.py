"""A page of results: every claim of the paper beside our figure, from the rows in a folder and nothing else."""

from __future__ import annotations

from pathlib import Path

from snnk.experiments import EXPERIMENTS
from snnk.experiments.records import Stored, written

NAME = "README.md"


def write_page(folder: Path) -> Path:
    """Write folder/README.md from the result files of experiments in it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}; snnk reproduce NAME --out {folder} puts rows there")
    found = {name: Stored(folder / f"{name}.json") for name in EXPERIMENTS if (folder / f"{name}.json").exists()}
    if not found:
        raise ValueError(f"{folder} has no rows of an experiment; snnk reproduce NAME --out {folder} puts them there")
    lines = [
        "# The paper's claims and our figures",
        "",
        "Written by `snnk reproduce --page` from the JSON rows beside it; each row file has seed, versions, commit and",
        "configuration. A claim that does not hold is as good as one that does: both figures are here.",
        "",
        "| experiment | the paper | ours | holds |",
        "|---|---|---|---|",
    ]
    for name, results in found.items():
        for claim in EXPERIMENTS[name].claims(results):
            cells = [str(claim["paper"]), str(claim["ours"]), "yes" if claim["holds"] else "**no**"]
            lines.append(f"| [{name}](#{name}) | {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    for name, results in found.items():
        module, source, run = EXPERIMENTS[name], results.source, results.environment
        lines += [
            "",
            f"## {name}",
            "",
            *(module.__doc__ or "").strip().splitlines(),
            "",
            f"Stands for: {module.FIGURE}. Command: `snnk reproduce {name}{_options(source)}`. "
            f"{len(results.rows)} rows in [{name}.json]({name}.json), commit {run.get('commit') or 'unknown'}, "
            f"torch {run.get('torch')}, {run.get('machine')}"
            + (f", model {source['model']}" if source.get("model") else "")
            + ".",
            "",
            "Configuration: " + ", ".join(f"{key} {value}" for key, value in results.config.items()) + ".",
        ]
        if (folder / f"{name}.png").exists():
            lines += ["", f"![{name}]({name}.png)"]
    missing = [name for name in EXPERIMENTS if name not in found]
    lines += ["", "## Not run here", ""]
    lines += [f"- {name}: {EXPERIMENTS[name].FIGURE}; needs {EXPERIMENTS[name].NEEDS}" for name in missing] or [
        "Nothing."
    ]
    path = folder / NAME
    with written(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    return path


def _options(source: dict[str, str]) -> str:
    data = " --data-dir DIR" if source.get("data") == "real" else ""
    return data + (" --model MODEL" if source.get("model") else "")
