"""The work of `snnk compress`: a folder with a model in, a folder with the compressed model and its report out.

Everything is written into a temporary folder beside the output and renamed at the end: a run that is killed leaves no
output, and never half of one.
"""

from __future__ import annotations

import copy
import json
import math
import os
import platform
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedModel

import snnk
from snnk import hf
from snnk.hf import report as pages
from snnk.hf.counting import stored
from snnk.hf.data import Calibration, load_calibration
from snnk.models import write_json

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".onnx", ".gguf", ".index.json")
EXPORTS = ("onnx", "openvino", "coreml", ".git", ".cache")  # folders with the original's weights in other formats
ORIGINAL_CARD = "README.original.md"
KEEP = 0.25  # where neither a share nor a target is given


@dataclass(frozen=True)
class Settings:
    """Options of the command, as report.json keeps them."""

    keep: float | None = None
    target_size: str | None = None
    target_speedup: float | None = None
    layers: str = "all"
    features: str = "atoms"
    plan: str | None = None
    joint: bool = False
    refine: int = 120
    recover: int = 0
    max_error: float | None = None
    column: str | None = None
    max_length: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        targets = {"--keep": self.keep, "--target-size": self.target_size, "--target-speedup": self.target_speedup}
        given = [name for name, value in targets.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(targets)}; got {' and '.join(given)}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"--keep must be above 0 and at most 1; got {self.keep}")
        if self.plan is not None and (given or self.joint or (self.layers, self.features) != ("all", "atoms")):
            raise ValueError(
                "--plan says what is kept: give it without --keep, --target-..., --layers, --features, --joint"
            )
        if self.joint and self.features != "atoms":
            raise ValueError(f"--joint chooses counts of atoms only; got --features {self.features}")
        for name, number in (("--target-speedup", self.target_speedup), ("--max-error", self.max_error)):
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"{name} must be a positive number; got {number}")
        self.chosen_layers()

    def chosen_layers(self) -> str | list[int]:
        if self.layers == "all" or self.layers.startswith("top-"):
            return self.layers
        if not re.fullmatch(r"\d+(,\d+)*", self.layers):
            raise ValueError(f"--layers must be all, top-6 or numbers like 0,1,2; got {self.layers!r}")
        return [int(number) for number in self.layers.split(",")]

    def make_plan(self, model: Any, batches: Any = None) -> hf.Plan:
        if self.plan is not None:
            plan = hf.Plan.load(self.plan)
            plan.check(model)
            return plan
        return hf.plan(
            model,
            KEEP if (self.keep, self.target_size, self.target_speedup) == (None, None, None) else self.keep,
            target_size=self.target_size,
            target_speedup=self.target_speedup,
            layers=self.chosen_layers(),
            features=self.features,
            batches=batches,
        )


