"""`load` reads a folder that `finetune` wrote; `load_base` reads the model that a run starts from.

An adapter needs its base model. A local one is looked for where it was in relation to the tuned folder, so that both
can be moved together, and then where it was on the machine of the run. The weights that are found are compared with
those of the run: an adapter on other weights of the same shapes would predict at random.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from snnk import _checks, _io
from snnk.finetune.config import POOLING, FinetuneConfig
from snnk.hf.classify.means import POOLED
from snnk.hf.folders import find_folder, some
from snnk.hf.models import Loaded, load_model, load_processor, quiet, refuse_nan, set_padding

FORMAT = "snnk.Finetune/1"


@quiet()
def load(folder: str | Path, *, base: str | Path | None = None) -> tuple[Any, Any]:
    """Load a model that `finetune` wrote, in eval mode, and its tokenizer or image processor.

    Args:
        folder: the `out` of the run, or its name on the hub.
        base: for an adapter, the folder or hub name of its base model. Default: the base model of the run, by its name
            on the hub, or by its place relative to `folder`, or by its place on the machine of the run.

    Example:
        >>> model, tokenizer = load("tuned")  # doctest: +SKIP
        >>> model(**tokenizer("a text", return_tensors="pt")).logits  # doctest: +SKIP
        tensor([[-1.2, 1.3]])
    """
    folder = find_folder(str(folder))
    facts = read_metrics(folder)
    adapter, images, pooling = facts["adapter"], facts["images"], facts["config"]["pooling"]
    source = str(folder)
    if adapter:
        source = _find_base(folder, facts, base)
    elif base is not None:
        raise ValueError(f"{folder} has all weights of its model and needs no base model; leave out base {base}")
    processor = load_processor(folder, images)
    options = _label_options(facts["labels"])
    loaded = load_model(source, _class(images, pooling), new_head=adapter, dtype=torch.float32, **options)
    model = loaded.model
    if not images:
        set_padding(model, processor)  # the base model of an adapter has a configuration of its own
    if adapter:
        _check_weights(loaded, facts, folder, source)
        model = _with_adapter(loaded, folder, source)
    refuse_nan(model, folder)
    return model.eval(), processor


def load_base(
    config: FinetuneConfig, labels: Sequence[str] | None, images: bool, say: Callable[[str], None]
) -> tuple[Loaded, tuple[str, ...]]:
    """The model that a run starts from, and the modules inside it that its files lack and that were drawn at random."""
    pooling = config.pooling or "model"
    kind = _class(images, pooling)
    loaded = load_model(config.model, kind, new_head=True, dtype=torch.float32, **_label_options(labels))
    model = loaded.model
    if Path(config.model).is_dir():
        model.name_or_path = str(Path(config.model).resolve())  # an adapter may be loaded from another folder
    if model.config.model_type == "xlnet":
        raise ValueError(
            f"{config.model} is an XLNet, which classifies by the last position of a row, padding or not: "
            "use a model of another type"
        )
    inside = sorted(key for key in loaded.missing | loaded.mismatched if key.startswith(f"{model.base_model_prefix}."))
    if not inside or pooling != "model":
        return loaded, ()
    say(f"note: the files have no {', '.join(inside)}, which are drawn at random; --pooling mean needs no pooler")
    return loaded, tuple(dict.fromkeys(name for key in inside if "." in (name := key.rpartition(".")[0])))


def mark_pairs(model: Any) -> None:
    """Note in the configuration of a model that it reads pairs of texts; see `snnk.hf.models.reads_pairs`."""
    model.config.snnk_pairs = True


def fingerprint(loaded: Loaded) -> str:
    """Hash of the weights of a model that were in its files, which does not depend on their order or format."""
    drawn = loaded.missing | loaded.mismatched
    read = sorted(((name, p) for name, p in loaded.model.named_parameters() if name not in drawn), key=lambda x: x[0])
    return hashlib.sha256(repr([(name, *bits(p)) for name, p in read]).encode()).hexdigest()


def bits(parameter: Tensor) -> tuple[int, int]:
    """Two sums over the bits of a float32 tensor as integers, which do not depend on the order of the summands."""
    part = parameter.detach().flatten().view(torch.int32).long()
    return int(part.sum()), int(part.square().sum())


def place_from(folder: Path, base: str) -> str | None:
    """The place of a local base model relative to a folder, as metrics.json has it; None for a name on the hub."""
    return Path(os.path.relpath(Path(base).resolve(), folder.resolve())).as_posix() if Path(base).is_dir() else None


def is_tuned(folder: Path) -> bool:
    """Whether `finetune` wrote a folder."""
    file = folder / "metrics.json"
    found = _io.read_json(file, "a file of snnk finetune") if file.is_file() else None
    return isinstance(found, dict) and found.get("format") == FORMAT


def read_metrics(folder: Path) -> dict[str, Any]:
    """The content of metrics.json, in which the entries that `load` needs were checked."""
    file = folder / "metrics.json"
    facts: Any = _io.read_json(file, "a file of snnk finetune")
    try:
        adapter, images, pooling, names = facts["adapter"], facts["images"], facts["config"]["pooling"], facts["labels"]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{file} is not a file of snnk finetune: it lacks {error}; copy the folder again") from error
    flags = isinstance(adapter, bool) and isinstance(images, bool) and pooling in POOLING
    if not flags or (names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names))):
        raise ValueError(
            f"{file} was changed: adapter {adapter!r} and images {images!r} must be true or false, pooling {pooling!r} "
            f"one of {', '.join(POOLING)}, labels null or a list of names; copy the folder again"
        )
    base = facts.get("base", {})  # files of earlier versions have none
    if not isinstance(base, dict) or not all(isinstance(base.get(key), str | None) for key in ("place", "weights")):
        raise ValueError(f"{file} was changed: base must have a place and weights as text; copy the folder again")
    data, names = facts.get("data", {}), ("text", "text_pair", "label")
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str | None) for key in names):
        raise ValueError(f"{file} was changed: data must name columns, {', '.join(names)}; copy the folder again")
    lengths = data.get("max_length"), facts["config"].get("max_length")
    if not all(length is None or (_checks.is_integer(length) and length > 0) for length in lengths):
        raise ValueError(f"{file} was changed: max_length must be a positive number; copy the folder again")
    return facts


def _find_base(folder: Path, facts: dict[str, Any], base: str | Path | None) -> str:
    """The folder or hub name of the base model of an adapter."""
    named = _base_of(folder)  # also checks the configuration
    place = facts.get("base", {}).get("place")
    if base is not None:
        candidates = [str(base)]
    elif place is None:
        candidates = [named]
    else:  # normalised, as the folder itself may be a link
        candidates = list(dict.fromkeys([os.path.normpath(Path(os.path.realpath(folder), place)), named]))
    for found in candidates[:-1]:
        if Path(found).is_dir():
            return str(find_folder(found))
    try:
        return str(find_folder(candidates[-1]))
    except ValueError as error:
        looked = " and ".join(candidates)
        raise ValueError(
            f"{folder} is an adapter of {facts.get('base_model', named)}, which was looked for at {looked}: {error}. "
            "Name the folder or the hub name of that model with base (--base)"
        ) from error


def _check_weights(loaded: Loaded, facts: dict[str, Any], folder: Path, source: str) -> None:
    expected = facts.get("base", {}).get("weights")
    if expected is not None and fingerprint(loaded) != expected:
        raise ValueError(
            f"{source} has other weights than {facts['base_model']}, the base model that the adapter in {folder} was "
            "trained on; name the folder or the hub name of that model with base (--base)"
        )


def _base_of(folder: Path) -> str:
    """The base model that the configuration of an adapter names; patterns that are slow to match are refused."""
    file = folder / "adapter_config.json"
    found = _io.read_json(file, "the configuration of an adapter")
    source = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    if not isinstance(source, str):
        raise ValueError(f"{file} does not name its base model: base_model_name_or_path is {source!r}")
    importlib.import_module("snnk.peft")  # registers its adapters with PEFT
    from snnk.peft.patterns import check_patterns

    check_patterns(found, file)
    return source


def _with_adapter(loaded: Loaded, folder: Path, source: str) -> Any:
    """The model with its adapter; every tensor that the base model lacks must be in the adapter's file."""
    from peft import PeftModel, get_peft_model_state_dict

    from snnk.peft.config import read_header

    file = folder / "adapter_model.safetensors"
    found = read_header(folder)
    if found is None:
        raise ValueError(f"there is no file {file}; copy the folder again")
    model = loaded.model
    other = {key for key in loaded.mismatched if model.state_dict()[key].numel()}  # the mean has an empty tensor
    drawn = {f"base_model.model.{key}" for key in {*loaded.missing, *other}}
    _check_complete(drawn, found, file, source)  # before PEFT, whose error would be a bare name
    try:
        model = PeftModel.from_pretrained(model, folder)
        model.peft_config["default"].base_model_name_or_path = source  # for a copy that is saved from here
        tensors = get_peft_model_state_dict(model, save_embedding_layers=False)  # PEFT would look for the base model
        expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    except Exception as error:
        raise ValueError(f"the adapter in {folder} cannot be loaded: {error}") from error
    _check_complete(expected, found, file, source)
    others = sorted(name for name, shape in found.items() if expected.get(name) != shape)
    if others:
        raise ValueError(f"{file} has {some(others)} with other shapes than, or without a place in, {source}")
    return model


def _check_complete(expected: Iterable[str], found: Iterable[str], file: Path, source: str) -> None:
    missing = sorted(set(expected) - set(found))
    if missing:
        raise ValueError(f"{file} lacks {some(missing)}: it is damaged or not of {source}; copy the folder again")


def _class(images: bool, pooling: str) -> Any:
    if images and pooling != "model":
        raise ValueError(f"pooling {pooling!r} is for texts; for images use 'model'")
    return AutoModelForImageClassification if images else POOLED.get(pooling, AutoModelForSequenceClassification)


def _label_options(names: Sequence[str] | None) -> dict[str, Any]:
    if names is None:
        return {"num_labels": 1, "problem_type": "regression"}
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": "single_label_classification",
    }
