"""URF against the complex estimator of the paper, and its errors against their predictions."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import optimize

from snnk import ACTIVATIONS, URF, ProjectedURF, UnreachableError
from snnk.maps import Activation
from snnk.maps.activations import Spectrum
from snnk.maps.series import Series
from snnk.maps.urf import best_A

from helpers import oracles
from helpers.maps import F64, estimate, unit

OURS = {"spectrum": "series", "antithetic": True, "rho": "balanced", "projection": None}  # URF, as a paper variant


@pytest.mark.parametrize("name", ["sin", "cos"])
@pytest.mark.parametrize("A", [0.0, -0.03])
@pytest.mark.parametrize("rho", ["paper", "balanced"])
def test_paper_equals_the_complex_estimator(name, A, rho):
    """Conjugate pairs in complex arithmetic, term by term, against two real features a projection."""
    d, p, b = 5, 4, 0.5
    x, w = unit(1, d, 0, 0.8), unit(1, d, 1, 1.3)
    fm = URF.paper(d, 2 * p, name, A=A, rho=rho, x_norm=0.8, w_norm=1.3, **F64)
    g = fm.projection.numpy() / math.sqrt(1 - 4 * A)  # the buffer carries sqrt(1 - 4A)
    split = (lambda xi: 2j * math.pi * xi) if rho == "paper" else (lambda xi: 1j * np.sign(xi) * math.sqrt(1.3 / 0.8))
    expected = oracles.complex_urf(x[0].numpy(), w[0].numpy(), b, g, ACTIVATIONS[name].spectrum.atoms, split, A)
    assert abs(expected.imag) < 1e-12
    assert float(estimate(fm, x, w, torch.tensor([b]))) == pytest.approx(expected.real, abs=1e-10)


def test_antithetic_is_the_mean_of_g_and_minus_g():
    x, w, b = unit(3, 5, 0), unit(2, 5, 1), torch.tensor([0.3, -0.7])
    both, single = (URF.paper(5, 8, "sin", **{**OURS, "antithetic": a}, **F64) for a in (True, False))
    assert torch.equal(both.phi(x), URF(5, 8, "sin", **F64).phi(x))
    up = estimate(single, x, w, b)
    single.projection.neg_()
    assert torch.allclose(estimate(both, x, w, b), (up + estimate(single, x, w, b)) / 2, atol=1e-12)


def test_balance_changes_variance_not_the_mean():
    x, w = unit(20, 16, 0, 3.0), unit(20, 16, 1, 1 / 3)

    def error(**norms):
        maps = (URF(16, 64, "sin", seed=s, on_error="ignore", **norms, **F64) for s in range(40))
        return torch.stack([(estimate(fm, x, w) - fm.exact(x, w)).square().mean() for fm in maps]).mean()

    assert error(x_norm=3.0, w_norm=1 / 3) < 0.3 * error()


def test_centre_is_exact():
    """A full orthogonal block of rows and a common shift of all inputs: the shift adds no error."""
    shift = 5 * torch.ones(8, dtype=torch.float64)
    x, w, b = unit(50, 8, 0, 0.3), unit(4, 8, 1), torch.linspace(-1, 1, 4)
    near = URF(8, 256, "sin", range=(-20, 20), **F64).calibrate(x - x.mean(0), w, b + w @ (shift + x.mean(0)))
    far = URF(8, 256, "sin", range=(-20, 20), **F64).calibrate(x + shift, w, b)
    assert torch.allclose(far.center, shift + x.mean(0))
    assert torch.allclose(estimate(far, x + shift, w, b), estimate(near, x - x.mean(0), w, b + w @ (shift + x.mean(0))))
    assert (estimate(far, x + shift, w, b) - far.exact(x + shift, w, b)).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_centre_in_half_precision(dtype):
    """Inputs and mean that bfloat16 holds exactly: what is left is the rounding of g, 2^-8 of each, and of phi."""
    steps = torch.randint(-8, 9, (20, 8), generator=torch.Generator().manual_seed(0)) / 32
    x = 4.25 + torch.cat([steps, -steps])
    fm = URF(8, 64, "sin").calibrate(x, unit(4, 8, 1))
    exact, found = fm.phi(x), copy.deepcopy(fm).to(dtype).phi(x.to(dtype)).float()
    assert (found - exact).abs().max() < 2**-8 * (1 + float(steps.norm(dim=1).max()) * 8**0.5) * exact.abs().max()


def fitted_once():
    """`Activation.series_on`, whose result is kept: maps that differ in their seed alone have the same series."""
    fit, known = Activation.series_on, {}

    def series_on(self, z, *options):
        key = (self.name, z.tobytes(), *options)
        if key not in known:
            known[key] = fit(self, z, *options)
        return known[key]

    return series_on


@pytest.mark.parametrize("name", ["sin", "cos", "gelu", "tanh", "sigmoid", "silu", "softplus", "erf"])
@pytest.mark.parametrize("projection", ["orthogonal", "iid"])
@pytest.mark.once
def test_predicted_error_is_the_measured_one(name, projection, monkeypatch):
    d, m, kappa = 32, 160, 0.9
    monkeypatch.setattr(Activation, "series_on", fitted_once())
    x, w = unit(60, d, 0, kappa), unit(40, d, 1)
    b = torch.linspace(-0.5, 0.5, 40, dtype=torch.float64)
    z = (x @ w.T + b).flatten()
    options = {"projection": projection, "x_norm": kappa, "range": (float(z.min()), float(z.max())), **F64}
    maps = [URF(d, m, name, on_error="ignore", seed=seed, **options) for seed in range(40)]
    measured = torch.stack([(estimate(fm, x, w, b) - fm.exact(x, w, b)).square().mean() for fm in maps]).mean()
    ratio = float(measured / maps[-1].predicted_error(w, b).mean())
    assert 0.5 < ratio < 1.6


@pytest.mark.once
def test_predicted_error_of_the_paper_map():
    x, w, b = unit(40, 32, 0), unit(40, 32, 1), torch.full((40,), 0.5).double()
    maps = [URF.paper(32, 256, "sin", seed=s, **F64) for s in range(100)]
    measured = torch.stack([(estimate(fm, x, w, b) - fm.exact(x, w, b)).square().mean() for fm in maps]).mean()
    assert float(measured / maps[0].predicted_error(w, b).mean()) == pytest.approx(1, abs=0.35)


def across(n, d, norm):
    """n pairs x, w at right angles, |x| = norm and |w| = 1, and biases b that go once round the circle."""
    x, w = unit(n, d, 0, norm), unit(n, d, 1)
    w = w - (w * x).sum(1, keepdim=True) / norm**2 * x
    return x, w / w.norm(dim=1, keepdim=True), torch.arange(n, dtype=torch.float64) * 2 * math.pi / n


def squared_errors(make, x, w, b, draws):
    """Mean over the pairs of the squared error of f(w.x + b) for each of `draws` maps, (draws,)."""
    maps = (make(seed) for seed in range(draws))
    return torch.stack(
        [((fm.phi(x) * fm.psi(w, b)).sum(1) - fm.activation(b + (x * w).sum(1))).square().mean() for fm in maps]
    )


def assert_mean(values, expected, slack=0.0, precision=0.03):
    """Within five standard errors, each less than `precision` of it: large error bars would prove nothing."""
    error = float(values.std() / len(values) ** 0.5)
    assert error < precision * expected
    assert abs(float(values.mean()) - expected) <= 5 * error + slack * expected


@pytest.mark.parametrize("antithetic", [True, False])
@pytest.mark.once
def test_predicted_error_of_independent_rows_is_exact(antithetic):
    """For pairs at right angles and rows that are Gaussian every moment is known: no slack but that of the draws."""
    x, w, b = across(40, 8, 0.9)

    def make(seed):
        options = {**OURS, "projection": "iid", "antithetic": antithetic}
        return URF.paper(8, 32, "sin", x_norm=0.9, seed=seed, **options, **F64)

    assert_mean(squared_errors(make, x, w, b, 1500), float(make(0).predicted_error(w, b).mean()))


@pytest.mark.parametrize("t", [0.2, 0.6])
@pytest.mark.once
def test_aligned_pairs_have_at_most_twice_the_predicted_error(t):
    """For x = t w and sin: the mean of sin^2(g.u) sinh^2(g.v), |u|^2 = |v|^2 = u.v = t, less sin^2(t), all known."""
    w = unit(40, 8, 1)
    x, b = t * w, torch.zeros(40, dtype=torch.float64)

    def make(seed):
        return URF(8, 32, "sin", projection="iid", x_norm=t, seed=seed, on_error="ignore", **F64)

    exact = ((2 * math.cosh(2 * t) - 1 - math.cos(4 * t)) / 4 - math.sin(t) ** 2) / 16
    assert_mean(squared_errors(make, x, w, b, 1500), exact)
    predicted = float(make(0).predicted_error(w, b).mean())
    assert predicted < exact < 2 * predicted


@pytest.mark.once
def test_predicted_error_of_sampled_frequencies():
    """They vary as well. The prediction takes its moments from the frequencies that were drawn: 1/P of it is lost."""
    x, w, b = across(40, 8, 0.5)

    def make(seed):
        return URF.paper(8, 128, "tanh", rho="balanced", antithetic=True, x_norm=0.5, seed=seed, **F64)

    predicted = torch.stack([make(seed).predicted_error(w, b).mean() for seed in range(400)])
    measured = squared_errors(make, x, w, b, 400)
    assert_mean(measured - predicted + predicted.mean(), float(predicted.mean()), slack=1 / 64, precision=0.06)


@pytest.mark.parametrize(("d", "rows"), [(8, 8), (8, 11), (16, 10), (64, 64)])
@pytest.mark.once
def test_error_of_orthogonal_rows_is_what_harmonics_say(d, rows):
    """Measured against the exact error, and the prediction against both: never too small, and right for large d."""
    x, w, b = across(40, d, 0.9)

    def make(seed):
        return URF(d, 2 * rows, "sin", projection="orthogonal", x_norm=0.9, seed=seed, on_error="ignore", **F64)

    whole, left = divmod(rows, d)
    exact = (whole * d * oracles.orthogonal_variance(d, d, 0.9) + left * oracles.orthogonal_variance(d, left, 0.9)) / (
        rows**2
    )
    assert_mean(squared_errors(make, x, w, b, 1000), exact)
    predicted = float(make(0).predicted_error(w, b).mean())
    assert exact < predicted < (1 + 14 / d) * exact


@pytest.mark.parametrize("d", [8, 32])
def test_predicted_variance_and_bias_of_orthogonal_rows(d):
    """P rows in whole blocks are predicted to have V / P + B: V of Gaussian rows, B the square of the sphere's bias."""
    kappa, w, b = 0.9, unit(5, d, 1), torch.linspace(0, 2, 5, dtype=torch.float64)
    one, two = (
        URF(d, 2 * rows, "sin", projection="orthogonal", x_norm=kappa, on_error="ignore", **F64).predicted_error(w, b)
        for rows in (d, 2 * d)
    )
    variance, bias_squared = 2 * d * (one - two), 2 * two - one
    # of sin(z + b) a block of orthogonal rows has all but the first order of sinh^2 left, whatever b is
    assert torch.allclose(variance, torch.full_like(variance, math.sinh(kappa) ** 2 - kappa**2), rtol=1e-9)
    # z^2 / (d + 2) is the first order in 1 / d of the bias: E z^4 / (d + 2)^2 its square, the next is z^2 / d of it
    assert bias_squared.numpy() == pytest.approx(oracles.sphere_bias_squared(d, kappa), rel=kappa**2 / d)


