"""Compression calibrated on texts of another kind than the test: which inputs make it hold there too.

    python benchmarks/calibration.py --model FOLDER --data GLUE_FOLDER [--wikitext FOLDER] [--ways A,B] [--report]
    python benchmarks/calibration.py --few --model FOLDER --data GLUE_FOLDER
    python benchmarks/calibration.py --quick

A way is a list of inputs to fit to, made from 2,000 sentences of SST-2 (film reviews) or from the project's general
text, and the options of `compress_`. Ways are compared on other kinds of text, which nothing is fitted to: sentences of
MRPC (news), CoLA (linguistics) and wikitext-2, by the mean cosine to the original's vectors and by the Spearman
correlation of all similarities with the original's; and 1,000 pairs of STS-B's training file, by the Spearman
correlation of cosines with the scores. With --report, STS-B dev takes the place of these pairs: no choice is made by
it. Feed-forward blocks alone are compressed.

--few takes 50 to 3,200 sentences of STS-B's training file and compares the errors of blocks that the plan predicts with
those on 500 other sentences. --quick generates a small model and random tokens, which show
that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from snnk.experiments.compression import Batch, states_of, vectors
from snnk.experiments.lab.records import Results
from snnk.experiments.lab.tiny import glue_columns
from snnk.finetune.scores import spearman
from snnk.hf import compress_, plan
from snnk.hf.general import general_texts
from snnk.hf.widening import substitute, vocabulary

FEW = (50, 100, 150, 200, 400, 800, 1600, 3200)
Ids = list[int]


@dataclass(frozen=True)
class Way:
    """The inputs of one compression, and the options of its fit.

    Args:
        texts: sentences of the given kind.
        general: general texts beside them.
        share: part of the tokens that is replaced by words of the vocabulary, in the part `some` of all texts.
        change: applied to the texts of the given kind: "shuffle" their tokens, "splice" halves of two texts, draw
            tokens at "random".
        outer: factor of the numbers of atoms in the first and the last block; the others have fewer.
        refine, recover: of `compress_`.
        lessons: distil with the texts of the given kind alone, as they are, like `snnk compress`; otherwise with what
            is fitted to.
        joint: choose the numbers of atoms from the inputs.
    """

    texts: int = 2000
    general: int = 0
    share: float = 0.0
    some: float = 1.0
    change: str = ""
    outer: float = 1.0
    refine: int = 0
    recover: int = 0
    lessons: bool = False
    joint: bool = False


WAYS = {
    "texts alone": Way(),
    "texts alone, refined": Way(refine=120),
    "texts alone, distilled": Way(recover=300),
    "twice the texts": Way(texts=4000),
    "shuffled words": Way(change="shuffle"),
    "spliced texts": Way(change="splice"),
    "random words": Way(change="random"),
    "15 % words": Way(share=0.15),
    "30 % words": Way(share=0.3),
    "60 % words": Way(share=0.6),
    "30 % words in half": Way(share=0.3, some=0.5),
    "more in outer blocks": Way(outer=1.5),
    "joint": Way(joint=True),
    "general": Way(general=2000),
    "general, 30 % words": Way(general=2000, share=0.3),
    "general, 30 % words in half": Way(general=2000, share=0.3, some=0.5),
    "general, 30 % words in half, refined": Way(general=2000, share=0.3, some=0.5, refine=120),
    "general, 30 % words in half, distilled": Way(general=2000, share=0.3, some=0.5, recover=300),
    "general, 30 % words in half, refined, distilled": Way(general=2000, share=0.3, some=0.5, refine=120, recover=300),
    "general, 30 % words in half, refined, distilled with the texts": Way(
        general=2000, share=0.3, some=0.5, refine=120, recover=300, lessons=True
    ),
}


@dataclass(frozen=True)
class Config:
    model: str = ""
    pairs: int = 1000
    others: int = 200
    seed: int = 0


@dataclass(frozen=True)
class Bench:
    """The model, its tokenizer, the texts to fit to by kind, and what is measured: texts, and pairs with scores."""

    model: Any
    tokenizer: Any
    kinds: dict[str, Callable[[int], list[str]]]
    others: dict[str, list[str]]
    pairs: dict[str, list[tuple[str, str, float]]]


def shuffled(texts: Any, count: int, seed: int = 0) -> list[Any]:
    found = sorted(set(texts))
    random.Random(seed).shuffle(found)
    return found[:count]


def load(args: argparse.Namespace, config: Config) -> Bench:
    def column(task: str, part: int) -> list[str]:
        found = glue_columns(task, args.data)[part]
        return [t for name, texts in found.items() if name.startswith("sentence") or "String" in name for t in texts]

    def pairs(part: int, count: int) -> list[tuple[str, str, float]]:
        c = glue_columns("stsb", args.data)[part]
        rows = list(zip(c["sentence1"], c["sentence2"], map(float, c["score"]), strict=True))
        return shuffled(rows, count, 1)

    sentences = [text.strip() for text in column("sst2", 0) if len(text.split()) > 4]
    others = {task: shuffled(column(task, 1), config.others) for task in ("mrpc", "cola")}
    if args.wikitext:
        lines = gzip.decompress((args.wikitext / "test.txt.gz").read_bytes()).decode().split("\n")
        found = [f"{s.strip()} ." for line in lines if not line.startswith(" =") for s in line.split(" . ")]
        others["wikitext"] = shuffled((text for text in found if 5 < len(text.split()) < 60), config.others)
    return Bench(
        AutoModel.from_pretrained(args.model, trust_remote_code=False).eval(),
        AutoTokenizer.from_pretrained(args.model, trust_remote_code=False),
        {
            "SST-2": lambda n: shuffled(sentences, n),
            "general": lambda n: general_texts(n, seed=config.seed + 1),
            "STS-B": lambda n: shuffled(column("stsb", 0), n),
        },
        others,
        {"train": pairs(0, config.pairs), "dev": pairs(1, 10_000)},
    )


def make(config: Config) -> Bench:
    """A small model with a tokenizer of words, for --quick."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = general_texts(600)
    names = sorted({word for text in texts for word in text.split()})
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[PAD]", "[UNK]", *names])}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).eval()
    pairs = [(a, b, float(len(a))) for a, b in zip(texts[:20], texts[20:40], strict=True)]
    kinds = {"SST-2": lambda n: texts[: n // 10], "STS-B": lambda n: texts[:n]}
    return Bench(model, tokenizer, kinds, {"mrpc": texts[400:420]}, {"train": pairs, "dev": pairs})


def encode(tokenizer: Any, rows: list[Ids], size: int = 32) -> list[Batch]:
    """Batches of rows of like lengths, in random order."""
    rows = sorted(rows, key=len)
    batches = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        width = max(map(len, part))
        ids = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in part]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in part]
        batches.append({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)})
    random.Random(0).shuffle(batches)
    return batches


