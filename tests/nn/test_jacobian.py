"""Jacobians of bundles against torch.func.jacrev."""

import pytest
import torch

from snnk import URF, ArcCosine, PowerSeries, ProjectedURF
from snnk.maps import Directions
from snnk.maps.affine import Affine
from snnk.maps.base import CLASSES
from snnk.nn.bundling import Bundled, bundle

from helpers.bundles import EXACT, F64, OURS, QUIET, seeded

D = 6
MAPS = {
    "affine": lambda: filled(Affine(D, 10, **F64)),
    "arccos0": lambda: ArcCosine(D, 10, 0, **F64),
    "arccos1": lambda: ArcCosine(D, 10, **F64),
    "arccos2": lambda: ArcCosine(D, 10, 2, **F64),
    "arccos1-augment": lambda: ArcCosine(D, 10, augment=True, **F64),
    "arccos2-augment-unit": lambda: ArcCosine(D, 10, 2, augment=True, normalize="unit", **F64),
    "arccos1-dim": lambda: ArcCosine(D, 10, normalize="dim", **F64),
    "urf": lambda: URF(D, 10, "gelu", **QUIET, **F64).calibrate(seeded(50, D) + 1),
    "urf-unit": lambda: URF(D, 10, "tanh", normalize="unit", **QUIET, **F64),
    "urf-beyond-its-limit": lambda: URF(D, 10, "sin", x_norm=0.05, w_norm=5.0, **QUIET, **F64),
    "urf-A": lambda: URF.paper(D, 10, "cos", spectrum="series", rho="balanced", A="auto", **F64),
    "paper": lambda: URF.paper(D, 10, "sin", **F64),
    "sampled": lambda: URF.paper(D, 10, "tanh", block_size=2, **OURS, **F64).calibrate(seeded(50, D)),
    "directions": lambda: Directions(D, 10, "tanh", **F64),
    "power": lambda: PowerSeries(D, 10, "tanh", **F64),
    "power-one-sign-dim": lambda: PowerSeries(D, 10, coefficients=[0.3, 1.0, 0.5, 0.2], normalize="dim", **F64),
    "power-unit": lambda: PowerSeries(D, 10, coefficients=[0.0, 1.0, -0.5], normalize="unit", **F64),
    "power-constant": lambda: PowerSeries(D, 10, coefficients=[0.3], **F64),
    "projected": lambda: ProjectedURF(D, 10, "relu", **QUIET, **F64).calibrate(seeded(50, D) - 1),
    "projected-dim": lambda: ProjectedURF(D, 10, "tanh", normalize="dim", **QUIET, **F64),
}


def filled(fm):
    fm.projection.copy_(seeded(*fm.projection.shape, seed=2))
    return fm


@pytest.mark.parametrize("make", MAPS.values(), ids=MAPS)
def test_jacobian_of_each_map(make):
    """Behind it another map, so that the chain rule is in it too."""
    fm, x = make(), seeded(7, D)
    bundled = Bundled([fm, ArcCosine(10, 12, seed=3, **F64)], seeded(4, 12, seed=1), seeded(4))
    if isinstance(fm, URF) and fm.norms[0] == 0.05:
        norm = x.square().sum(-1, keepdim=True) - fm.x_norm**2
        assert (0.5 * fm.rho**2 * norm > fm.limit).all()
    expected = torch.func.vmap(torch.func.jacrev(bundled))(x)
    assert torch.allclose(bundled.jacobian(x), expected, **EXACT)
    constant = getattr(fm, "order", 1) == 0 or getattr(fm, "coefficients", ()) == (0.3,)
    assert bool((expected.abs() < 1e-3).all()) == constant
    alone = Bundled([fm], seeded(4, 10, seed=1))
    assert torch.allclose(alone.jacobian(x[0]), torch.func.jacrev(alone)(x[0]), **EXACT)
    assert torch.allclose(bundled.jacobian(x[:6].reshape(2, 3, D)), expected[:6].reshape(2, 3, 4, D), **EXACT)
    assert bundled.jacobian(x[:0]).shape == (0, 4, D)


def test_every_jacobian_is_tested():
    own = {cls for cls in CLASSES.values() if cls.__module__.startswith("snnk.maps.")}  # not those of tables
    assert {type(make()) for make in MAPS.values()} == own


def test_jacobian_of_a_deep_bundle_and_without_autograd(trained):
    net, x = trained
    bundled = bundle(net, num_features=64, calibrate=x, **QUIET)
    expected = torch.func.vmap(torch.func.jacrev(bundled))(x[:5])
    with torch.inference_mode():
        assert torch.allclose(bundled.jacobian(x[:5]), expected, **EXACT)
    assert torch.allclose(bundled.float().jacobian(x[:5].float()).double(), expected, atol=1e-4, rtol=1e-3)


def test_jacobian_of_a_power_series_where_a_factor_is_zero():
    """The product without a factor cannot be had by dividing by it."""
    fm = PowerSeries(2, 24, coefficients=[0.0, 1.0, 0.5, 0.2], **F64)
    bundled, x = Bundled([fm], seeded(3, 24)), torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 1.0]], **F64)
    assert ((x @ fm.projection[..., :-1].mT + fm.projection[:, None, :, -1]) == 0).any()
    step = 1e-6 * torch.eye(2, **F64)
    slopes = torch.stack([(bundled(x + h) - bundled(x - h)) / 2e-6 for h in step], -1)  # autograd may divide too
    assert torch.allclose(bundled.jacobian(x), slopes, atol=1e-7)


def test_jacobian_of_an_unknown_map_is_refused():
    class Own(ArcCosine):
        pass

    with pytest.raises(TypeError, match=r"no Jacobian of Own is known; use torch.func.jacrev"):
        Bundled([Own(D, 10)], torch.ones(2, 10)).jacobian(torch.ones(D))
