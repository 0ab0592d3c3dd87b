r"""Plans: what each block of a model becomes, decided for all blocks together.

Without inputs, every block keeps the same share. With inputs, damage.py measures what every choice costs the model, and
in a causal language model the errors of different blocks are compared by how much they change the prediction of the
next token (sensitivity.py). For each block, the plan then takes the choice of least damage + mu * cost, with one price
mu for all blocks that meets the budget, and spends the rest where it reduces the damage most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from snnk import _checks
from snnk.hf.architectures import FFN, Attention, ModelBlock, choose_layers, find_blocks, find_ffns
from snnk.hf.compression.causal import is_causal
from snnk.hf.compression.damage import Option, measure
from snnk.hf.compression.plans import FEATURES, KEPT, BlockPlan, Plan, is_number, option
from snnk.hf.compression.sensitivity import sensitivities
from snnk.hf.cost import stored
from snnk.hf.models import Batch, check_batches, in_memory
from snnk.hf.replace import LOW_RANK

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}
BLOCKS = ("all", "ffn", "attention")


def plan(
    model: PreTrainedModel,
    keep: float | None = None,
    *,
    target_size: str | float | None = None,
    target_speedup: float | None = None,
    layers: str | Iterable[int] = "all",
    blocks: str = "all",
    kind: str = "atoms",
    batches: Iterable[Batch] | None = None,
) -> Plan:
    """Decide what the blocks of a model become. Give one of keep, target_size and target_speedup.

    Args:
        model: a transformers model with any head.
        keep: the part of the parameters of these blocks that stays, above 0 and at most 1. Without batches, every block
            keeps this part of its neurons or of the numbers per head, and so, apart from biases, of its parameters.
        target_size: size of the whole model in memory at most, such as "200MB" or a number of bytes.
        target_speedup: factor by which the multiply-adds per token of all linear layers fall at least. The products of
            attention between tokens are not counted.
        layers: "all", "top-6" (the last six), "3,4,5", or a list of numbers.
        blocks: "all", "ffn" (feed-forward blocks alone), or "attention".
        kind: what feed-forward blocks become: "atoms", neurons kept from the model itself; or random features,
            "random-relu" or "random-fourier".
        batches: typical inputs of the model, at least two tokens per neuron of a block, for atoms only. Numbers of
            atoms and ranks are then chosen for all blocks together, and a feed-forward block may also become linear or
            a constant; any block may stay.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> [block.becomes for block in plan(model, keep=0.5).blocks]
        ['ranks 2 and 2', '1536 atoms', 'ranks 2 and 2', '1536 atoms']
    """
    _checks.choose(kind, FEATURES, "kind")
    chosen = _choose_blocks(model, layers, blocks)
    replaced = [block.name for block in chosen if block.kind not in (KEPT, "atoms")]
    if replaced:
        raise ValueError(f"{', '.join(replaced)} were replaced before; start from the original model")
    budget, unit = _budget(model, chosen, keep, target_size, target_speedup)
    if batches is None:
        share = budget / sum(getattr(block.cost, unit) for block in chosen)
        same = [_share(block, kind, share, unit, target=keep is None) for block in chosen]
        return Plan(model.config.model_type, tuple(same))
    if kind != "atoms":
        raise ValueError(f"numbers are chosen jointly for atoms only; got kind={kind!r} with batches")
    inputs = list(check_batches(batches))
    options = measure(in_memory(chosen), model, inputs)
    if is_causal(model):
        felt = sensitivities(model, chosen, inputs)
        options = [[(choice, felt[choice.name] * (choice.predicted_error or 0.0)) for choice, _ in o] for o in options]
    return Plan(model.config.model_type, tuple(_allocate(options, budget, unit)))


def _choose_blocks(model: PreTrainedModel, layers: str | Iterable[int], blocks: str) -> list[ModelBlock]:
    _checks.choose(blocks, BLOCKS, "blocks")
    wanted = {ffn.index for ffn in choose_layers(find_ffns(model), layers)}
    found = [
        block
        for block in find_blocks(model)
        if block.index in wanted and (blocks == "all" or isinstance(block, FFN) == (blocks == "ffn"))
    ]
    if not found:
        raise ValueError(f"the row of {model.config.model_type!r} models names no attention; got blocks={blocks!r}")
    return found


def _allocate(options: list[list[Option]], budget: float, unit: str) -> list[BlockPlan]:
    """For each block the option of least damage + price * cost, at the lowest price that meets the budget.

    A small change of the price may change the cost of a block by much, so that a part of the budget is left. It goes to
    the options that save most damage per unit of cost.
    """
    cost = attrgetter(unit)

    def choose(price: float) -> list[Option]:
        return [min(block, key=lambda o: o[1] + price * cost(o[0])) for block in options]

    def spent(chosen: list[Option]) -> int:
        return sum(cost(block) for block, _ in chosen)

    low, high = 1e-30, max(damage for block in options for _, damage in block) + 1.0  # prices of one unit
    least = spent(choose(high))
    if least > budget:
        what = unit.replace("_", "-")
        raise ValueError(f"the budget is {budget:,.0f} {what}, and the smallest choice for every block has {least:,}")
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if spent(choose(middle)) > budget else (low, middle)
    chosen = choose(high)
    while True:
        left = budget - spent(chosen)
        better = [
            ((damage - new[1]) / (cost(new[0]) - cost(block)), i, j)
            for i, (block, damage) in enumerate(chosen)
            for j, new in enumerate(options[i])
            if new[1] < damage and 0 < cost(new[0]) - cost(block) <= left
        ]
        if not better:
            return [block for block, _ in chosen]
        _, i, j = max(better)
        chosen[i] = options[i][j]


def _share(block: ModelBlock, kind: str, share: float, unit: str, target: bool) -> BlockPlan:
    """The block with a share of its neurons or of the numbers per head."""
    if isinstance(block, FFN):
        return _share_of_ffn(block, kind, share, unit, target)
    if not isinstance(block, Attention) or share >= 1:
        return option(block, KEPT)
    size = block.head_size
    rank = max(1, int(share * size + 1e-6))
    ranks = (size if block.names.fixed else rank, rank)
    return option(block, LOW_RANK, ranks=ranks) if min(ranks) < size else option(block, KEPT)


def _share_of_ffn(ffn: FFN, kind: str, share: float, unit: str, target: bool) -> BlockPlan:
    """The block with a share of its neurons, or, for a target and random features in gated blocks, of its `unit`."""
    if not target and not (ffn.gated and kind != "atoms"):
        count = max(2, int(share * ffn.width) // 2 * 2)
        return option(ffn, kind, count) if count < ffn.width else option(ffn, KEPT)
    if share >= 1:
        return option(ffn, KEPT)
    allowed = share * getattr(ffn.cost, unit) + 1e-6  # rounding must not cost two features
    two, four = (getattr(option(ffn, kind, m), unit) for m in (2, 4))
    count = 2 + int((allowed - two) // (four - two)) * 2  # the cost is linear in the number of features
    if count < 2 and target:
        raise ValueError(
            f"the target cannot be reached with equal shares: {ffn.name} may have {allowed:,.0f} "
            f"{unit.replace('_', '-')}, and 2 {kind} have {two:,}. "
            "Choose an easier target, or give batches, with which blocks may become constants"
        )
    return option(ffn, kind, max(2, count))


def _budget(model: PreTrainedModel, blocks: list[ModelBlock], keep: Any, size: Any, speedup: Any) -> tuple[float, str]:
    """The cost that the blocks may have, and the attribute of `Cost` and `BlockPlan` in which it is counted."""
    if sum(x is not None for x in (keep, size, speedup)) != 1:
        raise ValueError(f"give one of keep, target_size, target_speedup; got {keep!r}, {size!r}, {speedup!r}")
    here = sum(block.num_parameters for block in blocks)
    if keep is not None:
        if not is_number(keep) or not 0 < keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1; got {keep!r}")
        return float(keep) * here, "parameters"
    if size is not None:
        whole = sum(tensor.nbytes for tensor in stored(model).values())
        one = blocks[0].layers[-1].weight.element_size()
        wanted, rest = _bytes(size), whole - here * one
        if wanted <= rest:
            raise ValueError(
                f"target_size {size} cannot be reached: without these blocks the model takes {rest / 1e6:.1f} MB"
            )
        return min(float(here), (wanted - rest) / one), "parameters"
    work = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | Conv1D))
    part = sum(block.multiply_adds for block in blocks)
    most = work / max(work - part, 1)
    if not is_number(speedup) or not 1 <= speedup < most:
        raise ValueError(f"target_speedup must be from 1 to {most:.2f}, as without these blocks; got {speedup!r}")
    return work / float(speedup) - (work - part), "multiply_adds"


def _bytes(size: Any) -> float:
    number, unit = size, ""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMG]?B?)\s*", size.upper())
        number, unit = (float(match[1]), match[2]) if match else (None, "")
    if not is_number(number) or not 0 < number < float("inf") or unit not in UNITS:
        raise ValueError(f"target_size must be like '200MB' or a positive number of bytes; got {size!r}")
    return float(number) * UNITS[unit]
