"""Compression of sentence encoders: size, latency and quality, against other ways to reach the same size.

    python benchmarks/compress.py --model FOLDER --data GLUE_FOLDER [--calibration STS-B|SST-2] [--out FILE]
    python benchmarks/compress.py --quick

The model is a BERT-like sentence encoder, whose vectors are means of the last hidden states. Calibration uses 2,000
sentences of a training file without their scores. STS-B dev is evaluated once per row, by the Spearman correlation of
cosines with the scores, in percent. Latency is processor time, which a busy machine hardly changes, of one thread for
32 sequences of 64 tokens; original and rival take turns, and the figure is the median of their ratios. The time to
compress is given in minutes of the clock and of the processor, summed over threads. --quick generates a small model and
random tokens, which show that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import copy
import io
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rivals
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from snnk.experiments.compression import Batch, States, Task, quality, states_of, vectors
from snnk.experiments.lab.records import Results
from snnk.experiments.lab.tiny import glue_columns
from snnk.hf import compress_, find_ffns, plan
from snnk.hf.serve.latency import measure

TARGETS = {0.5: (86.7, 0.945), 0.25: (86.5, 0.885), 0.125: (85.9, 0.83)}  # Spearman and cosine, MiniLM, STS-B
INPUTS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class Config:
    model: str = ""
    calibration: str = "STS-B"
    sentences: int = 2000
    rounds: int = 15
    threads: int = 2
    seed: int = 0


def load(args: argparse.Namespace, config: Config) -> tuple[Any, Task]:
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)

    def encode(texts: list[str], size: int) -> list[Batch]:
        parts = [texts[i : i + size] for i in range(0, len(texts), size)]
        return [dict(tokenizer(p, padding=True, truncation=True, max_length=128, return_tensors="pt")) for p in parts]

    columns = glue_columns(config.calibration.lower().replace("-", ""), args.data)[0]
    texts = [t for name, column in columns.items() if name.startswith("sentence") for t in column]
    texts = sorted({t for t in texts if len(t.split()) > 4})
    random.Random(config.seed).shuffle(texts)
    batches = encode(sorted(texts[: config.sentences], key=len), 32)
    random.Random(config.seed).shuffle(batches)  # so that the held-out batches have all lengths
    dev = glue_columns("stsb", args.data)[1]
    rows = sorted(  # by length, for less padding
        zip(dev["sentence1"], dev["sentence2"], map(float, dev["score"]), strict=True),
        key=lambda row: len(row[0]) + len(row[1]),
    )
    pairs = encode([text for one, two, _ in rows for text in (one, two)], 64)
    model = AutoModel.from_pretrained(args.model, trust_remote_code=False).eval()
    return model, Task(batches, pairs, [score for *_, score in rows])


def make(config: Config) -> tuple[Any, Task]:
    """A small model and random tokens, for --quick."""
    generator = torch.Generator().manual_seed(config.seed)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=100, **sizes)).eval()

    def batches(count: int) -> list[Batch]:
        ids = [torch.randint(100, (32, 12), generator=generator) for _ in range(count)]
        return [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]

    return model, Task(batches(12), batches(2), torch.rand(32, generator=generator).tolist())


def size_of(model: Any) -> tuple[int, float]:
    """The number of parameters, and the MB that torch.save writes: parameters() lacks those of int8 layers."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return sum(p.numel() for p in model.parameters()), len(buffer.getbuffer()) / 1e6


# Contenders: each changes a copy of the model in place.


def low_rank(model: Any, task: Task, keep: float) -> None:
    """Both matrices of each feed-forward block as products of low rank."""
    rivals.low_rank(model, task.calibration, keep, find_ffns(model))


def prune(model: Any, task: Task, keep: float) -> None:
    rivals.prune(model, task.calibration, keep, find_ffns(model))


def drop_layers(model: Any, task: Task, keep: float) -> None:
    """Drop the last layers, including attention, as many as come nearest to the size that `keep` of the blocks has."""
    ffns = find_ffns(model)
    each = sum(p.numel() for p in ffns[0].layer.parameters())
    count = max(1, round((1 - keep) * sum(f.num_parameters for f in ffns) / each))
    rivals.keep_layers(model, range(len(ffns) - count))


def ours(model: Any, task: Task, keep: float, **options: Any) -> None:
    kind = options.pop("kind", "atoms")
    batches = task.calibration if options.pop("joint", False) else None
    compress_(
        model, plan(model, keep=keep, feature_map=kind, blocks="ffn", batches=batches), task.calibration, **options
    )


