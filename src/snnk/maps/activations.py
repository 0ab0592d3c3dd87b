r"""Activations and their spectra (section 3.1 and the appendix on Fourier transforms).

With FT_f(xi) = \int f(z) exp(-2 pi i xi z) dz, every activation here obeys

    f(z) = f(0) + slope z + \int_0^\infty 2 [Re FT (cos(2 pi xi z) - 1) - Im FT sin(2 pi xi z)] dxi

(`slope` is the delta' part; sin and cos are two deltas instead of a density). Transforms of growing or step-like
functions have a pole at 0, so the four parts of the paper need not be integrable; the compensated form above always
is. A short trigonometric series on the range that z takes, `Activation.series`, is the better estimator, even of sin
and cos; `fit_series` explains why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import special
from torch import Tensor, nn

from snnk._checks import look_up
from snnk.maps.series import Series, fit_series

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Spectrum:
    """The Fourier transform of an activation: deltas, a density, a delta' (`slope`) and the order of its pole at 0."""

    atoms: tuple[tuple[float, complex], ...] = ()
    density: Callable[[Array], Array] | None = None
    slope: float = 0.0
    order: int = 0

    def parts(self, xi: Array) -> tuple[Array, Array, Array, Array]:
        """The non-negative FT^{re,+}, FT^{re,-}, FT^{im,+}, FT^{im,-} of the density at `xi` (section 3.1)."""
        ft = np.zeros(np.shape(xi), complex) if self.density is None else self.density(np.asarray(xi, float))
        re, im = np.real(ft), np.imag(ft)
        return np.maximum(re, 0), np.maximum(-re, 0), np.maximum(im, 0), np.maximum(-im, 0)


@dataclass(frozen=True)
class Activation:
    """An activation: exact `f`, spectrum, Taylor coefficients and reach.

    Args:
        name: how it is printed.
        f: the function itself, elementwise on tensors.
        spectrum: its Fourier transform, or None where it has no usable one.
        taylor: number of terms -> coefficients at 0, or None.
        reach: the largest |x||w| for which sampling its own transform (balanced norms) has finite variance.
        range: the interval of z on which it will be used, if it is known.
        recipe: for those of ACTIVATIONS and `leaky_relu`, how to make them again.

    Example:
        >>> ACTIVATIONS["sin"](torch.zeros(2))
        tensor([0., 0.])
    """

    name: str
    f: Callable[[Tensor], Tensor] = field(repr=False)
    spectrum: Spectrum | None = field(default=None, repr=False)
    taylor: Callable[[int], Array] | None = field(default=None, repr=False)
    reach: float = 0.0
    range: tuple[float, float] | None = None
    recipe: tuple[Any, ...] = field(default=(), repr=False)

    def __reduce__(self) -> Any:
        """An activation with a recipe is pickled as that recipe, because its lambdas cannot be pickled."""
        if self.recipe:
            return _remake, (self.recipe, self.range)
        return Activation, tuple(getattr(self, f.name) for f in fields(self))

    def __call__(self, z: Tensor) -> Tensor:
        return self.f(z)

    def evaluate(self, z: Array) -> Array:
        """f on a numpy array, in float64."""
        with torch.no_grad(), torch.device("cpu"):
            values = np.asarray(self.f(torch.from_numpy(np.ascontiguousarray(z, dtype=np.float64))))
        if values.shape != np.shape(z) or not np.isfinite(values).all():
            where = f"({np.min(z):.3g}, {np.max(z):.3g})"
            raise ValueError(
                f"{self.name} must give a finite number for each in {where}; pass the range= it is used on"
            )
        return values

    def series(self, low: float, high: float, kappa: float = 1.0, projections: int = 64) -> Series:
        """Trigonometric series for `projections` projections at |x||w| = kappa, on z in [low, high].

        The one of least predicted error: fitted, see `fit_series`, or for sin and cos their own where that is better.
        """
        return self.series_on(np.linspace(low, high, 512), kappa, projections)

    def series_on(self, z: Array, kappa: float, projections: int, dim: int | None = None) -> Series:
        """The series of `series` on a sample of the values of z; `dim` is the size of blocks of orthogonal rows."""
        f = self.evaluate(z)
        fitted, own = fit_series(z, f, kappa, projections, dim), self.own_series(projections)
        error = float(np.mean((f - fitted(z)) ** 2)) + fitted.variance(kappa, dim)
        return own if own is not None and own.variance(kappa, dim) < error else fitted

    def own_series(self, projections: int) -> Series | None:
        """The series that is the function itself, on any range, if its spectrum is nothing but pairs of deltas."""
        s = self.spectrum
        if s is None or s.density is not None or s.slope or not s.atoms or any(xi == 0 for xi, _ in s.atoms):
            return None
        xi, weight = (np.array(a) for a in zip(*((xi, w) for xi, w in s.atoms if xi > 0), strict=True))
        if len(xi) > projections:
            return None
        counts = np.array([len(share) for share in np.array_split(np.arange(projections), len(xi))])
        return Series(2 * math.pi * xi, 2 * weight.real, -2 * weight.imag, counts)

    def windowed(self, low: float, high: float) -> Spectrum:
        """Transform of f times a smooth window that is 1 on [low, high] to 2e-5 (the appendix's way out for ReLU)."""
        half, mid = (high - low) / 2, (high + low) / 2
        edge = half / 2
        z = np.linspace(mid - half - 6 * edge, mid + half + 6 * edge, 2049)
        window = (special.erf((z - mid + half) / edge + 3) - special.erf((z - mid - half) / edge - 3)) / 2
        values = self.evaluate(z) * window * (z[1] - z[0])

        def density(xi: Array) -> Array:
            return np.exp(-2j * math.pi * xi[..., None] * z) @ values

        return Spectrum(density=density)


