r"""Bundling (section 3.3): consecutive layers become one matrix behind one fixed feature map.

x_{i+1} = f_{i+1}(W_i x_i + b_i), i = 0..L-1, is estimated by y = W_bar phi(x), linear in its only matrix:

    phi(x) = Phi_L(... Phi_2(Phi_1(x)) ...),
    W_bar = Psi_L(W_{L-1} ... Psi_2(W_1 Psi_1(W_0, b_0), b_1) ..., b_{L-1})

(the paper writes b_L for the last bias). Psi_1 is (d_1, m_1), so the second map takes W_1 Psi_1 on Phi_1(x) in
R^m_1. The step f(Vu + b) ~ Psi(V, b) . Phi(u) at an activation is the only estimate. Exact to rounding are a
Linear behind a map, W (A Phi) + b = (WA) Phi + b, and an SNNKLinear A_2 Phi_2(.), whose own map is kept behind the
frozen affine map that stood before it, as Phi_2(A_1 Phi_1(x)) is not Phi_2(Phi_1(x)): a stack of SNNKLinear and
Linear layers equals its bundle. The Jacobian is explicit: W_bar DPhi_L ... DPhi_1.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnk import _checks, _io
from snnk.maps import (
    FEATURE_MAPS,
    URF,
    FeatureMap,
    ProjectedURF,
    UnreachableError,
    feature_map_from_config,
    make_calibrated,
    make_feature_map,
)
from snnk.maps.activations import ActivationLike, resolve_activation
from snnk.maps.affine import Affine
from snnk.maps.projections import make_generator
from snnk.nn.linear import SNNKLinear
from snnk.ridge.sums import RidgeStats

FORMAT = "snnk.Bundled/1"
MULTIPLIED = ("weight", "projection")  # the tensors that inputs are multiplied with
SKIPPED = (nn.Identity, nn.Dropout, nn.AlphaDropout)
ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.GELU, nn.LeakyReLU, nn.Softplus, nn.ELU, nn.SELU, nn.Mish)
# names of `bundle` alone, for maps that are made for the activation of each layer
OF_ACTIVATION: dict[str, Callable[..., FeatureMap]] = {"projected": ProjectedURF, "urf": URF}


@dataclass(frozen=True)
class BundleReport:
    """The layers that a bundle replaced, and its squared errors over the variance of outputs: a constant has 1."""

    layers: tuple[str, ...] = ()  # "position: layer"; "1.0: " is the first of an nn.Sequential in position 1
    numbers: int = 0  # that they store
    multiply_adds: int = 0  # that they take for one input
    predicted: tuple[float | None, ...] = ()  # squared error of psi that each map predicts, mean over outputs
    refusal: str | None = None  # why a map refused its layer; the analytic error is measured all the same
    method: str = "analytic"  # what `weight` is: the psi tower, or "fitted" by least squares
    # Both on `held_out_rows` calibration inputs that neither has seen; None without, or if all have the same output.
    analytic_error: float | None = None
    fitted_error: float | None = None
    held_out_rows: int = 0


class Bundled(nn.Module):
    """Layers in one: frozen feature maps, and a matrix `weight` (out, m) with a `bias` (out,) or None, to train.

    Args:
        maps: feature maps, each on the features of the one before.
        weight, bias, report: (out, m) and (out,), copied, and what was replaced, which `bundle` writes.

    Example:
        >>> bundled = Bundled([URF(8, 16), URF(16, 32)], torch.ones(3, 32))
        >>> x = torch.randn(5, 8)
        >>> bundled(x).shape, bundled.phi(x).shape, bundled.jacobian(x).shape
        (torch.Size([5, 3]), torch.Size([5, 32]), torch.Size([5, 3, 8]))
    """

    def __init__(
        self,
        maps: Sequence[FeatureMap],
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        report: BundleReport | None = None,
    ):
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
        self.num_features, self.out_features, self.report = width, weight.shape[0], report or BundleReport()

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
            inputs.append(u)
            u = fm.phi(u)
        left = self.weight.expand(*x.shape[:-1], -1, -1)
        for fm, u in zip(reversed(self.maps), reversed(inputs), strict=True):
            left = fm.times_jacobian(left, u)
        return left

    def summary(self) -> str:
        """A few lines of text: the replaced layers, numbers and multiply-adds before and after, and the errors."""
        r, trained = self.report, sum(p.numel() for p in self.parameters())
        lines = [
            f"{self.in_features} -> {self.num_features} features -> {self.out_features}, {r.method}; replaces",
            *(f"  {layer}" for layer in r.layers),
            f"numbers stored: {r.numbers:,} -> {trained:,} trained + {_numbers(self) - trained:,} frozen",
            f"multiply-adds for one input: {r.multiply_adds:,} -> {_numbers(self, MULTIPLIED):,}",
            f"predicted squared error of psi, by layer: {[e and float(f'{e:.3g}') for e in r.predicted]}",
        ]
        if r.held_out_rows:
            both = "unknown, the outputs are constant"
            if r.analytic_error is not None and r.fitted_error is not None:
                both = f"{r.analytic_error:.3g} analytic, {r.fitted_error:.3g} fitted"
            lines.append(f"held-out error over variance, {r.held_out_rows} rows: {both}")
        return "\n".join(lines + [f"refused: {r.refusal}"] * bool(r.refusal))

    extra_repr = summary

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write safetensors, the configuration in the metadata, whole or not at all."""
        config = {
            "maps": [fm.to_config() for fm in self.maps],
            "report": asdict(self.report),
            "bias": self.bias is not None,
        }
        _io.write_tensors(path, self.state_dict(), {"format": FORMAT, "config": json.dumps(config)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Bundled:
        """Read what `save` wrote, onto the CPU: known classes only, sizes checked first, no key left over."""
        try:
            with _io.open_tensors(path) as file:
                metadata, keys = file.metadata() or {}, list(file.keys())
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
                config = json.loads(metadata["config"])
                shapes = {key: shape for key, (_, shape) in _io.tensor_header(file).items()}
                maps = [
                    feature_map_from_config(c, shapes[f"maps.{i}.projection"]) for i, c in enumerate(config["maps"])
                ]
                # copies, as products of tensors that begin in the middle of a cache line are rounded otherwise
                tensors = {key: file.get_tensor(key).clone() for key in keys}
            report: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in config["report"].items()}
            # earlier files do not state whether there is a bias; a fitted bundle always has one
            if config.get("bias", report.get("method") == "fitted" or "bias" in keys) != ("bias" in keys):
                raise ValueError(f"it {'has a' if 'bias' in keys else 'lacks its'} bias; copy it or save it again")
            for name in {"weight", "bias"} & set(keys):
                _checks.finite(tensors[name], name)
            bundled = cls(maps, tensors["weight"], tensors.get("bias"), report=BundleReport(**report))
            bundled.load_state_dict(tensors, assign=True)
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"cannot load a bundle from {os.fspath(path)}: {error}") from error
        return bundled


