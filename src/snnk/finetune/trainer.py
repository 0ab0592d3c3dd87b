"""The training loop, on Accelerate: one process, torchrun, bf16 and FSDP need no code of their own.

The rows of a step, its learning rate and the seed of its dropout are functions of the seed and the step's number alone.
A run that continues from a checkpoint therefore ends with the weights that it would have had without the stop, and a
global batch is the same for any number of processes. The tests run version 2 of FSDP (FSDP_VERSION=2), with one
training per process. Accelerate uses FSDP on GPUs and similar devices only, and DDP on processors.
"""

from __future__ import annotations

import copy
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnk import _checks
from snnk._checkpoint import (
    Check,
    CheckpointError,
    Parts,
    are_rows,
    check_shapes,
    is_count,
    read_checkpoint,
    write_checkpoint,
)
from snnk.finetune.data import Data
from snnk.finetune.scores import CLASSIFICATION, REGRESSION, score
from snnk.finetune.settings import OPTIMIZERS, TrainingSettings
from snnk.hf.models import fast_attention

RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # endings of buffers that training changes
SAVED: dict[str, Check] = {  # fields of Trained in a checkpoint
    "history": are_rows,
    "best": is_count,
    "steps": is_count,
    "seconds": _checks.is_number,
    "step_seconds": _checks.is_number,
    "stopped_early": lambda value: isinstance(value, bool),
}


def read_run(path: Path, key: str) -> tuple[Parts, dict[str, Any]]:
    """The tensors and facts of a training's checkpoint."""
    parts, facts = read_checkpoint(path, key, {"loss_sum": _checks.is_number, **SAVED})
    if facts["best"] >= max(len(facts["history"]), 1):
        raise CheckpointError(f"{path} is no checkpoint: its best epoch is {facts['best']}; delete it to start again")
    return parts, facts


class Diverged(ValueError):
    """The loss or the outputs of a model are no longer finite."""


@dataclass
class Trained:
    """The course of a training: one row of scores per epoch, the first before any step, and the index of the best."""

    history: list[dict[str, float]] = field(default_factory=list)
    best: int = 0
    steps: int = 0
    total_steps: int = 0
    seconds: float = 0.0  # including evaluations
    step_seconds: float = 0.0  # without evaluations
    stopped_early: bool = False
    main: bool = True  # whether this process is the one that writes
    processes: int = 1
    distributed: str = "NO"  # Accelerate's name: MULTI_CPU, MULTI_GPU, FSDP, ...


Progress = Callable[[int, int, float, dict[str, float]], None]


def train(
    model: Any,
    data: Data,
    validation: Data | None = None,
    settings: TrainingSettings | None = None,
    *,
    metrics: Sequence[str] | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    key: str = "",
    progress: Progress = lambda step, total, loss, scores: None,
) -> Trained:
    """Train the parameters that require gradients, in place; the weights of the best epoch stay.

    Args:
        model: returns `logits`, (batch, classes) or (batch, 1), for the batches of `data`.
        data, validation: tokenised rows with labels. Without validation the last weights stay.
        settings: rates, schedule and length of the training.
        metrics: names in METRICS. The first chooses the best epoch; of equal epochs, the one with the lower loss.
        checkpoint: file that is written after each epoch and when the run is interrupted, but not under FSDP. The
            caller deletes it.
        resume: continue from the checkpoint, if there is one.
        key: identifies the run; a checkpoint with another key is refused.
        progress: called with step, total number of steps, loss, and the last scores.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = BertForSequenceClassification(BertConfig(**sizes, num_labels=2))
        >>> rows, labels = [[1, 2, 3], [4, 5, 6]] * 8, torch.tensor([0, 1] * 8)
        >>> data = Data(rows, labels, lambda part: {"input_ids": torch.tensor(part)}, [3] * 16)
        >>> done = train(model, data, data, TrainingSettings(epochs=2, batch_size=8))
        >>> done.steps, len(done.history)
        (4, 3)
    """
    settings = settings or TrainingSettings()
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires gradients; there is nothing to train")
    if not len(data):
        raise ValueError("there are no rows to train on")
    metrics = metrics or (REGRESSION if data.labels.is_floating_point() else CLASSIFICATION)
    accelerator = make_accelerator(settings.bf16)
    distributed = str(accelerator.distributed_type.value)
    sharded = distributed == "FSDP"
    if sharded:
        _tell_no_checkpoint(checkpoint, resume, accelerator.is_main_process)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # it would include an earlier run
    plain = copy.deepcopy(model) if sharded else model
    fast = settings.bf16 and accelerator.device.type == "cpu"
    with _seeded(settings.seed), fast_attention(model, fast):
        run = _Run(accelerator, model, data, validation, settings, metrics, None if sharded else checkpoint, key)
        try:
            if resume:
                run.restore()
            run.go(progress)
        finally:
            accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
            vars(model).pop("_is_accelerate_prepared", None)  # otherwise another training would be in float32
            model.eval()
    if sharded:
        state = accelerator.get_state_dict(run.model)
        if accelerator.is_main_process:
            plain.load_state_dict({name: tensor.cpu() for name, tensor in state.items()})
            model.__dict__.update(plain.__dict__)  # the caller's object with whole tensors
            model.__class__ = plain.__class__  # FSDP2 had replaced it
    run.done.main, run.done.processes = accelerator.is_main_process, accelerator.num_processes
    run.done.distributed = distributed
    accelerator.wait_for_everyone()
    return run.done


