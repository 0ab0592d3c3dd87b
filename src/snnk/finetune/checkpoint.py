"""A training that was stopped, as one file of safetensors with the rest as JSON in its header."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from snnk import _checks, _io

# weights "now" and at the "best" epoch, and what an optimizer keeps of each, by the parameter's name
Parts = dict[str, dict[str, Tensor]]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _number(value) and isinstance(value, int) and value >= 0


# what the facts of a training must be
KINDS: dict[str, Callable[[Any], bool]] = {
    "history": lambda rows: (
        isinstance(rows, list) and all(isinstance(row, dict) and all(map(_number, row.values())) for row in rows)
    ),
    "best": _count,
    "steps": _count,
    "seconds": _number,
    "step_seconds": _number,
    "loss_sum": _number,
    "stopped_early": lambda value: isinstance(value, bool),
}


def write_checkpoint(path: Path, parts: Parts, facts: Mapping[str, Any]) -> None:
    """Write it, whole or not at all."""
    tensors = {f"{part}.{name}": tensor for part, found in parts.items() for name, tensor in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    _io.write_tensors(path, tensors, {"facts": json.dumps({**facts, "tensors": len(tensors)})})


def read_checkpoint(path: Path, key: str, names: Sequence[str]) -> tuple[Parts, dict[str, Any]]:
    """Tensors, and the facts of these names; refused if it is damaged or of a run with another key."""
    try:
        with _io.open_tensors(path) as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts.setdefault("step_seconds", facts["seconds"])  # of snnk before it was counted: at most that
        own, told = facts["key"], {name: facts[name] for name in names}
        for name in told:
            if not KINDS.get(name, lambda value: True)(told[name]):
                raise ValueError(f"its {name} is {str(told[name])[:100]}")
        if facts.get("tensors", len(tensors)) != len(tensors):  # an optimizer need not have a state for each parameter
            raise ValueError(f"it has {len(tensors)} tensors instead of {facts['tensors']}")
        if told.get("best", 0) >= max(len(told.get("history", [0])), 1):
            raise ValueError(f"its best epoch is {told['best']}")
        for name, tensor in tensors.items():
            _checks.finite(tensor, name)
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
