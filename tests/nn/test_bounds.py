"""Error bounds of bundles: they hold, and they are what one computes by hand."""

import copy
import dataclasses
import math

import pytest
import torch
from scipy import stats
from torch import nn

from snnk import URF
from snnk.nn.bounds import ErrorBound, error_bound
from snnk.nn.bundling import bundle

from helpers.bundles import F64, OURS, QUIET, Sine, linear, mlp, seeded


def bounded(m, seed=0, depth=3, gain=0.1, **options):
    """A tower of the paper's own features, with no series to fit, for inputs of length one."""
    net = mlp(8, *[6] * (depth - 1), 3, activation=Sine, gain=gain)
    x = seeded(40, 8)
    x = x / x.norm(dim=1, keepdim=True)

    def make(d, m, activation, **rest):
        return URF.paper(d, m, activation, **options, **rest)

    return bundle(net, num_features=m, feature_map=make, activations={Sine: "sin"}, seed=seed), net, x


@pytest.mark.parametrize("options", [{}, OURS], ids=["paper", "ours"])
def test_measured_error_is_within_the_bounds_at_every_depth(options):
    for seed in range(40):
        bundled, net, x = bounded(128, seed, **options)
        bound = error_bound(bundled, net, x, confidence=0.5)
        assert bound.layers == ("1: Sine", "3: Sine", "4: Linear")
        assert all(0 < m <= b < a for m, b, a in zip(bound.measured, bound.bernstein, bound.azuma, strict=True))
        assert bound.bernstein[0] < 10 * bound.measured[0] * (1 if not options else 3)  # and not beside the point
    # what it says was measured is what one measures
    hidden, first = net[:2](x), bundled.maps[0]
    estimate = first.phi(x) @ first.psi(net[0].weight, net[0].bias).T
    assert bound.measured[0] == pytest.approx(float((estimate - hidden).detach().abs().max()))
    assert bound.measured[-1] == pytest.approx(float((bundled(x) - net(x)).detach().abs().max()))


@pytest.mark.parametrize(("spectrum", "limit"), [("series", 5), ("sampled", 20)])
def test_measured_error_is_within_the_bounds_for_a_curve_that_is_fitted(spectrum, limit):
    """Here the mean of the estimate is not f, and the inputs are any."""
    net, x = mlp(8, 6, 6, 3, gain=0.3), seeded(60, 8, scale=0.3)

    def make(d, m, activation, **rest):
        return URF.paper(d, m, activation, spectrum=spectrum, **OURS, **rest)

    options = {"num_features": 256, "feature_map": make}
    for seed in range(5):
        bound = error_bound(bundle(net, calibrate=x, seed=seed, method="analytic", **options), net, x)
        assert all(0 < m <= min(ab) for m, *ab in zip(bound.measured, bound.azuma, bound.bernstein, strict=True))
        assert bound.bernstein[0] < limit


def by_hand(fm, x, weight, bias, events, failure):
    """Azuma's and Bernstein's own part for each output, moments of the terms from rows drawn for them: (2, n, o)."""
    rows = len(fm.projection)
    t = math.sqrt(2 * math.log(rows * len(weight) / failure))
    many = copy.deepcopy(fm)
    many.projection = seeded(50_000, fm.in_features, seed=1)
    for name in ("rho", "eta", "alpha", "beta", "log_gain"):
        setattr(many, name, fm.get_buffer(name)[:1].expand(50_000))  # sin has one frequency
    phi, psi = (side.unflatten(1, (2, 50_000)) for side in (many.phi(x), many.psi(weight, bias)))
    terms = 50_000 * sum(phi[:, None, k] * psi[:, k] for k in (0, 1))  # (n, o, rows)
    z, length = x @ weight.T + bias, fm.eta[0] * weight.norm(dim=1)
    assert ((terms.mean(-1) - z.sin()).abs() <= 5 * terms.std(-1) / 50_000**0.5).all()
    grow = (lambda y: (math.exp(y) + math.exp(-y)) / 2) if fm.variant.antithetic else math.exp
    at_t = torch.tensor([grow(t * float(v)) for v in length], **F64)
    u = fm.rho[0] * x.norm(dim=1, keepdim=True)
    c = torch.exp((u.square() - length.square()) / 2) * at_t
    assert (terms.abs().amax(-1) <= c * 1.5).all()  # 50,000 rows go a little beyond the t of fewer
    beyond = torch.tensor([stats.norm.sf([t - v, t + v]).sum() for v in length.tolist()], **F64)
    log = math.log(2 * events / failure)
    azuma = c * math.sqrt(2 * log / rows)
    eps, variance = torch.full_like(c, 1e-3), terms.var(-1)
    for _ in range(200):  # the fixed point of P eps^2 = 2 log (var + (c + |ET|) eps / 3)
        eps = (2 * log * (variance + (c + z.sin().abs()) * eps / 3) / rows).sqrt()
    return torch.stack([azuma, eps]) + torch.exp(u.square() / 2) * beyond


