r"""Distillation after compression: gradient steps of everything that was replaced towards the original's outputs.

A stage is a number of steps of Adam whose rates fall linearly to 0. Half-way through a stage the outputs are further
from the original's than before it, and only its end counts: lengths are compared at ends of stages, on inputs that no
step sees. stages.py chooses the lengths. The state of the best end is kept, or the model as it was if no end is
better.

Encoders are trained in float32: on MiniLM, products in bfloat16 gave the same curve and took a quarter more time.
Decoders use bfloat16 products where the processor has instructions for them (distance.py), so that their weights after
distillation depend on the processor.

All that a step depends on follows from its number, the seed and the state of Adam. A run of a fixed number of steps
that continues from its checkpoint therefore ends with the weights, bit for bit, that it would have had without the
stop. With "auto", the number of stages also depends on the time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
from snnk.hf.compression import stages
from snnk.hf.compression.causal import is_causal
from snnk.hf.compression.distance import Targets, distance, in_bfloat16, read_fast
from snnk.hf.compression.outputs import probe
from snnk.hf.compression.stages import Recovery
from snnk.hf.models import Batch, fast_attention, in_float32
from snnk.ridge.atoms import advance_, relative_adam

AUTO = "auto"
RATE, CAUSAL_RATE, WARM_UP = 0.008, 0.002, 10  # SmolLM2-135M gets worse at 0.01
EVERY = 64  # steps between two points of the curve
SAVE_SECONDS = 60.0  # between two checkpoints at most
KEPT_BYTES = 2**29  # of the original's outputs, which are computed once if they fit, and otherwise again and again


class Progress(Protocol):
    """Called with a step of the work, how much of it is done, how much there is, and a note for people."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None: ...


def unseen(what: str, done: int, total: int, note: str = "") -> None:
    """Progress that nobody looks at."""


class HasModules(Protocol):
    """What replaced a block."""

    @property
    def modules(self) -> Iterable[nn.Module]: ...


def recover_(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    replaced: Iterable[nn.Module | HasModules],
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    *,
    steps: int | str = AUTO,
    minutes: float = 5.0,
    seed: int = 0,
    checkpoint: Path | None = None,
    key: str = "",
    progress: Progress = unseen,
) -> Recovery:
    """Train what replaced the blocks, in place, to return the teacher's outputs; nothing else changes.

    A ValueError leaves the model as it was before.

    Args:
        model: in eval mode, with the new modules.
        teacher: the original.
        replaced: new modules, or objects with a list of `modules`.
        batches: inputs to train on, each of inputs of like length. A step takes one batch.
        held_out: inputs to choose the length by. No step sees them, and they should not be those of the fit.
        steps: of one stage, or "auto" for as many stages as help and fit into the `minutes`.
        seed: of the order of the batches, which is another one in every pass over them.
        checkpoint: file for the state, from which a stopped run with the same `key` goes on.
        progress: called with the stage, its steps done, all its steps, and the distances.
    """
    modules = [m for new in replaced for m in ([new] if isinstance(new, nn.Module) else new.modules)]
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    before = [p.detach().clone() for p in parameters]
    teacher.eval()
    try:
        with _training(model, parameters), in_float32(model), fast_attention(model, in_bfloat16(model)):
            run = _Run(model, teacher, parameters, batches, held_out, seed, checkpoint, key, progress)
            auto = stages.doubling(60 * minutes, stages.PASSES * len(batches))
            done = run.run(auto if steps == AUTO else stages.fixed(int(steps)))
        probe(model, batches[0])  # in its own dtype again
    except ValueError as error:
        for p, value in zip(parameters, before, strict=True):
            p.data.copy_(value)
        if isinstance(error, CheckpointError):
            raise
        raise ValueError(f"recovery failed, and the model is as it was before: {error}") from error
    return done


