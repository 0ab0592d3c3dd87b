r"""The damage of every choice for every block, measured in one pass over typical inputs.

For a feed-forward block, the sums of its hidden features phi and its inputs x against its outputs y give the error of
every number of atoms (the choices are nested), of a linear map, and of a constant. For an attention block, the moments
of mixed values give the error of every rank of values. Ranks of queries and keys act through the softmax, and are tried
on a few batches. All errors are squared, weighted as in targets.py, and relative to the input of the next layer, so
that those of different blocks can be added and compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from snnk._environment import available_memory
from snnk.hf.compression.attention import HeadMaps, HeadSums, shortened
from snnk.hf.compression.ffn import PENALTY
from snnk.hf.compression.plans import BlockPlan, option
from snnk.hf.compression.targets import gain, importance
from snnk.hf.model_blocks import FFN, KEPT, Attention, ModelBlock
from snnk.hf.models import Batch, check_batches, evaluating
from snnk.hf.record import Call, Observation, context, flat, observe, run_to, unreached
from snnk.hf.replace import LOW_RANK
from snnk.ridge.atoms import choose_atoms
from snnk.ridge.sums import RidgeStats

STEPS = 48  # numbers of atoms that are compared for a block
RANKS = 8  # ranks that are compared for queries and keys, and for values
COPIES = 3  # of the sums of one block, while its choices are computed
TRIED = 8192  # tokens at least on which ranks of queries and keys are tried
Option = tuple[BlockPlan, float]  # with its damage


class TooFewTokens(ValueError):
    """There are fewer than two tokens per feature."""


def enough(tokens: int, most: int) -> None:
    """Refuse fewer than two tokens per feature, as neither such a fit nor its error is meaningful."""
    if tokens < 2 * most:
        raise TooFewTokens(
            f"{tokens} tokens are too few to fit {most} features; give at least {2 * most}, better {10 * most}"
        )


class BlockSums:
    """Sums of one block over tokens."""

    def __init__(self, block: ModelBlock) -> None:
        self.block, self.tokens, self.power = block, 0, 0.0
        self.scale = importance(block, torch.ones(1, block.out_features))[1].double().cpu()
        self.read = gain(block).double().cpu()
        if isinstance(block, FFN):
            features = block.width + block.in_features
            self.stats = RidgeStats(features, block.out_features, block_dtype=torch.float32)
        elif isinstance(block, Attention):
            self.heads = HeadSums(block)

    def update(self, seen: Observation, batch: Batch) -> None:
        x, hidden, y, stream = (
            flat(t, batch, self.block.row.masked) for t in (seen.inputs, seen.hidden, seen.outputs, seen.sum)
        )
        weight = importance(self.block, stream)[0].cpu()
        self.tokens += len(x)
        centred = stream.double().cpu() - stream.double().cpu().mean(1, keepdim=True)
        self.power += float((weight[:, None] * (centred * self.read).square()).sum())
        if isinstance(self.block, FFN):
            self.stats.update(torch.cat([hidden, x], 1).cpu(), y.float().cpu(), weight)
        else:
            self.heads.update(x, hidden, weight)


def measure(blocks: list[ModelBlock], model: PreTrainedModel, batches: Iterable[Batch]) -> list[list[Option]]:
    """The choices for each block, each with its damage; a block that no input reaches can only stay as it is.

    The sums of a block grow with the square of its width. Blocks whose sums fit into memory together are measured in
    one pass over the batches, and there are as many passes as it takes.
    """
    kept = list(check_batches(batches))
    if not kept:
        raise ValueError("there are no batches to calibrate with; give at least one")
    found: dict[str, list[Option]] = {}
    with evaluating(model), torch.no_grad():
        away = {block.name for block in unreached(blocks, model, kept[0])}
        if len(away) == len(blocks):
            raise ValueError(f"the inputs, {', '.join(kept[0])}, reach none of {len(blocks)} blocks; give others")
        for part in _parts([block for block in blocks if block.name not in away], available_memory()):
            found |= _measure(part, model, kept)
    return [found.get(block.name, [(option(block, KEPT), 0.0)]) for block in blocks]


def sum_bytes(block: ModelBlock) -> int:
    """Memory of the sums of a block; those of attention are small."""
    features = block.width + block.in_features if isinstance(block, FFN) else 0
    return 8 * features * (features + block.out_features)


def _parts(blocks: list[ModelBlock], memory: int | None) -> list[list[ModelBlock]]:
    """Blocks in order, in parts whose sums fit into half of the memory; an error if those of one do not fit at all."""
    most = max(map(sum_bytes, blocks))
    if memory is not None and COPIES * most > memory:
        raise ValueError(
            f"a joint plan needs about {COPIES * most / 1e9:.1f} GB of memory for the largest block, and "
            f"{memory / 1e9:.1f} GB are available; free some, or let every block keep the same share (joint=False)"
        )
    parts: list[list[ModelBlock]] = [[]]
    for block in blocks:
        if memory is not None and sum(map(sum_bytes, [*parts[-1], block])) > memory / 2 and parts[-1]:
            parts.append([])
        parts[-1].append(block)
    return parts


def _measure(blocks: list[ModelBlock], model: PreTrainedModel, batches: list[Batch]) -> dict[str, list[Option]]:
    found = {block.name: BlockSums(block) for block in blocks}
    tried: list[Batch] = []

    def add(block: ModelBlock, observation: Observation) -> None:
        found[block.name].update(observation, batch)

    with observe(blocks, add):
        for batch in batches:
            if min(sums.tokens for sums in found.values()) < TRIED:
                tried.append(batch)
            _run(blocks, model, batch)
    for block in sorted(blocks, key=_unknowns, reverse=True):
        enough(found[block.name].tokens, _unknowns(block))
    heads = [block for block in blocks if isinstance(block, Attention)]
    maps = {block.name: found[block.name].heads.maps(found[block.name].scale) for block in heads}
    errors = _try_ranks([block for block in heads if not block.names.fixed], maps, model, tried)
    return {
        block.name: _of_ffn(block, found.pop(block.name))  # the sums are not needed any more
        if isinstance(block, FFN)
        else _of_attention(block, found.pop(block.name), maps[block.name], errors.get(block.name, {}))
        for block in blocks
        if isinstance(block, FFN | Attention)
    }


def _run(blocks: Sequence[ModelBlock], model: PreTrainedModel, batch: Batch) -> None:
    first, *others = dict.fromkeys(block.layer for block in blocks)
    run_to(first, model, batch, *others)


def ranks_of(size: int) -> list[int]:
    """The ranks that are compared for heads of this size, in steps that keep matrices easy to multiply."""
    step = max(2, size // RANKS)
    return [*range(step, size, step), size]


def _unknowns(block: ModelBlock) -> int:
    return max(block.width, block.in_features) if isinstance(block, FFN) else block.out_features


def _try_ranks(
    blocks: list[Attention], maps: dict[str, HeadMaps], model: PreTrainedModel, batches: list[Batch]
) -> dict[str, dict[int, float]]:
    """For each attention block and rank of queries and keys, the weighted squared error per token."""
    found = {block.name: dict.fromkeys(ranks_of(block.head_size), 0.0) for block in blocks}
    calls: list[tuple[Attention, Call, torch.Tensor]] = []
    tokens = dict.fromkeys(found, 0)

    def note(block: Attention, seen: Observation) -> None:
        if seen.call is not None:
            calls.append((block, seen.call, importance(block, flat(seen.sum, batch, block.row.masked))[0]))

    for batch in batches if blocks else []:
        calls.clear()
        with observe(blocks, note):
            _run(blocks, model, batch)
        for block, call, weight in calls:
            scale = importance(block, torch.ones(1, block.out_features))[1].to(weight.device)
            out, exact = block.weight("out"), flat(context(block, call), batch, block.row.masked)
            for rank in ranks_of(block.head_size)[:-1]:
                with shortened(block, maps[block.name], rank):
                    wrong = (flat(context(block, call), batch, block.row.masked) - exact) @ out.T
                found[block.name][rank] += float((weight[:, None] * (wrong * scale).square()).sum())
            tokens[block.name] += len(weight)
    return {name: {rank: e / max(tokens[name], 1) for rank, e in errors.items()} for name, errors in found.items()}


def _of_ffn(ffn: FFN, sums: BlockSums) -> list[Option]:
    gram, cross, power = sums.stats.centred()
    weight = float(sums.stats.sums[0, 0, 0])
    w, total = ffn.width, max(float((power * sums.scale.square()).sum()), 1e-30)
    penalty = PENALTY * float(gram.diagonal()[:w].mean())
    _, gains = choose_atoms(gram[:w, :w], cross[:w] * sums.scale, w, penalty)
    left = total - gains.cumsum(0)
    linear = sums.stats.select(torch.arange(w, w + ffn.in_features)).solve("gcv")
    rest = float((linear.residual * sums.scale.square()).sum()) * weight
    choices: list[tuple[str, int | None, float]] = [("drop", None, total), ("linear", None, rest), (KEPT, None, 0.0)]
    step = max(2, w // STEPS // 2 * 2)
    choices += [("atoms", m, float(left[m - 1])) for m in range(step, w, step)]
    return [(option(ffn, kind, m, max(e, 0.0) / total), max(e, 0.0) / sums.power) for kind, m, e in choices]


def _of_attention(attention: Attention, sums: BlockSums, maps: HeadMaps, tried: dict[int, float]) -> list[Option]:
    size = attention.head_size
    power = sums.power / max(sums.tokens, 1)
    weight = float(sums.heads.value[0, -1, -1]) / max(sums.tokens, 1)
    lost = [float(maps.lost[:, rank].sum()) * weight if rank < size else 0.0 for rank in range(size + 1)]
    total = max(lost[0], 1e-30)
    found: list[Option] = [(option(attention, KEPT), 0.0)]
    for r in [size] if attention.names.fixed else ranks_of(size):
        for t in ranks_of(size):
            if (r, t) != (size, size):
                error = tried.get(r, 0.0) + lost[t]
                found.append((option(attention, LOW_RANK, None, error / total, (r, t)), error / power))
    return found
