"""The blocks of a model, found by the row of its architecture, and the choice of some of its layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from snnk import _checks
from snnk.hf.architectures import REFUSED, Architecture, kind_of, row_of
from snnk.hf.model_blocks import FFN, KEPT, Attention, ModelBlock, part_at


def find_ffns(model: PreTrainedModel) -> list[FFN]:
    """The feed-forward blocks of a model with any head, by depth; a ValueError if its blocks cannot be replaced.

    Args:
        model: of a type in ARCHITECTURES, or of any other, if its blocks can be found and verified by running it.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> [(ffn.name, ffn.in_features, ffn.width) for ffn in find_ffns(model)]
        [('encoder.layer.0', 8, 3072), ('encoder.layer.1', 8, 3072)]
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel; got {type(model).__name__}; unwrap it first")
    base, kind, ffns = model.base_model, kind_of(model.config), list[FFN]()
    configs: dict[int, Any] = {id(config): config for config in (base.config, model.config)}
    if kind in REFUSED:
        raise ValueError(f"the blocks of a {kind!r} model cannot be replaced: {REFUSED[kind]}")
    rows = rows_of(model)
    if not rows:
        from snnk.hf.discovery import discover  # late: it replaces blocks, to see whether anything changes

        rows = {"": discover(model)}
    for tower, row in rows.items():
        part: Any = part_at(base, tower)
        layers = part_at(part, row.layer.removesuffix(".{}"))
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            where = f"{row.layer!r} of {tower}" if tower else repr(row.layer)
            raise ValueError(f"{type(model).__name__} has no layers at {where}, where models of its type have them")
        for i, layer in enumerate(layers):
            name = ".".join(filter(None, (tower, row.layer.format(i))))
            ffns.append(FFN(name, len(ffns), row, layer, part.config, tuple(configs.values())))
    for ffn in ffns:
        wanted = [w for w in ("up", "activation", "down", "gate", "sum", "scale") if getattr(ffn.row, w)]
        if ffn.kind not in (KEPT, "atoms"):
            wanted = [w for w in wanted if w not in ("activation", "gate")]
        missing = [getattr(ffn.row, which) for which in wanted if ffn.slot(which) is None]
        if missing:
            raise ValueError(
                f"{ffn.name} of {type(model).__name__} has no {', '.join(missing)}, as models of its type do"
            )
    return ffns


def rows_of(model: PreTrainedModel) -> dict[str, Architecture]:
    """The row of a model, under "", or those of its towers, under their names; none if the table has no such type."""
    row = row_of(model.config)
    if row is not None:
        return {"": row}
    if model.config.is_encoder_decoder:  # every layer of a decoder reads what the encoder returns
        return {}
    parts = {name: part for name, part in model.base_model.named_children() if isinstance(part, PreTrainedModel)}
    return {name: row for name, part in parts.items() if (row := row_of(part.config)) is not None}


def find_attentions(model: PreTrainedModel) -> list[Attention]:
    """The self-attention of each layer, by depth; none if it cannot be replaced, or if the model's row names none.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> [(attention.name, attention.heads, attention.head_size) for attention in find_attentions(model)]
        [('encoder.layer.0.attention', (2, 2), 4)]
    """
    found = [
        Attention(ffn.layer_name, ffn.index, ffn.row, ffn.layer, ffn.config, ffn.configs)
        for ffn in find_ffns(model)
        if ffn.row.attention is not None and not ffn.row.attention.refused
    ]
    for attention in found:
        names = [w for w in ("module", "query", "key", "value", "out", "sum", "scale") if getattr(attention.names, w)]
        missing = [getattr(attention.names, which) for which in names if attention.slot(which) is None]
        if missing:
            raise ValueError(f"{attention.name} of {type(model).__name__} has no {', '.join(missing)}")
    return found


def find_blocks(model: PreTrainedModel) -> list[ModelBlock]:
    """The attention and feed-forward blocks of a model in the order in which they run."""
    return sorted([*find_attentions(model), *find_ffns(model)], key=lambda block: (block.index, isinstance(block, FFN)))


def parse_layers(layers: str | Iterable[int]) -> slice | list[int]:
    """Read a choice of layers, as arguments and options have it, before the number of layers is known.

    Args:
        layers: "all", "top-6" (the last six), numbers with commas such as "3,4,5", or a list of integers.

    Example:
        >>> parse_layers("top-6"), parse_layers("4, 3"), parse_layers([3, 4])
        (slice(-6, None, None), [3, 4], [3, 4])
    """
    expected = f"layers must be 'all', 'top-6', or numbers such as '3,4,5'; got {layers!r}"
    if isinstance(layers, str):
        if layers.strip() == "all":
            return slice(None)
        if top := re.fullmatch(r"top-0*([1-9]\d*)", layers.strip()):
            return slice(-int(top[1]), None)
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", layers):
            raise ValueError(expected)
        return sorted({int(number) for number in layers.split(",")})
    chosen = list(layers) if isinstance(layers, Iterable) else [None]
    if not all(map(_checks.is_integer, chosen)):
        raise TypeError(expected)
    return sorted({int(i) for i in chosen if i is not None})


def choose_layers(ffns: list[FFN], layers: str | Iterable[int]) -> list[FFN]:
    """The blocks of the layers that `parse_layers` reads; a ValueError if the model does not have them."""
    chosen = parse_layers(layers)
    if isinstance(chosen, slice):
        if chosen.start is not None and -chosen.start > len(ffns):
            raise ValueError(f"layers can be 'top-{len(ffns)}' at most, as there are {len(ffns)}; got {layers!r}")
        return ffns[chosen]
    if not chosen or chosen[0] < 0 or chosen[-1] >= len(ffns):
        raise ValueError(f"layers must be among 0 to {len(ffns) - 1}; got {chosen}")
    return [ffns[i] for i in chosen]
