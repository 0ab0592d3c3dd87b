"""Folders of models: the place of the transformer in them, their weights, and the files that a compressed model keeps.

A folder may come from anyone. Before any of its files is opened, `refuse_unsafe` refuses a folder that names code to
run, or has links that lead out of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from snnk import _io

MOST = 5  # names that an error lists
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # names of the number of layers in a config.json
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".gguf", ".index.json")
HIDDEN = (".git", ".cache")  # folders of tools
EXPORTS = ("onnx", "openvino", "coreml", *HIDDEN)  # folders with the same weights in other formats
CODE = (".py", ".pyc", ".sh", ".so", ".dll", ".dylib", ".pkl", ".pickle", ".joblib")  # files that are not copied
IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
ADAPTER = "adapter_config.json"
ORIGINAL_CARD = "README.original.md"


def find_folder(model: str) -> Path:
    """The folder of a model, after a download if it is a name on the hub, checked by `refuse_unsafe`."""
    folder = Path(model)
    if folder.is_dir():
        refuse_unsafe(folder)
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise ValueError(f"{model} is no folder and cannot be the name of a model on the hub")
    import huggingface_hub

    # no weights but safetensors, as no others are loaded
    unused = ["pytorch_model*", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf", *(f"{name}/*" for name in EXPORTS)]
    try:
        folder = Path(huggingface_hub.snapshot_download(model, ignore_patterns=unused))
    except Exception as error:  # network, hub and cache raise errors of many types
        raise ValueError(f"there is no folder {model}, and the hub did not give it: {error}") from error
    refuse_unsafe(folder)
    return folder


def refuse_unsafe(folder: Path, *, skipped: tuple[str, ...] = EXPORTS) -> None:
    """Refuse a model's folder that names code to run, or that has links out of it or special files.

    A snapshot in the hub's cache may have links to the blobs of the same model, which lie beside its snapshots.

    Args:
        folder: of a model.
        skipped: names of folders in it that the caller does not read.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling_own.Own"}}')
        >>> refuse_unsafe(folder)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: .../config.json names code of its own to run (auto_map: ...
    """
    root = Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots" and re.fullmatch(r"models--.+", root.parent.parent.name):
        allowed.append(root.parent.parent / "blobs")
    for path in _entries(folder, skipped):
        _check_entry(path, allowed)
        if path.name.endswith("config.json") and path.is_file():
            _check_config(path, _json(path), allowed)
        if path.name.endswith(".index.json"):
            _check_index(path, _json(path))
    for module in _modules(folder):
        if PurePosixPath(module["path"]).is_absolute() or ".." in PurePosixPath(module["path"]).parts:
            raise ValueError(f"{folder / 'modules.json'} names {module['path']}, outside the folder")
        if not module["type"].startswith("sentence_transformers."):
            raise ValueError(
                f"{folder / 'modules.json'} names code of its own to run ({module['type']}), which snnk never does; "
                "use a model that has modules of sentence-transformers only"
            )


def _entries(folder: Path, skipped: tuple[str, ...]) -> Iterator[Path]:
    """All entries of a folder except the skipped folders; links are not followed."""
    for place, folders, files in os.walk(folder):
        if Path(place) == folder:
            folders[:] = [name for name in folders if name not in skipped]
        yield from (Path(place, name) for name in sorted([*folders, *files]))


def _check_entry(path: Path, allowed: list[Path]) -> None:
    try:
        target = Path(os.path.realpath(path, strict=True))
        mode = target.stat().st_mode
    except OSError as error:
        raise ValueError(f"{path} cannot be followed: {error.strerror or error}; remove it") from None
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(
            f"{path} is a link to {target}, outside the model's folder; put the file itself there, or remove the link"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{path} is neither a file nor a folder, but a pipe, socket or device; remove it")


def _check_config(path: Path, config: Any, allowed: list[Path]) -> None:
    """Refuse a configuration that names a class in a file of its own, a kernel on the hub, or a file elsewhere.

    Tokenizers read the vocabulary that their configuration names. Many still have paths of the machine where they were
    saved, which are harmless if no such file exists.
    """
    if isinstance(config, dict):
        named = {"auto_map": config.get("auto_map")}
        named |= {key: config[key] for key in IMPLEMENTATIONS if "/" in str(config.get(key))}
        for key, value in named.items():
            if value:
                raise ValueError(
                    f"{path} names code of its own to run ({key}: {value}), which snnk never does; to use the classes "
                    f"of transformers itself, remove {key} from the file"
                )
        for key, value in config.items():
            if key.endswith("_file") and isinstance(value, str) and _is_elsewhere(value, allowed):
                raise ValueError(f"{path} names {key} {value}, outside the model's folder; remove {key} from the file")
    for part in config.values() if isinstance(config, dict) else config if isinstance(config, list) else ():
        _check_config(path, part, allowed)


def _is_elsewhere(name: str, allowed: list[Path]) -> bool:
    try:
        target = Path(os.path.realpath(name))
        return target.exists() and not any(target.is_relative_to(place) for place in allowed)
    except (OSError, ValueError):  # too long for a path, or with a null character
        return False


def _check_index(path: Path, index: Any) -> None:
    """Refuse an index of weights that names files in other folders."""
    names = index.get("weight_map") if isinstance(index, dict) else None
    for name in set(map(str, names.values())) if isinstance(names, dict) else ():
        if name != PurePosixPath(name).name:
            raise ValueError(f"{path} names {name}, outside the folder; weights are read from beside the index")


def find_transformer(folder: Path) -> PurePosixPath:
    """The place of the transformer in a folder: its root, or the path in modules.json of sentence-transformers.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.json").write_text("{}")
        >>> find_transformer(folder)
        PurePosixPath('.')
    """
    inner = PurePosixPath()
    modules = folder / "modules.json"
    if not (folder / "config.json").is_file() and modules.is_file():
        try:
            inner = PurePosixPath(min(json.loads(modules.read_text()), key=lambda module: module["idx"])["path"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{modules} does not name the folder of the transformer: {error!r}") from error
        if inner.is_absolute() or ".." in inner.parts:
            raise ValueError(f"{modules} names {inner}, outside the folder")
    for place in (folder, folder / inner):
        if (place / ADAPTER).is_file():
            raise ValueError(
                f"{place} holds an adapter ({ADAPTER}), and the whole model is needed: snnk.finetune.merge writes it "
                "for a folder of snnk finetune; merge and save other adapters with PEFT's merge_and_unload"
            )
    if not (folder / inner / "config.json").is_file():
        raise ValueError(f"{folder / inner} is no folder with a model: there is no config.json in it")
    return inner


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, by its index if it has one; a ValueError if one is missing."""
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
        exported = [name for name in ("onnx", "openvino") if (folder / name).is_dir()]
        why = (
            f"it is an export to {exported[0]}: name the folder that it was made from"
            if exported
            else "models are read from safetensors only"
        )
        raise ValueError(f"{folder} has no {some(missing)}; {why}")
    return files


def check_folder(folder: Path) -> list[Path]:
    """The safetensors files of a model; a ValueError if config.json or their headers are damaged, or tensors too few.

    With 10^6 layers in config.json, transformers would be busy for an hour before it opens the files.
    """
    config = _io.read_json(folder / "config.json", "the configuration of a model")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is not the configuration of a model: it is no object")
    classes = config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise ValueError(
            f"{folder / 'config.json'} has architectures {str(classes)[:50]}; a list of names of classes is expected"
        )
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
    """The first few names, for an error."""
    found = list(names)
    return ", ".join(found[:MOST]) + (f" and {len(found) - MOST} more" if len(found) > MOST else "")


def pooling_of(folder: Path) -> tuple[str, ...]:
    """The poolings that a folder of sentence-transformers names, such as "cls"; their vectors are joined."""
    for module in _modules(folder):
        if module["type"].endswith("Pooling"):
            config = _json(folder / module["path"] / "config.json")
            if isinstance(config, dict):
                modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if on is True]
                modes = [mode for mode in modes if f"pooling_mode_{mode}" in config]
                if isinstance(config.get("pooling_mode"), str):
                    modes.append(config["pooling_mode"])
                return tuple(re.sub("_tokens?$", "", mode) for mode in modes)
    return ()