ActivationLike = str | Activation | Callable[[Tensor], Tensor]


def _convolved_tanh(poly: Array, n: int) -> Array:
    """Taylor coefficients of tanh(p(z)), p(0) = 0, from t' = p'(1 - t^2)."""
    p = np.zeros(n)
    p[: min(n, len(poly))] = poly[:n]
    slope = p[1:] * np.arange(1, n)
    t = np.zeros(n)
    for k in range(n - 1):
        rest = -np.convolve(t[: k + 1], t[: k + 1])[: k + 1]
        rest[0] += 1
        t[k + 1] = slope[: k + 1] @ rest[::-1] / (k + 1)
    return t


def _tanh_taylor(n: int) -> Array:
    return _convolved_tanh(np.array([0.0, 1.0]), n)


def _sin_taylor(n: int, phase: int = 0) -> Array:
    return np.array([(0, 1, 0, -1)[(k + phase) % 4] / math.factorial(k) for k in range(n)])


def _erf_taylor(n: int) -> Array:
    a = np.zeros(n)
    for k in range(1, n, 2):
        a[k] = 2 / math.sqrt(math.pi) * (-1) ** (k // 2) / (math.factorial(k // 2) * k)
    return a


def _sigmoid_taylor(n: int) -> Array:
    a = _tanh_taylor(n) * 0.5 ** (np.arange(n) + 1)
    a[0] = 0.5
    return a


def _softplus_taylor(n: int) -> Array:
    return np.concatenate([[math.log(2)], _sigmoid_taylor(n)[: n - 1] / np.arange(1, n)])[:n]


def _times_z(a: Array) -> Array:
    return np.concatenate([[0.0], a[:-1]])


def _half_plus(a: Array) -> Array:
    """(1 + a(z)) z / 2 as a series."""
    a = a / 2
    a[0] += 0.5
    return _times_z(a)


_GELU_TANH = math.sqrt(2 / math.pi) * np.array([0.0, 1.0, 0.0, 0.044715])


def _gelu_tanh_density(xi: Array) -> Array:
    """FT[f''] / (2 pi i xi)^2 by the trapezoid rule, which is exact to rounding for a smooth fast-decaying f''."""
    z = np.linspace(-12, 12, 4097)
    _, a, _, b = _GELU_TANH
    t = np.tanh(a * z + b * z**3)
    dp, ddp, s = a + 3 * b * z**2, 6 * b * z, 1 - t**2
    second = s * dp + z / 2 * (s * ddp - 2 * t * s * dp**2)
    ft = np.cos(2 * math.pi * xi[..., None] * z) @ second * (z[1] - z[0])
    return -ft / (2 * math.pi * xi) ** 2


def _csch(a: Array) -> Array:
    return 1 / np.sinh(np.minimum(np.abs(a), 700.0)) * np.sign(a)


def leaky_relu(slope: float = 0.01) -> Activation:
    """LeakyReLU with the given negative slope; slope 0 is ReLU. Its own transform never has finite variance."""

    return Activation(
        "relu" if slope == 0 else "leaky_relu",
        lambda z: F.leaky_relu(z, slope),
        Spectrum(density=lambda xi: -(1 - slope) / (2 * math.pi * xi) ** 2, slope=(1 + slope) / 2, order=2),
        recipe=("leaky_relu", slope),
    )


_PI = math.pi
_ATOM = 1 / (2 * _PI)

ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("sin", torch.sin, Spectrum(((-_ATOM, 0.5j), (_ATOM, -0.5j))), _sin_taylor, math.inf),
        Activation(
            "cos", torch.cos, Spectrum(((-_ATOM, 0.5 + 0j), (_ATOM, 0.5 + 0j))), lambda n: _sin_taylor(n, 1), math.inf
        ),
        leaky_relu(0.0),
        leaky_relu(),
        Activation(
            "gelu",
            F.gelu,
            Spectrum(
                density=lambda xi: -np.exp(-2 * (_PI * xi) ** 2) * (1 + 1 / (2 * _PI * xi) ** 2), slope=0.5, order=2
            ),
            lambda n: _half_plus(_erf_taylor(n) * 0.5 ** (np.arange(n) / 2)),
            math.inf,
        ),
        Activation(
            "gelu_tanh",
            lambda z: F.gelu(z, approximate="tanh"),
            Spectrum(density=_gelu_tanh_density, slope=0.5, order=2),
            lambda n: _half_plus(_convolved_tanh(_GELU_TANH, n)),
            # the density decays like exp(-reach omega), reach the distance of tanh(p(z))'s first pole to the real axis
            float(np.min(np.abs(np.roots(_GELU_TANH[::-1].astype(complex) - np.array([0, 0, 0, 0.5j * _PI])).imag))),
        ),
        Activation(
            "tanh",
            torch.tanh,
            Spectrum(density=lambda xi: -1j * _PI * _csch(_PI**2 * xi), order=1),
            _tanh_taylor,
            _PI / 2,
        ),
        Activation(
            "sigmoid",
            torch.sigmoid,
            Spectrum(((0.0, 0.5 + 0j),), lambda xi: -1j * _PI * _csch(2 * _PI**2 * xi), order=1),
            _sigmoid_taylor,
            _PI,
        ),
        Activation(
            "silu",
            F.silu,
            Spectrum(
                density=lambda xi: -(_PI**2) * _csch(2 * _PI**2 * xi) / np.tanh(2 * _PI**2 * xi), slope=0.5, order=2
            ),
            lambda n: _times_z(_sigmoid_taylor(n)),
            _PI,
        ),
        Activation(
            "softplus",
            F.softplus,
            Spectrum(density=lambda xi: -_csch(2 * _PI**2 * xi) / (2 * xi), slope=0.5, order=2),
            _softplus_taylor,
            _PI,
        ),
        Activation(
            "erf",
            torch.erf,
            Spectrum(density=lambda xi: -1j * np.exp(-((_PI * xi) ** 2)) / (_PI * xi), order=1),
            _erf_taylor,
            math.inf,
        ),
        Activation(
            "identity",
            lambda z: z,
            Spectrum(slope=1.0),
            lambda n: np.eye(1, n, 1)[0] if n > 1 else np.zeros(n),
            math.inf,
        ),
    )
}

