r"""Bundling (section 3.3): consecutive layers become one matrix behind one fixed feature map.

x_{i+1} = f_{i+1}(W_i x_i + b_i), i = 0..L-1, is estimated by y = W_bar phi(x), linear in its only matrix:

    phi(x) = Phi_L(... Phi_2(Phi_1(x)) ...),    W_bar = Psi_L(W_{L-1} ... Psi_2(W_1 Psi_1(W_0, b_0), b_1) ..., b_{L-1})

(the paper writes b_L for the last bias). Psi_1 is (d_1, m_1), so the second map takes W_1 Psi_1 on Phi_1(x) in R^m_1.
The step f(Vu + b) ~ Psi(V, b) . Phi(u) at an activation is the only estimate. Exact to rounding are a Linear behind a
map, W (A Phi) + b = (WA) Phi + b, and an SNNKLinear A_2 Phi_2(.), whose own map is kept behind the frozen affine map
that stood before it, as Phi_2(A_1 Phi_1(x)) is not Phi_2(Phi_1(x)): a stack of SNNKLinear and Linear layers equals its
bundle. The Jacobian is explicit: W_bar DPhi_L ... DPhi_1.
"""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk import _checks
from snnk.activations import ACTIVATIONS, resolve_activation
from snnk.features import FEATURE_MAPS, URF, ArcCosine, PowerSeries, ProjectedURF, make_feature_map
from snnk.features.base import NORMALIZERS, FeatureMap, UnreachableError
from snnk.layers import SNNKLinear
from snnk.projections import PROJECTIONS, make_generator

FORMAT = "snnk.Bundled/1"
MULTIPLIED = ("weight", "projection")  # the tensors that inputs are multiplied with
SKIPPED = (nn.Identity, nn.Dropout, nn.AlphaDropout)
ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.LeakyReLU, nn.Softplus, nn.ELU, nn.SELU, nn.Mish)
MAKERS: dict[str, Any] = {n: lambda d, m, f, make=make, **k: make(d, m, **k) for n, make in FEATURE_MAPS.items()}
MAKERS.update(projected=ProjectedURF, urf=URF)


@dataclass(frozen=True)
class Report:
    """What a bundle replaced, and how well. Errors are squared, over the variance of the outputs: a constant has 1."""

    layers: tuple[str, ...] = ()  # "position: layer"
    numbers: int = 0  # that they store
    multiply_adds: int = 0  # that they take for one input
    predicted: tuple[float | None, ...] = ()  # squared error of psi that each map predicts, mean over outputs
    refusal: str | None = None  # why a map refused its layer; the analytic error is measured all the same
    method: str = "analytic"  # what `weight` is: the psi tower, or "fitted" by least squares
    analytic_error: float | None = None  # both on `held_out_rows` calibration inputs that neither has seen
    fitted_error: float | None = None
    held_out_rows: int = 0


class Affine(FeatureMap):
    """A frozen x -> Mx + c between the maps of a bundle, `projection` [M, c]: (*, in_features) -> (*, num_features)."""

    def __init__(self, in_features: int, num_features: int, *, device: Any = None, dtype: Any = None, **options: Any):
        super().__init__(in_features, num_features, **options)
        self.register_buffer("projection", torch.zeros(num_features, in_features + 1, device=device, dtype=dtype))

    def _phi(self, x: Tensor) -> Tensor:
        return F.linear(x, self.projection[:, :-1], self.projection[:, -1])


