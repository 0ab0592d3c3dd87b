"""`finetune`: a model and a file of labelled data in, a folder with the tuned model, its figures and its card out.

The output is written into a temporary folder beside it and renamed at the end, so that it is whole or not there. While
a run lasts, its checkpoint is the file `<out>.checkpoint` beside it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from snnk import _io, hf
from snnk._environment import environment
from snnk.finetune.card import model_card
from snnk.finetune.config import POOLING, FinetuneConfig
from snnk.finetune.data import Data, Labels
from snnk.finetune.inputs import Inputs, is_images, read
from snnk.finetune.methods import METHODS, Method, Setup, nothing
from snnk.finetune.pooling import MeanPooled
from snnk.finetune.trainer import Progress, Trained, evaluate, peak_memory, train
from snnk.hf.data import pad_id
from snnk.hf.folders import find_folder, find_transformer, refuse_unsafe, some
from snnk.hf.models import POSITIONS_FROM_PADDING, Loaded, load_model, load_processor, quiet, refuse_nan

FORMAT = "snnk.Finetune/1"
LARGE = 50_000  # rows from which the paper's settings for large data sets hold
FIT_ROWS = 20_000  # for a closed form, at most
START_ROWS, PER_FEATURE = 2000, 5  # the larger of these for one that is only where training starts
FIT_BATCH = 64


@dataclass(frozen=True)
class FinetuneResult:
    """The tuned model, its tokenizer or image processor, and what metrics.json holds."""

    out: Path
    model: Any
    processor: Any
    metrics: dict[str, Any]
    main: bool = True


@quiet()
def finetune(
    config: FinetuneConfig,
    *,
    resume: bool = False,
    method: Method | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda step, total, loss, scores: None,
) -> FinetuneResult:
    """Fine-tune a model of a folder or of the hub, and write the result into a new folder.

    Args:
        config: the model, the data and the options.
        resume: continue from the checkpoint of a run that was stopped.
        method: used instead of METHODS[config.method], which still gives the settings: a variant of it.
        say: called with lines of text on what happens.
        progress: see `train`.
    """
    out = Path(config.out)
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    check_out(out, checkpoint, resume)
    with ExitStack() as held:
        if os.environ.get("RANK", "0") == "0":  # of a torchrun cluster, only one writes
            held.enter_context(_io.locked_output(out))
            _io.remove_leftovers(checkpoint)
            check_out(out, checkpoint, resume)  # a run that held the lock may have made it
        return _finetune(config, out, checkpoint, resume, method, say, progress)


def _finetune(
    config: FinetuneConfig,
    out: Path,
    checkpoint: Path,
    resume: bool,
    method: Method | None,
    say: Callable[[str], None],
    progress: Progress,
) -> FinetuneResult:
    find_transformer(find_folder(config.model))  # refuses code, links out of the folder, and an adapter
    images = is_images(config)
    processor = load_processor(config.model, images)
    inputs = read(config, processor, images)
    say(
        f"{len(inputs.train):,} rows to train on, {len(inputs.validation):,} for validation"
        + (f", {len(inputs.test):,} for the test" if inputs.test is not None else "")
        + (": regression" if inputs.labels.names is None else f": {len(inputs.labels.names)} classes")
    )
    large = len(inputs.train) >= LARGE or bool(inputs.described.get("large"))
    method, settings = method or METHODS[config.method], config.settings(images=images, large=large)
    features = config.features or method.features or 0
    storage: dict[str, Any] = {}

    def report(found: hf.HeadReport) -> None:
        say(str(found))
        storage.update(asdict(found), mbit={name: found.mbit(n) for name, n in asdict(found).items() if name != "bits"})

    with torch.random.fork_rng():
        torch.manual_seed(config.seed)  # of new classifiers, which transformers draws from the global generator
        model, drawn = _load(config, inputs.labels, images, say)
        loaded = _bits(model)
        if not images:
            _tell_padding(model, processor)
        setup = Setup(
            features,
            config.seed,
            images,
            config.model,
            lambda rows=FIT_ROWS: _some(inputs.train, config.seed, rows),
            config.layers,
            report,
            drawn,
        )
        model.eval()
        model = method.edit(model, setup)
        start = _start(model, method, setup, config, say)
        model = method.wrap(model, setup)
    counts = {
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "total": sum(p.numel() for p in model.parameters()),
    }
    say(f"{config.method}: {counts['trained']:,} of {counts['total']:,} parameters are trained")
    found = train(
        model,
        inputs.train,
        inputs.validation,
        settings,
        metrics=inputs.metrics,
        checkpoint=checkpoint,
        resume=resume,
        key=_key(config, method, inputs, loaded),
        progress=progress,
    )
    if not found.main:
        return FinetuneResult(out, model, processor, {}, main=False)
    best = {k: v for k, v in found.history[found.best].items() if k not in ("epoch", "step", "train_loss")}
    scores: dict[str, Any] = {"validation": best}
    finish = None
    model = method.finish(model, setup).eval()
    if method.finish is not nothing:  # merging and bundling are exact but for rounding: let readers see it
        scores["validation"] = evaluate(model, inputs.validation, inputs.metrics, settings.batch_size)
        finish = {"validation_before": best, "validation_after": scores["validation"]}
    elif config.bf16:  # training measures in bfloat16; the test, and users of what is saved, in float32
        scores["validation"] = evaluate(model, inputs.validation, inputs.metrics, settings.batch_size)
    if inputs.test is not None:
        scores["test"] = evaluate(model, inputs.test, inputs.metrics, settings.batch_size)
    adapter = hasattr(model, "peft_config")
    metrics = {
        "format": FORMAT,
        "base_model": config.model if not Path(config.model).is_dir() else Path(config.model).resolve().name,
        "adapter": adapter,
        "images": images,
        "method": config.method,
        "summary": method.summary,
        "features": features or None,
        "labels": None if inputs.labels.names is None else list(inputs.labels.names),
        "data": inputs.described,
        "metric": inputs.metrics[0],
        "scores": scores,
        "finish": finish,
        "parameters": {**counts, "saved_total": sum(p.numel() for p in model.parameters())},
        "head_storage": storage or None,
        "classifier_start": start,
        "training": _training(found),
        "settings": asdict(settings),
        "config": {k: v for k, v in asdict(config).items() if k not in ("model", "out", "data_dir")},
        "seed": config.seed,
        "versions": environment(),
    }
    _write(model, processor, metrics, config, out)
    checkpoint.unlink(missing_ok=True)
    return FinetuneResult(out, model, processor, metrics)


def load(folder: str | Path) -> tuple[Any, Any]:
    """The model that `finetune` wrote, in eval mode and with the names of its classes, and its tokenizer or processor.

    Args:
        folder: that was the run's `out`.
    """
    folder = Path(folder)
    if folder.is_dir():
        refuse_unsafe(folder)
    facts = _facts(folder)
    adapter, images, mean = facts["adapter"], facts["images"], facts["config"]["pooling"] == "mean"
    kind, source = _kind(images, mean), str(folder)
    if adapter:
        source = _base_of(folder)
        try:
            find_folder(source)
        except ValueError as error:
            raise ValueError(f"the base model of {folder / 'adapter_config.json'}: {error}") from error
    processor = load_processor(folder, images)
    loaded = load_model(source, kind, new_head=adapter, dtype=torch.float32, **_label_options(facts["labels"]))
    model = loaded.model
    if not images:
        _tell_padding(model, processor)  # an adapter's base model has its own configuration
    if adapter:
        model = _with_adapter(loaded, folder, source)
    refuse_nan(model, folder)
    return model.eval(), processor


def _facts(folder: Path) -> dict[str, Any]:
    """What `load` needs of metrics.json."""
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
    return facts


def _base_of(folder: Path) -> str:
    """The base model of an adapter, whose configuration may have no pattern that is slow to match."""
    file = folder / "adapter_config.json"
    found = _io.read_json(file, "the configuration of an adapter")
    source = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    if not isinstance(source, str):
        raise ValueError(f"{file} does not name its base model: base_model_name_or_path is {source!r}")
    importlib.import_module("snnk.peft")  # makes its adapters known to PEFT
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
    other = {key for key in loaded.mismatched if model.state_dict()[key].numel()}  # not that of the mean
    drawn = {f"base_model.model.{key}" for key in {*loaded.missing, *other}}
    _lacks(drawn, found, file, source)  # PEFT ends with a bare name otherwise
    try:
        model = PeftModel.from_pretrained(model, folder)
        wanted = {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(model).items()}
    except Exception as error:
        raise ValueError(f"the adapter in {folder} cannot be loaded: {error}") from error
    _lacks(wanted, found, file, source)
    others = sorted(name for name, shape in found.items() if wanted.get(name) != shape)
    if others:
        raise ValueError(f"{file} has {some(others)} with other shapes than, or without a place in, {source}")
    return model


def _lacks(wanted: Iterable[str], found: Iterable[str], file: Path, source: str) -> None:
    lacking = sorted(set(wanted) - set(found))
    if lacking:
        raise ValueError(f"{file} lacks {some(lacking)}: it is damaged or not of {source}; copy the folder again")


def check_out(out: Path, checkpoint: Path, resume: bool) -> None:
    """Refuse what cannot be written, or would overwrite something, before any work."""
    if out.exists() or out.is_symlink():
        done = ""
        if (out / "metrics.json").is_file():
            done = " and is complete, there is nothing to resume" if resume else ""
            checkpoint.unlink(missing_ok=True)  # of the run that made it, and was killed before it did this
        _io.remove_leftovers(out)
        raise FileExistsError(f"{out} exists already{done}; name a folder that does not")
    if checkpoint.exists() and not resume:
        raise FileExistsError(f"{checkpoint} is of a run that was stopped: go on with resume, or delete it")
    _io.check_out(out)


def _kind(images: bool, mean: bool) -> Any:
    if images and mean:
        raise ValueError("pooling 'mean' is for texts; for images use 'model'")
    return AutoModelForImageClassification if images else MeanPooled if mean else AutoModelForSequenceClassification


def _label_options(names: Sequence[str] | None) -> dict[str, Any]:
    if names is None:
        return {"num_labels": 1, "problem_type": "regression"}
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": "single_label_classification",
    }


def _load(
    config: FinetuneConfig, labels: Labels, images: bool, say: Callable[[str], None]
) -> tuple[Any, tuple[str, ...]]:
    """The model, and the modules inside its base model that its files do not have, drawn at random."""
    kind = _kind(images, config.pooling == "mean")
    loaded = load_model(config.model, kind, new_head=True, dtype=torch.float32, **_label_options(labels.names))
    model = loaded.model
    if Path(config.model).is_dir():
        model.name_or_path = str(Path(config.model).resolve())  # an adapter is loaded from anywhere
    if model.config.model_type == "xlnet":
        raise ValueError(
            f"{config.model} is an XLNet, which classifies by the last position of a row, padding or not: "
            "use a model of another type"
        )
    drawn_keys = loaded.missing | loaded.mismatched
    inside = sorted(key for key in drawn_keys if key.startswith(f"{model.base_model_prefix}."))
    if inside and config.pooling == "model":
        say(f"note: the files have no {', '.join(inside)}; these are random. --pooling mean does without a pooler")
    drawn = dict.fromkeys(key.rpartition(".")[0] for key in inside if config.pooling == "model")
    return model, tuple(name for name in drawn if "." in name)


def _tell_padding(model: Any, processor: Any) -> None:
    """Tell a model how its batches are filled: a decoder reads the last token that is not padding."""
    config = model.config.get_text_config()
    if config.model_type not in POSITIONS_FROM_PADDING:  # these count their positions from it, as they were pretrained
        config.pad_token_id = pad_id(processor)


def _some(data: Data, seed: int, rows: int) -> Iterator[dict[str, Any]]:
    """Batches of training rows, in random order, of about so many rows; each is made when it is asked for."""
    batches = data.epoch(FIT_BATCH, seed, -1)
    return (data.batch(indices) for indices in batches[: -(-rows // FIT_BATCH)])


def _start(model: Any, method: Method, setup: Setup, config: FinetuneConfig, say: Callable[[str], None]) -> Any:
    if config.classifier_start == "random":
        return {"kind": "random"}
    rows = max(START_ROWS, PER_FEATURE * getattr(model.config, "hidden_size", 0))
    fit = hf.fit_classifier_(model, setup.batches(FIT_ROWS if method.closed_form or config.max_steps == 0 else rows))
    say(f"classifier started from its closed form: {fit}")
    return {
        "kind": "closed-form",
        "rows": fit.rows,
        "lam": fit.solution.lam,
        "error": fit.error,
        "loss": fit.loss,
        "accuracy": fit.accuracy,
    }


def _bits(model: Any) -> list[int]:
    """Two sums per parameter over its bits as integers, which are the same in whatever order they are added."""
    bits = (p.detach().flatten().view(torch.int32).long() for p in model.parameters())
    return [int(total) for part in bits for total in (part.sum(), part.square().sum())]


def _key(config: FinetuneConfig, method: Method, inputs: Inputs, loaded: list[int]) -> str:
    """Hash of all that decides the weights: options, the model's own weights, labels and rows (tokens or images)."""
    told = {**asdict(replace(config, out="")), "summary": method.summary, "loaded": loaded}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for data in (inputs.train, inputs.validation):
        digest.update(data.labels.numpy().tobytes())
        for row in data.rows:
            digest.update(hashlib.sha256(row.read_bytes()).digest() if isinstance(row, Path) else repr(row).encode())
    return digest.hexdigest()[:16]


