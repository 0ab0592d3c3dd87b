r"""Plain checkpoints: a compressed model as a smaller one of its family, which loads without snnk.

A block with m neurons is a block with n > m neurons whose other weights are 0, and a head of r dimensions is one of
s > r dimensions whose other weights are 0:

    A f(W' x + b') + c = (A 0) f((W'; 0) x + (b'; 0)) + c          q'k = (q; 0)'(k; 0)

If the configuration of the family has fields for these sizes, one for all layers (`ConfigNames` in architectures.py),
the model with the largest size of any block returns the same outputs. The zeros cost multiply-adds, of which `MOST` is
the largest part that is accepted. Where dot products are divided by the root of the head size, queries are multiplied
by the root of s over the old head size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from snnk.hf.compression.plans import BlockPlan, Plan, option, width_of
from snnk.hf.finding import find_attentions, find_blocks
from snnk.hf.folders import some
from snnk.hf.low_rank import PARTS, ToHeads
from snnk.hf.model_blocks import FFN, KEPT, Attention, ModelBlock
from snnk.hf.models import quiet
from snnk.hf.replace import BIASED, LOW_RANK

MOST = 0.05  # of the multiply-adds of all blocks: what zeros may add to a model that is saved without being asked for
FITS = (KEPT, "atoms", "drop", LOW_RANK)  # kinds of blocks that have their place in a larger block of the original kind
FORMATS = ("auto", "plain", "snnk")


@dataclass(frozen=True)
class Fit:
    """Whether a compressed model is a model of its family, and why.

    Args:
        config: the configuration of the plain model; None if the family has no such model.
        reason: in words, as the report has it.
        padding: multiply-adds with zeros, over those of the blocks of the compressed model.
        advice: options of `snnk compress` with which there would be no zeros; "" if there are none.
    """

    config: PretrainedConfig | None
    reason: str
    padding: float = 0.0
    advice: str = ""

    @property
    def cheap(self) -> bool:
        """Whether the model can be plain, and zeros cost little."""
        return self.config is not None and self.padding <= MOST


@dataclass(frozen=True)
class _Need:
    """What a plain block must have to hold a compressed one."""

    kind: str
    sizes: tuple[int, ...]  # neurons; or dimensions per head, of queries and keys, and of values
    multiply_adds: int
    bias: bool  # whether its last layer adds something that no input changes


def fit_of(model: PreTrainedModel) -> Fit:
    """Whether a compressed model is a model of its family.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from snnk.hf.finding import find_ffns
        >>> from snnk.hf.replace import replace_
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> new = [replace_(ffn, "atoms", 16) for ffn in find_ffns(model)]
        >>> fit_of(model).config.intermediate_size, fit_of(model).reason
        (16, 'its sizes are fields of the configuration of bert models (intermediate_size 16)')
        >>> new = replace_(find_ffns(model)[0], "linear")
        >>> fit_of(model).reason
        'encoder.layer.0 is linear now, which no layer of bert models is'
    """
    stored: Any = getattr(model.config, "quantization_config", None)
    if getattr(stored, "pooler", None) is not None:
        return Fit(None, f"the pooler was replaced, and {_family(model)} have no such pooler")
    entries = getattr(stored, "blocks", {})
    needs = {}
    for block in find_blocks(model):
        entry = entries.get(block.name, {"kind": KEPT})
        bias = getattr(block.linears[-1], "bias", None)
        sizes = _sizes(block, entry["kind"], entry.get("num_features"), entry.get("ranks"))
        needs[block.name] = _Need(entry["kind"], sizes, block.multiply_adds, bias is not None and bool(bias.any()))
    return _fit(model, needs)


def planned_fit(model: PreTrainedModel, plan: Plan) -> Fit:
    """Whether a model will be one of its family after it is compressed by a plan; the model is still the original."""
    planned = {block.name: block for block in plan.blocks}
    needs = {}
    for block in find_blocks(model):
        becomes = planned.get(block.name) or option(block, KEPT)
        sizes = _sizes(block, becomes.kind, becomes.num_features, becomes.ranks)
        bias = becomes.kind != KEPT and becomes.new_bias and sizes[-1] < width_of(block)
        needs[block.name] = _Need(becomes.kind, sizes, becomes.multiply_adds, bias)
    return _fit(model, needs)


def without_new_biases(model: PreTrainedModel, plan: Plan) -> Plan:
    """The plan, with no new biases where the configuration of the model's family cannot switch them on."""
    by_name = {block.name: block for block in find_blocks(model)}

    def changed(planned: BlockPlan) -> BlockPlan:
        block = by_name[planned.name]
        names = block.row.config
        switch = names.biases if isinstance(block, FFN) else names.attention_biases
        if planned.kind not in BIASED or switch or block.linears[-1].bias is not None:
            return planned
        return option(block, planned.kind, planned.num_features, planned.predicted_error, planned.ranks, new_bias=False)

    return replace(plan, blocks=tuple(map(changed, plan.blocks)))


