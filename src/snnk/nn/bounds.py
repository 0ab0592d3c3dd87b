r"""How far a bundle may be from the layers it replaced, by depth (appendix B), and how far it is.

Behind an activation f, an entry X = Psi(V, b) . Phi(x) is a mean of P independent terms T_j, one per row g of
the map. With u = rho (x - c), v = eta w and z = w.x + b as in `URF`, w a row of V, r^2 = alpha^2 + beta^2 and
N = g.v / |v| ~ N(0, 1),

    ET = alpha cos(omega z) + beta sin(omega z),    |T| <= r e^{(|u|^2 - |v|^2) / 2} cosh(|v| N),

so there is no c with |T| <= c for every g, as the paper's proof asks (with its A < 0 there is, an astronomic one).
But |N| <= t for all rows and outputs at once, except with probability e^{-t^2 / 2} for each. Cut off there, terms
have a known bound c, and a mean that moved by at most tau = r e^{|u|^2 / 2} (Q(t - |v|) + Q(t + |v|)), Q(s) the
probability of N > s:

    Azuma:      P(|X - EX| >= eps + tau) <= 2 exp(-P eps^2 / (2 c^2)), the paper's exponent corrected,
    Bernstein:  P(|X - EX| >= eps + tau) <= 2 exp(-P eps^2 / (2 (var T + (c + |ET|) eps / 3))),

where var T is known too: T = e^{(|u|^2 - |v|^2) / 2} Re(q cosh(g.(v + iu))) for a number q, or exp for cosh where
psi is not antithetic, and E|cosh|^2 and E cosh^2 of that are simple. Neither bound looks at the rows drawn.
Over rows of several frequencies, var T and Azuma's c^2 are means, and Bernstein's c + |ET| is the largest. With a
union bound over maps, outputs and inputs, the largest entry of the error behind layer i is at most

    e_i = eps_i + tau_i + |EX - f| + Lip(f) |W_i| e_{i-1},

Lip(f) the Lipschitz constant of f on the range of z that occurs (the paper's delta), |W_i| the largest row sum of
absolute values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk import _checks
from snnk.maps import PROJECTIONS, URF
from snnk.nn.bundling import SKIPPED, Bundled, behind


@dataclass(frozen=True)
class ErrorBound:
    """Largest entries of a bundle's error: two bounds and what was measured, behind each of `layers`."""

    layers: tuple[str, ...]  # activations, and the last layer if it is a Linear
    azuma: tuple[float, ...]  # the paper's, from the size of terms alone
    bernstein: tuple[float, ...]  # from their variance and size; like m^(-1/2) for large m, and faster before
    measured: tuple[float, ...]
    confidence: float

    def __str__(self) -> str:
        lines = [f"largest error behind{'Azuma':>14}{'Bernstein':>12}{'measured':>12}"]
        for name, *figures in zip(self.layers, self.azuma, self.bernstein, self.measured, strict=True):
            lines.append(f"{name:<20}" + f"{figures[0]:>14.3g}" + "".join(f"{x:>12.3g}" for x in figures[1:]))
        return "\n".join([*lines, f"each bound holds with probability {self.confidence:g} over the rows of the maps"])


