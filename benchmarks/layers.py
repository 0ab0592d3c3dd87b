"""Forward time of SNNKLinear against the dense layer and against minimal hand-written code for the same map.

    python benchmarks/layers.py [--quick] [--out FILE]

The layers map 8192 tokens from d = 768 to 3072 outputs. The three contenders take turns in one run, and the figures are
medians of their ratios.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk import URF, SNNKLinear
from snnk.experiments.lab.records import Results
from snnk.hf.serve.latency import measure

HAND_BOUND, DENSE_BOUND, DENSE_AT = 1.1, 0.3, 16


@dataclass(frozen=True)
class Config:
    tokens: int = 8192
    dim: int = 768
    out: int = 3072
    features: tuple[int, ...] = (8, 16, 64, 256)
    rounds: int = 18
    threads: int = 2
    seed: int = 0


def hand_written(layer: SNNKLinear) -> Callable[[Tensor], Tensor]:
    """The layer's computation with nothing around it: no modules, no checks, constants folded."""
    fm, a = layer.feature_map, layer.weight.detach()
    g = fm.projection
    if not isinstance(fm, URF):
        return lambda x: F.relu(x @ g.T) @ a.T
    rotation = g * fm.rho[:, None]
    rate = 0.5 * fm.rho.square()
    level = fm.log_gain - rate * fm.x_norm.square() - 0.5 * math.log(len(g))

    def forward(x: Tensor) -> Tensor:
        y = x @ rotation.T
        amplitude = torch.exp(x.norm(dim=-1, keepdim=True).square() * rate + level)
        return torch.cat([y.cos() * amplitude, y.sin() * amplitude], -1) @ a.T

    return forward


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 tokens and three rounds, too few to measure speed")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/layers.json"))
    args = parser.parse_args()
    config = Config(tokens=512, rounds=3) if args.quick else Config()
    torch.set_num_threads(config.threads)
    results = Results(args.out, config, resume=False)
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(config.tokens, config.dim, generator=generator) / math.sqrt(config.dim)
    activations: dict[str, nn.Module] = {"relu": nn.ReLU(), "gelu": nn.GELU()}
    missed = 0
    for name, activation in activations.items():
        dense = nn.Sequential(nn.Linear(config.dim, config.out), activation)
        for m in config.features:
            row = results.find(map=name, num_features=m)
            if row is None:
                layer = SNNKLinear(config.dim, config.out, m, name)
                contenders: dict[str, Callable[[Tensor], Tensor]] = {
                    "snnk": layer,
                    "hand": hand_written(layer),
                    "dense": dense,
                }
                with torch.no_grad():
                    if not torch.allclose(layer(x), contenders["hand"](x), atol=1e-3):
                        raise RuntimeError("the hand-written code computes something else")
                    runs = {key: partial(run, x) for key, run in contenders.items()}
                    rows = f"{config.tokens} rows"
                    median = measure(runs, rows, clock="wall", least=config.rounds, most=config.rounds).seconds
                row = results.add(
                    {
                        "map": name,
                        "num_features": m,
                        "over_hand_written": median["snnk"] / median["hand"],
                        "over_dense": median["snnk"] / median["dense"],
                        "dense_ms": 1e3 * median["dense"],
                        "rounds": config.rounds,
                        "seed": config.seed,
                    }
                )
            missed += row["over_hand_written"] > HAND_BOUND or (m == DENSE_AT and row["over_dense"] > DENSE_BOUND)
            sys.stdout.write(
                f"{name} m = {m}: {row['over_hand_written']:.3f} of hand-written (bound {HAND_BOUND}), "
                f"{row['over_dense']:.3f} of dense{f' (bound {DENSE_BOUND})' if m == DENSE_AT else ''}\n"
            )
            sys.stdout.flush()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
