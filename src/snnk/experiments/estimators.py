"""Beyond the paper: our feature maps beside the paper's estimator, at equal real features.

A sine layer with bias b, two features a projection for every map. Errors are means over draws of the map and over all
pairs of inputs and weights: squared, and relative. Maps that are calibrated see other inputs and weights of the same
kind, never the measured ones. The setting with d = 2000 is that of the paper's pointwise figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snnk.experiments.data import NOWHERE, Source
from snnk.experiments.estimate import sphere
from snnk.experiments.records import Results, Row, claim
from snnk.features import URF, FeatureMap, ProjectedURF

FIGURE = "beyond the paper: estimators at equal size"
NEEDS = "nothing"
TIME = "5 minutes; --quick 5 seconds"
PAPER = "paper"

# name: (d, projections, |x|, |w|, most of the paper's squared error that URF may have); norm 0 stands for entries
# that are Unif(0, 1)/sqrt(d), whose norms are about POSITIVE
SETTINGS: dict[str, tuple[int, int, float, float, float]] = {
    "d = 64, positive": (64, 64, 0.0, 0.0, 0.02),
    "d = 64, norms 1 and 1": (64, 64, 1.0, 1.0, 0.12),
    "d = 64, norms 2 and 0.5": (64, 64, 2.0, 0.5, 0.02),
    "d = 16, norms 1 and 1": (16, 256, 1.0, 1.0, 0.10),
    "d = 64, norms sqrt 2": (64, 64, 2**0.5, 2**0.5, 0.33),
    "d = 2000, positive": (2000, 64, 0.0, 0.0, 0.2),
}
POSITIVE = 3**-0.5


@dataclass(frozen=True)
class Config:
    settings: tuple[str, ...] = tuple(SETTINGS)
    bias: float = 0.5
    draws: int = 100
    pairs: int = 32  # inputs, and weights, all against all
    seen: int = 512  # inputs, and weights, that maps are calibrated on
    seed: int = 0


QUICK = Config(("d = 64, positive", "d = 64, norms 1 and 1"), draws=5)


def makers(setting: str, config: Config, x: Tensor, w: Tensor) -> dict[str, Callable[[int], FeatureMap]]:
    """Seed -> map, calibrated on `x` and `w` or told their norms."""
    d, p, x_norm, w_norm, _ = SETTINGS[setting]
    norms: Any = {"x_norm": x_norm or POSITIVE, "w_norm": w_norm or POSITIVE}
    b = torch.full((len(w),), config.bias)
    return {
        PAPER: lambda seed: URF.paper(d, 2 * p, "sin", seed=seed),
        "URF": lambda seed: URF(d, 2 * p, "sin", seed=seed, on_error="ignore", **norms),
        "URF calibrated": lambda seed: URF(d, 2 * p, "sin", seed=seed, on_error="ignore").calibrate(x, w, b),
        "ProjectedURF": lambda seed: ProjectedURF(d, 2 * p, "sin", seed=seed, on_error="ignore").calibrate(x, w, b),
    }


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return 4 * len(config.settings)


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row for each setting and map."""
    for setting in config.settings:
        d, p, x_norm, w_norm, _ = SETTINGS[setting]
        generator = torch.Generator().manual_seed(config.seed)
        x, w = (_draw(config.pairs, d, norm, generator) for norm in (x_norm, w_norm))
        seen = [_draw(config.seen, d, norm, generator) for norm in (x_norm, w_norm)]
        b = torch.full((config.pairs,), config.bias)
        for name, make in makers(setting, config, *seen).items():
            row = results.find(setting=setting, estimator=name)
            if row is None:
                squared, relative = [], []
                for draw in range(config.draws):
                    fm = make(config.seed + draw)
                    exact = fm.exact(x, w, b)
                    off = (fm.phi(x) @ fm.psi(w, b).T - exact).double()
                    squared.append(off.square().mean())
                    relative.append((off / exact).abs().mean())
                errors = torch.stack(squared)
                row = results.add(
                    {
                        "setting": setting,
                        "estimator": name,
                        "projections": p,
                        "num_features": fm.num_features,
                        "squared_error": float(errors.mean()),
                        "standard_error": float(errors.std()) / len(errors) ** 0.5,
                        "relative_error": float(torch.stack(relative).mean()),
                        "draws": config.draws,
                        "seed": config.seed,
                    }
                )
            yield row


def _draw(n: int, d: int, norm: float, generator: torch.Generator) -> Tensor:
    return sphere(n, d, norm, generator) if norm else torch.rand(n, d, generator=generator) / d**0.5


def _tables(results: Results) -> dict[str, dict[str, Row]]:
    """Setting -> map -> row, of settings where the paper's map is measured."""
    found: dict[str, dict[str, Row]] = {}
    for row in results:
        found.setdefault(row["setting"], {})[row["estimator"]] = row
    return {setting: rows for setting, rows in found.items() if PAPER in rows}


def plot(results: Results) -> Any:
    """Squared error over that of the paper's map, a group for each setting."""
    from matplotlib.figure import Figure

    tables = _tables(results)
    names = list(dict.fromkeys(name for rows in tables.values() for name in rows))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        own = {at: rows for at, rows in enumerate(tables.values()) if name in rows}
        heights = [rows[name]["squared_error"] / rows[PAPER]["squared_error"] for rows in own.values()]
        axes.plot([at + 0.12 * (place - len(names) / 2) for at in own], heights, "o", label=name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(tables)), [name.replace(", ", "\n", 1) for name in tables])
    axes.set_ylabel("mean squared error over the paper's")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    return figure


def claims(results: Results) -> list[Row]:
    """Ours, told the norms, and the best of the calibrated ones against the paper's, for each setting."""
    table = []
    for setting, rows in _tables(results).items():
        bound, paper = SETTINGS[setting][-1], rows[PAPER]["squared_error"]
        if len(rows) < 2:
            continue
        told = ", ".join(f"{name} {row['squared_error'] / paper:.2g}" for name, row in rows.items() if name != PAPER)
        relative = ", ".join(f"{row['relative_error']:.2g}" for row in rows.values())
        table.append(
            claim(
                f"not in the paper: a sine layer with less error at equal features ({setting}, "
                f"{rows[PAPER]['num_features']} features)",
                f"squared error over the paper's: {told}; relative errors, the paper's first: {relative}",
                all(row["squared_error"] < bound * paper for name, row in rows.items() if name != PAPER),
                f"{bound:g} of the paper's squared error",
            )
        )
    return table
