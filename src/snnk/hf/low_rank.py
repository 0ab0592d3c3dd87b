r"""Attention with fewer dimensions per head: linear layers that stand in for those of queries, keys, values and output.

    queries, keys    q_h = Aq_h x + aq_h, k_h = Ak_h x + ak_h    r dimensions per head
    values           v_h = Av_h x + av_h                         t dimensions per head
    output           y = B (c_1, ..., c_H) + b                   c_h, values of head h mixed over tokens, t dimensions

The attention module itself stays, so that masks, caches, dropout and every implementation of attention work as before.
It reads heads of one size for all three, and so shorter heads are padded with zeros to that size: to the longer of r
and t where the module has an attribute with the head size, and to the original size where it has none. Zeros change
neither dot products nor mixed values. The factor of the dot products stays that of the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk import _checks
from snnk.hf.model_blocks import FFN, KEPT, Attention, Cost, ModelBlock
from snnk.hf.replace import LOW_RANK, Entry, FactoryKwargs, Replacement, note_, place_of, rebuild_, set_slot

PARTS = ("query", "key", "value")


class ToHeads(nn.Linear):
    """A linear layer whose outputs are heads, padded with zeros: (*, in) -> (*, dimensions of all heads).

    Args:
        in_features: size of the input.
        heads, ranks: number of heads, and of dimensions per head, for each part: queries, keys or values, or all of
            them if one layer computes them all.
        head_size: dimensions per head behind the padding.
        full_size: dimensions per head in the original.
        interleaved: whether the outputs are in the order (head, part, dimension) instead of (part, head, dimension).

    Example:
        >>> ToHeads(8, heads=[2], ranks=[3], head_size=4, full_size=6)(torch.ones(5, 8)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        in_features: int,
        *,
        heads: Sequence[int],
        ranks: Sequence[int],
        head_size: int,
        full_size: int,
        interleaved: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        count = sum(h * r for h, r in zip(heads, ranks, strict=True))
        super().__init__(in_features, count, bias, device=device, dtype=dtype)
        self.heads, self.ranks, self.interleaved = tuple(heads), tuple(ranks), interleaved
        self.head_size, self.full_size = head_size, full_size

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if all(rank == self.head_size for rank in self.ranks) and not (self.interleaved and len(self.ranks) > 1):
            return out
        sizes = [h * r for h, r in zip(self.heads, self.ranks, strict=True)]
        # a split into one part would be a node of its own in exported graphs
        parts = [
            F.pad(part.unflatten(-1, (h, r)), (0, self.head_size - r))
            for part, h, r in zip(
                out.split(sizes, -1) if len(sizes) > 1 else [out], self.heads, self.ranks, strict=True
            )
        ]
        if self.interleaved:
            return torch.stack(parts, -2).flatten(-3)
        return parts[0].flatten(-2) if len(parts) == 1 else torch.cat([part.flatten(-2) for part in parts], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.heads}, ranks={self.ranks}, head_size={self.head_size}"


class FromHeads(nn.Linear):
    """A linear layer that reads the first dimensions of each head: (*, heads * head size) -> (*, out).

    Example:
        >>> FromHeads(heads=2, rank=3, head_size=4, out_features=5)(torch.ones(7, 8)).shape
        torch.Size([7, 5])
    """

    def __init__(
        self,
        *,
        heads: int,
        rank: int,
        head_size: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(heads * rank, out_features, bias, device=device, dtype=dtype)
        self.heads, self.rank, self.head_size = heads, rank, head_size

    def kept_dimensions(self, x: Tensor) -> Tensor:
        """The dimensions that the weight multiplies: (*, heads * head size) -> (*, heads * rank)."""
        return x if self.rank == self.head_size else x.unflatten(-1, (self.heads, -1))[..., : self.rank].flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.kept_dimensions(x))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.heads}, rank={self.rank}, head_size={self.head_size}"


@dataclass(eq=False)
class LowRank:
    """The new layers of an attention block, to be filled, and the old ones, to be put back.

    `to_heads` has one layer for all if the original has, and otherwise one each for "query", "key" and "value".
    """

    attention: Attention
    ranks: tuple[int, int]
    to_heads: dict[str, ToHeads]
    out: FromHeads
    original: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.to_heads.values(), self.out]

    @torch.no_grad()
    def fill_heads_(self, weights: dict[str, Tensor], biases: dict[str, Tensor | None]) -> LowRank:
        """Set queries, keys and values: (heads * rank, in) and (heads * rank,), None where the original has none."""
        for name, layer in self.to_heads.items():
            parts = PARTS if self.attention.fused else (name,)
            layer.weight.copy_(_checks.finite(torch.cat([weights[part] for part in parts]), f"weight of {name}"))
            found = [biases[part] for part in parts]
            if layer.bias is not None:
                layer.bias.copy_(torch.cat([bias for bias in found if bias is not None]))
        return self

    @torch.no_grad()
    def fill_out_(self, weight: Tensor, bias: Tensor | None) -> LowRank:
        """Set the output layer: (out, heads * rank) and (out,), None for zeros."""
        self.out.weight.copy_(_checks.finite(weight, "weight of out"))
        if self.out.bias is not None:
            _ = self.out.bias.zero_() if bias is None else self.out.bias.copy_(bias)
        return self

    def restore_(self) -> None:
        """Put the old layers and head sizes back."""
        for path, module in self.original["slots"].items():
            set_slot(self.attention.layer, path, module)
        _set_sizes(self.attention, self.original["size"])
        note_(self.attention.configs, self.attention.name, self.original["entry"], self.attention.found)


