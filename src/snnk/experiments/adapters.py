"""Beyond the paper: methods of fine-tuning at an equal number of trained parameters.

All methods take the same steps on the same rows of GLUE tasks, from the same start of the classifier. A method trains
about 78,000 parameters of a MiniLM, which has 12 sites of 384 values; BitFit, IA3 and the linear probe have fewer
parameters to train. The learning rate of a method is chosen on validation rows that are cut from the training file of
the first task, with a seed of its own. Each final row is evaluated once on the dev file. Every row is trained in a
process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import mean, variance
from typing import TYPE_CHECKING

from snnk.experiments.lab import tiny
from snnk.experiments.lab.data import NOWHERE, Source, is_quick
from snnk.experiments.lab.records import Results, Row, claim
from snnk.experiments.lab.tuning import tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "beyond the paper: methods at equal size"
NEEDS = "GLUE; a sentence encoder"
TIME = "5 hours with a MiniLM; --quick 10 s"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"

SIZES: dict[str, int | None] = {  # features, rank or width of each method
    "snnk": 17,
    "snnk-tuned": 8,
    "snnk-relu": 16,
    "snnk-cos": 16,
    "lora": 8,
    "houlsby": 8,
    "bitfit": None,
    "ia3": None,
    "linear-probe": None,
}


@dataclass(frozen=True)
class Config:
    """The inner ones of `rates` are tried first, then neighbours of the best one until all of them were tried."""

    tasks: tuple[str, ...] = ("sst2", "stsb", "mrpc", "cola")
    methods: tuple[str, ...] = tuple(SIZES)
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    max_steps: int = 150
    batch_size: int = 32
    schedule: str = "linear"
    max_length: int = 128
    train_rows: int = 10_000  # at most, per task
    pooling: str = "mean"
    seeds: int = 3
    seed: int = 0


QUICK = Config(("cola",), ("snnk", "snnk-relu", "lora", "houlsby"), rates=(3e-3, 1e-2), max_steps=3, seeds=1)


def total(config: Config) -> int:
    """The largest number of rows that `run` yields."""
    return len(config.methods) * (len(config.rates) + len(config.tasks) * config.seeds)


def waves(config: Config, results: Results) -> Iterator[list[Row]]:
    """Lists of keys of rows. Each list depends on the rows of the lists before it, not on its own."""

    def key(stage: str, task: str, method: str, rate: float, seed: int) -> Row:
        return {"stage": stage, "task": task, "method": method, "learning_rate": rate, "seed": seed}

    rates, first = config.rates, config.tasks[0]
    wave = [
        key("tuning", first, method, rate, config.seed)
        for method in config.methods
        for rate in (rates[1:-1] if len(rates) > 2 else rates)
    ]
    chosen: dict[str, float] = {}
    while wave:
        yield wave
        wave = []
        for method in config.methods:
            tried = [r for r in results if (r["stage"], r["method"]) == ("tuning", method)]
            # the lowest of equally good rates, whatever the order of the rows
            tried.sort(key=lambda r: r["learning_rate"])
            best = chosen[method] = max(tried, key=lambda r: _or_least(r["validation"]))["learning_rate"]
            known, at = {r["learning_rate"] for r in tried}, rates.index(best)
            beside = {rates[max(at - 1, 0)], rates[min(at + 1, len(rates) - 1)]} - known
            wave += [key("tuning", first, method, rate, config.seed) for rate in sorted(beside)]
    # by seed first, so that a run that is stopped early has compared the methods on every task
    yield [
        key("final", task, method, chosen[method], config.seed + 1 + i)
        for i in range(config.seeds)
        for task in config.tasks
        for method in config.methods
    ]


def _or_least(score: float | None) -> float:
    return -math.inf if score is None else score


def measure(key: Row, config: Config, files: Mapping[str, str]) -> Row:
    """The row of one training run, with scores on validation and dev rows; None for them if the run diverged."""
    result = tuned(
        files,
        method=key["method"],
        task=key["task"],
        num_features=SIZES[key["method"]],
        learning_rate=key["learning_rate"],
        max_steps=config.max_steps,
        batch_size=config.batch_size,
        schedule=config.schedule,
        max_length=config.max_length,
        limit_train=config.train_rows,
        pooling=config.pooling,
        seed=key["seed"],
    )
    if result is None:
        return {**key, "validation": None, "dev": None}
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
        "seconds_a_step": training["seconds"] / training["steps"],  # evaluations included
        "peak_GB": training["peak_memory_bytes"] / 1e9,
    }


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """Rows of stage "tuning" per method and rate, then rows of stage "final" per seed, task and method."""
    with tiny.glue(config, QUICK, source, MODEL) as files:
        for wave in waves(config, results):
            for key in wave:
                yield results.find(**key) or results.add(_alone(key, config, files))


def _alone(key: Row, config: Config, files: Mapping[str, str]) -> Row:
    """`measure` in a new process, as the peak memory of a process never falls; --quick saves the seconds of a start."""
    if is_quick(config, QUICK):
        return measure(key, config, files)
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (key, config, files))


Finals = dict[str, dict[tuple[str, int], Row]]


def finals(results: Results, methods: Sequence[str] = ()) -> Finals:
    """Final rows by method, task and seed, for the tasks and seeds that all these methods have."""
    found: Finals = {}
    for r in results:
        if r["stage"] == "final" and (not methods or r["method"] in methods):
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
    config, seen = results.config, {(r["task"], r["method"]) for r in results if r["stage"] == "final"}
    rows = [r["task"] for r in results if r["stage"] == "final"]
    wanted = len(config["methods"]) * config["seeds"]
    tasks = [task for task in config["tasks"] if rows.count(task) < wanted]
    return [
        f"{task}: {rows.count(task)} of {wanted} final rows, of {sum(t == task for t, _ in seen)} methods"
        for task in tasks
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
        ours = f"{', '.join(told)}{tie}; {first['model']}, mean of {many}"
        tolerance = f"{error:.2f} points, one standard error over seeds: less is a tie" if known else "none"
        return [claim(statement, ours, gap > error, tolerance)]

    return [
        *ahead("LoRA 83.46 above ReLU-SNNK adapters 82.32, both 0.3 M, mean of 8 tasks", "lora", "snnk-relu"),
        *ahead("not in the paper: fitted directions above random ReLU features at equal size", "snnk", "snnk-relu"),
        *ahead("not in the paper: fitted directions above LoRA at equal size", "snnk", "lora"),
        *ahead("not in the paper: fitted directions above bottleneck adapters at equal size", "snnk", "houlsby"),
        *ahead("not in the paper: bottleneck adapters, started from the data, above LoRA", "snnk-tuned", "lora"),
        *ahead("not in the paper: bottleneck adapters are better if started from the data", "snnk-tuned", "houlsby"),
    ]
