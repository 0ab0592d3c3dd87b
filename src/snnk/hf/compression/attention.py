r"""The fit of one attention block: fewer dimensions per head, in closed form towards the original's residual stream.

Let q and k be the queries and centred keys of one head on the calibration tokens, with second moments Cq and Ck, and
U S V' the singular value decomposition of Cq^1/2 Ck^1/2. Among all bilinear forms of rank r, the one with the least
squared error of the dot products takes the first r rows of S^1/2 U' Cq^-1/2 for queries and of S^1/2 V' Ck^-1/2 for
keys. A constant key may be left out, as it adds the same number to all logits of a query. Let C be the covariance of
the head's mixed values, weighted by tokens, and O the head's part of the output layer, its rows scaled as in
targets.py. The first t right singular vectors V of O C^1/2 give the directions V' C^-1/2 of values. Heads that share
their keys and values share these maps, made from their moments together. The output layer is then the ridge solution
towards the targets of blocks.py; a few steps of Adam move all four layers of this block alone, and the ridge solution
is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from snnk.hf.compression.targets import Tokens
from snnk.hf.low_rank import LowRank, replace_attention_
from snnk.hf.model_blocks import Attention
from snnk.hf.models import Batch, in_float32
from snnk.hf.record import Call, context, flat, recording
from snnk.ridge.atoms import descend
from snnk.ridge.sums import RidgeStats

RATE = 0.05  # length of a step, relative to the root mean square of each parameter
FLOOR = 1e-6  # of eigenvalues of moments, relative to the largest: float32 activations have no digits below


@dataclass(frozen=True)
class HeadMaps:
    """Linear maps of the dimensions of heads, most important first: (groups, size, size), one row per new dimension."""

    query: Tensor
    key: Tensor
    value: Tensor
    lost: Tensor  # (groups, size): squared error per unit of token weight without the dimensions from this one on


class HeadSums:
    """Sums over tokens from which the maps of all heads follow; heads with the same keys and values are one group."""

    def __init__(self, attention: Attention) -> None:
        (heads, groups), size = attention.heads, attention.head_size
        self.attention, self.shape = attention, (groups, heads // groups, size)
        self.query = torch.zeros(groups, size, size, dtype=torch.float64)
        self.key = torch.zeros(groups, size + 1, size + 1, dtype=torch.float64)
        self.value = torch.zeros(heads, size + 1, size + 1, dtype=torch.float64)

    def update(self, x: Tensor, mixed: Tensor, weight: Tensor) -> None:
        """Add tokens: inputs (n, in), mixed values (n, heads * size), and weights (n,)."""
        groups, each, size = self.shape
        q, k = (F.linear(x, self.attention.weight(name), self.attention.bias(name)) for name in ("query", "key"))
        queries = q.double().cpu().unflatten(1, (groups, each, size))
        self.query += torch.einsum("ngei,ngej->gij", queries, queries)
        ones = torch.ones(len(x), 1, 1, dtype=torch.float64)
        keys = torch.cat([k.double().cpu().unflatten(1, (groups, size)), ones.expand(-1, groups, 1)], 2)
        self.key += torch.einsum("ngi,ngj->gij", keys, keys)
        values = torch.cat([mixed.double().cpu().unflatten(1, (-1, size)), ones.expand(-1, groups * each, 1)], 2)
        self.value += torch.einsum("nhi,nhj->hij", values * weight.double().cpu()[:, None, None], values)

    def maps(self, scale: Tensor) -> HeadMaps:
        """The maps, where an error of the block's outputs counts by `scale`, (out,)."""
        groups, each, size = self.shape
        weight = max(float(self.value[0, -1, -1]), 1e-30)
        root_q, inverse_q = _roots(self.query)
        root_k, inverse_k = _roots(_centred(self.key))
        u, s, v = torch.linalg.svd(root_q @ root_k)
        half = s.sqrt()[..., None]
        spread = (_centred(self.value) / weight).unflatten(0, (groups, each))
        root_v, inverse_v = _roots(spread.mean(1))
        out = (scale.double().cpu()[:, None] * self.attention.weight("out").detach().double().cpu()).T
        parts = out.unflatten(0, (groups, each, size)).mT @ root_v[:, None]  # (groups, heads of a group, out, size)
        _, t, directions = torch.linalg.svd(parts.flatten(1, 2), full_matrices=False)
        if t.shape[1] < size:  # fewer outputs than dimensions per head
            t = F.pad(t, (0, size - t.shape[1]))
            directions = torch.linalg.svd(parts.flatten(1, 2))[2]
        lost = t.square().flip(1).cumsum(1).flip(1)
        return HeadMaps(half * (u.mT @ inverse_q), half * (v @ inverse_k), directions @ inverse_v, lost)


@contextmanager
def shortened(attention: Attention, maps: HeadMaps, rank: int) -> Iterator[None]:
    """Inside the `with`, queries and keys of the original layers have `rank` dimensions, and zeros behind them."""
    groups, size = len(maps.key), attention.head_size
    kept = (torch.arange(size) < rank).double()[:, None]

    def shorten(name: str, _: Tensor, out: Tensor) -> Tensor:
        out = out.clone()
        for which, matrix in (("query", maps.query), ("key", maps.key)):
            if name in (which, "fused"):
                places = attention.places(which).to(out.device)
                part = out[..., places].unflatten(-1, (groups, -1, size))
                new = torch.einsum("gij,...gej->...gei", (kept * matrix).to(part), part)
                out[..., places] = new.flatten(-3)
        return out

    query, key = attention.slot("query"), attention.slot("key")
    with recording({"fused": query} if attention.fused else {"query": query, "key": key}, shorten):
        yield


