r"""A table of measured times, from which the latency of every plan follows.

A row has the seconds T' of the whole model in which all n blocks of one shape have one size. With T seconds for the
model as it is, one such block makes the model slower by (T' - T) / n, mostly a negative number. Between the sizes of
the table this number is a least-squares fit that does not fall as a block grows: for numbers of features a polyline
with a corner at each measured size; for ranks r and t of attention a + b r + c t + d max(r, t) + e [r != t], with b, c,
d and e of at least 0, as PyTorch pads heads to the longer of the two. The latency of a plan is T plus the numbers of
its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import nnls

from snnk import _checks
from snnk._text import printable
from snnk.hf.model_blocks import KEPT

if TYPE_CHECKING:
    from snnk.hf.compression.plans import BlockPlan

MOST_TIMES, MOST_FEATURES = 256, 10**7  # in a file


@dataclass(frozen=True)
class Time:
    """Seconds of the whole model in which all blocks of a group are of this kind and size."""

    kind: str
    num_features: int | None
    ranks: tuple[int, int] | None
    seconds: float

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise TypeError(f"kind of a time must be a text; got {self.kind!r}")
        if self.num_features is not None:
            _checks.positive_int(self.num_features, "num_features of a time")
        if self.ranks is not None:
            object.__setattr__(self, "ranks", _checks.ranks(self.ranks, "a time"))
        _checks.positive(self.seconds, "seconds of a time")


@dataclass(frozen=True)
class TimedBlocks:
    """The blocks of one shape, and the times that were measured with them; the first is that of the model as it is."""

    blocks: tuple[str, ...]
    width: int  # neurons of a feed-forward block, or dimensions per head of attention
    times: tuple[Time, ...]

    def __post_init__(self) -> None:
        if not self.blocks or not all(isinstance(name, str) for name in self.blocks):
            raise ValueError(f"times must name their blocks; got {self.blocks!r}")
        _checks.positive_int(self.width, "width of timed blocks")
        if len(self.times) > MOST_TIMES:  # the fit grows with the square of their number
            raise ValueError(f"{self.blocks[0]} may have {MOST_TIMES} times at most; got {len(self.times)}")
        sizes = [n for time in self.times for n in (time.num_features or 1, *(time.ranks or ()))]
        if max([self.width, *sizes]) > MOST_FEATURES:
            raise ValueError(f"sizes of {self.blocks[0]} must be {MOST_FEATURES:,} at most; got {max(sizes)}")
        if not self.times or self.times[0].kind != KEPT:
            raise ValueError(f"the first time of {self.blocks[0]} must be that of the model as it is ({KEPT!r})")

    def slower(self, kind: str, num_features: int | None, ranks: tuple[int, int] | None) -> float:
        """Seconds by which one block of this kind and size makes the model slower; negative if it is faster."""
        found = self._fitted.get(kind)
        if found is None:
            raise ValueError(
                f"the timings of {self.blocks[0]} have no times of {kind!r}, only of "
                f"{', '.join(dict.fromkeys(time.kind for time in self.times))}; measure them for this kind"
            )
        corners, base, slopes = found
        return float(base + self._features(corners, num_features, ranks) @ slopes)

    @property
    def misfit(self) -> float:
        """The largest distance, in seconds of the whole model, between a time and the fit."""
        first = self.times[0].seconds
        return max(
            abs(first + len(self.blocks) * self.slower(t.kind, t.num_features, t.ranks) - t.seconds) for t in self.times
        )

    @cached_property
    def _fitted(self) -> dict[str, tuple[list[int], float, np.ndarray]]:
        """Per kind: corners of the polyline, and the numbers of the fit."""
        found = {}
        first = self.times[0]
        for kind in dict.fromkeys(time.kind for time in self.times):
            times = [time for time in self.times if time.kind == kind]
            if kind == "atoms":  # all neurons of a block are the block as it is
                times.append(Time(kind, self.width, None, first.seconds))
            corners = sorted({time.num_features for time in times if time.num_features is not None})
            rows = np.stack([self._features(corners, time.num_features, time.ranks) for time in times])
            ones = np.ones((len(times), 1))
            relative = np.array([time.seconds / first.seconds - 1 for time in times])
            solution, _ = nnls(np.hstack([ones, -ones, rows]), relative)
            solution *= first.seconds / len(self.blocks)
            found[kind] = corners, float(solution[0] - solution[1]), solution[2:]
        return found

    def _features(self, corners: list[int], num_features: int | None, ranks: tuple[int, int] | None) -> np.ndarray:
        if ranks is not None:
            r, t = (rank / self.width for rank in ranks)
            return np.array([r, t, max(r, t), float(r != t)])
        m = num_features or 0
        return np.array([np.clip((m - a) / (b - a), 0, 1) for a, b in pairwise(corners)])


@dataclass(frozen=True)
class Timings:
    """Times of a model on this machine, with blocks of several sizes.

    Args:
        runtime: what ran the model, a name in `RUNTIMES`.
        tokens: number of inputs of the batch, and tokens per text.
        processor, threads: that torch used.
        waited: part of the measurement in which the process did not run; much of it makes times doubtful.
        seconds: of the model as it is.
        groups: the blocks of each shape and their times.
        inputs: the batch in words, such as "1 x 32 tokens" or "1 image of 224 x 224"; older files have none.

    Example:
        >>> times = Time("dense", None, None, 0.010), Time("atoms", 8, None, 0.006)
        >>> group = TimedBlocks(("layer.0", "layer.1"), 16, times)
        >>> timings = Timings("torch", (1, 32), "a processor", 1, 0.0, 0.010, (group,))
        >>> round(timings.groups[0].slower("atoms", 12, None), 6)
        -0.001
    """

    runtime: str
    tokens: tuple[int, int]
    processor: str
    threads: int
    waited: float
    seconds: float
    groups: tuple[TimedBlocks, ...]
    inputs: str = ""

    def __post_init__(self) -> None:
        for name in ("runtime", "processor", "inputs"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a text; got {getattr(self, name)!r}")
        object.__setattr__(self, "tokens", check_tokens(self.tokens))
        _checks.positive_int(self.threads, "threads")
        if not _checks.is_number(self.waited) or not 0 <= self.waited <= 1:
            raise ValueError(f"waited must be from 0 to 1; got {self.waited!r}")
        _checks.positive(self.seconds, "seconds")

    def slower(self, block: BlockPlan) -> float:
        """Seconds by which a block as planned makes the model slower; negative if it is faster."""
        group = self._by_name.get(block.name)
        if group is None:
            raise ValueError(f"the timings have no times of {block.name}; measure them for this model and these blocks")
        return group.slower(block.kind, block.num_features, block.ranks)

    def seconds_of(self, blocks: Iterable[BlockPlan]) -> float:
        """Predicted seconds of the model with these blocks as planned, and all others as they are."""
        return self.seconds + sum(self.slower(block) for block in blocks)

    @property
    def misfit(self) -> float:
        """The largest distance between a measured time of the whole model and the fit, over the model's seconds."""
        return max((group.misfit for group in self.groups), default=0.0) / self.seconds

    @cached_property
    def _by_name(self) -> dict[str, TimedBlocks]:
        return {name: group for group in self.groups for name in group.blocks}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: object) -> Timings:
        """The table that `to_dict` gave; a ValueError or TypeError for anything else."""
        table = _record(cls, stored, "timings")
        groups = []
        for group in _items(table["groups"], "groups of timings"):
            found = _record(TimedBlocks, group, "a group of timings")
            times = [Time(**_record(Time, time, "a time")) for time in _items(found["times"], "times")]
            blocks = tuple(_items(found["blocks"], "blocks of a group"))
            groups.append(TimedBlocks(blocks, found["width"], tuple(times)))
        return cls(**{**table, "groups": tuple(groups)})

    def __str__(self) -> str:
        batch, length = self.tokens
        inputs = printable(self.inputs) or f"{batch} x {length} tokens"
        return (
            f"measured with {self.runtime} for {inputs} on {self.threads} thread(s): "
            f"{1e3 * self.seconds:.2f} ms; the table fits within {100 * self.misfit:.1f} %"
        )


def check_tokens(tokens: object) -> tuple[int, int]:
    """Number of inputs of a batch, and tokens per text."""
    if not isinstance(tokens, list | tuple) or len(tokens) != 2:
        raise ValueError(f"tokens must be the number of inputs and of tokens per text, such as (1, 32); got {tokens!r}")
    return _checks.positive_int(tokens[0], "batch of tokens"), _checks.positive_int(tokens[1], "length of tokens")


def _record(cls: type, stored: object, what: str) -> dict[str, Any]:
    every = {field.name for field in fields(cls)}
    names = [field.name for field in fields(cls) if field.default is MISSING]
    if not isinstance(stored, Mapping) or not set(names) <= set(stored) <= every:
        raise ValueError(f"{what} must have the keys {', '.join(names)}; got {str(stored)[:200]}")
    return dict(stored)


def _items(stored: object, what: str) -> list[Any]:
    if not isinstance(stored, list | tuple):
        raise ValueError(f"{what} must be a list; got {type(stored).__name__}")
    return list(stored)