class _Run:
    """One training, with the state that a checkpoint stores."""

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        data: Data,
        validation: Data | None,
        settings: TrainingSettings,
        metrics: Sequence[str],
        checkpoint: Path | None,
        key: str,
    ) -> None:
        self.accelerator, self.data, self.validation, self.settings = accelerator, data, validation, settings
        self.metrics, self.checkpoint, self.key = metrics, checkpoint, key
        trained = [p for p in model.parameters() if p.requires_grad]
        options = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        make = getattr(torch.optim, OPTIMIZERS[settings.optimizer])
        self.model, self.optimizer = accelerator.prepare(model, make(trained, **options))
        named = accelerator.unwrap_model(self.model)
        self.trained = {name: p for name, p in named.named_parameters() if p.requires_grad}
        running = {name: b for name, b in named.named_buffers() if name.endswith(RUNNING)}
        self.kept: dict[str, Tensor] = {**self.trained, **running}  # what training changes
        self.best = self.snapshot()
        per_epoch = math.ceil(len(data) / settings.batch_size)
        steps = settings.max_steps
        self.per_epoch, self.total = per_epoch, settings.epochs * per_epoch if steps is None else steps
        self.done = Trained(total_steps=self.total)
        self.loss_sum = 0.0  # in the present epoch
        # squared errors are divided by the variance of the labels, so that their unit does not matter
        self.scale = 1 / max(float(data.labels.var()), 1e-30) if data.labels.is_floating_point() else 1.0

    def snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.kept.items()}

    @torch.no_grad()
    def put(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in self.kept.items():
            tensor.copy_(tensors[name])

    def go(self, progress: Progress) -> None:
        done, began = self.done, time.perf_counter() - self.done.seconds
        if not done.history:
            self.evaluate(float("nan"))
        with _interruptions(self.accelerator.num_processes == 1) as stop:
            while done.steps < self.total and not done.stopped_early:
                epoch, first = divmod(done.steps, self.per_epoch)
                batches = self.data.epoch(self.settings.batch_size, self.settings.seed, epoch)
                if first == 0:
                    self.loss_sum = 0.0
                self.training_mode()
                for indices in batches[first : first + self.total - done.steps]:
                    before = time.perf_counter()
                    loss = self.step(indices)
                    done.step_seconds += time.perf_counter() - before
                    progress(done.steps, self.total, loss, done.history[-1])
                    # a stop at the last step of an epoch waits for the evaluation, which a resumed run would skip
                    if stop and done.steps % self.per_epoch and done.steps < self.total:
                        done.seconds = time.perf_counter() - began
                        self.save()
                        raise KeyboardInterrupt
                seen = torch.tensor([self.loss_sum], device=self.accelerator.device)
                count = min(len(self.data), (done.steps - epoch * self.per_epoch) * self.settings.batch_size)
                self.evaluate(float(self.accelerator.reduce(seen, "sum")) / count)
                done.seconds = time.perf_counter() - began
                self.save()
                if stop:
                    raise KeyboardInterrupt
        self.put(self.best if self.validation is not None else self.snapshot())

    def training_mode(self) -> None:
        self.model.train()
        if not self.settings.dropout:
            base_of(self.accelerator.unwrap_model(self.model)).eval()

    def step(self, indices: Sequence[int]) -> float:
        """One step on a global batch, of which this process takes its share of the rows."""
        settings, accelerator, done = self.settings, self.accelerator, self.done
        world, rank = accelerator.num_processes, accelerator.process_index
        torch.manual_seed(_mixed(settings.seed, done.steps, rank))
        mine, weight = list(indices[rank::world]), world / len(indices)
        if not mine:  # fewer rows than processes, all of which must take part
            mine, weight = list(indices[:1]), 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate(done.steps, self.total)
        batch = {k: v.to(accelerator.device) for k, v in self.data.batch(mine).items()}
        labels = batch.pop("labels")
        logits = self.model(**batch).logits.float()
        loss = self.scale * _loss(logits, labels)
        accelerator.backward(loss * weight)  # gradients are averaged over processes, to the mean over the batch
        if settings.clip is not None:
            accelerator.clip_grad_norm_(self.trained.values(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Diverged(
                f"the loss is {value} at step {done.steps}; try a lower learning rate than {settings.learning_rate:g}"
            )
        self.loss_sum += value if weight else 0.0
        done.steps += 1
        return value / len(mine)

    def evaluate(self, train_loss: float) -> None:
        """Add a row to the history, keep the weights if they are the best, and decide whether to stop."""
        done = self.done
        row = {"epoch": done.steps / self.per_epoch, "step": done.steps, "train_loss": train_loss}
        if self.validation is None:
            done.history.append(row)
            done.best = len(done.history) - 1
            return
        found = evaluate(self.model, self.validation, self.metrics, self.settings.batch_size, self.accelerator)
        done.history.append({**row, **found})
        if len(done.history) == 1 or self.rank(done.history[-1]) > self.rank(done.history[done.best]):
            done.best, self.best = len(done.history) - 1, self.snapshot()
        patience = self.settings.patience
        done.stopped_early = patience is not None and len(done.history) - 1 - done.best >= patience

    def rank(self, row: dict[str, float]) -> tuple[float, float]:
        return row[self.metrics[0]], -row["loss"]

    def save(self) -> None:
        """Write the checkpoint, if there is a file for it."""
        if self.checkpoint is None or not self.accelerator.is_main_process:
            return
        names = {id(p): name for name, p in self.trained.items()}
        parts: Parts = {"now": self.snapshot(), "best": self.best}
        for p, state in self.optimizer.state.items():
            for part, tensor in state.items():
                parts.setdefault(part, {})[names[id(p)]] = tensor.clone()
        facts = {"key": self.key, "loss_sum": self.loss_sum, **{name: getattr(self.done, name) for name in SAVED}}
        write_checkpoint(self.checkpoint, parts, facts)

    def restore(self) -> None:
        """Continue from the checkpoint; one that does not fit changes nothing."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        parts, facts = read_run(self.checkpoint, self.key)
        check_shapes(self.checkpoint, parts, self.kept, self.trained)
        self.put(parts.pop("now"))
        best = parts.pop("best")
        self.best = {name: best[name].to(tensor.device) for name, tensor in self.kept.items()}
        for name, p in self.trained.items():
            state = {part: found[name] for part, found in parts.items() if name in found}
            self.optimizer.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in state.items()}
        self.loss_sum = facts["loss_sum"] if self.accelerator.is_main_process else 0.0  # it is summed over processes
        for name in SAVED:
            setattr(self.done, name, facts[name])


@torch.no_grad()
def evaluate(
    model: Any, data: Data, metrics: Sequence[str], batch_size: int = 64, accelerator: Any = None
) -> dict[str, float]:
    """The scores of a model on data; with an accelerator, its processes share the work."""
    model.eval()
    batches = data.batches(batch_size)
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    device = next(model.parameters()).device
    mine = [i % len(batches) for i in range(rank, world * math.ceil(len(batches) / world), world)]
    found: list[Any] = []
    for i in mine:  # FSDP needs the same number in each process
        batch = {k: v.to(device) for k, v in data.batch(batches[i]).items() if k != "labels"}
        found.append((i, model(**batch).logits.float().cpu()))
    if world > 1:
        from accelerate.utils import gather_object

        found = gather_object(found)
    logits = torch.empty(len(data), found[0][1].shape[-1])
    for i, part in found:
        logits[batches[i]] = part
    if not logits.isfinite().all():
        raise Diverged("the outputs of the model are not finite; try a lower learning rate, or no bf16")
    return score(logits, data.labels, metrics)


def base_of(model: Any) -> Any:
    """The part of a classifier in front of its head, with its adapters, if any."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(whole, "base_model", whole)


def make_accelerator(bf16: bool) -> Any:
    """An Accelerator for the environment: accelerate launch, torchrun, or one process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # it would keep the precision of an earlier training
    return Accelerator(mixed_precision="bf16" if bf16 else None)


def peak_memory() -> int:
    """Peak memory in bytes: on a CUDA device since training began, else the resident memory since the process began.

    The latter includes imports, reading the data and whatever ran before; it is 0 on systems without `resource`.
    """
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource
    except ImportError:  # it exists on Unix only
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def _tell_no_checkpoint(checkpoint: Path | None, resume: bool, main: bool) -> None:
    """Refuse or warn: under FSDP no process has all weights, and no checkpoint is written."""
    if resume:
        raise ValueError(
            "resume does not work under FSDP, which writes no checkpoint: start again, or use plain torchrun"
        )
    if checkpoint is not None and main:
        warnings.warn("no checkpoint is written under FSDP: a run that is stopped cannot be resumed", stacklevel=3)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss, summed over rows."""
    if labels.is_floating_point():
        return F.mse_loss(logits.squeeze(-1), labels, reduction="sum")
    return F.cross_entropy(logits, labels, reduction="sum")


def _mixed(seed: int, step: int, rank: int) -> int:
    return (seed * 1_000_003 + step) * 4099 + rank & 0x7FFF_FFFF_FFFF_FFFF


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generator, which dropout uses, and restore it afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def _interruptions(enabled: bool) -> Iterator[list[int]]:
    """A list that the first SIGINT or SIGTERM is appended to; the second signal ends the process as usual."""
    seen: list[int] = []
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield seen
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)

    for number in signals:
        signal.signal(number, note)
    try:
        yield seen
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