def compress_folder(
    model: str,
    calibration: Path,
    out: Path,
    settings: Settings,
    *,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Compress a model of a folder or of the hub into the new folder `out`; returns what report.json holds."""
    check_out(out)
    if not calibration.exists():
        raise FileNotFoundError(f"no calibration file or folder {calibration}")
    transformers.utils.logging.set_verbosity_error()  # what matters is said here, in one line
    transformers.utils.logging.disable_progress_bar()
    folder = find_folder(model)
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"--out {out} is inside the model's folder {folder}; name one outside")
    inner = find_transformer(folder)
    network, processor = load(folder / inner, say)
    blocks = len(hf.find_ffns(network))
    plan = settings.make_plan(network)  # fails on what is wrong with the model or the plan, before any data are read
    length = min(settings.max_length, positions(network))
    batches = load_calibration(calibration, processor, column=settings.column, max_length=length, seed=settings.seed)
    say(f"calibration: {batches}")
    if settings.joint:
        progress("choosing counts", 0, blocks)
        plan = settings.make_plan(network, batches)
    say(str(plan))
    original = copy.deepcopy(network)
    done = hf.compress_(
        network,
        plan,
        batches,
        refine=settings.refine,
        max_error=settings.max_error,
        recover=settings.recover,
        seed=settings.seed,
        progress=progress,
    )
    say(str(done))
    progress("measuring latency", blocks, blocks)
    found = {
        "format": pages.FORMAT,
        "base_model": model if not Path(model).exists() else folder.resolve().name,
        "model_class": type(network).__name__,
        "sentence_transformers": (folder / "modules.json").is_file(),
        "blocks_in_all": blocks,
        "bytes": {"original": _bytes(original), "compressed": _bytes(network)},
        "latency": pages.latency(original, network, batches),
        "agreement": {name: value for name, value in done.agreement.items() if math.isfinite(value)},
        "calibration": _described(batches),
        "settings": asdict(settings),
        "seed": settings.seed,
        "versions": {
            "snnk": snnk.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "plan": plan.to_dict(),
        "report": {key: value for key, value in done.to_dict().items() if key != "agreement"},
    }
    _write(network, plan, found, folder, inner, out)
    return found


def check_out(out: Path) -> None:
    """Refuse an output folder that exists or cannot be made, before any work."""
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"--out {out} exists already; name a folder that does not")
    parent = next(p for p in out.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise PermissionError(f"--out {out} cannot be made: {parent} is no folder that can be written to")


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
    """Where in the folder the transformer is: at the root, or where modules.json of sentence-transformers says."""
    inner = PurePosixPath()
    modules = folder / "modules.json"
    if not (folder / "config.json").is_file() and modules.is_file():
        try:
            inner = PurePosixPath(min(json.loads(modules.read_text()), key=lambda module: module["idx"])["path"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{modules} does not say where the transformer is: {error!r}") from error
        if inner.is_absolute() or ".." in inner.parts:
            raise ValueError(f"{modules} names {inner}, outside the folder")
    if not (folder / inner / "config.json").is_file():
        raise ValueError(f"{folder / inner} is no folder with a model: there is no config.json in it")
    return inner


def load(folder: Path, say: Callable[[str], None]) -> tuple[Any, Any]:
    """The model, with the head that its configuration names, and its tokenizer or image processor."""
    try:
        config = AutoConfig.from_pretrained(folder)
        kind: Any = getattr(transformers, (config.architectures or [""])[0] or "AutoModel", AutoModel)
        if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
            kind = AutoModel
        model, info = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True)
    except Exception as error:  # the files are the user's and the loader is not ours: anything may be wrong
        raise ValueError(f"{folder} cannot be loaded: {error}") from error
    if info["missing_keys"]:
        say(f"note: the files have no {', '.join(sorted(info['missing_keys']))}; these are random")
    images = model.main_input_name == "pixel_values"
    return model.eval(), (AutoImageProcessor if images else AutoTokenizer).from_pretrained(folder)


def positions(model: Any) -> int:
    """The longest text, in tokens, that the model has positions for."""
    limit = getattr(model.config, "max_position_embeddings", None) or 2**31
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit = min(limit, module.num_embeddings - module.padding_idx - 1)  # RoBERTa counts from there
    return int(limit)


def _write(network: Any, plan: hf.Plan, found: dict[str, Any], folder: Path, inner: PurePosixPath, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir()
        card = _copy_others(folder, inner, temporary)
        network.save_pretrained(temporary / inner)
        plan.save(temporary / "plan.json")
        write_json(temporary / "report.json", found)
        (temporary / "README.md").write_text(pages.model_card(found, card), encoding="utf-8")
        (temporary / "report.html").write_text(pages.html(found), encoding="utf-8")
        check_out(out)  # it may have been made meanwhile, and an empty folder would be replaced
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_others(folder: Path, inner: PurePosixPath, target: Path) -> str:
    """Copy tokenizer, pooling and everything else but the transformer's weights and configuration; the old card."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        own = name.parent == Path(inner)  # other modules of sentence-transformers keep their weights
        if not path.is_file() or name.parts[0] in EXPORTS or (own and _replaced(path.name)):
            continue
        new = target / (ORIGINAL_CARD if str(name) == "README.md" else name)
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, new)
    card = folder / "README.md"
    return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""


def _replaced(name: str) -> bool:
    return name == "config.json" or name.endswith(WEIGHTS)


def _bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in stored(model).values())


def _described(batches: Calibration) -> dict[str, Any]:
    return {"file": batches.source, "kind": batches.kind, "count": batches.items, "column": batches.column}