def is_cross_encoder(folder: Path) -> bool:
    """Whether a folder holds a cross-encoder of sentence-transformers, which reads pairs of texts."""
    found = _json(folder / "config_sentence_transformers.json")
    return isinstance(found, dict) and found.get("model_type") == "CrossEncoder"


def makes_vectors(folder: Path) -> bool:
    """Whether sentence-transformers makes vectors from the hidden states of the model in a folder.

    It loads the model without a head then, whatever class config.json names: a model of embeddings that was trained
    from a language model often still names the class of the latter.
    """
    modules = _modules(folder)
    return bool(modules) and not is_cross_encoder(folder) and modules[0]["type"].rpartition(".")[2] == "Transformer"


def copy_others(folder: Path, inner: PurePosixPath, target: Path) -> str:
    """Copy all files but the transformer's weights and configuration, and code; returns the text of the old card.

    The folder has passed `refuse_unsafe`, so that no link leads out of it.
    """
    ours = {(folder / module["path"]).resolve() for module in _modules(folder)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        own = name.parent == Path(inner)  # other modules of sentence-transformers keep their weights
        if not path.is_file() or name.parts[0] in EXPORTS or (own and _replaced(path.name)):
            continue
        if path.name.lower().endswith(CODE):
            continue
        if any(_other_model(parent, ours) for parent in path.parents[: len(name.parts) - 1]):
            continue
        new = target / (ORIGINAL_CARD if str(name) == "README.md" else name)
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, new)
    card = folder / "README.md"
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""


def _other_model(folder: Path, ours: set[Path]) -> bool:
    """Whether a subfolder of a model is a checkpoint of its training, or a model of its own."""
    if folder.resolve() in ours:
        return False
    files = [path.name for path in folder.iterdir()]
    whole = "config.json" in files and any(name.endswith(WEIGHTS) for name in files)
    return whole or bool(re.fullmatch(r"checkpoint-\d+", folder.name))


def _replaced(name: str) -> bool:
    return name == "config.json" or name.endswith(WEIGHTS)


def _modules(folder: Path) -> list[dict[str, str]]:
    """Entries of modules.json that have a path and a type; none if there is no such file."""
    found = _json(folder / "modules.json")
    entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    return [e for e in entries if isinstance(e.get("path"), str) and isinstance(e.get("type"), str)]


def _json(path: Path) -> Any:
    """The value in a JSON file; None if there is no such file, or it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
