r"""Plans: what each block of a model becomes, and how a plan is saved, checked and described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from snnk import _checks, _io
from snnk.hf import low_rank
from snnk.hf.compression import times
from snnk.hf.finding import find_blocks
from snnk.hf.model_blocks import FFN, KEPT, Attention, ModelBlock
from snnk.hf.models import in_memory
from snnk.hf.replace import BIASED, LOW_RANK, cost_after
from snnk.maps import RANDOM_MAPS, make_feature_map

FORMAT = "snnk.Plan/1"
FEATURES = ("atoms", *RANDOM_MAPS)
KINDS = (*FEATURES, "linear", "drop", LOW_RANK, KEPT)
OLD_KINDS = {"relu": "random-relu", "cos": "random-fourier"}  # in plan.json from before the rename


@dataclass(frozen=True)
class BlockPlan:
    """One block: what it becomes, and its stored numbers and multiply-adds per token, before and after.

    `width` is the number of neurons of a feed-forward block, and the size of a head of attention.
    """

    name: str
    kind: str
    num_features: int | None
    width: int
    parameters_before: int
    parameters: int
    multiply_adds_before: int
    multiply_adds: int
    predicted_error: float | None = None  # squared, over the variance of the block's weighted outputs
    ranks: tuple[int, int] | None = None  # dimensions per head of queries and keys, and of values, for "low-rank"
    new_bias: bool = True  # whether the fit may give the block a bias that it did not have

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
        if (self.kind == LOW_RANK) != (self.ranks is not None):
            raise ValueError(f"ranks belong to {LOW_RANK!r} and to no other kind; {self.name} is {self.kind}")
        if self.ranks is not None:
            object.__setattr__(self, "ranks", _checks.ranks(self.ranks, self.name))
        for name in ("width", "parameters_before", "multiply_adds_before", "parameters"):
            _checks.positive_int(getattr(self, name), f"{name} of {self.name}")
        _checks.at_least_zero(self.multiply_adds, f"multiply_adds of {self.name}")  # a constant has none
        if not isinstance(self.new_bias, bool) or not (self.new_bias or self.kind in BIASED):
            raise ValueError(
                f"new_bias of {self.name} must be true, or false for {' and '.join(BIASED)}; got {self.new_bias!r}"
            )
        if self.predicted_error is not None:
            _checks.at_least_zero(self.predicted_error, f"predicted_error of {self.name}")

    @property
    def becomes(self) -> str:
        """What the block becomes, in words."""
        return describe(self.kind, self.num_features, self.ranks)


def describe(kind: str, num_features: int | None, ranks: Sequence[int] | None) -> str:
    """What a block is, in words.

    Example:
        >>> describe("atoms", 8, None), describe("low-rank", None, (4, 6)), describe("drop", None, None)
        ('8 atoms', 'ranks 4 and 6', 'drop')
    """
    if ranks is not None:
        return f"ranks {ranks[0]} and {ranks[1]}"
    return kind if num_features is None else f"{num_features} {kind}"


@dataclass(frozen=True)
class Plan:
    """A plan for `compress_`: what each block of a model becomes. `save` and `load` write and read it as JSON.

    Args:
        model_type: of the model's configuration.
        blocks: one `BlockPlan` per block that is part of the plan.
        timings: the measured times that the plan was made from, if it was made for a latency or a speedup.

    Example:
        >>> block = BlockPlan("encoder.layer.0", "atoms", 8, 32, 1072, 280, 1024, 256)
        >>> print(Plan("bert", (block,)))  # doctest: +ELLIPSIS
        block                       becomes                         parameters           multiply-adds   predicted error
        encoder.layer.0             8 atoms                       1,072 -> 280            1,024 -> 256...
        in all 1,072 -> 280 parameters, 0.261
    """

    model_type: str
    blocks: tuple[BlockPlan, ...]
    timings: times.Timings | None = None

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(block.name for block in self.blocks).items() if count > 1]
        if not self.blocks or twice:
            raise ValueError(f"a plan has one or more blocks, each once; got {f'{twice} twice' if twice else 'none'}")
        _ = self.predicted_seconds  # every block must have its times

    def to_dict(self) -> dict[str, Any]:
        usual = {"ranks": None, "new_bias": True}
        blocks = tuple(
            {key: value for key, value in asdict(block).items() if key not in usual or value != usual[key]}
            for block in self.blocks
        )
        timings = {} if self.timings is None else {"timings": self.timings.to_dict()}
        return {"format": FORMAT, "model_type": self.model_type, "blocks": blocks, **timings}

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
            if not isinstance(block, Mapping) or {"ranks", "new_bias", *block} != keys:  # not always there
                raise ValueError(f"a block of a plan has the keys {', '.join(sorted(keys))}; got {str(block)[:500]}")
        planned = tuple(BlockPlan(**{**b, "kind": OLD_KINDS.get(str(b["kind"]), b["kind"])}) for b in blocks)
        timings = stored.get("timings")
        return cls(kind, planned, None if timings is None else times.Timings.from_dict(timings))

    @property
    def predicted_seconds(self) -> float | None:
        """Latency of the compressed model by the measured times; None without them."""
        return None if self.timings is None else self.timings.seconds_of(self.blocks)

    def save(self, path: str | Path) -> None:
        _io.write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        try:
            return cls.from_dict(_io.read_json(path, "a plan of snnk"))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no plan of snnk: {error}") from error

    def check(self, model: PreTrainedModel) -> list[ModelBlock]:
        """The planned blocks of a model; a ValueError if it is another model, or its weights are not in memory."""
        blocks = find_blocks(model)
        found = {block.name: (width_of(block), block.num_parameters) for block in blocks}
        wanted = {block.name: (block.width, block.parameters_before) for block in self.blocks}
        if self.model_type != model.config.model_type or wanted.items() - found.items():
            raise ValueError(
                f"the plan is for a {self.model_type!r} model with blocks {_few(wanted)}; "
                f"this is a {model.config.model_type!r} model with {_few(found)}"
            )
        by_name = {block.name: block for block in blocks}
        for planned in self.blocks:
            _check(by_name[planned.name], planned)
        return in_memory([block for block in blocks if block.name in wanted])

    def __str__(self) -> str:
        lines = [f"{'block':<28}{'becomes':<18}{'parameters':>24}{'multiply-adds':>24}{'predicted error':>18}"]
        for b in self.blocks:
            error = "" if b.predicted_error is None else f"{b.predicted_error:.4f}"
            sizes = f"{b.parameters_before:,} -> {b.parameters:,}"
            work = f"{b.multiply_adds_before:,} -> {b.multiply_adds:,}"
            lines.append(f"{b.name:<28}{b.becomes:<18}{sizes:>24}{work:>24}{error:>18}")
        before, after = sum(b.parameters_before for b in self.blocks), sum(b.parameters for b in self.blocks)
        lines.append(f"in all {before:,} -> {after:,} parameters, {after / before:.3f}")
        if self.timings is not None and self.predicted_seconds is not None:
            lines.append(f"{self.timings}; predicted for this plan: {1e3 * self.predicted_seconds:.2f} ms")
        return "\n".join(lines)


def width_of(block: ModelBlock) -> int:
    """Neurons of a feed-forward block, or dimensions per head of attention."""
    if isinstance(block, FFN):
        return block.width
    return block.head_size if isinstance(block, Attention) else 0


def option(
    block: ModelBlock,
    kind: str,
    num_features: int | None = None,
    error: float | None = None,
    ranks: tuple[int, int] | None = None,
    new_bias: bool = True,
) -> BlockPlan:
    """The plan of one block, with its costs."""
    before = after = block.cost
    if isinstance(block, Attention) and ranks is not None:
        after = low_rank.cost_after(block, ranks, new_bias=new_bias)
    elif isinstance(block, FFN) and kind != KEPT:
        random = kind in RANDOM_MAPS and num_features
        new = make_feature_map(kind, block.in_features, num_features or 0, device="meta") if random else None
        after = cost_after(block, kind, num_features, new_bias=new_bias) if new is None else cost_after(block, new)
    sizes = before.parameters, after.parameters, before.multiply_adds, after.multiply_adds
    return BlockPlan(block.name, kind, num_features, width_of(block), *sizes, error, ranks, new_bias)


def _check(block: ModelBlock, planned: BlockPlan) -> None:
    """Refuse what a block cannot become."""
    if isinstance(block, Attention):
        if planned.kind not in (LOW_RANK, KEPT):
            raise ValueError(f"{block.name} is attention, which can become {LOW_RANK!r}; got {planned.kind!r}")
        if planned.ranks is not None:
            low_rank.check_ranks(block, planned.ranks)
    elif isinstance(block, FFN):
        # random features: a matrix as large as the block
        most = block.width if planned.kind == "atoms" else block.num_parameters // block.out_features
        if planned.kind == LOW_RANK:
            raise ValueError(f"{block.name} is a feed-forward block, which has no heads for {LOW_RANK!r}")
        if (planned.num_features or 0) > most:
            raise ValueError(
                f"{block.name} has room for {most} {planned.kind}; got num_features {planned.num_features}"
            )


def _few(blocks: Mapping[str, tuple[int, int]]) -> str:
    shown = [f"{name} ({width} wide, {size:,} parameters)" for name, (width, size) in list(blocks.items())[:2]]
    return ", ".join(shown) + (f" and {len(blocks) - 2} more" if len(blocks) > 2 else "")