@pytest.mark.parametrize(
    ("d", "p", "nx", "nw", "bound"),
    [(64, 64, 1, 1, 0.12), (64, 64, 2, 0.5, 0.02), (16, 256, 1, 1, 0.10), (64, 64, 2**0.5, 2**0.5, 0.33)],
)
@pytest.mark.once
def test_default_beats_the_paper_at_equal_features(d, p, nx, nw, bound):
    """The claims of `snnk reproduce estimators` on URF hold in float64."""
    x, w, b = unit(32, d, 0, nx), unit(32, d, 1, nw), torch.full((32,), 0.5)

    def error(make, draws=40):
        maps = (make(s) for s in range(draws))
        return torch.stack([(estimate(fm, x, w, b) - fm.exact(x, w, b)).square().mean() for fm in maps]).mean()

    ours = error(lambda s: URF(d, 2 * p, "sin", x_norm=nx, w_norm=nw, seed=s, on_error="ignore", **F64))
    paper = error(lambda s: URF.paper(d, 2 * p, "sin", seed=s, **F64))
    # the least of the three, with the least spread: a few maps tell a tenth
    options = {"x_norm": nx, "w_norm": nw, "on_error": "ignore", **F64}
    projected = error(lambda s: ProjectedURF(d, 2 * p, "sin", seed=s, **options), draws=8)
    assert ours < bound * paper
    assert projected < 0.1 * ours


