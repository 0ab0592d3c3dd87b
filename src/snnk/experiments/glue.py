"""GLUE (sections 4.2.1 and 4.2.2, appendices on ablations, additional experiments and baselines).

Poolers: tanh(W x + b) of the [CLS] token becomes phi(x) psi(W, b)^T, which is trained with the classifier on a frozen
model. It is also merged with the classifier ("bundled"), solved in closed form, built from the power series of tanh,
and started from random weights. Adapters: y + v * (phi(y) A^T) with random ReLU or cosine features, against bottleneck
adapters, LoRA and BitFit. On one task, both are run with more and with fewer features.

The hyperparameters are the paper's; of the rates that it tries for bundled heads, the lowest is used. Three choices are
ours. The number of steps is capped, so that a run takes minutes instead of epochs. Every classifier starts from its
closed form, which makes up for much of that. A tenth of the training rows, not the dev file, chooses the epoch.
Therefore a claim here is about the order of two methods with equal steps, not about a score. Sentence encoders such as
MiniLM and MPNet have a pooler that was never trained: for them, adapters use the mean of all tokens, and the claims
about poolers carry a remark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from snnk.experiments.lab import tiny
from snnk.experiments.lab.data import NOWHERE, Source
from snnk.experiments.lab.records import Results, Row, claim
from snnk.experiments.lab.tuning import bars, both, deviation, metric_of, orders, others, row_of, tuned, variants

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "tables: poolers, adapters, bundled, tanh, baselines; ablations"
NEEDS = "GLUE; BERT-base or another"
TIME = "an hour on a GPU, several on a CPU; --quick 15 s"

TASKS = ("rte", "mrpc", "qnli", "qqp", "sst2", "mnli", "stsb", "cola")
ANSWERS = dict(zip(TASKS, (277, 408, 5463, 40430, 872, 9815, 1500, 1043), strict=True))  # rows of the dev files
PAPER: dict[str, dict[str, float]] = {  # BERT-base, in percent
    "pooler": dict(zip(TASKS, (57.5, 81.5, 74.5, 72.0, 84.9, 56.4, 78.1, 29.4), strict=True)),
    "snnk-pooler": dict(zip(TASKS, (61.36, 82.07, 73.5, 70.43, 85.21, 52.69, 78.93, 35.81), strict=True)),
    "tanh-pooler": {"rte": 52.08, "mrpc": 68.71, "stsb": 63.49, "cola": 20.72},
    "linear-probe": dict(zip(TASKS, (57.76, 81.23, 69.18, 62.22, 83.02, 43.4, 69.87, 35.41), strict=True)),
    "bundled": dict(zip(TASKS, (60.01, 81.48, 72.21, 70.19, 82.97, 53.69, 71.84, 32.79), strict=True)),
    "closed-form": {"stsb": 67.0},
    "snnk-relu": dict(zip(TASKS, (69.68, 91.26, 90.44, 85.82, 92.31, 82.06, 88.81, 58.21), strict=True)),
    "snnk-cos": dict(zip(TASKS, (64.77, 85.06, 88.67, 86.47, 91.97, 79.28, 88.57, 52.12), strict=True)),
    "adapter baseline": dict(zip(TASKS, (63.83, 84.8, 90.63, 88.12, 91.74, 83.53, 88.48, 56.51), strict=True)),
    "houlsby": dict(zip(TASKS, (69.8, 91.5, 91.2, 88.6, 92.8, 84.1, 89.2, 59.1), strict=True)),
    "pfeiffer": dict(zip(TASKS, (70.8, 89.7, 91.3, 88.2, 90.2, 84.1, 89.0, 58.9), strict=True)),
    "lora": dict(zip(TASKS, (72.5, 90.1, 91.5, 88.5, 92.7, 84.1, 89.1, 59.2), strict=True)),
    "bitfit": dict(zip(TASKS, (72.3, 90.4, 90.2, 84.0, 92.1, 82.2, 89.2, 58.8), strict=True)),
}
METHODS = (*(name for name in PAPER if name != "adapter baseline"), "random-pooler")
# Two methods of ours, and the paper's name of the second. Its "adapter baseline" with 0.9 M parameters has adapters at
# the places of Pfeiffer's.
PAIRS = (
    ("snnk-pooler", "pooler", "pooler"),
    ("snnk-pooler", "tanh-pooler", "tanh-pooler"),
    ("bundled", "pooler", "pooler"),
    ("bundled", "linear-probe", "linear-probe"),
    ("bundled", "closed-form", "closed-form"),
    ("snnk-relu", "pfeiffer", "adapter baseline"),
    ("snnk-cos", "pfeiffer", "adapter baseline"),
    *(("snnk-relu", name, name) for name in ("houlsby", "lora", "bitfit")),
)
ADAPTERS = ("snnk-relu", "snnk-cos", "houlsby", "pfeiffer", "lora", "bitfit")
COUNTS = (  # the number of 8 tasks on which the first method is above the second
    ("snnk-pooler", "pooler", "pooler", 5),
    ("snnk-relu", "pfeiffer", "adapter baseline", 5),
    ("snnk-cos", "pfeiffer", "adapter baseline", 4),
)


@dataclass(frozen=True)
class Config:
    """The paper's sizes. The methods of snnk.finetune have its rates, weight decay and schedules."""

    tasks: tuple[str, ...] = ("cola", "stsb", "mrpc")
    methods: tuple[str, ...] = METHODS
    pooler_features: int = 512  # ours: the paper gives no number
    bundled_features: int = 1024
    adapter_features: int = 16
    bottleneck: int = 48
    rank: int = 8
    ablation_task: str = "cola"
    ablation: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("snnk-relu", (8, 16, 32, 64)),
        ("snnk-pooler", (128, 256, 512, 1024)),
    )
    batch_size: int = 64
    max_steps: int = 200
    max_length: int = 128
    classifier_start: str = "closed-form"
    seeds: int = 1
    seed: int = 0

    def features(self, method: str) -> int | None:
        """The size of a method: features, width or rank; None for methods without one."""
        if method in ("linear-probe", "bitfit", "pooler"):
            return None
        if method.endswith("-pooler"):
            return self.pooler_features
        sizes = {"bundled": self.bundled_features, "closed-form": self.bundled_features, "lora": self.rank}
        return sizes.get(method, self.adapter_features if method.startswith("snnk-") else self.bottleneck)


