"""Shared by the experiments on transformers: fine-tuning runs as rows, and claims about the order of two methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from snnk.experiments.lab.records import Results, Row, claim

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from snnk.finetune.methods import Method
    from snnk.finetune.run import FinetuneResult

EQUAL = 1.0  # points within which two scores count as equal, unless chance alone explains more
LATE, SMALL = 2, 0.5  # a training has ended if the best validation score rose less than this in so many last epochs
CUT = "; the validation score was still rising when training was cut off"
METRICS = {"cola": "mcc", "mrpc": "f1", "qqp": "f1", "stsb": "spearman"}  # the paper's; accuracy for other tasks


def metric_of(task: str) -> str:
    """The metric that the paper reports for a task."""
    return METRICS.get(task, "accuracy")


def tuned(
    files: Mapping[str, str], variant: Method | None = None, *, shared: Path | None = None, **options: Any
) -> FinetuneResult | None:
    """The FinetuneResult of one run into a temporary folder; None if the run diverged.

    Args:
        files: model and data for FinetuneConfig.
        variant: a Method in place of `method` in `options`, which still gives the default hyperparameters.
        shared: see `finetune`.
        **options: further fields of FinetuneConfig.
    """
    from snnk.finetune import FinetuneConfig, finetune
    from snnk.finetune.trainer import Diverged

    with TemporaryDirectory() as folder:
        try:
            settings: dict[str, Any] = {"out": str(Path(folder, "out")), **files, **options}
            return finetune(FinetuneConfig(**settings), method=variant, shared=shared)
        except Diverged:
            return None


def variants() -> dict[str, tuple[str, Method]]:
    """Methods beside those of METHODS: name -> (the method whose hyperparameters it takes, the method)."""
    from snnk import hf
    from snnk.finetune.methods import METHODS as KNOWN
    from snnk.finetune.methods import nothing, snnk_adapter

    def pooler(feature_map: str, init: str) -> Callable[[Any, Any], Any]:
        def edit(model: Any, setup: Any) -> Any:
            hf.replace_pooler_(model, setup.features, feature_map, init=init, seed=setup.seed)
            return model

        return edit

    base = KNOWN["snnk-pooler"]
    wide: Any = {"feature_map": "relu", "directions": "pca", "train_directions": True, "gate": False, "use_bias": True}
    return {
        "pooler": ("snnk-pooler", replace(base, edit=nothing, finish=nothing)),
        "tanh-pooler": ("snnk-pooler", replace(base, edit=pooler("tanh_power", "pretrained"))),
        "psi-pooler": ("snnk-pooler", replace(base, edit=pooler("cos", "pretrained"))),
        "random-pooler": ("snnk-pooler", replace(base, edit=pooler("cos", "random"))),
        "bundled-solved": ("bundled", KNOWN["bundled"]),
        "pfeiffer": ("houlsby", replace(KNOWN["houlsby"], wrap=snnk_adapter(target_modules="pfeiffer", **wide))),
    }


def row_of(result: FinetuneResult | None, metric: str) -> Row:
    """The part of metrics.json that a row stores, with scores in percent.

    The scores are those on validation rows, with their loss, on dev or test rows, and on validation rows before the
    first step. A row of a run that diverged has null for them.
    """
    if result is None:
        names = ("model", "trained", "validation", "validation_loss", "score", "start_validation")
        return {**dict.fromkeys((*names, "steps", "start_seconds", "seconds")), "metric": metric, "late_gain": 0.0}
    found = result.metrics
    training, scores = found["training"], found["scores"]
    return {
        "model": found["base_model"],
        "trained": found["parameters"]["trained"],
        "metric": metric,
        "validation": 100 * scores["validation"][metric],
        "validation_loss": scores["validation"]["loss"],
        "score": 100 * scores["test"][metric],
        "start_validation": 100 * training["epochs"][0][metric],
        "steps": training["steps"],
        "start_seconds": found["classifier_start"]["seconds"],
        "seconds": training["seconds"],
        **course(training, metric),
    }


def course(training: Mapping[str, Any], metric: str) -> Row:
    """How far a training went, from metrics.json: epochs, the best one, and whether the validation score still rose.

    `late_gain` is the rise of the best score in the last LATE epochs, in points. It is 0 after an early stop, and if
    nothing was to be trained.
    """
    scores = [100 * epoch[metric] for epoch in training["epochs"]]
    late = 0.0 if training["stopped_early"] or len(scores) == 1 else max(scores) - max(scores[:-LATE] or scores[:1])
    return {
        "epochs": training["epochs"][-1]["epoch"],
        "best_epoch": training["epochs"][training["best"]]["epoch"],
        "late_gain": late,
        "ended": late <= SMALL,
    }


def have_ended(rows: Iterable[Row]) -> bool:
    """Whether the validation scores of these trainings had stopped rising, in the mean; not for rows without it."""
    gains = [r.get("late_gain", math.inf) for r in rows]
    return mean(gains) <= SMALL if gains else False


def others(results: Results, name: str) -> list[str]:
    """A note for the page if no row was computed with the paper's model, whose name starts with `name`."""
    models = dict.fromkeys(r["model"] for r in results if r["model"])
    if not models or any(model.rsplit("/", 1)[-1].startswith(name) for model in models):
        return []
    return [f"{name}, the paper's model: these rows are of {', '.join(models)}"]


def score_of(rows: Sequence[Row], task: str, method: str) -> float | None:
    """The mean score over seeds; None without rows, or if a run diverged."""
    found = [r["score"] for r in rows if (r["task"], r["method"]) == (task, method)]
    return mean(found) if found and None not in found else None


