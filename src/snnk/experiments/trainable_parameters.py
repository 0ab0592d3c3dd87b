"""Trained parameters of every method that the paper compares, counted exactly from configurations, without weights.

Adapters, LoRA and BitFit stand for the paper's tables of baselines, where "final classifier parameters are not used for
counting". Poolers and bundled final layers have two classes, as most tasks of GLUE. The small networks are those of our
other experiments, whose layers are the paper's; the paper prints no counts for them, nor for the 32 features on
ImageNet. Its table for ViT quotes other papers. Methods whose sizes it does not give are not counted: Adapter 1.51 M,
AdapterDrop .17, Transformer-probing 3.2, LoRA-Fix .15, LePE Tuning .17, RPB Tuning .15, KAdaptation .11 and Visual
Prompt Tuning .08.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from snnk.experiments import mnist, qpnn, siren, uci
from snnk.experiments.lab.data import NOWHERE, Source
from snnk.experiments.lab.records import Results, Row, claim
from snnk.experiments.lab.training import mlp

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from peft import PeftConfig
    from transformers import PreTrainedModel

FIGURE = "figures, tables of parameters"
NEEDS = "transformers, peft"
TIME = "20 s; --quick 10 s"
WHY_NOT = """The counts follow from the shapes alone. The paper's pooler is a power of ten too small, and its rows for
ViT quote another paper, whose counts do not follow from the sizes that it gives."""
WIDTH = 768  # of BERT-base and ViT-base
CIFAR100 = "AdaptFormer-64, with a head for CIFAR-100"

# the paper's numbers, in millions
PAPER = {
    ("BERT", "full"): 110,
    ("BERT", "SNNK adapters"): 0.3,
    ("BERT", "Houlsby adapters"): 1.8,
    ("BERT", "Pfeiffer adapters"): 0.9,
    ("BERT", "LoRA"): 0.3,
    ("BERT", "BitFit"): 0.1,
    ("BERT", "pooler and classifier"): 0.059,
    ("BERT", "linear probe"): 0.001,
    ("BERT", "bundled final layers"): 0.002,
    ("ViT", "full"): 85,
    ("ViT", "SNNK adapters"): 0.3,
    ("ViT", "Houlsby adapters"): 1.8,
    ("ViT", "LoRA"): 0.22,
    ("ViT", "BitFit"): 0.36,
    ("ViT", "LayerNorm tuning"): 0.08,
    ("ViT", "attention tuning"): 28.41,
    ("ViT", CIFAR100): 1.26,
}
WIDE = {("BERT", "full"): 1.0}  # a tolerance in millions: 109.48 does not round to 110
QUOTED = "the paper quotes He et al. (2022)"
WHY = {
    ("BERT", "pooler and classifier"): "768 x 768 alone is ten times the paper's",
    ("ViT", "LoRA"): f"{QUOTED}, without a rank; this one is the rank of its BERT, and 6 would be .22",
    ("ViT", "BitFit"): f"{QUOTED}; there are no more biases",
    ("ViT", "LayerNorm tuning"): f"{QUOTED}; there are no more scales and shifts",
    ("ViT", "attention tuning"): f"{QUOTED}; there are no more weights and biases in attention",
}


@dataclass(frozen=True)
class Config:
    """The paper's sizes, except for the number of features of the pooler."""

    models: tuple[str, ...] = ("BERT", "ViT")
    num_features: int = 16
    bottleneck: int = 48
    rank: int = 8
    image_features: int = 32  # for ImageNet
    pooler_features: int = 256  # ours; the paper gives no number
    bundled_features: int = 1024
    classes: int = 2


QUICK = Config(models=("BERT",))


def _adapted(name: str, make: Callable[[], PeftConfig]) -> Callable[[], int]:
    """A function that counts the trained parameters of a base model with a PEFT configuration."""

    def count() -> int:
        from peft import get_peft_model

        model = get_peft_model(_base(name), make())
        return sum(p.numel() for p in model.parameters() if p.requires_grad)

    return count


def _base(name: str) -> PreTrainedModel:
    import torch
    from transformers import BertConfig, BertModel, ViTConfig, ViTModel

    with torch.device("meta"):
        if name == "BERT":
            return BertModel(BertConfig())
        return ViTModel(ViTConfig(), add_pooling_layer=False)


