"""`snnk doctor`: what is installed, what the machine has, and what each extra of the package still needs."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import typer

from snnk import _environment
from snnk.cli import _options
from snnk.cli._printing import say, show_json, show_table

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

GROUP = _options.START
EXAMPLES = ("snnk doctor", "snnk doctor --json")

EXTRAS = {  # those of pyproject.toml, without what only the tests and the documentation need
    "cli": "the command snnk, with tables",
    "tables": "snnk.tabular: CSV, Parquet and Arrow files",
    "sklearn": "snnk.sklearn: estimators",
    "hf": "snnk.hf: compress transformers",
    "peft": "snnk.peft and snnk.finetune: adapters",
    "serve": "exports to ONNX Runtime and OpenVINO",
    "experiments": "snnk reproduce",
}


def command(json: _options.Json = False) -> None:
    """Show versions, the processor, memory, and what each extra lacks; exit with code 1 for an unsupported version."""
    found = examine()
    if json:
        show_json(found)
    else:
        _show(found)
    if found["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """What `snnk doctor --json` prints."""
    try:
        known = metadata.metadata("snnk").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        raise ImportError("snnk is not installed, so that its extras are unknown; install it with pip") from None
    problems = [f"the installed snnk has no extra {extra}: install it again" for extra in EXTRAS if extra not in known]
    basis = needed("")
    ranges = dict(basis)
    extras = {}
    for extra in filter(known.__contains__, EXTRAS):
        own = needed(extra)
        ranges |= own
        missing = [name for name in {**basis, **own} if not _environment.version_of(name)]
        extras[extra] = {"missing": missing, "install": f"pip install 'snnk[{extra}]'" if missing else None}
    versions = {name: _environment.version_of(name) or None for name in ranges}
    problems += [
        f"{name} {version} is outside of the supported range {ranges[name]}: pip install '{name}{ranges[name]}'"
        for name, version in versions.items()
        if version and not ranges[name].contains(version, prereleases=True)
    ]
    torch, problem = _torch()
    return {
        "snnk": _environment.version_of("snnk"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: {"version": version, "supported": str(ranges[name])} for name, version in versions.items()},
        "machine": {
            "processor": _environment.processor(),
            "instructions": _environment.instructions(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": _environment.total_memory(),
            "available_bytes": _environment.available_memory(),
            **torch,
        },
        "extras": extras,
        "problems": problems + problem,
    }


def needed(extra: str) -> dict[str, SpecifierSet]:
    """Packages of an extra, or "" for those that snnk always needs, with their supported versions."""
    from packaging.requirements import Requirement

    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, metadata.requires("snnk") or []):
        always, here = (requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in ("", extra))
        if not here or (extra and always):
            continue
        if requirement.name == "snnk":
            for other in sorted(requirement.extras):
                found |= needed(other)
        else:
            found[requirement.name] = requirement.specifier
    return found


def _torch() -> tuple[dict[str, Any], list[str]]:
    """What torch finds here, and why it cannot be imported if it cannot."""
    try:
        import torch

        accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
        return {
            "torch_instructions": torch.backends.cpu.get_cpu_capability(),
            "torch_threads": torch.get_num_threads(),
            "accelerator": None if accelerator is None else str(accelerator),
        }, []
    except (ImportError, OSError) as error:  # OSError: a library that torch loads is missing
        return {}, [f"torch cannot be imported: {error}"]


def _show(found: dict[str, Any]) -> None:
    machine, here = found["machine"], {"what": "", "value": "this machine"}
    memory = [_gigabytes(machine[key]) for key in ("memory_bytes", "available_bytes")]
    faster = {"VNNI", "AMX", "i8mm"} & set(machine["instructions"].split(", "))
    int8 = "fast" if faster else "no instructions for it were found"
    rows = {
        "snnk": found["snnk"],
        "Python": f"{found['python']} on {found['system']}",
        "processor": machine["processor"],
        "instructions": machine["instructions"],
        "int8": f"{int8} ({' or '.join(sorted(faster))})" if faster else int8,
        "cores": f"{machine['usable_cores']} of {machine['cores']} usable by this process",
        "memory": f"{memory[0]}, {memory[1]} available",
    }
    if "torch_threads" in machine:
        rows["torch"] = f"{machine['torch_threads']} threads, {machine['torch_instructions']} kernels"
        rows["accelerator"] = machine["accelerator"] or "none"
    show_table("", here, [{"what": name, "value": value} for name, value in rows.items()], "left")
    packages = [{"name": name, **row} for name, row in found["packages"].items()]
    show_table("", {"name": "package", "version": "installed", "supported": "supported"}, packages, "left")
    extras = [
        {"extra": name, "use": EXTRAS[name], "state": "complete" if not row["missing"] else _lacking(row["missing"])}
        for name, row in found["extras"].items()
    ]
    show_table("", {"extra": "extra", "use": "what for", "state": "state"}, extras, "left")
    for row in found["extras"].values():
        if row["install"]:
            say(row["install"])
    for problem in found["problems"]:
        say(f"problem: {problem}")
    if not found["problems"]:
        say("everything that is installed is in its supported range")


def _lacking(names: list[str]) -> str:
    return f"missing: {', '.join(names)}"


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"
