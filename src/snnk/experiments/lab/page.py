"""The page of results: every claim of the paper beside our figure, from the rows in a folder and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from snnk import _io
from snnk._text import markdown
from snnk.experiments import HOLDS, load, names
from snnk.experiments.lab.records import Stored, reading

NAME = "README.md"


def write_page(folder: Path) -> Path:
    """Write folder/README.md from the result files of experiments in it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}; snnk reproduce NAME --out {folder} puts rows there")
    found = {name: Stored(folder / f"{name}.json") for name in names() if (folder / f"{name}.json").exists()}
    if not found:
        raise ValueError(f"{folder} has no rows of an experiment; snnk reproduce NAME --out {folder} puts them there")
    lines = [
        "# The paper's claims and our figures",
        "",
        "`snnk reproduce --page` writes this page from the JSON files beside it, which have seed, versions, commit",
        "and configuration with every row. The table has both figures for each claim, whether it holds or not. A claim",
        "about training is open if the validation score was still rising when training was cut off.",
        "",
        "| experiment | the paper | ours | tolerance | holds |",
        "|---|---|---|---|---|",
    ]
    missing = []
    for name, results in found.items():
        with reading(results.path, ValueError):
            lines += _claims(name, results)
    for name, results in found.items():
        with reading(results.path, ValueError):
            lines += _section(name, results, folder)
            missing += [f"- {name}: {line}" for line in _left(name, results)]
    missing += [f"- {name}: {load(name).FIGURE}; needs {load(name).NEEDS}" for name in names() if name not in found]
    lines += ["", "## Not run here", "", *(missing or ["Nothing."])]
    path = folder / NAME
    with _io.replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    return path


def _claims(name: str, results: Stored) -> list[str]:
    """Rows of the table; none for the small configuration, which only shows that the experiment runs."""
    lines = []
    for claim in [] if _is_small(name, results) else load(name).claims(results):
        cells = [markdown(claim[key]) for key in ("paper", "ours", "tolerance")]
        cells.append(HOLDS[claim["holds"]].replace("no", "**no**"))
        lines.append(f"| [{name}](#{name}) | {' | '.join(cells)} |")
    return lines


def _section(name: str, results: Stored, folder: Path) -> list[str]:
    """The section of one experiment: its description, command, configuration and picture."""
    module = load(name)
    small = " This is the small configuration, which only shows that the experiment runs." * _is_small(name, results)
    lines = [
        "",
        f"## {name}",
        "",
        *(module.__doc__ or "").strip().splitlines(),
        "",
        f"Stands for: {module.FIGURE}. Command: `snnk reproduce {name}{_options(name, results)}`.{small} "
        f"{len(results.rows)} rows in [{name}.json]({name}.json), "
        + markdown(f"{_commits(results)}, {_machines(results)}")
        + (f", model {markdown(model)}" if (model := _model(results)) else "")
        + ".",
        "",
        "Configuration: " + markdown(", ".join(f"{key} {value}" for key, value in results.config.items())) + ".",
    ]
    return lines + (["", f"![{name}]({name}.png)"] if (folder / f"{name}.png").exists() else [])


def _is_small(name: str, results: Stored) -> bool:
    quick = json.loads(json.dumps(asdict(load(name).QUICK)))
    return {**results.config, "seeds": 0} == {**quick, "seeds": 0}


def _options(name: str, results: Stored) -> str:
    """The options of the command that computes these rows."""
    module, source, small = load(name), results.source, _is_small(name, results)
    options = " --quick" if small else ""
    options += " --data-dir DIR" if source.get("data") == "real" else ""
    options += " --model MODEL" if source.get("model") else ""
    seeds, usual = results.config.get("seeds"), getattr(module.QUICK if small else module.Config(), "seeds", None)
    return options + (f" --seeds {seeds}" if seeds not in (None, usual) else "")


def _left(name: str, results: Stored) -> list[str]:
    """The parts that the rows do not cover: the lines of the experiment's `left`, or the number of missing rows."""
    module = load(name)
    try:
        if hasattr(module, "left"):
            return list(module.left(results))
        wanted = module.total(replace(module.Config(), **{k: _tuples(v) for k, v in results.config.items()}))
    except (TypeError, KeyError):
        return ["the rows are of an older configuration"]
    return [f"{len(results.rows)} of {wanted} rows are there"] if len(results.rows) < wanted else []


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _commits(results: Stored) -> str:
    last = results.environment.get("commit")
    found = dict.fromkeys(row.get("commit") or last or "unknown" for row in results)
    return f"commit{'s' * (len(found) > 1)} {', '.join(found)}"


def _machines(results: Stored) -> str:
    runs = (results.environments[row["environment"]] for row in results)
    return "; ".join(dict.fromkeys(f"torch {run.get('torch')}, {run.get('machine')}" for run in runs))


def _model(results: Stored) -> str:
    found = dict.fromkeys(str(row["model"]) for row in results if row.get("model"))
    return results.source.get("model") or ", ".join(found)
