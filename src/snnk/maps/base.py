"""FeatureMap: phi(x) . psi(w, b) stands for one output of a layer (eq. 2 of the paper)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from snnk import _checks
from snnk.maps.activations import ACTIVATIONS, Activation
from snnk.maps.projections import PROJECTIONS, Projection, make_generator

NORMALIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "dim": lambda x: x * x.shape[-1] ** -0.25,
    "unit": lambda x: F.normalize(x, dim=-1),
}
FEW_ROWS = 10  # fewer inputs are not looked at for outliers

# Predicted squared error over the variance of f. A fitted psi shrinks towards a constant instead of exceeding 1, so an
# estimate that is worth no more than a constant is refused a little below.
WARN, REFUSE = 0.1, 0.9


class UnreachableError(ValueError):
    """The predicted error is about the variance of the activation or more: a constant would do as well."""


CLASSES: dict[str, type[FeatureMap]] = {}  # by name, the classes that a file may name


class FeatureMap(nn.Module):
    """Base of all maps: fixed random features `phi` of inputs, and `psi` of a layer's weights.

    Random state lives in buffers, so it is saved, moved and cast with the module; nothing is trained unless
    `train_directions_` is called.

    Args:
        in_features: size d of the last dimension of inputs and weights.
        num_features: number m of real features, the columns of phi(x).
        normalize: "none"; "dim", inputs and weights divided by d^(1/4), so x.w by sqrt(d); "unit", both on the sphere.
        on_error: for maps that predict their error: "raise" (warn above a tenth of the variance of f, refuse at 0.9 of
            it, where a constant does as well), "warn" or "ignore".
        seed: of the generator that draws the map; the global random state is never touched.
    """

    projection: Tensor

    def __init__(
        self,
        in_features: int,
        num_features: int,
        *,
        normalize: str | None = None,
        on_error: str = "raise",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.in_features = _checks.positive_int(in_features, "in_features")
        self.num_features = _checks.positive_int(num_features, "num_features")
        self.normalize = _checks.choose(normalize or "none", NORMALIZERS, "normalize")
        self.on_error = _checks.choose(on_error, ["raise", "warn", "ignore"], "on_error")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an integer; got {seed!r}")
        self.seed = seed

    def phi(self, x: Tensor) -> Tensor:
        """Features of inputs: (*, d) -> (*, m)."""
        return self._phi(self._normalized(_checks.matrix(x, self.in_features, "input")))

    def psi(self, weight: Tensor, bias: Tensor | None = None, *, check: bool = True) -> Tensor:
        """Features of a layer's weights: (o, d), (o,) -> (o, m), computed in float64, returned in the map's dtype.

        `check=False` leaves out a map's warning or refusal of weights that it cannot estimate well.
        """
        w, b = _checks.layer_weights(weight, bias, self.in_features)
        return self._psi(self._normalized(w), b, check).to(self.projection.dtype)

    def exact(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The value that phi(x) . psi(weight, bias) estimates, without random features: (*, d) -> (*, o)."""
        w, b = _checks.layer_weights(weight, bias, self.in_features)
        x = _checks.matrix(x, self.in_features, "input")
        return self._exact(self._normalized(x.double()), self._normalized(w), b).to(x.dtype)

    def times_jacobian(self, left: Tensor, x: Tensor) -> Tensor:
        """left (*, out, m) times d phi / dx at x (*, d), without a backward pass: (*, out, d)."""
        if "_times_jacobian" not in vars(type(self)):  # a subclass may have another phi than the class it comes from
            raise TypeError(f"no Jacobian of {type(self).__name__} is known; use torch.func.jacrev, or add it")
        left = self._times_jacobian(left, self._normalized(x))
        if self.normalize == "dim":
            left = left * self.in_features**-0.25
        elif self.normalize == "unit":  # (I - v v^T) / |x| for v = x / |x|
            v, norm = F.normalize(x, dim=-1)[..., None, :], torch.linalg.vector_norm(x, dim=-1)[..., None, None]
            left = (left - (left * v).sum(-1, keepdim=True) * v) / norm.clamp_min(1e-12)
        return left

    def to_config(self) -> dict[str, Any]:
        """The arguments of the constructor as JSON, for `feature_map_from_config`; tensors are in the state dict."""
        if CLASSES.get(type(self).__name__) is not type(self):
            raise self._unnamed("class")
        sizes = {"in_features": self.in_features, "num_features": self.num_features}
        common = {"class": type(self).__name__, **sizes, "normalize": self.normalize, "seed": self.seed}
        return {**common, **self._config()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FeatureMap:
        """A map on the meta device from what `to_config` gave, without "class": nothing is allocated or drawn."""
        place: dict[str, Any] = {"device": "meta"}
        return cls(**config, **place)

    def train_directions_(self) -> FeatureMap:
        """Make the projection a trained parameter. Once it is trained, phi . psi no longer estimates a layer.

        Example:
            >>> from snnk.maps import make_feature_map
            >>> [p.shape for p in make_feature_map("relu", 4, 3).train_directions_().parameters()]
            [torch.Size([3, 4])]
        """
        projection = self.projection
        del self.projection
        self.projection = nn.Parameter(projection)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.phi(x)

    @property
    def has_psi(self) -> bool:
        """Whether the map has a psi; where it has none, the matrix behind the features is trained or fitted."""
        return type(self)._psi is not FeatureMap._psi

    @property
    def unbiased(self) -> bool:
        """Whether the mean of phi(x) . psi(w, b) over seeds is exactly `exact(x, w, b)`, for every x, w and b."""
        return False

    def reset_parameters(self) -> None:
        """Draw the map again from its seed, for example after `to_empty`; on the meta device nothing is drawn."""
        if not self.projection.is_meta:
            with torch.no_grad(), torch.device("cpu"):
                self._reset()

    def _reset(self) -> None:
        raise NotImplementedError

    def _phi(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _psi(self, weight: Tensor, bias: Tensor, check: bool) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no psi: train the matrix behind it, or fit it with RidgeStats")

    def _exact(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no psi: train the matrix behind it, or fit it with RidgeStats")

    def _times_jacobian(self, left: Tensor, x: Tensor) -> Tensor:
        """The same product as `times_jacobian`, for inputs that are normalised already."""
        raise NotImplementedError

    def _config(self) -> dict[str, Any]:
        """The arguments that this class has beyond those of FeatureMap."""
        raise NotImplementedError

    def _unnamed(self, what: str) -> TypeError:
        return TypeError(f"a file cannot name the {what} of {type(self).__name__}; save the state_dict()")

    def _projection_name(self, kind: Projection) -> str:
        if PROJECTIONS.get(kind.name) != kind:
            raise self._unnamed("projection")
        return kind.name

    def _activation_name(self, activation: Activation) -> str:
        z = torch.linspace(-9, 9, 999, device="cpu")  # two functions may share a name: a LeakyReLU has any slope
        known = ACTIVATIONS.get(activation.name)
        if known is None or not torch.equal(known(z), activation(z)):
            raise self._unnamed(f"activation {activation.name}")
        return activation.name

    def _judge(self, error: float, scale: float, advice: str, depth: int = 4) -> None:
        """Warn or refuse by predicted squared error and variance of f, according to `on_error`.

        `depth` is the number of frames from here to the user.
        """
        message = (
            f"{type(self).__name__} with {self.num_features} features: predicted squared error {error:.2g}, "
            f"variance of the activation {scale:.2g}. {advice}"
        )
        if self.on_error == "raise" and (error == math.inf or error > REFUSE * scale):
            raise UnreachableError(message + " on_error='warn' lets it through.")
        warnings.warn(message, stacklevel=depth)

    def _center_and_norm(self, x: Tensor) -> tuple[Tensor, float]:
        """Mean of inputs (n, d) and root mean square of their distance to it."""
        center = x.mean(0)
        spread = (x - center).square().sum(1).mean().sqrt()
        return center, float(torch.maximum(spread, 1e-6 * center.norm()).clamp_min(1e-6))

    def _calibration(
        self, x: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The arguments of `calibrate`, checked and normalised, in float64 on the CPU."""
        if x is not None:
            _checks.finite(_checks.matrix(x, self.in_features, "input"), "input")
            x = self._normalized(x.detach().reshape(-1, self.in_features).double().cpu())
        if weight is None and bias is not None:
            raise ValueError("calibrate was given a bias without a weight; pass both, or neither")
        if weight is not None:
            weight, bias = (t.detach().cpu() for t in _checks.layer_weights(weight, bias, self.in_features))
            weight = self._normalized(weight)
        for name, rows in (("input", x), ("weight", weight)):
            if rows is not None and not len(rows):
                raise ValueError(f"calibrate needs at least one row of {name}; got shape {tuple(rows.shape)}")
        if x is not None:
            _refuse_outliers(x)
        return x, weight, bias

    def _normalized(self, x: Tensor) -> Tensor:
        return NORMALIZERS[self.normalize](x)

    def _generator(self) -> Generator:
        return make_generator(self.seed)

    def _fill(self, **values: Tensor) -> None:
        """Copy new values into the buffers of those names, keeping their device and dtype."""
        for name, value in values.items():
            getattr(self, name).copy_(value)  # a buffer, or a parameter where an adapter trains it

    def extra_repr(self) -> str:
        tail = "" if self.normalize == "none" else f", normalize={self.normalize}"
        return f"in_features={self.in_features}, num_features={self.num_features}{tail}"


Map = TypeVar("Map", bound=FeatureMap)


def named_in_files(cls: type[Map]) -> type[Map]:
    """Decorator of the maps that a file may name: `to_config` refuses every other class, as no file could load it."""
    CLASSES[cls.__name__] = cls
    return cls


def _refuse_outliers(x: Tensor) -> None:
    """Refuse inputs (n, d) of which a hundredth, or one row, holds nine tenths of the squared distances to the median.

    Mean, norms and range would be theirs, and the map would be far off on all other rows, without any sign of it in the
    predicted error, which holds for inputs of these norms.
    """
    away = (x - x.median(0).values) / x.abs().max().clamp_min(1e-300)  # squares of 1e200 would overflow
    distances = away.square().sum(1)
    rows = distances.topk(max(len(x) // 100, 1)).indices
    usual = distances[distances > 0].median() if bool(distances.any()) else distances[0]  # rare flags are no outliers
    far = float(distances[rows[0]]) > 100 * float(usual)
    if far and len(x) >= FEW_ROWS and float(distances[rows].sum()) > 0.9 * float(distances.sum()):
        row, column = int(rows[0]), int(away[rows[0]].abs().argmax())
        raise ValueError(
            f"calibration inputs have outliers: row {row}, column {column} is {float(x[row, column]):.3g}, and "
            f"{len(rows)} of {len(x)} rows hold nine tenths of the variance. The map would fit these and no others: "
            "remove them, or scale the inputs alike"
        )


def at_least_float(x: Tensor) -> Tensor:
    """float32 for half precision: angles and exponents need more than eight bits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
