"""What bundling keeps and what it costs: small networks, BERT's pooler with its classifier, and the error bounds.

    python benchmarks/bundle.py [--quick] [--out FILE]

All data are generated. Errors are squared, on rows that neither maps nor matrix have seen, over the variance of the
outputs: 1 is a constant. "numbers" are all that is stored, "trained" those of the one matrix and its bias; the others
are frozen, all but a mean and norms drawn from a seed.
The exit status is 1 if a measured error exceeds its bound in more seeds than the confidence allows.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snnk import URF, Bundled, bundle, error_bound
from snnk.experiments.lab.records import Results, Row


@dataclass(frozen=True)
class Config:
    dims: tuple[int, ...] = (8, 32)
    hidden: int = 256
    depths: tuple[int, ...] = (2, 3)
    steps: int = 200
    rows: int = 5000
    features: tuple[int, ...] = (64, 256, 512)
    pooler_dim: int = 768
    pooler_features: int = 512
    pooler_rows: int = 8000
    bound_features: tuple[int, ...] = (128, 512, 2048)
    bound_seeds: int = 20
    confidence: float = 0.95
    seed: int = 0


QUICK = Config(
    dims=(8,), hidden=32, steps=20, rows=500, features=(64,), pooler_rows=500, bound_features=(64, 128), bound_seeds=2
)
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def network(widths: list[int], activation: type[nn.Module], gain: float, seed: int) -> nn.Sequential:
    """Linear layers with rows of length about `gain` and biases of 0.1, activations between them."""
    generator, layers = torch.Generator().manual_seed(seed), list[nn.Module]()
    for d, o in itertools.pairwise(widths):
        linear = nn.Linear(d, o)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(o, d, generator=generator) * gain / math.sqrt(d))
            linear.bias.copy_(torch.randn(o, generator=generator) * 0.1)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


def train(net: nn.Module, x: Tensor, steps: int) -> float:
    """Adam on a curved target of a few coordinates; returns the error over variance that is reached."""
    y = torch.stack([torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2], x[:, 3:8].norm(dim=1)], 1)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach() / (y - y.mean(0)).square().mean())


def figures(bundled: Bundled, seconds: float) -> Row:
    report, trained = bundled.report, sum(p.numel() for p in bundled.parameters())
    return {
        "analytic_error": report.analytic_error,
        "fitted_error": report.fitted_error,
        "chosen": report.method,
        "numbers_before": report.numbers,
        "numbers_after": sum(t.numel() for t in bundled.state_dict().values()),
        "trained_after": trained,
        "multiply_adds_before": report.multiply_adds,
        "multiply_adds_after": sum(
            t.numel() for key, t in bundled.state_dict().items() if key.endswith(("weight", "projection"))
        ),
        "held_out_rows": report.held_out_rows,
        "seconds": seconds,
    }


def timed_bundle(*args: Any, **options: Any) -> tuple[Bundled, float]:
    start = time.perf_counter()
    return bundle(*args, **options), time.perf_counter() - start


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def networks(config: Config, results: Results) -> None:
    write("networks: error over variance, analytic | fitted; numbers and multiply-adds before -> after")
    for d, name, depth, trained in itertools.product(config.dims, ACTIVATIONS, config.depths, (False, True)):
        x = torch.randn(config.rows, d, generator=torch.Generator().manual_seed(config.seed))
        net = network([d, *[config.hidden] * (depth - 1), 2], ACTIVATIONS[name], 1.0, config.seed)
        reached = train(net, x, config.steps) if trained else None
        for m in config.features:
            bundled, seconds = timed_bundle(net, num_features=m, calibrate=x, seed=config.seed, on_error="ignore")
            state = f"{config.steps} steps of Adam" if trained else "random, rows of length 1"
            key = {
                "part": "network",
                "dim": d,
                "activation": name,
                "layers": depth,
                "weights": state,
                "num_features": m,
            }
            row = results.add({**key, "network_error": reached, **figures(bundled, seconds), "seed": config.seed})
            write(
                f"d = {d}, {name} x {depth}, {state}, m = {m}: "
                f"{row['analytic_error']:.3g} | {row['fitted_error']:.3g}; "
                f"{row['numbers_before']:,} -> {row['numbers_after']:,}; "
                f"{row['multiply_adds_before']:,} -> {row['multiply_adds_after']:,}"
            )


def pooler(config: Config, results: Results) -> None:
    """The appendix: tanh(X Wp' + bp) Wc' + bc, inputs of length sqrt(d) as a LayerNorm leaves them."""
    d, k = config.pooler_dim, config.pooler_features
    write(f"pooler + classifier, d = {d}, k = {k}: numbers before -> trained + frozen; error, analytic | fitted")
    generator = torch.Generator().manual_seed(config.seed)
    for inputs, decay in (("isotropic", 0.0), ("variances like 1/i", 0.5)):
        x = torch.randn(config.pooler_rows, d, generator=generator) * torch.arange(1, d + 1) ** -decay
        x = nn.functional.layer_norm(x @ torch.linalg.qr(torch.randn(d, d, generator=generator))[0], (d,))
        for feature_map, classes, std in itertools.product(("projected", "relu"), (2, 3), (0.02, 0.05)):
            first, last = nn.Linear(d, d), nn.Linear(d, classes)
            head = nn.Sequential(first, nn.Tanh(), nn.Dropout(0.1), last)
            with torch.no_grad():  # 0.02 is BERT's own, 0.05 gives tanh more to do
                for linear in (first, last):
                    linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * std)
                    linear.bias.zero_()
            options = {"on_error": "ignore"} if feature_map == "projected" else {}
            bundled, seconds = timed_bundle(
                head, num_features=k, feature_map=feature_map, calibrate=x, seed=config.seed, **options
            )
            key = {"part": "pooler", "map": feature_map, "classes": classes, "weight_std": std, "inputs": inputs}
            row = results.add({**key, "num_features": k, **figures(bundled, seconds), "seed": config.seed})
            frozen = row["numbers_after"] - row["trained_after"]
            write(
                f"{feature_map}, {classes} classes, std {std}, {inputs}: {row['numbers_before']:,} -> "
                f"{row['trained_after']:,} + {frozen:,} ({32e-6 * row['numbers_before']:.2f} -> "
                f"{32e-6 * row['trained_after']:.2f} + {32e-6 * frozen:.2f} Mbit); multiply-adds "
                f"{row['multiply_adds_before']:,} -> {row['multiply_adds_after']:,}; "
                f"{row['analytic_error']:.3g} | {row['fitted_error']:.3g}"
            )


def paper_map(in_features: int, num_features: int, activation: Any, **options: Any) -> URF:
    return URF.paper(in_features, num_features, activation, **options)


def our_map(in_features: int, num_features: int, activation: Any, **options: Any) -> URF:
    return URF.paper(in_features, num_features, activation, rho="balanced", antithetic=True, **options)


def bounds(config: Config, results: Results) -> int:
    """How many (map, m) had more seeds outside a bound than the confidence allows."""
    write(f"bounds at {config.confidence}: means over {config.bound_seeds} seeds of Azuma, Bernstein, measured")
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(config.seed), dtype=torch.float64)
    x, missed = x / x.norm(dim=1, keepdim=True), 0
    net = network([8, 6, 6, 3], Sine, 0.1, config.seed).double()
    makers = {"URF.paper": paper_map, "URF.paper, balanced, antithetic": our_map}
    for (name, make), m in itertools.product(makers.items(), config.bound_features):
        found = []
        for seed in range(config.bound_seeds):
            bundled = bundle(net, num_features=m, feature_map=make, activations={Sine: "sin"}, seed=config.seed + seed)
            found.append(error_bound(bundled, net, x, confidence=config.confidence))
        outside = {
            kind: sum(any(e > b for e, b in zip(f.measured, getattr(f, kind), strict=True)) for f in found)
            for kind in ("azuma", "bernstein")
        }
        missed += max(outside.values()) > (1 - config.confidence) * config.bound_seeds
        for i, layer in enumerate(found[0].layers):
            azuma, bernstein, measured = (
                sum(getattr(f, kind)[i] for f in found) / len(found) for kind in ("azuma", "bernstein", "measured")
            )
            key = {"part": "bound", "map": name, "num_features": m, "behind": layer}
            values = {"azuma": azuma, "bernstein": bernstein, "measured": measured}
            results.add({**key, **values, "outside": outside, "seeds": len(found), "seed": config.seed})
            write(f"{name}, m = {m}, behind {layer}: {azuma:.3g}, {bernstein:.3g}, {measured:.3g}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small networks, few rows and seeds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/bundle.json"))
    args = parser.parse_args()
    config = QUICK if args.quick else Config()
    torch.set_num_threads(1)
    results = Results(args.out, config, resume=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        networks(config, results)
        pooler(config, results)
        return int(bounds(config, results) > 0)


if __name__ == "__main__":
    sys.exit(main())