@dataclass(frozen=True)
class Calls:
    """Calls of an attention module, one per batch, and the targets of their tokens."""

    calls: list[Call]
    batches: list[Batch]
    lengths: list[int]  # tokens per batch, without padding
    tokens: Tokens

    def slices(self) -> list[slice]:
        """The rows of each batch in `tokens`."""
        ends = list(accumulate(self.lengths))
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def rows(self, attention: Attention) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Per batch: inputs (n, in), mixed values (n, heads * size), targets (n, out) and weights (n,)."""
        for call, batch, part in zip(self.calls, self.batches, self.slices(), strict=True):
            mixed = flat(context(attention, call), batch, attention.row.masked)
            yield self.tokens.x[part], mixed, self.tokens.y[part], self.tokens.weight[part]

    def error(self, attention: Attention) -> float:
        """Weighted squared error of the block in its present state, over the variance of the targets."""
        out = attention.slot("out")
        return self.tokens.error_of(torch.cat([out(mixed).float() for _, mixed, _, _ in self.rows(attention)]))


def fit_attention(
    attention: Attention,
    ranks: tuple[int, int],
    calls: Calls,
    refine: int,
    seed: int,
    undo: ExitStack,
    *,
    new_bias: bool = True,
) -> LowRank:
    """Replace an attention block by one of these ranks, fitted to the calls; `undo` puts it back."""
    sums = HeadSums(attention)
    for x, mixed, _, weight in calls.rows(attention):
        sums.update(x, mixed, weight)
    (groups, _, size), maps = sums.shape, sums.maps(calls.tokens.scale)
    weights, biases = {}, {}
    for which, matrix, rank in (
        ("query", maps.query, ranks[0]),
        ("key", maps.key, ranks[0]),
        ("value", maps.value, ranks[1]),
    ):
        # all dimensions of a head are kept as they are: rotary embeddings need them in their places
        chosen = matrix[:, :rank] if rank < size else torch.eye(size, dtype=torch.float64).expand(groups, -1, -1)
        old, bias = attention.weight(which).detach(), attention.bias(which)

        def mapped(x: Tensor, chosen: Tensor = chosen) -> Tensor:
            parts = x.double().cpu().unflatten(0, (groups, -1, size))
            return torch.einsum("gij,gej...->gei...", chosen, parts).flatten(0, 2).to(x)

        weights[which], biases[which] = mapped(old), None if bias is None else mapped(bias.detach())
    new = replace_attention_(attention, ranks, new_bias=new_bias)
    undo.callback(new.restore_)
    new.fill_heads_(weights, biases)
    _solve(new, calls)
    if refine:
        _refine(new, calls, refine, seed)
        _solve(new, calls)
    return new


def _solve(new: LowRank, calls: Calls) -> None:
    """Set the output layer to the ridge solution."""
    stats = RidgeStats(new.out.in_features, new.out.out_features, block_dtype=torch.float32)
    for _, mixed, y, weight in calls.rows(new.attention):
        stats.update(new.out.kept_dimensions(mixed).cpu(), y.cpu(), weight.cpu())
    bias = new.out.bias is not None
    solution = stats.solve("gcv", intercept=bias)
    new.fill_out_(solution.weight, solution.bias if bias else None)


def _refine(new: LowRank, calls: Calls, steps: int, seed: int) -> None:
    """Train all layers of the block towards the targets, one batch per step."""
    parameters = [p for module in new.modules for p in module.parameters()]
    weight, scale = calls.tokens.weight / calls.tokens.weight.mean(), calls.tokens.scale
    scale = scale / scale.square().mean().sqrt().clamp_min(1e-30)
    slices = calls.slices()
    generator, order = torch.Generator().manual_seed(seed), list[int]()
    masked = new.attention.row.masked

    def loss() -> Tensor:
        nonlocal order
        order = order or torch.randperm(len(calls.calls), generator=generator).tolist()
        i = order.pop()
        mixed = flat(context(new.attention, _widened(calls.calls[i])), calls.batches[i], masked)
        error = (new.out(mixed) - calls.tokens.y[slices[i]]) * scale
        return (error.square().sum(1) * weight[slices[i]]).mean()

    # the whole module, as it may compute a bias of positions (T5); steps are too small for bfloat16
    with in_float32(nn.ModuleList([new.attention.slot("module"), *new.modules])):
        descend(parameters, loss, rate=RATE, steps=steps, warm_up=10)


def _widened(call: Call) -> Call:
    """The call with its tensors in float32."""

    def convert(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(convert, call)


def _centred(moments: Tensor) -> Tensor:
    """Sums of products about the mean, from sums with a last row and column of ones: (*, s+1, s+1) -> (*, s, s)."""
    total, count = moments[..., :-1, -1:], moments[..., -1:, -1:].clamp_min(1e-30)
    return moments[..., :-1, :-1] - total @ total.mT / count


def _roots(c: Tensor) -> tuple[Tensor, Tensor]:
    """C^1/2 and C^-1/2 of symmetric matrices (*, s, s)."""
    e, u = torch.linalg.eigh(c)
    e = torch.maximum(e, (FLOOR * e[..., -1:]).clamp_min(1e-30)).sqrt()[..., None, :]
    return (u * e) @ u.mT, (u / e) @ u.mT
