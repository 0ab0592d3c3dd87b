"""`push_to_hub`: a folder that snnk has written as a repository on the Hugging Face hub.

Nothing leaves the machine before the folder, its card and the names of its base model have been checked here. Paths of
this machine are replaced in what is uploaded: an adapter then names its base model by its name on the hub.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from snnk import _io
from snnk.hf.folders import ADAPTER, CODE, HIDDEN, refuse_unsafe, some

NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)  # of a model on the hub


def push_to_hub(
    folder: str | Path,
    name: str,
    *,
    base_model: str | None = None,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload of a model of snnk",
) -> str:
    """Upload a folder of `snnk compress`, `snnk export` or `snnk finetune` to the hub, after its card was validated.

    Args:
        folder: all its files are uploaded, except hidden files and code.
        name: of the repository, such as "my-name/my-model"; it is made if it does not exist.
        base_model: name of the base model on the hub, if snnk read it from a local folder. An adapter needs it.
            A name without a slash, such as "gpt2", is kept if the hub's cache on this machine has the model.
        private: make a new repository private.
        token: default: that of `hf auth login`.
        message: of the commit.

    Returns:
        The address of the commit.

    Example:
        >>> push_to_hub("small", "my-name/my-model-small", base_model="org/my-model")  # doctest: +SKIP
        'https://huggingface.co/my-name/my-model-small/commit/...'
    """
    folder = Path(folder)
    contents = prepare(folder, name, base_model)
    from huggingface_hub import CommitOperationAdd, HfApi, ModelCard

    parts = [CommitOperationAdd(path, str(found) if isinstance(found, Path) else found) for path, found in contents]
    api = HfApi(token=token)
    card: Any = dict(contents)["README.md"]
    try:
        ModelCard(card.decode("utf-8")).validate()
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.create_commit(name, parts, commit_message=message).commit_url)
    except Exception as error:  # network, hub and its libraries raise errors of many types
        raise ValueError(f"the hub did not take {folder} as {name}: {error}") from error


def prepare(folder: Path, name: str, base_model: str | None) -> list[tuple[str, Path | bytes]]:
    """(path in the repository, file or content) of all that is uploaded; a ValueError if the hub would refuse it."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name one that snnk has written")
    refuse_unsafe(folder, skipped=HIDDEN)  # exports are uploaded too
    for what, value in (("repository", name), ("base model", base_model)):
        try:
            if value is not None:
                validate_repo_id(value)
        except HFValidationError as error:
            raise ValueError(f"{value!r} cannot be the name of a {what} on the hub: {error}") from error
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.lower().endswith(CODE))
    names = {path: path.relative_to(folder) for path in files}
    chosen = {n.as_posix(): path for path, n in names.items() if not any(part.startswith(".") for part in n.parts)}
    if "README.md" not in chosen:
        raise ValueError(f"{folder} has no README.md, the model card that snnk writes; its files are {some(chosen)}")
    changed = dict[str, bytes]()
    if ADAPTER in chosen:
        base_model, changed[ADAPTER] = _adapter(chosen[ADAPTER], base_model)
    changed["README.md"] = _card(chosen["README.md"], base_model)
    return [(path, changed.get(path, file)) for path, file in chosen.items()]


def _card(file: Path, base_model: str | None) -> bytes:
    """The card with the base model's name on the hub, or without a name; a ValueError if it cannot be read."""
    from huggingface_hub import ModelCard

    try:
        card: Any = ModelCard(file.read_text(encoding="utf-8"))
        fields = card.data.to_dict()
    except Exception as error:  # of YAML and of the fields
        raise ValueError(f"{file} is no model card that can be read: {error}; write its front matter again") from error
    if not fields:
        raise ValueError(f"{file} has no front matter, the lines between --- at its beginning; copy the folder again")
    named = fields.get("base_model")
    if base_model is not None:
        card.data.base_model = base_model
    elif isinstance(named, str) and "/" not in named and not _is_cached(named):  # the name of a local folder
        card.data.base_model = None
    return str(card).encode()


def _is_cached(name: str) -> bool:
    """Whether a name without a slash, such as "gpt2", is that of a model which was downloaded from the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def _adapter(file: Path, base_model: str | None) -> tuple[str, bytes]:
    """The name of an adapter's base model on the hub, and the configuration of the adapter with this name."""
    config = _io.read_json(file, "the configuration of an adapter")
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if base_model is None and (not isinstance(named, str) or not NAME.fullmatch(named) or Path(named).is_dir()):
        raise ValueError(
            f"{file} has the base model {named}, a place on this machine; give its name on the hub as base_model"
        )
    name = base_model or str(named)
    return name, (json.dumps({**config, "base_model_name_or_path": name}, indent=2) + "\n").encode()
