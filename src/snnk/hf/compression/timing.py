r"""Times of a model with blocks of other sizes, measured on this machine.

How long a block takes does not follow from its multiply-adds: it depends on the processor, the batch, the runtime, and
on what the rest of the model leaves in the caches. Therefore the whole model is run: in a copy that shares its weights,
all blocks of one shape become one size, filled with random numbers, and the copy and the model take turns. No block has
to be fitted, and the table of times.py has a few rows for each shape of block.
serve/latency.py has the clocks.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from snnk import _checks
from snnk._environment import environment
from snnk.hf.compression.plans import BlockPlan, option, width_of
from snnk.hf.compression.times import Time, TimedBlocks, Timings, check_tokens
from snnk.hf.cost import counting_mode
from snnk.hf.finding import find_blocks
from snnk.hf.low_rank import LowRank, replace_attention_
from snnk.hf.model_blocks import FFN, KEPT, Attention, ModelBlock
from snnk.hf.models import Batch, example_inputs, without_gguf_
from snnk.hf.replace import LOW_RANK, Replacement, replace_
from snnk.hf.serve.forms import FORMS, run_form
from snnk.hf.serve.latency import Latency, Run, clock_of, measure, run_torch, watch
from snnk.maps import RANDOM_MAPS, make_feature_map

TOKENS = (1, 32)  # one short text
MOST_TOKENS = 2**20  # of a batch that a file asks for
SECONDS, ROUNDS, SPREAD = 2.0, 100, 0.002  # of one measurement: duration, rounds at most, and when to stop early
Runner = Callable[[PreTrainedModel, Batch], Run]
TORCH = "torch"


RUNTIMES: dict[str, Runner] = {TORCH: run_torch, **{form: partial(run_form, form=form) for form in FORMS}}


def measure_times(
    model: PreTrainedModel,
    blocks: Sequence[ModelBlock] | None = None,
    *,
    kind: str = "atoms",
    tokens: tuple[int, int] = TOKENS,
    runtime: str = TORCH,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Timings:
    """Measure the table of times of a model; the model stays as it is.

    Args:
        model: a transformers model with any head, none of whose blocks was replaced.
        blocks: those that may change. Default: all.
        kind: what feed-forward blocks may become: "atoms", and with them linear maps and constants, or a name of random
            features.
        tokens: number of inputs of the batch, and tokens per text up to the model's limit.
        runtime: a name in `RUNTIMES`.
        progress: called with the number of sizes that were measured, and of all.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> timings = measure_times(BertModel(BertConfig(vocab_size=9, **sizes)))
        >>> [(group.blocks, len(group.times)) for group in timings.groups]
        [(('encoder.layer.0.attention',), 8), (('encoder.layer.0',), 7)]
    """
    groups: dict[Any, list[ModelBlock]] = {}
    for block in find_blocks(model) if blocks is None else blocks:
        groups.setdefault(_shape(block), []).append(block)
    measured: dict[int, list[tuple[BlockPlan, float]]] = {}  # by group, with the part of the model's seconds
    sizes = {i: _choices(group[0], kind) for i, group in enumerate(groups.values())}
    with _Trial(model, tokens, runtime) as trial:
        for i, group in enumerate(groups.values()):
            measured[i] = []
            for choice in sizes[i]:
                progress(sum(map(len, measured.values())), sum(map(len, sizes.values())))
                changed = [option(b, choice.kind, choice.num_features, ranks=choice.ranks) for b in group]
                measured[i].append((choice, trial.ratio(changed)))
    seconds = trial.seconds
    found = []
    for i, group in enumerate(groups.values()):
        times = [Time(c.kind, c.num_features, c.ranks, ratio * seconds) for c, ratio in measured[i]]
        names = tuple(block.name for block in group)
        found.append(TimedBlocks(names, width_of(group[0]), (Time(KEPT, None, None, seconds), *times)))
    processor, threads = environment()["processor"], torch.get_num_threads()
    inputs = described(trial.batch)
    return Timings(runtime, trial.tokens, processor, threads, trial.waited, seconds, tuple(found), inputs)


def described(batch: Batch) -> str:
    """The inputs of a batch in words.

    Example:
        >>> described({"input_ids": torch.zeros(1, 32), "pixel_values": torch.zeros(2, 3, 8, 8)})
        '1 x 32 tokens and 2 images of 8 x 8'
    """
    words = []
    if "input_ids" in batch:
        words.append(f"{len(batch['input_ids'])} x {batch['input_ids'].shape[-1]} tokens")
    if "pixel_values" in batch:
        count, (height, width) = len(batch["pixel_values"]), batch["pixel_values"].shape[-2:]
        words.append(f"{count} image{'s' if count > 1 else ''} of {height} x {width}")
    if "input_features" in batch:
        count, frames = len(batch["input_features"]), batch["input_features"].shape[-1]
        words.append(f"{count} sound{'s' if count > 1 else ''} of {frames} frames")
    return " and ".join(words)


def check_runs(model: PreTrainedModel, *, tokens: tuple[int, int], runtime: str) -> None:
    """Refuse a batch and a runtime that the model cannot be timed with, by running it once."""
    batch, length = tokens
    if batch * length > MOST_TOKENS:
        raise ValueError(f"a batch of {batch} x {length} tokens is too large to be timed; the most is {MOST_TOKENS:,}")
    with counting_mode(model), _refusals(model, runtime):
        RUNTIMES[runtime](model, example_inputs(model, tokens))()


@contextmanager
def _refusals(model: PreTrainedModel, runtime: str) -> Iterator[None]:
    """Turn errors of a model's code and of a runtime, which may be any, into a ValueError."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be run with {runtime}: {error}") from error


