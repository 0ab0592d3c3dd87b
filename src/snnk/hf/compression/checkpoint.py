"""The state of a run of `snnk.hf.compress` in a folder beside its output, from which a stopped run goes on.

| file | contents |
|---|---|
| start.json | the key of the run and its plan |
| block-NAME.safetensors | a block as soon as it is fitted: its new tensors, its entry in config.json, its report |
| distillation.safetensors | the state of the distillation, see distill.py |

Every file appears whole or not at all. The folder is removed when the output is complete, and when the run ends in an
error that the same command would end in again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snnk import _io
from snnk._checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from snnk._environment import environment
from snnk.hf.compression.plans import Plan
from snnk.hf.compression.times import Timings
from snnk.hf.cost import stored
from snnk.hf.low_rank import LowRank, rebuild_block_
from snnk.hf.model_blocks import ModelBlock
from snnk.hf.models import Batch, without_place
from snnk.hf.replace import Replacement

PACKAGES = ("snnk", "torch", "transformers")  # whose versions are part of the key
ADVICE = "delete it to start again"


class NotServed(ValueError):
    """The compressed model cannot be exported, or loses too much by it; the checkpoint stays, for other options."""


class CompressionCheckpoint:
    """`with CompressionCheckpoint(folder, key)`: the state of a run.

    Args:
        folder: where its files are, or will be.
        key: the `fingerprint` of the run. A folder with another key is refused, and stays as it is.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.distillation = folder / "distillation.safetensors"
        self.plan: Plan | None = None
        if others := _others(folder):
            raise CheckpointError(
                f"{folder} is where a checkpoint would be, and has {others[0]}, which is not part of one; move it "
                "away, or name another output"
            )
        if (folder / "start.json").exists():
            start = _io.read_json(folder / "start.json", f"the start of a run of snnk compress, so delete {folder}")
            if not isinstance(start, dict) or not {"key", "plan"} <= start.keys():
                raise CheckpointError(f"{folder / 'start.json'} has no key and plan; {ADVICE}: {folder}")
            if start["key"] != key:
                raise CheckpointError(
                    f"{folder} belongs to a run that was stopped, with other options, texts, weights or versions; "
                    f"use those, name another output, or {ADVICE}"
                )
            try:
                self.plan = Plan.from_dict(start["plan"])
            except (ValueError, TypeError, ArithmeticError) as error:
                raise CheckpointError(f"{folder / 'start.json'} has no plan: {error}; {ADVICE}: {folder}") from error
            _io.remove_leftovers_in(folder)

    def start(self, plan: Plan) -> None:
        """Keep the plan, which may have been chosen by measurements."""
        self.plan = plan
        self.folder.mkdir(exist_ok=True)
        _io.write_json(self.folder / "start.json", {"key": self.key, "plan": plan.to_dict()})

    def __enter__(self) -> CompressionCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        again = isinstance(error, ValueError | TypeError) and not isinstance(error, CheckpointError | NotServed)
        if error is None or again:
            remove_checkpoint(self.folder)

    def __str__(self) -> str:
        blocks = len([*self.folder.glob("block-*.safetensors")])
        distilling = ", and a part of the distillation" if self.distillation.exists() else ""
        return f"{self.folder}, which has {blocks} blocks{distilling}"

    def keep(self, block: ModelBlock, new: Replacement | LowRank | None, report: Mapping[str, Any]) -> None:
        """Keep what replaced a block, or that it stays, and its report."""
        parts = {} if new is None else {str(i): module.state_dict() for i, module in enumerate(new.modules)}
        entry = None if new is None else block.configs[0].quantization_config.blocks[block.name]
        write_checkpoint(self._file(block), parts, {"key": self.key, "entry": entry, "report": dict(report)})

    def restore_(
        self, block: ModelBlock, undo: ExitStack
    ) -> tuple[Replacement | LowRank | None, dict[str, Any]] | None:
        """Replace a block by what was kept for it, and return this and its report; None if there is nothing."""
        path = self._file(block)
        if not path.exists():
            return None
        parts, facts = read_checkpoint(path, self.key, {"entry": _is_entry, "report": lambda x: isinstance(x, dict)})
        if facts["entry"] is None:
            return None, facts["report"]
        new = rebuild_block_(block, facts["entry"], path.stat().st_size)
        undo.callback(new.restore_)
        try:
            for i, module in enumerate(new.modules):
                module.load_state_dict(parts[str(i)])
        except (RuntimeError, LookupError) as error:
            raise CheckpointError(f"{path} does not fit {block.name}: {error}; {ADVICE}: {self.folder}") from error
        return new, facts["report"]

    def _file(self, block: ModelBlock) -> Path:
        return self.folder / f"block-{block.name}.safetensors"


def stored_timings(folder: Path) -> Timings | None:
    """The times that a run had measured when it was stopped, if any; what else the folder has is checked later."""
    try:
        return Plan.from_dict(json.loads((folder / "start.json").read_text(encoding="utf-8"))["plan"]).timings
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError):
        return None


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint of `snnk.hf.compress`; a folder with anything else in it stays as it is."""
    if not _others(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _others(folder: Path) -> list[str]:
    """Names in a folder that are not those of a checkpoint, nor of files that a killed write has left."""
    if not folder.exists():
        return []
    if not folder.is_dir() or folder.is_symlink():
        return [folder.name]
    own = ("start.json", "block-", "distillation.safetensors")
    return sorted(path.name for path in folder.iterdir() if not path.name.lstrip(".").startswith(own))


def _is_entry(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def fingerprint(settings: Mapping[str, Any], model: PreTrainedModel, batches: Iterable[Batch]) -> str:
    """Hash of everything that the result of a run depends on: options, weights, inputs and versions of packages.

    The place of the model's folder does not count.
    """
    versions = {name: value for name, value in environment().items() if name in PACKAGES}
    facts = [dict(settings), versions, type(model).__name__, without_place(model.config.to_dict())]
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in stored(model).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    for batch in batches:
        for name, value in batch.items():
            digest.update(f"{name} {tuple(value.shape)}".encode())
            digest.update(_bytes(value))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
