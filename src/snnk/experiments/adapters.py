"""Beyond the paper: methods of fine-tuning at an equal number of trained parameters.

All methods are trained on the same rows of GLUE tasks, drawn from the training files, from the same start of the
classifier, until the score on validation rows has not risen for three epochs, or for `epochs`. The validation rows are
others of the training file. They choose the learning rate, for every task and method, and the epoch. The run with the
chosen rate is the first seed; other seeds have other rows, batches and dropout. The dev file is evaluated once per run
and chooses nothing. A method trains about 78,000 parameters of a MiniLM, which has 12 sites of 384 values; BitFit, IA3
and the linear probe have fewer to train, Pfeiffer's adapters three times as many, as in the paper, and full fine-tuning
all.

A row says whether its training had ended: it was stopped as the score rose no more, or its best epoch was not the last.
Every run has a process of its own with one thread, as many at a time as torch has threads, so that its time and its
peak memory are its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import mean, variance
from typing import TYPE_CHECKING

from snnk.experiments.lab import tiny
from snnk.experiments.lab.data import NOWHERE, Source, is_quick
from snnk.experiments.lab.records import Results, Row, claim
from snnk.experiments.lab.tuning import course, have_ended, tuned, variants

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "beyond the paper: methods at equal size"
NEEDS = "GLUE; a sentence encoder"
TIME = "12 hours of one core with a MiniLM; --quick 10 s"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"

SIZES: dict[str, int | None] = {  # features, rank or width of each method
    "snnk": 17,
    "snnk-tuned": 8,
    "snnk-relu": 16,
    "snnk-cos": 16,
    "lora": 8,
    "houlsby": 8,
    "pfeiffer": 48,
    "bitfit": None,
    "ia3": None,
    "linear-probe": None,
    "full": None,
}
SLOWER = {"full": 0.01}  # factors on the learning rates


@dataclass(frozen=True)
class Config:
    """The inner ones of `rates` are tried first, then neighbours of the best one until all of them were tried."""

    tasks: tuple[str, ...] = ("cola", "sst2", "stsb", "mrpc")
    methods: tuple[str, ...] = tuple(SIZES)
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    epochs: int = 10
    batch_size: int = 32
    schedule: str = "linear"
    dropout: bool = False  # in the base model; with it, bottleneck adapters on CoLA were no better in a longer time
    max_length: int = 128
    train_rows: int = 2_500  # as many as RTE has
    pooling: str = "mean"
    seeds: int = 3
    seed: int = 0


QUICK = Config(
    ("cola",), ("snnk", "snnk-relu", "lora", "houlsby"), rates=(3e-3, 1e-2), epochs=1, train_rows=40, seeds=1
)


def total(config: Config) -> int:
    """The largest number of rows that `run` yields."""
    return len(config.methods) * len(config.tasks) * (len(config.rates) + config.seeds - 1)


def waves(config: Config, results: Results) -> Iterator[list[Row]]:
    """Lists of keys of rows. Each list depends on the rows of the lists before it, not on its own.

    Tasks and methods that are listed first are done first, so that a run that is stopped has whole comparisons.
    """

    def key(task: str, method: str, rate: float, seed: int) -> Row:
        return {"task": task, "method": method, "learning_rate": rate * SLOWER.get(method, 1.0), "seed": seed}

    rates = config.rates
    for task in config.tasks:
        wave = [
            key(task, method, rate, config.seed)
            for method in config.methods
            for rate in (rates[1:-1] if len(rates) > 2 else rates)
        ]
        while wave:
            yield wave
            wave = []
            for method in config.methods:
                tried = _tried(results, task, method, config.seed)
                at = {key(task, method, rate, 0)["learning_rate"]: i for i, rate in enumerate(rates)}
                known, best = {at[r["learning_rate"]] for r in tried}, at[_best(tried)["learning_rate"]]
                beside = {max(best - 1, 0), min(best + 1, len(rates) - 1)} - known
                wave += [key(task, method, rates[i], config.seed) for i in sorted(beside)]
        yield [
            {**key(task, method, 0.0, config.seed + i), "learning_rate": best["learning_rate"]}
            for i in range(1, config.seeds)
            for method in config.methods
            for best in [_best(_tried(results, task, method, config.seed))]
        ]


def _tried(results: Results, task: str, method: str, seed: int) -> list[Row]:
    return [r for r in results if (r["task"], r["method"], r["seed"]) == (task, method, seed)]


def _best(tried: Sequence[Row]) -> Row:
    """The row with the best validation score; of equal ones that with the lowest rate."""
    return max(tried, key=lambda r: (_or_least(r["validation"]), -r["learning_rate"]))


def _or_least(score: float | None) -> float:
    return -math.inf if score is None else score


def measure(key: Row, config: Config, files: Mapping[str, str]) -> Row:
    """The row of one training run, with scores on validation and dev rows; None for them if the run diverged."""
    name = key["method"]
    base, variant = variants().get(name, (name, None))
    result = tuned(
        files,
        variant,
        method=base,
        task=key["task"],
        num_features=SIZES[name],
        learning_rate=key["learning_rate"],
        epochs=config.epochs,
        batch_size=config.batch_size,
        schedule=config.schedule,
        dropout=config.dropout,
        max_length=config.max_length,
        limit_train=config.train_rows,
        pooling=config.pooling,
        seed=key["seed"],
    )
    if result is None:
        return {**key, "validation": None, "dev": None, "late_gain": 0.0}
    found = result.metrics
    training, scores, metric = found["training"], found["scores"], found["metric"]
    return {
        **key,
        "model": found["base_model"],
        "trained": found["parameters"]["trained"],
        "metric": metric,
        "validation": scores["validation"][metric],
        "dev": scores["test"][metric],
        "start_validation": training["epochs"][0][metric],
        **course(training, metric),
        "seconds_a_step": training["seconds"] / training["steps"],  # evaluations included
        "peak_GB": training["peak_memory_bytes"] / 1e9,
    }


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """Rows per task, method, rate and seed."""
    with tiny.glue(config, QUICK, source, MODEL) as files:
        for wave in waves(config, results):
            known = [results.find(**key) for key in wave]
            yield from (row for row in known if row)
            for row in _measured([key for key, row in zip(wave, known, strict=True) if not row], config, files):
                yield results.add(row)


def _measured(keys: Sequence[Row], config: Config, files: Mapping[str, str]) -> Iterator[Row]:
    """Rows as they are done, each from a new process with one thread; --quick saves the seconds of a start."""
    if is_quick(config, QUICK):
        yield from (measure(key, config, files) for key in keys)
        return
    import torch

    # a new process for each, as the peak memory of a process never falls
    with get_context("spawn").Pool(torch.get_num_threads(), _one_thread, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(partial(measure, config=config, files=files), keys)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def chosen(results: Results) -> list[Row]:
    """The rows of the learning rate that was chosen for their task and method."""
    seed, pairs = results.config["seed"], dict.fromkeys((r["task"], r["method"]) for r in results)
    best = {pair: _best(_tried(results, *pair, seed))["learning_rate"] for pair in pairs}
    return [r for r in results if r["learning_rate"] == best[r["task"], r["method"]]]


Finals = dict[str, dict[tuple[str, int], Row]]


def finals(results: Results, methods: Sequence[str] = ()) -> Finals:
    """Rows with the chosen rate by method, task and seed, for the tasks and seeds that all these methods have."""
    found: Finals = {}
    for r in chosen(results):
        if not methods or r["method"] in methods:
            found.setdefault(r["method"], {})[r["task"], r["seed"]] = r
    shared = [key for key in next(iter(found.values()), {}) if all(key in rows for rows in found.values())]
    return {method: {key: rows[key] for key in shared} for method, rows in found.items()}


def by_task(rows: Mapping[tuple[str, int], Row]) -> dict[str, list[float]]:
    """Scores in percent by task; NaN for a run that diverged."""
    found: dict[str, list[float]] = {}
    for (task, _), r in rows.items():
        found.setdefault(task, []).append(math.nan if r["dev"] is None else 100 * r["dev"])
    return found


def scores(results: Results, methods: Sequence[str] = ()) -> dict[str, float]:
    """The mean over tasks of the mean over seeds, best first; NaN, and last, for a method that diverged."""
    found = {m: mean(map(mean, by_task(rows).values())) for m, rows in finals(results, methods).items() if rows}
    return dict(sorted(found.items(), key=lambda pair: (math.isnan(pair[1]), -pair[1])))


def plot(results: Results) -> Figure:
    """The mean over tasks, and one point per task and seed."""
    from matplotlib.figure import Figure

    found, means = finals(results), scores(results)
    # the last task's count, as tasks differ in their numbers of classes
    trained = {r["method"]: r["trained"] for r in results if r.get("trained")}
    names = {method: f"{method} ({trained[method]:,})" for method in means if method in trained}
    figure = Figure(figsize=(8, 1.5 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.plot([means[method] for method in names], list(names.values()), "k|", ms=16, label="mean of tasks")
    points = {method: by_task(found[method]) for method in names}
    for task in dict.fromkeys(task for tasks in points.values() for task in tasks):
        dots = [(score, names[method]) for method in names for score in points[method][task]]
        axes.plot(*zip(*dots, strict=True), "o", alpha=0.6, label=task)
    axes.invert_yaxis()
    axes.set_xlabel("score on dev, %")
    axes.set_ylabel("method (trained parameters)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def left(results: Results) -> list[str]:
    """The number of missing final rows by task."""
    config, rows = results.config, chosen(results)
    wanted = len(config["methods"]) * config["seeds"]
    found = {task: [r["method"] for r in rows if r["task"] == task] for task in config["tasks"]}
    return [
        f"{task}: {len(own)} of {wanted} final rows, of {len(set(own))} methods"
        for task, own in found.items()
        if len(own) < wanted
    ]


def claims(results: Results) -> list[Row]:
    """The paper's comparison at equal size, and our adapters against each of the usual methods."""

    def ahead(statement: str, better: str, worse: str) -> list[Row]:
        rows, means = finals(results, (better, worse)), scores(results, (better, worse))
        if len(means) < 2:
            return []
        if any(map(math.isnan, means.values())):
            return [claim(statement, "diverged", False)]
        first = next(iter(rows[better].values()))
        trained = {name: max(r["trained"] for r in own.values()) for name, own in rows.items()}
        one, two = (by_task(rows[name]) for name in (better, worse))
        gaps = [[a - b for a, b in zip(one[task], two[task], strict=True)] for task in one]
        gap = means[better] - means[worse]
        # The standard error of the mean over seeds; dev rows are the same for both. A task with one seed takes the mean
        # variance of the others.
        known = [variance(g) for g in gaps if len(g) > 1]
        parts = [(variance(g) if len(g) > 1 else mean(known)) / len(g) for g in gaps] if known else []
        error = math.sqrt(sum(parts)) / len(gaps)
        told = [f"{name} {means[name]:.2f} ({trained[name]:,} trained)" for name in (better, worse)]
        tie = " (a tie)" if abs(gap) <= error else ""
        many = ", ".join(f"{task} ({len(found)} seed{'s' * (len(found) > 1)})" for task, found in one.items())
        ended = all(have_ended(own.values()) for own in rows.values())
        cut = "" if ended else "; the validation score was still rising when training was cut off"
        ours = f"{', '.join(told)}{tie}; {first['model']}, mean of {many}{cut}"
        tolerance = f"{error:.2f} points, one standard error over seeds: less is a tie" if known else "none"
        return [claim(statement, ours, gap > error if ended else None, tolerance)]

    return [
        *ahead("LoRA 83.46 above ReLU-SNNK adapters 82.32, both 0.3 M, mean of 8 tasks", "lora", "snnk-relu"),
        *ahead("not in the paper: fitted directions above random ReLU features at equal size", "snnk", "snnk-relu"),
        *ahead("not in the paper: fitted directions above LoRA at equal size", "snnk", "lora"),
        *ahead("not in the paper: fitted directions above bottleneck adapters at equal size", "snnk", "houlsby"),
        *ahead("not in the paper: bottleneck adapters, started from the data, above LoRA", "snnk-tuned", "lora"),
        *ahead("not in the paper: bottleneck adapters are better if started from the data", "snnk-tuned", "houlsby"),
    ]
