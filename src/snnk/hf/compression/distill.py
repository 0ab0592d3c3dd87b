"""Distillation after compression: a few gradient steps of the new matrices towards the original's outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from snnk.hf.compression.agreement import Read, probe, read
from snnk.hf.models import Batch
from snnk.hf.replace import Replacement
from snnk.ridge.atoms import relative_adam

RATE, WARM_UP = 0.02, 10


def recover_(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    replacements: list[Replacement],
    batches: list[Batch],
    *,
    steps: int,
    seed: int = 0,
) -> None:
    """Train the modules that replaced the blocks, in place, to return the teacher's outputs; nothing else changes.

    A ValueError leaves the model as it was before.
    """
    parameters = [p for new in replacements for module in new.modules for p in module.parameters()]
    before = [p.detach().clone() for p in parameters]
    try:
        with _training(model, parameters), _in_float32(model):
            _train(model, teacher, parameters, batches, steps, seed)
        probe(model, batches[0])  # in its own dtype again
    except ValueError as error:
        for p, value in zip(parameters, before, strict=True):
            p.data.copy_(value)
        raise ValueError(f"recovery failed, and the model is as it was before: {error}") from error


def _train(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    parameters: list[nn.Parameter],
    batches: list[Batch],
    steps: int,
    seed: int,
) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    adam, schedule = relative_adam(parameters, rate=RATE, steps=steps, warm_up=WARM_UP)
    optimizer = accelerator.prepare(adam)
    teacher.eval()
    generator = random.Random(seed)
    for step in range(steps):
        batch = generator.choice(batches)
        with torch.no_grad():
            wanted = read(teacher, batch)
        if not len(wanted):  # nothing but padding
            adam.step()  # without gradients: nothing moves, and the rate goes on as the schedule has it
        else:
            with torch.enable_grad(), accelerator.autocast():
                loss = _distance(read(model, batch), wanted)
                if not bool(loss.isfinite()):
                    at = f"the distance is {float(loss.detach())} at step {step + 1} of {steps}"
                    raise ValueError(f"outputs are not finite: {at}")
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()


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


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """The model in float32, as in float16 the sums of Adam underflow, and gradients may; afterwards in its own dtype.

    Tensors that are not trained come back bit for bit.
    """
    short = (torch.float16, torch.bfloat16)
    tensors = [(t, t.dtype) for t in (*model.parameters(), *model.buffers()) if t.dtype in short]
    try:
        for t, _ in tensors:
            t.data = t.data.float()
        yield
    finally:
        for t, dtype in tensors:
            t.grad = None  # it has the other dtype
            t.data = t.data.to(dtype)


def _distance(found: Read, wanted: Read) -> Tensor:
    """KL divergence of logits, or squared error of last hidden states and cosine of their means."""
    if wanted.logits:
        parts = [_of_logits(found.logits[name].float(), p.float()) for name, p in wanted.logits.items()]
        return torch.stack(parts).sum()
    if found.states is None or wanted.states is None or wanted.mask is None:
        raise ValueError("the model and its teacher have no outputs in common")
    p, q = wanted.states.float(), found.states.float()
    error = ((p - q).square() * wanted.mask).sum() / (p.square() * wanted.mask).sum()
    return 0.5 * error + (1 - F.cosine_similarity(wanted.means(), found.means())).mean()


def _of_logits(q: Tensor, p: Tensor) -> Tensor:
    if p.shape[1] == 1:
        return F.mse_loss(q, p)
    return F.kl_div(q.log_softmax(1), p.log_softmax(1), log_target=True, reduction="batchmean")
