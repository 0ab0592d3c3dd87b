"""Batches on their way up through a model whose blocks are replaced one by one.

A pass to a block starts at the layer where the last pass ended, from inputs that were kept there, instead of at the
bottom. The layers below hand on what they are given, and what comes of it is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snnk.hf.architectures import FFN, find_ffns
from snnk.hf.models import place


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


@dataclass(frozen=True)
class Observation:
    """What one block saw in a forward pass: `inputs` (*, in), `outputs` and `sum` (*, out), * being (batch, tokens)."""

    inputs: Tensor
    outputs: Tensor
    sum: Tensor
    scale: Tensor | None = None

    @property
    def residual(self) -> Tensor:
        """What the block's output is added to, (*, out)."""
        return self.sum - (self.outputs if self.scale is None else self.outputs * self.scale)


@contextmanager
def observe(ffns: Iterable[FFN], callback: Callable[[FFN, Observation], None]) -> Iterator[None]:
    """Call back with each block's input, output and residual sum, in every forward pass inside the `with`.

    The layers must be in eval mode: dropout would stand between output and sum. Blocks that are replaced inside the
    `with` are not seen; leave it first.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> with observe(find_ffns(model.eval()), lambda ffn, seen: print(ffn.name, seen.residual.shape)):
        ...     _ = model(torch.zeros(2, 5, dtype=torch.long))
        encoder.layer.0 torch.Size([2, 5, 8])
    """
    with ExitStack() as stack:
        for ffn in ffns:
            if ffn.block.training:
                raise ValueError(f"{ffn.name} is in training mode, with dropout behind the block; call model.eval()")
            stack.enter_context(unchunked(ffn.block))
            for handle in _hooks(ffn, callback):
                stack.callback(handle.remove)
        yield


def _hooks(ffn: FFN, callback: Callable[[FFN, Observation], None]) -> list[Any]:
    seen: dict[str, Tensor] = {}

    def finish(total: Tensor) -> None:
        lead = total.shape[:-1]  # OPT runs its blocks on (batch * tokens, d)
        x, y = (seen.pop(key).detach().reshape(*lead, -1) for key in ("inputs", "outputs"))
        callback(ffn, Observation(x, y, total.detach(), None if ffn.scale is None else ffn.scale.detach()))

    up, down, norm = ffn.slot("up"), ffn.slot("down"), ffn.norm
    return [
        up.register_forward_pre_hook(lambda _, args: seen.update(inputs=args[0])),
        down.register_forward_hook(lambda _, args, out: seen.update(outputs=out)),
        norm.register_forward_pre_hook(lambda _, args: finish(args[0]))
        if norm is not None
        else ffn.block.register_forward_hook(lambda _, args, out: finish(out[0] if isinstance(out, tuple) else out)),
    ]


# keys and values of cross-attention, in a decoder but of the encoder's tokens
ENCODED = re.compile(r"\.(EncDecAttention|encoder_attn|crossattention)\.(.*\.)?(k|v|k_proj|v_proj|key|value)(\.|$)")


def mask_at(name: str, batch: Mapping[str, Any], model: Any) -> Tensor | None:
    """Which of the tokens at the module of that name are not padding, flat; None where nothing says so."""
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder" in name.split(".")
    decodes = decodes and not ENCODED.search(name)
    mask = batch.get("decoder_attention_mask" if decodes else "attention_mask")
    return None if mask is None else mask.bool().flatten()


@contextmanager
def unchunked(model: nn.Module) -> Iterator[None]:
    """Feed-forward blocks run on all tokens at once: transformers' chunks give the same, but are seen in pieces."""
    modules: list[Any] = [m for m in model.modules() if getattr(m, "chunk_size_feed_forward", 0)]
    sizes = [m.chunk_size_feed_forward for m in modules]
    for module in modules:
        module.chunk_size_feed_forward = 0
    try:
        yield
    finally:
        for module, size in zip(modules, sizes, strict=True):
            module.chunk_size_feed_forward = size


def tokens_of(batch: Mapping[str, Tensor], lead: torch.Size) -> Tensor:
    """Which of (batch, tokens) are not padding, flat."""
    mask = batch.get("attention_mask")
    if mask is None or "pixel_values" in batch:
        return torch.ones(lead, dtype=torch.bool).flatten()
    if mask.numel() != lead.numel():  # multiple choice: the model makes (n, choices, tokens) into (n * choices, tokens)
        raise ValueError(
            f"attention_mask must have one entry for each of {tuple(lead)} tokens; got shape {tuple(mask.shape)}"
        )
    return mask.bool().flatten()
