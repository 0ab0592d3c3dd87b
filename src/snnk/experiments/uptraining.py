"""Uptraining (section 4.3, appendix "Uptraining Transformers"): the top k feed-forward blocks with 8 features each.

f(x) = W2 gelu(W1 x + b1) + b2 becomes W2 A phi(x) + b2 with random features ("random features", the paper's), or
C gelu(W x + b) + c ("atoms"): the rows of W are neurons of the block itself, and C and c are fitted in closed form to
the training rows without their labels, before training. Both have the same number of features, and so, after W2 A has
become one matrix, the same size but for the numbers b. Then the whole model is trained, in the same way for both; the
projection inside phi stays as it was drawn, and W is trained too.

The score is set against the size and the multiply-adds of the trained model, for the paper's batch of 64 texts of 128
tokens. k = 0 is full fine-tuning with the same rate, weight decay and schedule. AdamW, the linear schedule, the warmup
of 6 %, the decay, and the clipping of gradients (for k > 0 on small tasks) are the paper's. The rate, which it does not
give and which was chosen for a MiniLM, the number of rows and epochs, and the choice of the best epoch by the score on
validation rows instead of the loss are ours. No training stops before its last epoch: a Matthews correlation can stay
at 0 for epochs before it rises. The classifier reads what `snnk finetune` lets it read by default: with BERT the
pooler; with a sentence encoder the mean over tokens of one text, and comparisons of the means of two texts, which do
not attend to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from snnk.experiments.lab import tiny
from snnk.experiments.lab.data import NOWHERE, Source
from snnk.experiments.lab.paper import ANSWERS
from snnk.experiments.lab.protocol import has_pairs
from snnk.experiments.lab.records import Results, Row, claim
from snnk.experiments.lab.tuning import CUT, EQUAL, deviation, facts, have_ended, metric_of, others, row_of, tuned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from snnk.finetune.methods import Method, Setup

FIGURE = "figure: uptraining on GLUE"
NEEDS = "GLUE; a sentence encoder"
TIME = "20 minutes of one core with a MiniLM; --quick 10 s"
WHY_NOT = """The rows are of a MiniLM with six blocks, one seed and one learning rate, trained on 2,000 texts or 1,000
pairs; the paper has BERT-base and all rows. The size falls less than in the paper, as 11.7 M of the 22.6 M numbers are
word embeddings, which belong to no block. Random features lose what the blocks had learned: before any training, the
validation score on STS-B is ten points below that of the whole model, where that of atoms is one point below it.
Training until the score no longer rises wins three points back. On CoLA, the model with random features stays at a
Matthews correlation of 0 for all eight epochs."""
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
FULL = {"rte": 66.2, "mrpc": 90.5, "qnli": 91.3, "qqp": 88.3, "sst2": 92.6, "mnli": 84.1, "stsb": 88.8, "cola": 59.5}
SMALLER = "top 6 of 12 replaced: model size and inference reduced by 40-50 %"
SLIGHT = 2.0  # points that "minimal impact" allows
FULLY, RANDOM, ATOMS = "full fine-tuning", "random features", "atoms"
KINDS = (RANDOM, ATOMS)  # of the blocks that replace others


@dataclass(frozen=True)
class Config:
    """The paper's setting; a k above the number of blocks means all blocks."""

    tasks: tuple[str, ...] = ("cola", "stsb")
    replaced: tuple[int, ...] = (0, 3, 6)
    num_features: int = 8
    learning_rate: float = 2e-4
    weight_decay: float = 0.1
    weight_decay_large: float = 1e-4
    batch_size: int = 32
    epochs: int = 8
    train_rows: int = 2_000
    pair_rows: int = 1_000  # of tasks with two texts, whose rows take three times as long
    max_length: int = 128
    texts: int = 64
    length: int = 128
    seeds: int = 1
    seed: int = 0


QUICK = Config(tasks=("cola",), replaced=(0, 1, 2), num_features=4, epochs=1, train_rows=40, texts=2, length=8)


def total(config: Config) -> int:
    """Number of rows that `run` yields; fewer for a model with fewer blocks than the largest k."""
    return len(config.tasks) * len(cells(config.replaced)) * config.seeds


def cells(replaced: Iterable[int], blocks: int | None = None) -> list[tuple[int, str]]:
    """The numbers k of replaced blocks, at most `blocks`, each with every kind of the blocks that replace them.

    Example:
        >>> cells((0, 2, 9), blocks=2)
        [(0, 'full fine-tuning'), (2, 'random features'), (2, 'atoms')]
    """
    numbers = sorted({k if blocks is None else min(k, blocks) for k in replaced})
    return [(k, kind) for k in numbers for kind in (KINDS if k else (FULLY,))]


def with_atoms() -> Method:
    """The method "uptrain" with neurons of the blocks themselves, fitted without labels, instead of random features."""
    from snnk.finetune.methods import METHODS, nothing

    return replace(METHODS["uptrain"], edit=fit_atoms, finish=nothing)


