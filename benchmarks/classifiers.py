"""Compression of whole fine-tuned models of pairs, attention included: a classifier and a cross-encoder.

    python benchmarks/classifiers.py --model FOLDER --data GLUE_FOLDER [--keeps 0.5,0.33] [--tuned FOLDER] [--out FILE]
    python benchmarks/classifiers.py --quick

The encoder in FOLDER gets a new head and is fine-tuned in full on the pairs of the training file: MRPC with two
classes, and STS-B with one number, as a cross-encoder. The settings of the fine-tuning are fixed, and none is chosen on
dev rows. The rows "snnk" are what `snnk.hf.compress` then writes with its default options, from the same pairs without
their labels; `keep` is the part of the multiply-adds of all linear layers inside the layers of the model. `held_out`
has the agreement with the original from report.json, on pairs that nothing was fitted to by the compression. The dev
file is evaluated once per row, and `dev` has the agreement with the original there, for rivals too. Rivals have no
training after they are cut, like "snnk, without distillation". Latency is processor time on one thread for 32 pairs of
64 tokens and for one such pair, over that of the original, measured in turns. --tuned keeps the fine-tuned models in a
folder for the next run. --quick generates a small model and pairs, which show that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from compress import latency, size_of
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from whole import Place, drop_layers, kept, low_rank, make

from snnk.experiments.compression import Batch, Task
from snnk.experiments.lab.records import Results
from snnk.experiments.lab.tiny import glue_columns
from snnk.finetune.glue import GLUE
from snnk.finetune.scores import score
from snnk.hf import compress
from snnk.hf.compression.agreement import agreement
from snnk.hf.compression.outputs import outputs_of

SHAPES = {"32x64": (32, 64), "1x64": (1, 64)}
PAIR = ("first", "second")  # columns of the file of pairs
Row = tuple[str, str, float]


@dataclass(frozen=True)
class Config:
    model: str = ""
    epochs: int = 3
    rate: float = 1e-4
    batch_size: int = 32
    max_length: int = 128
    rounds: int = 15
    threads: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Pairs:
    """Rows of training and of dev, the names of metrics, and whether labels are classes or numbers."""

    train: list[Row]
    dev: list[Row]
    metrics: tuple[str, ...]
    classes: bool


def read(task: str, data: Path) -> Pairs:
    row = GLUE[task]
    train, dev = (
        list(zip(c[row.text], c[str(row.pair)], map(float, c[row.label]), strict=True))
        for c in glue_columns(task, data)
    )
    return Pairs(train, dev, row.metrics, classes=task != "stsb")


def generate(texts: Path) -> Pairs:
    """Neighbouring lines of a file as pairs, with random labels, for --quick."""
    lines, order = texts.read_text(encoding="utf-8").splitlines(), random.Random(0)
    rows = [(one, two, float(order.random() < 0.5)) for one, two in pairwise(lines)]
    return Pairs(rows[:300], rows[300:], ("f1", "accuracy"), classes=True)


def encode(tokenizer: Any, pairs: Pairs, rows: list[Row], config: Config) -> list[Batch]:
    """Batches of pairs of similar length, in random order, with labels."""
    rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    parts = [rows[i : i + config.batch_size] for i in range(0, len(rows), config.batch_size)]
    random.Random(config.seed).shuffle(parts)
    options: Any = {"padding": True, "truncation": True, "max_length": config.max_length, "return_tensors": "pt"}
    return [
        {
            **tokenizer([row[0] for row in part], [row[1] for row in part], **options),
            "labels": torch.tensor([int(y) if pairs.classes else y for *_, y in part]),
        }
        for part in parts
    ]


def unlabelled(batches: list[Batch]) -> list[Batch]:
    return [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]


def fine_tune(model: Any, batches: list[Batch], config: Config) -> None:
    adam = torch.optim.AdamW(model.parameters(), lr=config.rate, weight_decay=0.01)
    steps, step = config.epochs * len(batches), 0
    model.train()
    for epoch in range(config.epochs):
        for batch in random.Random(config.seed + epoch).sample(batches, len(batches)):
            adam.param_groups[0]["lr"] = config.rate * min(1.0, step / (0.06 * steps), (steps - step) / (0.94 * steps))
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
            step += 1
            sys.stdout.write(f"\rstep {step} of {steps}")
            sys.stdout.flush()
    sys.stdout.write("\n")


def tune(source: Path, folder: Path, pairs: Pairs, config: Config) -> None:
    """Fine-tune the encoder in `source` and save it."""
    torch.manual_seed(config.seed)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=2 if pairs.classes else 1, trust_remote_code=False
    )
    fine_tune(model, encode(tokenizer, pairs, pairs.train, config), config)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def ours(place: Place, keep: float, work: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model that `snnk.hf.compress` writes, and its report."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        out = Path(folder) / "small"
        report = compress(place.folder, place.texts, out=out, keep=keep, text=PAIR[0], text_pair=PAIR[1], **options)
        return AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=False).eval(), report


def build(name: str, place: Place, keep: float, work: Path) -> tuple[Any, dict[str, float]]:
    """A contender, and the held-out agreement in its report, if it has one."""
    if name == "original":
        return place.model, {}
    if name in RIVALS:
        return RIVALS[name](place, keep, work), {}
    model, report = ours(place, keep, work, **{**place.options, **OURS[name]})
    return model, report["agreement"]


OURS: dict[str, dict[str, Any]] = {"snnk": {}, "snnk, without distillation": {"recover": 0}}
RIVALS = {"activation-aware low rank": low_rank, "dropping layers": drop_layers}


@torch.no_grad()
def scores(model: Any, batches: list[Batch], metrics: tuple[str, ...]) -> dict[str, float]:
    """Metrics in percent; Spearman's correlation of two constants, as of a model that is no more, is 0."""
    logits = torch.cat([model(**batch).logits for batch in unlabelled(batches)])
    found = score(logits, torch.cat([batch["labels"] for batch in batches]), metrics)
    return {name: 100 * found[name] for name in metrics}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="generate a small model")
    parser.add_argument("--model", type=Path, help="folder of an encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE, with MRPC and STS-B")
    parser.add_argument("--tasks", default="mrpc,stsb")
    parser.add_argument("--keeps", default="0.5,0.33")
    parser.add_argument("--tuned", type=Path, help="folder for the fine-tuned models; those that are there are used")
    parser.add_argument("--threads", type=int, default=2, help="latency is always measured on one thread")
    parser.add_argument("--only", default=";".join((*OURS, *RIVALS)), help="contenders, separated by semicolons")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/classifiers.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or use --quick for a generated model")
    config = (
        Config("quick", epochs=1, rounds=2, threads=1) if args.quick else Config(args.model.name, threads=args.threads)
    )
    keeps = [0.5] if args.quick else [float(k) for k in args.keeps.split(",")]
    torch.set_num_threads(config.threads)
    results = Results(args.out, config)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        generated = make(work) if args.quick else None
        for task in ["generated"] if generated else args.tasks.split(","):
            pairs = generate(generated.texts) if generated else read(task, args.data)
            folder = (args.tuned or work) / f"{config.model}-{task}"
            if not (folder / "config.json").exists():
                tune(generated.folder if generated else args.model, folder, pairs, config)
            texts = work / f"{task}.jsonl"
            lines = (json.dumps(dict(zip(PAIR, row[:2], strict=True))) for row in pairs.train)
            texts.write_text("\n".join(lines), encoding="utf-8")
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            calibration = unlabelled(encode(tokenizer, pairs, pairs.train, config))[:60]  # for rivals
            dev = encode(tokenizer, pairs, pairs.dev, config)
            model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False).eval()
            place = Place(model, folder, texts, Task(calibration, dev, []), generated.options if generated else {})
            run(task, place, pairs, dev, keeps, args.only.split(";"), work, config, results)
    return 0


