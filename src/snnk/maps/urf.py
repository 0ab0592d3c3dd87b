r"""Universal random features (section 3.1), in real arithmetic.

f(z) = sum_k alpha_k cos(omega_k z) + beta_k sin(omega_k z), or the same with frequencies sampled from the Fourier
transform and importance weights. With u = rho x, v = (omega / rho) w and g ~ N(0, I), the paper's Lambda_g with A = 0
gives exp(i omega x.w) = E[exp(i g.u + |u|^2/2) exp(g.v - |v|^2/2)]. A frequency and its negative are conjugate, so
their sum is real, with two real features per projection (a complex layer stores four):

    phi(x) = exp(|u|^2/2) [cos g.u, sin g.u],
    psi(w, b) = exp(g.v - |v|^2/2) [alpha cos t + beta sin t, beta cos t - alpha sin t],    t = omega b.

Three things lower the error at no cost in phi. Antithetic pairs +g, -g turn exp(g.v) in psi into cosh and sinh.
Orthogonal g of length sqrt(d) take the error of x.w out of every full block. And rho = sqrt(omega |w| / |x|) balances
the norms: the second moment of a projection is cosh|u|^2 cosh|v|^2, which with |u||v| given is least at |u| = |v|.
Inputs are taken relative to their mean c, which is exact: w.x + b = w.(x - c) + (b + w.c), and |x - c| replaces |x|.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from snnk import _checks
from snnk.maps.activations import ActivationLike, resolve_activation
from snnk.maps.base import WARN, FeatureMap, at_least_float, named_in_files
from snnk.maps.projections import ProjectionLike, resolve_projection
from snnk.maps.sampled import Sampled
from snnk.maps.series import Array, Series, block_factor

MOST_FEATURES = 1 << 17


@dataclass(frozen=True)
class Variant:
    """The choices between the paper's estimator and the default one; see `URF.paper`."""

    spectrum: str | Series | Sampled = "series"
    antithetic: bool = True
    rho: str = "balanced"
    A: float | str = 0.0

    def __post_init__(self) -> None:
        _checks.choose(self.rho, ["balanced", "paper"], "rho")
        if self.A != "auto" and not (isinstance(self.A, int | float) and -math.inf < self.A <= 0):
            raise ValueError(f"A must be a finite number <= 0 or 'auto'; got {self.A!r}")