def _training(found: Trained) -> dict[str, Any]:
    history = [{k: v if v == v else None for k, v in row.items()} for row in found.history]
    return {
        "epochs": history,
        "best": found.best,
        "steps": found.steps,
        "planned_steps": found.total_steps,
        "stopped_early": found.stopped_early,
        "seconds": found.seconds,  # with evaluations
        "step_seconds": found.step_seconds,
        "peak_memory_bytes": peak_memory(),
        "peak_memory_of": "training, on the device" if torch.cuda.is_available() else "the process since its start",
        "processes": found.processes,
        "distributed": found.distributed,
        "threads": torch.get_num_threads(),
    }


def _write(model: Any, processor: Any, metrics: dict[str, Any], config: FinetuneConfig, out: Path) -> None:
    card = Path(config.model) / "README.md"
    original = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    with _io.new_folder(out) as temporary:
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)
        if metrics["adapter"] and config.pooling == "mean":
            _name_base(temporary / "adapter_config.json")
        _io.write_json(temporary / "metrics.json", metrics)
        (temporary / "README.md").write_text(model_card(metrics, original), encoding="utf-8")


def _name_base(file: Path) -> None:
    """PEFT is to refuse to load the adapter onto a model without the mean, which it does for a class of others."""
    found = json.loads(file.read_text(encoding="utf-8"))
    found["task_type"] = None
    found["auto_mapping"] = {"base_model_class": MeanPooled.__name__, "parent_library": "snnk.finetune"}
    _io.write_json(file, found)
