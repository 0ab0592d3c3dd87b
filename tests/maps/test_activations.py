import itertools
import math
import pickle

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from snnk import ACTIVATIONS
from snnk.maps import Activation
from snnk.maps.activations import leaky_relu, resolve_activation
from snnk.maps.sampled import Sampled
from snnk.maps.series import _share, block_factor, fit_series

from helpers import oracles

SMOOTH = ["gelu", "gelu_tanh", "tanh", "sigmoid", "silu", "softplus", "erf"]
MPMATH = {
    "sin": mpmath.sin,
    "cos": mpmath.cos,
    "tanh": mpmath.tanh,
    "erf": mpmath.erf,
    "sigmoid": lambda z: 1 / (1 + mpmath.exp(-z)),
    "softplus": lambda z: mpmath.log(1 + mpmath.exp(z)),
    "silu": lambda z: z / (1 + mpmath.exp(-z)),
    "gelu": lambda z: z * mpmath.ncdf(z),
    "gelu_tanh": lambda z: z / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (z + 0.044715 * z**3))),
    "identity": lambda z: z,
}


@pytest.mark.parametrize("name", MPMATH)
def test_exact_f_and_taylor_coefficients(name):
    z = np.linspace(-3, 3, 13)
    exact = np.array([float(MPMATH[name](v)) for v in z])
    np.testing.assert_allclose(ACTIVATIONS[name].evaluate(z), exact, atol=1e-9)
    if ACTIVATIONS[name].taylor is not None:
        expected = [float(a) for a in mpmath.taylor(MPMATH[name], 0, 11)]
        np.testing.assert_allclose(ACTIVATIONS[name].taylor(12), expected, atol=1e-9)


def test_activations_without_taylor_coefficients():
    assert [name for name, f in ACTIVATIONS.items() if f.taylor is None] == ["relu", "leaky_relu"]


def test_tanh_signs_are_those_of_the_appendix():
    a = ACTIVATIONS["tanh"].taylor(20)
    assert (a[1::4] > 0).all() and (a[3::4] < 0).all() and (a[::2] == 0).all()


@pytest.mark.parametrize("name", [*SMOOTH, "relu", "leaky_relu"])
@pytest.mark.parametrize("z", [-2.3, 0.4, 1.7])
def test_spectrum_gives_back_f(name, z):
    a = ACTIVATIONS[name]
    f0 = float(a.evaluate(np.zeros(1))[0])
    tail = 2e-2 if "relu" in name else 1e-6  # 1/xi^2 beyond the last panel
    assert oracles.inverse_transform(a.spectrum, f0, z) == pytest.approx(float(a.evaluate(np.array([z]))[0]), abs=tail)


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_atoms_give_back_f(name):
    a, z = ACTIVATIONS[name], 0.7
    total = sum(w * np.exp(2j * math.pi * xi * z) for xi, w in a.spectrum.atoms)
    assert total == pytest.approx(getattr(math, name)(z))


@pytest.mark.parametrize("name", [*SMOOTH, "relu"])
def test_four_parts_are_non_negative_and_recombine(name):
    spectrum, xi = ACTIVATIONS[name].spectrum, np.array([-0.7, -0.1, 0.05, 0.3, 1.1])
    parts = spectrum.parts(xi)
    assert all((p >= 0).all() for p in parts)
    np.testing.assert_allclose(parts[0] - parts[1] + 1j * (parts[2] - parts[3]), spectrum.density(xi) + 0j)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "silu", "softplus"])
def test_reach_is_the_decay_rate_of_the_spectrum(name):
    """Sampling at |x||w| = kappa needs the density times exp(omega kappa) to be integrable."""
    omega = np.array([30.0, 31.0])
    low, high = np.abs(ACTIVATIONS[name].spectrum.density(omega / (2 * math.pi)))
    assert np.log(low / high) == pytest.approx(ACTIVATIONS[name].reach, abs=0.05)


