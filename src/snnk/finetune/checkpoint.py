"""A training that was stopped, as one file of safetensors with the rest as JSON in its header."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from snnk import _io

# weights "now" and at the "best" epoch, and what an optimizer keeps of each, by the parameter's name
Parts = dict[str, dict[str, Tensor]]


def write_checkpoint(path: Path, parts: Parts, facts: Mapping[str, Any]) -> None:
    """Write it, whole or not at all."""
    tensors = {f"{part}.{name}": tensor for part, found in parts.items() for name, tensor in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    _io.write_tensors(path, tensors, {"facts": json.dumps(facts)})


def read_checkpoint(path: Path, key: str, names: Sequence[str]) -> tuple[Parts, dict[str, Any]]:
    """Tensors, and the facts of these names; refused if it is damaged or of a run with another key."""
    try:
        with _io.open_tensors(path) as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts.setdefault("step_seconds", facts["seconds"])  # of snnk before it was counted: at most that
        own, told = facts["key"], {name: facts[name] for name in names}
    except Exception as error:  # safetensors has its own kind
        raise ValueError(f"{path} is no checkpoint: {error}; delete it to start anew") from error
    if own != key:
        raise ValueError(f"{path} is of a run with other options or data; give those, or delete it to start anew")
    parts: Parts = {"now": {}, "best": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts, told


def check_shapes(path: Path, parts: Parts, kept: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit a model.

    Args:
        path: named in the error.
        parts: of the checkpoint.
        kept: what training changes, of which there are weights.
        trained: parameters, of which an optimizer may keep something.
    """
    for part, found in parts.items():
        weights = part in ("now", "best")
        wanted = kept if weights else trained
        # a parameter without a gradient has no state
        for name in sorted(found.keys() | wanted.keys() if weights else found.keys()):
            a, b = (str(tuple(held[name].shape)) if name in held else "missing" for held in (found, wanted))
            if a != b and (weights or a != "()"):  # the optimizer counts steps in single numbers
                raise ValueError(
                    f"{path} does not fit the model: {part}.{name} is {a} in it and {b} in the model; "
                    "delete it to start anew"
                )