class Bundled(nn.Module):
    """Layers in one: frozen feature maps, and a matrix `weight` (out, m) with a `bias` (out,) or None, to be trained.

    Args:
        maps: feature maps, each on the features of the one before.
        weight, bias, report: (out, m) and (out,), copied, and what was replaced, which `bundle` writes.

    Example:
        >>> bundled = Bundled([ArcCosine(8, 16), ArcCosine(16, 32)], torch.ones(3, 32))
        >>> x = torch.randn(5, 8)
        >>> bundled(x).shape, bundled.phi(x).shape, bundled.jacobian(x).shape
        (torch.Size([5, 3]), torch.Size([5, 32]), torch.Size([5, 3, 8]))
    """

    def __init__(self, maps: Sequence[FeatureMap], weight: Tensor, bias: Tensor | None = None, *, report: Any = None):
        super().__init__()
        self.in_features = width = maps[0].in_features if maps else weight.shape[-1]
        for fm in maps:
            width = make_feature_map(fm, width, fm.num_features).num_features  # checks the sizes
        if weight.ndim != 2 or weight.shape[1] != width or (bias is not None and bias.shape != weight.shape[:1]):
            shapes = tuple(weight.shape), None if bias is None else tuple(bias.shape)
            raise ValueError(f"weight and bias must be (out, {width}) and (out,); got shapes {shapes}")
        self.maps: Any = nn.ModuleList(maps).requires_grad_(False)
        self.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.num_features, self.out_features, self.report = width, weight.shape[0], report or Report()

    def phi(self, x: Tensor) -> Tensor:
        """The features of all maps in turn: (*, in) -> (*, m)."""
        x = _checks.matrix(x, self.in_features, "input")
        for fm in self.maps:
            x = fm.phi(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.phi(x), self.weight, self.bias)

    def jacobian(self, x: Tensor) -> Tensor:
        """Derivative of the outputs by the chain rule, without autograd: (*, in) -> (*, out, in)."""
        u, inputs = _checks.matrix(x, self.in_features, "input"), []
        for fm in self.maps:
            if type(fm) not in JACOBIANS:
                raise TypeError(f"no Jacobian of {type(fm).__name__} is known; use torch.func.jacrev, or add it")
            inputs.append(u)
            u = fm.phi(u)
        left = self.weight.expand(*x.shape[:-1], -1, -1)
        for fm, u in zip(reversed(self.maps), reversed(inputs), strict=True):
            left = JACOBIANS[type(fm)](fm, NORMALIZERS[fm.normalize](u), left)
            if fm.normalize == "dim":
                left = left * fm.in_features**-0.25
            elif fm.normalize == "unit":  # (I - v v^T) / |u| for v = u / |u|
                v, norm = F.normalize(u, dim=-1)[..., None, :], torch.linalg.vector_norm(u, dim=-1)[..., None, None]
                left = (left - (left * v).sum(-1, keepdim=True) * v) / norm.clamp_min(1e-12)
        return left

    def summary(self) -> str:
        """What was replaced, numbers and multiply-adds before and after, and the errors, in a few lines."""
        r, trained = self.report, sum(p.numel() for p in self.parameters())
        lines = [
            f"{self.in_features} -> {self.num_features} features -> {self.out_features}, {r.method}; replaces",
            *(f"  {layer}" for layer in r.layers),
            f"numbers stored: {r.numbers:,} -> {trained:,} trained + {_numbers(self) - trained:,} frozen",
            f"multiply-adds for one input: {r.multiply_adds:,} -> {_numbers(self, MULTIPLIED):,}",
            f"predicted squared error of psi, by layer: {[e and float(f'{e:.3g}') for e in r.predicted]}",
        ]
        if r.held_out_rows:
            both = f"{r.analytic_error:.3g} analytic, {r.fitted_error:.3g} fitted"
            lines.append(f"held-out error over variance, {r.held_out_rows} rows: {both}")
        return "\n".join(lines + [f"refused: {r.refusal}"] * bool(r.refusal))

    extra_repr = summary

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write safetensors, the configuration in the metadata, under a temporary name that is renamed at the end."""
        from safetensors.torch import save_file

        config = json.dumps({"maps": [_config(fm) for fm in self.maps], "report": asdict(self.report)})
        tensors = {key: value.detach().cpu().contiguous() for key, value in self.state_dict().items()}
        folder, name = os.path.split(os.path.abspath(path))
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as place:
            save_file(tensors, os.path.join(place, name), metadata={"format": FORMAT, "config": config})
            os.replace(os.path.join(place, name), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Bundled:
        """Read what `save` wrote, onto the CPU: known classes only, sizes checked first, every key accounted for."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata, keys = file.metadata() or {}, list(file.keys())
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
                config = json.loads(metadata["config"])
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
                maps = [_from_config(c, shapes[f"maps.{i}.projection"]) for i, c in enumerate(config["maps"])]
                tensors = {key: file.get_tensor(key) for key in keys}
            report: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in config["report"].items()}
            bundled = cls(maps, tensors["weight"], tensors.get("bias"), report=Report(**report))
            bundled.load_state_dict(tensors, assign=True)
        except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ValueError(f"cannot load a bundle from {os.fspath(path)}: {error}") from error
        return bundled


