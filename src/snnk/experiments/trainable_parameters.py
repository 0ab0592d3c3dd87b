"""Trained parameters of every method that the paper compares, counted exactly from configurations, without weights.

Adapters, LoRA and BitFit: the tables of baselines ("final classifier parameters are not used for counting"). Poolers
and bundled final layers: two classes, as in most of GLUE. The toy networks: this project's own experiments, whose sizes
are the paper's; its figure prints no numbers for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from snnk.experiments import mnist, uci
from snnk.experiments.data import NOWHERE, Source
from snnk.experiments.records import Results, Row

FIGURE = "figures, tables of parameters"
NEEDS = "transformers, peft"
TIME = "20 s; --quick 10 s"

# in millions, where the paper has a number
PAPER = {
    ("BERT", "full"): 110,
    ("BERT", "SNNK adapters"): 0.3,
    ("BERT", "Houlsby adapters"): 1.8,
    ("BERT", "Pfeiffer adapters"): 0.9,
    ("BERT", "LoRA"): 0.3,
    ("BERT", "BitFit"): 0.1,
    ("ViT", "full"): 85,
    ("ViT", "SNNK adapters"): 0.3,
    ("ViT", "Houlsby adapters"): 1.8,
    ("BERT", "pooler and classifier"): 0.059,
    ("BERT", "linear probe"): 0.001,
    ("BERT", "bundled final layers"): 0.002,
}
WHY = {("BERT", "pooler and classifier"): "768 x 768 alone is ten times the paper's"}


@dataclass(frozen=True)
class Config:
    """The paper's sizes."""

    models: tuple[str, ...] = ("BERT", "ViT")
    num_features: int = 16
    bottleneck: int = 48
    rank: int = 8
    pooler_features: int = 512
    bundled_features: int = 1024
    classes: int = 2


QUICK = Config(models=("BERT",))


def _adapted(name: str, make: Callable[[], Any]) -> Callable[[], int]:
    """Trained numbers of a base model with a PEFT configuration."""

    def count() -> int:
        from peft import get_peft_model

        model = get_peft_model(_base(name), make())
        return sum(p.numel() for p in model.parameters() if p.requires_grad)

    return count


def _base(name: str) -> Any:
    import torch
    import transformers

    hf: Any = transformers
    with torch.device("meta"):
        if name == "BERT":
            return hf.BertModel(hf.BertConfig())
        return hf.ViTModel(hf.ViTConfig(), add_pooling_layer=False)


def _methods(config: Config, name: str) -> dict[str, Callable[[], int]]:
    from peft import LoraConfig

    from snnk.peft import SNNKConfig

    bottleneck: Any = {"projection": "pca", "train_projection": True, "gate": False, "use_bias": True}
    d, c = 768, config.classes
    found: dict[str, Callable[[], int]] = {
        "full": lambda: sum(p.numel() for p in _base(name).parameters()),
        "SNNK adapters": _adapted(name, lambda: SNNKConfig(num_features=config.num_features)),
        "Houlsby adapters": _adapted(name, lambda: SNNKConfig(num_features=config.bottleneck, **bottleneck)),
    }
    if name == "BERT":
        lora = LoraConfig(r=config.rank, target_modules=["query", "value"])
        found |= {
            "Pfeiffer adapters": _adapted(
                name, lambda: SNNKConfig(num_features=config.bottleneck, placement="pfeiffer", **bottleneck)
            ),
            "LoRA": _adapted(name, lambda: lora),
            "BitFit": lambda: sum(p.numel() for n, p in _base(name).named_parameters() if n.endswith("bias")),
            "pooler and classifier": lambda: d * d + d + d * c + c,
            "SNNK pooler and classifier": lambda: config.pooler_features * d + d * c + c,
            "SNNK pooler and classifier, merged": lambda: config.pooler_features * c + c,
            "linear probe": lambda: d * c + c,
            "bundled final layers": lambda: config.bundled_features * c + c,
        }
    return found


def _toys() -> dict[tuple[str, str], Callable[[], int]]:
    def trained(module: Any) -> int:
        return sum(p.numel() for p in module.parameters())

    found: dict[tuple[str, str], Callable[[], int]] = {
        ("MNIST", "MLP"): lambda: trained(mnist.network(784, 10, None, mnist.Config(), 0)),
        ("MNIST", "SNNK, 32 features"): lambda: trained(mnist.network(784, 10, 32, mnist.Config(), 0)),
    }
    for kind in ("MLP", "SNNK"):
        found["CoverType", f"{kind}, width 256"] = lambda kind=kind: trained(  # type: ignore[misc]
            uci.network(kind, 54, 7, 256, uci.Config(), 0)
        )
    return found


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return 3 * len(config.models) + 8 * ("BERT" in config.models) + 4


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row for each model and method."""
    try:
        wanted = {(name, method): f for name in config.models for method, f in _methods(config, name).items()}
    except ImportError as error:
        raise ImportError(f"this experiment needs {error.name}: pip install 'snnk[peft]'") from None
    for (name, method), count in {**wanted, **_toys()}.items():
        row = results.find(model=name, method=method)
        if row is None:
            paper = PAPER.get((name, method))
            row = results.add({"model": name, "method": method, "trained": count(), "paper_M": paper})
        yield row


def plot(results: Results) -> Any:
    """Bars, one panel a model, the paper's numbers as crosses."""
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
            axes.annotate(f"   {r['trained']:,}", (r["trained"] / 1e6, r["method"]), va="center", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlim(1e-4, 1e3)
        axes.invert_yaxis()
        axes.set_title(name)
        if known:
            axes.legend(fontsize=8)
    panels[-1].set_xlabel("trained parameters, millions")
    return figure


def claims(results: Results) -> list[Row]:
    """The paper's rounded numbers beside ours."""
    table = []
    for r in results:
        if r["paper_M"] is None:
            continue
        paper, ours = float(r["paper_M"]), r["trained"] / 1e6
        digits = len(f"{r['paper_M']}".partition(".")[2])
        holds = abs(ours - paper) <= 10**-digits  # rounded or cut off
        why = "" if holds else f"; {WHY.get((r['model'], r['method']), 'unexplained')}"
        table.append(
            {
                "paper": f"{r['model']}, {r['method']}: {r['paper_M']} M",
                "ours": f"{r['trained']:,}{why}",
                "holds": holds,
            }
        )
    return table
