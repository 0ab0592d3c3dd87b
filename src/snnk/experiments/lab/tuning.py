"""What the experiments on transformers share: a fine-tuning as a row, the paper's order of two methods as a claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from snnk.experiments.lab.records import Results, Row, claim

EQUAL = 1.0  # points within which two scores are about equal, or more if chance alone gives more
METRICS = {"cola": "mcc", "mrpc": "f1", "qqp": "f1", "stsb": "spearman"}  # that the paper reports; else accuracy


def metric_of(task: str) -> str:
    return METRICS.get(task, "accuracy")


def tuned(files: Mapping[str, Any], variant: Any = None, **options: Any) -> Any | None:
    """The FinetuneResult of one run into a folder that is thrown away; None if it diverged.

    Args:
        files: model and data, of FinetuneConfig.
        variant: a Method instead of the one that `options` name, whose hyperparameters are taken.
        **options: the rest of FinetuneConfig.
    """
    from snnk.finetune import FinetuneConfig, finetune
    from snnk.finetune.trainer import Diverged

    with TemporaryDirectory() as folder:
        try:
            return finetune(FinetuneConfig(out=str(Path(folder, "out")), **files, **options), method=variant)
        except Diverged:
            return None


def variants() -> dict[str, tuple[str, Any]]:
    """What snnk.finetune's METHODS has not, each with the one whose hyperparameters it takes."""
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
        "random-pooler": ("snnk-pooler", replace(base, edit=pooler("cos", "random"))),
        "closed-form": ("bundled", KNOWN["bundled"]),
        "pfeiffer": ("houlsby", replace(KNOWN["houlsby"], wrap=snnk_adapter(target_modules="pfeiffer", **wide))),
    }


def row_of(result: Any | None, metric: str) -> Row:
    """What a row has of metrics.json; scores in percent, of validation rows, of dev or test, and before any step.

    They are null for a run that diverged, as is all but the metric.
    """
    if result is None:
        names = ("model", "trained", "validation", "score", "start_validation", "steps", "seconds")
        return {**dict.fromkeys(names), "metric": metric}
    found = result.metrics
    training, scores = found["training"], found["scores"]
    return {
        "model": found["base_model"],
        "trained": found["parameters"]["trained"],
        "metric": metric,
        "validation": 100 * scores["validation"][metric],
        "score": 100 * scores["test"][metric],
        "start_validation": 100 * training["epochs"][0][metric],
        "steps": training["steps"],
        "seconds": training["seconds"],
    }


def others(results: Results, name: str) -> list[str]:
    """What is to be said where no row is of the paper's model, which has this in its name."""
    models = dict.fromkeys(r["model"] for r in results if r["model"])
    if not models or any(model.rsplit("/", 1)[-1].startswith(name) for model in models):
        return []
    return [f"{name}, the paper's model: these rows are of {', '.join(models)}"]


def score_of(results: Results, task: str, method: str) -> float | None:
    """Mean over seeds of a table's row."""
    found = [r["score"] for r in results if (r["part"], r["task"], r["method"]) == ("table", task, method)]
    return mean(found) if found and None not in found else None  # null is of a run that diverged


def both(results: Results, one: str, two: str) -> dict[str, tuple[float, float]]:
    """Scores of two methods by task, where there are both."""
    found = {}
    for task in dict.fromkeys(r["task"] for r in results):
        a, b = score_of(results, task, one), score_of(results, task, two)
        if a is not None and b is not None:
            found[task] = (a, b)
    return found


def deviation(metric: str, one: float, two: float, answers: int) -> float:
    """By how many points two scores of so many answers differ by chance: one standard deviation of the difference.

    Of a rank correlation Fisher's, of that of two classes (1 - r^2)^(1/2), of others that of a share of right answers;
    as if the two had answered different questions, which is more than it is for the same ones.

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
    results: Results,
    pairs: Sequence[tuple[str, str, str]],
    paper: Mapping[str, Mapping[str, float]],
    answers: Mapping[str, int],
    notes: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """For each task and pair of methods, the paper's two figures beside ours.

    It holds where the same one is ahead by more than chance; where the paper's are about equal, ours must be too.

    Args:
        results: rows of part "table".
        pairs: two methods of ours and the paper's name of the second.
        paper: the paper's scores by method and task.
        answers: rows that a task's score is of.
        notes: what is to be said of the model beside the figure of a method.
    """
    table = []
    for task in dict.fromkeys(r["task"] for r in results):
        for one, two, name in pairs:
            if task not in paper.get(one, {}) or task not in paper.get(name, {}):
                continue
            theirs = paper[one][task], paper[name][task]
            statement = f"{task}: {one} {theirs[0]}, {name} {theirs[1]}"
            own = [r for r in results if (r["part"], r["task"]) == ("table", task)]
            rows = {method: [r for r in own if r["method"] == method] for method in (one, two)}
            ours = both(results, one, two).get(task)
            if ours is None:
                table += [claim(statement, "diverged", False)] if all(rows.values()) else []
                continue
            told = [f"{m} {score:.2f}{facts(rows[m])}" for m, score in zip(rows, ours, strict=True)]
            seeds = len({r["seed"] for r in rows[one]})
            model = ", ".join([rows[one][0]["model"], *(notes[m] for m in rows if m in notes)][:2])
            expected, found = theirs[0] - theirs[1], ours[0] - ours[1]
            equal = max(EQUAL, deviation(rows[one][0]["metric"], *ours, answers[task]))
            tie = " (a tie)" if abs(found) <= equal else ""
            holds = bool(tie) if abs(expected) <= EQUAL else not tie and found * expected > 0
            table.append(
                claim(
                    statement,
                    f"{', '.join(told)}{tie}; {model}, {rows[one][0]['steps']} steps, {seeds} seed{'s' * (seeds > 1)}",
                    holds,
                    f"{equal:.1f} points: less is a tie",
                )
            )
    return table


def facts(rows: Sequence[Row]) -> str:
    """How many numbers a method trains, and whether that did any good."""
    same = all(r["steps"] and r["validation"] <= r["start_validation"] for r in rows)
    return f" ({rows[0]['trained']:,} trained{', no better than its start' * same})"


def bars(axes: Any, results: Results, task: str) -> None:
    """Our scores of a task's methods as bars, the paper's, of its own model, as crosses."""
    rows = {r["method"]: r for r in results if (r["part"], r["task"]) == ("table", task)}
    scores = {name: score_of(results, task, name) for name in rows}
    labels = {name: f"{name}, {'diverged' if score is None else f'{score:.1f}'}" for name, score in scores.items()}
    axes.barh(list(labels.values()), [score or 0.0 for score in scores.values()], color="tab:blue", label="ours")
    known = [r for r in rows.values() if r["paper"] is not None]
    axes.plot([r["paper"] for r in known], [labels[r["method"]] for r in known], "kx", label="paper, its model")
    axes.invert_yaxis()
    axes.set_title(task)
    models = dict.fromkeys(r["model"] for r in rows.values() if r["model"])
    axes.set_xlabel(f"{metric_of(task)}, %, {', '.join(models)}")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2)  # no bar under it
