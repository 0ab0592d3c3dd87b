"""The row of a model whose type is not in the table, discovered by recording the calls of all modules in a run.

In each layer, a linear layer, an activation and a linear layer whose numbers follow from each other are the block; the
tensor that changes by the block's output, and by nothing else, when that output is set to zero is the residual sum. Of
linear layers with one input, the values are those without which the input of the output layer is zero. A row is used
only after it was verified on all layers: the block computes what its weights say, and an equal block with its neurons,
or with the values of each head, in another order changes nothing. Otherwise a ValueError names the step that failed;
attention that cannot be verified is left alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from snnk.hf.architectures import Architecture, AttentionNames, kind_of
from snnk.hf.finding import find_attentions, find_ffns
from snnk.hf.low_rank import PARTS, replace_attention_
from snnk.hf.model_blocks import Attention
from snnk.hf.models import Batch, evaluating, example_inputs, place
from snnk.hf.record import ActivationCache, Observation, observe, recording
from snnk.hf.replace import NAME, check_row, replace_

SEEN = "a run does not show whether more than their dot products is used"  # the reason to leave queries and keys alone
TOKENS = (2, 6)  # texts, or images, and tokens per text of the run
_rows: WeakKeyDictionary[nn.Module, Architecture] = WeakKeyDictionary()  # by base model, so that each is run once


class Call(NamedTuple):
    """One call of a module: its name in the layer, its first input, and its first output."""

    name: str
    module: nn.Module
    x: Tensor
    out: Tensor


class _Failed(Exception):
    """A step that failed, and why."""


def discover(model: PreTrainedModel) -> Architecture:
    """The verified row of a model; a ValueError if there is none.

    Example:
        >>> from transformers import PhiConfig, PhiModel
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> row = discover(PhiModel(PhiConfig(vocab_size=9, **sizes)))
        >>> row.layer, row.up, row.down
        ('layers.{}', 'mlp.fc1', 'mlp.fc2')
    """
    base = model.base_model
    written = getattr(getattr(model.config, "quantization_config", None), "row", None)
    if base not in _rows and written is not None:
        use_row(model, written)
    if base not in _rows and next(model.parameters()).dtype in (torch.float16, torch.bfloat16):
        _rows[base] = discover(copy.deepcopy(model).float())  # equality means little in 16 bits
    if base not in _rows:
        try:
            with evaluating(model), torch.no_grad():
                _rows[base] = row = _trace(model)
                _verify(model, row, batch := _inputs(model))
                if row.attention is not None and not _attention_holds(model, batch):
                    _rows[base] = replace(row, attention=None)
        except BaseException as error:
            _rows.pop(base, None)
            if not isinstance(error, Exception):
                raise
            why = error if isinstance(error, _Failed) else f"{type(error).__name__}: {error}"  # of the model's code
            raise ValueError(
                f"the blocks of a {kind_of(model.config)!r} model were not discovered in a run of it: {why}. "
                "A row in snnk.hf.architectures adds a type"
            ) from error
    return _rows[base]


def use_row(model: PreTrainedModel, names: Mapping[str, Any]) -> None:
    """Use a row from a file, whose names are checked to be those of modules and parameters of the model."""
    names, base = check_row(names), model.base_model
    attention = names.pop("attention", None)
    row = Architecture(**names, attention=None if attention is None else AttentionNames(**attention, fixed=SEEN))
    path = row.layer.removesuffix(".{}")
    try:
        for layer in base.get_submodule(path).children():
            for which in ("up", "down", "gate", "sum"):
                layer.get_submodule(getattr(row, which) or "")
            owner, _, name = row.activation.rpartition(".")
            if not callable(getattr(layer.get_submodule(owner), name)):
                raise AttributeError(f"{row.activation} is no function")
            for which in ("module", "query", "key", "value", "out", "sum"):
                layer.get_submodule(getattr(row.attention, which, ""))
            for scale in (row.scale, getattr(row.attention, "scale", None)):
                if scale is not None:
                    layer.get_parameter(scale)
    except AttributeError as error:
        raise ValueError(f"row of quantization_config names modules that the model does not have: {error}") from error
    _rows[base] = row


def _trace(model: PreTrainedModel) -> Architecture:
    """The row that the calls of a run show, before it is verified."""
    if any(p.is_meta for p in model.parameters()):
        raise _Failed("weights are on the meta device or offloaded, so that it cannot be run; load it into memory")
    batch = _inputs(model)
    path, layers = _layers(model)
    calls = _run(model, batch, layers)
    if calls.keys() != set(range(len(layers))):
        raise _Failed(f"{path} has {len(layers)} layers, of which a run calls {len(calls)}")
    found = [_pair(calls[i], layer, f"{path}.{i}") for i, layer in enumerate(layers)]
    if any(pair != found[0] for pair in found):
        raise _Failed(f"the layers of {path} differ: {found[0]} and {next(pair for pair in found if pair != found[0])}")
    gate, up, activation, down = found[0]
    total, scale = _sum(model, batch, layers, down, calls[0])
    states, masked = _at(calls[0], "").out.shape[:-1], "input_ids" in batch
    if masked and states != batch["input_ids"].shape:
        raise _Failed(f"layers return states {tuple(states)} and not (texts, tokens), so that padding cannot be told")
    together = gate not in (None, up) and _together(model, str(gate), up)
    try:
        attention = _attention(model, batch, layers, calls[0], {gate, up, down})
    except _Failed:
        attention = None
    return Architecture(f"{path}.{{}}", up, activation, down, gate, total, scale, attention, masked, together)


def _inputs(model: PreTrainedModel) -> Batch:
    """Random inputs, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    try:
        found = example_inputs(model, TOKENS)
    except Exception as error:  # the configuration may have any names
        raise _Failed(f"its inputs are unknown: {type(error).__name__}: {error}") from error
    return place(
        {
            name: torch.randn(x.shape, generator=generator).to(x.dtype)
            if x.is_floating_point()
            else x[..., torch.randperm(x.shape[-1], generator=generator)]
            for name, x in found.items()
        },
        model,
    )