def inputs(bench: Bench, kind: str, way: Way, seed: int) -> tuple[list[Batch], list[Batch | None]]:
    """Inputs of the fit, and the same for the distillation: texts of the given kind as they are, None for others."""
    tokenizer, order = bench.tokenizer, random.Random(seed)

    def tokens(texts: list[str]) -> list[Ids]:
        return [ids for ids in tokenizer(texts, truncation=True, max_length=128)["input_ids"] if ids]

    special, words = tokenizer.all_special_ids, vocabulary(tokenizer)
    rows = tokens(bench.kinds[kind](way.texts))
    if way.change:
        rows = [changed(row, order.choice(rows), way.change, set(special), words, order) for row in rows]
    own = batches = encode(tokenizer, rows)
    if way.general:
        batches = own + encode(tokenizer, tokens(general_texts(way.general, seed=seed)))
        order.shuffle(batches)
    generator = torch.Generator().manual_seed(seed)
    fitted = [
        substitute(batch, words, special, share=way.share, generator=generator) if order.random() < way.some else batch
        for batch in batches
    ]
    kept = {id(batch) for batch in own}
    return fitted, [batch if id(batch) in kept else None for batch in batches]


def changed(row: Ids, other: Ids, change: str, special: set[int], words: Tensor, order: random.Random) -> Ids:
    """A row whose tokens between the special ones are changed."""
    at = [i for i, token in enumerate(row) if token not in special]
    inner, outer = [row[i] for i in at], [token for token in other if token not in special]
    if change == "shuffle":
        order.shuffle(inner)
    elif change == "splice":
        inner[len(inner) // 2 :] = (outer * len(inner))[: len(inner) - len(inner) // 2]
    else:
        inner = [int(words[order.randrange(len(words))]) for _ in inner]
    new = dict(zip(at, inner, strict=True))
    return [new.get(i, token) for i, token in enumerate(row)]


def embed(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Unit vectors of texts, (n, d), in their order."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    parts = [[texts[i] for i in order[start : start + 64]] for start in range(0, len(order), 64)]
    found = [dict(tokenizer(p, padding=True, truncation=True, max_length=128, return_tensors="pt")) for p in parts]
    keys = ("input_ids", "attention_mask")
    rows = vectors(states_of(model), [{key: batch[key] for key in keys} for batch in found])
    return rows[torch.tensor(order).argsort()]


def similarities(rows: Tensor) -> Any:
    i, j = torch.triu_indices(len(rows), len(rows), 1)
    return (rows @ rows.T)[i, j].numpy()


def quality(bench: Bench, model: Any, report: bool, before: dict[str, Tensor]) -> dict[str, float]:
    """Figures by name; `before` keeps the vectors of the original."""

    def both(name: str, texts: list[str]) -> tuple[Tensor, Tensor]:
        if name not in before:
            before[name] = embed(bench.model, bench.tokenizer, texts)
        return before[name], embed(model, bench.tokenizer, texts)

    found: dict[str, float] = {}
    for name, texts in bench.others.items():
        a, b = both(name, texts)
        found[f"{name} cosine"] = float((a * b).sum(1).mean())
        found[f"{name} ranks"] = spearman(similarities(a), similarities(b))
    for measure in ("cosine", "ranks"):
        found[f"mean {measure}"] = float(np.mean([found[f"{name} {measure}"] for name in bench.others]))
    for name in ("dev",) if report else ("train",):
        rows = bench.pairs[name]
        a, b = both(name, [text for one, two, _ in rows for text in (one, two)])
        score = np.array([score for *_, score in rows])
        found[f"{name} spearman"] = 100 * spearman((b[::2] * b[1::2]).sum(1).numpy(), score)
        found[f"{name} cosine"] = float((a * b).sum(1).mean())
    return found


def compress(bench: Bench, kind: str, way: Way, keep: float, seed: int) -> tuple[Any, Any]:
    batches, lessons = inputs(bench, kind, way, seed)
    model = copy.deepcopy(bench.model)
    planned = plan(model, keep=keep, blocks="ffn", batches=batches if way.joint else None)
    if way.outer != 1:
        blocks, last = planned.blocks, len(planned.blocks) - 1
        rest = (len(blocks) - 2 * way.outer) / (len(blocks) - 2)
        counts = [int(keep * b.width * (way.outer if i in (0, last) else rest)) // 2 * 2 for i, b in enumerate(blocks)]
        planned = replace(
            planned, blocks=tuple(replace(b, num_features=n) for b, n in zip(blocks, counts, strict=True))
        )
    total = sum(int(batch["attention_mask"].sum()) for batch in batches)
    done = compress_(
        model,
        planned,
        batches,
        lessons=lessons if way.lessons else None,
        refine=way.refine,
        recover=way.recover,
        seed=seed,
        max_tokens=total,
        original=bench.model,
    )
    return model, done


def few(bench: Bench, counts: tuple[int, ...], results: Results, keep: float, seed: int) -> None:
    """Errors of the blocks as the plan predicts them, and on other sentences, by the number of sentences."""
    rows = bench.tokenizer(bench.kinds["STS-B"](counts[-1] + 500), truncation=True, max_length=128)["input_ids"]
    for count in counts:
        if results.find(texts=count, keep=keep):
            continue
        batches = encode(bench.tokenizer, rows[:count], max(1, min(32, count // 20)))
        row: dict[str, Any] = {
            "texts": count,
            "tokens": sum(int(b["attention_mask"].sum()) for b in batches),
            "keep": keep,
            "seed": seed,
        }
        number = max(1, len(batches) // 9)  # every tenth batch is held out: these are the other sentences
        others = encode(bench.tokenizer, rows[counts[-1] :], -(-(len(rows) - counts[-1]) // number))
        for i, batch in enumerate(others):
            batches.insert(10 * i + 9, batch)
        for joint in (True, False):
            name = "joint" if joint else "equal shares"
            try:
                model = copy.deepcopy(bench.model)
                fitted = [batch for i, batch in enumerate(batches) if i % 10 != 9]
                planned = plan(model, keep=keep, blocks="ffn", batches=fitted if joint else None)
                if joint:
                    row["predicted error"] = float(np.mean([b.predicted_error or 0.0 for b in planned.blocks]))
                total = sum(int(batch["attention_mask"].sum()) for batch in batches)
                done = compress_(model, planned, batches, refine=0, seed=seed, max_tokens=total)
                row[f"{name}, error"] = float(np.mean([b.error or 0.0 for b in done.blocks]))
                row[f"{name}, cosine"] = done.agreement["cosine"]
            except ValueError as error:
                row[f"{name}, refused"] = str(error)
        say(results.add(row))


def say(row: dict[str, Any]) -> None:
    shown = {
        k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k not in ("commit", "environment")
    }
    sys.stdout.write(f"{shown}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="generate a small model")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, help="folder of GLUE, with SST-2, MRPC, CoLA and STS-B")
    parser.add_argument("--wikitext", type=Path, help="folder of wikitext-2, with test.txt.gz")
    parser.add_argument(
        "--kinds", default="SST-2", help="the texts to fit to: SST-2, general, STS-B or several of these"
    )
    parser.add_argument("--keeps", default="0.25")
    parser.add_argument("--ways", default="", help="names of ways, separated by semicolons. Default: all")
    parser.add_argument("--few", action="store_true", help="measure by the number of texts instead")
    parser.add_argument("--report", action="store_true", help="measure STS-B dev")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/calibration.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or use --quick for a generated model")
    torch.set_num_threads(args.threads)
    config = Config(args.model.name if args.model else "quick")
    bench = make(config) if args.quick else load(args, config)
    results = Results(args.out, config)
    keeps = [float(keep) for keep in args.keeps.split(",")]
    if args.few:
        for keep in keeps:
            few(bench, FEW[:3] if args.quick else FEW, results, keep, config.seed)
        return 0
    names = list(WAYS)[:: 4 if args.quick else 1] if not args.ways else args.ways.split(";")
    before: dict[str, Tensor] = {}
    for keep, kind, name in product(keeps, args.kinds.split(","), names):
        measured = "dev spearman" if args.report else "train spearman"
        key = (name, keep, kind)
        if any(measured in row for row in results if (row.get("way"), row["keep"], row.get("kind")) == key):
            continue
        way, start = WAYS[name], time.process_time()
        model, done = compress(bench, kind, way, keep, config.seed)
        spent = time.process_time() - start
        found = quality(bench, model, args.report, before)
        facts = {"way": name, "keep": keep, "kind": kind, "seed": config.seed, "tokens": done.tokens}
        say(results.add({**facts, **found, "processor_seconds": spent, "settings": asdict(way)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