def int8(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that this will move to torchao
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def onnx(model: Any, batch: Batch, folder: Path, *, quantized: bool) -> tuple[States, float]:
    """The model in onnxruntime: its last hidden states as a function of the batch, and the MB of its file."""
    import logging

    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    logging.disable(logging.WARNING)
    path, small = folder / "model.onnx", folder / "int8.onnx"
    example = tuple(batch[name] for name in INPUTS)
    dynamic = tuple({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for _ in INPUTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Last(model),
            example,
            path,
            input_names=list(INPUTS),
            dynamic_shapes=dynamic,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    if quantized:
        quantize_dynamic(path, small)
        path = small
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options)
    logging.disable(logging.NOTSET)

    def forward(batch: Batch) -> Tensor:
        return torch.from_numpy(session.run(None, {name: batch[name].numpy() for name in INPUTS})[0])

    return forward, path.stat().st_size / 1e6


class Last(nn.Module):
    """A model that returns nothing but its last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def latency(original: States, rival: States, batch: Batch, rounds: int) -> float:
    """Median processor time of the rival over that of the original, on one thread, in turns."""
    with torch.no_grad():
        runs = {"original": lambda: original(batch), "rival": lambda: rival(batch)}
        seconds = measure(runs, "one batch", threads=1, least=rounds, most=rounds).seconds
    return seconds["rival"] / seconds["original"]


def contenders(keeps: tuple[float, ...]) -> Iterator[tuple[str, float, Callable[[Any, Task, float], None], bool]]:
    """Tuples of name, keep, the function that changes a copy of the model, and whether to measure int8 versions too."""
    yield "original", 1.0, lambda model, task, keep: None, True
    for keep in keeps:
        yield "snnk", keep, ours, True
        yield "snnk, closed form only", keep, lambda m, t, k: ours(m, t, k, refine=0), False
        yield "snnk, counts chosen jointly", keep, lambda m, t, k: ours(m, t, k, joint=True), False
        yield "random relu features, fitted", keep, lambda m, t, k: ours(m, t, k, kind="random-relu"), False
        yield "activation-aware low rank", keep, low_rank, False
        yield "neuron pruning without refit", keep, prune, False
        yield "dropping layers", keep, drop_layers, False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="generate a small model")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE, with STS-B and SST-2")
    parser.add_argument("--calibration", choices=["STS-B", "SST-2"], default="STS-B")
    parser.add_argument("--keeps", default="0.25,0.5,0.125")
    parser.add_argument("--threads", type=int, default=2, help="latency is always measured on one thread")
    parser.add_argument("--rounds", type=int, default=15, help="turns of the measurement of latency")
    parser.add_argument("--no-int8", action="store_true", help="skip int8 and onnxruntime")
    parser.add_argument("--only", default="", help="run only contenders whose name starts with this")
    parser.add_argument("--skip", default="-", help="skip contenders whose name starts with this")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compress.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or use --quick for a generated model")
    keeps = tuple(float(k) for k in args.keeps.split(","))
    name = args.model.name if args.model else "quick"
    config = Config(name, args.calibration, rounds=args.rounds, threads=args.threads)
    if args.quick:
        config, keeps = Config("quick", rounds=2), (0.5,)
    torch.set_num_threads(config.threads)
    original, task = make(config) if args.quick else load(args, config)
    results = Results(args.out, config)
    embedded = vectors(states_of(original), task.pairs)
    timed = {key: torch.ones(32, 64, dtype=torch.int64) for key in task.calibration[0]}

    def measure(name: str, keep: float, forward: States, numbers: int, mb: float, spent: tuple[float, float]) -> None:
        if results.find(contender=name, keep=keep):
            return
        row = results.add(
            {
                "contender": name,
                "keep": keep,
                "parameters": numbers,
                "stored_MB": mb,
                "latency_ratio": latency(states_of(original), forward, timed, config.rounds),
                **quality(forward, embedded, task),
                "minutes": spent[0] / 60,
                "processor_minutes": spent[1] / 60,
                "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                "seed": config.seed,
            }
        )
        sys.stdout.write(
            f"{name}, keep {keep}: {row['parameters'] / 1e6:.1f} M parameters, {row['stored_MB']:.1f} MB, "
            f"latency {row['latency_ratio']:.2f}, Spearman {row['spearman']:.2f}, cosine {row['cosine']:.4f}, "
            f"{row['minutes']:.1f} min\n"
        )
        sys.stdout.flush()

    for name, keep, change, small in contenders(keeps):
        asked = name.startswith(args.only) and not name.startswith(args.skip)
        names = [name]
        if small and not args.no_int8:
            names += [f"{name} + int8 (torch)", f"{name} + int8 (onnxruntime)"]
        if not asked or all(results.find(contender=each, keep=keep) for each in names):
            continue
        model, clocks = copy.deepcopy(original), (time.perf_counter, time.process_time)
        start = [clock() for clock in clocks]
        change(model, task, keep)
        spent = clocks[0]() - start[0], clocks[1]() - start[1]
        numbers, mb = size_of(model)
        measure(name, keep, states_of(model), numbers, mb, spent)
        if small and not args.no_int8:
            with tempfile.TemporaryDirectory() as folder:
                packed = int8(copy.deepcopy(model))
                measure(f"{name} + int8 (torch)", keep, states_of(packed), numbers, size_of(packed)[1], spent)
                for quantized, label in ((False, "onnxruntime"), (True, "int8 (onnxruntime)")):
                    if quantized or name == "original":
                        run, mb = onnx(model, task.pairs[0], Path(folder), quantized=quantized)
                        measure(f"{name} + {label}", keep, run, numbers, mb, spent)
    if (config.model, config.calibration) != ("minilm", "STS-B"):
        return 0
    found = {r["keep"]: (r["spearman"], r["cosine"]) for r in results if r["contender"] == "snnk"}
    wanted = [keep for keep in found if keep in TARGETS]
    return int(any(a < b for keep in wanted for a, b in zip(found[keep], TARGETS[keep], strict=True)))


if __name__ == "__main__":
    sys.exit(main())
