"""The paper's timing of bundled transformers (end of the appendix "Uptraining Transformers").

BERT-base reads 64 texts of 128 tokens, and ViT-base 32 images. The original is compared with a model whose top six
feed-forward blocks are bundled with 8 random features. The paper measured on a free Google Colab and does not give its
number of blocks; six is the most in its table. Weights are random, as time does not depend on them. The two models take
turns on one thread. Times are processor times, which other programs change less than the wall clock, and a speedup is
the median over turns. The ratio of multiply-adds beside it is the speedup to expect if they alone took time; it does
not count activation functions, of which there are fewer too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from snnk.experiments.bundled_transformers import build
from snnk.experiments.lab.data import NOWHERE, Source
from snnk.experiments.lab.records import Results, Row, claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

FIGURE = "appendix: seconds of bundled models"
NEEDS = "transformers"
TIME = "10 minutes; --quick 10 seconds"
WHY_NOT = """Norms, activations and memory traffic take time that multiply-adds do not count, and their share grows as
the feed-forward blocks shrink; that is the likely reason, and was not measured. The paper's own speedups hold."""
PAPER = {"BERT": (0.44, 0.32), "ViT": (0.33, 0.26)}  # seconds of the original and of ours
PART = 0.95  # the part of the ratio of multiply-adds that a speedup must reach


@dataclass(frozen=True)
class Config:
    models: tuple[str, ...] = tuple(PAPER)
    layers: int = 12
    replaced: int = 6
    num_features: int = 8
    texts: int = 64
    length: int = 128
    images: int = 32
    rounds: int = 6
    threads: int = 1
    seed: int = 0


QUICK = Config(("BERT",), layers=2, replaced=1, texts=2, rounds=2)


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return len(config.models)


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row per model."""
    try:
        from snnk.hf import bundle_, replace_ffn_
        from snnk.hf.cost import multiply_adds
    except ImportError as error:
        raise ImportError(f"this experiment needs {error.name}: pip install 'snnk[hf]'") from None
    for name in config.models:
        row = results.find(model=name)
        if row is None:
            original, inputs = build(name, config, layers=config.layers, seed=config.seed)
            bundled = copy.deepcopy(original)
            replace_ffn_(bundled, f"top-{config.replaced}", num_features=config.num_features, seed=config.seed)
            bundle_(bundled)
            work = [multiply_adds(model, inputs) for model in (original, bundled)]
            before, after = _seconds([original, bundled], inputs, config)
            row = results.add(
                {
                    "model": name,
                    "layers": config.layers,
                    "replaced": config.replaced,
                    "threads": config.threads,
                    "multiply_adds_G": work[0] / 1e9,
                    "multiply_adds_G_bundled": work[1] / 1e9,
                    "seconds": before,
                    "seconds_bundled": after,
                    "time_ratio": median(a / b for a, b in zip(before, after, strict=True)),
                    "seed": config.seed,
                }
            )
        yield row


@torch.no_grad()
def _seconds(models: list[PreTrainedModel], inputs: dict[str, Tensor], config: Config) -> list[list[float]]:
    """Processor time per model and turn."""
    from snnk.hf.serve.latency import measure

    runs = {str(i): lambda model=model: model(**inputs) for i, model in enumerate(models)}
    found = measure(runs, "one batch", threads=config.threads, least=config.rounds, most=config.rounds)
    return list(found.times["processor"].values())


def _ratios(row: Row) -> tuple[list[float], float]:
    """The ratio of times per turn, and the ratio of multiply-adds."""
    turns = [a / b for a, b in zip(row["seconds"], row["seconds_bundled"], strict=True)]
    return turns, row["multiply_adds_G"] / row["multiply_adds_G_bundled"]


def plot(results: Results) -> Figure:
    """The speedup per turn beside the paper's, and the ratio of multiply-adds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    rows = list(results)
    for at, row in enumerate(rows):
        turns, work = _ratios(row)
        axes.plot([at] * len(turns), turns, "o", color="tab:blue", alpha=0.5, label="ours, one point per turn")
        axes.plot(at, row["time_ratio"], "_", color="tab:blue", ms=30, label="ours, median")
        axes.plot(at, work, "_", color="black", ms=30, label="multiply-adds")
        before, after = PAPER[row["model"]]
        axes.plot(at, before / after, "x", color="tab:red", ms=8, label="paper")
    axes.set_xticks(range(len(rows)), [f"{row['model']}, top {row['replaced']} of {row['layers']}" for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylabel("times faster than the original")
    axes.grid(alpha=0.3, axis="y")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys())
    return figure


def claims(results: Results) -> list[Row]:
    """The paper's speedup beside ours, and ours beside the ratio of multiply-adds."""
    table = []
    for row in results:
        (before, after), (turns, work) = PAPER[row["model"]], _ratios(row)
        paper, ours = before / after, row["time_ratio"]
        told = (
            f"{ours:.2f} times faster (turns {min(turns):.2f} to {max(turns):.2f}), top {row['replaced']} of "
            f"{row['layers']}: {median(row['seconds']):.1f} -> {median(row['seconds_bundled']):.1f} s"
        )
        fewer = f"{ours:.2f} times faster, {work:.2f} times fewer multiply-adds"
        table += [
            claim(f"{row['model']}: {before} -> {after} s, {paper:.2f} times faster", told, ours >= paper),
            claim(
                f"not in the paper: bundled {row['model']} is faster by as much as it has fewer multiply-adds, or more",
                fewer,
                ours >= PART * work,
                f"{1 - PART:.0%} of their ratio",
            ),
        ]
    return table
