"""Batches on their way up through a model whose blocks are replaced one by one.

A pass to a block starts at the layer where the last pass ended, from inputs that were kept there, instead of at the
bottom. The layers below hand on what they are given, and what comes of it is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from snnk.hf.architectures import FFN, Observation, find_ffns, observe
from snnk.hf.plan import place, tokens_of


class _Seen(Exception):
    """The block has been seen; the rest of the forward pass is not needed."""


class Walk:
    """Some batches, and the inputs of the layer that they have come to.

    Args:
        model: in eval mode. Between passes only the block that was asked for last may change, and those above it.
        batches: inputs of the model.
    """

    def __init__(self, model: Any, batches: Sequence[Mapping[str, Any]]) -> None:
        self.model, self.batches = model, batches
        self.layers: list[Any] = [ffn.block for ffn in find_ffns(model)]
        self.at = 0  # number of the layer whose inputs are kept
        self.kept: list[Tensor] = []  # for each batch, (batch, tokens, d)
        self.lengths: dict[Any, int] = {}  # of the tuple that a layer returns; 0 if it is a tensor

    @torch.no_grad()
    def to(self, ffn: FFN) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs of a block and the stream that it adds to, without padding, for each batch."""
        if ffn.index < self.at:
            raise ValueError(f"{ffn.name} is below layer {self.at}, to which the batches have come")
        inputs: list[Tensor] = []
        residuals: list[Tensor] = []
        reached: list[Tensor] = []

        def start(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self.kept:
                return None
            x = self.kept[len(reached)]
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        def end(_: nn.Module, args: Any, kwargs: Any) -> None:
            reached.append(args[0] if args else kwargs["hidden_states"])

        def length(layer: nn.Module, _: Any, out: Any) -> None:
            self.lengths[layer] = len(out) if isinstance(out, tuple) else 0

        def note(_: FFN, seen: Observation) -> None:
            inputs.append(flat(seen.inputs, batch))
            residuals.append(flat(seen.residual, batch))
            raise _Seen

        with ExitStack() as stack:
            for layer in self.layers[self.at : ffn.index]:
                stack.callback(layer.register_forward_hook(length).remove)
            first, last = self.layers[self.at], self.layers[ffn.index]
            stack.callback(first.register_forward_pre_hook(start, with_kwargs=True).remove)
            stack.callback(last.register_forward_pre_hook(end, with_kwargs=True).remove)
            for layer in self.layers[: self.at]:
                stack.callback(_set_forward, layer, layer.__dict__.get("forward"))
                layer.forward = _hand_on(self.lengths[layer])
            stack.enter_context(observe([ffn], note))
            for batch in self.batches:
                try:
                    self.model(**place(batch, self.model))
                except _Seen:
                    continue
        self.at, self.kept = ffn.index, reached
        return inputs, residuals


def _hand_on(length: int) -> Any:
    """A forward that returns its input at once, in a tuple of the length that the layer returns."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (length - 1)) if length else hidden_states

    return forward


def _set_forward(layer: Any, forward: Any) -> None:
    """Put back the layer's own forward (Accelerate makes one), or that of its class for None."""
    if forward is None:
        vars(layer).pop("forward", None)
    else:
        layer.forward = forward


def flat(x: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Tokens without padding: (batch, tokens, d) -> (n, d)."""
    return x.flatten(0, -2)[tokens_of(batch, x.shape[:-1]).to(x.device)]
