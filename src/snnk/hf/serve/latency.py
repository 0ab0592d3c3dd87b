r"""The latency of things that are served, measured in turns: processor time beside wall time, and the machine.

All runs take turns in being first. A turn begins with a call that is not counted, so that weights are in the caches of
the processor as they are in a server that does nothing else, and it has several calls if these are short. The seconds
of the first run are the median over rounds, and those of another are that median times the median ratio of the two
within a round: both met the same load there. With n rounds and the interquartile range q of a run's times over their
median (of its ratios, but for the first), the spread is

    0.93 q / sqrt(n),

the standard error of a median of normal variables in parts of it. Rounds go on until every spread is small, or up to a
limit of rounds or seconds.

With one thread on the processor, runs are compared by the time for which the process ran, so that other work on the
machine changes little. Several threads wait for each other in loops, which count as processor time, so that there the
clock on the wall decides. onnxruntime and OpenVINO have threads of their own: the maker of a session sets their number.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snnk import _checks
from snnk._environment import environment
from snnk.hf import doubts
from snnk.hf.models import Batch, place

CLOCKS: dict[str, Callable[[], float]] = {
    "wall": lambda: time.perf_counter(),
    "processor": lambda: time.process_time(),
}
SPREAD = 0.01
ROUNDS, SECONDS = 100, 10.0
TURN = 0.02  # seconds of a turn at least, by several calls
WARM = 0.2  # seconds of a call below which one that is not counted comes first: cold caches cost a millisecond
Run = Callable[[], Any]  # runs a model once on a batch, and waits for the result


@dataclass(frozen=True)
class Latency:
    """Times of several runs on one batch.

    Attributes:
        inputs: the batch in words, with its length, such as "1 x 32 tokens".
        clock: "wall" or "processor", by which `seconds` and `spread` are counted.
        threads: of torch, during the measurement.
        waited: part of the measurement in which the process was ready and had no processor.
        times: by clock and name of the run, the seconds of each round.
    """

    inputs: str
    clock: str
    threads: int
    waited: float
    times: Mapping[str, Mapping[str, list[float]]]

    @property
    def rounds(self) -> int:
        return len(next(iter(self.times[self.clock].values())))

    @property
    def seconds(self) -> dict[str, float]:
        return self.seconds_by(self.clock)

    def seconds_by(self, clock: str) -> dict[str, float]:
        """Seconds by name of the run; the ratio of two is a measured one."""
        times = self.times[clock]
        base = statistics.median(next(iter(times.values())))
        return {name: base * statistics.median(ratios) for name, ratios in _ratios(times).items()}

    @property
    def spread(self) -> dict[str, float]:
        """The standard error of `seconds`, in parts of them; of the ratio to the first run for all others."""
        times = self.times[self.clock]
        first, *others = times
        ratios = _ratios(times)
        return {first: _spread(times[first]), **{name: _spread(ratios[name]) for name in others}}

    def doubts(self, spread: float = SPREAD) -> list[str]:
        """Reasons to measure again: a busy machine, and times that differ more than `spread` after all rounds."""
        found = [doubts.busy(self.waited, self.threads), doubts.unsteady(max(self.spread.values()), spread)]
        return [doubt for doubt in found if doubt is not None]

    def to_dict(self) -> dict[str, Any]:
        """What a report has: seconds by both clocks, and the machine."""
        here, seconds, spread = environment(), {clock: self.seconds_by(clock) for clock in CLOCKS}, self.spread
        return {
            "inputs": self.inputs,
            "clock": self.clock,
            "threads": self.threads,
            "rounds": self.rounds,
            "waited": self.waited,
            "processor": here["processor"],
            "instructions": here["instructions"],
            "runs": {
                name: {**{f"{clock}_seconds": seconds[clock][name] for clock in CLOCKS}, "spread": spread[name]}
                for name in spread
            },
        }


def measure(
    runs: Mapping[str, Run],
    inputs: str,
    *,
    threads: int | None = None,
    clock: str | None = None,
    least: int = 3,
    most: int = ROUNDS,
    seconds: float = SECONDS,
    spread: float = SPREAD,
) -> Latency:
    """Measure how long each of several runs takes, in turns.

    Args:
        runs: by name, functions that run a model once on the batch and wait for the result.
        inputs: the batch in words, such as "32 x 128 tokens".
        threads: of torch, for the time of the measurement; sessions of other runtimes have their own number. Default:
            as they are.
        clock: "wall" for runs on an accelerator. Default: "processor" with one thread, otherwise "wall".
        least, most: numbers of rounds.
        seconds: after this time no further round begins, once there are `least`.
        spread: no further round begins once the spread of every run is at most this, and there are `least`.

    Example:
        >>> found = measure({"long": lambda: sum(range(9999)), "short": lambda: sum(range(9))}, "no inputs", most=5)
        >>> 3 <= found.rounds <= 5, found.seconds["long"] > found.seconds["short"] > 0
        (True, True)
    """
    if not runs:
        raise ValueError("there is nothing to measure; give at least one run")
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(_checks.positive_int(threads, "threads"))
    try:
        used = torch.get_num_threads()
        chosen = _checks.choose(clock or ("processor" if used == 1 else "wall"), CLOCKS, "clock")
        times: dict[str, dict[str, list[float]]] = {name: {run: [] for run in runs} for name in CLOCKS}
        start = time.perf_counter()
        with watch() as watched:
            names = list(runs)
            calls = {name: _calls(run) for name, run in runs.items()}
            for turn in range(most):
                first = (turn + 1) % len(names)  # the order decides whose output finds memory that is already mapped
                for name in names[first:] + names[:first]:
                    uncounted, counted = calls[name]
                    for _ in range(uncounted):
                        runs[name]()
                    began = {key: read() for key, read in CLOCKS.items()}
                    for _ in range(counted):
                        runs[name]()
                    for key, read in CLOCKS.items():
                        times[key][name].append((read() - began[key]) / counted)
                if turn + 1 < least:
                    continue
                found = Latency(inputs, chosen, used, 0.0, times)
                if time.perf_counter() - start > seconds or max(found.spread.values()) <= spread:
                    break
        return Latency(inputs, chosen, used, watched.waited, times)
    finally:
        torch.set_num_threads(before)


def _calls(run: Run) -> tuple[int, int]:
    """How many calls of a turn are not counted, and how many are; from the shortest of three calls."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    shortest = max(min(times), TURN / 1000)
    return int(shortest < WARM), math.ceil(TURN / shortest)


