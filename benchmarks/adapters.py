"""Fine-tuning at an equal number of parameters: ours, LoRA, bottleneck adapters, BitFit, IA3 and a linear probe.

    python benchmarks/adapters.py --model FOLDER --data GLUE_FOLDER [--tasks cola,stsb] [--jobs 2] [--out FILE]
    python benchmarks/adapters.py --quick

The rows of `snnk reproduce adapters`, each from a process of its own with one thread, several at a time. Beside the
classifier, a MiniLM (12 sites of 384) trains 78,336 numbers with snnk, snnk-relu and snnk-cos, 78,432 with houlsby,
73,824 with snnk-tuned, 73,728 with LoRA of rank 8; BitFit and IA3 have fewer. --quick makes a small model and texts
itself, and says nothing about any method.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from snnk.experiments.adapters import QUICK, Config, by_task, finals, measure, scores, waves
from snnk.experiments.lab import tiny
from snnk.experiments.lab.data import Source
from snnk.experiments.lab.records import Results, Row
from snnk.finetune.trainer import peak_memory


def alone(key: Row, config: Config, files: dict[str, Any]) -> Row:
    torch.set_num_threads(1)
    return {**measure(key, config, files), "peak_GB": peak_memory() / 1e9}  # of this process, which has one row


def summary(results: Results) -> list[str]:
    """A line for each method, best first, over what all of them have."""
    lines, rows = [], finals(results)
    for method, score in scores(results).items():
        cells = []
        for task, found in by_task(rows[method]).items():
            spread = f" +- {statistics.stdev(found):.2f}" if len(found) > 1 and not math.isnan(score) else ""
            cells.append(f"{task} {statistics.mean(found):.2f}{spread} ({len(found)})")
        done = [r for r in rows[method].values() if r["dev"] is not None]
        if done:
            time = statistics.median(r["seconds_a_step"] for r in done)
            peaks = [r["peak_GB"] for r in done if "peak_GB" in r]  # rows of `snnk reproduce` have none
            memory = f", {statistics.median(peaks):.2f} GB" if peaks else ""
            cells[0] = f"{done[0]['trained']:,} trained, {time:.2f} s a step{memory}: {cells[0]}"
        lines.append(f"{method:<13}{', '.join(cells)}; mean of {len(cells)} tasks {score:.2f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and texts made here")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE tasks")
    parser.add_argument("--tasks", default=",".join(Config.tasks))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seeds", type=int, default=Config.seeds)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adapters.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or --quick for a model made here")
    config, source = QUICK, Source()
    if not args.quick:
        config = Config(tasks=tuple(args.tasks.split(",")), seeds=args.seeds)
        source = Source(str(args.data), str(args.model))
    torch.set_num_threads(1)  # as in the processes that train, for the rows to say so
    results = Results(args.out, config, source=source.names)
    with (
        tiny.glue(config, QUICK, source) as files,
        get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool,
    ):
        for wave in waves(config, results):
            missing = [key for key in wave if not results.find(**key)]
            for row in pool.imap_unordered(partial(alone, config=config, files=files), missing):
                sys.stdout.write(json.dumps(results.add(row)) + "\n")
                sys.stdout.flush()
    for line in summary(results):
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
