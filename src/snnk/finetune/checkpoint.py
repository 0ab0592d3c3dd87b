"""Checkpoints of a training: one safetensors file, with everything but tensors as JSON in its header."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from snnk import _checks, _io

# {"now" or "best" for weights, or an entry of the optimizer's state: {name of a parameter: tensor}}
Parts = dict[str, dict[str, Tensor]]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _number(value) and isinstance(value, int) and value >= 0


# checks of the facts
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
    """Write a checkpoint atomically."""
    tensors = {f"{part}.{name}": tensor for part, found in parts.items() for name, tensor in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    _io.write_tensors(path, tensors, {"facts": json.dumps({**facts, "tensors": len(tensors)})})


def read_checkpoint(path: Path, key: str, names: Sequence[str]) -> tuple[Parts, dict[str, Any]]:
    """The tensors, and the facts of these names; a ValueError if the file is damaged or has another key."""
    try:
        with _io.open_tensors(path) as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts.setdefault("step_seconds", facts["seconds"])  # an upper bound, for earlier files without it
        own, chosen = facts["key"], {name: facts[name] for name in names}
        for name, value in chosen.items():
            if not KINDS.get(name, lambda value: True)(value):
                raise ValueError(f"its {name} is {str(value)[:100]}")
        if facts.get("tensors", len(tensors)) != len(tensors):  # names are no check: an optimizer may lack some
            raise ValueError(f"it has {len(tensors)} tensors instead of {facts['tensors']}")
        if chosen.get("best", 0) >= max(len(chosen.get("history", [0])), 1):
            raise ValueError(f"its best epoch is {chosen['best']}")
        for name, tensor in tensors.items():
            _checks.finite(tensor, name)
    except Exception as error:  # safetensors has an exception of its own
        raise ValueError(f"{path} is no checkpoint: {error}; delete it to start again") from error
    if own != key:
        raise ValueError(f"{path} belongs to a run with other options or data; use those, or delete it to start again")
    parts: Parts = {"now": {}, "best": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts, chosen


def check_shapes(path: Path, parts: Parts, kept: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if the tensors do not fit a model.

    Args:
        path: the file, for the error.
        parts: the tensors of the checkpoint.
        kept: parameters and buffers that training changes.
        trained: parameters, for which an optimizer may have a state.
    """
    for part, found in parts.items():
        weights = part in ("now", "best")
        expected = kept if weights else trained
        # a parameter without a gradient has no state
        for name in sorted(found.keys() | expected.keys() if weights else found.keys()):
            a, b = (str(tuple(held[name].shape)) if name in held else "missing" for held in (found, expected))
            if a != b and (weights or a != "()"):  # the number of steps of an optimizer is a scalar
                raise ValueError(
                    f"{path} does not fit the model: {part}.{name} is {a} in it and {b} in the model; "
                    "delete it to start again"
                )