def both(rows: Sequence[Row], one: str, two: str) -> dict[str, tuple[float, float]]:
    """The scores of two methods on each task that has both."""
    found = {}
    for task in dict.fromkeys(r["task"] for r in rows):
        a, b = score_of(rows, task, one), score_of(rows, task, two)
        if a is not None and b is not None:
            found[task] = (a, b)
    return found


def deviation(metric: str, one: float, two: float, answers: int) -> float:
    """The standard deviation, in points, of the difference of two scores over `answers` test rows.

    The variance of one score is (1 - r^2)^2 / n for a rank correlation (Fisher), (1 - r^2) / n for a Matthews
    correlation, and p (1 - p) / n otherwise. The two scores are taken as independent, which overstates the deviation:
    both are computed on the same rows.

    Example:
        >>> round(deviation("mcc", 0.0, 0.0, 1043), 1), round(deviation("accuracy", 80.0, 80.0, 1000), 1)
        (4.4, 1.8)
    """
    parts = (one / 100, two / 100)
    if metric == "spearman":
        variances = [(1 - r * r) ** 2 for r in parts]
    elif metric == "mcc":
        variances = [1 - r * r for r in parts]
    else:
        variances = [p * (1 - p) for p in parts]
    return 100 * math.sqrt(sum(variances) / answers)


def orders(
    table: Sequence[Row],
    pairs: Sequence[tuple[str, str, str]],
    paper: Mapping[str, Mapping[str, float]],
    answers: Mapping[str, int],
    notes: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """One claim per task and pair of methods: the paper's two scores beside ours.

    A claim holds if the same method is ahead by more than chance. If the paper's scores are about equal, ours must be
    about equal too. It is open if the validation scores of one of the methods were still rising.

    Args:
        table: one row per task, method and seed.
        pairs: two methods of ours, and the paper's name of the second.
        paper: the paper's scores by method and task.
        answers: number of test rows per task.
        notes: a remark on the model per method.
    """
    found_claims = []
    for task in dict.fromkeys(r["task"] for r in table):
        for one, two, name in pairs:
            if task not in paper.get(one, {}) or task not in paper.get(name, {}):
                continue
            theirs = paper[one][task], paper[name][task]
            statement = f"{task}: {one} {theirs[0]}, {name} {theirs[1]}"
            rows = {m: [r for r in table if (r["task"], r["method"]) == (task, m)] for m in (one, two)}
            ours = both(table, one, two).get(task)
            if ours is None:
                found_claims += [claim(statement, "diverged", False)] if all(rows.values()) else []
                continue
            told = [f"{m} {score:.2f}{facts(rows[m])}" for m, score in zip(rows, ours, strict=True)]
            seeds = len({r["seed"] for r in rows[one]})
            model = ", ".join([rows[one][0]["model"], *(notes[m] for m in rows if m in notes)][:2])
            expected, found = theirs[0] - theirs[1], ours[0] - ours[1]
            equal = max(EQUAL, deviation(rows[one][0]["metric"], *ours, answers[task]))
            tie = " (a tie)" if abs(found) <= equal else ""
            holds = bool(tie) if abs(expected) <= EQUAL else not tie and found * expected > 0
            ended = all(map(have_ended, rows.values()))
            found_claims.append(
                claim(
                    statement,
                    f"{', '.join(told)}{tie}; {model}, {seeds} seed{'s' * (seeds > 1)}{CUT * (not ended)}",
                    holds if ended else None,
                    f"{equal:.1f} points: less is a tie",
                )
            )
    return found_claims


def counts(
    table: Sequence[Row], wanted: Sequence[tuple[str, str, str, int]], paper: Mapping[str, Mapping[str, float]]
) -> list[Row]:
    """Claims about the number of tasks on which a method is ahead: (one, two, the paper's name of two, its count)."""
    found = []
    for one, two, name, count in wanted:
        pairs = {task: pair for task, pair in both(table, one, two).items() if task in paper[one]}
        ours = sum(a > b for a, b in pairs.values())
        theirs = sum(paper[one][task] > paper[name][task] for task in pairs)
        if theirs:  # otherwise the claim could not fail
            ended = all(have_ended(r for r in table if r["method"] == method) for method in (one, two))
            statement = f"{one} above {name} on {count} of 8 tasks; {theirs} of {', '.join(pairs)}"
            told = f"above {two} on {ours} of {len(pairs)}{CUT * (not ended)}"
            found.append(claim(statement, told, ours >= theirs if ended else None))
    return found


def facts(rows: Sequence[Row]) -> str:
    """The number of trained parameters, and a note if training did not improve on the start."""
    same = all(r["steps"] and r["validation"] <= r["start_validation"] for r in rows)
    return f" ({rows[0]['trained']:,} trained{', no better than its start' * same})"


def bars(axes: Axes, table: Sequence[Row], task: str, paper: Mapping[str, Mapping[str, float]]) -> None:
    """Draw our scores of all methods on a task as bars, and the paper's scores, of its own model, as crosses."""
    rows = {r["method"]: r for r in table if r["task"] == task}
    scores = {name: score_of(table, task, name) for name in rows}
    labels = {name: f"{name}, {'diverged' if score is None else f'{score:.1f}'}" for name, score in scores.items()}
    axes.barh(list(labels.values()), [score or 0.0 for score in scores.values()], color="tab:blue", label="ours")
    known = {name: paper[name][task] for name in rows if task in paper.get(name, {})}
    axes.plot(list(known.values()), [labels[name] for name in known], "kx", label="paper, its model")
    axes.invert_yaxis()
    axes.set_title(task)
    models = dict.fromkeys(r["model"] for r in rows.values() if r["model"])
    axes.set_xlabel(f"{metric_of(task)}, %, {', '.join(models)}")
    axes.legend(
        fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2
    )  # below the axes, where no bar can be hidden
