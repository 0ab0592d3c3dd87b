"""Processor seconds of a step and of an epoch: `snnk finetune`, the Trainer of Hugging Face, and a plain loop.

    python benchmarks/finetune.py --model FOLDER --data GLUE_FOLDER [--task cola] [--out FILE]
    python benchmarks/finetune.py --quick

All three train the same parameters of the same model with AdamW on batches of one size. "snnk" is what `snnk finetune`
runs: rows of like length in a batch, the settings of the method, and bfloat16 where the processor has it. "Trainer" is
transformers' Trainer with its default arguments: rows in random order, padded to the longest of their batch, in
float32, with the dropout of the model's configuration. "plain loop" is a loop of a few lines, in float32 and with that
dropout, on the batches of snnk. They take turns with a number of steps, on one thread, and the figures are means of
processor time over rounds, each with other batches. Methods that train the head alone run the base model once over all
rows: its time is divided by the number of epochs and is part of the figures per epoch, and not of those per step. The
method "snnk, top-3" has adapters in the upper three layers and no dropout in the base model, and the time of its frozen
lower layers is counted in the same way.
--quick generates a small model and rows, which show that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from snnk.experiments.lab import tiny
from snnk.experiments.lab.records import Results
from snnk.finetune import METHODS, FinetuneConfig
from snnk.finetune.inputs import read
from snnk.finetune.loading import load_base
from snnk.finetune.lower import frozen_layers, run_lower
from snnk.finetune.methods import Setup
from snnk.finetune.trainer import train
from snnk.finetune.trunk import run_trunk, without_trunk
from snnk.hf.models import has_bfloat16, load_processor, quiet, set_padding

TARGETS = {"adapters": 0.6, "head": 0.1}  # of the seconds per epoch of Trainer, at most
FIT_ROWS = 256  # for the directions of adapters
Run = Callable[[int, int], float]  # takes a number of steps and a seed, and returns the processor seconds of each


@dataclass(frozen=True)
class Config:
    model: str = ""
    task: str = "cola"
    methods: tuple[str, ...] = ("snnk", "snnk-tuned", "lora", "snnk, top-3", "linear-probe", "snnk-pooler")
    batch_size: int = 32
    steps: int = 8  # per turn
    rounds: int = 10
    epochs: int = 10  # over which one run of the base model is spread
    max_length: int = 128
    threads: int = 1
    seed: int = 0


class Clock(TrainerCallback):
    """Processor seconds from the first step to the last: making a Trainer takes as long as some steps."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.process_time()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.process_time() - self.began


