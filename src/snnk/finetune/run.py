"""`finetune`: from a model and labelled data to a folder with the tuned model, its metrics and its model card.

The result is written to a temporary folder and renamed at the end, so that `out` is complete or does not exist. During
a run the file `<out>.checkpoint` has its state.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from snnk import _io
from snnk._checkpoint import checkpoint_of
from snnk._environment import environment
from snnk.finetune.card import model_card
from snnk.finetune.config import FinetuneConfig
from snnk.finetune.data import Data
from snnk.finetune.inputs import PARTS, Inputs, is_images, read
from snnk.finetune.loading import FORMAT, bits, fingerprint, load_base, mark_pairs, place_from
from snnk.finetune.lower import frozen_layers, run_lower
from snnk.finetune.methods import METHODS, Method, Setup, nothing
from snnk.finetune.scores import OFFSET, best_offset
from snnk.finetune.settings import TrainingSettings
from snnk.finetune.trainer import Progress, Trained, evaluate, peak_memory, train
from snnk.finetune.trunk import run_trunk, without_trunk
from snnk.hf.classify.heads import find_classifier, fit_classifier_, wide_rows
from snnk.hf.classify.means import MEAN_TYPES, POOLED, READINGS, other_pooling, second_text
from snnk.hf.classify.poolers import HeadReport
from snnk.hf.classify.standardised import StandardisedLinear
from snnk.hf.folders import find_folder, find_transformer, makes_vectors
from snnk.hf.models import has_bfloat16, load_processor, quiet, read_config, set_padding

LARGE = 50_000  # rows from which on a data set is large, for the settings of a method
FIT_ROWS = 20_000  # most rows for a closed form
START_ROWS, PER_FEATURE = 2000, 5  # rows, or rows per feature if that is more, for a closed form that training improves
FIT_BATCH = 64
PAIRED = [name for name, reading in READINGS.items() if reading.pairs]


@dataclass(frozen=True)
class FinetuneResult:
    """The tuned model, its tokenizer or image processor, and the content of metrics.json.

    `main` is False in the processes of torchrun that write nothing.
    """

    out: Path
    model: Any  # a PreTrainedModel or a PeftModel
    processor: Any
    metrics: dict[str, Any]
    main: bool = True


@quiet()
def finetune(
    config: FinetuneConfig,
    *,
    resume: bool = False,
    method: Method | None = None,
    shared: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda step, total, loss, scores: None,
) -> FinetuneResult:
    """Fine-tune a model from a folder or from the hub, and write the result to a new folder.

    Args:
        config: the model, the data and the options.
        resume: continue from the checkpoint of a run that was stopped.
        method: a variant of METHODS[config.method] to use in its place, with the same settings.
        shared: folder in which methods that train the head alone keep the outputs of the frozen base model, and look
            for those of other runs with the same model, rows and processor of images. Default: every run computes its
            own.
        say: called with each line of text on the progress of the run.
        progress: called after each step, see `train`.

    Example:
        >>> config = FinetuneConfig("bert-base-uncased", "tuned", train="train.tsv", method="snnk")
        >>> finetune(config).metrics["scores"]["validation"]  # doctest: +SKIP
        {'accuracy': 0.91, 'macro_f1': 0.91, 'mcc': 0.82, 'loss': 0.24}
    """
    out, checkpoint = Path(config.out), checkpoint_of(config.out)
    with ExitStack() as held:
        if os.environ.get("RANK", "0") == "0":  # only one process of torchrun writes
            held.enter_context(_io.locked_output(out))
            _io.remove_leftovers(checkpoint)
        check_out(out, checkpoint, resume)  # in the lock, as the run that held it before may have written the folder
        folder = None if shared is None else Path(shared)
        return _finetune(config, out, checkpoint, resume, method, folder, say, progress)


def _finetune(
    config: FinetuneConfig,
    out: Path,
    checkpoint: Path,
    resume: bool,
    method: Method | None,
    shared: Path | None,
    say: Callable[[str], None],
    progress: Progress,
) -> FinetuneResult:
    find_transformer(find_folder(config.model))  # refuses code, links out of the folder, and an adapter
    images = is_images(config)
    processor = load_processor(config.model, images)
    inputs = read(config, processor, images)
    if inputs.columns is not None:
        say(inputs.columns)
    say(
        f"{len(inputs.train):,} rows to train on, {len(inputs.validation):,} for validation"
        + (f", {len(inputs.test):,} for the test" if inputs.test is not None else "")
        + (": regression" if inputs.labels.names is None else f": {len(inputs.labels.names)} classes")
    )
    large = len(inputs.train) >= LARGE or bool(inputs.described.get("large"))
    method, settings = method or METHODS[config.method], config.settings(images=images, large=large)
    config = replace(config, pooling=_pooling(config, method, images, pairs=inputs.described["text_pair"] is not None))
    if config.bf16 is None and not method.head_only:  # a head is too small to gain by it
        settings = replace(settings, bf16=has_bfloat16(_device()))
    features = config.num_features or method.features or 0
    storage: dict[str, Any] = {}

    def report(found: HeadReport) -> None:
        say(str(found))
        storage.update(asdict(found), mbit={name: found.mbit(n) for name, n in asdict(found).items() if name != "bits"})

    with ExitStack() as cut:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)  # transformers draws new classifiers from the global generator
            loaded, drawn = load_base(config, inputs.labels.names, images, say)
            base, weights = loaded.model, fingerprint(loaded)
            start_bits = [total for p in base.parameters() for total in bits(p)]
            if not images:
                set_padding(base, processor)
            if config.pooling in PAIRED:
                _check_second_texts(base, inputs.train, config.pooling)
            rows, validation, test = inputs.train, inputs.validation, inputs.test
            setup = Setup(
                features,
                config.seed,
                images,
                config.model,
                lambda count=FIT_ROWS: _some(rows, config.seed, count),
                config.layers,
                report,
                drawn,
            )
            trunk = None
            if method.head_only and _is_repeated(settings, len(rows)):
                nn.Module.to(base, device=_device())
                parts = [rows, validation, *([] if test is None else [test])]
                trunk = run_trunk(base, *parts, shared=shared)
                if trunk is not None:
                    say("the base model was run once over all rows")
                    rows, validation = trunk[:2]
                    test = trunk[2] if len(trunk) > 2 else None
                    cut.enter_context(without_trunk(base))
            base = method.edit(base, setup)
            start = _start(base, method, setup, config, settings, inputs.metrics[0], say)
            model: Any = method.wrap(base, setup)
            below = [] if images or method.head_only else frozen_layers(model)
            if below and _is_repeated(settings, len(rows)):
                nn.Module.to(model, device=_device())
                if (upper := run_lower(model, below, rows, validation)) is not None:
                    say(f"the first {len(below)} layers, which are not trained, were run once over all rows")
                    (rows, validation), upper_alone = upper
                    cut.enter_context(upper_alone())
                else:
                    say(f"the first {len(below)} layers are not trained, but run in every step")
        counts = {
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "total": sum(p.numel() for p in model.parameters()),
        }
        say(f"{config.method}: {counts['trained']:,} of {counts['total']:,} parameters are trained")
        found = train(
            model,
            rows,
            validation,
            settings,
            metrics=inputs.metrics,
            checkpoint=checkpoint,
            resume=resume,
            key=_key(config, method, settings, inputs, start_bits),
            progress=progress,
        )
        if not found.main:
            return FinetuneResult(out, model, processor, {}, main=False)
        if trunk is None:
            cut.close()  # the tuned model is evaluated whole
            validation = inputs.validation
        best = {k: v for k, v in found.history[found.best].items() if k not in ("epoch", "step", "train_loss")}
        scores: dict[str, Any] = {"validation": best}
        finish = None
        model = method.finish(model, setup).eval()
        if method.finish is not nothing:  # merging and bundling are exact up to rounding, which the metrics show
            scores["validation"] = evaluate(model, validation, inputs.metrics, settings.batch_size)
            finish = {"validation_before": best, "validation_after": scores["validation"]}
        elif settings.bf16:  # training evaluates in bfloat16, the test and users of the saved model in float32
            scores["validation"] = evaluate(model, validation, inputs.metrics, settings.batch_size)
        if test is not None:
            scores["test"] = evaluate(model, test, inputs.metrics, settings.batch_size)
    warned = _doubts(found, settings)
    if start.get("offset"):
        warned.append(
            f"the threshold between the classes was moved for the best {inputs.metrics[0]}: probabilities moved with "
            "it, and do not estimate frequencies"
        )
    for doubt in warned:
        say(f"warning: {doubt}")
    adapter = hasattr(model, "peft_config")
    if inputs.described["text_pair"] is not None:
        mark_pairs(model)
    metrics = {
        "format": FORMAT,
        "base_model": config.model if not Path(config.model).is_dir() else Path(config.model).resolve().name,
        "base": {"place": place_from(out, config.model), "weights": weights} if adapter else {},
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
        "warnings": warned,
        "settings": asdict(settings),
        "config": _options(config),
        "seed": config.seed,
        "versions": environment(),
    }
    _write(model, processor, metrics, config, out)
    checkpoint.unlink(missing_ok=True)
    return FinetuneResult(out, model, processor, metrics)


def _pooling(config: FinetuneConfig, method: Method, images: bool, pairs: bool) -> str:
    """The pooling that was asked for, or the default.

    The default is the method's own; for a sentence encoder, whose pooler was never trained, it is the mean, and for its
    pairs of texts comparisons of means. Where the method reads neurons and the type of the model has none to read, it
    is "layers".
    """
    found = config.pooling
    if found is None:
        found = "model" if images else method.pooling
        encoder = not images and not method.own_pooler and makes_vectors(find_folder(config.model))
        known = not images and read_config(config.model).model_type in MEAN_TYPES
        if found == "neurons" and not known:
            found = "layers"
        elif encoder and known:
            paired = {"neurons": "neuron-pairs"}.get(found, "pairs")
            found = paired if pairs else "mean" if found == "model" else found
    if found in PAIRED and not pairs:
        single = other_pooling(found, pairs=False)
        raise ValueError(
            f"pooling {found!r} compares two texts, and the rows have one: name text_pair, or use {single!r}"
        )
    return found


def _check_second_texts(model: PreTrainedModel, data: Data, pooling: str) -> None:
    """A ValueError if no second text is found in rows of pairs."""
    batch = data.batch(range(min(len(data), FIT_BATCH)))
    found, _ = second_text(model.config, batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"))
    if not found.any():
        raise ValueError(
            f"pooling {pooling!r} found no second text: all token_type_ids of the tokenizer are 0. Use pooling "
            f"{other_pooling(pooling, pairs=False)!r}"
        )


def _options(config: FinetuneConfig) -> dict[str, Any]:
    """The options of a run without the paths of its machine: files are named, as in the description of the data."""
    kept = {k: v for k, v in asdict(config).items() if k not in ("model", "out", "data_dir")}
    return kept | {part: Path(kept[part]).name for part in PARTS if kept[part] and Path(kept[part]).exists()}


def check_out(out: Path, checkpoint: Path, resume: bool) -> None:
    """Refuse a folder that cannot be written or would be overwritten, before any work."""
    if (out / "metrics.json").is_file():
        checkpoint.unlink(missing_ok=True)  # its run was killed after it wrote the folder
        _io.remove_leftovers(out)
        if resume:
            raise FileExistsError(f"{out} exists already and is complete, there is nothing to resume")
    _io.check_out(out)
    if checkpoint.exists() and not resume:
        raise FileExistsError(f"{checkpoint} belongs to a run that was stopped: continue with resume, or delete it")


def _some(data: Data, seed: int, rows: int) -> Iterator[dict[str, Tensor]]:
    """Batches of about that many training rows in random order; each is made when it is needed."""
    batches = data.epoch(FIT_BATCH, seed, -1)
    return (data.batch(indices) for indices in batches[: -(-rows // FIT_BATCH)])


def _device() -> str:
    """The kind of device that Accelerate takes for one process."""
    processor = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on")
    return "cuda" if torch.cuda.is_available() and not processor else "cpu"


def _is_repeated(settings: TrainingSettings, rows: int) -> bool:
    """Whether frozen parts of the model would return the same for all rows again: one process, no dropout, an epoch."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    long = settings.max_steps is None or settings.max_steps * settings.batch_size >= rows
    return not settings.dropout and alone and long