class _Run:
    """One distillation, with the state that a checkpoint stores."""

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel,
        parameters: list[nn.Parameter],
        batches: Sequence[Batch],
        held_out: Sequence[Batch],
        seed: int,
        checkpoint: Path | None,
        key: str,
        progress: Progress,
    ) -> None:
        self.model, self.batches, self.held_out = model, batches, held_out
        self.parameters = {str(i): p for i, p in enumerate(parameters)}
        self.seed, self.checkpoint, self.key, self.progress = seed, checkpoint, key, progress
        self.targets, self.held_targets = (Targets(teacher, part, KEPT_BYTES // 2) for part in (batches, held_out))
        self.stages: list[int] = []  # lengths of those that are complete
        self.length = self.at = 0  # of the present stage, and steps taken in it
        self.losses: list[float] = []  # since the last point of the curve
        self.curve: list[dict[str, float]] = []
        self.best, self.kept = self.snapshot(), 0  # state and step of the best end so far, from which each stage starts
        self.gain = 0.0  # of the last stage
        self.stopped = ""
        self.began, self.before, self.saved = time.monotonic(), 0.0, time.monotonic()

    @property
    def steps(self) -> int:
        return sum(self.stages)

    @property
    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    def run(self, next_stage: stages.NextStage) -> Recovery:
        if not self.restore():
            self.point()
        while not self.stopped:
            if not self.length:
                self.length, self.stopped = next_stage(self)
                self.begin()
            if self.length:
                self.stage()
        self.save()
        return Recovery(
            stages=tuple(self.stages),
            kept=self.kept,
            curve=tuple(self.curve),
            stopped=self.stopped,
            batches=len(self.batches),
            held_out_batches=len(self.held_out),
            seconds=self.seconds,
        )

    def begin(self) -> None:
        """Make Adam for a stage; its rates follow from the parameters at the start of the stage."""
        parameters = self.parameters.values()
        rate = CAUSAL_RATE if is_causal(self.model) else RATE
        self.adam, self.schedule = relative_adam(parameters, rate=rate, steps=max(self.length, 1), warm_up=WARM_UP)

    def stage(self) -> None:
        """Take the steps of the present stage that are left; its end is kept if it is the best so far."""
        every = max(1, min(EVERY, self.length // 4))
        while self.at < self.length:
            self.step()
            self.at += 1
            self.progress(f"distilling, stage {len(self.stages) + 1}", self.at, self.length, self.note)
            if self.at % every == 0 or self.at == self.length:
                self.point()
                self.save()
            elif time.monotonic() - self.saved > SAVE_SECONDS:
                self.save()
        old, new = self.distance_at(self.kept), self.curve[-1]["held_out"]
        self.stages.append(self.length)
        self.length = self.at = 0
        self.gain = 1 - new / max(old, 1e-30)
        if new < old:
            self.best, self.kept = self.snapshot(), self.steps
        else:
            self.put(self.best)

    def step(self) -> None:
        done = self.steps + self.at
        turn, place = divmod(done, len(self.batches))  # in each pass over the batches another order
        order = random.Random(f"{self.seed} {turn}").sample(range(len(self.batches)), len(self.batches))
        loss = self.loss(order[place])
        if loss is not None:
            if not bool(loss.isfinite()):
                at = f"the distance is {float(loss.detach())} at step {done + 1}"
                raise ValueError(f"outputs are not finite: {at}")
            loss.backward()
            self.losses.append(float(loss.detach()))
        self.adam.step()  # without gradients nothing moves, and the rate goes on as the schedule has it
        self.adam.zero_grad()
        self.schedule.step()

    def loss(self, i: int) -> Tensor | None:
        """The distance on a batch, with gradients; None if it is nothing but padding."""
        wanted = self.targets[i]
        with torch.enable_grad():
            return distance(read_fast(self.model, self.batches[i]), wanted) if len(wanted) else None

    def time_of_a_step(self) -> float:
        """Seconds for the gradients of one batch, in the mean over some; nothing moves."""
        some = range(0, len(self.batches), max(1, len(self.batches) // 4))[:4]
        began = time.monotonic()
        for i in some:
            if (loss := self.loss(i)) is not None:
                loss.backward()
        for p in self.parameters.values():
            p.grad = None
        return (time.monotonic() - began) / len(some)

    @torch.no_grad()
    def point(self) -> None:
        """Add a point to the curve."""
        total, count = 0.0, 0
        for i, batch in enumerate(self.held_out):
            wanted = self.held_targets[i]
            if len(wanted):
                total += len(wanted) * float(distance(read_fast(self.model, batch), wanted))
                count += len(wanted)
        held, step = total / max(count, 1), self.steps + self.at
        if not math.isfinite(held):
            raise ValueError(f"outputs are not finite: the distance on held-out inputs is {held} after step {step}")
        training = {"training": sum(self.losses) / len(self.losses)} if self.losses else {}
        self.curve.append({"step": step, **training, "held_out": held})
        self.losses = []

    @property
    def note(self) -> str:
        return f", held-out distance {self.curve[-1]['held_out']:.4f}, {self.distance_at(0):.4f} at the start"

    def distance_at(self, step: int) -> float:
        return next(point["held_out"] for point in self.curve if point["step"] == step)

    def snapshot(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def put(self, state: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.data.copy_(state[name])

    def save(self) -> None:
        if self.checkpoint is None:
            return
        parts: Parts = {"now": self.snapshot(), "best": self.best}
        for name, p in self.parameters.items():
            for part, tensor in self.adam.state[p].items():
                parts.setdefault(part, {})[name] = tensor
        facts = {name: getattr(self, name) for name in SAVED}
        write_checkpoint(self.checkpoint, parts, {"key": self.key, **facts, "before": self.seconds})
        self.saved = time.monotonic()

    def restore(self) -> bool:
        """Go on from the checkpoint, if there is one; one that does not fit changes nothing."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return False
        parts, facts = read_checkpoint(self.checkpoint, self.key, SAVED)
        check_shapes(self.checkpoint, parts, self.parameters, self.parameters)
        for name, value in facts.items():
            setattr(self, name, value)
        now, self.best = parts.pop("now"), {name: tensor.clone() for name, tensor in parts.pop("best").items()}
        self.put(self.best)  # the state at the start of the stage, which the rates follow from
        self.begin()
        self.put(now)
        for name, p in self.parameters.items():
            state = {part: found[name] for part, found in parts.items() if name in found}
            if state:
                self.adam.state[p] = {k: v.clone() if k == "step" else v.clone().to(p.device) for k, v in state.items()}
        advance_(self.adam, self.schedule, self.at)
        return True


# facts of a checkpoint: attributes of _Run
SAVED: dict[str, Check] = {
    "stages": lambda value: isinstance(value, list) and all(map(is_count, value)),
    "length": is_count,
    "at": is_count,
    "losses": lambda value: isinstance(value, list) and all(map(_checks.is_number, value)),
    "curve": lambda rows: are_rows(rows) and all({"step", "held_out"} <= row.keys() for row in rows),
    "kept": is_count,
    "stopped": lambda value: isinstance(value, str),
    "before": _checks.is_number,
}


@contextmanager
def _training(model: PreTrainedModel, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Gradients for these parameters alone; afterwards requires_grad is as before."""
    others = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in others:
            p.requires_grad_(False)
        for p in parameters:
            p.requires_grad_(True)
        yield
    finally:
        for p, wanted in others:
            p.requires_grad_(wanted)
            p.grad = None
