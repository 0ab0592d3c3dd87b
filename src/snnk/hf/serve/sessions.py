"""Graphs that run on the processor, and the cache of keys and values that a decoder's graph has.

Inputs and outputs of the cache have the names that Optimum expects: past_key_values.0.key and present.0.key, and so on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from snnk.hf.models import Batch

PAST, PRESENT, POSITIONS = "past_key_values", "present", "position_ids"


@dataclass(frozen=True)
class Session:
    """A graph that runs.

    Args:
        inputs, outputs: their names.
        run: from the inputs by name, and the names of wanted outputs, to these outputs.
        sizes: for each input of a cache, heads and dimensions per head. Empty if there is no cache.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[[dict[str, Any], Sequence[str]], list[Tensor]]
    sizes: Mapping[str, tuple[int, int]]

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Outputs by name. Without a given cache, texts begin at the first token, and no cache is returned."""
        going_on = bool(self.sizes) and self.sizes.keys() <= batch.keys()
        names = [name for name in self.outputs if going_on or not name.startswith(f"{PRESENT}.")]
        given = {name: x.numpy() for name, x in self.complete(batch).items()}
        return dict(zip(names, self.run(given, names), strict=True))

    def complete(self, batch: Batch) -> dict[str, Tensor]:
        """Everything that the graph reads, from a batch: by default, positions from 0 on and an empty cache."""
        found = self.empty(len(next(iter(batch.values())))) | dict(batch)
        if POSITIONS in self.inputs and POSITIONS not in found:
            found[POSITIONS] = torch.arange(found["input_ids"].shape[1]).expand_as(found["input_ids"]).contiguous()
        return {name: found[name] for name in self.inputs}

    def empty(self, count: int) -> dict[str, Tensor]:
        """The cache of `count` texts before their first token."""
        return {name: torch.zeros(count, heads, 0, size) for name, (heads, size) in self.sizes.items()}

    def after(self, batch: Batch, start: int) -> dict[str, Tensor]:
        """The tokens of texts without padding from one on, with the cache that those before it leave."""
        ids = batch["input_ids"]
        count, length = ids.shape
        first = {"input_ids": ids[:, :start], "attention_mask": torch.ones_like(ids[:, :start])}
        left = self({**first, **self.empty(count)})
        return {
            "input_ids": ids[:, start:],
            "attention_mask": torch.ones_like(ids),
            POSITIONS: torch.arange(start, length).expand(count, -1).contiguous(),
            **{name: left[name.replace(PAST, PRESENT, 1)] for name in self.sizes},
        }


class Traced(nn.Module):
    """A model whose inputs are in order, and whose outputs are the chosen ones, then those of the cache, if any."""

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given: dict[str, Any] = dict(zip(self.inputs, tensors, strict=False))
        past = tensors[len(self.inputs) :]
        if past:
            given |= {"past_key_values": DynamicCache(list(zip(past[::2], past[1::2], strict=True))), "use_cache": True}
        found = self.model(**given)
        cache = [x for layer in found.past_key_values.layers for x in (layer.keys, layer.values)] if past else []
        return (*(found[name] for name in self.outputs), *cache)


def example_cache(model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
    """The cache that a decoder leaves after a batch, by the names of the graph's inputs.

    A ValueError for other kinds of caches and for other sizes than those of the configuration, from which Optimum makes
    the first cache.
    """
    if "token_type_ids" in batch:
        raise ValueError(f"{type(model).__name__} reads token_type_ids, which Optimum does not give to decoders")
    found: Any = model(**batch, use_cache=True).past_key_values
    if type(found) is not DynamicCache:
        raise ValueError(f"{type(model).__name__} has a cache of the kind {type(found).__name__}")
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers: Any = found.layers
    tensors = [x.contiguous() for layer in layers for x in (layer.keys, layer.values)]
    if any((x.shape[1], x.shape[3]) != (heads, size) for x in tensors):
        raise ValueError(f"{type(model).__name__} has a cache of other sizes than its configuration")
    return dict(zip(_names(len(layers)), tensors, strict=True))


def takes_positions(model: PreTrainedModel, batch: Batch) -> bool:
    """Whether positions 0, 1, ... as an input give the outputs of the model without them, also for padding.

    OPT leaves out padding when it counts, and RoBERTa begins later: these compute positions by themselves.
    """
    if POSITIONS not in inspect.signature(model.forward).parameters:
        return False
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    without, given = (model(**batch, **more).logits for more in ({}, {POSITIONS: positions}))
    return torch.allclose(without, given, atol=1e-5)


def _names(layers: int) -> Iterator[str]:
    for i in range(layers):
        yield f"{PAST}.{i}.key"
        yield f"{PAST}.{i}.value"
