"""Compression of a decoder: perplexity against other ways to reach the same size.

    python benchmarks/decoder.py --model FOLDER --data FOLDER [--out FILE]
    python benchmarks/decoder.py --quick

The data are valid.txt and test.txt of wikitext-2, gzipped or not. Each is tokenized as one text and cut into windows of
256 tokens without overlap. Calibration and distillation read different windows of the valid split. Perplexity is
measured once per row, in float32, on 32 windows that are spread evenly over the test split, over all tokens but the
first of each.
A size is the part that is left of the parameters of all linear layers inside the transformer's layers; embeddings are
not counted. Latency is processor time on one thread to read 256 tokens, over that of the original, measured in turns.
The time to compress is given in minutes of the clock and of the processor, summed over threads: fifteen minutes on two
cores are thirty of the processor. --quick generates a small model and random tokens, which show that the script runs
and nothing else.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rivals
import torch
from compress import latency
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from snnk.experiments.lab.records import Results
from snnk.hf import compress_, find_ffns, plan
from snnk.hf.compression.causal import next_tokens, of_next_tokens

TARGETS = {0.75: 1.2, 0.625: 1.4}  # perplexity over the original's, SmolLM2-135M
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    """`fit` and `distill` are numbers of windows of the valid split, `test` of the test split."""

    model: str = ""
    window: int = 256
    fit: int = 96
    distill: int = 512
    test: int = 32
    rounds: int = 9
    texts_per_step: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Task:
    fit: list[Batch]
    more: list[Batch]  # for distillation
    test: list[Batch]


def windows(ids: Tensor, config: Config) -> Tensor:
    return ids[: len(ids) // config.window * config.window].view(-1, config.window)


def spread(found: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Windows that are spread evenly over a text, and the others."""
    taken = torch.zeros(len(found), dtype=torch.bool)
    taken[torch.linspace(0, len(found) - 1, min(count, len(found))).round().long()] = True
    return found[taken], found[~taken]


def batched(chosen: Tensor, config: Config) -> list[Batch]:
    """Batches of windows; neighbours in the text are in different batches."""
    count = -(-len(chosen) // config.texts_per_step)
    parts = [chosen[i::count] for i in range(count)]
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]


def load(args: argparse.Namespace, config: Config) -> tuple[Any, Task]:
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)

    def ids(name: str) -> Tensor:
        path = next(p for p in (args.data / f"{name}.txt", args.data / f"{name}.txt.gz") if p.exists())
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return torch.tensor(tokenizer(text.decode())["input_ids"])

    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False, dtype=torch.float32).eval()
    fit, others = spread(windows(ids("valid"), config), config.fit)
    parts = fit, spread(others, config.distill)[0], spread(windows(ids("test"), config), config.test)[0]
    return model, Task(*(batched(part, config) for part in parts))


def make(config: Config) -> tuple[Any, Task]:
    """A small model and random tokens, for --quick."""
    torch.manual_seed(config.seed)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).eval()
    return model, Task(*(batched(torch.randint(100, (24, config.window)), config) for _ in range(3)))


def layers_of(model: Any) -> list[nn.Module]:
    return [ffn.layer for ffn in find_ffns(model)]


def linear_parameters(model: Any) -> int:
    linear = [m for layer in layers_of(model) for m in layer.modules() if isinstance(m, nn.Linear)]
    return sum(p.numel() for m in linear for p in m.parameters())


def logits_of(model: Any) -> Callable[[Batch], Tensor]:
    return lambda batch: model(**batch).logits


# Contenders: each changes a copy of the model in place, so that the part `size` of its linear parameters is left.


def ours(model: Any, task: Task, size: float, steps: int, **options: Any) -> None:
    chosen = plan(model, keep=size, blocks=options.pop("blocks", "all"), batches=options.pop("batches", task.fit))
    compress_(model, chosen, task.fit, refine=0, more=task.more, recover=steps, **options)


def of_ffns(model: Any, task: Task, size: float, steps: int, **options: Any) -> None:
    """All the savings in feed-forward blocks."""
    ours(model, task, keep_of_ffns(model, size), steps, blocks="ffn", **options)


def keep_of_ffns(model: Any, size: float) -> float:
    """The part of the feed-forward blocks that is left if all others stay."""
    return 1 - (1 - size) * linear_parameters(model) / sum(ffn.num_parameters for ffn in find_ffns(model))


