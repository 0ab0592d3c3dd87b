"""What a bundle knows of each class of feature map: its Jacobian, and how a file names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk import _checks
from snnk.maps import URF, ArcCosine, PowerSeries, ProjectedURF, Sampled
from snnk.maps.activations import ACTIVATIONS
from snnk.maps.base import NORMALIZERS, FeatureMap
from snnk.maps.projections import PROJECTIONS


class Affine(FeatureMap):
    """A frozen x -> Mx + c between maps of bundles, `projection` [M, c]: (*, in_features) to (*, num_features)."""

    def __init__(self, in_features: int, num_features: int, *, device: Any = None, dtype: Any = None, **options: Any):
        super().__init__(in_features, num_features, **options)
        self.register_buffer("projection", torch.zeros(num_features, in_features + 1, device=device, dtype=dtype))

    def _phi(self, x: Tensor) -> Tensor:
        return F.linear(x, self.projection[:, :-1], self.projection[:, -1])


def times_jacobian(left: Tensor, fm: FeatureMap, x: Tensor) -> Tensor:
    """left (*, out, m) times d phi / dx at x (*, d), without autograd: (*, out, d)."""
    if type(fm) not in JACOBIANS:
        raise TypeError(f"no Jacobian of {type(fm).__name__} is known; use torch.func.jacrev, or add it")
    left = JACOBIANS[type(fm)](fm, NORMALIZERS[fm.normalize](x), left)
    if fm.normalize == "dim":
        left = left * fm.in_features**-0.25
    elif fm.normalize == "unit":  # (I - v v^T) / |x| for v = x / |x|
        v, norm = F.normalize(x, dim=-1)[..., None, :], torch.linalg.vector_norm(x, dim=-1)[..., None, None]
        left = (left - (left * v).sum(-1, keepdim=True) * v) / norm.clamp_min(1e-12)
    return left


def _arccos(fm: Any, x: Tensor, left: Tensor) -> Tensor:
    g = fm.projection[:, : fm.in_features]
    y = F.linear(x, g, fm.projection[:, -1] if fm.augment else None)
    return (left * (torch.zeros_like(y), (y > 0).to(y.dtype), 2 * F.relu(y))[fm.order][..., None, :]) @ g


def _fourier(fm: Any, x: Tensor, left: Tensor) -> Tensor:
    """phi = a [cos, sin](rho g.(x - c)), where a is constant, or for URF exp(rho^2 |x - c|^2 / 2) times one."""
    cos, sin = (part[..., None, :] for part in fm._phi(x).chunk(2, -1))
    even, odd = left.chunk(2, -1)  # (*, out, P)
    if not isinstance(fm, URF):
        return (odd * cos - even * sin) @ fm.projection
    x = (x - fm.center)[..., None, :]
    excess = 0.5 * fm.rho.square() * (x.square().sum(-1, keepdim=True) - fm.summary[0].square())
    radial = (even * cos + odd * sin) * fm.rho.square() * (excess < fm.limit)
    return ((odd * cos - even * sin) * fm.rho) @ fm.projection + radial.sum(-1, keepdim=True) * x


def _power(fm: Any, x: Tensor, left: Tensor) -> Tensor:
    """phi = scale prod_{j < N} r_j.(x, 1): the sum over j of r_j times the other factors; none is divided by."""
    r, (degree, rows, _) = fm.projection, fm.projection.shape
    factors = F.linear(x, r[..., :-1].flatten(0, 1), r[..., -1].flatten()).unflatten(-1, (1, degree, rows))
    used = torch.arange(degree, device=x.device)[:, None] < fm.degrees[:, None, :]  # (parts, degree, rows)
    factors = torch.where(used, factors, 1.0)  # (*, parts, degree, rows)
    one = torch.ones_like(factors[..., :1, :])
    before = torch.cat([one, factors[..., :-1, :]], -2).cumprod(-2)
    after = torch.cat([one, factors[..., 1:, :].flip(-2)], -2).cumprod(-2).flip(-2)
    others = before * after * (used * fm.scale[:, None, :])
    left = torch.einsum("...opr,...pjr->...ojr", left.unflatten(-1, fm.degrees.shape), others)
    return left.flatten(-2) @ r[..., :-1].flatten(0, 1)


# (map, normalised x (*, d), left (*, out, m)) -> left times d phi / dx (*, out, d)
JACOBIANS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Tensor]] = {
    Affine: lambda fm, x, left: left @ fm.projection[:, :-1],
    ArcCosine: _arccos,
    PowerSeries: _power,
    ProjectedURF: _fourier,
    URF: _fourier,
}
CLASSES: dict[str, Any] = {c.__name__: c for c in (Affine, ArcCosine, PowerSeries, ProjectedURF, URF)}  # in files
ARGUMENTS = ("in_features", "num_features", "normalize", "seed", "order", "augment", "coefficients", "bandwidth")


def to_config(fm: Any) -> dict[str, Any]:
    """A map's constructor arguments as JSON, as far as a file can name them."""
    config = {name: getattr(fm, name) for name in (*ARGUMENTS, "antithetic", "A") if hasattr(fm, name)}
    config["class"] = type(fm).__name__
    unknown = ["class"] * (CLASSES.get(config["class"]) is not type(fm))
    if hasattr(fm, "kind"):
        config["projection"] = fm.kind.name
        unknown += ["projection"] * (PROJECTIONS.get(fm.kind.name) != fm.kind)
    if isinstance(fm, URF | ProjectedURF):
        f, z = fm.activation, torch.linspace(-9, 9, 999)
        config.update(activation=f.name, x_norm=fm.norms[0], w_norm=fm.norms[1], on_error=fm.on_error)
        same = f.name in ACTIVATIONS and torch.equal(ACTIVATIONS[f.name](z), f(z))  # a LeakyReLU may have any slope
        unknown += [f"activation {f.name}"] * (not same)
    if isinstance(fm, URF):
        config.update(range=fm.activation.range, rho=fm.split, limit=fm.limit)
        if isinstance(fm.spectrum, Sampled):
            config["block_size"] = fm.spectrum.block_size
            unknown += ["proposal"] * (fm.spectrum.proposal is not None)  # a scipy object, of any class
        else:
            unknown += ["spectrum"] * (fm.spectrum != "series")
    if unknown:
        raise TypeError(f"a file cannot name the {' and '.join(unknown)} of {config['class']}; save the state_dict()")
    return config


def from_config(config: dict[str, Any], shape: tuple[int, ...]) -> FeatureMap:
    """A map for the tensors of a file; `shape`, that of its projection, bounds what is allocated here."""
    make = _checks.look_up(config.pop("class"), CLASSES, "feature map")
    d, m = (_checks.positive_int(config[name], name) for name in ("in_features", "num_features"))
    degree = max(len(config.get("coefficients", "")) - 1, 1)
    if d * m * degree > 2 * math.prod(shape):
        raise ValueError(f"a map {d} -> {m} of degree {degree} does not fit its projection of shape {shape}")
    if "block_size" in config:  # as many numbers are drawn; beyond m the size makes no difference
        config["spectrum"] = Sampled(None, min(_checks.positive_int(config.pop("block_size"), "block_size"), m))
    limit, kind = config.pop("limit", None), config.get("projection")
    if kind is not None:  # any projection but this may take d x d numbers for one row
        config["projection"] = replace(_checks.look_up(kind, PROJECTIONS, "projection"), draw=PROJECTIONS["iid"].draw)
    fm = make(**config)
    if kind is not None:
        fm.kind = PROJECTIONS[kind]
    if limit is not None:
        fm.limit = float(limit)
    return fm