QUICK = Config(
    tasks=("stsb",),
    methods=(
        "pooler",
        "snnk-pooler",
        "tanh-pooler",
        "random-pooler",
        "bundled",
        "closed-form",
        "snnk-relu",
        "pfeiffer",
    ),
    pooler_features=16,
    bundled_features=32,
    adapter_features=4,
    bottleneck=4,
    rank=2,
    ablation_task="stsb",
    ablation=(("snnk-relu", (2, 4)), ("snnk-pooler", (8, 16))),
    max_steps=2,
)


def wanted(config: Config) -> list[Row]:
    """The keys of all rows: those of the tables, then the further ones of the ablations."""
    found: list[Row] = []
    for seed in range(config.seed, config.seed + config.seeds):
        for task in config.tasks:
            for method in config.methods:
                if method != "closed-form" or metric_of(task) == "spearman":  # which is for regression
                    size = config.features(method)
                    found.append({"part": "table", "task": task, "method": method, "features": size, "seed": seed})
        for method, sizes in config.ablation:
            for size in sizes:
                key = {"task": config.ablation_task, "method": method, "features": size, "seed": seed}
                if {"part": "table", **key} not in found:
                    found.append({"part": "ablation", **key})
    return found


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return len(wanted(config))


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row per task, method, number of features and seed."""
    with tiny.glue(config, QUICK, source) as files:
        known, trained = variants(), _trained_pooler(files["model"])
        for key in wanted(config):
            row = results.find(**key)
            if row is None:
                options = {"task": key["task"], "num_features": key["features"], "seed": key["seed"]}
                for name in ("batch_size", "max_steps", "max_length", "classifier_start"):
                    options[name] = getattr(config, name)
                if key["method"] == "closed-form":
                    options["max_steps"] = 0
                options["pooling"] = "mean" if key["method"] in ADAPTERS and trained is False else "model"
                base, variant = known.get(key["method"], (key["method"], None))
                found = row_of(tuned(files, variant, method=base, **options), metric_of(key["task"]))
                paper = PAPER.get(key["method"], {}).get(key["task"]) if key["part"] == "table" else None
                pooler = {"pooling": options["pooling"], "pooler_trained": bool(trained)}
                row = results.add({**key, **found, **pooler, "paper": paper})
            yield row


def _trained_pooler(model: str) -> bool | None:
    """Whether the stored pooler was trained, which moves its bias from zero; None if no pooler is stored."""
    from snnk.finetune.methods import stored_pooler

    dense = stored_pooler(model)
    return None if dense is None else bool(dense.bias.any())


def _curve(results: Results, method: str) -> dict[int, float]:
    """Mean score on the task of the ablation by number of features."""
    rows = [r for r in results if (r["task"], r["method"]) == (results.config["ablation_task"], method)]
    rows = [r for r in rows if r["score"] is not None]
    sizes = sorted({r["features"] for r in rows})
    return {size: mean(r["score"] for r in rows if r["features"] == size) for size in sizes}


def plot(results: Results) -> Figure:
    """Our scores and the paper's per task, and scores against the number of features."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(r["task"] for r in results if r["part"] == "table"))
    curves = {method: _curve(results, method) for method, _ in results.config["ablation"]}
    curves = {method: curve for method, curve in curves.items() if len(curve) > 1}
    count = len(tasks) + bool(curves)
    figure = Figure(figsize=(4.5 * count, 5), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=False):
        bars(axes, results, task)
    if curves:
        last, task = panels[-1], results.config["ablation_task"]
        for method, curve in curves.items():
            last.plot(list(curve), list(curve.values()), "o-", label=method)
        last.set_xscale("log", base=2)
        last.set_xlabel("features")
        last.set_ylabel(f"{metric_of(task)}, %")
        last.set_title(f"{task}, by number of features")
        last.grid(alpha=0.3)
        last.legend(fontsize=8)
    return figure