@pytest.mark.parametrize("options", [{}, OURS, {"rho": "balanced"}], ids=["paper", "ours", "balanced"])
@torch.no_grad()
def test_bounds_by_hand(options):
    """Its own part at each activation, plus the slope of sin, about 1, times |W|_inf times what came before."""
    bundled, net, x = bounded(64, **options)
    x = x[:4]
    first, second = bundled.maps
    bound = error_bound(bundled, net, x, confidence=0.9)
    expected = by_hand(first, x, net[0].weight, net[0].bias, 4 * 6, failure=0.1 / 4).amax((1, 2))
    assert bound.azuma[0] == pytest.approx(float(expected[0]), rel=1e-9)
    assert bound.bernstein[0] == pytest.approx(float(expected[1]), rel=0.01)
    hat = net[2].weight @ first.psi(net[0].weight, net[0].bias)
    own = by_hand(second, first.phi(x), hat, net[2].bias, 4 * 6, failure=0.1 / 4).amax((1, 2))
    gain = float(net[2].weight.abs().sum(1).max())
    for found, part in ((bound.azuma, own[0]), (bound.bernstein, own[1])):
        assert 0.8 * gain * found[0] < found[1] - 0.99 * float(part)
        assert found[1] - 1.01 * float(part) < gain * found[0] * (1 + 1e-6)
        assert found[2] == pytest.approx(float(net[4].weight.abs().sum(1).max()) * found[1])
    surer = error_bound(bundled, net, x, confidence=0.999)
    assert surer.azuma[0] > bound.azuma[0] and surer.bernstein[0] > bound.bernstein[0]
    first.alpha.add_(0.5)  # now the first map estimates sin(z) + cos(z) / 2
    assert error_bound(bundled, net, x).bernstein[0] > bound.bernstein[0] + 0.45


@pytest.mark.parametrize("depth", [1, 2])
def test_bounds_fall_like_the_root_of_m(depth):
    """c grows with the logarithm of m, and the part of it in Bernstein's falls like 1/m: both go away."""
    small, large = (error_bound(*bounded(m, depth=depth + 1)) for m in (1024, 4096))
    for name in ("azuma", "bernstein"):
        pairs = zip(getattr(small, name), getattr(large, name), strict=True)
        slopes = [math.log(b / a) / math.log(4) for a, b in pairs]
        assert len(slopes) == depth + 1 and all(-0.6 < slope < -0.4 for slope in slopes), name


def test_bound_beyond_reach_is_infinite_and_printed():
    bound = error_bound(*bounded(8, depth=2, gain=300.0))
    assert bound.azuma == bound.bernstein == (math.inf, math.inf)
    text = str(ErrorBound(("1: Tanh",), (2.0,), (0.5,), (0.0123,), 0.95))
    assert text.splitlines()[1].split() == ["1:", "Tanh", "2", "0.5", "0.0123"]
    assert text.endswith("each bound holds with probability 0.95 over the rows of the maps")


def test_bound_with_inplace_activations_and_dropout():
    """A first layer out of reach is estimated by about a constant, so the range of the second is that of its true z."""

    class InPlace(nn.Module):
        def forward(self, x):
            return x.sin_()

    layers, x = [linear(8, 6, gain=3.0), linear(6, 3, 2, gain=3.0)], seeded(40, 8)
    plain, inplace = (nn.Sequential(layers[0], f, nn.Dropout(), layers[1], f) for f in (Sine(), InPlace()))
    options = {"feature_map": "urf", "activations": {Sine: "sin"}, "calibrate": x, "projection": "iid", **QUIET}
    bundled = bundle(plain, num_features=8, **options)
    bounds = [error_bound(bundled, net, x) for net in (plain, inplace)]
    assert bounds[0].layers == ("1: Sine", "4: Sine")
    assert dataclasses.replace(bounds[1], layers=bounds[0].layers) == bounds[0]


def test_bound_refuses_what_it_does_not_hold_for():
    net, x = mlp(8, 6, 3), seeded(40, 8)
    for feature_map, options in (("projected", QUIET), ("relu", {}), ("urf", QUIET), ("urf", {"normalize": "dim"})):
        options = options if feature_map != "urf" or options is QUIET else {"projection": "iid", **QUIET, **options}
        bundled = bundle(net, num_features=32, feature_map=feature_map, calibrate=x, **options)
        with pytest.raises(ValueError, match="URF maps with projection='iid', without normalize or A; got"):
            error_bound(bundled, net, x)
    bundled = bundle(net, num_features=32, feature_map="urf", calibrate=x, projection="iid", **QUIET)
    for layers in (net[:1], net[1:]):
        with pytest.raises(ValueError, match="layers must be Linear and 1 activations, one for each map; got"):
            error_bound(bundled, layers, x)
    for inputs, message in ((x[:0], r"there are none; got shape \(0, 8\)"), (x / 0, "input has 320 NaN or infinite")):
        with pytest.raises(ValueError, match=message):
            error_bound(bundled, net, inputs)
    with pytest.raises(ValueError, match="confidence must be between 0 and 1; got 95"):
        error_bound(bundled, net, x, confidence=95)
