"""Beyond the paper: our feature maps beside the paper's estimator, at equal numbers of real features.

The layer is sin(w.x + b) with b = 0.5, estimated as phi(x) . psi(w, b); every map has two real features per projection.
Each draw has its own map, inputs and weights, and pairs all inputs with all weights. Calibrated maps see other inputs
and weights from the same distribution. Norm 0 stands for entries that are Unif(0, 1)/sqrt(d). With d = 2000 that is the
setting of the paper's pointwise figure, where errors are relative; in other settings some outputs are near zero. The
error of our maps depends on |x| |w| alone, whereas norms 1 and 1 differ from norms 2 and 0.5 for the paper's estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from snnk.experiments.lab.data import NOWHERE, Source
from snnk.experiments.lab.estimate import sphere
from snnk.experiments.lab.records import Results, Row, claim
from snnk.maps import URF, FeatureMap, ProjectedURF

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "beyond the paper: estimators at equal size"
NEEDS = "nothing"
TIME = "5 minutes; --quick 5 seconds"
BASELINE, OURS, *CALIBRATED = MAPS = ("paper", "URF", "URF calibrated", "ProjectedURF")
POSITIVE = 3**-0.5  # the typical norm of vectors with entries Unif(0, 1)/sqrt(d)
POINTWISE = "d = 2000, positive"
RELATIVE = 0.055  # the bound on the mean relative error of URF in that setting
BOUNDS = {  # the largest ratio of squared errors, of URF with given norms to the paper's estimator
    "d = 64, positive": 0.02,
    "d = 64, norms 1 and 1": 0.12,
    "d = 64, norms 2 and 0.5": 0.02,
    "d = 16, norms 1 and 1": 0.10,
    "d = 64, norms sqrt 2": 0.33,
}


@dataclass(frozen=True)
class Config:
    """`settings` lists (name, d, projections, |x|, |w|)."""

    settings: tuple[tuple[str, int, int, float, float], ...] = (
        ("d = 64, positive", 64, 64, 0.0, 0.0),
        ("d = 64, norms 1 and 1", 64, 64, 1.0, 1.0),
        ("d = 64, norms 2 and 0.5", 64, 64, 2.0, 0.5),
        ("d = 16, norms 1 and 1", 16, 256, 1.0, 1.0),
        ("d = 64, norms sqrt 2", 64, 64, 2**0.5, 2**0.5),
        (POINTWISE, 2000, 64, 0.0, 0.0),
    )
    bias: float = 0.5
    draws: int = 100
    pairs: int = 32  # number of inputs, and of weights
    seen: int = 512  # number of inputs, and of weights, for calibration
    seed: int = 0


QUICK = Config(Config.settings[:2], draws=5)


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return len(MAPS) * len(config.settings)


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row per setting and map."""
    for setting, d, p, x_norm, w_norm in config.settings:
        for name in MAPS:
            row = results.find(setting=setting, estimator=name)
            if row is None:
                make = _maker(name, d, 2 * p, x_norm or POSITIVE, w_norm or POSITIVE)
                generator = torch.Generator().manual_seed(config.seed)  # the same numbers for all maps
                b, seen_b = (torch.full((n,), config.bias) for n in (config.pairs, config.seen))
                squared, relative = [], []
                for draw in range(config.draws):
                    x, w = (_draw(config.pairs, d, norm, generator) for norm in (x_norm, w_norm))
                    seen = [_draw(config.seen, d, norm, generator) for norm in (x_norm, w_norm)]
                    # another seed than that of the inputs, whose random numbers a map could share
                    fm = make(config.seed + 1 + draw, *seen, seen_b)
                    exact = fm.exact(x, w, b)
                    off = (fm.phi(x) @ fm.psi(w, b).T - exact).double()
                    squared.append(off.square().mean())
                    relative.append((off / exact).abs().mean())
                errors = torch.stack(squared)
                row = results.add(
                    {
                        "setting": setting,
                        "estimator": name,
                        "dim": d,
                        "x_norm": x_norm,
                        "w_norm": w_norm,
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


def _maker(name: str, d: int, m: int, x_norm: float, w_norm: float) -> Callable[..., FeatureMap]:
    """A function of (seed, x, w, b) that makes the map; only calibrated maps use x, w and b."""
    options: Any = {"num_features": m, "activation": "sin", "on_error": "ignore"}
    if name == BASELINE:
        return lambda seed, x, w, b: URF.paper(d, m, "sin", seed=seed)
    if name == OURS:
        return lambda seed, x, w, b: URF(d, seed=seed, x_norm=x_norm, w_norm=w_norm, **options)
    kind: Any = ProjectedURF if name == "ProjectedURF" else URF
    return lambda seed, x, w, b: kind(d, seed=seed, **options).calibrate(x, w, b)


def _tables(results: Results) -> dict[str, dict[str, Row]]:
    """Setting -> map -> row, without infinite errors, for settings with a row of the paper's estimator."""
    found: dict[str, dict[str, Row]] = {}
    for row in results:
        if row["squared_error"] is not None:
            found.setdefault(row["setting"], {})[row["estimator"]] = row
    return {setting: rows for setting, rows in found.items() if BASELINE in rows}


def plot(results: Results) -> Figure:
    """Squared error relative to the paper's estimator, with one group of points per setting."""
    from matplotlib.figure import Figure

    tables = _tables(results)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(MAPS):
        own = {at: rows for at, rows in enumerate(tables.values()) if name in rows}
        heights = [rows[name]["squared_error"] / rows[BASELINE]["squared_error"] for rows in own.values()]
        axes.plot([at + 0.12 * (place - 1.5) for at in own], heights, "o", label=name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(tables)), [name.replace(", ", "\n", 1) for name in tables])
    axes.set_ylabel("mean squared error over that of the paper's estimator")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    return figure


def claims(results: Results) -> list[Row]:
    """URF with given norms against the paper's estimator, and calibrated maps against URF."""
    table = []
    for setting, rows in _tables(results).items():
        if OURS not in rows:
            continue
        paper, ours = rows[BASELINE], rows[OURS]
        equal = len({row["num_features"] for row in rows.values()}) == 1
        where = f"sine layer, {setting}, {paper['num_features']} features"
        if setting == POINTWISE:
            statement = f"not in the paper: URF has a mean relative error of at most {RELATIVE:g} ({where})"
            told = f"{ours['relative_error']:.2g}, the paper's estimator {paper['relative_error']:.2g}"
            table.append(claim(statement, told, equal and ours["relative_error"] <= RELATIVE))
        elif setting in BOUNDS:
            ratio, bound = ours["squared_error"] / paper["squared_error"], BOUNDS[setting]
            statement = f"not in the paper: URF has at most {bound:g} of the paper's squared error ({where})"
            told = f"{ratio:.2g}: {ours['squared_error']:.2g} against {paper['squared_error']:.2g}"
            table.append(claim(statement, told, equal and ratio <= bound))
        calibrated = {name: rows[name]["squared_error"] / ours["squared_error"] for name in CALIBRATED if name in rows}
        if calibrated:
            statement = (
                f"not in the paper: maps calibrated on a sample have less error than URF with given norms ({where})"
            )
            told = ", ".join(f"{name} {ratio:.2g} of its squared error" for name, ratio in calibrated.items())
            table.append(claim(statement, told, equal and max(calibrated.values()) < 1))
    return table