def _layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The longest list of modules of one class that have linear layers; of an encoder, if there is a decoder, too."""
    lists = {
        name: part
        for name, part in model.base_model.named_modules()
        if isinstance(part, nn.ModuleList)
        and len({type(layer) for layer in part}) == 1
        and any(isinstance(m, nn.Linear | Conv1D) for m in part[0].modules())
        and not (model.config.is_encoder_decoder and "decoder" in name.split("."))
    }
    if not lists:
        raise _Failed("there is no list of layers of one class with linear layers")
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    name = max(outer, key=lambda name: len(lists[name]))
    return name, lists[name]


def _run(
    model: PreTrainedModel, batch: Batch, layers: nn.ModuleList, zero: str | None = None, places: Tensor | None = None
) -> dict[int, list[Call]]:
    """The calls inside each layer, that of the layer itself (named "") last.

    The outputs of the module `zero` of the first layer become zero, or those at `places` alone.
    """
    found: dict[int, list[Call]] = {}
    modules = {f"{i}/{name}": m for i, layer in enumerate(layers) for name, m in layer.named_modules()}

    def note(name: str, x: Any, out: Any) -> None:
        number, _, inner = name.partition("/")
        x, out = _first(x), _first(out)
        if all(isinstance(value, Tensor) and value.is_floating_point() for value in (x, out)):
            found.setdefault(int(number), []).append(
                Call(inner, modules[name], x.detach().clone(), out.detach().clone())
            )

    def without(name: str, x: Any, out: Tensor) -> Tensor:
        if places is None:
            return torch.zeros_like(out)
        return out.index_fill(-1, places.to(out.device), 0)

    try:
        with recording(modules, note), recording({} if zero is None else {zero: modules[f"0/{zero}"]}, without):
            model(**batch)
    except Exception as error:  # the model's code may raise anything
        shapes = {name: tuple(x.shape) for name, x in batch.items()}
        raise _Failed(f"it cannot be run on inputs {shapes}: {type(error).__name__}: {error}") from error
    for i, calls in found.items():
        if sum(call.name == "" for call in calls) > 1:
            raise _Failed(f"layer {i} is called more than once in a run: its weights are shared between depths")
    return found


def _pair(calls: list[Call], layer: nn.Module, where: str) -> tuple[str | None, str, str, str]:
    """The names of gate, first layer, activation and second layer."""
    linear = [call for call in calls if isinstance(call.module, nn.Linear | Conv1D)]
    functions = [call for first in linear for call in _functions(first, layer)]
    pairs: dict[tuple[str | None, str, str], str] = {}
    for activations in (functions, calls):  # a module is preferred to a function that it has as an attribute
        for gate, up, hidden in _hidden(activations, linear):
            for down in linear:
                if hidden.out.shape == down.x.shape and _same(hidden.out, down.x):
                    pairs[gate, up, down.name] = hidden.name  # the outermost module, which is recorded last
    found = [(gate, up, activation, down) for (gate, up, down), activation in pairs.items()]
    if len(found) == 1:
        return found[0]
    if found:
        raise _Failed(f"{where} has {len(found)} feed-forward blocks ({', '.join(pair[3] for pair in found)})")
    parts = {name.rpartition(".")[2] for name, _ in layer.named_modules()}
    experts = sorted(parts & {"experts", "router", "moe", "block_sparse_moe"})
    if experts:
        raise _Failed(f"{where} is a mixture of experts ({', '.join(experts)}), each of which sees other tokens")
    raise _Failed(
        f"in {where} no linear layer, activation and linear layer follow each other, where the activation is a module "
        f"or an attribute; its linear layers are {', '.join(call.name for call in linear) or 'none'}"
    )


def _hidden(activations: list[Call], linear: list[Call]) -> Iterator[tuple[str | None, str, Call]]:
    """What may be the input of a second layer, each with the names of its gate and first layer."""
    for first in linear:
        half = first.out.shape[-1] // 2
        for act in activations:
            if isinstance(act.module, nn.Linear | Conv1D) or not _elementwise(act):
                continue
            if act.x.shape == first.out.shape and _same(act.x, first.out):
                yield None, first.name, act
                for up in linear:
                    if up.name != first.name and up.out.shape == act.out.shape and _same(up.x, first.x):
                        yield first.name, up.name, act._replace(out=act.out * up.out)
            if act.x.shape == first.out[..., :half].shape and _same(act.x, first.out[..., :half]):
                yield first.name, first.name, act._replace(out=act.out * first.out[..., half:])


def _functions(first: Call, layer: nn.Module) -> Iterator[Call]:
    """Functions that are attributes of modules, as if they were called on the outputs of a first layer."""
    for owner, module in layer.named_modules():
        for name, function in vars(module).items():
            if name != "forward" and callable(function) and re.fullmatch(NAME, name):
                for x in (first.out, first.out[..., : first.out.shape[-1] // 2]):
                    try:
                        out = function(x)
                    except Exception:
                        continue
                    if isinstance(out, Tensor) and out.is_floating_point():
                        yield Call(".".join(filter(None, (owner, name))), _Function(function), x, out)


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def _elementwise(call: Call) -> bool:
    """Whether a module is a function of single numbers: half of its inputs give half its outputs. Not the identity."""
    half = call.x.shape[-1] // 2
    if call.name == "" or call.x.shape != call.out.shape or not half or _same(call.x, call.out):
        return False
    try:
        return _same(call.module.forward(call.x[..., :half]), call.out[..., :half])
    except Exception:  # a norm, for example, has as many weights as inputs
        return False


def _sum(
    model: PreTrainedModel, batch: Batch, layers: nn.ModuleList, down: str, calls: list[Call]
) -> tuple[str, str | None]:
    """The name of the module that reads the residual sum, or "", and of the parameter that scales the output."""
    after = _run(model, batch, layers, down)[0]
    y = _at(calls, down).out
    if not y.any():
        raise _Failed(f"the outputs of {down} are all zero, so that the residual sum cannot be told from others")
    scales: dict[str | None, Tensor] = {None: y}
    for name, p in layers[0].named_parameters():
        if p.shape in ((1,), (), y.shape[-1:]) and bool((y * p).any()):  # zeros would scale any output to no change
            scales[name] = y * p
    behind = [call for call in calls[[call.name for call in calls].index(down) + 1 :] if call.name]
    whole, zeroed = _at(calls, "").out, _at(after, "").out
    for scale, part in scales.items():
        if whole.numel() == y.numel() and _same(whole - zeroed, part.reshape(whole.shape)):
            return "", scale
    others = {call.name: call for call in after}
    for call in behind:
        if call.name not in others or call.x.numel() != y.numel() or not others[call.name].x.any():
            continue
        for scale, part in scales.items():
            if _same(call.x - others[call.name].x, part.reshape(call.x.shape)):
                return call.name, scale
    for i, call in enumerate(behind):  # a norm between block and sum
        if call.name not in others or call.x.shape != y.shape or not _same(call.x, y) or _same(call.out, call.x):
            continue
        change = call.out - others[call.name].out
        later = [(c.x, others[c.name].x) for c in behind[i + 1 :] if c.name in others and others[c.name].x.any()]
        for one, two in [*later, (whole, zeroed)]:
            if one.numel() == change.numel() and _same(one - two, change.reshape(one.shape)):
                return call.name, None
    raise _Failed(f"no tensor behind {down} is a sum with its output")


def _attention(
    model: PreTrainedModel, batch: Batch, layers: nn.ModuleList, calls: list[Call], taken: set[str | None]
) -> AttentionNames:
    """The names of self-attention in the first layer."""
    linear = [call for call in calls if isinstance(call.module, nn.Linear | Conv1D) and call.name not in taken]
    for out in linear:
        before = linear[: linear.index(out)]
        group = [call for call in before if call.x.shape == before[0].x.shape and _same(call.x, before[0].x)]
        if len(group) not in (1, 3):
            continue
        module = _common(*(call.name for call in group), out.name)
        if not module:
            continue
        order = sorted(group, key=lambda call: "q" not in call.name.rpartition(".")[2])  # otherwise as they are called
        first = order[0].name
        for names in _orders(order, AttentionNames(module, first, first, first, out.name, fixed=SEEN)):
            if _together(model, names.value, names.value):
                raise _Failed("files have queries, keys and values as one tensor")
            config: Any = model.base_model.config
            block = Attention("", 0, Architecture("", "", "", "", attention=names), layers[0], config, ())
            heads, groups = block.heads
            width = _at(group, names.value).out.shape[-1]
            if width % (heads + 2 * groups if block.fused else groups) or out.x.shape[-1] % heads:
                continue
            places = block.places("value") if block.fused else None
            if not _at(_run(model, batch, layers, names.value, places)[0], out.name).x.any():
                total, scale = _sum(model, batch, layers, out.name, calls)
                return replace(names, sum=total, scale=scale)
    raise _Failed("no linear layer reads heads of values")


def _orders(group: list[Call], names: AttentionNames) -> Iterator[AttentionNames]:
    """The ways in which linear layers of one input may be queries, keys and values."""
    if len(group) == 1:
        yield names
        yield replace(names, interleaved=True)
    for value in reversed(group[1:]):
        (key,) = (call.name for call in group[1:] if call is not value)
        yield replace(names, key=key, value=value.name)


def _common(*names: str) -> str:
    """The module that all these modules are part of."""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))


def _attention_holds(model: PreTrainedModel, batch: Batch) -> bool:
    """Whether equal attention, with the values of each head in reverse order, changes nothing."""
    before = _outputs(model, batch)
    for attention in find_attentions(model):
        size = attention.head_size
        weights = {part: attention.weight(part) for part in PARTS}
        biases = {part: attention.bias(part) for part in PARTS}
        weights["value"] = weights["value"].unflatten(0, (-1, size)).flip(1).flatten(0, 1)
        if biases["value"] is not None:
            biases["value"] = biases["value"].unflatten(0, (-1, size)).flip(1).flatten()
        columns, bias = attention.weight("out").unflatten(1, (-1, size)).flip(2).flatten(1), attention.bias("out")
        new = replace_attention_(attention, (size, size))
        try:
            new.fill_heads_(weights, biases).fill_out_(columns, bias)
            if not _same(_outputs(model, batch), before):
                return False
        finally:
            new.restore_()
    return True


def _together(model: PreTrainedModel, gate: str, up: str) -> bool:
    """Whether transformers splits one tensor of a file into these two layers."""
    ends = [name.rpartition(".")[2] for name in (gate, up)]
    for rule in get_model_conversion_mapping(model):
        targets = rule.target_patterns if isinstance(rule.target_patterns, list) else [rule.target_patterns]
        if len(targets) > 1 and all(any(end in str(target) for target in targets) for end in ends):
            return True
    return False


def _verify(model: PreTrainedModel, row: Architecture, batch: Batch) -> None:
    """Compare the blocks that the row names with what runs, and swap each for an equal one."""
    ffns, seen = find_ffns(model), list[Observation]()
    with observe(ffns, lambda _, observation: seen.append(observation)):
        before = _outputs(model, batch)
    for ffn, one in zip(ffns, seen, strict=True):
        if not _same(ffn.forward(one.inputs), one.outputs):
            raise _Failed(f"the weights of {ffn.name} do not compute the outputs of its {row.down}")
    inputs = ActivationCache(model, [batch]).advance(ffns[-1]).inputs[0]
    if not _same(inputs, seen[-1].inputs.flatten(0, -2)):
        raise _Failed("the layers do not run one behind the other")
    for ffn in ffns:
        with _swapped(ffn):
            if not _same(_outputs(model, batch), before):
                raise _Failed(f"an equal block in place of that of {ffn.name} changes the model's outputs")


@contextmanager
def _swapped(ffn: Any) -> Iterator[None]:
    """The block with its neurons in reverse order."""
    new = replace_(ffn, "atoms", ffn.width).copy_rows_(torch.arange(ffn.width).flip(0))
    try:
        yield
    finally:
        new.restore_()


def _outputs(model: PreTrainedModel, batch: Batch) -> Tensor:
    found = model(**batch)
    values = found.values() if isinstance(found, Mapping) else found
    return torch.cat([x.flatten().float() for x in values if isinstance(x, Tensor)])


def _at(calls: list[Call], name: str) -> Call:
    return next(call for call in calls if call.name == name)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) and value else value


def _same(a: Any, b: Tensor) -> bool:
    """Equal up to rounding, in the precision of the tensors."""
    if not isinstance(a, Tensor) or a.shape != b.shape:
        return False
    exact = torch.finfo(b.dtype).eps if b.is_floating_point() else 0
    most = float(b.detach().float().abs().max()) if b.numel() else 0
    return bool(((a - b).float().abs() <= 500 * exact * (most + 1e-6)).all())