def compare(models: Sequence[PreTrainedModel], *, tokens: tuple[int, int], runtime: str) -> list[float]:
    """Seconds of models for one batch, in turns."""
    run = _checks.look_up(runtime, RUNTIMES, "runtime")
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(counting_mode(model))
        batches = [example_inputs(model, tokens) for model in models]
        runs = {str(i): run(model, batch) for i, (model, batch) in enumerate(zip(models, batches, strict=True))}
        return list(_measure(runs, batches[0], models[0]).seconds.values())


def _measure(runs: dict[str, Run], batch: Batch, model: nn.Module) -> Latency:
    return measure(runs, described(batch), clock=clock_of(model), most=ROUNDS, seconds=SECONDS, spread=SPREAD)


class _Trial:
    """Runs of a model and of a copy whose blocks have other sizes.

    After the `with`, `seconds` are those of the model as it is.
    """

    def __init__(self, model: PreTrainedModel, tokens: tuple[int, int], runtime: str) -> None:
        self.run, self.runtime = _checks.look_up(runtime, RUNTIMES, "runtime"), runtime
        self.tokens, self.model = check_tokens(tokens), model
        self.batch = example_inputs(model, self.tokens)
        if "input_ids" in self.batch:  # cut to the length that the model has positions for
            self.tokens = self.tokens[0], self.batch["input_ids"].shape[-1]
        self.medians: list[float] = []

    def __enter__(self) -> _Trial:
        shared = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        self.copy = copy.deepcopy(self.model, shared)
        without_gguf_(self.copy)
        self.blocks = {block.name: block for block in find_blocks(self.copy)}
        with ExitStack() as stack:  # which is left at once if the runtime is not there
            stack.enter_context(counting_mode(self.model))
            stack.enter_context(counting_mode(self.copy))
            with _refusals(self.model, self.runtime):
                self.whole = self.run(self.model, self.batch)
            self.watched = stack.enter_context(watch())
            self.stack = stack.pop_all()
        return self

    def ratio(self, blocks: list[BlockPlan]) -> float:
        """Seconds of the copy with these blocks, over those of the model."""
        generator = torch.Generator().manual_seed(0)
        with ExitStack() as undo:
            for planned in blocks:
                if (new := replace_as_planned(self.blocks[planned.name], planned)) is not None:
                    undo.callback(new.restore_)
                    for parameter in (p for module in new.modules for p in module.parameters()):
                        # not zeros, as a runtime may store equal layers once
                        parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
            with _refusals(self.model, self.runtime):
                runs = {"whole": self.whole, "changed": self.run(self.copy, self.batch)}
            first, second = _measure(runs, self.batch, self.model).seconds.values()
        self.medians.append(first)
        return second / first

    def __exit__(self, *error: Any) -> None:
        self.stack.close()
        self.waited = self.watched.waited
        self.seconds = statistics.median(self.medians) if self.medians else 0.0


def replace_as_planned(block: ModelBlock, planned: BlockPlan) -> Replacement | LowRank | None:
    """Put new modules in place of a block as planned, and do not fit them."""
    if isinstance(block, Attention) and planned.ranks is not None:
        return replace_attention_(block, planned.ranks)
    if not isinstance(block, FFN) or planned.kind == KEPT:
        return None
    if planned.kind in RANDOM_MAPS and planned.num_features:
        return replace_(block, make_feature_map(planned.kind, block.in_features, planned.num_features, seed=0))
    return replace_(block, planned.kind, planned.num_features)


def _shape(block: ModelBlock) -> tuple[Any, ...]:
    """Equal for blocks that take equally long: same sizes, in the same tower, which may have tokens of its own."""
    heads = block.heads if isinstance(block, Attention) else None
    return block.layer_name.rpartition(".")[0], type(block), width_of(block), heads, block.out_features, block.cost


def _choices(block: ModelBlock, kind: str) -> list[BlockPlan]:
    """The sizes that are measured for a block."""
    width = width_of(block)
    if isinstance(block, Attention):
        small, half, more = max(1, width // 8), max(1, width // 2), max(1, width * 3 // 4)
        pairs = [
            (small, small),
            (half, half),
            (more, more),
            (small, half),
            (half, small),
            (small, width),
            (width, small),
        ]
        if block.names.fixed:
            pairs = [(width, t) for t in (small, max(1, width // 4), half, more)]
        return [option(block, LOW_RANK, ranks=ranks) for ranks in dict.fromkeys(pairs) if min(ranks) < width]
    counts = sorted({max(2, int(part * width) // 2 * 2) for part in (0, 1 / 8, 1 / 4, 1 / 2, 3 / 4)} - {width})
    if kind != "atoms":
        return [option(block, kind, count) for count in (*counts, width // 2 * 2) if count]
    return [option(block, "drop"), option(block, "linear"), *(option(block, "atoms", count) for count in counts)]
