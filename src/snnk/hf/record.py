"""Inputs and outputs of modules while a model runs: one recorder for every fit, and one cache of activations.

`recording` calls back for each call of some modules, and `observe` for each block. `ActivationCache` takes batches up
through a model whose blocks are replaced one by one: a pass to a block starts at the layer where the last pass ended,
from inputs that were kept there, instead of at the bottom. `context` runs the attention of one layer alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from snnk.hf.finding import find_ffns
from snnk.hf.model_blocks import Attention, ModelBlock
from snnk.hf.models import Batch, place

HELD_OUT = 10  # one batch in so many is held out
Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of a module
T = TypeVar("T")
B = TypeVar("B", bound=ModelBlock)


@contextmanager
def recording(modules: Mapping[str, nn.Module], callback: Callable[[str, Any, Any], Any]) -> Iterator[None]:
    """Call back with (name, first input, output) whenever one of the modules is called inside the `with`.

    A value that the callback returns, unless None, replaces the output.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> with recording({"layer": layer}, lambda name, x, y: print(name, *x.shape, *y.shape)):
        ...     _ = layer(torch.ones(5, 2))
        layer 5 2 5 3
    """
    with ExitStack() as stack:
        for name, module in modules.items():

            def hook(_: nn.Module, args: Any, kwargs: dict[str, Any], out: Any, name: str = name) -> Any:
                return callback(name, args[0] if args else next(iter(kwargs.values()), None), out)

            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


@dataclass(frozen=True)
class Observation:
    """One block in a forward pass: `inputs` (*, in), `outputs` and `sum` (*, out), where * is (batch, tokens)."""

    inputs: Tensor  # of the first linear layer
    hidden: Tensor  # the input of the last linear layer
    outputs: Tensor  # of the last linear layer
    sum: Tensor  # the residual stream behind the block
    scale: Tensor | None = None
    call: Call | None = None  # the arguments of the attention module, without a cache of keys and values

    @property
    def residual(self) -> Tensor:
        """The stream that the block's output is added to, (*, out)."""
        return self.sum - (self.outputs if self.scale is None else self.outputs * self.scale)


@contextmanager
def observe(blocks: Iterable[B], callback: Callable[[B, Observation], None]) -> Iterator[None]:
    """Call back with each block's input, output and residual sum, in every forward pass inside the `with`.

    The layers must be in eval mode, as dropout would stand between output and sum. A block that is replaced inside the
    `with` is no longer seen.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> with observe(find_ffns(model.eval()), lambda ffn, seen: print(ffn.name, seen.residual.shape)):
        ...     _ = model(torch.zeros(2, 5, dtype=torch.long))
        encoder.layer.0 torch.Size([2, 5, 8])
    """
    with ExitStack() as stack:
        for block in blocks:
            if block.layer.training:
                raise ValueError(f"{block.name} is in training mode, with dropout behind the block; call model.eval()")
            stack.enter_context(unchunked(block.layer))
            calls: list[Call] = []
            if isinstance(block, Attention):
                stack.callback(_on_call(block.slot("module"), calls))
            modules = {"first": block.linears[0], "last": block.linears[-1], "sum": block.reader or block.layer}
            stack.enter_context(recording(modules, _observer(block, calls, callback)))
        yield