def fit_atoms(model: Any, setup: Setup) -> Any:
    """Choose atoms in the blocks of some layers, and solve for the matrix behind them, on rows without labels."""
    from snnk.hf import compress_
    from snnk.hf.compression.plans import Plan, option
    from snnk.hf.finding import choose_layers, find_ffns

    ffns = choose_layers(find_ffns(model), setup.layers or "all")
    plan = Plan(model.config.model_type, tuple(option(ffn, "atoms", setup.features) for ffn in ffns))
    # halves, as one batch is held out, and --quick has rows for one
    halves = ({k: v[i::2] for k, v in rows.items() if k != "labels"} for rows in setup.batches() for i in range(2))
    compress_(model, plan, halves, refine=0)
    return model


def uptrained(
    files: Mapping[str, str], k: int, kind: str, config: Any, metric: str, inputs: dict[str, Tensor], **options: Any
) -> Row:
    """Scores with the top k blocks replaced (k = 0: full fine-tuning), and the size of the saved model.

    Args:
        files: model and data for FinetuneConfig.
        k: number of blocks.
        kind: of the blocks that replace them, in KINDS.
        config: has `num_features`, `learning_rate`, `batch_size`, `epochs` and `train_rows`.
        metric: name of the score.
        inputs: a batch of the model, for which multiply-adds are counted.
        **options: further fields of FinetuneConfig, also in place of these.
    """
    from snnk.hf.cost import multiply_adds, stored

    way: Row = {"method": "full"}
    if k:
        way = {"method": "uptrain", "num_features": config.num_features, "layers": f"top-{k}"}
    way |= {name: getattr(config, name) for name in ("learning_rate", "batch_size", "epochs")}
    way |= {"limit_train": config.train_rows, "patience": config.epochs}  # which never stops a training
    done = tuned(files, with_atoms() if kind == ATOMS else None, **{**way, **options})
    found = row_of(done, metric)
    if done is not None:
        tensors = stored(done.model).values()
        found["pooling"] = done.metrics["config"]["pooling"]
        found["stored_M"] = sum(t.numel() for t in tensors) / 1e6
        found["stored_MB"] = sum(t.nbytes for t in tensors) / 1e6
        found["multiply_adds_G"] = multiply_adds(done.model, inputs) / 1e9
    return found


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row per task, seed, k, and kind of the new blocks."""
    with tiny.glue(config, QUICK, source, MODEL) as files:
        from snnk.finetune.glue import GLUE
        from snnk.hf.models import load_processor

        blocks, tokenizer = blocks_of(files["model"]), load_processor(files["model"], images=False)
        for seed in range(config.seed, config.seed + config.seeds):
            # the smallest k of all tasks first, so that a run that is stopped has whole comparisons
            for (k, kind), task in product(cells(config.replaced, blocks), config.tasks):
                key = {"task": task, "replaced": k, "kind": kind, "seed": seed}
                row = results.find(**key)
                if row is None:
                    decay = config.weight_decay_large if GLUE[task].large else config.weight_decay
                    options = {"glue": task, "weight_decay": decay, "max_length": config.max_length, "seed": seed}
                    options["limit_train"] = config.pair_rows if has_pairs(task) else config.train_rows
                    inputs = _inputs(tokenizer, config, pairs=has_pairs(task))
                    found = uptrained(files, k, kind, config, metric_of(task), inputs, **options)
                    row = results.add({**key, "blocks": blocks, **found, "paper_full": FULL.get(task)})
                yield row


def _inputs(tokenizer: Any, config: Config, pairs: bool) -> dict[str, Tensor]:
    """A batch of `texts` texts, or pairs of texts, of `length` tokens, most of them padding."""
    texts = ["a"] * config.texts
    shape = {"padding": "max_length", "max_length": config.length, "return_tensors": "pt"}
    return dict(tokenizer(texts, texts if pairs else None, **shape))


def blocks_of(model: str) -> int:
    """The number of feed-forward blocks of a model in a folder or on the hub, from its configuration alone."""
    import torch
    from transformers import AutoModel

    from snnk.hf import find_ffns
    from snnk.hf.models import read_config

    with torch.device("meta"):
        return len(find_ffns(AutoModel.from_config(read_config(model), trust_remote_code=False)))


def _curve(results: Results, task: str, kind: str) -> list[Row]:
    """One row per k: sizes, the mean score over seeds (None if a run diverged), and the rows themselves."""
    rows = [r for r in results if r["task"] == task and r["kind"] in (FULLY, kind)]
    found = []
    for k in sorted({r["replaced"] for r in rows}):
        same = [r for r in rows if r["replaced"] == k]
        scores = [r["score"] for r in same]
        found.append({**same[0], "score": None if None in scores else mean(scores), "rows": same})
    return found


def plot(results: Results) -> Figure:
    """Score against stored megabytes and against multiply-adds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("stored_MB", "multiply_adds_G"),
        ("stored, MB", "multiply-adds, billions"),
        strict=True,
    ):
        for number, task in enumerate(dict.fromkeys(r["task"] for r in results)):
            for kind, form in zip(KINDS, ("o--", "s-"), strict=True):
                curve = [r for r in _curve(results, task, kind) if r["score"] is not None]
                name = f"{task} ({metric_of(task)}), {kind}"
                axes.plot([r[key] for r in curve], [r["score"] for r in curve], form, color=f"C{number}", label=name)
                for r in curve:
                    # both kinds have a point at each k: the text is above the one and below the other
                    above = kind == ATOMS
                    place = {"xytext": (0, 7 if above else -14), "textcoords": "offset points", "ha": "center"}
                    if above or r["replaced"]:
                        axes.annotate(f"k = {r['replaced']}", (r[key], r["score"]), fontsize=8, **place)
        axes.margins(y=0.12)  # room for the text above the highest point
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("score, %")
    return figure