def error_bound(
    bundled: Bundled, layers: nn.Sequential | Sequence[nn.Module], x: Tensor, *, confidence: float = 0.95
) -> ErrorBound:
    """Bounds of how far the analytic tower may be from `layers` for inputs x, by depth, and how far it is.

    Args:
        bundled: made with feature_map="urf" and projection="iid", the independent Gaussian rows of the proof;
            others are refused. Its maps are used, its matrix is not.
        layers, x: the Linear layers and activations that it replaced, net[start:stop], and inputs (*, in).
        confidence: probability, over rows of the maps, that a bound holds behind every layer. Frequencies, if
            sampled, and calibration are taken as they are.

    Example:
        >>> from snnk import bundle
        >>> net, x = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(50, 8) / 8
        >>> bundled = bundle(net, num_features=256, feature_map="urf", projection="iid", calibrate=x)
        >>> bound = error_bound(bundled, net, x)
        >>> bound.layers, [m < b for m, b in zip(bound.measured, bound.bernstein)]
        (('1: Tanh', '2: Linear'), [True, True])
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1; got {confidence!r}")
    named = [(f"{i}: {type(layer).__name__}", layer) for i, layer in enumerate(layers) if type(layer) not in SKIPPED]
    linear = [isinstance(layer, nn.Linear) for _, layer in named]
    if linear.count(False) != len(bundled.maps) or not any(linear[:1]):
        kinds = [name for name, _ in named]
        raise ValueError(f"layers must be Linear and {len(bundled.maps)} activations, one for each map; got {kinds}")
    for fm in bundled.maps:
        if type(fm) is not URF or fm.normalize != "none" or fm.variant.A != 0 or fm.kind != PROJECTIONS["iid"]:
            raise ValueError(f"the bound is of URF maps with projection='iid', without normalize or A; got {fm}")
    x = _checks.finite(_checks.matrix(x, bundled.in_features, "input"), "input")
    if not x.numel():
        raise ValueError(f"the bound is over inputs, of which there are none; got shape {tuple(x.shape)}")
    u = exact = x.detach().reshape(-1, bundled.in_features).to(bundled.weight)
    maps, failure = list(bundled.maps), (1 - confidence) / 2 / max(len(bundled.maps), 1)
    both, found, v, b = cast(Any, (torch.zeros(2).to(u).double(), [], None, None))  # by Azuma and by Bernstein
    with torch.no_grad():
        for name, layer in named:
            z, exact = exact.double(), layer(exact.clone())
            if isinstance(layer, nn.Linear):
                v, b = behind(layer, v, b)
                both = both * float(layer.weight.abs().sum(1).max())
            else:
                fm, estimate = maps.pop(0), F.linear(u.double(), v, b)
                f, z = fm.activation, torch.cat([z, estimate])
                grid = torch.linspace(0, 1, 4097).to(z) * (z.max() - z.min() + 1e-6) + z.min()
                both = both * float((f(grid).diff() / grid.diff()).abs().max()) + _own(fm, u, v, b, failure)
                u, v, b = fm.phi(u), fm.psi(v, b, check=False).double(), None
            if not isinstance(layer, nn.Linear) or name == named[-1][0]:
                measured = float((F.linear(u.double(), v, b) - exact).abs().max())
                found.append((name, *both.tolist(), measured))
    names, azuma, bernstein, errors = zip(*found, strict=True)
    return ErrorBound(names, azuma, bernstein, errors, confidence)


def _own(fm: URF, u: Tensor, weight: Tensor, bias: Tensor | None, failure: float) -> Tensor:
    """eps + tau + |EX - f| of Azuma and Bernstein, the largest over inputs u (n, d) and outputs: (2,).

    `failure` is the probability that terms are cut off, and once more that those that are not exceed the bound.
    """
    n, o, rows = len(u), len(weight), len(fm.rho)
    bias = weight.new_zeros(o) if bias is None else bias
    # rows of one frequency have one distribution: each is looked at once
    table = torch.stack([fm.rho, fm.eta, fm.alpha, fm.beta]).double()
    (rho, eta, alpha, beta), counts = torch.unique(table, dim=1, return_counts=True)
    share, r = counts / rows, torch.hypot(alpha, beta)
    t = math.sqrt(2 * math.log(rows * o / failure))
    log = math.log(2 * n * o / failure)
    length = eta * weight.norm(dim=1, keepdim=True)  # (o, K), |v|
    tails = 0.5 * (torch.special.erfc((t - length) / 2**0.5) + torch.special.erfc((t + length) / 2**0.5))
    grow = torch.cosh if fm.variant.antithetic else torch.exp
    size = grow(length * t) * torch.exp(-length.square() / 2)
    vv, worst = length.square(), torch.zeros(2).to(weight)
    for x in u.double():
        z = weight @ x + bias  # (o,)
        uu = (rho * (x - fm.center.double()).norm()).square()  # (K,)
        angle = z[:, None] * rho * eta - torch.atan2(beta, alpha)  # (o, K), of q e^{i u.v}
        along = (weight @ (x - fm.center.double()))[:, None] * rho * eta  # u.v
        mean, far = r * angle.cos(), r.square() * (2 * (angle + along)).cos()  # Re q^2 e^{4i u.v}
        if fm.variant.antithetic:
            near = r.square() * (2 * (angle - along)).cos()  # Re q^2
            second = (2 * r.square() * (uu + vv).cosh() + near * (uu - vv).exp() + far * (vv - uu).exp()) / 4
        else:
            second = (r.square() * (uu + vv).exp() + far * (vv - uu).exp()) / 2
        c = r * torch.exp(uu / 2) * size
        tau = r * torch.exp(uu / 2) * tails
        # cutting off takes from E T^2, and from the mean up to tau
        variance = (share * (second - mean.square() + 2 * mean.abs() * tau)).sum(1).clamp_min(0)
        linear = (c + mean.abs()).amax(1) * log / (3 * rows)
        azuma = ((share * c.square()).sum(1) * 2 * log / rows).sqrt()
        bernstein = linear + (linear.square() + 2 * variance * log / rows).sqrt()
        rest = (share * tau).sum(1) + ((share * mean).sum(1) - fm.activation(z)).abs()
        worst = torch.maximum(worst, (torch.stack([azuma, bernstein]) + rest).nan_to_num(math.inf, math.inf).amax(1))
    return worst