def bundle(
    module: nn.Module | Sequence[nn.Module],
    start: int = 0,
    stop: int | None = None,
    *,
    num_features: int | Sequence[int] | None = None,
    feature_map: Any = "projected",
    calibrate: Tensor | None = None,
    method: str = "auto",
    activations: Mapping[type[nn.Module], ActivationLike] | None = None,
    seed: int = 0,
    **options: Any,
) -> Bundled:
    """Replace `module[start:stop]`, Linear or SNNKLinear layers and activations, by a matrix behind feature maps.

    Args:
        module, start, stop: nn.Sequential, nn.ModuleList or list, left as it is, and the part to replace, a slice.
            An nn.Sequential in it counts as one entry, and is taken layer by layer. Layers with hooks are refused.
        num_features: size of each map, one number for all or a list with one per activation; feature_map likewise. It
            is not needed where there are no activations.
        feature_map: "projected" (ProjectedURF of the layer's activation), "urf" (URF of it), a name in
            FEATURE_MAPS or a callable (in_features, num_features, activation, seed=, device=, dtype=, **options).
        calibrate: typical inputs (*, in). Maps are calibrated on them and their features, and the matrix is fitted
            too; a fifth is held out to measure the errors in `report`, instead of maps' warnings and refusals.
        method: "analytic", "fitted", or "auto": that of less held-out error; "analytic" without inputs.
        activations: more elementwise layers, as {Sine: "sin", nn.ReLU6: F.relu6}. Dropout, Identity are skipped.
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
        maps, v, b, predicted, refusal = _tower(
            steps, train, num_features, feature_map, method, {"seed": seed, **place, **options}
        )
        report = BundleReport(
            layers=tuple(f"{i}: {type(layer).__name__}({layer.extra_repr()})" for i, layer, _ in steps),
            numbers=_numbers(original),
            multiply_adds=_numbers(original, MULTIPLIED),
            predicted=predicted,
            refusal=refusal,
        )
        analytic = Bundled(maps, v.to(**place), None if b is None else b.to(**place), report=report)
        if train is None or held is None:
            return analytic
        phi, y = analytic.phi(train), original(train)
        # With few rows GCV takes too small a ridge: below two per feature its held-out error was over 1.1 times that of
        # a ridge chosen on a quarter in 40 of 144 trials, at worst 7 times; with folds in none. Above they are equal.
        folds = 5 if len(phi) < 2 * phi.shape[1] else 0
        stats = RidgeStats(phi.shape[1], y.shape[1], folds=folds, device=phi.device).update(phi, y)
        solution, y = stats.solve("kfold" if folds else "gcv"), original(held).double()
        fitted = Bundled(maps, solution.weight.to(**place), solution.bias.to(**place))
        squared = [float((candidate(held).double() - y).square().sum()) for candidate in (analytic, fitted)]
        variance = float((y - y.mean(0)).square().sum())
        if (y - y[0]).abs().max() <= 8 * torch.finfo(place["dtype"]).eps * y.abs().max():
            variance = 0.0  # constant but for the rounding of the layers, and of the mean
        errors = [error / variance if variance else None for error in squared]
    if method == "auto":  # an analytic tower out of its reach may overflow, and NaN < 1 is False
        method = "analytic" if squared[0] < squared[1] else "fitted"
    chosen = analytic if method == "analytic" else fitted
    chosen.report = replace(
        report, method=method, analytic_error=errors[0], fitted_error=errors[1], held_out_rows=len(held)
    )
    return chosen


def _numbers(module: nn.Module, ends: tuple[str, ...] = ("",)) -> int:
    return sum(tensor.numel() for key, tensor in module.state_dict().items() if key.endswith(ends))


def _steps(
    module: Any, start: int, stop: int | None, activations: Mapping[type[nn.Module], ActivationLike]
) -> list[Any]:
    """(position, layer, function if it is an activation) of the layers that compute something, each checked."""
    if not _is_sequential(module) and not isinstance(module, nn.ModuleList | list | tuple):
        raise TypeError(f"module must be nn.Sequential, nn.ModuleList or a list of layers; got {type(module).__name__}")
    steps: list[Any] = []
    for position, layer in _flat((str(i), module[i]) for i in range(len(module))[start:stop]):
        kind, activation = type(layer), None
        if kind in SKIPPED:
            continue
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


def _is_sequential(layer: Any) -> bool:  # not one with a forward of its own
    return getattr(type(layer), "forward", None) is nn.Sequential.forward


def _flat(layers: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(position, layer), with those of an nn.Sequential in its place; what has hooks is refused."""
    for position, layer in layers:
        if getattr(layer, "_forward_hooks", None) or getattr(layer, "_forward_pre_hooks", None):
            raise ValueError(
                f"layer {position}, {type(layer).__name__}, has forward hooks, which a bundle would not call: "
                "remove them (handle.remove(), nn.utils.remove_weight_norm) or stop before it"
            )
        if _is_sequential(layer):
            yield from _flat((f"{position}.{i}", inner) for i, inner in enumerate(layer))
        else:
            yield position, layer


