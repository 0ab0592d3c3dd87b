"""Beyond the paper: blocks of a sentence encoder replaced in closed form, from sentences without labels.

Each feed-forward block becomes phi(x) A^T + b with a part of its parameters. A is fitted by least squares to the
outputs of the original block on sentences of STS-B's training file. There are three choices of phi: atoms, which are
neurons of the block itself, chosen and refitted; the same atoms, then moved by a few steps; and random ReLU features,
as in the paper. With "whole model", attention is replaced too, by heads of fewer dimensions, and the numbers of atoms
and dimensions are chosen together. Parts are compared by `multiply_adds`: what is left of those of all linear layers
inside the layers of the model.
The measure on STS-B dev is the Spearman correlation of the scores with the cosines of sentence vectors, which are means
of the last hidden states. The mean cosine between these vectors and those of the original model is given beside it.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk.experiments.lab import tiny
from snnk.experiments.lab.data import NOWHERE, Source
from snnk.experiments.lab.records import Results, Row, claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

    from snnk.hf import Plan

FIGURE = "beyond the paper: compression without labels"
NEEDS = "GLUE's STS-B; a sentence encoder"
TIME = "30 minutes with a MiniLM; --quick 10 s"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
ORIGINAL = "original"


class Way(NamedTuple):
    """`kind` and `blocks` of the plan; whether the fit is moved, and whether the whole model is then distilled."""

    kind: str
    blocks: str = "ffn"
    moved: bool = False
    distilled: bool = False


FITTED, MOVED, RANDOM = "neurons, closed form", "neurons, moved", "random ReLU features"
WHOLE, DISTILLED = "whole model, moved", "whole model, moved and distilled"
WAYS = {
    FITTED: Way("atoms"),
    MOVED: Way("atoms", moved=True),
    RANDOM: Way("random-relu"),
    WHOLE: Way("atoms", "all", moved=True),
    DISTILLED: Way("atoms", "all", moved=True, distilled=True),
}
Batch = dict[str, Tensor]
States = Callable[[Batch], Tensor]
SMALL, TIE = 1.0, 0.1  # points of Spearman correlation


@dataclass(frozen=True)
class Config:
    """`keeps` are parts of the parameters of feed-forward blocks, `whole` those of all blocks.

    `refine` is the number of steps that move the fit of a block, `distill` that of the whole model, which also reads
    `more` sentences.
    """

    keeps: tuple[float, ...] = (0.5, 0.25, 0.125)
    whole: tuple[float, ...] = (0.33, 0.25, 0.21)
    ways: tuple[str, ...] = tuple(WAYS)
    sentences: int = 2000
    more: int = 8000
    refine: int = 120
    distill: int = 512
    max_length: int = 128
    seeds: int = 1
    seed: int = 0


QUICK = Config(
    keeps=(0.5, 0.125), whole=(0.5,), ways=(FITTED, RANDOM, DISTILLED), sentences=100, more=100, refine=5, distill=5
)


def parts(config: Config) -> list[tuple[str, float]]:
    """The ways, each with the parts that it is measured at."""
    keeps = {"ffn": config.keeps, "all": config.whole}
    return [(way, keep) for way in config.ways for keep in keeps[WAYS[way].blocks]]


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return 1 + len(parts(config)) * config.seeds


@dataclass(frozen=True)
class Task:
    """Batches for calibration, batches of pairs (first and second sentence alternate), and the scores of the pairs.

    `more` are batches for distillation alone.
    """

    calibration: list[Batch]
    pairs: list[Batch]
    scores: list[float]
    more: list[Batch] = field(default_factory=list)


def read(files: Mapping[str, str], config: Config, seed: int) -> Task:
    """Read STS-B: the training file without its scores, and the dev file."""
    from snnk.hf.models import load_processor

    tokenizer = load_processor(files["model"], images=False)

    def encode(texts: list[str], size: int) -> list[Batch]:
        options: Any = {"padding": True, "truncation": True, "max_length": config.max_length, "return_tensors": "pt"}
        return [dict(tokenizer(texts[i : i + size], **options)) for i in range(0, len(texts), size)]

    found, tested = tiny.glue_columns("stsb", files["data_dir"])
    texts = sorted({*found["sentence1"], *found["sentence2"]})
    order = random.Random(seed)
    order.shuffle(texts)

    def batches_of(some: list[str]) -> list[Batch]:
        found = encode(sorted(some, key=len), max(1, min(32, len(some) // 20)))
        order.shuffle(found)  # every tenth batch is held out, and these should have all lengths
        return found

    batches = batches_of(texts[: config.sentences])
    more = batches_of(texts[config.sentences : config.sentences + config.more])
    pairs = [text for both in zip(tested["sentence1"], tested["sentence2"], strict=True) for text in both]
    return Task(batches, encode(pairs, 64), [float(score) for score in tested["score"]], more)


@torch.no_grad()
def vectors(states: States, batches: list[Batch]) -> Tensor:
    """Unit vectors of sentences, (n, d): means of the last hidden states over the tokens that are not padding."""
    found = []
    for batch in batches:
        mask = batch["attention_mask"][..., None]
        found.append((states(batch) * mask).sum(1) / mask.sum(1))
    return F.normalize(torch.cat(found).double(), dim=1)


def states_of(model: nn.Module) -> States:
    """The last hidden states of a model as a function of the batch."""
    return lambda batch: model(**batch).last_hidden_state


def quality(states: States, original: Tensor, task: Task) -> Row:
    """Spearman correlation on the pairs, in percent, and mean cosine to the vectors of the original model."""
    from snnk.finetune.scores import spearman

    found = vectors(states, task.pairs)
    return {
        "spearman": 100 * spearman((found[::2] * found[1::2]).sum(1).numpy(), np.array(task.scores)),
        "cosine": float((found * original).sum(1).mean()),
    }


def part_left(plan: Plan, model: PreTrainedModel) -> float:
    """The part that a plan leaves of the multiply-adds per token of the linear layers of all blocks of a model."""
    from snnk import hf

    whole = sum(block.multiply_adds_before for block in hf.plan(model, keep=1.0).blocks)
    return 1 - sum(block.multiply_adds_before - block.multiply_adds for block in plan.blocks) / whole


def measure(model: nn.Module, original: Tensor, task: Task) -> Row:
    """Quality and size of a model; `original` are the vectors of the model before compression."""
    from snnk.hf.cost import stored

    tensors = stored(model).values()
    return {
        **quality(states_of(model), original, task),
        "stored_M": sum(t.numel() for t in tensors) / 1e6,
        "stored_MB": sum(t.nbytes for t in tensors) / 1e6,
    }


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """The row of the original model, then one per seed, part and way."""
    with tiny.glue(config, QUICK, source, MODEL) as files:
        from transformers import AutoModel

        from snnk import hf
        from snnk.hf.models import load_model

        model = load_model(files["model"], AutoModel, zero_pooler=True).model
        name = Path(files["model"]).name if Path(files["model"]).is_dir() else files["model"]
        task = read(files, config, config.seed)
        original = vectors(states_of(model), task.pairs)
        row = results.find(way=ORIGINAL)
        if row is None:
            found = measure(model, original, task)
            key = {"way": ORIGINAL, "keep": 1.0, "seed": None, "model": name}
            row = results.add({**key, "multiply_adds": 1.0, **found, "seconds": 0.0})
        yield row
        for seed in range(config.seed, config.seed + config.seeds):
            task = read(files, config, seed)
            for way, keep in parts(config):
                row = results.find(way=way, keep=keep, seed=seed)
                if row is None:
                    chosen, changed, start = WAYS[way], copy.deepcopy(model), time.perf_counter()
                    together = task.calibration if chosen.blocks == "all" else None
                    plan = hf.plan(changed, keep=keep, feature_map=chosen.kind, blocks=chosen.blocks, batches=together)
                    hf.compress_(
                        changed,
                        plan,
                        task.calibration,
                        refine=config.refine if chosen.moved else 0,
                        recover=config.distill if chosen.distilled else 0,
                        more=task.more if chosen.distilled else (),
                        seed=seed,
                    )
                    spent = {"seconds": time.perf_counter() - start}
                    key = {"way": way, "keep": keep, "seed": seed, "model": name}
                    left = {"multiply_adds": part_left(plan, model)}
                    row = results.add({**key, **left, **measure(changed, original, task), **spent})
                yield row


def _curve(results: Results, way: str, key: str) -> dict[float, float]:
    """The mean over seeds by the part that is kept."""
    rows = [r for r in results if r["way"] == way]
    keeps = sorted({r["keep"] for r in rows})
    return {keep: mean(r[key] for r in rows if r["keep"] == keep) for keep in keeps}


def plot(results: Results) -> Figure:
    """Spearman correlation and cosine against the multiply-adds that are left."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2), ("spearman", "cosine"), ("Spearman, STS-B dev, %", "cosine to the original"), strict=True
    ):
        for way in dict.fromkeys(r["way"] for r in results if r["way"] != ORIGINAL):
            left = _curve(results, way, "multiply_adds")
            axes.plot(list(left.values()), list(_curve(results, way, key).values()), "o-", label=way)
        for value in _curve(results, ORIGINAL, key).values():
            axes.axhline(value, color="tab:gray", ls="--", label=ORIGINAL)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("part of the linear layers' multiply-adds that is left")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def claims(results: Results) -> list[Row]:
    """Atoms against random features, moved atoms against closed form, distilled against not, and the original."""
    scores = {way: _curve(results, way, "spearman") for way in (ORIGINAL, *WAYS)}
    cosines = {way: _curve(results, way, "cosine") for way in WAYS}
    model = next((r["model"] for r in results), "")
    table = []
    for better, worse in ((FITTED, RANDOM), (MOVED, FITTED), (DISTILLED, WHOLE)):
        for keep in sorted(scores[better].keys() & scores[worse].keys(), reverse=True):
            told, holds = [], True
            for name, curves, digits in (("Spearman", scores, 2), ("cosine", cosines, 3)):
                one, two = curves[better][keep], curves[worse][keep]
                told.append(f"{name} {one:.{digits}f} against {two:.{digits}f}")
                holds = holds and one > two - (TIE if curves is scores else 0)
            statement = f"not in the paper: {better}, above {worse}, keep {keep:g}"
            tolerance = f"{TIE:g} of Spearman, none of cosine"
            table.append(claim(statement, f"{', '.join(told)} ({model})", holds, tolerance))
    for way in (FITTED, DISTILLED):
        if 0.25 in scores[way] and scores[ORIGINAL]:
            before, after = scores[ORIGINAL][1.0], scores[way][0.25]
            statement = f"not in the paper: {way}, keep 0.25, costs less than {SMALL:g} point"
            ours = f"Spearman {before:.2f} -> {after:.2f} ({model})"
            table.append(claim(statement, ours, after > before - SMALL, f"{SMALL:g} point"))
    return table
