"""The page of results: every claim of the paper beside our figure, from the rows in a folder and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from snnk import _io
from snnk._text import markdown
from snnk.experiments import HOLDS, load, names
from snnk.experiments.lab.records import Row, Stored, reading

NAME = "README.md"


def write_page(folder: Path) -> Path:
    """Write folder/README.md from the result files of experiments in it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}; snnk reproduce NAME --out {folder} puts rows there")
    found = {name: Stored(folder / f"{name}.json") for name in names() if (folder / f"{name}.json").exists()}
    if not found:
        raise ValueError(f"{folder} has no rows of an experiment; snnk reproduce NAME --out {folder} puts them there")
    claims: dict[str, list[Row]] = {}
    sections, missing = list[str](), list[str]()
    for name, results in found.items():
        with reading(results.path, ValueError):
            # the small configuration only shows that the experiment runs
            claims[name] = [] if _is_small(name, results) else load(name).claims(results)
            sections += _section(name, results, claims[name], folder)
            missing += [f"- {name}: {line}" for line in _left(name, results)]
    missing += [f"- {name}: {load(name).FIGURE}; needs {load(name).NEEDS}" for name in names() if name not in found]
    lines = [*_summary(claims), *sections, "", "## Not run here", "", *(missing or ["Nothing."])]
    path = folder / NAME
    with _io.replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    return path


def _summary(claims: dict[str, list[Row]]) -> list[str]:
    """The head of the page: how many claims hold, and the reasons of those that do not."""
    total = Counter(claim["holds"] for own in claims.values() for claim in own)
    lines = [
        "# The paper's claims and our figures",
        "",
        "`snnk reproduce --page` writes this page from the JSON files beside it, which have seed, versions, commit",
        "and configuration with every row. A claim about training is open if the validation score was still rising",
        "when training was cut off, or if it needs a spread over seeds and has one seed. Every section below has a",
        "table with both figures for each of its claims.",
        f"{total[True]} claims hold, {total[False]} do not, and {total[None]} are open:",
        "",
        "| experiment | the paper's part | hold | do not | open |",
        "|---|---|---|---|---|",
    ]
    for name, own in claims.items():
        count = Counter(claim["holds"] for claim in own)
        cells = [f"[{name}](#{name})", markdown(load(name).FIGURE), *(str(count[key]) for key in (True, False, None))]
        lines.append(f"| {' | '.join(cells)} |")
    failing = [name for name, own in claims.items() if any(claim["holds"] is False for claim in own)]
    if failing:
        lines += ["", "## What does not hold, and why", ""]
        lines += [f"- **[{name}](#{name})**: {' '.join(_why(name).split())}" for name in failing]
    return lines


def _why(name: str) -> str:
    return getattr(load(name), "WHY_NOT", "") or "No reason was found yet."


def _table(claims: Sequence[Row]) -> list[str]:
    """The claims of one experiment: those that hold, those that are open, and the others."""
    if not claims:
        return []
    lines = ["", "| the paper | ours | tolerance | holds |", "|---|---|---|---|"]
    for holds in (True, None, False):
        for claim in (claim for claim in claims if claim["holds"] is holds):
            cells = [markdown(claim[key]) for key in ("paper", "ours", "tolerance")]
            lines.append(f"| {' | '.join(cells)} | {HOLDS[holds].replace('no', '**no**')} |")
    return lines


def _section(name: str, results: Stored, claims: Sequence[Row], folder: Path) -> list[str]:
    """The section of one experiment: its description, claims, command, configuration and picture."""
    module = load(name)
    small = " This is the small configuration, which only shows that the experiment runs." * _is_small(name, results)
    lines = [
        "",
        f"## {name}",
        "",
        *(module.__doc__ or "").strip().splitlines(),
        *_table(claims),
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