def left(results: Results) -> list[str]:
    """The parts that the rows lack: of their own configuration, then of the paper's."""
    config = results.config
    known = Config(**{**config, "tasks": tuple(config["tasks"]), "methods": tuple(config["methods"])})
    missing = [key for key in wanted(known) if not results.find(**key)]
    found = []
    for part, task in dict.fromkeys((key["part"], key["task"]) for key in missing):
        own = [key for key in missing if (key["part"], key["task"]) == (part, task)]
        names = [f"{k['method']} {k['features']}" if part == "ablation" else k["method"] for k in own]
        found.append(f"{task}, {part}: {', '.join(dict.fromkeys(names))} ({len(own)} row{'s' * (len(own) > 1)})")
    tasks = [task for task in TASKS if task not in config["tasks"]]
    return [*found, *([", ".join(tasks)] if tasks else []), *others(results, "bert-base")]


def claims(results: Results) -> list[Row]:
    """The order of pairs of methods, the number of tasks on which ours is ahead, sizes, and the ablations."""
    trained = all(r["pooler_trained"] for r in results)
    own = ("pooler", "snnk-pooler", "tanh-pooler", "bundled", "closed-form")
    notes = {} if trained else dict.fromkeys(own, "whose pooler was never trained")
    table = orders(results, PAIRS, PAPER, ANSWERS, notes)
    for one, two, name, count in COUNTS:
        tasks = [task for task in both(results, one, two) if task in PAPER[one]]
        ours = sum(a > b for a, b in (both(results, one, two)[task] for task in tasks))
        paper = sum(PAPER[one][task] > PAPER[name][task] for task in tasks)
        if paper:  # otherwise the claim could not fail
            statement = f"{one} above {name} on {count} of 8 tasks; {paper} of {', '.join(tasks)}"
            table.append(claim(statement, f"above {two} on {ours} of {len(tasks)}", ours >= paper))
    starts = both(results, "snnk-pooler", "random-pooler")
    if starts and trained:  # otherwise both start at random
        pretrained, chance = (mean(pair[i] for pair in starts.values()) for i in (0, 1))
        statement = "a pooler that starts from pretrained weights is better than one from random weights"
        told = f"{pretrained:.2f} against {chance:.2f}, mean of {', '.join(starts)}"
        table.append(claim(statement, told, pretrained > chance))
    sizes = {r["method"]: r["trained"] for r in results if r["part"] == "table" and r["trained"]}
    if {"snnk-relu", "pfeiffer"} <= sizes.keys():
        ratio = sizes["snnk-relu"] / sizes["pfeiffer"]
        told = f"{sizes['snnk-relu']:,} of {sizes['pfeiffer']:,}, classifiers included: {ratio:.2f}"
        statement = "SNNK adapters train 1/3 of the adapter baseline's parameters"
        table.append(claim(statement, told, abs(ratio - 1 / 3) < 0.07, "0.07"))
    for method, _ in results.config["ablation"]:
        curve = _curve(results, method)
        if len(curve) > 1:
            told = ", ".join(f"{size}: {score:.2f}" for size, score in curve.items())
            task, most, least = results.config["ablation_task"], curve[max(curve)], curve[min(curve)]
            noise = deviation(metric_of(task), most, least, ANSWERS[task])
            tie = " (a tie)" if abs(most - least) <= noise else ""
            statement, tolerance = f"{method}: more features help, on large tasks", f"{noise:.1f} points: less is a tie"
            table.append(claim(statement, f"{task}, {told}{tie}", most - least > noise, tolerance))
    return table