def has_head_sizes(model: PreTrainedModel) -> bool:
    """Whether the configuration of a model can have fewer dimensions per head."""
    found = find_attentions(model)
    return bool(found) and all(block.row.config.head_size and not block.names.fixed for block in found)


def check_plan(model: PreTrainedModel, plan: Plan) -> Plan:
    """The plan, changed so that a plain model comes of it; a ValueError if none does, or if zeros cost too much."""
    plan = without_new_biases(model, plan)
    fit = planned_fit(model, plan)
    if not fit.cheap:
        advice = f"use {fit.advice}, or" if fit.advice else "use"
        raise ValueError(f"the model cannot be saved as plain: {fit.reason}; {advice} --format snnk")
    return plan


def plain_model(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model with the outputs of a compressed one, up to rounding; a ValueError if its family has none.

    Args:
        model: compressed by `snnk.hf.compress_`; it stays as it is, and may share tensors with the new one.

    Returns:
        A model of the same class that `save_pretrained` saves and that transformers loads without snnk.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from snnk.hf.finding import find_ffns
        >>> from snnk.hf.replace import replace_
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> for ffn, count in zip(find_ffns(model), (15, 16)):
        ...     _ = replace_(ffn, "atoms", count).copy_rows_(range(count))
        >>> new = plain_model(model)
        >>> new.config.intermediate_size, new.encoder.layer[0].output.dense.weight.shape
        (16, torch.Size([8, 16]))
    """
    fit = fit_of(model)
    if fit.config is None:
        raise ValueError(f"the model cannot be plain: {fit.reason}")
    tensors = _tensors(model, _skeleton(model, fit.config))
    kind: Any = type(model)
    with quiet():
        made, info = kind.from_pretrained(
            None,
            config=copy.deepcopy(fit.config),
            state_dict=tensors,
            dtype=model.dtype,
            attn_implementation=model.config._attn_implementation,
            output_loading_info=True,
            trust_remote_code=False,
        )
    wrong = [str(key) for name in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[name]]
    if wrong:
        raise ValueError(f"a plain {kind.__name__} does not have the tensors of the compressed one: {some(wrong)}")
    if model.can_generate():
        made.generation_config = copy.deepcopy(model.generation_config)
    return made.to(model.device).train(model.training)


def choose(model: PreTrainedModel, asked: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model to save, plain or as it is, and the format, the reason and the padding, as report.json has them.

    Args:
        model: compressed.
        asked: "plain", also if zeros cost much; "auto", if they cost little; or "snnk".
    """
    fit = fit_of(model)
    if not hasattr(model.config, "quantization_config"):
        return model, {"format": "plain", "reason": fit.reason, "padding": 0.0}
    reason = "it was asked for" if asked == "snnk" else fit.reason
    if asked != "snnk" and fit.config is not None and (fit.cheap or asked == "plain"):
        try:
            return plain_model(model), {"format": "plain", "reason": reason, "padding": fit.padding}
        except Exception as error:  # of a class of transformers; the compressed model must not be lost
            reason = f"a plain model could not be made: {error}"
    return model, {"format": "snnk", "reason": reason, "padding": 0.0}


def _fit(model: PreTrainedModel, needs: Mapping[str, _Need]) -> Fit:
    """The plain model with the least sizes that hold all blocks."""
    blocks, family = find_blocks(model), _family(model)
    replaced = [block for block in blocks if needs[block.name].kind != KEPT]
    memo: dict[int, Any] = {}
    config = copy.deepcopy(model.config, memo)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if getattr(config, "snnk_pooling", None) is not None:
        return Fit(None, "its classifier reads means over tokens, which no class of transformers does")
    if not replaced:
        return Fit(config, "no block was replaced")
    for block in replaced:
        if block.found is not None:
            return Fit(None, f"the fields of the configuration of {family} are not known to snnk")
        kind = needs[block.name].kind
        if kind not in FITS:
            return Fit(None, f"{block.name} is {kind} now, which no layer of {family} is")
    memo[id(model.config)] = config
    if any(id(block.config) not in memo for block in replaced):
        return Fit(None, f"the blocks of {family} have a configuration of their own")
    fields, causes = _set_sizes(model, needs, memo)
    plain = {block.name: block for block in find_blocks(_skeleton(model, config))}
    for block in replaced:
        if needs[block.name].bias and plain[block.name].linears[-1].bias is None:
            switch = block.row.config.biases if isinstance(block, FFN) else block.row.config.attention_biases
            if not switch:
                return Fit(None, f"the fit gave {block.name} a bias, for which {family} have no place")
            setattr(memo[id(block.config)], switch, True)
            fields[switch] = True
    skeleton = _skeleton(model, config)
    clash = _clash(model, skeleton, replaced)
    if clash:
        return Fit(None, f"{some(fields)} in the configuration of {family} would also change {some(clash)}")
    work = sum(need.multiply_adds for need in needs.values())
    padding = sum(block.multiply_adds for block in find_blocks(skeleton)) / max(1, work) - 1
    shown = ", ".join(f"{name} {value}" for name, value in fields.items())
    where = (
        f"its sizes are fields of the configuration of {family} ({shown})" if shown else "all blocks have their size"
    )
    if padding <= 0:
        return Fit(config, where, 0.0)
    zeros = f"add {padding:.1%} to the multiply-adds of all blocks"
    why = f"as {' and '.join(causes)}"
    if padding <= MOST:
        return Fit(config, f"{where}; zeros {zeros}, {why}", padding)
    advice = " and ".join(causes.values()) if all(causes.values()) else ""
    return Fit(config, f"zeros would {zeros}, more than {MOST:.0%}, {why}", padding, advice)


def _set_sizes(
    model: PreTrainedModel, needs: Mapping[str, _Need], copies: Mapping[int, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Set the fields in copies of the configurations; return them, and why some blocks get zeros, with advice."""
    fields: dict[str, Any] = {}
    causes: dict[str, str] = {}
    blocks, family = find_blocks(model), _family(model)
    replaced = [block for block in blocks if needs[block.name].kind != KEPT]
    groups = {(id(block.config), isinstance(block, FFN)): block for block in replaced}
    for (owner, feed_forward), first in groups.items():
        names, config = first.row.config, copies[owner]
        field = names.width if feed_forward else names.head_size
        what = "neurons per block" if feed_forward else "dimensions per head"
        members = [b for b in blocks if id(b.config) == owner and isinstance(b, FFN) == feed_forward]
        sizes = {size for block in members for size in needs[block.name].sizes}
        if isinstance(first, Attention) and first.names.fixed:
            causes[f"queries and keys of {family} keep their {what}"] = "--blocks ffn"
        elif not field:
            advice = "" if feed_forward else "--blocks ffn"
            causes[f"the configuration of {family} has no field for {what}"] = advice
        elif len(sizes) > 1:
            causes[f"the {what} are from {min(sizes)} to {max(sizes)}"] = "--equal and --layers all without a plan"
        if not field:
            continue
        unit = getattr(config, names.per) if feed_forward and names.per else 1
        if any(size % unit for size in sizes):
            causes[f"{field} counts {unit} {what}"] = f"a --keep that leaves a multiple of {unit} neurons per block"
        tower = "" if config is copies[id(model.config)] else f"{config.model_type}."
        fields[tower + field] = max(1, -(-max(sizes) // unit))
        setattr(config, field, fields[tower + field])
    return fields, causes


def _clash(model: PreTrainedModel, skeleton: PreTrainedModel, replaced: Iterable[ModelBlock]) -> list[str]:
    """Names of tensors outside of the replaced blocks that the plain model has in another shape, or not at all."""
    layers = {id(block.layer) for block in replaced}
    inside = tuple(f"{name}." for name, module in model.named_modules() if id(module) in layers)
    before, after = model.state_dict(), skeleton.state_dict()
    new = [key for key in after.keys() - before.keys() if not key.endswith(".bias")]
    found = [key for key in before if key not in after or before[key].shape != after[key].shape]
    return sorted(key for key in [*new, *found] if not key.startswith(inside))


def _tensors(model: PreTrainedModel, skeleton: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the plain model whose shapes are those of `skeleton`."""
    found = {key: tensor for key, tensor in model.state_dict().items() if key in skeleton.state_dict()}
    names = {id(module): name for name, module in skeleton.named_modules()}
    plain = {block.name: block for block in find_blocks(skeleton)}
    for block in find_blocks(model):
        new = plain[block.name]
        if isinstance(block, FFN) and isinstance(new, FFN) and block.kind != KEPT:
            layers = _ffn_tensors(block, new)
        elif isinstance(block, Attention) and isinstance(new, Attention) and block.kind != KEPT:
            layers = _attention_tensors(block, new)
        else:
            continue
        for which, (weight, bias) in layers.items():
            layer, name = new.slot(which), names[id(new.slot(which))]
            found[f"{name}.weight"] = (weight.T if isinstance(layer, Conv1D) else weight).contiguous()
            found.pop(f"{name}.bias", None)
            if layer.bias is not None and bias is not None:
                found[f"{name}.bias"] = bias.contiguous()
    for key, tensor in skeleton.state_dict().items():
        if key not in found and key.endswith(".bias"):
            weight = found[f"{key.removesuffix('.bias')}.weight"]
            found[key] = torch.zeros(tensor.shape, dtype=weight.dtype, device=weight.device)
    return found


Layers = dict[str, tuple[Tensor, Tensor | None]]  # name in the row -> weight (out, in) and bias (out,)


@torch.no_grad()
def _ffn_tensors(block: FFN, new: FFN) -> Layers:
    """The linear layers of a plain feed-forward block that computes what a compressed one does."""
    down: Any = block.linears[-1]
    if block.kind == "drop":
        weight = new.down_weight()
        empty = torch.zeros(0, new.in_features, dtype=down.bias.dtype, device=down.bias.device)
        parts: Layers = dict.fromkeys(("up", "gate"), (empty, None))
        last = torch.zeros(weight.shape[0], 0, dtype=empty.dtype, device=empty.device)
    else:
        gate = block.gate_weight()
        parts = {"up": (block.up_weight(), block.up_bias())}
        parts |= {} if gate is None else {"gate": (gate, block.gate_bias())}
        last = block.down_weight()
    wide = {
        name: (_longer(weight, new.width), None if bias is None else _longer(bias, new.width))
        for name, (weight, bias) in parts.items()
    }
    found: Layers = {"down": (F.pad(last, (0, new.width - last.shape[1])), down.bias)}
    if not new.fused:
        return found | {name: wide[name] for name in (("up", "gate") if new.gated else ("up",))}
    (gates, gate_bias), (ups, up_bias) = wide["gate"], wide["up"]
    both = None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])
    return {**found, "up": (torch.cat([gates, ups]), both)}


@torch.no_grad()
def _attention_tensors(block: Attention, new: Attention) -> Layers:
    """The linear layers of a plain attention block that computes what a compressed one does."""
    size, found = new.head_size, Layers()
    factor = (size / block.head_size) ** 0.5 if block.row.config.scaled else 1.0
    for name in ("query",) if block.fused else PARTS:
        layer: ToHeads = block.slot(name)
        parts = PARTS if block.fused else (name,)
        count = sum(new.heads[0] if part == "query" else new.heads[1] for part in parts) * size
        weight = layer.weight.new_zeros(count, layer.in_features)
        bias = None if layer.bias is None else layer.bias.new_zeros(count)
        cuts = [h * r for h, r in zip(layer.heads, layer.ranks, strict=True)]
        for part, heads, rows in zip(parts, layer.heads, torch.arange(sum(cuts)).split(cuts), strict=True):
            places = new.places(part).view(heads, size)[:, : len(rows) // heads].flatten()
            times = factor if part == "query" else 1.0
            weight[places] = layer.weight[rows] * times
            if bias is not None:
                bias[places] = layer.bias[rows] * times
        found[name] = (weight, bias)
    out: Any = block.slot("out")
    columns = F.pad(out.weight.unflatten(1, (out.heads, out.rank)), (0, size - out.rank)).flatten(1)
    return {**found, "out": (columns, out.bias)}


def _longer(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows of zeros behind its own."""
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def _skeleton(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """A model of the same class on the meta device, which has shapes and no numbers."""
    kind: Any = type(model)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return kind(copy.deepcopy(config))


def _sizes(block: ModelBlock, kind: str, count: int | None, ranks: Any) -> tuple[int, ...]:
    """Neurons, or dimensions per head, that a plain block needs."""
    if ranks is not None:
        return tuple(ranks)
    return (0 if kind == "drop" else count or width_of(block),)


def _family(model: PreTrainedModel) -> str:
    return f"{model.config.model_type} models"
