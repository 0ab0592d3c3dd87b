"""Measured and predicted error of one layer f(w.x + b) against the number of features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snnk.experiments.records import Results, Row
from snnk.features import URF


@dataclass(frozen=True)
class Config:
    """Random pairs of given norms: `inputs` x's against `outputs` w's, `draws` feature maps each."""

    activation: str = "sin"
    dim: int = 64
    x_norm: float = 1.0
    w_norm: float = 1.0
    bias: float = 0.5
    features: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    draws: int = 50
    inputs: int = 64
    outputs: int = 64
    seed: int = 0


def sphere(n: int, dim: int, norm: float, generator: torch.Generator) -> Tensor:
    """n random directions of R^dim with the given norm."""
    x = torch.randn(n, dim, generator=generator)
    return x / x.norm(dim=1, keepdim=True) * norm


def squared_error(fm: URF, x: Tensor, w: Tensor, b: Tensor) -> float:
    """Mean squared error of phi(x) . psi(w, b) over all pairs."""
    return float((fm.phi(x) @ fm.psi(w, b).T - fm.exact(x, w, b)).double().square().mean())


def run(config: Config, results: Results) -> Iterator[Row]:
    """One row for each number of features: root mean squared errors over pairs and draws."""
    generator = torch.Generator().manual_seed(config.seed)
    x = sphere(config.inputs, config.dim, config.x_norm, generator)
    w = sphere(config.outputs, config.dim, config.w_norm, generator)
    b = torch.full((config.outputs,), config.bias)
    kappa = config.x_norm * config.w_norm
    common: dict[str, Any] = {
        "x_norm": config.x_norm,
        "w_norm": config.w_norm,
        "range": (config.bias - kappa, config.bias + kappa),
        "on_error": "ignore",
    }
    for m in config.features:
        row = results.find(num_features=m)
        if row is None:
            ours, paper, predicted = [], [], 0.0
            for draw in range(config.draws):
                fm = URF(config.dim, m, config.activation, seed=config.seed + draw, **common)
                ours.append(squared_error(fm, x, w, b))
                predicted = float(fm.predicted_error(w, b).mean())
                fm = URF.paper(config.dim, m, config.activation, seed=config.seed + draw, **common)
                paper.append(squared_error(fm, x, w, b))
            row = results.add(
                {
                    "num_features": m,
                    "measured": _root_mean(ours),
                    "predicted": predicted**0.5,
                    "paper": _root_mean(paper),
                    "scale": float(fm.exact(x, w, b).double().std()),
                    "draws": config.draws,
                    "seed": config.seed,
                }
            )
        yield row


def _root_mean(errors: list[float]) -> float:
    return (sum(errors) / len(errors)) ** 0.5


def plot(results: Results) -> Any:
    """Error against features, with the m^(-1/2) slope for the eye."""
    from matplotlib.figure import Figure

    c = results.config
    m = [row["num_features"] for row in results]
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    axes.loglog(m, [row["paper"] for row in results], "s--", color="tab:gray", label="URF.paper, measured")
    axes.loglog(m, [row["measured"] for row in results], "o-", color="tab:blue", label="URF, measured")
    axes.loglog(m, [row["predicted"] for row in results], "x:", color="tab:orange", label="URF, predicted")
    top = results.rows[0]["measured"]
    axes.loglog(m, [top * (k / m[0]) ** -0.5 for k in m], color="lightgray", zorder=0, label=r"slope $m^{-1/2}$")
    axes.axhline(results.rows[0]["scale"], color="tab:red", lw=0.8, label="spread of the outputs themselves")
    axes.set_xlabel("real features m")
    axes.set_ylabel("root mean squared error")
    axes.set_title(
        f"{c['activation']}(w.x + {c['bias']:g}), d = {c['dim']}, |x| = {c['x_norm']:g}, |w| = {c['w_norm']:g}"
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    return figure