@quiet()
def contenders(name: str, config: Config, files: dict[str, str]) -> tuple[dict[str, Run], float, int, int]:
    """The three ways to train, the seconds of running frozen parts once, rows, and trained parameters."""
    method_name, _, layers = name.partition(", ")
    asked = FinetuneConfig(
        files["model"],
        "",
        method_name,
        glue=config.task,
        data_dir=files["data_dir"],
        batch_size=config.batch_size,
        pooling="model" if METHODS[method_name].own_pooler else "mean",
        max_length=config.max_length,
        layers=layers or None,
        dropout=False if layers else None,
        seed=config.seed,
    )
    method = METHODS[method_name]
    processor = load_processor(files["model"], False)
    inputs = read(asked, processor, False)
    data, collate = inputs.train, DataCollatorWithPadding(processor)
    torch.manual_seed(config.seed)
    loaded, drawn = load_base(asked, inputs.labels.names, False, lambda text: None)
    set_padding(loaded.model, processor)

    def batches(rows: int = FIT_ROWS) -> Any:
        return (data.batch(part) for part in data.epoch(32, 0, 0)[: max(1, rows // 32)])

    features = asked.num_features or method.features or 0
    setup = Setup(features, config.seed, False, files["model"], batches, asked.layers, drawn=drawn)
    base = method.edit(loaded.model, setup)
    settings = replace(asked.settings(images=False, large=False), patience=None)
    if not method.head_only:
        settings = replace(settings, bf16=has_bfloat16("cpu"))
    whole: Any = method.wrap(copy.deepcopy(base), setup)
    trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    own, once, rows = copy.deepcopy(whole), 0.0, data
    alone: Callable[[], Any] = nullcontext
    began = time.process_time()
    if method.head_only:
        found = run_trunk(own, data)
        if found is None:
            raise RuntimeError(f"{name} cannot run the base model once")
        (rows,), alone = found, partial(without_trunk, own)
    elif layers:
        upper = run_lower(own, frozen_layers(own), data)
        if upper is None:
            raise RuntimeError(f"{name} cannot run the lower layers once")
        (rows,), alone = upper
    if rows is not data:
        once = time.process_time() - began

    def ours(steps: int, turn: int) -> float:
        ends: list[float] = []  # of steps; the first one is not counted, nor is what comes before it
        options = replace(settings, max_steps=steps + 1, seed=turn)
        with alone():
            train(own, rows, None, options, progress=lambda *_: ends.append(time.process_time()))
        return (ends[-1] - ends[0]) / steps

    def trainer(steps: int, turn: int) -> float:
        model = trainer_model
        dataset = [{**row, "labels": int(label)} for row, label in zip(data.rows, data.labels, strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                per_device_train_batch_size=config.batch_size,
                max_steps=steps,
                learning_rate=settings.learning_rate,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
                seed=turn,
            )
            clock = Clock()
            Trainer(model, arguments, train_dataset=dataset, data_collator=collate, callbacks=[clock]).train()
            return clock.seconds / steps

    def loop(steps: int, turn: int) -> float:
        model = loop_model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.learning_rate)
        order = data.epoch(config.batch_size, turn, 0)
        began = time.process_time()
        for i in range(steps):
            batch = data.batch(order[i % len(order)])
            labels = batch.pop("labels")
            loss = F.cross_entropy(model(**batch).logits, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.process_time() - began) / steps

    trainer_model, loop_model = copy.deepcopy(whole), whole
    return {"snnk": ours, "Trainer": trainer, "plain loop": loop}, once, len(data), trained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="generate a small model and rows")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE")
    parser.add_argument("--task", default="cola", help="of two or more classes")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/finetune.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or use --quick for a generated model")
    config = Config(task=args.task) if args.quick else Config(args.model.name, args.task)
    if args.quick:
        config = replace(config, methods=("snnk", "snnk, top-1", "linear-probe"), steps=2, rounds=1, epochs=2)
    torch.set_num_threads(config.threads)
    results, missed = Results(args.out, config, resume=False), 0
    with tempfile.TemporaryDirectory() as folder:
        files = {"model": str(args.model), "data_dir": str(args.data)}
        if args.quick:
            files = {"model": tiny.make_bert(Path(folder) / "bert"), "data_dir": tiny.make_glue(Path(folder))}
        for name in config.methods:
            runs, once, rows, trained = contenders(name, config, files)
            times: dict[str, list[float]] = {way: [] for way in runs}
            for run in runs.values():
                run(1, 0)  # warms up
            for turn in range(config.rounds):  # each with other batches
                for way, run in runs.items():
                    times[way].append(run(config.steps, turn))
            steps = -(-rows // config.batch_size)
            step = {way: statistics.mean(found) for way, found in times.items()}
            epoch = {way: steps * seconds for way, seconds in step.items()}
            epoch["snnk"] += once / config.epochs
            head = METHODS[name.partition(", ")[0]].head_only
            for way in runs:
                row = results.add(
                    {
                        "method": name,
                        "way": way,
                        "trained": trained,
                        "rows": rows,
                        "seconds_per_step": step[way],
                        "seconds_per_epoch": epoch[way],
                        "base_model_once_seconds": once if way == "snnk" else 0.0,
                        "step_over_trainer": step[way] / step["Trainer"],
                        "epoch_over_trainer": epoch[way] / epoch["Trainer"],
                        "bf16": way == "snnk" and not head and has_bfloat16("cpu"),
                        "seed": config.seed,
                    }
                )
                sys.stdout.write(
                    f"{name}, {way}: {1e3 * row['seconds_per_step']:.1f} ms per step, {row['seconds_per_epoch']:.1f} s "
                    f"per epoch, {row['step_over_trainer']:.2f} and {row['epoch_over_trainer']:.2f} of Trainer's\n"
                )
            missed += epoch["snnk"] > TARGETS["head" if head else "adapters"] * epoch["Trainer"]
    sys.stdout.write(f"{len(config.methods) - missed} of {len(config.methods)} methods reach their target\n")
    return int(missed > 0 and not args.quick)


if __name__ == "__main__":
    sys.exit(main())