def cost_after(attention: Attention, ranks: Sequence[int], *, new_bias: bool = True) -> Cost:
    """The cost of an attention block after `replace_attention_`; the block itself stays as it is."""
    (heads, groups), (r, t), d = attention.heads, ranks, attention.in_features
    matrices = d * (r * (heads + groups) + t * groups) + heads * t * attention.out_features
    biases = sum(
        count * rank
        for name, count, rank in (("query", heads, r), ("key", groups, r), ("value", groups, t))
        if attention.bias(name) is not None
    )
    biases += attention.out_features if _has_bias(attention, t, new_bias) else 0
    return Cost(matrices + biases, matrices)


def replace_attention_(attention: Attention, ranks: Sequence[int], *, new_bias: bool = True) -> LowRank:
    """Put layers with fewer dimensions per head, filled with zeros, in place of those of an attention block.

    Args:
        attention: a block of `find_attentions`, as the model was made.
        ranks: dimensions per head of queries and keys, and of values.
        new_bias: whether the output layer gets a bias where the original has none.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from snnk.hf.finding import find_attentions
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> replace_attention_(find_attentions(model)[0], (2, 3)).out.weight.shape
        torch.Size([8, 6])
        >>> model(torch.zeros(1, 5, dtype=torch.long)).last_hidden_state.shape
        torch.Size([1, 5, 8])
    """
    if attention.kind != KEPT:
        raise ValueError(f"{attention.name} was replaced before ({attention.kind}); start from the original model")
    r, t = check_ranks(attention, ranks)
    names, (heads, groups), full = attention.names, attention.heads, attention.head_size
    old = {name: attention.slot(name) for name in (*PARTS, "out")}
    place = place_of(attention.weight("query"))
    size = max(r, t) if names.size else full
    shared = {"head_size": size, "full_size": full}
    counts, sizes = {"query": heads, "key": groups, "value": groups}, {"query": r, "key": r, "value": t}
    groups_of_parts = {"query": PARTS} if attention.fused else {name: (name,) for name in PARTS}
    to_heads = {
        name: _zeros_(
            ToHeads(
                attention.in_features,
                heads=[counts[part] for part in parts],
                ranks=[sizes[part] for part in parts],
                interleaved=names.interleaved,
                bias=old[name].bias is not None,
                device="meta",
                dtype=place["dtype"],
                **shared,
            ),
            place,
        )
        for name, parts in groups_of_parts.items()
    }
    out = FromHeads(
        heads=heads,
        rank=t,
        head_size=size,
        out_features=attention.out_features,
        bias=_has_bias(attention, t, new_bias),
        device="meta",
        dtype=place["dtype"],
    )
    _zeros_(out, place)
    slots = {getattr(names, name): module for name, module in old.items()}
    entries = getattr(getattr(attention.configs[0], "quantization_config", None), "blocks", {})
    original = {"slots": slots, "size": full, "entry": entries.get(attention.name), **old}
    entry: Entry = {"kind": LOW_RANK, "ranks": [r, t], **({} if new_bias else {"bias": False})}
    note_(attention.configs, attention.name, entry, attention.found)
    for name, module in (*to_heads.items(), ("out", out)):
        set_slot(attention.layer, getattr(names, name), module)
    _set_sizes(attention, size)
    attention.layer.train(attention.layer.training)
    return LowRank(attention, (r, t), to_heads, out, original)


def rebuild_block_(block: ModelBlock, entry: Entry, room: int) -> Replacement | LowRank:
    """Put back what replaced a block, from its JSON; `room`, the bytes of the file, bounds what is allocated."""
    if isinstance(block, FFN) and entry.get("kind") != LOW_RANK:
        return rebuild_(block, entry, room)
    if isinstance(block, Attention) and entry.get("kind") == LOW_RANK:
        return replace_attention_(block, entry["ranks"], new_bias=entry.get("bias", True))
    raise ValueError(f"{block.name} is a {type(block).__name__} block, which cannot become {entry.get('kind')!r}")


def check_ranks(attention: Attention, ranks: object) -> tuple[int, int]:
    """Return ranks that the attention block can have, and refuse others."""
    full, name = attention.head_size, attention.name
    r, t = _checks.ranks(ranks, name)
    if max(r, t) > full:
        raise ValueError(f"the heads of {name} have {full} dimensions; got ranks {[r, t]}")
    if attention.names.fixed and r != full:
        raise ValueError(
            f"queries and keys of {name} keep their {full} dimensions per head: {attention.names.fixed}; "
            f"got ranks {[r, t]}"
        )
    return r, t


def _has_bias(attention: Attention, rank: int, new_bias: bool) -> bool:
    # At the full rank the shapes are the old ones, and a file must not have a bias that plain transformers ignores.
    return (new_bias and rank < attention.head_size) or attention.bias("out") is not None


def _set_sizes(attention: Attention, size: int) -> None:
    for path in attention.names.size:
        owner, _, name = path.rpartition(".")
        setattr(attention.layer.get_submodule(owner), name, size)


def _zeros_(layer: Any, place: FactoryKwargs) -> Any:
    layer.to_empty(device=place["device"])
    for parameter in layer.parameters():
        parameter.data.zero_()
    return layer
