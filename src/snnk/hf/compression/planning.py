r"""Plans: what each feed-forward block of a model becomes, decided for all blocks together.

Without inputs, every block keeps the same share. With inputs, one pass gathers for each block the sums of its hidden
features phi and its inputs x against its outputs y. A token is weighted by 1 / variance of the residual stream there,
and a coordinate by the scale of the LayerNorm behind, so that an error counts by how much it changes the input of the
next layer. From these sums follows the error of every number of atoms (the choices are nested), of a linear map, and of
a constant, without another pass. For each block, the plan takes the choice of least error + mu * parameters, with one
price mu for all blocks that meets the budget, and spends the rest where it reduces the error most. In a causal language
model the errors of different blocks are compared by how much they change the prediction of the next token
(sensitivity.py).
"""

from __future__ import annotations

import numbers
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from snnk import _checks, _io
from snnk.hf.architectures import FFN, choose_layers, find_ffns
from snnk.hf.compression.causal import is_causal
from snnk.hf.compression.sensitivity import sensitivities
from snnk.hf.cost import stored
from snnk.hf.models import Batch, check_batches, evaluating, in_memory
from snnk.hf.record import Observation, flat, observe, run_to
from snnk.hf.replace import cost_after
from snnk.maps import RANDOM_MAPS, make_feature_map
from snnk.ridge.atoms import choose_atoms
from snnk.ridge.sums import RidgeStats

FORMAT = "snnk.Plan/1"
UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}
PENALTY = 1e-4  # while atoms are chosen, relative to the mean diagonal of the Gram matrix
STEPS = 48  # numbers of atoms that are compared for a block
FEATURES = ("atoms", *RANDOM_MAPS)
KEPT = "dense"  # the kind of a block that stays as it is
KINDS = (*FEATURES, "linear", "drop", KEPT)
OLD_KINDS = {"relu": "random-relu", "cos": "random-fourier"}  # in plan.json from before the rename


@dataclass(frozen=True)
class BlockPlan:
    """One block: what it becomes, and its stored numbers and multiply-adds per token, before and after."""

    name: str
    kind: str
    num_features: int | None
    width: int
    parameters_before: int
    parameters: int
    multiply_adds_before: int
    multiply_adds: int
    predicted_error: float | None = None  # squared, over the variance of the block's weighted outputs

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"the name of a block must be a text; got {self.name!r}")
        _checks.choose(self.kind, KINDS, f"kind of {self.name}")
        if self.kind in FEATURES:
            m = _checks.positive_int(self.num_features, f"num_features of {self.name}")
            if self.kind == "random-fourier":
                _checks.even_features(m)
        elif self.num_features is not None:
            raise ValueError(f"{self.name} ({self.kind}) has no features to count; got {self.num_features!r}, not None")
        for name in ("width", "parameters_before", "multiply_adds_before", "parameters"):
            _checks.positive_int(getattr(self, name), f"{name} of {self.name}")
        at_least_zero(self.multiply_adds, f"multiply_adds of {self.name}")  # a constant has none
        if self.predicted_error is not None:
            at_least_zero(self.predicted_error, f"predicted_error of {self.name}")


