"""Compression of whole sentence encoders, attention included: quality, size and latency against rivals.

    python benchmarks/whole.py --model FOLDER --data GLUE_FOLDER [--keeps 0.33,0.25,0.21] [--out FILE]
    python benchmarks/whole.py --quick

`keep` is the part of the multiply-adds of all linear layers inside the layers of the model. The rows "snnk" are what
`snnk.hf.compress` writes with its default options, from the sentences of STS-B's training file in a plain text file;
others leave parts of it out. STS-B dev is evaluated once per row, by the Spearman correlation of
cosines with the scores, in percent. Latency is processor time on one thread for 32 sequences of 32 tokens and for one
sequence of 16, over that of the original, measured in turns. --quick generates a small model and sentences, which show
that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rivals
import torch
from compress import latency, size_of
from torch import nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from snnk.experiments.compression import Batch, Task, quality, states_of, vectors
from snnk.experiments.lab.records import Results
from snnk.experiments.lab.tiny import glue_columns
from snnk.hf import compress
from snnk.hf.calibration import HELD_OUT, load_calibration
from snnk.hf.compression.distill import AUTO, recover_
from snnk.hf.compression.opening import MORE_TOKENS
from snnk.hf.finding import find_ffns
from snnk.hf.record import hold_out

QUICK = {"refine": 5, "recover": 5}
SHAPES = {"32x32": (32, 32), "1x16": (1, 16)}


@dataclass(frozen=True)
class Config:
    model: str = ""
    calibration: str = "STS-B"
    rounds: int = 15
    threads: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Place:
    """A model, its folder, the file of sentences, batches of these, and the test; options of `snnk.hf.compress`."""

    model: Any
    folder: Path
    texts: Path
    task: Task
    options: dict[str, Any] = field(default_factory=dict)


def read(folder: Path, data: Path, work: Path, config: Config) -> Place:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def encode(texts: list[str], size: int) -> list[Batch]:
        parts = [texts[i : i + size] for i in range(0, len(texts), size)]
        return [dict(tokenizer(p, padding=True, truncation=True, max_length=128, return_tensors="pt")) for p in parts]

    train, dev = glue_columns("stsb", data)
    texts = sorted({" ".join(text.split()) for name in ("sentence1", "sentence2") for text in train[name]})
    random.Random(config.seed).shuffle(texts)
    (work / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    pairs = [text for both in zip(dev["sentence1"], dev["sentence2"], strict=True) for text in both]
    model = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    scores = [float(score) for score in dev["score"]]
    return Place(model, folder, work / "texts.txt", Task(encode(texts[:2000], 32), encode(pairs, 64), scores))


def make(work: Path) -> Place:
    """A small model and sentences of made-up words, for --quick."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i + 2 for i in range(60)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=len(words), **sizes)).eval()
    for part in (model, fast):
        part.save_pretrained(work / "model")
    order = random.Random(0)
    texts = [" ".join(order.choices(list(words)[2:], k=12)) for _ in range(400)]
    (work / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    batches = [dict(fast(texts[i : i + 32], return_tensors="pt")) for i in range(0, 384, 32)]
    for batch in batches:
        batch.pop("token_type_ids", None)
    scores = torch.rand(32, generator=torch.Generator().manual_seed(0)).tolist()
    return Place(model, work / "model", work / "texts.txt", Task(batches, batches[:2], scores), dict(QUICK))


def ours(place: Place, keep: float, work: Path, **options: Any) -> Any:
    """The model that `snnk.hf.compress` writes."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        out = Path(folder) / "small"
        compress(place.folder, place.texts, out=out, keep=keep, **{**place.options, **options})
        return AutoModel.from_pretrained(out, trust_remote_code=False).eval()


# Rivals: each returns a changed copy of the model. They have no training, but for the last.


def low_rank(place: Place, keep: float, work: Path) -> Any:
    model = copy.deepcopy(place.model)
    rivals.low_rank(model, place.task.calibration, keep)
    return model


def prune(place: Place, keep: float, work: Path) -> Any:
    model = copy.deepcopy(place.model)
    rivals.prune(model, place.task.calibration, keep)
    return model


def drop_layers(place: Place, keep: float, work: Path) -> Any:
    """The first layers alone, as many as `keep` allows."""
    model = copy.deepcopy(place.model)
    rivals.keep_layers(model, range(max(1, round(keep * len(find_ffns(model))))))
    return model


def drop_and_distill(place: Place, keep: float, work: Path) -> Any:
    """The first layers alone, trained in full on the same texts as long as "snnk" is, with the same distance."""
    model, tokenizer = (
        drop_layers(place, keep, work),
        AutoTokenizer.from_pretrained(place.folder, trust_remote_code=False),
    )
    given = load_calibration(place.texts, tokenizer, max_length=128, held_out=HELD_OUT, more_tokens=MORE_TOKENS)
    batches, held_out = hold_out([*given, *given.more])
    layers = [ffn.layer for ffn in find_ffns(model)]
    steps, minutes = place.options.get("recover", AUTO), place.options["recover_minutes"]
    recover_(model, place.model, layers, batches, held_out, steps=steps, minutes=minutes)
    return model


CONTENDERS: dict[str, Callable[[Place, float, Path], Any]] = {
    "snnk": ours,
    "snnk, without distillation": lambda p, k, w: ours(p, k, w, recover=0),
    "snnk, equal shares, without distillation": lambda p, k, w: ours(p, k, w, joint=False, recover=0),
    "snnk, closed form alone": lambda p, k, w: ours(p, k, w, refine=0, recover=0),
    "snnk, these texts alone": lambda p, k, w: ours(p, k, w, widen=False),
    "activation-aware low rank": low_rank,
    "pruning without refit": prune,
    "dropping layers": drop_layers,
    "dropping layers, distillation": drop_and_distill,
}


def kept(model: Any, original: Any) -> float:
    """Multiply-adds per token of linear layers inside the layers, over those of the original."""
    sizes = [
        sum(m.weight.numel() for m in part.base_model.encoder.layer.modules() if isinstance(m, nn.Linear))
        for part in (model, original)
    ]
    return sizes[0] / sizes[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="generate a small model")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE, with STS-B")
    parser.add_argument("--keeps", default="0.33,0.25,0.21")
    parser.add_argument("--threads", type=int, default=2, help="latency is always measured on one thread")
    parser.add_argument("--only", default="", help="contenders, separated by semicolons")
    parser.add_argument("--minutes", type=float, default=5.0, help="recover_minutes; more on a slow or busy machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/whole.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or use --quick for a generated model")
    config = Config("quick", rounds=2) if args.quick else Config(args.model.name, threads=args.threads)
    keeps = [0.5] if args.quick else [float(k) for k in args.keeps.split(",")]
    torch.set_num_threads(config.threads)
    results = Results(args.out, config)
    names = args.only.split(";") if args.only else list(CONTENDERS)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        place = make(work) if args.quick else read(args.model, args.data, work, config)
        place.options["recover_minutes"] = args.minutes
        embedded = vectors(states_of(place.model), place.task.pairs)
        wanted = [("original", 1.0), *((name, keep) for keep in keeps for name in names)]
        for name, keep in wanted:
            if results.find(contender=name, keep=keep):
                continue
            clocks = time.perf_counter, time.process_time
            start = [clock() for clock in clocks]
            model = place.model if name == "original" else CONTENDERS[name](place, keep, work)
            spent = [clock() - begun for clock, begun in zip(clocks, start, strict=True)]
            parameters, megabytes = size_of(model)
            times = {
                f"latency_{label}": latency(
                    states_of(place.model),
                    states_of(model),
                    {key: torch.ones(shape, dtype=torch.int64) for key in place.task.pairs[0]},
                    config.rounds,
                )
                for label, shape in SHAPES.items()
            }
            row = results.add(
                {
                    "contender": name,
                    "keep": keep,
                    "multiply_adds": kept(model, place.model),
                    "parameters": parameters,
                    "stored_MB": megabytes,
                    **times,
                    **quality(states_of(model), embedded, place.task),
                    "recover_minutes": args.minutes,
                    "minutes": spent[0] / 60,
                    "processor_minutes": spent[1] / 60,
                    "seed": config.seed,
                }
            )
            sys.stdout.write(
                f"{name}, keep {keep}: {row['multiply_adds']:.3f} of the multiply-adds, latency "
                f"{row['latency_32x32']:.2f} and {row['latency_1x16']:.2f}, Spearman {row['spearman']:.2f}, "
                f"cosine {row['cosine']:.4f}, {row['minutes']:.1f} min ({row['processor_minutes']:.1f} of processors)\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