def test_reach_of_the_others():
    assert ACTIVATIONS["tanh"].reach == math.pi / 2
    assert all(math.isinf(ACTIVATIONS[n].reach) for n in ("sin", "cos", "gelu", "erf", "identity"))
    assert ACTIVATIONS["relu"].reach == ACTIVATIONS["leaky_relu"].reach == 0
    _, a, _, b = math.nan, math.sqrt(2 / math.pi), 0, math.sqrt(2 / math.pi) * 0.044715
    pole = mpmath.findroot(lambda z: a * z + b * z**3 - 0.5j * mpmath.pi, 1 + 1.8j)
    assert ACTIVATIONS["gelu_tanh"].reach == pytest.approx(abs(float(pole.imag)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_series_is_accurate_where_variance_is_cheap(name):
    a = ACTIVATIONS[name]
    z = np.linspace(-2, 2, 101)
    series = a.series(-2, 2, kappa=1e-3, projections=4096)
    assert series.counts.sum() == 4096 and (series.counts >= 1).all()
    tolerance = 0.06 if "relu" in name else 2e-3
    assert np.abs(series(z) - a.evaluate(z)).max() < tolerance


def test_series_error_is_what_the_fit_minimises():
    """A smaller kappa or more projections can only help; and it never does worse than the mean of f."""
    z = np.linspace(-1.5, 1.5, 300)
    f = np.tanh(2 * z)

    def error(kappa, projections, dim=None):
        s = fit_series(z, f, kappa, projections, dim)
        return np.mean((f - s(z)) ** 2) + s.variance(kappa, dim)

    assert error(0.5, 256) < error(1.5, 256) < f.var()
    assert error(1.0, 1024) < error(1.0, 64) < error(1.0, 4)
    assert error(1.0, 256, dim=16) < error(1.0, 256)


@pytest.mark.parametrize("name", ["sin", "cos", "tanh", "sigmoid", "erf", "gelu", "silu", "softplus", "identity"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.once
def test_sampled_frequencies_are_unbiased(name, block_size, proposal=None):
    """Mean over xi of the weighted cosines and sines is f, within five standard errors."""
    a, z = ACTIVATIONS[name], np.array([-0.9, 0.2, 1.1])
    generator, means = torch.Generator().manual_seed(1), []
    for _ in range(80):
        omega, alpha, beta = Sampled(proposal, block_size).rows(a, -1.5, 1.5, 400, generator)
        terms = alpha[:, None] * np.cos(omega[:, None] * z) + beta[:, None] * np.sin(omega[:, None] * z)
        means.append(terms.mean(0))
    error = np.std(means, axis=0, ddof=1) / math.sqrt(len(means))
    windowed = a.spectrum.order > 1 or a.spectrum.slope > 0
    assert (np.abs(np.mean(means, axis=0) - a.evaluate(z)) <= 5 * error + (1e-4 if windowed else 1e-12)).all()
    if a.spectrum.density is not None or windowed:
        assert (error < 0.1).all()  # a test with large error bars proves nothing


@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_a_proposal_need_not_be_symmetric(name):
    test_sampled_frequencies_are_unbiased(name, 1, stats.laplace(loc=0.1, scale=0.2))


def test_resolve_activation():
    assert resolve_activation(nn.GELU()).name == "gelu"
    assert resolve_activation(nn.LeakyReLU(0.2))(torch.tensor([-1.0])) == pytest.approx(-0.2)
    assert resolve_activation(torch.sin) is ACTIVATIONS["sin"]
    assert resolve_activation(F.silu) is ACTIVATIONS["silu"]
    assert resolve_activation(F.tanh) is ACTIVATIONS["tanh"]
    assert resolve_activation(nn.Softplus()) is ACTIVATIONS["softplus"]
    assert resolve_activation(nn.Softplus(beta=2)).spectrum is None
    square = resolve_activation(lambda z: z**2, (-1, 3))
    assert square.range == (-1.0, 3.0) and isinstance(square, Activation)
    assert pickle.loads(pickle.dumps(resolve_activation(nn.LeakyReLU(0.2), (0, 1)))).range == (0, 1)
    assert pickle.loads(pickle.dumps(resolve_activation(torch.exp)))(torch.zeros(1)) == 1
    assert leaky_relu(0.3).spectrum.slope == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [("gelo", ValueError, "did you mean 'gelu'.*Known: sin"), (3, TypeError, "got int"), ("", ValueError, "Known")],
)
def test_unknown_activation(bad, error, message):
    with pytest.raises(error, match=message):
        resolve_activation(bad)


@pytest.mark.parametrize("bad", [(1, 1), (2, 1), (0, math.inf)])
@pytest.mark.once
def test_bad_range(bad):
    with pytest.raises(ValueError, match="low < high"):
        resolve_activation("relu", bad)


@pytest.mark.parametrize("weights", [[5.0, 3.0, 2.0], [0.9, 0.06, 0.04], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("total", [3, 4, 11, 12])
def test_shares_are_the_nearest_integers(weights, total):
    """Against every way to share out what is left when each term has one."""
    found = _share(np.array(weights), total)
    exact = 1 + (total - 3) * np.array(weights if any(weights) else [1, 1, 1]) / (sum(weights) or 3)
    ways = [way for way in itertools.product(range(1, total + 1), repeat=3) if sum(way) == total]
    assert tuple(found) in ways
    assert np.square(found - exact).sum() == pytest.approx(min(np.square(way - exact).sum() for way in ways))


@pytest.mark.parametrize("count", range(1, 12))
def test_block_factor_is_that_of_draws_without_replacement(count):
    """A quantity whose five values in a block sum to 0: whole blocks have no error, of a part every choice counts."""
    values = np.array([3.0, 1.0, 0.0, -2.0, -2.0])
    sums = [sum(part) for part in itertools.combinations(values, count % 5)]
    assert float(block_factor(np.array(count), 5)) == pytest.approx(np.mean(np.square(sums)) / values.var() / count)