def _on_call(module: nn.Module, calls: list[Call]) -> Callable[[], None]:
    """Note the arguments of each call of a module, without a cache, to which a second call would add its tokens."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, Cache) else value.detach() if isinstance(value, Tensor) else value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}))

    return module.register_forward_pre_hook(hook, with_kwargs=True).remove


def _observer(
    block: B, calls: list[Call], callback: Callable[[B, Observation], None]
) -> Callable[[str, Any, Any], None]:
    seen: dict[str, Tensor] = {}

    def note(name: str, x: Tensor, out: Any) -> None:
        if name != "sum":
            seen["hidden"] = x
            seen[name] = x if name == "first" else out.clone()  # Falcon adds attention's output to it in place
            return
        total = x if block.reader is not None else out[0] if isinstance(out, tuple) else out
        # OPT runs its blocks on (batch * tokens, d)
        inputs, hidden, outputs = (
            seen.pop(key).detach().reshape(*total.shape[:-1], -1) for key in ("first", "hidden", "last")
        )
        scale = None if block.scale is None else block.scale.detach()
        call = calls.pop() if calls else None
        callback(block, Observation(inputs, hidden, outputs, total.detach(), scale, call))

    return note


def context(attention: Attention, call: Call) -> Tensor:
    """The mixed values of all heads, which the output layer reads: (batch, tokens, heads * head size)."""
    found: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(args[0])
        raise _Seen

    handle = attention.slot("out").register_forward_pre_hook(stop)
    try:
        attention.slot("module")(*call[0], **call[1])
    except _Seen:
        pass
    finally:
        handle.remove()
    return found[0]


class _Seen(Exception):
    """The block has been seen; the rest of the forward pass is not needed."""


def run_to(layer: nn.Module, model: PreTrainedModel, batch: Batch, *others: nn.Module) -> None:
    """Run a model through one of its layers and no further: time and memory do not grow with a vocabulary behind it.

    With `others`, it is run until all these layers have run, in whatever order, as the towers of CLIP do. If the inputs
    do not reach one of them, the model is run to its end.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9))
        >>> names = {"first layer": model.transformer.h[0], "second": model.transformer.h[1], "head": model.lm_head}
        >>> with recording(names, lambda name, x, y: print(name)):
        ...     run_to(model.transformer.h[0], model, {"input_ids": torch.zeros(2, 5, dtype=torch.long)})
        first layer
    """

    ahead = {layer, *others}

    def stop(module: nn.Module, *_: Any) -> None:
        ahead.discard(module)
        if not ahead:
            raise _Seen

    with ExitStack() as stack, suppress(_Seen):
        for one in (layer, *others):
            stack.callback(one.register_forward_hook(stop).remove)  # behind the hooks that the layer has
        model(**place(batch, model))


def unreached(blocks: Sequence[B], model: PreTrainedModel, batch: Batch) -> list[B]:
    """The blocks that do not run for a batch, such as those of a tower for images if there are texts only."""
    layers, seen = list(dict.fromkeys(block.layer for block in blocks)), set[nn.Module]()
    with ExitStack() as stack, torch.no_grad():
        for layer in layers:
            stack.callback(layer.register_forward_hook(lambda module, *_: seen.add(module)).remove)
        run_to(layers[0], model, batch, *layers[1:])
    return [block for block in blocks if block.layer not in seen]


@dataclass
class Reached:
    """What a block gets in each batch: tensors of its tokens without padding, one per batch."""

    inputs: list[Tensor] = field(default_factory=list)  # (n, in)
    residuals: list[Tensor] = field(default_factory=list)  # (n, out), the stream that the block adds to
    sums: list[Tensor] = field(default_factory=list)  # (n, out), the stream behind the block
    calls: list[Call | None] = field(default_factory=list)  # of attention


class ActivationCache:
    """Batches inside a model, kept as the inputs of the layer that they have come to.

    Args:
        model: in eval mode. Between two calls of `advance` only the block of the last one, and those above, may change.
        batches: inputs of the model.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[Batch]) -> None:
        self.model, self.batches = model, batches
        self.layers = [ffn.layer for ffn in find_ffns(model)]
        self.at = 0  # index of the layer whose inputs are kept
        self.kept: list[Tensor] = []  # one per batch, (batch, tokens, d)
        # for each layer, what it returns beside the states: the number of the argument that it is, or None
        self.passed: dict[nn.Module, list[int | None] | None] = {}  # None for a layer that returns no tuple
        self.read: set[nn.Module] = set()  # layers that made an argument of a later layer, as T5's position bias

    @torch.no_grad()
    def advance(self, block: ModelBlock) -> Reached:
        """Run all batches up to a block, through it, and no further."""
        if block.index < self.at:
            raise ValueError(f"{block.name} is below layer {self.at}, to which the batches have come")
        found = Reached()
        reached: list[Tensor] = []

        made: dict[int, tuple[nn.Module, Any]] = {}  # by id, what layers of this pass made beside the states

        def start(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self.kept:
                return None
            x = self.kept[len(reached)]
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        def end(_: nn.Module, args: Any, kwargs: Any) -> None:
            reached.append(args[0] if args else kwargs["hidden_states"])
            self.read.update(made[id(x)][0] for x in _given(args, kwargs) if id(x) in made)
            made.clear()

        def note_layer(layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = [id(x) if isinstance(x, Tensor) else None for x in _given(args, kwargs)]
            others = [x for x in out[1:] if isinstance(x, Tensor)] if isinstance(out, tuple) else []
            made.update((id(x), (layer, x)) for x in others if id(x) not in given and id(x) not in made)
            self.passed[layer] = (
                [given.index(id(x)) if id(x) in given else None for x in out[1:]] if isinstance(out, tuple) else None
            )

        def note(_: ModelBlock, seen: Observation) -> None:
            for kept, x in ((found.inputs, seen.inputs), (found.residuals, seen.residual), (found.sums, seen.sum)):
                kept.append(flat(x, batch, block.row.masked))
            found.calls.append(seen.call)
            raise _Seen

        with ExitStack() as stack:
            for layer in self.layers[self.at : block.index]:
                stack.callback(layer.register_forward_hook(note_layer, with_kwargs=True).remove)
            first, last = self.layers[self.at], self.layers[block.index]
            stack.callback(first.register_forward_pre_hook(start, with_kwargs=True).remove)
            stack.callback(last.register_forward_pre_hook(end, with_kwargs=True).remove)
            for layer in self.layers[: self.at]:  # these return their inputs, which nothing reads
                if layer in self.passed and layer not in self.read:  # a tower that runs behind this one was not seen
                    stack.callback(_set_forward, layer, vars(layer).get("forward"))
                    _set_forward(layer, _identity(self.passed[layer]))
            stack.enter_context(observe([block], note))
            for batch in self.batches:
                try:
                    self.model(**place(batch, self.model))
                except _Seen:
                    continue
        self.at, self.kept = block.index, reached
        return found


def _given(args: Any, kwargs: Any) -> list[Any]:
    return [*args, *kwargs.values()]


def _identity(passed: list[int | None] | None) -> Callable[..., Any]:
    """A forward that returns its input, or a tuple with it and with the arguments of these numbers."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = _given(args, kwargs)
        states = args[0] if args else kwargs["hidden_states"]
        return states if passed is None else (states, *(None if i is None else given[i] for i in passed))

    return forward


def _set_forward(layer: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Give a layer a forward of its own, as Accelerate does, or with None that of its class."""
    if forward is None:
        vars(layer).pop("forward", None)
    else:
        vars(layer)["forward"] = forward


def hold_out(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """Batches to fit to and batches to measure on: every tenth is held out, or the last if there are fewer.

    Example:
        >>> hold_out(range(4))
        ([0, 1, 2], [3])
    """
    if len(items) < 2:
        raise ValueError(f"at least two batches are needed, one of them held out; got {len(items)}")
    held = range(HELD_OUT - 1, len(items), HELD_OUT) or [len(items) - 1]
    return [item for i, item in enumerate(items) if i not in held], [items[i] for i in held]


@contextmanager
def unchunked(model: nn.Module) -> Iterator[None]:
    """Run feed-forward blocks on all tokens at once: chunks give the same outputs, but would be recorded in pieces."""
    modules: list[Any] = [m for m in model.modules() if getattr(m, "chunk_size_feed_forward", 0)]
    sizes = [m.chunk_size_feed_forward for m in modules]
    for module in modules:
        module.chunk_size_feed_forward = 0
    try:
        yield
    finally:
        for module, size in zip(modules, sizes, strict=True):
            module.chunk_size_feed_forward = size


def flat(x: Tensor, batch: Batch, masked: bool = True) -> Tensor:
    """Tokens of a block without padding: (batch, tokens, d) -> (n, d); all tokens if its row is not `masked`."""
    return x.flatten(0, -2)[tokens_of(batch, x.shape[:-1], masked).to(x.device)]


def tokens_of(batch: Batch, lead: torch.Size, masked: bool = True) -> Tensor:
    """True for tokens that are not padding, flattened from (batch, tokens)."""
    mask = batch.get("attention_mask")
    if mask is None or not masked:
        return torch.ones(lead, dtype=torch.bool).flatten()
    if mask.numel() != lead.numel():  # multiple choice: the model makes (n, choices, tokens) into (n * choices, tokens)
        raise ValueError(
            f"attention_mask must have one entry for each of {tuple(lead)} tokens; got shape {tuple(mask.shape)}"
        )
    return mask.bool().flatten()


# keys and values of cross-attention: modules of a decoder that run on the encoder's tokens
ENCODED = re.compile(r"\.(EncDecAttention|encoder_attn|crossattention)\.(.*\.)?(k|v|k_proj|v_proj|key|value)(\.|$)")


def rows_at(name: str, x: Tensor, batch: Batch, model: nn.Module) -> Tensor:
    """Tokens at the module of that name without padding, where its inputs are those tokens: (*, d) -> (n, d)."""
    rows = x.flatten(0, -2)
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder" in name.split(".")
    mask = batch.get("decoder_attention_mask" if decodes and not ENCODED.search(name) else "attention_mask")
    # compared by number: OPT runs its blocks on (batch * tokens, d), and a pooler runs on one token per text
    return rows if mask is None or mask.numel() != len(rows) else rows[mask.bool().flatten().to(rows.device)]