@dataclass(frozen=True)
class Plan:
    """A plan for `compress_`: what each block of a model becomes. `save` and `load` write and read it as JSON.

    Args:
        model_type: of the model's configuration.
        blocks: one `BlockPlan` per block that is part of the plan.

    Example:
        >>> block = BlockPlan("encoder.layer.0", "atoms", 8, 32, 1072, 280, 1024, 256)
        >>> print(Plan("bert", (block,)))  # doctest: +ELLIPSIS
        block                 becomes                     parameters           multiply-adds   predicted error
        encoder.layer.0       8 atoms                   1,072 -> 280            1,024 -> 256...
        in all 1,072 -> 280 parameters, 0.261
    """

    model_type: str
    blocks: tuple[BlockPlan, ...]

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(block.name for block in self.blocks).items() if count > 1]
        if not self.blocks or twice:
            raise ValueError(f"a plan has one or more blocks, each once; got {f'{twice} twice' if twice else 'none'}")

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` gave, also from before the rename; a ValueError or TypeError for anything else."""
        found = stored.get("format") if isinstance(stored, Mapping) else type(stored).__name__
        if found != FORMAT:
            raise ValueError(f"a plan has the format {FORMAT!r}; got {found!r}")
        kind, blocks, keys = stored.get("model_type"), stored.get("blocks"), {field.name for field in fields(BlockPlan)}
        if not isinstance(kind, str) or not isinstance(blocks, list | tuple):
            raise ValueError(f"a plan has a model_type and a list of blocks; got {kind!r} and {type(blocks).__name__}")
        for block in blocks:
            if not isinstance(block, Mapping) or set(block) != keys:
                raise ValueError(f"a block of a plan has the keys {', '.join(sorted(keys))}; got {str(block)[:500]}")
        return cls(kind, tuple(BlockPlan(**{**b, "kind": OLD_KINDS.get(str(b["kind"]), b["kind"])}) for b in blocks))

    def save(self, path: str | Path) -> None:
        _io.write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        try:
            return cls.from_dict(_io.read_json(path, "a plan of snnk"))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no plan of snnk: {error}") from error

    def check(self, model: PreTrainedModel) -> list[FFN]:
        """The planned blocks of a model; a ValueError if it is another model, or its weights are not in memory."""
        ffns = find_ffns(model)
        found = {ffn.name: (ffn.width, ffn.num_parameters) for ffn in ffns}
        wanted = {block.name: (block.width, block.parameters_before) for block in self.blocks}
        if self.model_type != model.config.model_type or wanted.items() - found.items():
            raise ValueError(
                f"the plan is for a {self.model_type!r} model with blocks {_few(wanted)}; "
                f"this is a {model.config.model_type!r} model with {_few(found)}"
            )
        by_name = {ffn.name: ffn for ffn in ffns}
        for block in self.blocks:
            most = _most(by_name[block.name], block.kind)
            if (block.num_features or 0) > most:
                raise ValueError(
                    f"{block.name} has room for {most} {block.kind}; got num_features {block.num_features}"
                )
        return in_memory([ffn for ffn in ffns if ffn.name in wanted])

    def __str__(self) -> str:
        lines = [f"{'block':<22}{'becomes':<14}{'parameters':>24}{'multiply-adds':>24}{'predicted error':>18}"]
        for b in self.blocks:
            what = b.kind if b.num_features is None else f"{b.num_features} {b.kind}"
            error = "" if b.predicted_error is None else f"{b.predicted_error:.4f}"
            sizes = f"{b.parameters_before:,} -> {b.parameters:,}"
            work = f"{b.multiply_adds_before:,} -> {b.multiply_adds:,}"
            lines.append(f"{b.name:<22}{what:<14}{sizes:>24}{work:>24}{error:>18}")
        before, after = sum(b.parameters_before for b in self.blocks), sum(b.parameters for b in self.blocks)
        return "\n".join([*lines, f"in all {before:,} -> {after:,} parameters, {after / before:.3f}"])


def plan(
    model: PreTrainedModel,
    keep: float | None = None,
    *,
    target_size: str | float | None = None,
    target_speedup: float | None = None,
    layers: str | Iterable[int] = "all",
    kind: str = "atoms",
    batches: Iterable[Batch] | None = None,
) -> Plan:
    """Decide what the feed-forward blocks of a model become. Give one of keep, target_size and target_speedup.

    Args:
        model: a transformers model with any head.
        keep: the part of the parameters of these blocks that stays, above 0 and at most 1. Without batches, every block
            keeps this part of its neurons, and so, apart from biases, of its parameters.
        target_size: size of the whole model in memory at most, such as "200MB" or a number of bytes.
        target_speedup: factor by which the multiply-adds per token of all linear layers fall at least. The products of
            attention between tokens are not counted.
        layers: "all", "top-6" (the last six), "3,4,5", or a list of numbers.
        kind: "atoms", neurons kept from the model itself; or random features, "random-relu" or "random-fourier".
        batches: typical inputs of the model, at least two tokens per neuron of a block, for atoms only. The numbers of
            atoms are then chosen for all blocks together, and a block may also become linear, a constant, or stay.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> [(block.kind, block.num_features) for block in plan(model, keep=0.25).blocks]
        [('atoms', 768), ('atoms', 768)]
    """
    _checks.choose(kind, FEATURES, "kind")
    ffns = choose_layers(find_ffns(model), layers)
    replaced = [ffn.name for ffn in ffns if ffn.kind not in (KEPT, "atoms")]
    if replaced:
        raise ValueError(f"{', '.join(replaced)} were replaced before; start from the original model")
    budget, unit = _budget(model, ffns, keep, target_size, target_speedup)
    if batches is None:
        share = budget / sum(getattr(ffn.cost, unit) for ffn in ffns)
        same = [_share(ffn, kind, share, unit, target=keep is None) for ffn in ffns]
        return Plan(model.config.model_type, tuple(same))
    if kind != "atoms":
        raise ValueError(f"numbers are chosen jointly for atoms only; got kind={kind!r} with batches")
    inputs = list(check_batches(batches))
    options = [_options(ffn, stats) for ffn, stats in sums(in_memory(ffns), model, inputs)]
    if is_causal(model):
        felt = sensitivities(model, ffns, inputs)
        options = [[(choice, felt[choice.name] * (choice.predicted_error or 0.0)) for choice, _ in o] for o in options]
    return Plan(model.config.model_type, tuple(_allocate(options, budget, unit)))


def enough(tokens: int, most: int) -> None:
    """Refuse fewer than two tokens per feature, as neither such a fit nor its error is meaningful."""
    if tokens < 2 * most:
        raise ValueError(
            f"{tokens} tokens are too few to fit {most} features; give at least {2 * most}, better {10 * most}"
        )


def importance(ffn: FFN, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of tokens (n,) and of outputs (out,): how much an error changes the input of the next layer."""
    spread = stream.float().var(-1, correction=0)
    rows = 1 / spread.clamp_min(1e-6 * float(spread.mean()) + 1e-30)
    columns = (
        torch.ones(ffn.out_features, device=stream.device) if ffn.norm is None else _gain(ffn.norm, ffn.out_features)
    )
    return rows, columns if ffn.scale is None else columns * ffn.scale.detach().abs().float()


def _gain(norm: nn.Module, width: int) -> Tensor:
    """The factors (width,) of a norm, which not every class keeps as its `weight`: Gemma's are 1 + weight."""
    probe, half = torch.ones(width), width // 2
    probe[:half] = -(width - half) / max(half, 1)  # of mean 0, without zeros
    probe *= 1000 / probe.square().mean().sqrt()  # large, so that the norm's epsilon does not count
    found = norm.forward(torch.stack([probe, -probe]).to(next(norm.parameters(), probe))).detach().float()
    return 500 * (found[0] - found[1]).abs() / probe.abs().to(found.device)


def sums(ffns: list[FFN], model: PreTrainedModel, batches: Iterable[Batch]) -> Iterator[tuple[FFN, RidgeStats]]:
    """For each block the sums of (phi, x) against its outputs, weighted by importance, in one pass over the batches."""
    found = {
        ffn.name: RidgeStats(ffn.width + ffn.in_features, ffn.out_features, block_dtype=torch.float32) for ffn in ffns
    }

    def add(ffn: FFN, seen: Observation) -> None:
        x, y, stream = (flat(tensor, batch, ffn.row.masked) for tensor in (seen.inputs, seen.outputs, seen.sum))
        phi = torch.cat([ffn.hidden(x), x], 1)
        found[ffn.name].update(phi.cpu(), y.float().cpu(), importance(ffn, stream)[0].cpu())

    with evaluating(model), torch.no_grad(), observe(ffns, add):
        for batch in check_batches(batches):
            run_to(ffns[-1].block, model, batch)
    rows = int(next(iter(found.values())).rows.sum())
    if not rows:
        raise ValueError("there are no batches to calibrate with; give at least one")
    enough(rows, max(max(ffn.width, ffn.in_features) for ffn in ffns))
    yield from ((ffn, found[ffn.name]) for ffn in ffns)


def _options(ffn: FFN, stats: RidgeStats) -> list[tuple[BlockPlan, float]]:
    """The choices for a block, each with its damage: weighted squared error per unit of token weight."""
    gram, cross, power = stats.centred()
    scale, weight = importance(ffn, torch.ones(1, ffn.out_features))[1].double().cpu(), float(stats.sums[0, 0, 0])
    w, total = ffn.width, max(float((power * scale.square()).sum()), 1e-30)
    penalty = PENALTY * float(gram.diagonal()[:w].mean())
    _, gains = choose_atoms(gram[:w, :w], cross[:w] * scale, w, penalty)
    left = total - gains.cumsum(0)
    linear = stats.select(torch.arange(w, w + ffn.in_features)).solve("gcv")
    rest = float((linear.residual * scale.square()).sum()) * weight
    choices: list[tuple[str, int | None, float]] = [("drop", None, total), ("linear", None, rest), (KEPT, None, 0.0)]
    step = max(2, w // STEPS // 2 * 2)
    choices += [("atoms", m, float(left[m - 1])) for m in range(step, w, step)]
    return [(_option(ffn, kind, m, max(e, 0.0) / total), max(e, 0.0) / weight) for kind, m, e in choices]


def _allocate(options: list[list[tuple[BlockPlan, float]]], budget: float, unit: str) -> list[BlockPlan]:
    """For each block the option of least damage + price * cost, at the lowest price that meets the budget.

    A small change of the price may change the cost of a block by much, so that a part of the budget is left. It goes to
    the options that save most damage per unit of cost.
    """
    cost = attrgetter(unit)

    def choose(price: float) -> list[tuple[BlockPlan, float]]:
        return [min(block, key=lambda o: o[1] + price * cost(o[0])) for block in options]

    def spent(chosen: list[tuple[BlockPlan, float]]) -> int:
        return sum(cost(block) for block, _ in chosen)

    low, high = 1e-30, max(damage for block in options for _, damage in block) + 1.0  # prices of one unit
    least = spent(choose(high))
    if least > budget:
        what = unit.replace("_", "-")
        raise ValueError(f"the budget is {budget:,.0f} {what}, and constants in place of all blocks have {least:,}")
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


def _share(ffn: FFN, kind: str, share: float, unit: str, target: bool) -> BlockPlan:
    """The block with a share of its neurons, or, for a target and random features in gated blocks, of its `unit`."""
    if not target and not (ffn.gated and kind != "atoms"):
        count = max(2, int(share * ffn.width) // 2 * 2)
        return _option(ffn, kind, count) if count < ffn.width else _option(ffn, KEPT, None)
    if share >= 1:
        return _option(ffn, KEPT, None)
    allowed = share * getattr(ffn.cost, unit) + 1e-6  # rounding must not cost two features
    two, four = (getattr(_option(ffn, kind, m), unit) for m in (2, 4))
    count = 2 + int((allowed - two) // (four - two)) * 2  # the cost is linear in the number of features
    if count < 2 and target:
        raise ValueError(
            f"the target cannot be reached with equal shares: {ffn.name} may have {allowed:,.0f} "
            f"{unit.replace('_', '-')}, and 2 {kind} have {two:,}. "
            "Choose an easier target, or give batches, with which blocks may become constants"
        )
    return _option(ffn, kind, max(2, count))


def _most(ffn: FFN, kind: str) -> int:
    """The largest number of features: the block's neurons, or random features with a matrix as large as the block."""
    return ffn.width if kind == "atoms" else ffn.num_parameters // ffn.out_features


def _option(ffn: FFN, kind: str, count: int | None, error: float | None = None) -> BlockPlan:
    before = after = ffn.cost
    if kind != KEPT:
        random = kind in RANDOM_MAPS and count
        new = make_feature_map(kind, ffn.in_features, count or 0, device="meta") if random else None
        after = cost_after(ffn, kind, count) if new is None else cost_after(ffn, new)
    sizes = before.parameters, after.parameters, before.multiply_adds, after.multiply_adds
    return BlockPlan(ffn.name, kind, count, ffn.width, *sizes, error)


def _budget(model: PreTrainedModel, ffns: list[FFN], keep: Any, size: Any, speedup: Any) -> tuple[float, str]:
    """The cost that the blocks may have, and the attribute of `Cost` and `BlockPlan` in which it is counted."""
    if sum(x is not None for x in (keep, size, speedup)) != 1:
        raise ValueError(f"give one of keep, target_size, target_speedup; got {keep!r}, {size!r}, {speedup!r}")
    here = sum(ffn.num_parameters for ffn in ffns)
    if keep is not None:
        if not _is_number(keep) or not 0 < keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1; got {keep!r}")
        return float(keep) * here, "parameters"
    if size is not None:
        whole = sum(tensor.nbytes for tensor in stored(model).values())
        one = ffns[0].up_weight().element_size()
        wanted, rest = _bytes(size), whole - here * one
        if wanted <= rest:
            raise ValueError(
                f"target_size {size} cannot be reached: without these blocks the model takes {rest / 1e6:.1f} MB"
            )
        return min(float(here), (wanted - rest) / one), "parameters"
    work = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | Conv1D))
    blocks = sum(ffn.multiply_adds for ffn in ffns)
    most = work / max(work - blocks, 1)
    if not _is_number(speedup) or not 1 <= speedup < most:
        raise ValueError(f"target_speedup must be from 1 to {most:.2f}, as without these blocks; got {speedup!r}")
    return work / float(speedup) - (work - blocks), "multiply_adds"


def _bytes(size: Any) -> float:
    number, unit = size, ""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMG]?B?)\s*", size.upper())
        number, unit = (float(match[1]), match[2]) if match else (None, "")
    if not _is_number(number) or not 0 < number < float("inf") or unit not in UNITS:
        raise ValueError(f"target_size must be like '200MB' or a positive number of bytes; got {size!r}")
    return float(number) * UNITS[unit]


def _is_number(value: Any) -> bool:
    """Whether a value is a number, of numpy too, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def at_least_zero(value: Any, name: str) -> None:
    if not _is_number(value) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0; got {value!r}")


def _few(blocks: Mapping[str, tuple[int, int]]) -> str:
    shown = [f"{name} ({width} wide, {size:,} parameters)" for name, (width, size) in list(blocks.items())[:2]]
    return ", ".join(shown) + (f" and {len(blocks) - 2} more" if len(blocks) > 2 else "")
