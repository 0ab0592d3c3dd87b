"""The paper's table of bundled transformers: multiply-adds and parameters of BERT-base and ViT-base.

The top k of 12 feed-forward blocks f(x W1 + b1) W2 + b2 become phi(x) A^T W2 + b2 with m = 8 random features. In
training A^T and W2 are two matrices; for inference they are bundled into one. The paper's "flops" are multiply-adds,
with one more per addition of a bias, and our counts agree with them. Its parameters do not agree: they are those of a
model whose k replaced layers, attention included, are one shared object, so that each further k saves a whole layer.
Both counts are here, from models without weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from snnk.experiments.lab.data import NOWHERE, Source
from snnk.experiments.lab.records import Results, Row, claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

    from snnk.hf.model_blocks import FFN

FIGURE = "bundling table"
NEEDS = "transformers"
TIME = "30 seconds; --quick 15 seconds"
WHY_NOT = """The paper's parameters are those of a model whose k replaced layers are one shared object, attention
included; multiply-adds agree. Layers that are replaced one by one save less."""
FORMS = ("training", "inference")
REASON = "if the k replaced layers are one object"

PAPER: dict[str, dict[tuple[str, str], tuple[int, ...]]] = {  # for k = 0..6, in billions and in millions
    "BERT": {
        ("multiply-adds", "training"): (716, 697, 678, 659, 640, 620, 601),
        ("multiply-adds", "inference"): (716, 677, 639, 600, 561, 523, 484),
        ("parameters", "training"): (110, 107, 100, 93, 86, 79, 72),
        ("parameters", "inference"): (110, 104, 97, 90, 83, 76, 69),
    },
    "ViT": {
        ("multiply-adds", "training"): (563, 548, 533, 519, 504, 489, 475),
        ("multiply-adds", "inference"): (563, 533, 503, 474, 444, 414, 384),
        ("parameters", "training"): (86, 84, 77, 70, 63, 55, 48),
        ("parameters", "inference"): (86, 81, 74, 67, 60, 53, 46),
    },
}
PAPER_MB = {"BERT": 226.71, "ViT": 176.42}  # stored, for inference with k = 6


@dataclass(frozen=True)
class Config:
    """The paper's setting; `replaced` lists the values of k in increasing order."""

    models: tuple[str, ...] = ("BERT", "ViT")
    replaced: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    num_features: int = 8
    texts: int = 64
    length: int = 128
    images: int = 32


QUICK = Config(replaced=(0, 1, 6))


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return len(config.models) * len(FORMS) * len(config.replaced)


