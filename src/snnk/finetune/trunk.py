"""Outputs of a frozen base model, computed once for every row, for methods that train what is behind it.

A step on these costs what the head costs. The base model runs without dropout, as it does in use. Of its hidden states
(tokens, d) a head reads one or two vectors, which are kept in their place: `VIEWS` has the candidates. The first view
with which the head returns the logits of the whole model is taken, so that no architecture is named here; if there is
none, the data stay as they are, and every step runs the whole model.

Poolers and classifiers that a method puts in the place of a model's own read the same vectors, so that the outputs also
serve for fitting these, and for all evaluations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from snnk import _io
from snnk.finetune.data import Data
from snnk.finetune.loading import bits
from snnk.hf.models import evaluating, place

BATCH = 64
MOST_BYTES = 2_000_000_000  # the size of all stored outputs


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    weights = mask.to(states.dtype)[..., None]
    return (states * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp_min(1)


def _last(states: Tensor, mask: Tensor) -> Tensor:
    places = torch.arange(mask.shape[1], device=mask.device) * mask
    return states[torch.arange(len(states)), places.argmax(1), None]


# hidden states (n, tokens, d) and their mask (n, tokens) -> what the head reads, (n, 1 or 2, d)
VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first": lambda states, mask: states[:, :1],
    "mean": _mean,
    "last": _last,
    "first, and mean of the others": lambda states, mask: torch.cat(
        [states[:, :1], _mean(states[:, 1:], mask[:, 1:])], 1
    ),
}


@contextmanager
def without_trunk(model: PreTrainedModel) -> Iterator[None]:
    """The head alone: inside, the base model returns its input, hidden states, and what its pooler makes of them."""
    base: Any = model.base_model

    def forward(*args: Any, **kwargs: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        given = (*args, kwargs.get("inputs_embeds"), kwargs.get("pixel_values"))
        states = next(x for x in given if x is not None)
        pooler = getattr(base, "pooler", None)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=states, pooler_output=None if pooler is None else pooler(states)
        )

    base.forward = forward
    try:
        yield
    finally:
        del base.forward


@torch.no_grad()
def run_trunk(model: PreTrainedModel, *parts: Data, shared: Path | None = None) -> list[Data] | None:
    """The data with what the head reads in place of their rows, for use inside `without_trunk`.

    None if no view of the hidden states gives the logits of the whole model, or if the outputs need too much memory.

    Args:
        model: a classifier, whose base model is frozen but for its pooler.
        parts: rows of the model's inputs.
        shared: a folder for the outputs. Rows whose outputs are there, by the same weights, are not run again.
    """
    found = _find_view(model, parts[0])
    if found is None or sum(map(len, parts)) * _outputs(model, parts[0].take([0]), VIEWS[found]).nbytes > MOST_BYTES:
        return None
    return [_through(model, data, found, shared) for data in parts]


def _find_view(model: PreTrainedModel, data: Data) -> str | None:
    """The first view that gives the logits of the whole model, on rows of many lengths; None if there is none."""
    if model.base_model is model:
        return None
    order = sorted(range(len(data)), key=lambda i: data.lengths[i])
    batch = data.batch(order[:: max(1, len(order) // 8)][:8])
    del batch["labels"]
    with evaluating(model), random_head(model):
        exact = model(**place(batch, model)).logits
        spread = float(exact.std(0).max())  # small for a pooler that was never trained
        if not spread > 1e-5 * float(exact.abs().max()):  # every view gives the same
            return None
        for name, view in VIEWS.items():
            try:
                states, mask = _states(model, batch)
                with without_trunk(model):
                    logits = model(**{_entrance(model): view(states, mask)}).logits
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it reads other states
                continue
            if logits.shape == exact.shape and float((logits - exact).abs().max()) <= 0.01 * spread:
                return name
    return None


@contextmanager
def random_head(model: PreTrainedModel) -> Iterator[None]:
    """Other weights behind the base model: with those of a new head, zeros perhaps, all views could be the same."""
    inside = {id(p) for p in model.base_model.parameters()}
    head = [p for p in model.parameters() if id(p) not in inside]
    before, generator = [p.detach().clone() for p in head], torch.Generator().manual_seed(0)
    for p in head:
        p.copy_(torch.randn(p.shape, generator=generator) / max(p.shape[-1], 1) ** 0.5)
    try:
        yield
    finally:
        for p, value in zip(head, before, strict=True):
            p.copy_(value)


def _through(model: PreTrainedModel, data: Data, view: str, shared: Path | None) -> Data:
    file = None if shared is None else shared / f"{_digest(model, data, view)}.safetensors"
    if file is not None and file.is_file():
        with _io.open_tensors(file) as stored:
            outputs = stored.get_tensor("outputs")
    else:
        outputs = _outputs(model, data, VIEWS[view])
        if file is not None:
            _io.write_tensors(file, {"outputs": outputs})
    name = _entrance(model)
    # lengths stay, as the batches of an epoch follow from them
    return replace(data, rows=list(outputs), collate=lambda part: {name: torch.stack(part)})


def _digest(model: PreTrainedModel, data: Data, view: str) -> str:
    """Hash of all that the outputs depend on, but for the processor of images."""
    weights = [(name, *bits(tensor.float())) for name, tensor in model.base_model.state_dict().items()]
    found = hashlib.sha256(repr((view, model.config.to_dict(), weights)).encode())
    for row in data.row_hashes():
        found.update(row)
    return found.hexdigest()


def _outputs(model: PreTrainedModel, data: Data, view: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What the head reads of each row, (n, 1 or 2, d)."""
    outputs = torch.empty(0)
    with evaluating(model):
        for indices in data.batches(BATCH):
            batch = data.batch(indices)
            del batch["labels"]
            found = view(*_states(model, batch)).cpu()
            if not len(outputs):
                outputs = found.new_empty(len(data), *found.shape[1:])
            outputs[indices] = found
    return outputs


def _states(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The last hidden states of the base model, (n, tokens, d), and the mask of those that are no padding."""
    base: Any = model.base_model
    found = base(**place(batch, model))
    states = found.last_hidden_state
    if getattr(model.config, "snnk_pooling", "mean") != "mean" and "pooler_output" in found:
        states = found.pooler_output[:, None]  # means already, or comparisons of them
    mask = batch.get("attention_mask")
    if mask is None or mask.shape != states.shape[:2]:
        mask = torch.ones(states.shape[:2], dtype=torch.long)
    return states, mask.to(states.device)


def _entrance(model: PreTrainedModel) -> str:
    """The input of the classifier that reaches the base model unchanged."""
    return "pixel_values" if model.main_input_name == "pixel_values" else "inputs_embeds"
