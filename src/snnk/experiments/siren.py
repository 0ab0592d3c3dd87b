r"""Figure 3 of the paper, right: SIREN fits an image, also with one hidden layer replaced (appendix, "Siren").

SIREN (Sitzmann et al., 2020) is x -> sin(omega W0 x + b0), then hidden layers h -> sin(omega (W h + b)), then a linear
layer. One hidden layer becomes phi(h) A^T with 64 features, and A is trained with the rest. There are two choices of
phi:

- "SNNK, paper": the paper's estimator of the sine layer, with A = psi(omega W, omega b) as the start. |h| |omega W| is
  about 16 in a SIREN, and the variance of the estimator grows like its exponential; therefore h and W are projected to
  the unit sphere. "SNNK, cosine" is the same for the cosine, which the paper says "performs similarly".
- "SNNK, neurons": phi(h) = sin(G h + c), frozen neurons with the distribution that SIREN draws its own from. A starts
  at random. Variants for one seed show where its distance from SIREN comes from: as many neurons as the layer is wide
  (256), neurons that are trained, both, and A = omega B with a trained B, so that A learns as fast as SIREN's matrices.

"3 layers with hidden matrices of 256 x 256" has two readings, and both are here. The original SIREN has three hidden
layers, of which the middle one is replaced. With a single hidden layer, A and the last layer are together one row of 64
numbers, so that the whole network fits an image with 833 parameters; this reading is run for one seed. The derivatives
of networks are exact, and those of the image are Sobel and Laplace differences; all are with respect to coordinates in
[-1, 1]. The curves still rise when training ends: the claims name the number of steps, and give the distance after
the 500 steps of SIREN's authors too.
"""

from __future__ import annotations

import base64
import importlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from snnk import _checks
from snnk.experiments.lab.data import NOWHERE, Source
from snnk.experiments.lab.records import Results, Row
from snnk.experiments.lab.training import against, grid, judged, means, neurons, uniform
from snnk.maps import URF
from snnk.maps.projections import make_generator
from snnk.nn.linear import SNNKLinear

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "figure 3, SIREN"
NEEDS = "scikit-image"
TIME = "25 minutes; --quick 15 seconds"
BASELINE = "SIREN"
PAPER, NEURONS, COSINE = "SNNK, paper", "SNNK, neurons", "SNNK, cosine"
NETWORKS = (BASELINE, PAPER, NEURONS, COSINE)

BUNDLED = "; A and the last layer are one row of numbers, a feature each"
KINDS = ("picture", "gradient", "Laplacian")
FIGURES = ("psnr", "gradient_psnr", "gradient_error", "laplacian_error", "trained", "frozen", "seconds")
AUTHORS_STEPS = 500
WHY_NOT = """With three hidden layers, the distance of 64 frozen neurons from SIREN comes from the rank of the middle
layer and from its frozen weights together, as the variants of one seed show. As means of the last five points of the
curves, 64 frozen neurons are 1.06 dB behind, 256 frozen ones 0.73 dB, 64 trained ones 0.80 dB, and 256 trained ones
0.21 dB, but these have more parameters than SIREN. Larger steps of A gain nothing (1.12 dB). After the 500 steps of
SIREN's authors, whose parameters the paper takes, 64 frozen neurons are within 1 dB. The paper's estimator is further
behind: inputs have to be projected to the unit sphere, where its variance is small enough. With one hidden layer, A and
the last layer are one row of 64 numbers. Derivatives are as wrong as SIREN's own after so few passes."""
ACCURATE = 0.5  # the largest relative error of derivatives that counts as accurate
SETTLED = 5  # the mean of so many last points of a curve varies less than its last point
FASTER = 0.9  # part of the baseline's seconds; smaller gains cannot be measured on a shared machine


