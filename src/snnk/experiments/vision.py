"""CIFAR-10 (section 4.2.2, the appendix's table of vision models): adapters, pooler and bundled head on a frozen ViT.

The paper's hyperparameters: 1e-3, batches of 64, ReLU adapters with 16 features and gradients cut to norm 1, inputs of
the pooler over d^(1/4). Ours: some of the images, few steps, classifiers that start from their closed form. The model's
processor resizes the images. --data-dir may also be a folder with train and test, each with one folder a class: its
name is the task's, and only one called cifar10 is set beside the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snnk.experiments import tiny
from snnk.experiments.data import NOWHERE, Source
from snnk.experiments.records import Results, Row
from snnk.experiments.tuning import bars, orders, row_of, score_of, tuned

FIGURE = "table: vision models; figure: ViT poolers"
NEEDS = "CIFAR-10; ViT-base, DINOv2 or another"
TIME = "minutes on a GPU, hours on a CPU; --quick 10 s"
TASK = "cifar10"
PAPER = {  # ViT-base, all images, in percent
    "snnk-relu": {TASK: 98.2},
    "bundled": {TASK: 95.8},
    "houlsby": {TASK: 99.1},
    "lora": {TASK: 98.7},
}
PAIRS = tuple(("snnk-relu", name, name) for name in ("houlsby", "lora", "bundled"))
NEAR = 1.0  # points: "matches", "closely matching"


@dataclass(frozen=True)
class Config:
    """The paper's sizes."""

    methods: tuple[str, ...] = ("linear-probe", "snnk-pooler", "bundled", "snnk-relu", "houlsby", "lora")
    pooler_features: int = 512
    bundled_features: int = 1024
    adapter_features: int = 16
    bottleneck: int = 48
    rank: int = 8
    train_rows: int = 2000
    test_rows: int = 1000
    batch_size: int = 64
    max_steps: int = 60
    seeds: int = 1
    seed: int = 0

    def features(self, method: str) -> int | None:
        sizes = {"snnk-pooler": self.pooler_features, "bundled": self.bundled_features, "lora": self.rank}
        sizes |= dict.fromkeys(("snnk-relu", "snnk-cos"), self.adapter_features)
        return {**sizes, "houlsby": self.bottleneck}.get(method)


QUICK = Config(
    methods=("linear-probe", "snnk-pooler", "bundled", "snnk-relu"),
    pooler_features=16,
    bundled_features=32,
    adapter_features=4,
    max_steps=2,
)


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return len(config.methods) * config.seeds


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row for each method and seed."""
    folder = Path(source.data_dir or "")
    task = folder.resolve().name if source.data_dir and (folder / "train").is_dir() else TASK
    with tiny.images(config, QUICK, source) as files:
        for seed in range(config.seed, config.seed + config.seeds):
            for method in config.methods:
                features = config.features(method)
                key = {"part": "table", "task": task, "method": method, "features": features, "seed": seed}
                row = results.find(**key)
                if row is None:
                    sizes = {"batch_size": config.batch_size, "max_steps": config.max_steps}
                    found = tuned(files, method=method, features=features, seed=seed, **sizes)
                    paper = PAPER.get(method, {}).get(task)
                    row = results.add({**key, **row_of(found.metrics, "accuracy"), "paper": paper})
                yield row


def plot(results: Results) -> Any:
    """Accuracy of each method, and the paper's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1.5 + 0.4 * len({r["method"] for r in results})), layout="constrained")
    bars(figure.subplots(), results, next(r["task"] for r in results))
    return figure


def claims(results: Results) -> list[Row]:
    """The order of methods, and what the paper says to match the baseline."""
    table = orders(results, PAIRS, PAPER)
    probe = score_of(results, TASK, "linear-probe")
    # the classifier of a ViT reads the token itself: the head that is there without ours is a linear one
    for method, text in (("snnk-pooler", "matches the baseline"), ("bundled", "95.8, closely matching the baseline")):
        score = score_of(results, TASK, method)
        if probe is not None and score is not None:
            model = next(r["model"] for r in results)
            ours = f"{score:.2f}, linear probe {probe:.2f} ({model})"
            table.append({"paper": f"{TASK}: {method} {text}", "ours": ours, "holds": score >= probe - NEAR})
    return table
