"""Outputs of the frozen layers below the first trained one, computed once for every row.

    h_k = layer_{k-1}(... layer_0(embeddings(tokens)))    k: the first layer with a trained parameter

A step then costs what the layers from k on cost. Layers below k run without dropout, as they do in use. The rows keep
their lengths, so that the batches of an epoch are the same. Whether the upper part of a model returns the logits of the
whole is verified on a few rows, so that no architecture is named here; if it does not, the data stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from snnk.finetune.data import Data
from snnk.finetune.trunk import MOST_BYTES, random_head
from snnk.hf.finding import rows_of
from snnk.hf.model_blocks import part_at
from snnk.hf.models import evaluating, place

BATCH = 64
SAMPLE = 8  # rows with which the upper part is verified
CLOSE = 1e-3  # largest difference of logits, as a part of their spread


def frozen_layers(model: Any) -> list[nn.Module]:
    """The layers below the first trained one; none if something in front of the layers is trained.

    Args:
        model: a classifier of transformers, wrapped by PEFT or not.
    """
    whole = _whole(model)
    rows = rows_of(whole)
    if list(rows) != [""]:  # several towers, or a type without a row
        return []
    layers = part_at(whole.base_model, rows[""].layer.removesuffix(".{}"))
    if not isinstance(layers, nn.ModuleList):
        return []
    trained = next((i for i, layer in enumerate(layers) if _is_trained(layer)), len(layers))
    in_front = [p for name, child in whole.base_model.named_children() if "embed" in name for p in child.parameters()]
    return [] if any(p.requires_grad for p in in_front) else list(layers[:trained])


def _whole(model: Any) -> Any:
    """The classifier of transformers inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


@contextmanager
def without_lower(model: Any, layers: list[nn.Module], packed: bool) -> Iterator[None]:
    """The upper part alone: inside, `inputs_embeds` are the states behind `layers`.

    Args:
        model: a classifier of texts, wrapped by PEFT or not.
        layers: the result of `frozen_layers`.
        packed: whether a layer returns a tuple with its states, instead of the states.
    """

    def given(*args: Any, inputs_embeds: Any = None, hidden_states: Any = None, **others: Any) -> Any:
        return next(x for x in (*args, inputs_embeds, hidden_states) if x is not None)

    embeddings: Any = getattr(_whole(model).base_model, "embeddings", None)
    changed: list[Any] = [*layers, *([] if embeddings is None else [embeddings])]
    for module in layers:
        module.forward = (lambda *args, **kwargs: (given(*args, **kwargs),)) if packed else given
    if embeddings is not None:
        embeddings.forward = given
    try:
        yield
    finally:
        for module in changed:
            del module.forward


@torch.no_grad()
def run_lower(
    model: Any, layers: list[nn.Module], *parts: Data
) -> tuple[list[Data], Callable[[], AbstractContextManager[None]]] | None:
    """The data with the states behind `layers` in place of their rows, and a context in which the model reads them.

    None if the upper part does not give the logits of the whole model with them, or if they need too much memory.

    Args:
        model: a classifier of texts, wrapped by PEFT or not.
        layers: the result of `frozen_layers`, at least one layer.
        parts: rows of the model's inputs.
    """
    every = sorted((length, part, i) for part, data in enumerate(parts) for i, length in enumerate(data.lengths))
    # rows of all parts by length, the shortest and the longest among them
    some = [every[round(place * (len(every) - 1) / (SAMPLE - 1))][1:] for place in range(SAMPLE)]
    sample = replace(
        parts[0],
        rows=[parts[part].rows[i] for part, i in some],
        labels=torch.zeros(SAMPLE, dtype=torch.long),
        lengths=[parts[part].lengths[i] for part, i in some],
    )
    with evaluating(model):
        packed = next((packed for packed in (False, True) if _is_exact(model, layers, packed, sample)), None)
        if packed is None:
            return None
        (state,) = _states(model, layers, sample.take([0]))
        if sum(sum(data.lengths) for data in parts) * state[0].nbytes > MOST_BYTES:
            return None
        found = [replace(data, rows=_states(model, layers, data), collate=_pad) for data in parts]
    return found, partial(without_lower, model, layers, packed)


def _is_exact(model: Any, layers: list[nn.Module], packed: bool, data: Data) -> bool:
    """Whether the upper part gives the logits of the whole model."""
    batch = data.batch(range(len(data)))
    del batch["labels"]
    if "attention_mask" not in batch:
        return False
    with random_head(_whole(model)):
        exact = model(**place(batch, model)).logits
        try:
            rows = _states(model, layers, data)
            with without_lower(model, layers, packed):
                logits = model(**place(_pad(rows), model)).logits
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # it is built in another way
            return False
    return logits.shape == exact.shape and float((logits - exact).abs().max()) <= CLOSE * float(exact.std(0).max())


def _states(model: Any, layers: list[nn.Module], data: Data) -> list[Tensor]:
    """The states (tokens, d) of each row behind the last of `layers`."""
    rows: list[Any] = [None] * len(data)
    for indices in data.batches(BATCH):
        batch = data.batch(indices)
        del batch["labels"]
        states = _reach(model, layers[-1], batch)
        for i, row, kept in zip(indices, states, batch["attention_mask"].bool(), strict=True):
            rows[i] = row[kept].clone()
    return rows


class _Reached(Exception):
    """Ends a forward pass at a layer, with its output."""


def _reach(model: Any, layer: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The output of a layer, without running those above it."""

    def stop(module: Any, args: Any, output: Any) -> None:
        raise _Reached(output)

    handle = layer.register_forward_hook(stop)
    try:
        model(**place(batch, model))
    except _Reached as reached:
        (output,) = reached.args
        states: Tensor = output[0] if isinstance(output, tuple) else output
        return states.cpu()
    finally:
        handle.remove()
    raise TypeError("a layer of the model does not run")


def _pad(rows: list[Tensor]) -> dict[str, Tensor]:
    """One batch of states, padded with zeros on the right, and its mask."""
    states = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return {"inputs_embeds": states, "attention_mask": (torch.arange(states.shape[1]) < lengths[:, None]).long()}