@dataclass(frozen=True)
class Variant:
    """What differs from frozen neurons.

    Args:
        trained: directions and phases are trained, as SIREN's are.
        wide: there are as many neurons as the layer is wide.
        scaled: A is omega times its parameters, as the matrices of SIREN are, and learns as fast as they do.
    """

    trained: bool = False
    wide: bool = False
    scaled: bool = False


VARIANTS = {
    "SNNK, neurons, full width": Variant(wide=True),
    "SNNK, neurons, A times omega": Variant(scaled=True),
    "SNNK, trained neurons": Variant(trained=True),
    "SNNK, trained neurons, full width": Variant(trained=True, wide=True),
}


@dataclass(frozen=True)
class Config:
    """The layers, omega and learning rate of SIREN's authors, with steps that take minutes on two cores.

    The authors take 500 steps or more, each with all 65,536 pixels (batch=0); here `steps` with `batch` pixels are 47
    passes. `hidden` lists numbers of hidden layers, one of which is replaced; all but the first are run for one seed.
    `every` is the number of steps between two points of a curve, `picture` the size of the pictures in the rows.
    """

    image: str = "camera"
    size: int = 256
    width: int = 256
    hidden: tuple[int, ...] = (3, 1)
    num_features: int = 64
    variants: tuple[str, ...] = tuple(VARIANTS)  # with the first of `hidden` and one seed
    omega: float = 30.0
    lr: float = 1e-4
    steps: int = 1500
    batch: int = 2048
    every: int = 100
    picture: int = 96
    seeds: int = 3
    seed: int = 0


QUICK = Config(size=128, width=128, num_features=32, hidden=(3,), lr=5e-4, steps=150, batch=1024, picture=64, seeds=1)


def _camera() -> Tensor:
    try:
        data = importlib.import_module("skimage.data")
    except ImportError:
        raise ImportError("this experiment needs the image of scikit-image: pip install scikit-image") from None
    return torch.from_numpy(data.camera()).float() / 127.5 - 1


def _waves() -> Tensor:
    """An image that needs no package: a disc on two waves."""
    y, x = grid(512).reshape(512, 512, 2).unbind(-1)
    return 0.3 * torch.sin(9 * x + 2 * y) * torch.cos(5 * y) + 0.6 * torch.tanh(20 * (0.5 - torch.hypot(x, y)))


IMAGES: dict[str, Callable[[], Tensor]] = {"camera": _camera, "waves": _waves}