def left(results: Results) -> list[str]:
    """The parts that the rows lack: of their own configuration, then of the paper's."""
    found = others(results, "bert-base")
    tasks = [task for task in FULL if not any(r["task"] == task for r in results)]
    return [*gaps(results), *found, *([", ".join(tasks)] if tasks else [])]


def gaps(results: Results) -> list[str]:
    """The missing rows of the configuration."""
    config, blocks = results.config, {r["task"]: r["blocks"] for r in results}
    return [
        f"{task}: k = {k}, {kind}, seed {seed}"
        for task, count in blocks.items()
        for seed in range(config["seed"], config["seed"] + config["seeds"])
        for k, kind in cells(config["replaced"], count)
        if not results.find(task=task, replaced=k, kind=kind, seed=seed)
    ]


def claims(results: Results) -> list[Row]:
    """The paper's statements about half of the blocks, with the largest k up to half, and atoms at every k."""
    table: list[Row] = []
    for task in dict.fromkeys(r["task"] for r in results):
        curve = _curve(results, task, RANDOM)
        half = [r for r in curve if 0 < r["replaced"] <= r["blocks"] / 2]
        if not half or curve[0]["replaced"]:
            continue
        full, last = curve[0], half[-1]
        what = f"k = {last['replaced']} of {last['blocks']}"
        paper = "" if full["paper_full"] is None else f" (the paper's model, all trained: {full['paper_full']})"
        statement = f"{task}, top 6 of 12 replaced: minimal impact{paper}"
        if full["score"] is None or last["score"] is None:
            table.append(claim(statement, f"{what}: diverged", False))
            continue
        size, work = (1 - last[key] / full[key] for key in ("stored_MB", "multiply_adds_G"))
        if not any(made["paper"] == SMALLER for made in table):  # the same for every task
            table.append(
                claim(
                    SMALLER,
                    f"{what}: {100 * size:.0f} % of the size, {100 * work:.0f} % of the multiply-adds less",
                    min(size, work) >= 0.4,
                    "40 % or more",
                )
            )
        ended = have_ended(full["rows"]) and have_ended(last["rows"])
        table.append(
            claim(
                statement,
                f"{what}: {full['metric']} {full['score']:.2f} -> {last['score']:.2f}{facts(last['rows'])}; "
                f"{full['model']}{CUT * (not ended)}",
                last["score"] >= full["score"] - SLIGHT if ended else None,
                f"{SLIGHT:g} points",
            )
        )
    return [*table, *_atoms_ahead(results)]


def _atoms_ahead(results: Results) -> list[Row]:
    """One claim per task and k: atoms are above random features by more than chance."""
    table = []
    for task in dict.fromkeys(r["task"] for r in results):
        random, atoms = ({r["replaced"]: r for r in _curve(results, task, kind)} for kind in KINDS)
        for k in sorted(k for k in random.keys() & atoms.keys() if k):
            one, two = atoms[k], random[k]
            statement = f"not in the paper: {task}, k = {k} of {one['blocks']}: atoms above random features"
            if one["score"] is None or two["score"] is None:
                table.append(claim(statement, "diverged", False))
                continue
            answers = ANSWERS.get(task) or results.config["test_rows"]
            equal = max(EQUAL, deviation(one["metric"], one["score"], two["score"], answers))
            tie = " (a tie)" if abs(one["score"] - two["score"]) <= equal else ""
            ended = have_ended(one["rows"]) and have_ended(two["rows"])
            told = [f"{r['kind']} {r['score']:.2f}{facts(r['rows'])}" for r in (one, two)]
            holds = one["score"] > two["score"] and not tie
            table.append(
                claim(
                    statement,
                    f"{', '.join(told)}{tie}; {one['model']}{CUT * (not ended)}",
                    holds if ended else None,
                    f"{equal:.1f} points: less is a tie",
                )
            )
    return table
