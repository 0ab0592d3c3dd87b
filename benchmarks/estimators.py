"""Mean squared error of URF and ProjectedURF over URF.paper at equal real features (two a projection, all of them).

    python benchmarks/estimators.py [--quick] [--out FILE]

Sine layer with b = 0.5; errors are averaged over draws of the map and over pairs (x, w). The last setting is the
paper's pointwise one (d = 2000, 64 projections): mean relative error of one output, averaged over draws and pairs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snnk import URF, FeatureMap, ProjectedURF
from snnk.experiments.estimate import sphere
from snnk.experiments.records import Results

Maker = Callable[[int], FeatureMap]


@dataclass(frozen=True)
class Config:
    draws: int = 300
    pairs: int = 32
    pointwise_draws: int = 300
    seed: int = 0


# name: (d, projections, |x|, |w|, bound on the ratio); norm 0 stands for positive entries, Unif(0, 1)/sqrt(d)
SETTINGS: dict[str, tuple[int, int, float, float, float]] = {
    "positive, norms 0.58": (64, 64, 0.0, 0.0, 0.02),
    "norms 1 and 1": (64, 64, 1.0, 1.0, 0.12),
    "norms 2 and 0.5": (64, 64, 2.0, 0.5, 0.02),
    "d = 16, norms 1 and 1": (16, 256, 1.0, 1.0, 0.10),
    "norms sqrt 2": (64, 64, 2**0.5, 2**0.5, 0.33),
}
POINTWISE_BOUND = 0.055


def draw(n: int, d: int, norm: float, generator: torch.Generator) -> Tensor:
    return sphere(n, d, norm, generator) if norm else torch.rand(n, d, generator=generator) / d**0.5


def makers(d: int, p: int, x_norm: float, w_norm: float, sample: tuple[Tensor, Tensor]) -> dict[str, Maker]:
    """Seed -> map. "calibrated" ones see other inputs and weights of the same kind, never the measured ones."""
    norms: dict[str, Any] = {"x_norm": x_norm or 3**-0.5, "w_norm": w_norm or 3**-0.5}
    x, w = sample
    b = torch.full((len(w),), 0.5)
    return {
        "paper": lambda seed: URF.paper(d, 2 * p, "sin", seed=seed),
        "URF": lambda seed: URF(d, 2 * p, "sin", seed=seed, on_error="ignore", **norms),
        "URF calibrated": lambda seed: URF(d, 2 * p, "sin", seed=seed, on_error="ignore").calibrate(x, w, b),
        "ProjectedURF": lambda seed: ProjectedURF(d, 2 * p, "sin", seed=seed, on_error="ignore").calibrate(x, w, b),
    }


def errors(make: Maker, x: Tensor, w: Tensor, b: Tensor, draws: int) -> tuple[float, float]:
    """Mean squared and mean relative error over draws and all pairs."""
    squared, relative = 0.0, 0.0
    for seed in range(draws):
        fm = make(seed)
        exact = fm.exact(x, w, b)
        difference = (fm.phi(x) @ fm.psi(w, b).T - exact).double()
        squared += float(difference.square().mean()) / draws
        relative += float((difference / exact).abs().mean()) / draws
    return squared, relative


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the draws")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/estimators.json"))
    args = parser.parse_args()
    config = Config(draws=30, pointwise_draws=30) if args.quick else Config()
    results = Results(args.out, config, resume=False)
    missed = 0
    for name, (d, p, x_norm, w_norm, bound) in {**SETTINGS, "d = 2000": (2000, 64, 0.0, 0.0, POINTWISE_BOUND)}.items():
        pointwise = name == "d = 2000"
        generator = torch.Generator().manual_seed(config.seed)
        x, w = (draw(config.pairs, d, norm, generator) for norm in (x_norm, w_norm))
        sample = draw(512, d, x_norm, generator), draw(512, d, w_norm, generator)
        b = torch.full((config.pairs,), 0.5)
        row = results.find(setting=name)
        if row is None:
            draws = config.pointwise_draws if pointwise else config.draws
            found = {key: errors(make, x, w, b, draws) for key, make in makers(d, p, x_norm, w_norm, sample).items()}
            row = results.add(
                {
                    "setting": name,
                    "dim": d,
                    "projections": p,
                    "num_features": 2 * p,
                    "draws": draws,
                    "seed": config.seed,
                    "measure": "mean relative error" if pointwise else "mean squared error over the paper's",
                    "bound": bound,
                    "paper_squared_error": found["paper"][0],
                    "figures": {
                        key: relative if pointwise else squared / found["paper"][0]
                        for key, (squared, relative) in found.items()
                    },
                }
            )
        missed += row["figures"]["URF"] > bound
        figures = "  ".join(f"{key} {value:.3g}" for key, value in row["figures"].items())
        sys.stdout.write(f"{name:24s} {row['measure']}: {figures}  (bound for URF {bound})\n")
        sys.stdout.flush()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
