"""Other ways to make a transformer smaller, for comparison. Each changes a model in place, without training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from snnk.experiments.compression import Batch
from snnk.hf.finding import find_blocks, find_ffns
from snnk.hf.low_rank import replace_attention_
from snnk.hf.model_blocks import FFN, Attention, ModelBlock
from snnk.hf.record import flat, observe, recording, run_to
from snnk.hf.replace import replace_


@torch.no_grad()
def low_rank(model: Any, batches: Sequence[Batch], keep: float, blocks: Sequence[ModelBlock] | None = None) -> None:
    """Replace each matrix W by U U^T W, where U has the leading directions of the layer's outputs W x.

    That is activation-aware SVD: the least squared error of the outputs on the layer's own inputs, for the rank that
    leaves the part `keep` of the parameters of W.
    """
    chosen = find_blocks(model) if blocks is None else blocks
    linear = {f"{b.name} {i}": (b, m) for b in chosen for i, m in enumerate(b.linears) if m is not None}
    moments = {name: torch.zeros(m.in_features, m.in_features, dtype=torch.float64) for name, (_, m) in linear.items()}

    def add(name: str, x: Tensor, _: Any) -> None:
        rows = flat(x, batch)
        moments[name] += (rows.T @ rows).double()

    with recording({name: m for name, (_, m) in linear.items()}, add):
        for batch in batches:
            run_to(chosen[-1].layer, model, batch)
    for name, (block, layer) in linear.items():
        weight = layer.weight.double()
        rank = max(1, round(keep * weight.numel() / sum(weight.shape)))
        directions = torch.linalg.eigh(weight @ moments[name] @ weight.T)[1][:, -rank:]
        first = nn.Linear(weight.shape[1], rank, bias=False)
        second = nn.Linear(rank, weight.shape[0], bias=layer.bias is not None)
        first.weight.copy_(directions.T @ weight)
        second.weight.copy_(directions)
        if layer.bias is not None:
            second.bias.copy_(layer.bias)
        path = next(path for path, m in block.layer.named_modules() if m is layer)
        block.layer.set_submodule(path, nn.Sequential(first, second))


@torch.no_grad()
def prune(model: Any, batches: Sequence[Batch], keep: float, blocks: Sequence[ModelBlock] | None = None) -> None:
    """Keep the neurons and the dimensions of heads that carry most, unchanged.

    They are those with the largest product of output norm and root mean square activation; for queries and keys, with
    the largest product of their norms.
    """
    chosen = find_blocks(model) if blocks is None else blocks
    power: dict[str, Any] = {block.name: 0.0 for block in chosen}

    def add(block: ModelBlock, seen: Any) -> None:
        power[block.name] = power[block.name] + flat(seen.hidden, batch).double().square().sum(0)

    with observe(chosen, add):
        for batch in batches:
            run_to(chosen[-1].layer, model, batch)
    for block in chosen:
        if isinstance(block, FFN):
            count = max(1, round(keep * block.width))
            score = block.down_weight().double().square().sum(0) * power[block.name]
            replace_(block, "atoms", count).copy_rows_(score.topk(count).indices.sort().values)
        elif isinstance(block, Attention):
            _prune_heads(block, power[block.name], max(1, round(keep * block.head_size)))


def _prune_heads(attention: Attention, power: Tensor, rank: int) -> None:
    size, weights, biases = attention.head_size, {}, {}
    norms = attention.weight("query").square().sum(1) * attention.weight("key").square().sum(1)
    carried = attention.weight("out").double().square().sum(0) * power
    for name, score in (("query", norms), ("key", norms), ("value", carried)):
        best = score.view(-1, size).topk(rank, 1).indices.sort(1).values
        rows = (best + size * torch.arange(len(best))[:, None]).flatten()
        weights[name], bias = attention.weight(name)[rows], attention.bias(name)
        biases[name] = None if bias is None else bias[rows]
    out, bias = attention.weight("out")[:, rows], attention.bias("out")  # `rows` are those of the values
    replace_attention_(attention, (rank, rank)).fill_heads_(weights, biases).fill_out_(out, bias)


@torch.no_grad()
def drop_layers(model: Any, batches: Sequence[Batch], count: int) -> None:
    """Drop the `count` layers that turn the residual stream least."""
    layers = [ffn.layer for ffn in find_ffns(model)]
    turned = dict.fromkeys(map(str, range(len(layers))), 0.0)

    def add(name: str, x: Tensor, out: Any) -> None:
        y = out[0] if isinstance(out, tuple) else out
        turned[name] -= float(nn.functional.cosine_similarity(flat(x, batch), flat(y, batch), dim=-1).sum())

    with recording(dict(zip(turned, layers, strict=True)), add):
        for batch in batches:
            run_to(layers[-1], model, batch)
    keep_layers(model, sorted(map(int, sorted(turned, key=lambda name: turned[name])[count:])))


def keep_layers(model: Any, numbers: Sequence[int]) -> None:
    """Drop all layers but these."""
    first = find_ffns(model)[0].layer
    owner = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and m[0] is first)
    for number in sorted(set(range(len(owner))) - set(numbers), reverse=True):
        del owner[number]
    model.config.num_hidden_layers = len(owner)
    for i, layer in enumerate(owner):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # the place in the cache of a decoder
                vars(module)["layer_idx"] = i