class Sine(nn.Module):
    """sin(omega (W x + b)) with the initialisation of SIREN's authors; a layer with one output is W x + b."""

    def __init__(
        self, in_features: int, out_features: int, omega: float, generator: Generator, first: bool = False
    ) -> None:
        super().__init__()
        bound = 1 / in_features if first else (6 / in_features) ** 0.5 / omega
        self.omega, self.last = omega, out_features == 1
        self.weight = nn.Parameter(uniform(out_features, in_features, bound=bound, generator=generator))
        self.bias = nn.Parameter(uniform(out_features, bound=in_features**-0.5, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        z = F.linear(x, self.weight, self.bias)
        return z if self.last else torch.sin(self.omega * z)


class Times(nn.Module):
    """A factor times a layer whose weights are divided by it: the same function, with larger steps of Adam."""

    def __init__(self, factor: float, linear: nn.Linear) -> None:
        super().__init__()
        self.factor, self.linear = factor, linear
        with torch.no_grad():
            linear.weight /= factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * cast(Tensor, self.linear(x))


def build(network: str, hidden: int, config: Config, seed: int) -> nn.Sequential:
    """A network (*, 2) -> (*, 1). Networks differ in the middle one of their `hidden` layers only.

    Example:
        >>> build("SNNK, paper", 3, QUICK, seed=0)(torch.zeros(5, 2)).shape
        torch.Size([5, 1])
    """
    _checks.choose(network, (*NETWORKS, *VARIANTS), "network")
    width, omega, generator = config.width, config.omega, make_generator(seed)
    inner = [Sine(width, width, omega, generator) for _ in range(hidden)]
    net = nn.Sequential(Sine(2, width, omega, generator, first=True), *inner, Sine(width, 1, omega, generator))
    middle = hidden // 2
    if network in (PAPER, COSINE):
        wave = "sin" if network == PAPER else "cos"
        fm = URF.paper(width, config.num_features, wave, normalize="unit", seed=seed)
        weights = omega * inner[middle].weight.detach(), omega * inner[middle].bias.detach()
        net[1 + middle] = SNNKLinear(width, width, config.num_features, fm, weights=weights)
    elif network != BASELINE:
        variant = VARIANTS.get(network, Variant())
        m = width if variant.wide else config.num_features
        # SIREN's distribution of rows; outputs have the variance of a sine layer
        rows = uniform(m, width, bound=(6 / width) ** 0.5, generator=generator)
        layer = neurons(rows, width, "sin", (3 / m) ** 0.5, generator)
        if variant.trained:  # not train_directions_: without omega in front they would learn 30 times slower than SIREN
            layer[0] = Sine(width, m, omega, generator)
        if variant.scaled:
            layer[1] = Times(omega, cast(nn.Linear, layer[1]))
        net[1 + middle] = layer
    return net


def psnr(error: Tensor, peak: float) -> float:
    """Peak signal-to-noise ratio in dB of an array of errors; NaN if they are not finite."""
    mse = float(error.double().square().mean())
    return 10 * math.log10(peak**2 / max(mse, 1e-12)) if math.isfinite(mse) else math.nan


def differences(image: Tensor) -> dict[str, Tensor]:
    """Picture (n, n), gradient (n, n, 2) by Sobel's filter, and Laplacian (n, n) of an image on [-1, 1]^2.

    Example:
        >>> image = torch.linspace(-1, 1, 9)[:, None].expand(9, 9)
        >>> differences(image)["gradient"][4, 4].tolist()
        [1.0, 0.0]
    """
    scale = (len(image) - 1) / 2
    padded = F.pad(image[None, None], (1, 1, 1, 1), mode="replicate")
    down = torch.tensor([[-1.0, -2, -1], [0, 0, 0], [1, 2, 1]]) / 8
    across, laplace = down.T, torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])
    result = F.conv2d(padded, torch.stack([down, across, laplace])[:, None])[0]
    return {
        "picture": image,
        "gradient": scale * result[:2].permute(1, 2, 0),
        "Laplacian": scale**2 * result[2],
    }


def derivatives(net: nn.Module, size: int, chunk: int = 4096) -> dict[str, Tensor]:
    """Exact values, gradient and Laplacian of a network at the pixels of a (size, size) image."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for points in grid(size).split(chunk):
        x = points.clone().requires_grad_()
        y = net(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        second = [torch.autograd.grad(gradient[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(2)]
        parts.append((y.detach()[:, 0], gradient.detach(), second[0] + second[1]))
    y, gradient, laplacian = (torch.cat(part) for part in zip(*parts, strict=True))
    square = size, size
    return {
        "picture": y.reshape(square),
        "gradient": gradient.reshape(*square, 2),
        "Laplacian": laplacian.reshape(square),
    }


def measures(fitted: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """PSNR of the picture and of the gradient's length, and relative errors of gradient and Laplacian."""
    inner = slice(1, -1)  # without the border, where differences are one-sided
    slope, slope_of_fit, bend, bend_of_fit = (
        signal[kind][inner, inner] for kind in KINDS[1:] for signal in (reference, fitted)
    )
    length = slope.norm(dim=-1)
    return {
        "psnr": psnr(fitted["picture"] - reference["picture"], 2),
        "gradient_psnr": psnr(slope_of_fit.norm(dim=-1) - length, float(length.max())),
        "gradient_error": float((slope_of_fit - slope).norm() / slope.norm()),
        "laplacian_error": float((bend_of_fit - bend).norm() / bend.norm()),
    }