@named_in_files
class URF(FeatureMap):
    """Features of f(w.x + b) for any activation, with a predicted error.

    Args:
        in_features: size d of inputs and weights.
        num_features: number m of real features, two per projection.
        activation: name, Activation, torch module or elementwise callable.
        x_norm, w_norm: typical |x| and |w|; `calibrate` measures them. Far from the truth, the estimate is still right
            but its error grows.
        range: (low, high) that z = w.x + b takes; default +-(x_norm w_norm), or the activation's own range. Where it is
            known, from here or from `calibrate`, sin and cos are fitted like all others if that has less error.
        projection: name in PROJECTIONS, a Projection, or a callable; default "orthogonal", below four dimensions, where
            the bias of rows of one length is large, "orthogonal_chi".
        on_error, normalize: see FeatureMap; norms and range are meant after it.
        seed, device, dtype: of the map.

    Example:
        >>> fm = URF(8, 512, "tanh", x_norm=0.5, w_norm=0.5)
        >>> x, w = torch.full((1, 8), 0.15), torch.full((1, 8), 0.15)
        >>> bool((fm.phi(x) @ fm.psi(w).T - torch.tanh(x @ w.T)).abs() < 0.05)
        True
    """

    center: Tensor
    rho: Tensor
    eta: Tensor
    alpha: Tensor
    beta: Tensor
    log_gain: Tensor
    summary: Tensor

    def __init__(
        self,
        in_features: int,
        num_features: int,
        activation: ActivationLike = "gelu",
        *,
        x_norm: float = 1.0,
        w_norm: float = 1.0,
        range: tuple[float, float] | None = None,
        projection: ProjectionLike | None = None,
        on_error: str = "raise",
        normalize: str | None = None,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features, _checks.even_features(num_features), normalize=normalize, on_error=on_error, seed=seed
        )
        self.activation = resolve_activation(activation, range)
        self.kind = resolve_projection(projection or ("orthogonal" if in_features >= 4 else "orthogonal_chi"))
        self.variant = Variant()
        # An input so long that its estimate would be noise, e^10 times the typical variance, must not break training.
        # A map whose rows were asked to be Gaussian keeps its promise to be unbiased for every input instead.
        self.limit = math.inf if projection is not None and self.kind.gaussian_rows else 5.0
        self.norms = _checks.positive(x_norm, "x_norm"), _checks.positive(w_norm, "w_norm")
        rows = num_features // 2
        for name, shape in {
            "projection": (rows, in_features),
            "center": (in_features,),
            "rho": (rows,),
            "eta": (rows,),
            "alpha": (rows,),
            "beta": (rows,),
            "log_gain": (rows,),
            "summary": (6,),  # x_norm, w_norm, low, high, squared misfit of the series, variance of f
        }.items():
            self.register_buffer(name, torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def paper(
        cls,
        in_features: int,
        num_features: int,
        activation: ActivationLike = "sin",
        *,
        spectrum: str | Series = "sampled",
        proposal: Any = None,
        block_size: int = 1,
        antithetic: bool = False,
        rho: str = "paper",
        A: float | str = 0.0,
        projection: ProjectionLike | None = "iid",
        on_error: str = "ignore",
        device: Any = None,
        **options: Any,
    ) -> URF:
        """The paper's estimator to the letter, and what lies between it and URF, one choice at a time.

        Args:
            in_features, num_features, activation: as for URF, with two real features per projection.
            spectrum: "sampled" (frequencies drawn from the transform), "series" (fitted, as in URF) or a Series.
            proposal, block_size: arguments of Sampled.
            antithetic: average over +g and -g in psi.
            rho: "paper" (rho = 2 pi i xi and eta = 1) or "balanced".
            A: the paper's exponent on |g|^2, <= 0, or "auto" for the best. It lowers the error by 5 % at d = 16 and by
                nothing at d = 2000, and it needs Gaussian rows.
            projection, on_error, **options: arguments of URF.

        Example:
            >>> URF.paper(8, 16, "sin").psi(torch.ones(3, 8)).shape
            torch.Size([3, 16])
        """
        options |= {"projection": projection, "on_error": on_error}
        fm = cls(in_features, num_features, activation, device="meta", **options)  # drawn below, as the variant decides
        if not isinstance(spectrum, Series):
            _checks.choose(spectrum, ["sampled", "series"], "spectrum")
        drawn = Sampled(proposal, block_size) if spectrum == "sampled" else spectrum
        fm._set_variant(Variant(drawn, antithetic, rho, A))
        fm.to_empty(device=torch.get_default_device() if device is None else device).reset_parameters()
        return fm

    def _set_variant(self, variant: Variant) -> None:
        if variant.A != 0 and not self.kind.gaussian_rows:
            raise ValueError(
                f"A = {variant.A!r} needs Gaussian rows; {self.kind.name!r} has none. Use 'orthogonal_chi' or 'iid'"
            )
        self.variant = variant
        if isinstance(variant.spectrum, Sampled):
            self.limit = math.inf

    @property
    def x_norm(self) -> Tensor:
        """The typical |x - mean| that the map was made for."""
        return self.summary[0]

    @property
    def w_norm(self) -> Tensor:
        """The typical |w| that the map was made for."""
        return self.summary[1]

    @property
    def z_range(self) -> tuple[float, float]:
        """The (low, high) of w.x + b that the series was fitted on."""
        low, high = self.summary[2:4].tolist()
        return low, high

    @property
    def misfit(self) -> Tensor:
        """Mean squared difference of the activation and its series on that range."""
        return self.summary[4]

    @property
    def activation_variance(self) -> Tensor:
        """The variance of the activation on that range."""
        return self.summary[5]

    @property
    def unbiased(self) -> bool:
        if not self.kind.gaussian_rows or math.isfinite(self.limit) or self.summary.is_meta:
            return False
        if isinstance(self.variant.spectrum, Sampled):
            own = self.activation.spectrum
            return own is not None and own.order <= 1 and not own.slope
        return float(self.misfit) == 0

    def _reset(self) -> None:
        x_norm, w_norm = self.norms
        low, high = self.activation.range or (-x_norm * w_norm, x_norm * w_norm)
        known = self.activation.range is not None
        self._build(x_norm, w_norm, np.linspace(low, high, 512), torch.zeros(self.in_features), known)

    def calibrate(self, x: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None) -> URF:
        """Set mean, norms and range from inputs (n, d) and a layer's weights, either of which may be missing.

        What is missing is taken from the constructor's arguments, not from an earlier call.

        Example:
            >>> x, w = torch.rand(100, 8), torch.rand(3, 8) / 2
            >>> URF(8, 256, "sin").calibrate(x, w).psi(w).shape
            torch.Size([3, 256])
        """
        x, weight, bias = self._calibration(x, weight, bias)
        x_norm, w_norm = self.norms
        center = torch.zeros(self.in_features, dtype=torch.float64, device="cpu")
        if x is not None:
            center, x_norm = self._center_and_norm(x)
        low, high = -x_norm * w_norm, x_norm * w_norm
        z: Array | None = None
        if weight is not None and bias is not None:
            w_norm = float(weight.square().sum(1).mean().sqrt().clamp_min(1e-6))
            if x is None:  # and so the mean is 0
                span = x_norm * float(weight.norm(dim=1).max())
                low, high = float(bias.min()) - span, float(bias.max()) + span
            else:
                sample = _thin(x, 1024) @ _thin(weight, 256).T + _thin(bias, 256)
                z = np.quantile(sample.numpy(), np.linspace(0, 1, 2048))
        if self.activation.range is not None:
            (low, high), z = self.activation.range, None
        z = np.linspace(low, high, 512) if z is None else z
        with torch.no_grad(), torch.device("cpu"):
            known = weight is not None or self.activation.range is not None
            self._build(x_norm, w_norm, z, center, known)
        return self

    def _build(self, x_norm: float, w_norm: float, z: Array, center: Tensor, known: bool) -> None:
        """Choose frequencies and draw rows for z in a sample; unless its range is `known`, sin and cos stay exact."""
        generator = self._generator()
        projections = self.num_features // 2
        f = self.activation.evaluate(z)
        if isinstance(self.variant.spectrum, Sampled):
            omega, alpha, beta = self.variant.spectrum.rows(
                self.activation, z.min(), z.max(), projections, generator, x_norm * w_norm
            )
            counts, misfit = [projections], 0.0
        else:
            own = self.activation.own_series(projections)
            if isinstance(self.variant.spectrum, Series):
                series = self.variant.spectrum
            elif own is not None and not known:
                series = own
            else:
                series = self.activation.series_on(z, x_norm * w_norm, projections, self._block)
            counts = series.counts.tolist()
            if sum(counts) != projections:
                raise ValueError(f"the series shares out {sum(counts)} projections; num_features needs {projections}")
            repeat = [
                np.repeat(a, counts) for a in (series.omega, series.alpha, series.beta, projections / series.counts)
            ]
            omega, alpha, beta = repeat[0], repeat[1] * repeat[3], repeat[2] * repeat[3]
            exact = own is not None and np.array_equal(series.omega, own.omega)
            misfit = 0.0 if exact else float(np.mean((f - series(z)) ** 2))
        # each atom has its own blocks of rows, so that the rows of one term are orthogonal
        g = torch.cat([self.kind(n, self.in_features, generator) for n in counts]).double()
        rho = np.sqrt(omega * w_norm / x_norm) if self.variant.rho == "balanced" else omega
        eta = np.sqrt(omega * x_norm / w_norm) if self.variant.rho == "balanced" else np.ones_like(omega)
        a = torch.from_numpy(
            best_A(eta * w_norm, self.in_features) if self.variant.A == "auto" else np.full_like(omega, self.variant.A)
        )
        gain = a * g.square().sum(1) + self.in_features / 4 * torch.log1p(-4 * a)
        self._fill(
            projection=g * (1 - 4 * a).sqrt()[:, None],
            center=center,
            rho=torch.from_numpy(rho),
            eta=torch.from_numpy(eta),
            alpha=torch.from_numpy(alpha),
            beta=torch.from_numpy(beta),
            log_gain=gain,
            summary=torch.tensor([x_norm, w_norm, z.min(), z.max(), misfit, f.var()]),
        )

    @property
    def _block(self) -> int | None:
        return self.in_features if self.kind.sphere_rows else None

    def _phi(self, x: Tensor) -> Tensor:
        g, c = self.projection, self.center
        if x.dtype in (torch.bfloat16, torch.float16):  # few digits: subtract the mean before anything is rounded
            x = at_least_float(x - c.to(x.dtype))
            y = F.linear(x.to(g.dtype), g)
            angle, energy = at_least_float(y), torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
        else:  # the mean as one more row of the projection: no pass over x for x - c
            both = F.linear(x, torch.cat([g, c[None]]))
            y, along = both[..., :-1], at_least_float(both[..., -1:])
            angle = at_least_float(y) - g @ c
            energy = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() - 2 * along + c @ c
        angle = angle * self.rho
        # relative to the typical norm: that constant belongs to psi, and phi stays of order one
        excess = 0.5 * self.rho.square() * (energy - self.x_norm.square())
        amplitude = torch.exp(excess.clamp(max=self.limit) + self.log_gain) * len(self.rho) ** -0.5
        return torch.cat([angle.cos() * amplitude, angle.sin() * amplitude], -1).to(y.dtype)

    def _psi(self, weight: Tensor, bias: Tensor, check: bool) -> Tensor:
        if check and self.on_error != "ignore" and len(weight):
            self._check_reach(weight.detach(), bias.detach())
        g, eta, log_gain = self.projection.double(), self.eta.double(), self.log_gain.double()
        v = weight @ g.T * eta  # (o, P)
        energy = weight.square().sum(1, keepdim=True)
        constant = 0.5 * (self.rho.double() * self.x_norm.double()).square() + log_gain
        level = constant - 0.5 * eta.square() * energy
        even, odd = (c * len(self.rho) ** -0.5 for c in self._turned(weight, bias))
        if self.variant.antithetic:  # exp(level) cosh(v), exp(level) sinh(v), without overflow in between
            up, down = torch.exp(level + v) / 2, torch.exp(level - v) / 2
            return torch.cat([even * (up + down), odd * (up - down)], 1)
        tower = torch.exp(level + v)
        return torch.cat([even * tower, odd * tower], 1)

    def _turned(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients of cos and sin of omega w.(x - c), the bias and the mean turned into them: two (o, P)."""
        t = (bias + weight @ self.center.double())[:, None] * (self.rho * self.eta).double()
        alpha, beta = self.alpha.double(), self.beta.double()
        return alpha * t.cos() + beta * t.sin(), beta * t.cos() - alpha * t.sin()

    def _exact(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self.activation(x @ weight.T + bias)

    def predicted_error(self, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Expected squared error for each output, (o,): misfit of the series plus variance.

        For x of the typical norm and at right angles to w, as most are in many dimensions, it is exact for "iid" rows
        and an upper bound for coupled ones: with "orthogonal" rows in whole blocks, sin and |x||w| = 0.9, it is 1.2
        times the error at d = 64, 1.4 times at d = 32 and 2.7 times at d = 8. Pairs that are aligned have at most twice
        the error. Without a weight, one output of the typical norm.
        """
        if weight is None:
            weight = self.projection.new_zeros(1, self.in_features, dtype=torch.float64)
            weight[0, 0] = self.w_norm
        w, b = _checks.layer_weights(weight, bias, self.in_features)
        return self._predict(self._normalized(w), b)

    def _predict(self, weight: Tensor, bias: Tensor) -> Tensor:
        d, rows = self.in_features, len(self.rho)
        mean, _ = self._turned(weight, bias)  # of a projection at w.(x - c) = 0
        even, odd = (c.square() for c in self._turned(weight, bias))
        uu = (self.rho * self.x_norm).double().square()  # (P,)
        vv = self.eta.double().square() * weight.square().sum(1, keepdim=True)  # (o, P)
        # frequencies that are sampled vary too: then it is the mean of all rows that is certain
        certain = mean.mean(1, keepdim=True).square() if isinstance(self.variant.spectrum, Sampled) else even
        if not self.variant.antithetic:
            variance = vv.exp() * (even * uu.cosh() + odd * uu.sinh()) - certain
            return self.misfit.double() + variance.sum(1) / rows**2
        variance = even * uu.cosh() * vv.cosh() + odd * uu.sinh() * vv.sinh() - certain
        if self.kind.sphere_rows:
            _, inverse, counts = torch.unique(self.rho * self.eta, return_inverse=True, return_counts=True)
            factor = torch.from_numpy(block_factor(counts.cpu().numpy(), d)).to(variance.device)
            lead = even * (uu.square() + vv.square()) / 2 + odd * uu * vv
            # on the sphere cos(z) comes out as cos(z) exp(z^2/(d + 2)), E z^4 = 3 kappa^4 / (d (d + 2))
            bias_squared = 1.5 * (even + odd) * counts[inverse] * (uu * vv).square() / (d * (d + 2) ** 3)
            variance = variance + bias_squared - lead * (1 - factor[inverse])
        return self.misfit.double() + variance.sum(1) / rows**2

    def _check_reach(self, weight: Tensor, bias: Tensor) -> None:
        low, high = self.z_range
        mid = bias + weight @ self.center.double()  # (o,), where z of an average input lies
        slack = 1e-2 * (high - low)
        outside = int(((mid < low - slack) | (mid > high + slack)).sum())
        if outside and float(self.misfit) > 0:
            warnings.warn(
                f"{outside} of {len(mid)} outputs centre outside ({low:.3g}, {high:.3g}), the range that the series of "
                f"{self.activation.name} was fitted on; calibrate with these weights, or pass range=",
                stacklevel=4,
            )
        error, scale = float(self._predict(weight, bias).mean()), float(self.activation_variance)
        w_norm = float(weight.square().sum(1).mean().sqrt())
        own = self.unbiased and isinstance(self.variant.spectrum, Sampled)
        beyond = own and float(self.x_norm) * w_norm >= self.activation.reach  # `_predict` sees a finite sample only
        if beyond or not math.isfinite(error) or not math.isfinite(scale):  # an overflow
            error = math.inf
        values = self.activation.evaluate(np.linspace(low, high, 64))
        if error == math.inf or error > max(WARN * scale, 1e-5 * float(np.square(values).mean())):
            self._judge(error, scale, self._advice(w_norm), depth=5)

    def _advice(self, w_norm: float) -> str:
        """Advice for weights of this norm, from a search over numbers of features, each with its best series."""
        x_norm, typical, (low, high) = float(self.x_norm), float(self.w_norm), self.z_range
        text = f"This is {self.activation.name} at |x||w| = {x_norm:.3g} x {w_norm:.3g}."
        if isinstance(self.variant.spectrum, Sampled):
            reach = f"{self.activation.reach:.3g}"
            return f"{text} Sampling its transform has finite variance below {reach}; use URF, which fits a series."
        stretch = max(1.0, w_norm / typical)
        if stretch > 1.5:
            text += f" The map was made for |w| = {typical:.3g}: calibrate it with these weights first."
        half = max(stretch * (high - low) / 2, 1e-3)
        z = np.linspace((low + high) / 2 - half, (low + high) / 2 + half, 256)
        f = self.activation.evaluate(z)
        features = self.num_features
        while features < MOST_FEATURES:
            features *= 2
            series = self.activation.series_on(z, x_norm * w_norm, features // 2, self._block)
            misfit = np.mean((f - series(z)) ** 2)
            if misfit + series.variance(x_norm * w_norm, self._block) <= WARN * f.var():
                return (
                    f"{text} About {features} features would do; smaller norms would too (normalize='dim' or 'unit'), "
                    "and ProjectedURF needs fewer."
                )
        return f"{text} Not even {features} features would do: normalize, take ProjectedURF, or fit psi from data."

    def _times_jacobian(self, left: Tensor, x: Tensor) -> Tensor:
        """Beside the angle, the amplitude exp(rho^2 |x - c|^2 / 2) depends on x, as far as `limit` lets it grow."""
        cos, sin = (part[..., None, :] for part in self._phi(x).chunk(2, -1))
        even, odd = left.chunk(2, -1)  # (*, out, P)
        x = (x - self.center)[..., None, :]
        excess = 0.5 * self.rho.square() * (x.square().sum(-1, keepdim=True) - self.x_norm.square())
        radial = (even * cos + odd * sin) * self.rho.square() * (excess < self.limit)
        return ((odd * cos - even * sin) * self.rho) @ self.projection + radial.sum(-1, keepdim=True) * x

    def _config(self) -> dict[str, Any]:
        v = self.variant
        config: dict[str, Any] = {
            "activation": self._activation_name(self.activation),
            "projection": self._projection_name(self.kind),
            "x_norm": self.norms[0],
            "w_norm": self.norms[1],
            "range": self.activation.range,
            "on_error": self.on_error,
            "limit": self.limit,
            "antithetic": v.antithetic,
            "rho": v.rho,
            "A": v.A,
        }
        if isinstance(v.spectrum, Series):
            raise self._unnamed("spectrum")
        if isinstance(v.spectrum, Sampled):
            if v.spectrum.proposal is not None:  # a scipy object, of any class
                raise self._unnamed("proposal")
            config["block_size"] = v.spectrum.block_size
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> URF:
        config = dict(config)
        limit, size = config.pop("limit", None), config.pop("block_size", None)
        rest: dict[str, Any] = {name: config.pop(name) for name in ("antithetic", "rho", "A") if name in config}
        fm = cls(**config, device="meta")
        if size is not None:  # a reset would draw as many numbers; beyond num_features the size makes no difference
            rest["spectrum"] = Sampled(None, min(_checks.positive_int(size, "block_size"), fm.num_features))
        fm._set_variant(Variant(**rest))
        fm.limit = fm.limit if limit is None else float(limit)
        return fm

    def extra_repr(self) -> str:
        kind = "sampled" if isinstance(self.variant.spectrum, Sampled) else "series"
        return (
            f"{super().extra_repr()}, activation={self.activation.name}, spectrum={kind}, projection={self.kind.name}"
        )


def best_A(v_norm: Array, d: int) -> Array:
    """The A <= 0 of least second moment of Lambda_g(v): with a = -A, 16 d a^2 + (2 d - 4 |v|^2) a = |v|^2."""
    vv = np.square(v_norm)
    p = 2 * d - 4 * vv
    return -(np.sqrt(p**2 + 64 * d * vv) - p) / (32 * d)


def _thin(x: Tensor, most: int) -> Tensor:
    """At most `most` rows of x, evenly spaced."""
    return x[:: -(-len(x) // most)]