ACTIVATIONS = {name: a if a.recipe else replace(a, recipe=(name,)) for name, a in ACTIVATIONS.items()}


def _remake(recipe: tuple[Any, ...], range: tuple[float, float] | None) -> Activation:
    made = leaky_relu(recipe[1]) if len(recipe) > 1 else ACTIVATIONS[recipe[0]]
    return made if range is None else replace(made, range=range)


_FUNCTIONS: dict[Any, str] = {F.tanh: "tanh", F.sigmoid: "sigmoid", F.relu: "relu", torch.relu: "relu"}
_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.SiLU: "silu",
    nn.Identity: "identity",
}


def resolve_activation(activation: ActivationLike, range: tuple[float, float] | None = None) -> Activation:
    """An Activation from a name, an Activation, a torch activation module or any elementwise callable.

    Args:
        activation: "gelu", ACTIVATIONS["gelu"], nn.GELU(), torch.sin, lambda z: z**2, ...
        range: the (low, high) that z will take, if known.

    Example:
        >>> resolve_activation(nn.GELU(approximate="tanh")).name
        'gelu_tanh'
    """
    if isinstance(activation, str):
        found = look_up(activation, ACTIVATIONS, "activation")
    elif isinstance(activation, Activation):
        found = activation
    elif isinstance(activation, nn.Module) and type(activation) in _MODULES:
        found = ACTIVATIONS[_MODULES[type(activation)]]
    elif isinstance(activation, nn.GELU):
        found = ACTIVATIONS["gelu" if activation.approximate == "none" else "gelu_tanh"]
    elif isinstance(activation, nn.LeakyReLU):
        found = leaky_relu(activation.negative_slope)
    elif isinstance(activation, nn.Softplus) and activation.beta == 1:
        found = ACTIVATIONS["softplus"]
    elif isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        raise TypeError(f"{type(activation).__name__} has parameters of its own; pass a plain function of one tensor")
    elif callable(activation) and activation in _FUNCTIONS:
        found = ACTIVATIONS[_FUNCTIONS[activation]]
    elif callable(activation):
        found = next((a for a in ACTIVATIONS.values() if a.f is activation), None) or Activation(
            getattr(activation, "__name__", type(activation).__name__), activation
        )
    else:
        raise TypeError(
            f"activation must be a name, an Activation, a module or a callable; got {type(activation).__name__}"
        )
    if range is not None:
        try:
            low, high = (float(end) for end in range)
        except (TypeError, ValueError):
            low = high = math.nan
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"range must be two finite numbers, low < high; got {range!r}")
        found = replace(found, range=(low, high))
    return found
