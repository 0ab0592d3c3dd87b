"""How far a model's outputs for a batch are from those of its teacher, as the distillation minimises it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from snnk.hf.compression.outputs import Read, read
from snnk.hf.models import Batch, has_bfloat16


def read_fast(model: PreTrainedModel, batch: Batch) -> Read:
    """The outputs of a model; products of matrices of a model in float32 are in bfloat16 where that is faster.

    Parameters, residual streams, distances and Adam stay in float32.
    """
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=in_bfloat16(model)):
        return read(model, batch)


def in_bfloat16(model: PreTrainedModel) -> bool:
    """Whether `read_fast` computes in bfloat16."""
    return model.dtype == torch.float32 and has_bfloat16(next(model.parameters()).device.type)


class Targets:
    """The teacher's outputs for batches, kept up to a number of bytes; states are rounded to bfloat16 in any case."""

    def __init__(self, teacher: PreTrainedModel, batches: Sequence[Batch], room: int) -> None:
        self.teacher, self.batches, self.room = teacher, batches, room
        self.kept: dict[int, Read] = {}

    @torch.no_grad()
    def __getitem__(self, i: int) -> Read:
        if i in self.kept:
            return self.kept[i]
        found = read_fast(self.teacher, self.batches[i])
        if found.states is not None:  # one part in 500 of a number is far below the distances that are trained
            found = replace(found, states=found.states.bfloat16())
        size = sum(t.nbytes for t in (*found.logits.values(), *([] if found.states is None else [found.states])))
        if size <= self.room:
            self.room -= size
            self.kept[i] = found
        return found


def distance(found: Read, wanted: Read) -> Tensor:
    """How far a model's outputs for a batch are from the teacher's: a scalar, 0 if they are equal, in float32.

    For models with logits it is their KL divergence, for others half the relative squared error of the last hidden
    states and 1 - cosine of their means. It is a mean over the batch, so that batches can be averaged by their length.
    """
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