def low_rank(model: Any, task: Task, size: float, steps: int) -> None:
    rivals.low_rank(model, task.fit, size)


def prune(model: Any, task: Task, size: float, steps: int) -> None:
    """Neurons alone, as rotary queries and keys must stay."""
    rivals.prune(model, task.fit, keep_of_ffns(model, size), find_ffns(model))


def drop_layers(model: Any, task: Task, size: float, steps: int) -> None:
    """As many layers as leave at least the size."""
    rivals.drop_layers(model, task.fit, int((1 - size) * len(layers_of(model))))


CONTENDERS: dict[str, Callable[[Any, Task, float, int], None]] = {
    "snnk": ours,
    "snnk, feed-forward blocks alone": of_ffns,
    "snnk, closed form only": lambda m, t, s, _: ours(m, t, s, 0),
    "snnk, closed form, equal shares": lambda m, t, s, _: of_ffns(m, t, s, 0, batches=None),
    "activation-aware low rank": low_rank,
    "neuron pruning without refit": prune,
    "dropping layers": drop_layers,
}


def contenders(sizes: tuple[float, ...]) -> Iterator[tuple[str, float]]:
    yield "original", 1.0
    yield from ((name, size) for size in sizes for name in CONTENDERS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="generate a small model")
    parser.add_argument("--model", type=Path, help="folder of a causal language model")
    parser.add_argument("--data", type=Path, help="folder with valid.txt and test.txt of wikitext-2, or their .gz")
    parser.add_argument("--sizes", default="0.75,0.625")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=96, help="of distillation")
    parser.add_argument("--only", default="", help="run only contenders whose name starts with this")
    parser.add_argument("--skip", default="-", help="skip contenders whose name starts with this")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decoder-smollm2.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or use --quick for a generated model")
    sizes = tuple(float(size) for size in args.sizes.split(","))
    config = Config(args.model.name if args.model else "")
    if args.quick:
        config, sizes, args.steps = Config("quick", window=32, rounds=2), (0.75,), 8
    torch.set_num_threads(args.threads)
    model, task = make(config) if args.quick else load(args, config)
    results = Results(args.out, config)
    before = torch.cat([next_tokens(model, batch)[0] for batch in task.test])
    whole = linear_parameters(model)
    for name, size in contenders(sizes):
        asked = name == "original" or (name.startswith(args.only) and not name.startswith(args.skip))
        if not asked or results.find(contender=name, size=size):
            continue
        changed, clocks = copy.deepcopy(model), (time.perf_counter, time.process_time)
        start = [clock() for clock in clocks]
        if name != "original":
            CONTENDERS[name](changed, task, size, args.steps)
        spent = [(clock() - begun) / 60 for clock, begun in zip(clocks, start, strict=True)]
        reader = {"input_ids": torch.ones(1, config.window, dtype=torch.int64)}
        times = latency(logits_of(model), logits_of(changed), reader, config.rounds)
        figures = of_next_tokens(before, torch.cat([next_tokens(changed, batch)[0] for batch in task.test]))
        row = results.add(
            {
                "contender": name,
                "size": size,
                "linear_parameters": linear_parameters(changed),
                "part": linear_parameters(changed) / whole,
                "perplexity": figures["perplexity"],
                "ratio": figures["perplexity"] / figures["original perplexity"],
                "same_next_token": figures["same next token"],
                "latency": times,
                "tokens": len(before),
                "minutes": spent[0],
                "processor_minutes": spent[1],
                "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                "threads": args.threads,
                "steps": args.steps if name in ("snnk", "snnk, feed-forward blocks alone") else 0,
                "seed": config.seed,
            }
        )
        sys.stdout.write(
            f"{name}, {row['part']:.3f} of the linear parameters: perplexity {row['perplexity']:.2f}, "
            f"{row['ratio']:.3f} of the original's, same next token {row['same_next_token']:.3f}, latency "
            f"{row['latency']:.2f}, "
            f"{row['minutes']:.1f} min, {row['processor_minutes']:.1f} of the processor\n"
        )
        sys.stdout.flush()
    found = {r["size"]: r["ratio"] for r in results if r["contender"] == "snnk"}
    return int(any(found[size] > TARGETS[size] for size in found if size in TARGETS and not args.quick))


if __name__ == "__main__":
    sys.exit(main())
