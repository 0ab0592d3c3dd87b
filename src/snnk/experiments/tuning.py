"""What the experiments on transformers share: a fine-tuning as a row, the paper's order of two methods as a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from snnk.experiments.records import Results, Row, claim

EQUAL = 1.0  # points within which two scores are about equal
METRICS = {"cola": "mcc", "mrpc": "f1", "qqp": "f1", "stsb": "spearman"}  # that the paper reports; else accuracy


def metric_of(task: str) -> str:
    return METRICS.get(task, "accuracy")


def tuned(files: Mapping[str, Any], variant: Any = None, **options: Any) -> Any:
    """The FinetuneResult of one run into a folder that is thrown away.

    Args:
        files: model and data, of FinetuneConfig.
        variant: a Method instead of the one that `options` name, whose hyperparameters are taken.
        **options: the rest of FinetuneConfig.
    """
    from snnk.finetune import FinetuneConfig, finetune

    with TemporaryDirectory() as folder:
        return finetune(FinetuneConfig(out=str(Path(folder, "out")), **files, **options), method=variant)


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
    wide: Any = {"feature_map": "relu", "projection": "pca", "train_projection": True, "gate": False, "use_bias": True}
    return {
        "pooler": ("snnk-pooler", replace(base, edit=nothing, finish=nothing)),
        "tanh-pooler": ("snnk-pooler", replace(base, edit=pooler("tanh_power", "pretrained"))),
        "random-pooler": ("snnk-pooler", replace(base, edit=pooler("cos", "random"))),
        "closed-form": ("bundled", KNOWN["bundled"]),
        "pfeiffer": ("houlsby", replace(KNOWN["houlsby"], wrap=snnk_adapter(placement="pfeiffer", **wide))),
    }


def row_of(found: Mapping[str, Any], metric: str) -> Row:
    """What a row has of metrics.json; scores in percent, of validation rows, of dev or test, and before any step."""
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


def orders(
    results: Results,
    pairs: Sequence[tuple[str, str, str]],
    paper: Mapping[str, Mapping[str, float]],
    notes: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """For each task and pair of methods, the paper's two figures beside ours.

    It holds where the same one is ahead or the two are about equal; if the paper's are, ours must be too.

    Args:
        results: rows of part "table".
        pairs: two methods of ours and the paper's name of the second.
        paper: the paper's scores by method and task.
        notes: what is to be said of a method, beside its figure.
    """
    table = []
    for task in dict.fromkeys(r["task"] for r in results):
        for one, two, name in pairs:
            ours = both(results, one, two).get(task)
            if ours is None or task not in paper.get(one, {}) or task not in paper.get(name, {}):
                continue
            theirs = paper[one][task], paper[name][task]
            rows = [r for r in results if r["task"] == task and r["method"] == one]
            seeds = len({r["seed"] for r in rows})
            facts = [rows[0]["model"], f"{rows[0]['steps']} steps", f"{seeds} seed{'s' * (seeds > 1)}"]
            facts += [notes[method] for method in (one, two) if method in notes][:1]
            expected, found = theirs[0] - theirs[1], ours[0] - ours[1]
            holds = abs(found) <= EQUAL if abs(expected) <= EQUAL else found * (1 if expected > 0 else -1) >= -EQUAL
            table.append(
                claim(
                    f"{task}: {one} {theirs[0]}, {name} {theirs[1]}",
                    f"{one} {ours[0]:.2f}, {two} {ours[1]:.2f} ({', '.join(facts)})",
                    holds,
                    f"{EQUAL:g} point",
                )
            )
    return table


def bars(axes: Any, results: Results, task: str) -> None:
    """Our scores of a task's methods as bars, the paper's, of its own model, as crosses."""
    rows = {r["method"]: r for r in results if (r["part"], r["task"]) == ("table", task)}
    axes.barh(list(rows), [score_of(results, task, name) or 0.0 for name in rows], color="tab:blue", label="ours")
    known = [r for r in rows.values() if r["paper"] is not None]
    axes.plot([r["paper"] for r in known], [r["method"] for r in known], "kx", label="paper, its model")
    axes.invert_yaxis()
    axes.set_title(task)
    first = next(iter(rows.values()))
    axes.set_xlabel(f"{first['metric']}, %, {first['model']}")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2)  # no bar under it