def _named(name: str, wanted: Callable[[str], bool]) -> int:
    return sum(p.numel() for n, p in _base(name).named_parameters() if wanted(n))


def _methods(config: Config, name: str) -> dict[str, Callable[[], int]]:
    from peft import LoraConfig

    from snnk.peft import SNNKConfig

    bottleneck: Any = {"directions": "pca", "train_directions": True, "gate": False, "use_bias": True}
    d, c = WIDTH, config.classes

    def pfeiffer(size: int) -> Callable[[], int]:
        return _adapted(name, lambda: SNNKConfig(num_features=size, target_modules="pfeiffer", **bottleneck))

    lora = LoraConfig(r=config.rank, target_modules=["query", "value", "q_proj", "v_proj"])
    found: dict[str, Callable[[], int]] = {
        "full": lambda: _named(name, lambda n: True),
        "SNNK adapters": _adapted(name, lambda: SNNKConfig(num_features=config.num_features)),
        "Houlsby adapters": _adapted(name, lambda: SNNKConfig(num_features=config.bottleneck, **bottleneck)),
        "LoRA": _adapted(name, lambda: lora),
        "BitFit": lambda: _named(name, lambda n: n.endswith("bias")),
    }
    if name == "BERT":
        return found | {
            "Pfeiffer adapters": pfeiffer(config.bottleneck),
            "pooler and classifier": lambda: d * d + d + d * c + c,
            "SNNK pooler and classifier": lambda: config.pooler_features * d + d * c + c,
            "SNNK pooler and classifier, merged": lambda: config.pooler_features * c + c,
            "linear probe": lambda: d * c + c,
            "bundled final layers": lambda: config.bundled_features * c + c,
        }
    wide = _adapted(name, lambda: SNNKConfig(num_features=config.image_features))
    return found | {
        f"SNNK adapters, {config.image_features} features": wide,
        "LayerNorm tuning": lambda: _named(name, lambda n: "layernorm" in n),
        "attention tuning": lambda: _named(name, lambda n: ".attention." in n),
        CIFAR100: lambda: pfeiffer(64)() + d * 100 + 100,
    }


def _toys() -> dict[tuple[str, str], Callable[[], nn.Module]]:
    """The networks of the other experiments, by task and name."""
    digits, cover = mnist.Config(), uci.Config()
    found: dict[tuple[str, str], Callable[[], nn.Module]] = {}
    for label, m in (("MLP", None), ("SNNK, 32 features", 32)):
        found["MNIST", label] = partial(mlp, (784, digits.hidden, digits.hidden, 10), m, digits, 0)
    for label, m in (("MLP", None), ("SNNK", cover.num_features)):
        found["CoverType", f"{label}, width 256"] = partial(mlp, (54, cover.first, 256, 7), m, cover, 0)
    for hidden in siren.Config().hidden:
        for network in siren.NETWORKS[:2]:
            label = f"{network.removesuffix(', paper')}, {hidden} hidden"
            found["SIREN", label] = partial(siren.build, network, hidden, siren.Config(), 0)
    for network in qpnn.NETWORKS[:2]:
        found["QPNN", network.removesuffix(" cos, paper")] = partial(qpnn.build, network, qpnn.Config(), 0)
    return found


