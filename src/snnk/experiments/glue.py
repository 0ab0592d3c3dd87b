"""GLUE (section 4.2.1, appendices on ablations and additional experiments): poolers and bundled heads.

tanh(W x + b) of the [CLS] token becomes phi(x) psi(W, b)^T, which is trained with the classifier on a frozen model. It
is also merged with the classifier ("bundled"), solved in closed form, built from the power series of tanh, and started
from random weights. The matrix of "snnk-pooler" starts as the least-squares fit to the pooler, that of "psi-pooler" as
psi(W, b), the paper's start. On one task, the pooler has more and fewer features. The experiment `adapters` has the
paper's adapters.

Sizes, optimizers, weight decay and schedules are the paper's. All methods are trained until the score on validation
rows has not risen for ten epochs, with a learning rate that these rows choose. Every classifier starts from its closed
form; "random start" means that it does not. The base model runs once over all rows. Sentence encoders such as MiniLM
and MPNet have a pooler that was never trained, and the claims about poolers carry a remark then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from snnk.experiments.lab import tiny
from snnk.experiments.lab.data import NOWHERE, Source, is_quick
from snnk.experiments.lab.paper import ANSWERS, PAPER, TASKS
from snnk.experiments.lab.protocol import DRAWN, Cell, Protocol, chosen, missing, run_cells
from snnk.experiments.lab.records import Results, Row, claim
from snnk.experiments.lab.tuning import CUT, bars, both, counts, deviation, have_ended, metric_of, orders, others

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "tables: poolers, bundled, tanh; ablation over features"
NEEDS = "GLUE; BERT-base or another"
TIME = "an hour and a half of one core with a MiniLM; --quick 15 s"
WHY_NOT = """The rows are of a MiniLM, whose [CLS] token was never trained to stand for a text; the paper has BERT-base.
On CoLA no head on it is far from chance, so that the order there decides nothing. Elsewhere most distances are ties: a
merged matrix with 2,050 numbers is level with a pooler of 148,610. The SNNK pooler is a fit of 512 features to the
pooler, and its training does not make up for what the fit loses."""

SOLVED = "bundled-solved"
METHODS = ("pooler", "snnk-pooler", "psi-pooler", "tanh-pooler", "random-pooler", "linear-probe", "bundled", SOLVED)
STARTS = ("pooler", "snnk-pooler", "linear-probe", "bundled")  # methods with both starts of the classifier
# two methods of ours, and the paper's name of the second
PAIRS = (
    ("snnk-pooler", "pooler", "pooler"),
    ("snnk-pooler", "tanh-pooler", "tanh-pooler"),
    ("bundled", "pooler", "pooler"),
    ("bundled", "linear-probe", "linear-probe"),
    ("bundled", SOLVED, SOLVED),
)
COUNTS = (("snnk-pooler", "pooler", "pooler", 5),)  # the number of 8 tasks on which the first is above the second


@dataclass(frozen=True)
class Config(Protocol):
    """The paper's sizes. The methods of snnk.finetune have its weight decay and schedules."""

    rates: tuple[float, ...] = (1e-5, 5e-5, 2e-4, 1e-3, 4e-3)
    epochs: int = 100
    patience: int = 10
    batch_size: int = 64
    schedule: str | None = None
    dropout: bool | None = None
    pooling: str = "model"
    tasks: tuple[str, ...] = ("cola", "sst2", "stsb", "mrpc")
    methods: tuple[str, ...] = (*METHODS, *(f"{name}{DRAWN}" for name in STARTS))
    pooler_features: int = 512  # ours: the paper gives no number
    bundled_features: int = 1024
    ablation_task: str = "cola"
    ablation: tuple[int, ...] = (128, 256, 512, 1024)  # features of the pooler

    def features(self, method: str) -> int | None:
        """The number of features of a method; None for methods without."""
        method = method.removesuffix(DRAWN)
        if method in ("linear-probe", "pooler"):
            return None
        return self.pooler_features if method.endswith("-pooler") else self.bundled_features


QUICK = Config(
    rates=(1e-3,),
    epochs=1,
    train_rows=40,
    seeds=1,
    tasks=("stsb",),
    methods=(*METHODS, f"pooler{DRAWN}"),
    pooler_features=16,
    bundled_features=32,
    ablation_task="stsb",
    ablation=(8, 16),
)


def cells(config: Config) -> list[Cell]:
    """Those of the table, then the further ones of the ablation."""
    table: list[Cell] = [
        (task, method, config.features(method))
        for task in config.tasks
        for method in config.methods
        if method != SOLVED or metric_of(task) == "spearman"  # which is for regression
    ]
    return table + [cell for n in config.ablation if (cell := (config.ablation_task, "snnk-pooler", n)) not in table]


