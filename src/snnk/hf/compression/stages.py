"""How many steps a distillation takes, in stages, and the record of its course.

With `doubling` the first stage has FIRST steps and every further one twice as many as the last. There is no further one
if the last has brought the held-out distance down by less than LEAST_GAIN, or if it would take longer than the time
that is left. On MiniLM, the distance after stages of 128, 256 and 512 steps was a hundredth larger than after one stage
of 896, which is the price for a length that need not be known before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

FIRST, FEWEST = 128, 16  # steps of the first stage, and the number below which it is not worthwhile
LEAST_GAIN = 0.02  # smallest part of the held-out distance that a stage must gain for another one to follow
PASSES = 20  # over all batches at most, in all stages of "auto"


@dataclass(frozen=True)
class Recovery:
    """The course of a distillation. Distances are those of distance.py, in the mean over inputs; 0 is the original.

    Attributes:
        stages: number of steps of each stage.
        kept: the step whose state the model has: the end of a stage, or 0 if no stage has brought it nearer.
        curve: the `step`, the `held_out` distance there, and the `training` distance in the mean since the last point.
        stopped: why there is no further stage.
        batches, held_out_batches: how many there were to train on, and to choose the length by.
    """

    stages: tuple[int, ...] = ()
    kept: int = 0
    curve: tuple[dict[str, float], ...] = ()
    stopped: str = ""
    batches: int = 0
    held_out_batches: int = 0
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return sum(self.stages)

    @property
    def distances(self) -> tuple[float, float]:
        """The held-out distance before and after."""
        at = {int(point["step"]): point["held_out"] for point in self.curve}
        return at[0], at[self.kept]

    def __str__(self) -> str:
        before, after = self.distances
        if not self.stages:
            return f"No step of distillation was taken, as {self.stopped}."
        found = f"{self.steps:,} steps of distillation in {self.seconds:.0f} s"
        if not self.kept:
            there = f"({before:.4f} before, {self.curve[-1]['held_out']:.4f} after)"
            return f"{found} did not lower the distance on held-out inputs {there}: the model is as it was fitted."
        rest = "" if self.kept == self.steps else f", of which the first {self.kept:,} are kept,"
        return (
            f"{found}{rest} took the distance to the original, on inputs held out for this, from {before:.4f} to "
            f"{after:.4f}. There were no more, as {self.stopped}."
        )


class Course(Protocol):
    """What the length of the next stage depends on."""

    stages: list[int]  # lengths of those that are complete
    gain: float  # of the last stage, as a part of the distance before it

    @property
    def steps(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    def time_of_a_step(self) -> float: ...


# The length of the next stage, or 0 and the reason why there is none.
NextStage = Callable[[Course], tuple[int, str]]


def fixed(steps: int) -> NextStage:
    """One stage of so many steps."""
    return lambda run: (0, "these are all that were asked for") if run.stages else (steps, "")


def doubling(seconds: float, most: int) -> NextStage:
    """Stages of twice as many steps each, while they gain something and fit into the time and a number of steps.

    If such a stage does not fit, one of the length of the last one may. A first stage is halved until it fits. Lengths
    are not fitted to the time more closely, so that the speed of the machine has little influence on the result.
    """

    def next_stage(run: Course) -> tuple[int, str]:
        if not run.stages:
            each, length = run.time_of_a_step(), FIRST
            while length >= FEWEST and (length * each > seconds or length > most):
                length //= 2
            short = f"there is no room for {FEWEST} steps of {each:.2g} s in {seconds:.0f} s and {PASSES} passes"
            return (length, "") if length >= FEWEST else (0, short)
        if run.gain < LEAST_GAIN:
            return 0, f"the last stage gained {max(run.gain, 0.0):.2%}, and less than {LEAST_GAIN:.0%} is not enough"
        for length in (2 * run.stages[-1], run.stages[-1]):
            if run.seconds * (1 + length / run.steps) <= seconds and run.steps + length <= most:
                return length, ""
        if run.steps + length > most:
            return 0, f"{length:,} more would be above {PASSES} passes over the inputs"
        return 0, f"{length:,} more would take longer than the rest of {seconds:.0f} s"

    return next_stage
