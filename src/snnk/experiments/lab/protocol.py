"""Training to the end: per task and method, a learning rate that validation rows choose, early stopping, and seeds.

A cell is a task, a method and its number of features. Its first seed is trained with several learning rates: the inner
ones of `rates`, then neighbours of the best one until both were tried. The run with the best validation score is the
first final row, and the other seeds are trained with its rate. Seeds differ in everything random: the rows that are
drawn, those for validation, features, batches and dropout. The test rows are evaluated once per run and choose nothing.

Every run has a process of its own with one thread, as many at a time as torch has threads, so that its time and its
peak memory are its own. Runs of methods that train the head alone share the outputs of the frozen base model: the first
of them computes these, and the peak memory of the others leaves the base model out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from snnk.experiments.lab.records import Results, Row
from snnk.experiments.lab.tuning import metric_of, row_of, tuned, variants

PRELOADED = ["snnk.finetune.run", "snnk.hf", "snnk.peft"]  # what a process of a run imports
Cell = tuple[str, str, int | None]  # task, method, number of features
UNTRAINED = ("bundled-solved", "closed-form")
DRAWN = ", random start"  # ends the name of a method whose classifier does not start from its closed form
PAIRS = ", pairs"  # ends the name of a method whose classifier compares the two texts of a row
LAYERS, NEURONS = ", four layers", ", neurons"  # end names of methods whose classifiers read more than the last layer
READ = {PAIRS: ("mean", "pairs"), LAYERS: ("layers", "pairs"), NEURONS: ("neurons", "neuron-pairs")}  # of one text, two
TAKEN = ("epochs", "patience", "batch_size", "schedule", "dropout", "max_length")  # fields of FinetuneConfig
SLOWER = {"full": 0.01}  # factors on the learning rates, where all parameters are trained


@dataclass(frozen=True)
class Protocol:
    """The part of an experiment's configuration that is the same for all cells.

    Args:
        rates: learning rates in ascending order.
        epochs: at most; training stops before if the validation score has not risen for three epochs, or for the
            `patience` of an experiment that has it.
        batch_size, schedule, dropout, max_length: see FinetuneConfig; None means the method's own.
        train_rows: at most, drawn at random.
        pair_rows: the same for pairs of texts, which have four times the tokens; None means the same number.
        pooling: of methods without a pooler of their own.
        seeds, seed: number of runs with the chosen rate, and the first seed.
    """

    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    epochs: int = 10
    batch_size: int = 32
    schedule: str | None = "linear"
    dropout: bool | None = False  # with it, bottleneck adapters on CoLA were no better, in one run each
    max_length: int = 128
    train_rows: int = 2_500  # as many as RTE has
    pair_rows: int | None = None
    pooling: str = "mean"
    seeds: int = 3
    seed: int = 0

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Any:
        """The configuration of rows in a file."""
        found: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
        return cls(**found)

    def rows(self, task: str) -> int:
        """The largest number of training rows of a task."""
        return self.pair_rows if self.pair_rows is not None and has_pairs(task) else self.train_rows

    def most(self, cells: Sequence[Cell]) -> int:
        """The largest number of rows of some cells."""
        return len(cells) * (len(self.rates) + self.seeds - 1)


def has_pairs(task: str) -> bool:
    """Whether the rows of a GLUE task have two texts."""
    from snnk.finetune.glue import GLUE

    return task in GLUE and GLUE[task].pair is not None


def run_cells(
    cells: Sequence[Cell],
    config: Protocol,
    results: Results,
    files: Mapping[str, str],
    *,
    here: bool = False,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Row]:
    """Rows of all cells, known ones first.

    Args:
        cells: what to train, in the order of importance.
        config, results: the experiment's.
        files: model and data for FinetuneConfig.
        here: train in this process, which saves the seconds of a start.
        facts: added to every new row.
    """
    with TemporaryDirectory() as name:
        for wave in waves(cells, config, results):
            known = [results.find(**key) for key in wave]
            yield from (row for row in known if row)
            missing = [key for key, row in zip(wave, known, strict=True) if not row]
            for row in measured(missing, config, files, shared=Path(name), here=here):
                yield results.add({**row, **facts})


def waves(cells: Sequence[Cell], config: Protocol, results: Results) -> Iterator[list[Row]]:
    """Lists of keys of rows. Each list depends on the rows of the lists before it, not on its own.

    The tasks are done one after the other, so that a run that is stopped has whole comparisons.
    """
    for task in dict.fromkeys(cell[0] for cell in cells):
        own = {cell: _rates(cell, config) for cell in cells if cell[0] == task}
        wave = [
            _key(cell, rate, config.seed)
            for cell, rates in own.items()
            for rate in (rates[1:-1] if len(rates) > 2 else rates)
        ]
        while wave:
            yield wave
            wave = []
            for cell, rates in own.items():
                tried = [r for r in _of(config, results) if _cell(r) == cell and r["seed"] == config.seed]
                best = rates.index(_best(tried)["learning_rate"])
                beside = {rates[max(best - 1, 0)], rates[min(best + 1, len(rates) - 1)]}
                wave += [_key(cell, rate, config.seed) for rate in sorted(beside - {r["learning_rate"] for r in tried})]
        best_rates = {_cell(r): r["learning_rate"] for r in chosen(_of(config, results), config.seed)}
        yield [_key(cell, best_rates[cell], config.seed + i) for i in range(1, config.seeds) for cell in own]


def _of(config: Protocol, results: Iterable[Row]) -> list[Row]:
    """The rows whose learning rate is one of the configuration's; a file may have rows of other rates."""
    return [r for r in results if r["learning_rate"] in _rates(_cell(r), config)]