def _trained(make: Callable[[], nn.Module]) -> int:
    return sum(p.numel() for p in make().parameters())


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return sum({"BERT": 11, "ViT": 9}[name] for name in config.models) + len(_toys())


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row per model and method."""
    try:
        wanted = {(name, method): f for name in config.models for method, f in _methods(config, name).items()}
    except ImportError as error:
        raise ImportError(f"this experiment needs {error.name}: pip install 'snnk[peft]'") from None
    toys: dict[tuple[str, str], Callable[[], int]] = {key: partial(_trained, make) for key, make in _toys().items()}
    for (name, method), count in {**wanted, **toys}.items():
        row = results.find(model=name, method=method)
        if row is None:
            paper = PAPER.get((name, method))
            row = results.add({"model": name, "method": method, "trained": count(), "paper_M": paper})
        yield row


def plot(results: Results) -> Figure:
    """One panel of bars per model, with the paper's numbers as crosses."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r["model"] for r in results))
    rows = {name: [r for r in results if r["model"] == name] for name in names}
    figure = Figure(figsize=(9, 1 + 0.42 * len(results.rows)), layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False, sharex=True, height_ratios=[len(rows[n]) for n in names])[
        :, 0
    ]
    for axes, name in zip(panels, names, strict=True):
        labels = [r["method"] for r in rows[name]]
        axes.barh(labels, [r["trained"] / 1e6 for r in rows[name]], color="tab:blue", label="ours")
        known = [r for r in rows[name] if r["paper_M"]]
        axes.plot([r["paper_M"] for r in known], [r["method"] for r in known], "kx", label="paper")
        for r in rows[name]:
            end = max(r["trained"] / 1e6, r["paper_M"] or 0)
            axes.annotate(f"   {r['trained']:,}", (end, r["method"]), va="center", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlim(1e-4, 1e3)
        axes.invert_yaxis()
        axes.set_title(name)
        if known:
            axes.legend(fontsize=8)
    panels[-1].set_xlabel("trained parameters, millions")
    return figure


def claims(results: Results) -> list[Row]:
    """The paper's rounded numbers beside ours, then the ratios that it derives from them."""
    table = []
    for r in results:
        if r["paper_M"] is None:
            continue
        key, paper = (r["model"], r["method"]), r["paper_M"]
        holds, tolerance = _rounded(r["trained"] / 1e6, paper, "M")
        if key in WIDE:
            holds, tolerance = abs(r["trained"] / 1e6 - paper) <= WIDE[key], f"{WIDE[key]:g} M"
        why = "" if holds else f"; {WHY.get(key, 'unexplained')}"
        table.append(claim(f"{', '.join(key)}: {paper} M", f"{r['trained']:,}{why}", holds, tolerance))
    return table + _derived(results)


def _rounded(ours: float, paper: float, unit: str) -> tuple[bool, str]:
    """Whether the paper's number is ours, rounded or truncated at its last digit, and the tolerance in words."""
    digit = 10.0 ** -len(f"{paper}".partition(".")[2])
    return -0.5 * digit <= ours - paper < digit, f"rounded or cut off at {digit:g} {unit}"


def _derived(results: Results) -> list[Row]:
    """Claims about sizes and ratios in the paper's text."""
    counts = {r["method"]: r["trained"] for r in results if r["model"] == "BERT"}
    adapter, dense, baseline, merged, bundled = (
        counts.get(method)
        for method in (
            "SNNK adapters",
            "Pfeiffer adapters",
            "pooler and classifier",
            "SNNK pooler and classifier, merged",
            "bundled final layers",
        )
    )
    if not (adapter and dense and baseline and merged and bundled):
        return []
    config = results.config
    m, biases = config["num_features"], WIDTH + config["classes"]
    blocks = 24
    before, after = (32e-6 * (count - left) for count, left in ((baseline, biases), (merged, config["classes"])))
    where = f"({config['pooler_features']} features; the paper gives no number, and 235 to 390 would be its .02)"
    return [
        claim(
            "SNNK adapters train 1/3 of the adapters' parameters (BERT)",
            f"{adapter:,} / {dense:,} = 1/{dense / adapter:.2f}",
            abs(dense / adapter - 3) <= 0.3,
            "10 %",
        ),
        claim(
            f"an SNNK adapter trains (d + 1) x features = {(WIDTH + 1) * m:,}",
            f"{adapter // blocks:,} = d x features + d: its gate has d numbers",
            adapter == blocks * (WIDTH + 1) * m,
        ),
        claim(
            "pooler and classifier are 18.92 Megabit",
            f"{before:.2f} without biases, {32e-6 * baseline:.2f} with them",
            *_rounded(before, 18.92, "Megabit, without biases"),
        ),
        claim(
            "merged, SNNK pooler and classifier are .02 Megabit",
            f"{after:.3f} {where}",
            *_rounded(after, 0.02, "Megabit, without biases"),
        ),
        claim(
            "merging compresses pooler and classifier to 1/1000",
            f"1/{before / after:,.0f} {where}",
            abs(before / after - 1000) <= 200,
            "20 %",
        ),
        claim(
            "bundled final layers train about 1/30 of pooler and classifier",
            f"{bundled:,} / {baseline:,} = 1/{baseline / bundled:.0f}; 1/30 is of the paper's 59k, a slip for 590k",
            abs(baseline / bundled - 30) <= 3,
            "10 %",
        ),
    ]
