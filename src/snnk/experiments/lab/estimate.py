"""Measured and predicted error of one layer f(w.x + b) against the number of features: `snnk estimate`.

Example:
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     results, picture = estimate(Config(in_features=8, num_features=(16, 64), draws=3), folder)
    >>> [row["num_features"] for row in results], picture.name
    ([16, 64], 'estimate.png')
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from snnk import _checks, _io
from snnk.experiments.lab.records import Results, Row, save_figure
from snnk.experiments.lab.runs import Track, all_rows
from snnk.maps import ACTIVATIONS, URF, FeatureMap, ProjectedURF

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Config:
    """Random inputs and weights of given norms: all pairs of `inputs` x and `outputs` w, under `draws` feature maps."""

    activation: str = "sin"
    in_features: int = 64
    x_norm: float = 1.0
    w_norm: float = 1.0
    bias: float = 0.5
    num_features: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)
    draws: int = 50
    inputs: int = 64
    outputs: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        _checks.choose(self.activation, ACTIVATIONS, "activation")
        for name in ("in_features", "draws", "inputs", "outputs"):
            _checks.positive_int(getattr(self, name), name)
        for m in self.num_features:
            _checks.even_features(m)
        _checks.positive(self.x_norm, "x_norm")
        _checks.positive(self.w_norm, "w_norm")
        if not math.isfinite(self.bias):
            raise ValueError(f"bias must be a finite number; got {self.bias!r}")


def estimate(config: Config, out: str | Path, *, track: Track = all_rows) -> tuple[Results, Path]:
    """Measure anew into the files estimate.json and estimate.png of a folder; returns the rows and the picture's path.

    Args:
        config: the layer, the numbers of features and the number of draws.
        out: the folder.
        track: wraps the rows, to show progress.
    """
    file = Path(out, "estimate.json")
    with _io.locked_output(file):
        results = Results(file, config, resume=False)
        for _ in track(run(config, results), "estimating", len(config.num_features)):
            pass
        return results, save_figure(plot(results), file.with_suffix(".png"))


def sphere(n: int, dim: int, norm: float, generator: torch.Generator) -> Tensor:
    """n random vectors of R^dim with the given norm."""
    x = torch.randn(n, dim, generator=generator)
    return x / x.norm(dim=1, keepdim=True) * norm


def squared_error(fm: FeatureMap, x: Tensor, w: Tensor, b: Tensor) -> float:
    """Mean squared error of phi(x) . psi(w, b) over all pairs."""
    return float((fm.phi(x) @ fm.psi(w, b).T - fm.exact(x, w, b)).double().square().mean())


def run(config: Config, results: Results) -> Iterator[Row]:
    """One row per number of features: root mean squared errors over pairs and draws.

    Our maps are calibrated on other inputs and weights of the same norms, never on those that are measured.
    """
    generator = torch.Generator().manual_seed(config.seed)
    x, other_x = (sphere(config.inputs, config.in_features, config.x_norm, generator) for _ in range(2))
    w, other_w = (sphere(config.outputs, config.in_features, config.w_norm, generator) for _ in range(2))
    b = torch.full((config.outputs,), config.bias)
    kappa = config.x_norm * config.w_norm
    window = (config.bias - kappa, config.bias + kappa)
    for m in config.num_features:
        row = results.find(num_features=m)
        if row is None:
            squared: dict[str, list[float]] = {"urf": [], "projected": [], "paper": []}
            for draw in range(config.draws):
                common: dict[str, Any] = {"seed": config.seed + draw, "on_error": "ignore"}
                urf = URF(config.in_features, m, config.activation, **common).calibrate(other_x, other_w, b)
                projected = ProjectedURF(config.in_features, m, config.activation, **common).calibrate(
                    other_x, other_w, b
                )
                norms: dict[str, Any] = {"x_norm": config.x_norm, "w_norm": config.w_norm}
                paper = URF.paper(config.in_features, m, config.activation, range=window, **norms, **common)
                for name, fm in (("urf", urf), ("projected", projected), ("paper", paper)):
                    squared[name].append(squared_error(fm, x, w, b))
            row = results.add(
                {
                    "num_features": m,
                    **{name: (sum(values) / len(values)) ** 0.5 for name, values in squared.items()},
                    "urf_predicted": float(urf.predicted_error(w, b).mean()) ** 0.5,
                    "projected_predicted": float(projected.predicted_error(w, b).mean()) ** 0.5,
                    "spread": float(urf.exact(x, w, b).double().std()),
                    "draws": config.draws,
                    "seed": config.seed,
                }
            )
        yield row


COLUMNS = {
    "num_features": "features",
    "urf": "URF",
    "urf_predicted": "predicted",
    "projected": "ProjectedURF",
    "projected_predicted": "predicted",
    "paper": "URF.paper",
}


def plot(results: Results) -> Figure:
    """Measured and predicted error against the number of features; the paper's estimator may lie off the chart."""
    from matplotlib.figure import Figure

    c = results.config
    m = [row["num_features"] for row in results]
    figure = Figure(figsize=(6.5, 4.5))
    axes = figure.add_subplot()
    for key, color, label in (("urf", "tab:blue", "URF"), ("projected", "tab:green", "ProjectedURF")):
        axes.loglog(m, [row[key] for row in results], "o-", color=color, label=f"{label}, measured", ms=4)
        predicted = [row[f"{key}_predicted"] for row in results]
        axes.loglog(m, predicted, "x:", color=color, label=f"{label}, predicted", ms=9)
    spread, paper = results.rows[0]["spread"], [row["paper"] for row in results]
    top = 30 * max(spread, *(row["urf"] for row in results))
    label = "URF.paper, measured" + (" (off the chart)" if min((p for p in paper if p), default=math.inf) > top else "")
    axes.loglog(m, paper, "s--", color="tab:gray", label=label, ms=4)
    axes.axhline(spread, color="tab:red", lw=0.8, label="spread of the outputs: a constant's error")
    axes.set_ylim(min(min(row["urf"], row["projected"]) for row in results) / 3, top)
    axes.set_xlabel("real features m")
    axes.set_ylabel("root mean squared error")
    norms = f"|x| = {c['x_norm']:g}, |w| = {c['w_norm']:g}"
    axes.set_title(f"{c['activation']}(w.x + {c['bias']:g}), d = {c['in_features']}, {norms}")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    return figure
