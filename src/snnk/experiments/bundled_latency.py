"""The paper's timing of bundled transformers (end of the appendix "Uptraining Transformers").

A batch of 64 texts of 128 tokens through BERT-base, of 32 images through ViT-base; the original and the one whose top
six feed-forward blocks are bundled with 8 random features. Weights are random: time does not depend on them. The two
take turns; a time is that of the processor, one thread, which a busy machine hardly changes. What can be compared with
the paper's machine is the ratio; that of the multiply-adds is the bound of any code that does nothing else.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from snnk.experiments.data import NOWHERE, Source
from snnk.experiments.records import Results, Row, claim

FIGURE = "appendix: seconds of bundled models"
NEEDS = "transformers"
TIME = "10 minutes; --quick 10 seconds"
PAPER = {"BERT": (0.44, 0.32), "ViT": (0.33, 0.26)}  # seconds of the original and of ours
PART = 0.95  # of the multiply-adds' ratio


@dataclass(frozen=True)
class Config:
    models: tuple[str, ...] = tuple(PAPER)
    layers: int = 12
    replaced: int = 6
    num_features: int = 8
    texts: int = 64
    length: int = 128
    images: int = 32
    rounds: int = 5
    seed: int = 0


QUICK = Config(("BERT",), layers=2, replaced=1, texts=2, rounds=2)


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return len(config.models)


def _build(name: str, config: Config) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and its inputs."""
    import transformers

    hf: Any = transformers
    if name == "BERT":
        ids = torch.zeros(config.texts, config.length, dtype=torch.long)
        return hf.BertModel(hf.BertConfig(num_hidden_layers=config.layers)).eval(), {"input_ids": ids}
    vit = hf.ViTForImageClassification(hf.ViTConfig(num_hidden_layers=config.layers, num_labels=1000))
    return vit.eval(), {"pixel_values": torch.zeros(config.images, 3, 224, 224)}


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row for each model: the seconds of each turn, their medians, and multiply-adds."""
    try:
        from snnk.hf import bundle_, replace_ffn_
        from snnk.hf.counting import multiply_adds
    except ImportError as error:
        raise ImportError(f"this experiment needs {error.name}: pip install 'snnk[hf]'") from None
    for name in config.models:
        row = results.find(model=name)
        if row is None:
            original, inputs = _build(name, config)
            bundled = copy.deepcopy(original)
            replace_ffn_(bundled, f"top-{config.replaced}", num_features=config.num_features)
            bundle_(bundled)
            work = [multiply_adds(model, inputs) for model in (original, bundled)]
            times = _turns([original, bundled], inputs, config.rounds)
            row = results.add(
                {
                    "model": name,
                    "replaced": config.replaced,
                    "multiply_adds_ratio": work[0] / work[1],
                    "seconds": median(times[0]),
                    "seconds_bundled": median(times[1]),
                    "time_ratio": median(times[0]) / median(times[1]),
                    "all_seconds": times[0],
                    "all_seconds_bundled": times[1],
                    "seed": config.seed,
                }
            )
        yield row


@torch.no_grad()
def _turns(models: list[Any], inputs: dict[str, Any], rounds: int) -> list[list[float]]:
    """Seconds of processor time of each model, one thread, `rounds` times after one to warm up."""
    times: list[list[float]] = [[] for _ in models]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(rounds + 1):
            for who in (range(len(models)), reversed(range(len(models))))[turn % 2]:
                start = time.process_time()
                models[who](**inputs)
                times[who].append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return [values[1:] for values in times]


def plot(results: Results) -> Any:
    """How many times faster: each turn, the paper's, and the multiply-adds' ratio."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    rows = list(results)
    for at, row in enumerate(rows):
        turns = [a / b for a, b in zip(row["all_seconds"], row["all_seconds_bundled"], strict=True)]
        axes.plot([at] * len(turns), turns, "o", color="tab:blue", alpha=0.5, label="ours, a turn each")
        axes.plot(at, row["time_ratio"], "_", color="tab:blue", ms=30, label="ours, medians")
        axes.plot(at, row["multiply_adds_ratio"], "_", color="black", ms=30, label="multiply-adds")
        before, after = PAPER[row["model"]]
        axes.plot(at, before / after, "x", color="tab:red", ms=8, label="paper")
    axes.set_xticks(range(len(rows)), [f"{row['model']}, top {row['replaced']}" for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylabel("times faster than the original")
    axes.grid(alpha=0.3, axis="y")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys())
    return figure


def claims(results: Results) -> list[Row]:
    """The paper's times as a ratio, and ours beside that of the multiply-adds."""
    table = []
    for row in results:
        before, after = PAPER[row["model"]]
        cell = f"{row['model']}, top {row['replaced']} bundled"
        ratio, work = row["time_ratio"], row["multiply_adds_ratio"]
        ours = f"{row['seconds']:.2f} -> {row['seconds_bundled']:.2f} s of one thread, {ratio:.2f} times faster"
        table += [
            claim(
                f"{cell}: {before} -> {after} s, {before / after:.2f} times faster",
                ours,
                ratio >= before / after,
                "at least as many times",
            ),
            claim(
                f"not in the paper: {cell}: as many times faster as multiply-adds are fewer",
                f"{ratio:.2f} times faster, {work:.2f} times fewer",
                ratio >= PART * work,
                f"{PART} of it",
            ),
        ]
    return table
