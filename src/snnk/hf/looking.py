"""The row of a model whose type is not in the table, found by running the model and looking at every module's call.

In each layer, a linear layer, an activation and a linear layer whose numbers follow from each other are the block; the
tensor that changes by the block's output, and by nothing else, when that output is set to zero is the residual sum. A
row is used only after it was verified on all layers: the block computes what its weights say, and an equal block with
its neurons in another order changes nothing. Otherwise a ValueError names the step that failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from snnk.hf.architectures import Architecture, find_ffns, kind_of
from snnk.hf.models import Batch, evaluating, example_inputs, place
from snnk.hf.record import ActivationCache, Observation, observe, recording
from snnk.hf.replace import NAME, check_row, replace_

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


def row_by_looking(model: PreTrainedModel) -> Architecture:
    """The verified row of a model; a ValueError if there is none.

    Example:
        >>> from transformers import PhiConfig, PhiModel
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> row = row_by_looking(PhiModel(PhiConfig(vocab_size=9, **sizes)))
        >>> row.block, row.up, row.down
        ('layers.{}', 'mlp.fc1', 'mlp.fc2')
    """
    base = model.base_model
    written = getattr(getattr(model.config, "quantization_config", None), "row", None)
    if base not in _rows and written is not None:
        use_row(model, written)
    if base not in _rows:
        try:
            with evaluating(model), torch.no_grad():
                _rows[base] = row = _look(model)
                _verify(model, row, _inputs(model))
        except BaseException as error:
            _rows.pop(base, None)
            if not isinstance(error, Exception):
                raise
            why = error if isinstance(error, _Failed) else f"{type(error).__name__}: {error}"  # of the model's code
            raise ValueError(
                f"the blocks of a {kind_of(model.config)!r} model were not found by looking at a run of it: {why}. "
                "A row in snnk.hf.architectures adds a type"
            ) from error
    return _rows[base]


def use_row(model: PreTrainedModel, names: Mapping[str, Any]) -> None:
    """Use a row from a file, whose names are checked to be those of modules and parameters of the model."""
    row, base = Architecture(**check_row(names)), model.base_model
    path = row.block.removesuffix(".{}")
    try:
        for layer in base.get_submodule(path).children():
            for which in ("up", "down", "gate", "sum"):
                layer.get_submodule(getattr(row, which) or "")
            owner, _, name = row.activation.rpartition(".")
            if not callable(getattr(layer.get_submodule(owner), name)):
                raise AttributeError(f"{row.activation} is no function")
            if row.scale is not None:
                layer.get_parameter(row.scale)
    except AttributeError as error:
        raise ValueError(f"row of quantization_config names modules that the model does not have: {error}") from error
    _rows[base] = row


def _look(model: PreTrainedModel) -> Architecture:
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
    masked = "input_ids" in batch and _at(calls[0], down).out[..., 0].numel() == batch["input_ids"].numel()
    together = gate not in (None, up) and _together(model, str(gate), up)
    return Architecture(f"{path}.{{}}", up, activation, down, gate, total, scale, masked=masked, together=together)


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
    model: PreTrainedModel, batch: Batch, layers: nn.ModuleList, change: Mapping[str, nn.Module] | None = None
) -> dict[int, list[Call]]:
    """The calls inside each layer, that of the layer itself (named "") last; outputs of `change` become zero."""
    found: dict[int, list[Call]] = {}
    modules = {f"{i}/{name}": m for i, layer in enumerate(layers) for name, m in layer.named_modules()}

    def note(name: str, x: Any, out: Any) -> None:
        number, _, inner = name.partition("/")
        x, out = _first(x), _first(out)
        if all(isinstance(value, Tensor) and value.is_floating_point() for value in (x, out)):
            found.setdefault(int(number), []).append(
                Call(inner, modules[name], x.detach().clone(), out.detach().clone())
            )

    try:
        with recording(modules, note), recording(change or {}, lambda name, x, out: torch.zeros_like(out)):
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
    after = _run(model, batch, layers, {"down": layers[0].get_submodule(down)})[0]
    y = _at(calls, down).out
    if not y.any():
        raise _Failed(f"the outputs of {down} are all zero, so that the residual sum cannot be told from others")
    scales: dict[str | None, Tensor] = {None: y}
    for name, p in layers[0].named_parameters():
        if p.shape in ((1,), (), y.shape[-1:]):
            scales[name] = y * p
    behind = [call for call in calls[[call.name for call in calls].index(down) + 1 :] if call.name]
    whole, zeroed = _at(calls, "").out, _at(after, "").out
    for scale, part in scales.items():
        if whole.numel() == y.numel() and _same(whole - zeroed, part.reshape(whole.shape)):
            return "", scale
    for call in behind:
        other = next((c for c in after if c.name == call.name), None)
        if other is None or call.x.numel() != y.numel() or not other.x.any():
            continue
        for scale, part in scales.items():
            if _same(call.x - other.x, part.reshape(call.x.shape)):
                return call.name, scale
    for call in behind:  # a norm between block and sum
        other = next((c for c in after if c.name == call.name), None)
        if other is None or call.x.shape != y.shape or not _same(call.x, y) or call.out.numel() != whole.numel():
            continue
        if not _same(call.out, call.x) and _same(whole - zeroed, (call.out - other.out).reshape(whole.shape)):
            return call.name, None
    raise _Failed(f"no tensor behind {down} is a sum with its output")


def _together(model: PreTrainedModel, gate: str, up: str) -> bool:
    """Whether transformers splits one tensor of a file into these two layers."""
    ends = [name.rpartition(".")[2] for name in (gate, up)]
    for rule in get_model_conversion_mapping(model):
        targets = rule.target_patterns if isinstance(rule.target_patterns, list) else [rule.target_patterns]
        if all(any(end in str(target) for target in targets) for end in ends):
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