def _key(cell: Cell, rate: float, seed: int) -> Row:
    return {**dict(zip(("task", "method", "features"), cell, strict=True)), "learning_rate": rate, "seed": seed}


def _rates(cell: Cell, config: Protocol) -> tuple[float, ...]:
    factor = SLOWER.get(cell[1], 1.0)
    return config.rates[:1] if cell[1] in UNTRAINED else tuple(rate * factor for rate in config.rates)


def _cell(row: Row) -> Cell:
    return row["task"], row["method"], row["features"]


def _best(tried: Iterable[Row]) -> Row:
    """The row with the best validation score; of equal ones that with the lower loss, then that with the lower rate."""

    def rank(row: Row) -> tuple[float, ...]:
        score, loss = row["validation"], row["validation_loss"]  # None if it diverged
        return -math.inf if score is None else score, -math.inf if loss is None else -loss, -row["learning_rate"]

    return max(tried, key=rank)


def chosen(results: Iterable[Row], seed: int) -> list[Row]:
    """The rows of the learning rate that the first seed chose for their cell."""
    rows = list(results)
    tried = [r for r in rows if r["seed"] == seed]
    best = {cell: _best(r for r in tried if _cell(r) == cell)["learning_rate"] for cell in map(_cell, tried)}
    return [r for r in rows if r["learning_rate"] == best.get(_cell(r))]


def missing(cells: Iterable[Cell], config: Protocol, results: Iterable[Row]) -> list[str]:
    """A line for every cell that has some of its final rows, and one per task for the cells that have none.

    Example:
        >>> missing([("cola", "lora", 8), ("cola", "full", None)], Protocol(), [])
        ['cola: no rows of lora with 8; full']
    """
    done = Counter(map(_cell, chosen(results, config.seed)))
    names = {cell: f"{cell[1]}{f' with {cell[2]}' if cell[2] else ''}" for cell in cells}
    begun = [
        f"{cell[0]}: {name}, {done[cell]} of {config.seeds} seeds"
        for cell, name in names.items()
        if 0 < done[cell] < config.seeds
    ]
    none: dict[str, list[str]] = {}
    for cell, name in names.items():
        if not done[cell]:
            none.setdefault(cell[0], []).append(name)
    return [*begun, *(f"{task}: no rows of {'; '.join(found)}" for task, found in none.items())]


def measured(
    keys: Sequence[Row], config: Protocol, files: Mapping[str, str], *, shared: Path | None = None, here: bool = False
) -> Iterator[Row]:
    """Rows as they are done, each from a new process, as the peak memory of a process never falls.

    Args:
        keys, config, files, here: see `run_cells`.
        shared: folder for the outputs of frozen base models, which runs of one task and seed share.
    """
    if here or not keys:
        yield from (measure(key, config, files, shared) for key in keys)
        return
    import torch

    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    with context.Pool(torch.get_num_threads(), _one_thread, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(partial(measure, config=config, files=files, shared=shared), keys)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def measure(key: Row, config: Protocol, files: Mapping[str, str], shared: Path | None = None) -> Row:
    """The row of one run, with scores in percent on validation rows and test rows; None for them if it diverged."""
    from snnk.finetune.methods import METHODS

    name, glue = key["method"].partition(", ")[0], "data_dir" in files
    base, variant = variants().get(name, (name, None))
    options: dict[str, Any] = {field: value for field, value in asdict(config).items() if field in TAKEN}
    options |= {"glue": key["task"]} if glue else {}
    options["pooling"] = None if name in UNTRAINED or METHODS[base].own_pooler or not glue else config.pooling
    for ending, poolings in READ.items():
        if key["method"].endswith(ending):
            options["pooling"] = poolings[has_pairs(key["task"])]
    if key["method"].endswith(DRAWN):
        options["classifier_start"] = "random"
    if name in UNTRAINED:
        options["max_steps"] = 0
    result = tuned(
        files,
        variant,
        method=base,
        num_features=key["features"],
        learning_rate=key["learning_rate"],
        limit_train=config.rows(key["task"]),
        seed=key["seed"],
        shared=shared,
        **options,
    )
    row = {**key, **row_of(result, metric_of(key["task"]))}
    if result is None:
        return row
    found = result.metrics
    return {**row, "pooling": found["config"]["pooling"], "peak_GB": found["training"]["peak_memory_bytes"] / 1e9}
