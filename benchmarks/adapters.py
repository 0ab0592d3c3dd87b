"""Fine-tuning at an equal number of parameters: ours, LoRA, bottleneck adapters, BitFit, IA3 and a linear probe.

    python benchmarks/adapters.py --model FOLDER --data GLUE_FOLDER [--tasks cola,stsb] [--jobs 2] [--out FILE]
    python benchmarks/adapters.py --quick

Every method trains for the same number of steps on the same rows, from the same start of the classifier, each run in a
process of its own with one thread. Its learning rate is chosen for each task by a validation split cut from train, with
a seed of its own, from three values and further ones while the best is at an edge; dev is looked at once for each final
row. Beside the classifier, a MiniLM (12 sites of 384) trains 78,336 numbers with snnk, snnk-relu and snnk-cos, 78,432
with houlsby, 73,824 with snnk-tuned, 73,728 with LoRA of rank 8; BitFit and IA3 have fewer. --quick makes a small model
and texts itself, and says nothing about any method.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from snnk.experiments import tiny
from snnk.experiments.adapters import SIZES, row_of
from snnk.experiments.records import Results, Row
from snnk.finetune import FinetuneConfig, finetune


@dataclass(frozen=True)
class Config:
    model: str = ""
    tasks: tuple[str, ...] = ("cola", "stsb", "mrpc", "sst2")
    methods: tuple[str, ...] = tuple(SIZES)
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # the middle three first
    steps: int = 200
    batch_size: int = 32
    max_length: int = 128
    pooling: str = "mean"
    seeds: int = 3


Wanted = tuple[str, str, float, int]  # method, task, learning rate, seed


def measure(wanted: Wanted, config: Config, source: dict[str, Any]) -> Row:
    """One training, in a process of its own; the test of a GLUE task is its dev file."""
    method, task, rate, seed = wanted
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = finetune(
            FinetuneConfig(
                out=str(Path(folder, "out")),
                method=method,
                task=task,
                features=SIZES[method],
                learning_rate=rate,
                max_steps=config.steps,
                batch_size=config.batch_size,
                max_length=config.max_length,
                pooling=config.pooling,
                seed=seed,
                **source,
            )
        ).metrics
    return {"method": method, "task": task, "learning_rate": rate, "seed": seed, **row_of(found)}


def choose(method: str, task: str, config: Config, rows: Callable[[str, Any], list[Row]]) -> float:
    """The learning rate of best validation score: of the middle ones, and of the next while the best is at the edge."""
    rates = config.rates
    low, high = (1, len(rates) - 1) if len(rates) > 2 else (0, len(rates))
    while True:
        tried = rows("tuning", [(method, task, rate, 0) for rate in rates[low:high]])
        best = rates.index(max(tried, key=lambda r: r["validation"])["learning_rate"])
        if best == low and low > 0:
            low -= 1
        elif best == high - 1 and high < len(rates):
            high += 1
        else:
            return rates[best]


def summary(results: Results, config: Config) -> list[tuple[str, float, str]]:
    """(method, mean of dev over tasks, line), best first."""
    lines = []
    for method in config.methods:
        rows = [r for r in results if r["method"] == method and r["stage"] == "final"]
        if not rows:
            continue
        cells, means = [], []
        for task in config.tasks:
            scores = [100 * r["dev"] for r in rows if r["task"] == task]
            if scores:
                means.append(statistics.mean(scores))
                spread = statistics.stdev(scores) if len(scores) > 1 else float("nan")
                cells.append(f"{task} {means[-1]:.2f} +- {spread:.2f} ({len(scores)})")
        time, memory = (statistics.median(r[key] for r in rows) for key in ("seconds_a_step", "peak_GB"))
        head = f"{method:<13}{rows[0]['trained']:>8,} trained, {time:.2f} s a step, {memory:.2f} GB"
        mean = statistics.mean(means)
        lines.append((method, mean, f"{head}: {', '.join(cells)}; mean of {len(means)} tasks {mean:.2f}"))
    return sorted(lines, key=lambda line: -line[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and texts made here")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE tasks")
    parser.add_argument("--tasks", default="cola,stsb,mrpc,sst2")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adapters.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or --quick for a model made here")
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            config = Config("quick", ("cola",), ("snnk", "lora"), rates=(1e-2,), steps=4, seeds=1)
            source = {"model": tiny.make_bert(Path(folder, "model")), "data_dir": tiny.make_glue(Path(folder))}
        else:
            config = Config(args.model.name, tuple(args.tasks.split(",")), steps=args.steps, seeds=args.seeds)
            source = {"model": str(args.model), "data_dir": str(args.data)}
        results = Results(args.out, config)
        pool = get_context("spawn").Pool(args.jobs, maxtasksperchild=1)

        def rows(stage: str, wanted: list[Wanted]) -> list[Row]:
            """Those rows, measured where they are not there yet, written as they come."""
            keys = ("method", "task", "learning_rate", "seed")
            missing = [w for w in wanted if not results.find(stage=stage, **dict(zip(keys, w, strict=True)))]
            for found in pool.imap_unordered(partial(measure, config=config, source=source), missing):
                row = results.add({"stage": stage, **found})
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
            stored = (results.find(stage=stage, **dict(zip(keys, w, strict=True))) for w in wanted)
            return [row for row in stored if row is not None]

        with pool:
            for task in config.tasks:
                chosen = {method: choose(method, task, config, rows) for method in config.methods}
                seeds = range(1, 1 + config.seeds)
                rows("final", [(method, task, chosen[method], seed) for seed in seeds for method in config.methods])
    for _, _, line in summary(results, config):
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