@torch.no_grad()
def _fit_of(net: nn.Module, image: Tensor) -> float:
    y = torch.cat([net(points)[:, 0] for points in grid(len(image)).split(8192)])
    return psnr(y - image.flatten(), 2)


def train(net: nn.Module, image: Tensor, config: Config, seed: int) -> tuple[list[list[float]], float]:
    """Fit an image in place; returns [step, PSNR] pairs, and the processor seconds of the steps alone."""
    x, y = grid(len(image)), image.reshape(-1, 1)
    batch = min(config.batch or len(x), len(x))
    generator, order = make_generator(seed, stream=1), torch.empty(0, dtype=torch.long)
    optimizer = torch.optim.Adam(net.parameters(), config.lr)
    curve, seconds = [[0, _fit_of(net, image)]], 0.0
    for step in range(1, config.steps + 1):
        start = time.process_time()
        if len(order) < batch:
            order = torch.randperm(len(x), generator=generator)
        chosen, order = order[:batch], order[batch:]
        loss = (net(x[chosen]) - y[chosen]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds += time.process_time() - start
        if step % config.every == 0 or step == config.steps:
            curve.append([step, round(_fit_of(net, image), 3)])
    return curve, seconds


def _levels(values: Tensor, low: float, high: float, size: int) -> str:
    """A picture as base64 of size^2 bytes, a fifth of the length of a JSON list of numbers."""
    small = F.interpolate(values[None, None], (size, size), mode="area")[0, 0]
    bytes_ = ((small - low) / (high - low) * 255).nan_to_num().round().clamp(0, 255).to(torch.uint8)
    return base64.b64encode(bytes_.numpy().tobytes()).decode()


def _pictures(signal: dict[str, Tensor], reference: dict[str, Tensor], size: int) -> dict[str, str]:
    """Pictures on the scales of the reference, so that they compare."""
    slope = float(reference["gradient"].norm(dim=-1).quantile(0.99))
    bend = float(reference["Laplacian"].abs().quantile(0.98))
    return {
        "picture": _levels(signal["picture"], -1, 1, size),
        "gradient": _levels(signal["gradient"].norm(dim=-1), 0, slope, size),
        "Laplacian": _levels(signal["Laplacian"], -bend, bend, size),
    }


def networks(config: Config) -> list[tuple[int, int, str]]:
    """Seed, number of hidden layers and network of all rows: the first seed has further depths, then variants."""
    seeds = range(config.seed, config.seed + config.seeds)
    pairs = [(seed, hidden) for seed in seeds for hidden in config.hidden[: None if seed == config.seed else 1]]
    return [
        *((seed, hidden, network) for seed, hidden in pairs for network in NETWORKS),
        *((config.seed, config.hidden[0], network) for network in config.variants),
    ]


def total(config: Config) -> int:
    """Number of rows that `run` yields."""
    return len(networks(config))


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row per network and seed, and per further depth for the first seed. The first rows store pictures."""
    image = _checks.look_up(config.image, IMAGES, "image")()
    image = F.interpolate(image[None, None], (config.size, config.size), mode="area")[0, 0]
    reference = differences(image)
    for seed, hidden, network in networks(config):
        row = results.find(seed=seed, hidden=hidden, network=network)
        if row is None:
            net = build(network, hidden, config, seed)
            curve, seconds = train(net, image, config, seed)
            fitted = derivatives(net, config.size)
            row = {
                "hidden": hidden,
                "network": network,
                "seed": seed,
                **measures(fitted, reference),
                "trained": sum(p.numel() for p in net.parameters()),
                "frozen": sum(b.numel() for name, b in net.named_buffers() if name.endswith("projection")),
                "seconds": seconds,
                "curve": curve,
            }
            if seed == config.seed and hidden == config.hidden[0] and network in NETWORKS:
                row["pictures"] = _pictures(fitted, reference, config.picture)
                if network == BASELINE:
                    row["reference"] = _pictures(reference, reference, config.picture)
            row = results.add(row)
        yield row


def plot(results: Results) -> Figure:
    """Pictures, gradients and Laplacians of the image and of the networks, and PSNR against steps."""
    from matplotlib.figure import Figure

    depths, size = results.config["hidden"], results.config["picture"]
    shown = [(f"{r['network']}\n{_decibels(r)}", r["pictures"]) for r in results if "pictures" in r]
    given = [("image, differences\n", r["reference"]) for r in results if "reference" in r]
    columns = given + shown
    figure = Figure(figsize=(2.1 * len(columns) + 4.6, 6.9), layout="constrained")
    parts: Any = figure.subfigures(1, 2, width_ratios=[2.1 * len(columns), 4.6])
    left, right = parts
    for i, kind in enumerate(KINDS):
        for j, (title, pictures) in enumerate(columns):
            axes = left.add_subplot(len(KINDS), len(columns), i * len(columns) + j + 1)
            levels = np.frombuffer(base64.b64decode(pictures[kind]), dtype=np.uint8).reshape(size, size)
            axes.imshow(levels, cmap="gray", vmin=0, vmax=255)
            axes.set(xticks=[], yticks=[])
            if i == 0:
                axes.set_title(title, fontsize=10)
            if j == 0:
                axes.set_ylabel(kind)
    colors = dict(zip(NETWORKS, ("black", "tab:gray", "tab:blue", "tab:olive"), strict=True))
    colors |= dict(zip(VARIANTS, ("tab:cyan", "tab:green", "tab:orange", "tab:red"), strict=True))
    for place, hidden in enumerate(depths, 1):
        axes = right.add_subplot(len(depths), 1, place)
        for network, color in colors.items():
            rows = [r for r in results if r["hidden"] == hidden and r["network"] == network]
            for i, r in enumerate(rows):
                label = f"{network}, {r['trained'] / 1e3:.0f} k trained" if i == 0 else None
                axes.plot(*zip(*r["curve"], strict=True), color=color, label=label, lw=1.2)
        axes.set_title(f"{hidden} hidden layer{'s' * (hidden > 1)}, one replaced", fontsize=10)
        axes.set(xlabel="step", ylabel="PSNR, dB")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8, loc="lower right")
    return figure


def _decibels(row: Row) -> str:
    return "diverged" if row["psnr"] is None else f"{row['psnr']:.1f} dB"


def claims(results: Results) -> list[Row]:
    """The paper's statements beside our figures, which are means over seeds."""
    table: list[Row] = []
    for hidden in results.config["hidden"]:
        for network, rows, base in against(results.rows, [name for name in NETWORKS if name != COSINE], hidden=hidden):
            table += _claims_of(hidden, network, rows, base)
        for _, rows, sines in against(results.rows, (PAPER, COSINE), hidden=hidden):
            cosine, sine = (means(group, "psnr") for group in (rows, sines))
            told = f"{cosine['psnr']:.2f} dB, sine {sine['psnr']:.2f}, after {rows[0]['curve'][-1][0]:,} steps"
            alike = abs(cosine["psnr"] - sine["psnr"]) <= 1
            where = f"({hidden} hidden)"
            table.append(judged(f"the cosine variant performs similarly {where}", told, alike, "1 dB", cosine, sine))
    return [*table, *_variants(results)]


def _variants(results: Results) -> list[Row]:
    """Whether more neurons, trained ones, or larger steps of A bring the layer nearer to SIREN, with the same seed."""
    table = []
    hidden = results.config["hidden"][0]
    for network, (row,), (base,) in against(results.rows, (BASELINE, *VARIANTS), hidden=hidden):
        frozen = results.find(network=NEURONS, hidden=hidden, seed=row["seed"])
        if frozen is None:
            continue
        new, old, few = ({**means([r], *FIGURES), "settled": _settled(r)} for r in (row, base, frozen))
        behind, before = (old["settled"] - found["settled"] for found in (new, few))
        table.append(
            judged(
                f"not in the paper: halves the distance of frozen neurons from SIREN ({hidden} hidden, {network})",
                f"mean of the last {SETTLED} points of the curve {new['settled']:.2f} dB, SIREN {old['settled']:.2f}, "
                f"{NEURONS} {few['settled']:.2f}: {behind:.2f} behind instead of {before:.2f}, seed {row['seed']}; "
                f"{new['trained']:,.0f} trained and {new['frozen']:,.0f} frozen against {old['trained']:,.0f}",
                2 * behind <= before,
                "half of the distance",
                new,
                old,
                few,
            )
        )
    return table


def _settled(row: Row) -> float:
    return mean(math.nan if dB is None else dB for _, dB in row["curve"][-SETTLED:])


def _claims_of(hidden: int, network: str, rows: list[Row], base: list[Row]) -> list[Row]:
    new, old = (means(group, *FIGURES) for group in (rows, base))
    where = f"({hidden} hidden, {network})"
    curve = base[0]["curve"]
    early = next((i for i, (step, _) in enumerate(curve) if step == AUTHORS_STEPS), len(curve) // 2)
    steps = [curve[place][0] for place in (early, -1)]
    gaps = [_behind([r], [b], -1) for r, b in zip(rows, base, strict=True)]
    spread = f" (seeds {min(gaps):.2f} to {max(gaps):.2f})" if len(gaps) > 1 else ""
    matches = new["psnr"] >= old["psnr"] - 1 and new["trained"] + new["frozen"] < old["trained"]
    accurate = max(new["gradient_error"], new["laplacian_error"]) <= ACCURATE
    alike = new["gradient_psnr"] >= old["gradient_psnr"] - 1 and new["laplacian_error"] <= 1.05 * old["laplacian_error"]
    return [
        judged(
            f"matches SIREN with fewer parameters {where}",
            f"after {steps[1]:,} steps {new['psnr']:.2f} dB against {old['psnr']:.2f}, {_behind(rows, base, -1):.2f} "
            f"behind{spread}, after {steps[0]:,} {_behind(rows, base, early):.2f}; {new['trained']:,.0f} trained and "
            f"{new['frozen']:,.0f} frozen against {old['trained']:,.0f}"
            + (BUNDLED if hidden == 1 and not matches else ""),
            matches,
            "1 dB",
            new,
            old,
        ),
        *(
            [
                judged(
                    f"matches SIREN with fewer parameters, after its authors' {AUTHORS_STEPS} steps {where}",
                    f"{_behind(rows, base, early):.2f} dB behind",
                    _behind(rows, base, early) <= 1 and new["trained"] + new["frozen"] < old["trained"],
                    "1 dB",
                    new,
                    old,
                )
            ]
            if steps[0] == AUTHORS_STEPS
            else []
        ),
        judged(
            f"accurately models the derivatives, as SIREN does {where}",
            f"after {steps[1]:,} steps relative error of the gradient {new['gradient_error']:.3f} against "
            f"{old['gradient_error']:.3f}, of the Laplacian {new['laplacian_error']:.3f} against "
            f"{old['laplacian_error']:.3f}; length of the gradient {new['gradient_psnr']:.2f} dB against "
            f"{old['gradient_psnr']:.2f}",
            accurate and alike,
            f"errors up to {ACCURATE}; behind SIREN by 1 dB for the gradient, 5 % for the Laplacian",
            new,
            old,
        ),
        judged(
            f"modest computational gains {where}",
            f"{new['seconds']:.1f} s of training against {old['seconds']:.1f}",
            new["seconds"] < FASTER * old["seconds"],
            "less than 10 % is no gain",
            new,
            old,
        ),
    ]


def _behind(rows: list[Row], base: list[Row], place: int) -> float:
    """The distance below SIREN in dB at one point of the curves, mean over seeds."""
    ours, theirs = (means([{"dB": r["curve"][place][1]} for r in group], "dB") for group in (rows, base))
    return theirs["dB"] - ours["dB"]