def _tower(
    steps: list[Any], u: Any, sizes: Any, kinds: Any, method: str, options: dict[str, Any]
) -> tuple[list[FeatureMap], Tensor, Tensor | None, tuple[float | None, ...], str | None]:
    """The paper's recursion: Vu + b is what the layers so far give, of features u that the maps so far give."""
    count = sum(activation is not None for _, _, activation in steps)
    if sizes is None and count:
        raise ValueError(f"name num_features=, the size of {count} maps: one number for all or a list of {count}")
    sizes, kinds = (list(a) if isinstance(a, list | tuple) else [a] * count for a in (sizes, kinds))
    if len(sizes) != count or len(kinds) != count:
        raise ValueError(f"num_features and feature_map are one for all or a list of {count}; got {sizes} and {kinds}")
    maps: list[FeatureMap] = []
    predicted: list[float | None] = []
    refusal: str | None = None
    v: Any = None  # a Tensor from the first layer on, which is no activation
    b: Tensor | None = None
    for position, layer, activation in steps:
        new: list[Any] = []
        if isinstance(layer, nn.Linear):
            v, b = behind(layer, v, b)
        elif isinstance(layer, SNNKLinear):
            if v is not None:
                new.append(Affine(v.shape[1], v.shape[0], device=options["device"], dtype=options["dtype"]))
                new[0]._fill(projection=torch.cat([v, torch.zeros_like(v[:, :1]) if b is None else b[:, None]], 1))
            new.append(copy.deepcopy(layer.feature_map))
            v, b = layer.weight.double(), None
        else:
            (d, m), kind = (v.shape[1], sizes[len(predicted)]), kinds[len(predicted)]
            if callable(kind):  # it gets the device of the layers, and may use what it makes
                new = [make_feature_map(kind(d, m, activation, **options), d, m)]
                if isinstance(new[0], URF | ProjectedURF):
                    new[0].calibrate(u, v, b)
            else:
                _checks.choose(kind, [*FEATURE_MAPS, *OF_ACTIVATION], "feature map")
                make = partial(OF_ACTIVATION[kind], activation=activation) if kind in OF_ACTIVATION else kind
                new = [make_calibrated(make, d, m, u, v, b, **options)]
            if u is None and maps and isinstance(new[0], ProjectedURF) and new[0].on_error != "ignore":
                text = f"layer {position}: error unknown, for features are not Gaussian inputs; pass calibrate="
                warnings.warn(text, stacklevel=3)
            options = {**options, "seed": options["seed"] + (1 << 32)}  # rows of the next map are independent
            predicted.append(float(new[0].predicted_error(v, b).mean()) if hasattr(new[0], "predicted_error") else None)
            v, reason = _psi(new[0], v, b, strict=u is None or method == "analytic")
            b, refusal = None, refusal or (reason and f"layer {position}: {reason}")
        u, maps = u if u is None else nn.Sequential(*new)(u), maps + new
    return maps, v, b, tuple(predicted), refusal


def behind(linear: nn.Linear, v: Any, b: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of W (Vu + b) + c."""
    weight, c = linear.weight.double(), None if linear.bias is None else linear.bias.double()
    return (weight, c) if v is None else (weight @ v, c if b is None else weight @ b + (0 if c is None else c))


def _psi(fm: FeatureMap, v: Any, b: Any, strict: bool) -> tuple[Tensor, str | None]:
    """psi in float64, and why it is not to be trusted; if `strict`, the map warns and refuses instead."""
    if strict:
        return fm.psi(v, b).double(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the held-out error is measured instead
        try:
            psi, reason = fm.psi(v, b), None
        except UnreachableError as error:
            psi, reason = fm.psi(v, b, check=False), str(error)
    return torch.nan_to_num(psi, 0.0, 0.0, 0.0).double(), reason if psi.isfinite().all() else "psi overflows"