def total(config: Config) -> int:
    """The largest number of rows that `run` yields."""
    return config.most(cells(config))


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """Rows per task, method, number of features, learning rate and seed."""
    with tiny.glue(config, QUICK, source) as files:
        facts = {"pooler_trained": _trained_pooler(files["model"])}
        yield from run_cells(cells(config), config, results, files, here=is_quick(config, QUICK), facts=facts)


def _trained_pooler(model: str) -> bool:
    """Whether there is a stored pooler that was trained, which moves its bias from zero."""
    from snnk.finetune.methods import stored_pooler

    dense = stored_pooler(model)
    return dense is not None and bool(dense.bias.any())


def _table(results: Results) -> list[Row]:
    """The final rows, without those of other numbers of features."""
    known = Config.of(results.config)
    return [r for r in chosen(results, known.seed) if r["features"] == known.features(r["method"])]


def _curve(results: Results) -> dict[int, list[Row]]:
    """The final rows of the ablation by number of features."""
    config = results.config
    rows = [r for r in chosen(results, config["seed"]) if r["score"] is not None]
    rows = [r for r in rows if (r["task"], r["method"]) == (config["ablation_task"], "snnk-pooler")]
    return {size: [r for r in rows if r["features"] == size] for size in sorted({r["features"] for r in rows})}


def plot(results: Results) -> Figure:
    """Our scores and the paper's per task, and scores against the number of features."""
    from matplotlib.figure import Figure

    table, curve = _table(results), _curve(results)
    tasks = list(dict.fromkeys(r["task"] for r in table))
    count = len(tasks) + (len(curve) > 1)
    figure = Figure(figsize=(4.5 * count, 5), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=False):
        bars(axes, table, task, PAPER)
    if len(curve) > 1:
        last, task = panels[-1], results.config["ablation_task"]
        last.plot(list(curve), [mean(r["score"] for r in rows) for rows in curve.values()], "o-", label="snnk-pooler")
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
    known = Config.of(config)
    found = missing(cells(known), known, results)
    tasks = [task for task in TASKS if task not in config["tasks"]]
    return [*found, *([", ".join(tasks)] if tasks else []), *others(results, "bert-base")]


def claims(results: Results) -> list[Row]:
    """The order of pairs of methods, the number of tasks on which ours is ahead, and the ablation."""
    rows, table = list(results), _table(results)
    trained = all(r["pooler_trained"] for r in rows)
    own = ("pooler", "snnk-pooler", "psi-pooler", "tanh-pooler", "bundled", SOLVED)
    notes = {} if trained else dict.fromkeys(own, "whose pooler was never trained")
    found = [*orders(table, PAIRS, PAPER, ANSWERS, notes), *counts(table, COUNTS, PAPER)]
    statement = "not in the paper: a classifier is better if it starts from its closed form"
    compared = [(method, f"{method}{DRAWN}", f"{statement} ({method})") for method in STARTS]
    if trained:  # otherwise both start at random
        statement = "a pooler that starts from pretrained weights is better than one from random weights"
        compared.append(("snnk-pooler", "random-pooler", statement))
    for one, two, statement in compared:
        if pairs := both(table, one, two):
            first, second = (mean(pair[i] for pair in pairs.values()) for i in (0, 1))
            noises = [deviation(metric_of(task), *pair, ANSWERS[task]) for task, pair in pairs.items()]
            noise = math.hypot(*noises) / len(noises)
            ended = all(have_ended(r for r in table if r["method"] == method) for method in (one, two))
            tie = " (a tie)" if abs(first - second) <= noise else ""
            told = f"{first:.2f} against {second:.2f}{tie}, mean of {', '.join(pairs)}{CUT * (not ended)}"
            holds = first - second > noise if ended else None
            found.append(claim(statement, told, holds, f"{noise:.1f} points: less is a tie"))
    curve = _curve(results)
    if len(curve) > 1:
        scores = {size: mean(r["score"] for r in own) for size, own in curve.items()}
        told = ", ".join(f"{size}: {score:.2f}" for size, score in scores.items())
        task, most, least = results.config["ablation_task"], scores[max(scores)], scores[min(scores)]
        noise = deviation(metric_of(task), most, least, ANSWERS[task])
        tie = " (a tie)" if abs(most - least) <= noise else ""
        ended = all(map(have_ended, curve.values()))
        statement, tolerance = "snnk-pooler: more features help, on large tasks", f"{noise:.1f} points: less is a tie"
        ours = f"{task}, {told}{tie}{CUT * (not ended)}"
        found.append(claim(statement, ours, most - least > noise if ended else None, tolerance))
    return found
