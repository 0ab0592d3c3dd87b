"""Folders of models: where in one the transformer is, and what of it goes along into a compressed model's folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".gguf", ".index.json")
EXPORTS = ("onnx", "openvino", "coreml", ".git", ".cache")  # folders with the original's weights in other formats
ADAPTER = "adapter_config.json"
ORIGINAL_CARD = "README.original.md"


def find_folder(model: str) -> Path:
    """The folder of a model, downloaded if it is a name of the hub."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise ValueError(f"{model} is no folder, and no name of a model on the hub")
    import huggingface_hub

    # weights as safetensors only, as they are the only ones that are loaded
    unused = ["pytorch_model*", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf", *(f"{name}/*" for name in EXPORTS)]
    try:
        return Path(huggingface_hub.snapshot_download(model, ignore_patterns=unused))
    except Exception as error:  # of the network, of the hub, of its cache: many kinds, one meaning
        raise ValueError(f"there is no folder {model}, and the hub did not give it: {error}") from error


def find_transformer(folder: Path) -> PurePosixPath:
    """Where in the folder the transformer is: at the root, or where modules.json of sentence-transformers says.

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
            raise ValueError(f"{modules} does not say where the transformer is: {error!r}") from error
        if inner.is_absolute() or ".." in inner.parts:
            raise ValueError(f"{modules} names {inner}, outside the folder")
    for place in (folder, folder / inner):
        if (place / ADAPTER).is_file():
            raise ValueError(
                f"{place} holds an adapter ({ADAPTER}); merge the adapter first, with PEFT's merge_and_unload, "
                "and save the whole model"
            )
    if not (folder / inner / "config.json").is_file():
        raise ValueError(f"{folder / inner} is no folder with a model: there is no config.json in it")
    return inner


def pooling_of(folder: Path) -> str:
    """How sentence-transformers pools tokens here, such as "cls_token"; "" if the folder does not say."""
    for module in _modules(folder):
        if module["type"].endswith("Pooling"):
            config = _json(folder / module["path"] / "config.json")
            if isinstance(config, dict):
                modes = (key.removeprefix("pooling_mode_") for key, on in config.items() if on is True)
                return ", ".join(mode for mode in modes if f"pooling_mode_{mode}" in config)
    return ""


def copy_others(folder: Path, inner: PurePosixPath, target: Path) -> str:
    """Copy tokenizer, pooling and everything else but the transformer's weights and configuration; the old card."""
    ours = {(folder / module["path"]).resolve() for module in _modules(folder)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        own = name.parent == Path(inner)  # other modules of sentence-transformers keep their weights
        if not path.is_file() or name.parts[0] in EXPORTS or (own and _replaced(path.name)):
            continue
        if any(_other_model(parent, ours) for parent in path.parents[: len(name.parts) - 1]):
            continue
        new = target / (ORIGINAL_CARD if str(name) == "README.md" else name)
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, new)
    card = folder / "README.md"
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""


def _other_model(folder: Path, ours: set[Path]) -> bool:
    """Whether a folder inside a model's is a checkpoint of its training, or a model of its own."""
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
    """What a file holds; None if it is none, or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
