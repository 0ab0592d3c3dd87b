"""What the experiments on transformers share: a fine-tuning as a row, the paper's order of two methods as a claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from snnk.experiments.records import Results, Row

METRICS = {"cola": "mcc", "mrpc": "f1", "qqp": "f1", "stsb": "spearman"}  # that the paper reports; else accuracy


def metric_of(task: str) -> str:
    return METRICS.get(task, "accuracy")


def tuned(files: Mapping[str, Any], **options: Any) -> Any:
    """The FinetuneResult of one run into a folder that is thrown away."""
    from snnk.finetune import FinetuneConfig, finetune

    with TemporaryDirectory() as folder:
        return finetune(FinetuneConfig(out=str(Path(folder, "out")), **files, **options))


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


def tune(method: Any, config: Any, *, steps: bool = True) -> Row:
    """`snnk.finetune.finetune` for a Method instead of a name, without files; what `row_of` reads of its metrics.

    Args:
        method: a Method.
        config: a FinetuneConfig for texts, its `method` the one whose hyperparameters are taken.
        steps: train; else the closed-form start is all.
    """
    import torch
    import transformers

    from snnk import hf
    from snnk.finetune import Setup, evaluate, train
    from snnk.finetune.inputs import read
    from snnk.finetune.run import FIT_ROWS

    auto: Any = transformers
    auto.utils.logging.set_verbosity_error()
    auto.utils.logging.disable_progress_bar()
    inputs = read(config, auto.AutoTokenizer.from_pretrained(config.model), images=False)
    names = inputs.labels.names
    kind = {"problem_type": "regression"} if names is None else {"problem_type": "single_label_classification"}
    settings = config.settings(images=False, large=False)
    order = inputs.train.epoch(64, config.seed, -1)[: -(-FIT_ROWS // 64)]
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = auto.AutoModelForSequenceClassification.from_pretrained(
            config.model,
            use_safetensors=True,
            dtype=torch.float32,
            num_labels=len(names or [""]),
            ignore_mismatched_sizes=True,
            **kind,
        ).eval()
        setup = Setup(
            config.features or 0, config.seed, False, config.model, lambda: [inputs.train.batch(i) for i in order]
        )
        model = method.edit(model, setup)
        if config.classifier_start == "closed-form":
            (hf.fit_head_ if method.fit_head else hf.start_classifier_)(model, setup.batches())
        model = method.wrap(model, setup)
    sizes = {"trained": sum(p.numel() for p in model.parameters() if p.requires_grad)}
    training: Row = {
        "epochs": [evaluate(model, inputs.validation, inputs.metrics, settings.batch_size)],
        "steps": 0,
        "seconds": 0.0,
    }
    if steps:
        done = train(model, inputs.train, inputs.validation, settings, metrics=inputs.metrics)
        training = {"epochs": done.history, "steps": done.steps, "seconds": done.seconds}
    model = method.finish(model, setup).eval()
    parts = {"validation": inputs.validation, "test": inputs.test}
    return {
        "base_model": Path(config.model).name if Path(config.model).is_dir() else config.model,
        "parameters": sizes,
        "scores": {
            part: evaluate(model, data, inputs.metrics, settings.batch_size)
            for part, data in parts.items()
            if data is not None
        },
        "training": training,
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
    return mean(found) if found else None


def both(results: Results, one: str, two: str) -> dict[str, tuple[float, float]]:
    """Scores of two methods by task, where there are both."""
    found = {}
    for task in dict.fromkeys(r["task"] for r in results):
        a, b = score_of(results, task, one), score_of(results, task, two)
        if a is not None and b is not None:
            found[task] = (a, b)
    return found


def orders(
    results: Results, pairs: Sequence[tuple[str, str, str]], paper: Mapping[str, Mapping[str, float]]
) -> list[Row]:
    """For each task and pair of methods, the paper's two figures beside ours; it holds where the same one is ahead."""
    table = []
    for task in dict.fromkeys(r["task"] for r in results):
        for one, two, name in pairs:
            ours = both(results, one, two).get(task)
            if ours is None or task not in paper.get(one, {}) or task not in paper.get(name, {}):
                continue
            theirs = paper[one][task], paper[name][task]
            rows = [r for r in results if r["task"] == task and r["method"] == one]
            table.append(
                {
                    "paper": f"{task}: {one} {theirs[0]}, {name} {theirs[1]}",
                    "ours": f"{one} {ours[0]:.2f}, {two} {ours[1]:.2f} ({rows[0]['model']}, {rows[0]['steps']} steps)",
                    "holds": (ours[0] - ours[1]) * (theirs[0] - theirs[1]) > 0,
                }
            )
    return table


def bars(axes: Any, results: Results, task: str) -> None:
    """Our scores of a task's methods as bars, the paper's as crosses."""
    rows = {r["method"]: r for r in results if (r["part"], r["task"]) == ("table", task)}
    axes.barh(list(rows), [score_of(results, task, name) for name in rows], color="tab:blue", label="ours")
    known = [r for r in rows.values() if r["paper"] is not None]
    axes.plot([r["paper"] for r in known], [r["method"] for r in known], "kx", label="paper")
    axes.invert_yaxis()
    axes.set_title(task)
    first = next(iter(rows.values()))
    axes.set_xlabel(f"{first['metric']}, %, {first['model']}")
    axes.legend(fontsize=8)