def run_torch(model: nn.Module, batch: Batch) -> Run:
    """A forward pass of a torch model, on its device."""
    inputs = place(batch, model)
    return lambda: float(model(**inputs)[0].flatten()[0])  # waits for an accelerator


def clock_of(model: nn.Module) -> str | None:
    """The argument `clock` of `measure` for a torch model: processor time does not count that of an accelerator."""
    return None if next(model.parameters()).device.type == "cpu" else "wall"


@dataclass
class Watched:
    waited: float = 0.0


@contextmanager
def watch() -> Iterator[Watched]:
    """The part of the time in this block in which the process waited for a processor: of the thread that waited most.

    Where the system does not count it, one thread alone shows it, by wall time beyond its processor time.
    """
    watched = Watched()
    began = time.perf_counter(), time.process_time(), _waiting()
    yield watched
    wall, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    waits = [seconds - began[2].get(thread, 0.0) for thread, seconds in _waiting().items()]
    if not waits and torch.get_num_threads() == 1:  # the time of several threads may exceed that on the wall
        waits = [wall - processor]
    watched.waited = min(1.0, max([0.0, *waits]) / max(wall, 1e-9))


def _waiting() -> dict[str, float]:
    """The seconds for which each thread of this process was ready and waited for a processor; {} where unknown."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread may end
            found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return found


def _ratios(times: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Times of each run over those of the first, round by round."""
    first = next(iter(times.values()))
    return {name: [b / max(a, 1e-9) for a, b in zip(first, own, strict=True)] for name, own in times.items()}


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return math.inf
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return 0.93 * (high - low) / max(middle, 1e-12) / math.sqrt(len(values))
