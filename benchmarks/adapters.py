"""Fine-tuning at an equal number of parameters: ours, LoRA, bottleneck adapters, BitFit, IA3 and a linear probe.

    python benchmarks/adapters.py --model FOLDER --data GLUE_FOLDER [--tasks cola,stsb] [--seeds 3] [--out FILE]
    python benchmarks/adapters.py --quick

Every method trains for the same number of steps on the same rows, from the same start of the classifier. Its learning
rate is chosen by the first task's validation split, cut from train, with one seed; dev is looked at once for each final
row. Sizes are chosen so that each method trains about as many parameters as it can have of 78,000 in a MiniLM (12 sites
of 384): IA3 and BitFit have fewer. --quick makes a small model and texts itself, and says nothing about any method.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from snnk.experiments.records import Results, Row
from snnk.finetune import FinetuneConfig, finetune

SIZES: dict[str, int | None] = {
    "snnk": 17,
    "snnk-tuned": 8,
    "snnk-relu": 16,
    "snnk-cos": 16,
    "lora": 8,
    "houlsby": 8,
    "bitfit": None,
    "ia3": None,
    "linear-probe": None,
}


@dataclass(frozen=True)
class Config:
    model: str = ""
    tasks: tuple[str, ...] = ("cola", "stsb", "mrpc", "sst2")
    methods: tuple[str, ...] = tuple(SIZES)
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    steps: int = 200
    batch_size: int = 32
    max_length: int = 128
    pooling: str = "mean"
    threads: int = 1
    seeds: int = 3


def measure(method: str, task: str, rate: float, seed: int, config: Config, source: dict[str, Any]) -> Row:
    """One training; the test of a GLUE task is its dev file."""
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
    training = found["training"]
    return {
        "method": method,
        "task": task,
        "learning_rate": rate,
        "seed": seed,
        "trained": found["parameters"]["trained"],
        "metric": found["metric"],
        "validation": found["scores"]["validation"][found["metric"]],
        "dev": found["scores"]["test"][found["metric"]],
        "start_validation": training["epochs"][0][found["metric"]],
        "seconds_a_step": training["seconds"] / training["steps"],
        "peak_GB": training["peak_memory_bytes"] / 1e9,
    }


def make(folder: Path) -> dict[str, Any]:
    """A small BERT, a tokenizer of whole words, and CoLA-like files whose label is whether a word is there."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(40)]
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder / "model")
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder / "model")
    generator = random.Random(0)
    (folder / "CoLA").mkdir()
    for split, rows in (("train", 200), ("dev", 40)):
        texts = [generator.sample(words, 6) for _ in range(rows)]
        lines = [f"made\t{int('w0' in text or 'w1' in text)}\t\t{' '.join(text)}" for text in texts]
        (folder / "CoLA" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return {"model": str(folder / "model"), "data_dir": str(folder)}


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
        time = statistics.median(r["seconds_a_step"] for r in rows)
        head = f"{method:<13}{rows[0]['trained']:>8,} trained, lr {rows[0]['learning_rate']:g}, {time:.2f} s a step"
        lines.append((method, statistics.mean(means), f"{head}: {', '.join(cells)}; mean {statistics.mean(means):.2f}"))
    return sorted(lines, key=lambda line: -line[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and texts made here")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE tasks")
    parser.add_argument("--tasks", default="cola,stsb,mrpc,sst2", help="the first one chooses the learning rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adapters.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or --quick for a model made here")
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            config = Config("quick", ("cola",), rates=(1e-2,), steps=4, seeds=1)
            source = make(Path(folder))
        else:
            config = Config(args.model.name, tuple(args.tasks.split(",")), steps=args.steps, seeds=args.seeds)
            source = {"model": str(args.model), "data_dir": str(args.data)}
        torch.set_num_threads(config.threads)
        results = Results(args.out, config)

        def row(stage: str, method: str, task: str, rate: float, seed: int) -> Row:
            found = results.find(stage=stage, method=method, task=task, learning_rate=rate, seed=seed)
            if found is None:
                found = results.add({"stage": stage, **measure(method, task, rate, seed, config, source)})
                sys.stdout.write(json.dumps(found) + "\n")
                sys.stdout.flush()
            return found

        chosen = {}
        for method in config.methods:
            tried = [row("tuning", method, config.tasks[0], rate, 0) for rate in config.rates]
            chosen[method] = max(tried, key=lambda r: r["validation"])["learning_rate"]
        for task in config.tasks:
            for seed in range(1, 1 + config.seeds):
                for method in config.methods:
                    row("final", method, task, chosen[method], seed)
    for _, _, line in summary(results, config):
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
