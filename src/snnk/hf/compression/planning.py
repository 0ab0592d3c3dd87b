r"""Plans: what each block of a model becomes, decided for all blocks together.

Without inputs, every block keeps the same share. With inputs, damage.py measures what every choice costs the model, and
in a causal language model the errors of different blocks are compared by how much they change the prediction of the
next token (sensitivity.py). For each block, the plan then takes the choice of least damage + mu * cost, with one price
mu for all blocks that meets the budget, and spends the rest where it reduces the damage most. The cost is counted in
parameters, or, for a latency or a speedup, in seconds that were measured on this machine (times.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from transformers import PreTrainedModel

from snnk import _checks
from snnk.hf.compression.causal import is_causal
from snnk.hf.compression.damage import Option, measure
from snnk.hf.compression.plans import FEATURES, BlockPlan, Plan, option
from snnk.hf.compression.sensitivity import sensitivities
from snnk.hf.compression.times import Timings
from snnk.hf.compression.timing import TOKENS, TORCH, measure_times
from snnk.hf.cost import stored
from snnk.hf.finding import choose_layers, find_blocks, find_ffns
from snnk.hf.model_blocks import FFN, KEPT, Attention, ModelBlock
from snnk.hf.models import Batch, check_batches, in_memory
from snnk.hf.replace import LOW_RANK

BYTES = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9}
SECONDS = {"": 1.0, "S": 1.0, "MS": 1e-3, "US": 1e-6}
A_SIZE = "target_size must be like '200MB' or a positive number of bytes"
BLOCKS = ("all", "ffn", "attention")
Choices = dict[str, list[Option]]  # by the name of a block: what it could become, with the damage


@dataclass(frozen=True)
class Budget:
    """What all blocks may cost together, and how a cost is counted and shown."""

    most: float
    cost: Callable[[BlockPlan], float]
    shown: Callable[[float], str]

    def check(self, least: float) -> None:
        """Refuse the budget if the smallest choices for all blocks cost more."""
        if least > self.most:
            what = f"the smallest choice for every block has {self.shown(least)}"
            raise ValueError(f"the budget is {self.shown(self.most)}, and {what}; choose an easier target")


class Unreachable(ValueError):
    """Equal shares cannot meet a target; a joint plan may, with the same times."""

    timings: Timings | None = None


def plan(
    model: PreTrainedModel,
    keep: float | None = None,
    *,
    target_size: str | float | None = None,
    target_speedup: float | None = None,
    target_latency: str | float | None = None,
    layers: str | Iterable[int] = "all",
    blocks: str = "all",
    feature_map: str = "atoms",
    batches: Iterable[Batch] | None = None,
    choices: Choices | None = None,
    tokens: tuple[int, int] = TOKENS,
    runtime: str = TORCH,
    timings: Timings | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Decide what the blocks of a model become. Give one of keep and the three targets.

    Args:
        model: a transformers model with any head.
        keep: the part of the parameters of these blocks that stays, above 0 and at most 1. Without batches, every block
            keeps this part of its neurons or of the dimensions per head, and so, apart from biases, of its parameters.
        target_size: size of the whole model in memory at most, such as "200MB" or a number of bytes.
        target_speedup: factor by which the whole model becomes faster at least.
        target_latency: time of the whole model at most, such as "3ms" or a number of seconds. This and the speedup
            follow from times that are measured on this machine now, with the threads that torch has.
        layers: "all", "top-6" (the last six), "3,4,5", or a list of numbers.
        blocks: "all", "ffn" (feed-forward blocks alone), or "attention".
        feature_map: what feed-forward blocks become: "atoms", neurons kept from the model itself; or random features,
            "random-relu" or "random-fourier".
        batches: typical inputs of the model, at least two tokens per neuron of a block, for atoms only. Numbers of
            atoms and ranks are then chosen for all blocks together, and a feed-forward block may also become linear or
            a constant; any block may stay.
        choices: what `measure_choices` has measured with such inputs, in place of `batches`: they hold for any budget.
        tokens: number of inputs, and tokens per text, of the forward pass whose time is measured.
        runtime: what runs it: "torch", or a form that it is exported to: "openvino-int8", "onnx-int8", "openvino" or
            "onnx".
        timings: times that were measured before, as `Plan.timings` has them; nothing is measured then. With `keep` or
            `target_size` they give the plan a predicted latency.
        progress: called with the number of sizes whose times were measured, and of all.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> [block.becomes for block in plan(model, keep=0.5).blocks]
        ['ranks 2 and 2', '1536 atoms', 'ranks 2 and 2', '1536 atoms']
    """
    kind = _checks.choose(feature_map, FEATURES, "feature_map")
    chosen = _choose_blocks(model, layers, blocks)
    replaced = [block.name for block in chosen if block.kind not in (KEPT, "atoms")]
    if replaced:
        raise ValueError(f"{', '.join(replaced)} were replaced before; start from the original model")
    if (batches is not None or choices is not None) and kind != "atoms":
        raise ValueError(f"numbers are chosen jointly for atoms only; got feature_map={kind!r} with batches")
    targets = {"target_size": target_size, "target_speedup": target_speedup, "target_latency": target_latency}
    given = {name: value for name, value in {"keep": keep, **targets}.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"give one of keep, {', '.join(targets)}; got {given or 'none'}")
    timed = target_speedup is not None or target_latency is not None
    if not timed:
        budget = _parameters(model, chosen, keep, target_size)
    else:
        factor = _factor(target_speedup) if target_latency is None else None
        seconds = None if target_latency is None else seconds_of(target_latency)
        timings = timings or measure_times(
            model, in_memory(chosen), kind=kind, tokens=tokens, runtime=runtime, progress=progress
        )
        if seconds is not None and seconds >= timings.seconds:
            raise ValueError(
                f"target_latency {target_latency} is met by the model as it is, which takes "
                f"{1e3 * timings.seconds:.3g} ms with {timings.runtime}; choose a shorter time"
            )
        budget = _time(timings, seconds or timings.seconds / (factor or 1.0))
    if kind == "atoms":
        _check_reachable(chosen, budget)
    if batches is None and choices is None:
        attention = [block for block in chosen if isinstance(block, Attention)]
        if timed or (attention and (keep is None or any(block.names.fixed for block in attention))):
            try:  # queries and keys that stay must be paid by the others
                same = _largest_shares(chosen, kind, budget)
            except Unreachable as error:
                error.timings = timings
                raise
        else:
            share = budget.most / sum(block.num_parameters for block in chosen)
            same = [_share(block, kind, share, exact=keep is None) for block in chosen]
        return Plan(model.config.model_type, tuple(same), timings)
    if choices is None:
        choices = _measure_choices(model, chosen, batches or ())
    missing = [block.name for block in chosen if block.name not in choices]
    if missing:
        raise ValueError(f"the choices lack {missing[0]}; measure them for these layers and blocks")
    options = [choices[block.name] for block in chosen]
    return Plan(model.config.model_type, tuple(_allocate(options, budget)), timings)