def build(
    name: str, config: Any, *, layers: int = 12, seed: int | None = None
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """BERT-base or ViT-base and its inputs: on the meta device, or with random weights from a seed.

    Args:
        name: "BERT" or "ViT".
        config: has `texts`, `length` and `images`, the sizes of the inputs.
        layers: of the model.
        seed: None for the meta device.
    """
    from transformers import BertConfig, BertModel, ViTConfig, ViTForImageClassification

    with torch.random.fork_rng(devices=[]), torch.device("meta" if seed is None else "cpu"):
        if seed is not None:
            torch.manual_seed(seed)  # transformers draws from the global generator
        if name == "BERT":
            ids = torch.zeros(config.texts, config.length, dtype=torch.long)
            return BertModel(BertConfig(num_hidden_layers=layers)).eval(), {"input_ids": ids}
        classes: Any = {"num_labels": 1000}  # the classifier of ImageNet, as published: 346 MB, as in the paper
        vit = ViTForImageClassification(ViTConfig(num_hidden_layers=layers, **classes))
        return vit.eval(), {"pixel_values": torch.zeros(config.images, 3, 224, 224)}


def _numbers(model: nn.Module) -> int:
    """The number of stored values, including the fixed projection of a feature map."""
    from snnk.hf.cost import stored

    return sum(tensor.numel() for tensor in stored(model).values())


def _as_one_object(model: PreTrainedModel, ffns: list[FFN], k: int) -> int:
    """The number of stored values if the top k layers are one shared object."""
    layers: Any = model.base_model.get_submodule(ffns[0].row.layer.removesuffix(".{}"))
    own = list(layers)
    for i in range(len(own) - k, len(own)):
        layers[i] = own[-1]
    numbers = _numbers(model)
    for i, layer in enumerate(own):
        layers[i] = layer
    return numbers


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row per model, form and k."""
    try:
        from snnk.hf import find_ffns, replace_ffn_
        from snnk.hf.cost import multiply_adds
        from snnk.hf.replace import replace_
    except ImportError as error:
        raise ImportError(f"this experiment needs {error.name}: pip install 'snnk[hf]'") from None
    for name in config.models:
        for form in FORMS:
            model, inputs = build(name, config)
            ffns = find_ffns(model)
            done = 0
            for k in config.replaced:
                for ffn in ffns[len(ffns) - k : len(ffns) - done]:
                    if form == "inference":  # bundled with W2
                        replace_(ffn, "relu", config.num_features)
                    else:
                        replace_ffn_(model, [ffn.index], num_features=config.num_features)
                done = k
                row = results.find(model=name, form=form, replaced=k)
                if row is None:
                    # The paper counts the two products of attention: BERT is 19 G below its table without them. With
                    # additions of biases, all cells are within 0.63 G of the paper; without, some are 1.15 G below.
                    giga = multiply_adds(model, inputs, biases=True) / 1e9
                    numbers = _numbers(model)
                    row = results.add(
                        {
                            "model": name,
                            "form": form,
                            "replaced": k,
                            "with_biases_G": giga,
                            "paper_G": PAPER[name]["multiply-adds", form][k],
                            "parameters_M": numbers / 1e6,
                            "as_one_object_M": _as_one_object(model, ffns, k) / 1e6,
                            "paper_M": PAPER[name]["parameters", form][k],
                            "stored_MB": numbers * 4 / 1e6,
                        }
                    )
                yield row


def plot(results: Results) -> Figure:
    """Multiply-adds and parameters against k, ours and the paper's, for both models."""
    from matplotlib.figure import Figure

    names = [name for name in PAPER if results.find(model=name)]
    figure = Figure(figsize=(10, 3.6 * len(names)), layout="constrained")
    for place, name in enumerate(names):
        flops, sizes = (figure.add_subplot(len(names), 2, 2 * place + i) for i in (1, 2))
        for form, color in zip(FORMS, ("tab:blue", "tab:green"), strict=True):
            rows = [r for r in results if r["model"] == name and r["form"] == form]
            k = [r["replaced"] for r in rows]
            giga, mega = [r["with_biases_G"] for r in rows], [r["parameters_M"] for r in rows]
            for axes, ours, paper in ((flops, giga, "paper_G"), (sizes, mega, "paper_M")):
                axes.plot(k, ours, "-", color=color, label=f"{form}, ours")
                axes.plot(k, [r[paper] for r in rows], "x", color=color, ms=8, label=f"{form}, paper")
            one = [r["as_one_object_M"] for r in rows]
            sizes.plot(k, one, ":", color=color, label=f"{form}, layers as one object")
        flops.set_ylabel("multiply-adds with biases, billions")
        sizes.set_ylabel("parameters, millions")
        for axes in (flops, sizes):
            axes.set_title(f"{name}-base, m = {results.config['num_features']}")
            axes.set_xlabel("feed-forward blocks replaced, from the top")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    return figure


def claims(results: Results) -> list[Row]:
    """Each cell of the paper's table beside ours."""
    table = []
    for r in results:
        cell, giga = f"{r['model']}, k = {r['replaced']}, {r['form']}", r["with_biases_G"]
        table.append(claim(f"{cell}: {r['paper_G']} G", f"{giga:.1f} G", abs(giga - r["paper_G"]) <= 1, "1 G"))
    for r in results:
        cell = f"{r['model']}, k = {r['replaced']}, {r['form']}"
        holds = abs(r["parameters_M"] - r["paper_M"]) <= 1
        ours = f"{r['parameters_M']:.1f} M" + ("" if holds else _as_one(r["as_one_object_M"], r["paper_M"], "M"))
        table.append(claim(f"{cell}: {r['paper_M']} M", ours, holds, "1 M"))
    for name, megabytes in PAPER_MB.items():
        row = results.find(model=name, form="inference", replaced=6)
        if row:
            holds = abs(row["stored_MB"] - megabytes) <= 1
            ours = f"{row['stored_MB']:.0f} MB" + (
                "" if holds else _as_one(4 * row["as_one_object_M"], megabytes, "MB")
            )
            table.append(claim(f"{name}, k = 6, inference: {megabytes} MB", ours, holds, "1 MB"))
    return table


def _as_one(ours: float, paper: float, unit: str) -> str:
    verdict = "the paper's" if abs(ours - paper) <= 1 else "not the paper's either"
    return f"; {ours:.1f} {unit} {REASON}, which is {verdict} within 1 {unit}"
