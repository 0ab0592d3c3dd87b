"""Forward time of BERT-base with its top six feed-forward blocks bundled, m = 8, against the original.

    python benchmarks/bundled.py [--quick] [--out FILE]

64 sequences of 128 tokens, random weights (time does not depend on them). The two take turns; the figure is the ratio
of median times, beside that of the multiply-adds and the paper's own measurement.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from snnk.experiments.records import Results
from snnk.hf import bundle_, replace_ffn_
from snnk.hf.counting import multiply_adds

PART, PAPER = 0.95, 1.375  # of the multiply-adds' ratio; the paper's measured ratio


@dataclass(frozen=True)
class Config:
    texts: int = 64
    length: int = 128
    layers: int = 12
    replaced: int = 6
    num_features: int = 8
    rounds: int = 7
    threads: int = 2
    seed: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two texts, two layers; says nothing about speed")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/bundled.json"))
    args = parser.parse_args()
    config = Config(texts=2, layers=2, replaced=1, rounds=2) if args.quick else Config()
    torch.set_num_threads(config.threads)
    results = Results(args.out, config, resume=False)
    original = BertModel(BertConfig(num_hidden_layers=config.layers)).eval()
    bundled = copy.deepcopy(original)
    replace_ffn_(bundled, f"top-{config.replaced}", num_features=config.num_features)
    bundle_(bundled)
    inputs: Any = {"input_ids": torch.zeros(config.texts, config.length, dtype=torch.long)}
    work = [multiply_adds(model, inputs) for model in (original, bundled)]
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for turn in range(config.rounds + 1):  # the first is to warm up
            for who in (turn % 2, 1 - turn % 2):
                start = time.perf_counter()
                (original, bundled)[who](**inputs)
                times[who].append(time.perf_counter() - start)
    medians = [statistics.median(values[1:]) for values in times]
    row = results.add(
        {
            "multiply_adds": work[0],
            "multiply_adds_bundled": work[1],
            "multiply_adds_ratio": work[0] / work[1],
            "seconds": medians[0],
            "seconds_bundled": medians[1],
            "time_ratio": medians[0] / medians[1],
            "time_ratios": [a / b for a, b in zip(times[0][1:], times[1][1:], strict=True)],
            "paper_time_ratio": PAPER,
            "seed": config.seed,
        }
    )
    sys.stdout.write(
        f"{row['time_ratio']:.3f} times faster; multiply-adds {row['multiply_adds_ratio']:.3f} times fewer "
        f"(bound {PART} of it), the paper measured {PAPER}\n"
    )
    return int(row["time_ratio"] < PART * row["multiply_adds_ratio"])


if __name__ == "__main__":
    sys.exit(main())