def test_warning_refusal_and_how_to_turn_them_off():
    w = unit(4, 64, 0, 2.0)
    with pytest.warns(UserWarning, match="features would do"):
        URF(64, 32, "sin", w_norm=2.0, range=(-2, 2)).psi(w)
    far = unit(4, 16, 0, 9.0)
    with pytest.raises(UnreachableError, match=r"predicted squared error.*Not even 131072 features.*on_error='warn'"):
        URF(16, 64, "sin").psi(far)
    with pytest.raises(UnreachableError, match="predicted squared error inf"):
        URF(16, 64, "sin").psi(10 * far)
    with pytest.warns(UserWarning, match="predicted"):
        URF(16, 64, "sin", on_error="warn").psi(far)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        URF(16, 64, "sin", on_error="ignore").psi(far)
        URF(16, 64, "sin").psi(far, check=False)
        URF(16, 64, "sin").psi(torch.zeros(2, 16))


def test_number_of_features_in_the_warning_is_enough():
    w = unit(4, 64, 0, 2.0)
    with pytest.warns(UserWarning) as caught:
        URF(64, 32, "sin", w_norm=2.0, range=(-2, 2)).psi(w)
    enough = int(str(caught[0].message).split("About ")[1].split()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        URF(64, enough, "sin", w_norm=2.0, range=(-2, 2)).psi(w)


def test_weights_outside_the_fitted_range_are_named():
    fm = URF(8, 256, "tanh")
    with pytest.warns(UserWarning, match=r"1 of 2 outputs centre outside \(-1, 1\).*calibrate"):
        fm.psi(unit(2, 8, 0, 0.5), torch.tensor([0.0, 7.0]))


def test_own_series_is_the_whole_function_or_none():
    """A constant, a straight line or more deltas than projections beside the pair of a sine: not its own series."""
    pair = ACTIVATIONS["sin"].spectrum.atoms
    for spectrum in (Spectrum(((0.0, 1.0), *pair)), Spectrum(pair, slope=1.0), Spectrum(((0.0, 1.0),))):
        assert Activation("mine", torch.sin, spectrum).own_series(8) is None
    many = Spectrum(tuple((k / 6, 1.0 + 0j) for k in (-3, -2, -1, 1, 2, 3)))
    assert Activation("mine", torch.sin, many).own_series(2) is None
    assert Activation("mine", torch.sin, many).own_series(7).counts.tolist() == [3, 2, 2]
    spectrum = Spectrum(((0.0, 1.0), *ACTIVATIONS["cos"].spectrum.atoms))
    x, w = unit(5, 8, 0, 0.5), unit(4, 8, 1, 0.5)
    mine = Activation("mine", lambda z: 1 + torch.cos(z), spectrum)
    fm = URF(8, 256, mine, x_norm=0.5, w_norm=0.5, on_error="ignore", **F64)
    assert torch.allclose(estimate(fm, x, w), 1 + torch.cos(x @ w.T), atol=0.05)


def test_very_long_inputs_are_bounded_unless_rows_are_asked_to_be_gaussian():
    x = unit(1, 8, 0)
    bounded = URF(8, 16, "cos", **F64)
    free = URF(8, 16, "cos", projection="iid", **F64)
    growth = (free.phi(9 * x).norm() / free.phi(x).norm()).item()
    assert growth == pytest.approx(math.exp((81 - 1) / 2), rel=1e-6)
    assert (bounded.phi(9 * x).norm() / bounded.phi(x).norm()).item() == pytest.approx(math.exp(5), rel=1e-6)
    assert (bounded.phi(3 * x).norm() / bounded.phi(x).norm()).item() == pytest.approx(math.exp(4), rel=1e-6)
    assert free.unbiased and not bounded.unbiased and not URF(2, 16, "cos").unbiased


def test_calibrated_sine_is_fitted_and_better():
    """sin keeps its exact atom until its range is known, then takes the series of least predicted error."""
    x, w, b = unit(64, 64, 0), unit(64, 64, 1), torch.full((64,), 0.5)
    exact = URF(64, 128, "sin", on_error="ignore", **F64)
    fitted = URF(64, 128, "sin", on_error="ignore", **F64).calibrate(x, w, b)
    assert exact.misfit == 0 and (exact.rho * exact.eta).unique().numel() == 1
    errors = [(estimate(fm, x, w, b) - fm.exact(x, w, b)).square().mean() for fm in (exact, fitted)]
    assert errors[1] < 0.1 * errors[0]


def test_calibration_survives_the_state_dict():
    x, w, b = 2 + unit(100, 8, 0), unit(6, 8, 1), torch.linspace(-1, 1, 6)
    fm = URF(8, 128, "gelu").calibrate(x, w, b)
    fresh = URF(8, 128, "gelu")
    fresh.load_state_dict(fm.state_dict())
    assert torch.equal(fm.psi(w, b), fresh.psi(w, b)) and torch.equal(fm.phi(x.float()), fresh.phi(x.float()))
    assert fm.z_range[0] < float((x @ w.T + b).min()) + 0.1 and torch.allclose(fm.center.double(), x.mean(0))


def test_calibrate_takes_any_part():
    x, w = 1 + unit(30, 8, 0), unit(6, 8, 1, 0.5)
    fm = URF(8, 64, "tanh")
    assert fm.calibrate(weight=w).w_norm == pytest.approx(0.5)
    assert fm.calibrate(x).center.norm() > 1 and fm.calibrate(x).w_norm == 1
    assert URF(8, 64, "tanh", range=(-4, 4)).calibrate(x, w).z_range == (-4, 4)


def test_constructor_ranges_and_a_series_of_ones_own():
    assert URF(8, 64, "tanh", x_norm=2.0, w_norm=0.5).z_range == (-1, 1)
    series = Series(np.array([1.0, 2.0]), np.array([0.5, 0.0]), np.array([0.0, 0.2]), np.array([5, 3]))
    fm = URF.paper(8, 16, torch.nn.Tanh(), spectrum=series, **F64)
    assert torch.allclose((fm.rho * fm.eta), torch.tensor([1.0] * 5 + [2.0] * 3).double())
    with pytest.raises(ValueError, match="shares out 8 projections; num_features needs 4"):
        URF.paper(8, 8, "tanh", spectrum=series)


def test_best_A_is_the_minimum_of_the_second_moment():
    for v, d in ((0.5, 4), (1.0, 16), (2.0, 64), (1.0, 2000)):

        def second_moment(a, v=v, d=d):
            return d * np.log1p(4 * a) - d / 2 * np.log1p(8 * a) + 2 * v**2 * (1 + 4 * a) / (1 + 8 * a)

        best = optimize.minimize_scalar(second_moment, bounds=(0, 5), method="bounded", options={"xatol": 1e-12}).x
        assert float(best_A(np.array(v), d)) == pytest.approx(-best, rel=1e-3)
    assert float(best_A(np.array(1.0), 2000)) == pytest.approx(-1 / 4000, rel=0.01)


def test_large_norms_stay_finite():
    """All exponents are combined before one exp."""
    x, w = unit(3, 64, 0, 30.0).float(), unit(3, 64, 1, 1.0)
    fm = URF(64, 32, "sin", x_norm=30.0, on_error="ignore")
    assert fm.phi(x).isfinite().all() and fm.psi(w).isfinite().all()
    huge = 1e3 * torch.ones(1, 64)
    assert URF(64, 32, "sin").phi(huge).isfinite().all()
    assert URF(64, 32, "gelu").bfloat16().phi(huge.bfloat16()).isfinite().all()
    assert URF.paper(2000, 16, "sin", A=-0.05).phi(unit(2, 2000, 0).float()).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"range": (1, 2, 3)}, "range must be two finite numbers"),
        ({"on_error": "stop"}, "Known: raise, warn, ignore"),
        ({"normalize": "units"}, "did you mean 'unit'"),
        ({"projection": "haar"}, "Known: iid, orthogonal"),
        ({"x_norm": 0.0}, "x_norm must be a positive number"),
        ({"range": (1, 0)}, "low < high"),
    ],
)
@pytest.mark.once
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        URF(8, 16, "sin", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"A": 0.1}, "A must be a finite number <= 0"),
        ({"A": -math.inf}, "A must be a finite number <= 0"),
        ({"A": -0.1, "projection": "orthogonal"}, "needs Gaussian rows"),
        ({"rho": "balnced"}, "did you mean 'balanced'"),
        ({"spectrum": "fourier"}, "Known: sampled, series"),
    ],
)
@pytest.mark.once
def test_bad_options_of_the_paper_map(options, message):
    with pytest.raises(ValueError, match=message):
        URF.paper(8, 16, "sin", **options)


@pytest.mark.once
def test_bad_seed():
    with pytest.raises(TypeError, match="seed must be an integer"):
        URF(8, 16, "sin", seed=1.5)