def _start(
    model: PreTrainedModel,
    method: Method,
    setup: Setup,
    config: FinetuneConfig,
    settings: TrainingSettings,
    metric: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Give the classifier its start; returns what metrics.json has on it.

    If nothing is trained afterwards, its threshold between two classes is the one with the best `metric` of
    leave-one-out predictions, where that may be another than the most probable class.
    """
    if config.classifier_start == "random":
        return {"kind": "random", "seconds": 0.0}
    began = time.perf_counter()
    classifier = find_classifier(model)
    rows = max(START_ROWS, PER_FEATURE * classifier.in_features)
    if isinstance(classifier, StandardisedLinear):
        rows = wide_rows(classifier.in_features)
    elif method.closed_form or settings.max_steps == 0:
        rows = FIT_ROWS
    fit = fit_classifier_(model, setup.batches(rows))
    say(f"the classifier {'has' if settings.max_steps == 0 else 'starts from'} its closed form: {fit}")
    offset = 0.0
    if settings.max_steps == 0 and metric in OFFSET and fit.left_out is not None and fit.left_out[0].shape[1] == 2:
        offset = best_offset(*fit.left_out, metric)
        with torch.no_grad():
            classifier.bias[1] += offset
        say(f"the logit of the second class is moved by {offset:.3f}, as the {metric} of left-out rows is best there")
    return {
        "offset": offset,
        "seconds": time.perf_counter() - began,
        "kind": "closed-form",
        "rows": fit.rows,
        "lam": fit.solution.lam,
        "error": fit.error,
        "loss": fit.loss,
        "accuracy": fit.accuracy,
    }


def _key(config: FinetuneConfig, method: Method, settings: TrainingSettings, inputs: Inputs, loaded: list[int]) -> str:
    """Hash of everything that the result depends on: options, weights of the model, labels and rows."""
    options = {**asdict(replace(config, out="")), "summary": method.summary, "loaded": loaded, "bf16": settings.bf16}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for data in (inputs.train, inputs.validation):
        digest.update(data.labels.numpy().tobytes())
        for row in data.row_hashes():
            digest.update(row)
    return digest.hexdigest()[:16]


def _doubts(found: Trained, settings: TrainingSettings) -> list[str]:
    """Warnings of a training that did not help, or that was cut off while it helped."""
    if not found.steps:
        return []
    if found.best == 0:
        return [
            "no epoch was better than the start on the validation rows, so that the start was kept: try another "
            f"learning rate than {settings.learning_rate:g}"
        ]
    if found.best == len(found.history) - 1:
        return ["the last epoch was the best on the validation rows: more epochs or steps may improve the model"]
    return []


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
        if metrics["adapter"] and config.pooling in POOLED:
            _name_base(temporary / "adapter_config.json", POOLED[config.pooling].__name__)
        _io.write_json(temporary / "metrics.json", metrics)
        (temporary / "README.md").write_text(model_card(metrics, original), encoding="utf-8")


def _name_base(file: Path, name: str) -> None:
    """Name the class of the base model, so that PEFT does not load the adapter onto a model without the mean."""
    found = json.loads(file.read_text(encoding="utf-8"))
    found["task_type"] = None
    found["auto_mapping"] = {"base_model_class": name, "parent_library": "snnk.finetune"}
    _io.write_json(file, found)
