"""Compression of fine-tuned classifiers: accuracy and Matthews correlation before and after.

    python benchmarks/classifiers.py --model FOLDER --data GLUE_FOLDER [--out FILE]
    python benchmarks/classifiers.py --quick

The encoder in FOLDER gets a new head and is fine-tuned in full on a part of the training files of SST-2 and CoLA. Its
settings are fixed, and none is chosen on dev rows. It is then compressed with training sentences, without labels.
--quick generates a small model and random tokens, which show that the script runs and nothing about accuracy.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from snnk.experiments.compression import Batch
from snnk.experiments.lab.records import Results
from snnk.experiments.lab.tiny import glue_columns
from snnk.finetune.scores import mcc
from snnk.hf import compress_, plan


@dataclass(frozen=True)
class Config:
    model: str = ""
    tasks: tuple[str, ...] = ("SST-2", "CoLA")
    sentences: int = 6000  # of the training file, for fine-tuning
    epochs: int = 2
    rate: float = 1e-4
    batch_size: int = 32
    calibration: int = 2000
    keeps: tuple[float, ...] = (0.5, 0.25, 0.125)
    threads: int = 2
    seed: int = 0


def read(folder: Path, task: str, split: str) -> list[tuple[str, int]]:
    columns = glue_columns(task.lower().replace("-", ""), folder)[split == "dev"]
    return list(zip(columns["sentence"], map(int, columns["label"]), strict=True))


def encode(tokenizer: Any, rows: list[tuple[str, int]], size: int) -> list[Batch]:
    """Batches of rows of similar length, in random order."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    random.Random(0).shuffle(parts)
    return [
        {
            **tokenizer([t for t, _ in part], padding=True, truncation=True, max_length=128, return_tensors="pt"),
            "labels": torch.tensor([label for _, label in part]),
        }
        for part in parts
    ]


def generate(count: int, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(100, (32, 12), generator=generator) for _ in range(count)]
    return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": (x[:, 0] > 50).long()} for x in ids]


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
    model.eval()


@torch.no_grad()
def score(model: Any, batches: list[Batch]) -> dict[str, float]:
    guesses = torch.cat([model(**batch).logits.argmax(1) for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    return {
        "accuracy": 100 * float((guesses == labels).float().mean()),
        "matthews": 100 * mcc(guesses.numpy(), labels.numpy()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="generate a small model")
    parser.add_argument("--model", type=Path, help="folder of an encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE, with SST-2 and CoLA")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/classifiers.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or use --quick for a generated model")
    config = Config("" if args.quick else args.model.name, threads=args.threads)
    if args.quick:
        config = Config("quick", tasks=("generated",), keeps=(0.5,))
    torch.set_num_threads(config.threads)
    results = Results(args.out, config)
    for task in config.tasks:
        if all(results.find(task=task, keep=keep) for keep in (1.0, *config.keeps)):
            continue
        torch.manual_seed(config.seed)
        if args.quick:
            sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
            model: Any = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
            train, dev = generate(20, 0), generate(4, 1)
        else:
            tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(
                args.model, num_labels=2, trust_remote_code=False
            )
            rows = read(args.data, task, "train")
            random.Random(config.seed).shuffle(rows)
            train = encode(tokenizer, rows[: config.sentences], config.batch_size)
            dev = encode(tokenizer, read(args.data, task, "dev"), 64)
        fine_tune(model, train, config)
        calibration = [{k: v for k, v in batch.items() if k != "labels"} for batch in train]
        calibration = calibration[: -(-config.calibration // config.batch_size)]
        for keep in (1.0, *config.keeps):
            small, start, row = copy.deepcopy(model), time.perf_counter(), {}
            if keep < 1:
                report = compress_(small, plan(small, keep=keep, blocks="ffn"), calibration)
                row = {f"held_out_{name.replace(' ', '_')}": value for name, value in report.agreement.items()}
            row = results.add(
                {
                    "task": task,
                    "keep": keep,
                    "parameters": sum(p.numel() for p in small.parameters()),
                    **score(small, dev),
                    **row,
                    "minutes": (time.perf_counter() - start) / 60,
                    "seed": config.seed,
                }
            )
            sys.stdout.write(
                f"\r{task}, keep {keep}: {row['parameters'] / 1e6:.1f} M parameters, accuracy {row['accuracy']:.2f}, "
                f"Matthews {row['matthews']:.2f}\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