def measure_choices(
    model: PreTrainedModel, batches: Iterable[Batch], *, layers: str | Iterable[int] = "all", blocks: str = "all"
) -> Choices:
    """What every block could become and what that costs the outputs, from one pass over typical inputs.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertModel(BertConfig(vocab_size=9, **sizes))
        >>> choices = measure_choices(model, [{"input_ids": torch.arange(64).view(8, 8) % 9}])
        >>> small, large = (plan(model, keep=keep, choices=choices) for keep in (0.3, 0.6))
        >>> sum(b.parameters for b in small.blocks) < sum(b.parameters for b in large.blocks)
        True
    """
    return _measure_choices(model, _choose_blocks(model, layers, blocks), batches)


def _measure_choices(model: PreTrainedModel, chosen: list[ModelBlock], batches: Iterable[Batch]) -> Choices:
    inputs = list(check_batches(batches))
    options = measure(in_memory(chosen), model, inputs)
    if is_causal(model):
        felt = sensitivities(model, chosen, inputs)
        options = [[(choice, felt[choice.name] * (choice.predicted_error or 0.0)) for choice, _ in o] for o in options]
    return {block.name: own for block, own in zip(chosen, options, strict=True)}


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


def _allocate(options: list[list[Option]], budget: Budget) -> list[BlockPlan]:
    """For each block the option of least damage + price * cost, at the lowest price that meets the budget.

    A small change of the price may change the cost of a block by much, so that a part of the budget is left. It goes to
    the options that save most damage per unit of cost.
    """
    priced = [[(choice, damage, budget.cost(choice)) for choice, damage in block] for block in options]

    def choose(price: float) -> list[tuple[BlockPlan, float, float]]:
        return [min(block, key=lambda o: o[1] + price * o[2]) for block in priced]

    def spent(chosen: list[tuple[BlockPlan, float, float]]) -> float:
        return sum(cost for _, _, cost in chosen)

    low, high = 1e-30, max(damage for block in options for _, damage in block) + 1.0  # prices of one unit
    least = spent(choose(high))
    budget.check(least)
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if spent(choose(middle)) > budget.most else (low, middle)
    chosen = choose(high)
    while True:
        left = budget.most - spent(chosen)
        better = [
            ((damage - new[1]) / (new[2] - cost), i, j)
            for i, (_, damage, cost) in enumerate(chosen)
            for j, new in enumerate(priced[i])
            if new[1] < damage and 0 < new[2] - cost <= left
        ]
        if not better:
            return [block for block, _, _ in chosen]
        _, i, j = max(better)
        chosen[i] = priced[i][j]


def _check_reachable(blocks: list[ModelBlock], budget: Budget) -> None:
    """Refuse a budget that no choice meets, before any inputs are read."""
    least = 0.0
    for block in blocks:
        found = [option(block, KEPT)]
        if isinstance(block, FFN):
            found.append(option(block, "drop"))
        elif isinstance(block, Attention):
            found.append(option(block, LOW_RANK, ranks=(block.head_size if block.names.fixed else 1, 1)))
        least += min(map(budget.cost, found))
    budget.check(least)