def run(
    task: str,
    place: Place,
    pairs: Pairs,
    dev: list[Batch],
    keeps: list[float],
    names: list[str],
    work: Path,
    config: Config,
    results: Results,
) -> None:
    """Rows of one task."""
    inputs = unlabelled(dev)
    before = [outputs_of(place.model, batch) for batch in inputs]
    for name, keep in [("original", 1.0), *((name, keep) for keep in keeps for name in names)]:
        if results.find(task=task, contender=name, keep=keep):
            continue
        clocks = time.perf_counter, time.process_time
        start = [clock() for clock in clocks]
        model, held_out = build(name, place, keep, work)
        spent = [clock() - begun for clock, begun in zip(clocks, start, strict=True)]
        parameters, megabytes = size_of(model)
        times = {
            f"latency_{label}": latency(logits_of(place.model), logits_of(model), ones(inputs[0], shape), config.rounds)
            for label, shape in SHAPES.items()
        }
        row = results.add(
            {
                "task": task,
                "contender": name,
                "keep": keep,
                "multiply_adds": kept(model, place.model),
                "parameters": parameters,
                "stored_MB": megabytes,
                **times,
                **scores(model, dev, pairs.metrics),
                "dev": agreement(before, (outputs_of(model, batch) for batch in inputs)),
                "held_out": held_out,
                "minutes": spent[0] / 60,
                "processor_minutes": spent[1] / 60,
                "seed": config.seed,
            }
        )
        figures = ", ".join(f"{name} {row[name]:.2f}" for name in pairs.metrics)
        sys.stdout.write(
            f"{task}, {name}, keep {keep}: {row['multiply_adds']:.3f} of the multiply-adds, latency "
            f"{row['latency_32x64']:.2f} and {row['latency_1x64']:.2f}, {figures}, {row['minutes']:.1f} min\n"
        )
        sys.stdout.flush()


def logits_of(model: Any) -> Callable[[Batch], Tensor]:
    return lambda batch: model(**batch).logits


def ones(like: Batch, shape: tuple[int, int]) -> dict[str, Tensor]:
    return {key: torch.ones(shape, dtype=torch.int64) for key in like}


if __name__ == "__main__":
    sys.exit(main())
