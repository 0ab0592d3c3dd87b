"""What the files of a model must hold: every tensor, but for the head that a class adds to them.

transformers draws a tensor that the files lack at random and ignores one that they have too many; both are a line in a
log. Here they are errors, with two exceptions. A class other than the one that was saved may bring a head of its own,
and with it a pooler, which some classes leave out. And files may have whole parts that a class does without, such as
the head for masked words in those of a BERT.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snnk import _io
from snnk.hf.architectures import FFN

MOST = 5  # keys that an error names
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # numbers of layers in a config.json


def refuse_keys(
    model: Any,
    missing: Iterable[str],
    unexpected: Iterable[str],
    source: Any,
    saved_class: str | None,
    *,
    new_head: bool = False,
) -> None:
    """Raise a ValueError that names tensors which the files lack, or have without a place in the model.

    Args:
        model: as it was loaded.
        missing, unexpected: `missing_keys` and `unexpected_keys` of transformers' loading info.
        source: the files, for the error.
        saved_class: name of the class that they were saved from; None demands every tensor.
        new_head: the model gets another head than the files have, whatever its class.
    """
    every = not new_head and saved_class in (None, type(model).__name__)
    lacking = sorted(key for key in missing if every or not in_head(model, key))
    if lacking:
        raise ValueError(
            f"{source} lacks {some(lacking)}, which a {type(model).__name__} of its config.json has: the file is "
            "damaged or config.json was changed; copy or save both again"
        )
    extra = sorted(k for k in unexpected if not (new_head and in_head(model, k)) and not _left_out(model, k))
    if extra:
        raise ValueError(
            f"{source} has {some(extra)}, for which a {type(model).__name__} of its config.json has no place: the "
            "file is of another model or config.json was changed; copy or save both again"
        )


def in_head(model: Any, key: str) -> bool:
    """Whether a tensor belongs to a head, or to a pooler, which not every class has."""
    base, path = _place(model, key)
    return base is not model.base_model or path.startswith("pooler")


def _place(model: Any, key: str) -> tuple[nn.Module, str]:
    """The base model or the whole one, and the name in it; files of the base model alone have no prefix."""
    base, prefix = model.base_model, f"{model.base_model_prefix}."
    if base is not model and not key.startswith(prefix) and key.partition(".")[0] in model._modules:
        return model, key
    return base, key.removeprefix(prefix)


def _left_out(model: Any, key: str) -> bool:
    """Whether a tensor is of a whole part that the class does without, of the base model or of a head.

    It is not if it is a further layer of a list, or beside parameters of a module that the class has.
    """
    owner, path = _place(model, key)
    head, inside = owner is not model.base_model, False
    for name in path.split("."):
        child = owner._modules.get(name)
        if child is None:
            break
        owner, inside = child, True
    if not head:
        return not inside
    return not isinstance(owner, nn.ModuleList) and not any(True for _ in owner.parameters(recurse=False))


def refuse_nan(model: nn.Module, source: Any) -> None:
    """Raise a ValueError if a parameter in memory is not finite."""
    wrong = [name for name, p in model.named_parameters() if not p.is_meta and not torch.isfinite(p).all()]
    if wrong:
        raise ValueError(
            f"{source} has NaN or infinite values in {some(wrong)}: copy the file again, or train again with a lower "
            "learning rate"
        )


def refuse_sizes(model: nn.Module, files: Iterable[str | os.PathLike[str]]) -> None:
    """Raise a ValueError if a tensor of a model on the meta device is larger than the files that are to fill it."""
    files = list(files)
    room = sum(os.path.getsize(file) for file in files)
    for name, p in model.named_parameters() if files else ():
        if p.numel() > room:  # a number takes one byte at least
            raise ValueError(
                f"config.json makes {name} {tuple(p.shape)}, more than there is in {some(map(str, files))} "
                f"({room:,} bytes): config.json was changed; copy or save it again"
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, in it whatever the index says; a ValueError if one is not there."""
    index = folder / "model.safetensors.index.json"
    names: Any = ["model.safetensors"]
    if index.is_file():
        found = _io.read_json(index, "the index of a model's files")
        found = found.get("weight_map") if isinstance(found, dict) else None
        names = list(found.values()) if isinstance(found, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{index} is not the index of a model's files: it has no weight_map of their names")
    files = [folder / Path(name).name for name in sorted(set(names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{folder} has no {some(missing)}; models are read from safetensors only")
    return files


def check_folder(folder: Path) -> list[Path]:
    """The files of a model, read as far as their headers: refused if they are damaged or too small for config.json.

    A config.json with 10^6 layers would keep transformers busy for an hour before it looks at the files.
    """
    config = _io.read_json(folder / "config.json", "the configuration of a model")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is not the configuration of a model: it is no object")
    files, tensors = weight_files(folder), 0
    for file in files:
        with _io.open_tensors(file) as opened:
            tensors += len(opened.keys())
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]  # a model of texts and images
    for name, count in ((name, part[name]) for part in parts for name in LAYERS if part.get(name) is not None):
        if not isinstance(count, int) or count > tensors:
            raise ValueError(
                f"{folder / 'config.json'} has {name} {str(count)[:50]}, and {some(file.name for file in files)} "
                f"{tensors:,} tensors: config.json was changed; copy or save it again"
            )
    return files


def some(names: Iterable[str]) -> str:
    """The first few names."""
    found = list(names)
    return ", ".join(found[:MOST]) + (f" and {len(found) - MOST} more" if len(found) > MOST else "")


def each(batches: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """The batches, each a dict with tensors, or an error that says what came instead."""
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(f"batches must be a list of dicts of the model's inputs; got {type(batches).__name__}")
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise TypeError(f"a batch must be a dict of the model's inputs; got {type(batch).__name__}")
        if not any(isinstance(value, Tensor) for value in batch.values()):
            raise ValueError(f"a batch must hold the model's inputs as tensors; got a dict with keys {list(batch)}")
        yield batch


def in_memory(ffns: list[FFN]) -> list[FFN]:
    """The blocks, if their layers have weights here; what is offloaded can neither be fitted nor replaced."""
    away = [ffn.name for ffn in ffns if any(p.is_meta for p in ffn.block.parameters())]
    if away:
        raise ValueError(
            f"weights of {len(away)} blocks, {away[0]} the first, are offloaded or on the meta device, not in memory; "
            "load the whole model into memory, with from_pretrained(..., device_map='cpu')"
        )
    return ffns


def place(batch: Mapping[str, Any], model: Any) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


class evaluating:
    """`with evaluating(model)`: eval mode inside; outside each module's own, for a new one that of its parent."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modes = model, {module: module.training for module in model.modules()}

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *error: Any) -> None:
        for module, mode in self.modes.items():
            module.training = mode
        for parent in self.model.modules():  # parents come before their children
            for child in parent.children():
                if child not in self.modes:
                    child.training = parent.training