def _share(block: ModelBlock, kind: str, share: float, exact: bool = False) -> BlockPlan:
    """The block with a share of its neurons or of the dimensions per head."""
    if isinstance(block, FFN):
        return _share_of_ffn(block, kind, share, exact)
    if not isinstance(block, Attention) or share >= 1:
        return option(block, KEPT)
    size = block.head_size
    rank = max(1, int(share * size + 1e-6))
    ranks = (size if block.names.fixed else rank, rank)
    return option(block, LOW_RANK, ranks=ranks) if min(ranks) < size else option(block, KEPT)


def _share_of_ffn(ffn: FFN, kind: str, share: float, exact: bool) -> BlockPlan:
    """The block with a share of its neurons, or, if `exact` and for random features in gated blocks, of parameters."""
    if not exact and not (ffn.gated and kind != "atoms"):
        count = max(2, int(share * ffn.width) // 2 * 2)
        return option(ffn, kind, count) if count < ffn.width else option(ffn, KEPT)
    if share >= 1:
        return option(ffn, KEPT)
    allowed = share * ffn.num_parameters + 1e-6  # rounding must not cost two features
    two, four = (option(ffn, kind, m).parameters for m in (2, 4))
    count = 2 + int((allowed - two) // (four - two)) * 2  # the cost is linear in the number of features
    if count < 2 and exact:
        raise Unreachable(
            f"the target cannot be reached with equal shares: {ffn.name} may have {allowed:,.0f} parameters, and 2 "
            f"{kind} have {two:,}. Choose an easier target, or give batches, with which blocks may become constants"
        )
    return option(ffn, kind, max(2, count))


def _largest_shares(blocks: list[ModelBlock], kind: str, budget: Budget) -> list[BlockPlan]:
    """Every block with the same share, the largest that meets the budget."""

    def of(share: float) -> tuple[list[BlockPlan], float]:
        found = [_share(block, kind, share) for block in blocks]
        return found, sum(map(budget.cost, found))

    low, high = 0.0, 1.0
    if of(high)[1] <= budget.most:
        return of(high)[0]
    if (least := of(low)[1]) > budget.most:
        raise Unreachable(
            f"the budget is {budget.shown(budget.most)}, and equal shares of all blocks have {budget.shown(least)} at "
            "least. Choose an easier target, or give batches, with which blocks may become constants"
        )
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle)[1] <= budget.most else (low, middle)
    return of(low)[0]


def _parameters(model: PreTrainedModel, blocks: list[ModelBlock], keep: Any, size: Any) -> Budget:
    """The parameters that the blocks may have."""
    here = sum(block.num_parameters for block in blocks)
    if keep is not None:
        if not _checks.is_number(keep) or not 0 < keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1; got {keep!r}")
        most = float(keep) * here
    else:
        whole = sum(tensor.nbytes for tensor in stored(model).values())
        one = blocks[0].linears[-1].weight.element_size()
        wanted, rest = _quantity(size, BYTES, A_SIZE), whole - here * one
        if wanted >= whole:
            raise ValueError(
                f"target_size {size} is met by the model as it is, which takes {whole / 1e6:.1f} MB; choose a "
                "smaller size"
            )
        if wanted <= rest:
            raise ValueError(
                f"target_size {size} cannot be reached: without these blocks the model takes {rest / 1e6:.1f} MB"
            )
        most = (wanted - rest) / one
    return Budget(most, attrgetter("parameters"), lambda cost: f"{cost:,.0f} parameters")


def _time(timings: Timings, seconds: float) -> Budget:
    """The time by which the blocks may change that of the whole model, in nanoseconds."""

    def shown(cost: float) -> str:
        return f"{1e3 * timings.seconds + 1e-6 * cost:.3g} ms"

    return Budget(1e9 * (seconds - timings.seconds), lambda block: 1e9 * timings.slower(block), shown)


def _factor(speedup: Any) -> float:
    if not _checks.is_number(speedup) or not 1 < speedup < float("inf"):
        raise ValueError(f"target_speedup must be a number above 1; got {speedup!r}")
    return float(speedup)


def seconds_of(latency: str | float) -> float:
    """A time in seconds.

    Example:
        >>> seconds_of("3ms")
        0.003
    """
    return _quantity(latency, SECONDS, "target_latency must be like '3ms' or a positive number of seconds")


def _quantity(value: Any, units: Mapping[str, float], expected: str) -> float:
    """A positive number with a unit, from a text or a plain number."""
    number, unit = value, ""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Z]*)\s*", value.upper())
        number, unit = (float(match[1]), match[2]) if match else (None, "")
    if not _checks.is_number(number) or not 0 < number < float("inf") or unit not in units:
        raise ValueError(f"{expected}; got {value!r}")
    return float(number) * units[unit]
