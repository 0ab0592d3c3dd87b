"""Checkpoints of fits and trainings: one safetensors file each, with everything but tensors as JSON in its header.

A checkpoint has a key, the hash of everything that the result of its run depends on. It is never used by a run with
another key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snnk import _checks, _io

if TYPE_CHECKING:  # the command line looks for checkpoints before it loads torch
    from torch import Tensor

# {"now" or "best" for weights, or an entry of the optimizer's state: {name of a parameter: tensor}}
Parts = dict[str, dict[str, "Tensor"]]
Check = Callable[[Any], bool]  # of one of the facts in a file, which may be damaged


class CheckpointError(ValueError):
    """A checkpoint is damaged, does not fit, or belongs to another run."""


def is_count(value: Any) -> bool:
    return _checks.is_integer(value) and value >= 0


def are_rows(value: Any) -> bool:
    """Whether a value is a list of dicts of numbers."""
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        return False
    return all(_checks.is_number(x) for row in value for x in row.values())


def checkpoint_of(out: str | Path) -> Path:
    """The file or folder in which a run that was stopped leaves its state, beside the folder that it would have made.

    Example:
        >>> checkpoint_of("runs/tuned/").name
        'tuned.checkpoint'
    """
    out = Path(out)
    return out.parent / f"{out.name}.checkpoint"


def write_checkpoint(path: Path, parts: Parts, facts: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically."""
    tensors = {f"{part}.{name}": tensor for part, found in parts.items() for name, tensor in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    _io.write_tensors(path, tensors, {"facts": json.dumps({**facts, "tensors": len(tensors)})})


def read_checkpoint(path: Path, key: str, checks: Mapping[str, Check]) -> tuple[Parts, dict[str, Any]]:
    """The tensors, and the facts that have checks; an error if the file is damaged or has another key."""
    try:
        with _io.open_tensors(path) as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        own, chosen = facts["key"], {name: facts[name] for name in checks}
        for name, value in chosen.items():
            if not checks[name](value):
                raise ValueError(f"its {name} is {str(value)[:100]}")
        if facts.get("tensors", len(tensors)) != len(tensors):  # names are no check: an optimizer may lack some
            raise ValueError(f"it has {len(tensors)} tensors instead of {facts['tensors']}")
        for name, tensor in tensors.items():
            _checks.finite(tensor, name)
    except Exception as error:  # safetensors has an exception of its own
        raise CheckpointError(f"{path} is no checkpoint: {error}; delete it to start again") from error
    if own != key:
        text = f"{path} belongs to a run with other options or data; use those, or delete it to start again"
        raise CheckpointError(text)
    parts: Parts = {"now": {}, "best": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts, chosen


def check_shapes(path: Path, parts: Parts, kept: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
    """Raise an error if the tensors do not fit a model.

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
                raise CheckpointError(
                    f"{path} does not fit the model: {part}.{name} is {a} in it and {b} in the model; "
                    "delete it to start again"
                )