def bundle(
    module: nn.Module | Sequence[nn.Module],
    start: int = 0,
    stop: int | None = None,
    *,
    num_features: int | Sequence[int] = (),
    feature_map: Any = "projected",
    calibrate: Tensor | None = None,
    method: str = "auto",
    activations: Mapping[type[nn.Module], Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Bundled:
    """Replace `module[start:stop]`, Linear or SNNKLinear layers and activations, by one matrix behind feature maps.

    Args:
        module, start, stop: nn.Sequential, nn.ModuleList or list, left as it is, and the part to replace as in slices.
        num_features: of each map, one number or a list with one for each activation; so with feature_map.
        feature_map: "projected" (ProjectedURF of the layer's activation), "urf" (URF of it), a name in FEATURE_MAPS or
            a callable (in_features, num_features, activation, seed=, device=, dtype=, **options) that makes a map.
        calibrate: typical inputs (*, in). Maps are calibrated on them and their features, and the matrix is fitted as
            well; a fifth is held out to measure the errors in `report`, instead of the maps' warnings and refusals.
        method: "analytic", "fitted", or "auto": that of less held-out error; "analytic" without inputs.
        activations: more elementwise layers, like {Sine: "sin", nn.ReLU6: F.relu6}. Dropout and Identity are skipped.
        seed, **options: of the held-out rows and the maps, such as projection="iid" or on_error="ignore".

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        >>> bundled = bundle(net, num_features=64, calibrate=torch.randn(500, 8))
        >>> bundled.weight.shape, bundled.report.fitted_error < 0.1
        (torch.Size([3, 64]), True)
    """
    _checks.choose(method, ["auto", "analytic", "fitted"], "method")
    if method == "fitted" and calibrate is None:
        raise ValueError("method 'fitted' needs inputs: pass calibrate=, or take 'analytic'")
    steps = _steps(module, start, stop, activations or {})
    original, first = nn.Sequential(*(layer for _, layer, _ in steps)), steps[0][1]
    place, train, held = {"device": first.weight.device, "dtype": first.weight.dtype}, None, None
    if calibrate is not None:
        x = _checks.finite(_checks.matrix(calibrate, first.in_features, "calibrate"), "calibrate")
        x = x.detach().reshape(-1, first.in_features).to(**place)
        if len(x) < 10:
            raise ValueError(f"calibrate has {len(x)} rows; a fit and its held-out fifth take at least 10")
        order = torch.randperm(len(x), generator=make_generator(seed, stream=2)).to(x.device)
        held, train = x[order].tensor_split([len(x) // 5])
    with torch.no_grad():
        maps, v, b, *rest = _tower(steps, train, num_features, feature_map, method, {"seed": seed, **place, **options})
        names = tuple(f"{i}: {type(layer).__name__}({layer.extra_repr()})" for i, layer, _ in steps)
        about: list[Any] = [names, _numbers(original), _numbers(original, MULTIPLIED), *rest]
        analytic = Bundled(maps, v.to(**place), None if b is None else b.to(**place), report=Report(*about))
        if train is None or held is None:
            return analytic
        weight, bias = _least_squares(analytic.phi(train).double(), original(train).double())
        fitted, y = Bundled(maps, weight.to(**place), bias.to(**place)), original(held).double()
        variance = (y - y.mean(0)).square().sum().clamp_min(1e-300)
        errors = [float((candidate(held).double() - y).square().sum() / variance) for candidate in (analytic, fitted)]
    if method == "auto":  # an analytic tower out of its reach may overflow, and NaN < 1 is False
        method = "analytic" if errors[0] < errors[1] else "fitted"
    chosen = analytic if method == "analytic" else fitted
    chosen.report = Report(*[*about, method, *errors, len(held)])
    return chosen


def _numbers(module: nn.Module, ends: tuple[str, ...] = ("",)) -> int:
    return sum(tensor.numel() for key, tensor in module.state_dict().items() if key.endswith(ends))


def _steps(module: Any, start: int, stop: int | None, activations: Mapping[type[nn.Module], Any]) -> list[Any]:
    """(position, layer, function if it is an activation) of the layers that compute something, each one checked."""
    plain = getattr(type(module), "forward", None) is nn.Sequential.forward
    if not plain and not isinstance(module, nn.ModuleList | list | tuple):
        raise TypeError(f"module must be nn.Sequential, nn.ModuleList or a list of layers; got {type(module).__name__}")
    steps: list[Any] = []
    for position, layer in [(i, module[i]) for i in range(len(module))[start:stop] if type(module[i]) not in SKIPPED]:
        kind, activation = type(layer), None
        if kind in activations or kind in ELEMENTWISE:
            if not steps:
                raise ValueError(f"layer {position} is {kind.__name__}; a bundle starts with a Linear or SNNKLinear")
            layer = copy.copy(layer)
            layer.inplace = False  # or trying it out would change the points that it is tried on
            activation = resolve_activation(activations.get(kind, layer))
        elif getattr(kind, "forward", None) not in (nn.Linear.forward, SNNKLinear.forward):
            raise TypeError(
                f"layer {position} is {kind.__name__}; bundle takes Linear, SNNKLinear, activations, Dropout and "
                "Identity. Stop before it, or, if it acts on each number alone, name its class in activations="
            )
        steps.append((position, layer, activation))
    if not steps:
        raise ValueError(f"no Linear or SNNKLinear from start={start} to stop={stop} of {len(module)} layers")
    return steps


def _tower(steps: list[Any], u: Any, sizes: Any, kinds: Any, method: str, options: dict[str, Any]) -> Any:
    """The paper's recursion: Vu + b is always what the layers so far give, of features u that the maps so far give."""
    count = sum(activation is not None for _, _, activation in steps)
    sizes, kinds = (list(a) if isinstance(a, list | tuple) else [a] * count for a in (sizes, kinds))
    if len(sizes) != count or len(kinds) != count:
        raise ValueError(f"num_features and feature_map are one for all or a list of {count}; got {sizes} and {kinds}")
    maps, predicted, refusal, v, b = cast(Any, ([], [], None, None, None))
    for position, layer, activation in steps:
        new: list[Any] = []
        if isinstance(layer, nn.Linear):
            v, b = _behind(layer, v, b)
        elif isinstance(layer, SNNKLinear):
            if v is not None:
                new.append(Affine(v.shape[1], v.shape[0], device=options["device"], dtype=options["dtype"]))
                new[0]._fill(projection=torch.cat([v, torch.zeros_like(v[:, :1]) if b is None else b[:, None]], 1))
            new.append(copy.deepcopy(layer.feature_map))
            v, b = layer.weight.double(), None
        else:
            (d, m), kind = (v.shape[1], sizes[len(predicted)]), kinds[len(predicted)]
            make = kind if callable(kind) else _checks.look_up(kind, MAKERS, "feature map")
            new = [make_feature_map(make(d, m, activation, **options), d, m)]
            if isinstance(new[0], URF | ProjectedURF):
                new[0].calibrate(u, v, b)
            if u is None and maps and isinstance(new[0], ProjectedURF) and new[0].on_error != "ignore":
                text = f"layer {position}: error unknown, for features are not Gaussian inputs; pass calibrate="
                warnings.warn(text, stacklevel=3)
            options = {**options, "seed": options["seed"] + (1 << 32)}  # rows of the next map are independent
            predicted.append(float(new[0].predicted_error(v, b).mean()) if hasattr(new[0], "predicted_error") else None)
            v, reason = _psi(new[0], v, b, strict=u is None or method == "analytic")
            b, refusal = None, refusal or (reason and f"layer {position}: {reason}")
        u, maps = u if u is None else nn.Sequential(*new)(u), maps + new
    return maps, v, b, tuple(predicted), refusal


def _behind(linear: nn.Linear, v: Any, b: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of W (Vu + b) + c."""
    weight, c = linear.weight.double(), None if linear.bias is None else linear.bias.double()
    return (weight, c) if v is None else (weight @ v, c if b is None else weight @ b + (0 if c is None else c))


def _psi(fm: FeatureMap, v: Any, b: Any, strict: bool) -> tuple[Tensor, str | None]:
    """psi in float64, and why it is not to be trusted; if `strict`, the map warns and refuses instead."""
    if strict:
        return fm.psi(v, b).double(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the held-out error says it better
        try:
            psi, reason = fm.psi(v, b), None
        except UnreachableError as error:
            psi, reason = fm.psi(v, b, check=False), str(error)
    return torch.nan_to_num(psi, 0.0, 0.0, 0.0).double(), reason if psi.isfinite().all() else "psi overflows"


def _least_squares(phi: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Ridge regression of y (n, out) on phi (n, m): matrix and intercept; ridge chosen on a quarter of the rows."""
    ridges, first = [10.0**k for k in range(-14, 1)], len(phi) - len(phi) // 4
    for rows in (first, len(phi)):
        mean, level = phi[:rows].mean(0), y[:rows].mean(0)
        values, vectors = torch.linalg.eigh((phi[:rows] - mean).T @ (phi[:rows] - mean))  # serves every ridge
        turned, top = vectors.T @ ((phi[:rows] - mean).T @ (y[:rows] - level)), values[-1].clamp_min(1e-300)
        weights = [(vectors @ (turned / (values.clamp_min(0) + r * top)[:, None])).T for r in ridges]
        if rows == first:
            errors = [float((F.linear(phi[rows:] - mean, w, level) - y[rows:]).square().sum()) for w in weights]
            ridges = [ridges[errors.index(min(errors))]]
    return weights[0], level - weights[0] @ mean


def _arccos_jacobian(fm: Any, x: Tensor, left: Tensor) -> Tensor:
    g = fm.projection[:, : fm.in_features]
    y = F.linear(x, g, fm.projection[:, -1] if fm.augment else None)
    return (left * (torch.zeros_like(y), (y > 0).to(y.dtype), 2 * F.relu(y))[fm.order][..., None, :]) @ g


def _fourier_jacobian(fm: Any, x: Tensor, left: Tensor) -> Tensor:
    """phi = a [cos, sin](rho g.(x - c)), where a is constant, or for URF exp(rho^2 |x - c|^2 / 2) times one."""
    cos, sin = (part[..., None, :] for part in fm._phi(x).chunk(2, -1))
    even, odd = left.chunk(2, -1)  # (*, out, P)
    if not isinstance(fm, URF):
        return (odd * cos - even * sin) @ fm.projection
    x = (x - fm.center)[..., None, :]
    excess = 0.5 * fm.rho.square() * (x.square().sum(-1, keepdim=True) - fm.summary[0].square())
    radial = (even * cos + odd * sin) * fm.rho.square() * (excess < fm.limit)
    return ((odd * cos - even * sin) * fm.rho) @ fm.projection + radial.sum(-1, keepdim=True) * x


# (map, normalised x (*, d), left (*, out, m)) -> left times d phi / dx (*, out, d)
JACOBIANS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Tensor]] = {
    Affine: lambda fm, x, left: left @ fm.projection[:, :-1],
    ArcCosine: _arccos_jacobian,
    ProjectedURF: _fourier_jacobian,
    URF: _fourier_jacobian,
}
CLASSES: dict[str, Any] = {c.__name__: c for c in (Affine, ArcCosine, PowerSeries, ProjectedURF, URF)}  # in files
ARGUMENTS = ("in_features", "num_features", "normalize", "seed", "order", "augment", "coefficients", "bandwidth")


def _config(fm: Any) -> dict[str, Any]:
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
        unknown += ["spectrum"] * (fm.spectrum != "series")
    if unknown:
        raise TypeError(f"a file cannot name the {' and '.join(unknown)} of {config['class']}; save the state_dict()")
    return config


def _from_config(config: dict[str, Any], shape: tuple[int, ...]) -> FeatureMap:
    """A map for the tensors of a file; `shape`, that of its projection, bounds what is allocated here."""
    make = _checks.look_up(config.pop("class"), CLASSES, "feature map")
    d, m = (_checks.positive_int(config[name], name) for name in ("in_features", "num_features"))
    degree = max(len(config.get("coefficients", "")) - 1, 1)
    if d * m * degree > 2 * math.prod(shape):
        raise ValueError(f"a map {d} -> {m} of degree {degree} does not fit its projection of shape {shape}")
    limit, kind = config.pop("limit", None), config.get("projection")
    if kind is not None:  # any projection but this may take d x d numbers for one row
        config["projection"] = replace(_checks.look_up(kind, PROJECTIONS, "projection"), draw=PROJECTIONS["iid"].draw)
    fm = make(**config)
    if kind is not None:
        fm.kind = PROJECTIONS[kind]
    if limit is not None:
        fm.limit = float(limit)
    return fm


def error_bound(bundled: Bundled, layers: Sequence[Any], x: Tensor, *, confidence: float = 0.95) -> list[list[float]]:
    """[bounds, measured]: how far the analytic tower may be from `layers` by depth, and how far it is (appendix B).

    An estimate is a mean X of P independent terms of size <= c: P(|X - EX| >= eps) <= 2 exp(-P eps^2 / (2 c^2)), the
    paper's exponent put right. With a union bound over layers, outputs and inputs, the largest entry of the error is at
    most e_i = eps_i + |EX - f| + Lip(f) |W_i| e_{i-1}: delta is the Lipschitz constant of f on the z that occur, and
    |EX - f| the misfit of the series there. It assumes independent rows: projection="iid"; orthogonal ones err less,
    but not by this proof. c is the largest term seen with these rows, inputs and weights, not one for every draw.

    Args:
        bundled: made with feature_map="urf"; its maps are used, its matrix is not.
        layers, x: the Linear layers and activations that it replaced, net[start:stop], and inputs (*, in).
        confidence: probability, over rows of the maps, that the bounds hold behind every activation and the last layer.

    Example:
        >>> net, x = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(50, 8) / 8
        >>> bundled = bundle(net, num_features=512, feature_map="urf", projection="iid", calibrate=x)
        >>> [measured < bound for bound, measured in zip(*error_bound(bundled, net, x))]
        [True, True]
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1; got {confidence!r}")
    layers = [layer for layer in layers if type(layer) not in SKIPPED]
    maps, widths = list(bundled.maps), [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
    if any(type(fm) is not URF or fm.normalize != "none" for fm in maps) or len(layers) != len(maps) + len(widths):
        raise ValueError(f"layers must be Linear and activations, each activation a URF without normalize; got {maps}")
    u = exact = _checks.matrix(x, bundled.in_features, "input").reshape(-1, bundled.in_features).to(bundled.weight)
    spread = math.sqrt(2 * math.log(2 * len(u) * sum(widths) / (1 - confidence)))
    bound, bounds, measured, v, b = cast(Any, (0.0, [], [], None, None))
    with torch.no_grad():
        for layer in layers:
            z, exact = exact.double(), layer(exact.clone())
            if isinstance(layer, nn.Linear):
                v, b = _behind(layer, v, b)
                bound *= float(layer.weight.abs().sum(1).max())
            else:
                fm, z = maps.pop(0), torch.cat([z, F.linear(u.double(), v, b)])
                u, v, b = fm.phi(u), fm.psi(v, b, check=False).double(), None
                rows, grid = len(fm.rho), torch.linspace(0, 1, 4097).to(z) * (z.max() - z.min() + 1e-6) + z.min()
                c = rows * max(float((p * v).unflatten(1, (2, rows)).sum(1).abs().max()) for p in u.double())
                f, angle = fm.activation(grid), grid[:, None] * (fm.rho * fm.eta).double()
                misfit = f - (angle.cos() @ fm.alpha.double() + angle.sin() @ fm.beta.double()) / rows
                slope = float((f.diff() / grid.diff()).abs().max())
                bound = c * spread / math.sqrt(rows) + float(misfit.abs().max()) + slope * bound
            if not isinstance(layer, nn.Linear) or layer is layers[-1]:
                bounds.append(bound)
                measured.append(float((F.linear(u.double(), v, b) - exact).abs().max()))
    return [bounds, measured]
