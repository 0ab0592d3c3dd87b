import copy
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from snnk import ACTIVATIONS, FEATURE_MAPS, URF, ArcCosine, PowerSeries, ProjectedURF, SNNKLinear, UnreachableError
from snnk.maps import Activation, make_feature_map
from snnk.maps.activations import Spectrum
from snnk.maps.projected import BANDWIDTHS
from snnk.maps.sampled import Sampled
from snnk.maps.series import Series
from snnk.maps.urf import best_A

from helpers import oracles

F64 = {"dtype": torch.float64}


def unit(n, d, seed, norm=1.0):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True) * norm


OURS = {"spectrum": "series", "antithetic": True, "rho": "balanced", "projection": None}  # URF, as a paper variant


def estimate(fm, x, w, b=None):
    return fm.phi(x) @ fm.psi(w, b).T


# --- URF -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", ["sin", "cos", "gelu", "tanh", "sigmoid", "silu", "softplus", "erf"])
@pytest.mark.parametrize("projection", ["orthogonal", "iid"])
def test_predicted_error_is_the_measured_one(name, projection):
    d, m, kappa = 32, 160, 0.9
    x, w = unit(60, d, 0, kappa), unit(40, d, 1)
    b = torch.linspace(-0.5, 0.5, 40, dtype=torch.float64)
    z = (x @ w.T + b).flatten()
    measured, predicted = [], 0.0
    for seed in range(40):
        fm = URF(
            d, m, name, projection=projection, x_norm=kappa, range=(float(z.min()), float(z.max())), seed=seed, **F64
        )
        fm.on_error = "ignore"
        measured.append((estimate(fm, x, w, b) - fm.exact(x, w, b)).square().mean())
        predicted = float(fm.predicted_error(w, b).mean())
    ratio = float(torch.stack(measured).mean()) / predicted
    assert 0.5 < ratio < 1.6


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
def test_predicted_error_of_independent_rows_is_exact(antithetic):
    """For pairs at right angles and rows that are Gaussian every moment is known: no slack but that of the draws."""
    x, w, b = across(40, 8, 0.9)

    def make(seed):
        options = {**OURS, "projection": "iid", "antithetic": antithetic}
        return URF.paper(8, 32, "sin", x_norm=0.9, seed=seed, **options, **F64)

    assert_mean(squared_errors(make, x, w, b, 1500), float(make(0).predicted_error(w, b).mean()))


@pytest.mark.parametrize("t", [0.2, 0.6])
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


def test_predicted_error_of_sampled_frequencies():
    """They vary as well. The prediction takes its moments from the frequencies that were drawn: 1/P of it is lost."""
    x, w, b = across(40, 8, 0.5)

    def make(seed):
        return URF.paper(8, 128, "tanh", rho="balanced", antithetic=True, x_norm=0.5, seed=seed, **F64)

    predicted = torch.stack([make(seed).predicted_error(w, b).mean() for seed in range(400)])
    measured = squared_errors(make, x, w, b, 400)
    assert_mean(measured - predicted + predicted.mean(), float(predicted.mean()), slack=1 / 64, precision=0.06)


@pytest.mark.parametrize(("d", "rows"), [(8, 8), (8, 11), (16, 10), (64, 64)])
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
def test_default_beats_the_paper_at_equal_features(d, p, nx, nw, bound):
    """What `snnk reproduce estimators` claims of URF, in float64."""
    x, w, b = unit(32, d, 0, nx), unit(32, d, 1, nw), torch.full((32,), 0.5)

    def error(make):
        maps = (make(s) for s in range(40))
        return torch.stack([(estimate(fm, x, w, b) - fm.exact(x, w, b)).square().mean() for fm in maps]).mean()

    ours = error(lambda s: URF(d, 2 * p, "sin", x_norm=nx, w_norm=nw, seed=s, on_error="ignore", **F64))
    paper = error(lambda s: URF.paper(d, 2 * p, "sin", seed=s, **F64))
    projected = error(lambda s: ProjectedURF(d, 2 * p, "sin", x_norm=nx, w_norm=nw, seed=s, on_error="ignore", **F64))
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


def test_block_iid_shares_frequencies():
    omega, *_ = Sampled(block_size=4).rows(ACTIVATIONS["tanh"], -1, 1, 40, torch.Generator().manual_seed(0))
    blocks = omega.reshape(10, 4)
    assert (blocks == blocks[:, :1]).all() and len(set(blocks[:, 0])) == 10
    omega, *_ = Sampled().rows(ACTIVATIONS["tanh"], -1, 1, 40, torch.Generator().manual_seed(0))
    assert len(set(omega)) == 40


def test_reach_of_sampled_maps_is_kept():
    """The proposal follows the reach, and weights beyond it are refused however small the sample's own error."""
    fm = URF.paper(6, 400, "tanh", antithetic=True, rho="balanced", w_norm=1.4, on_error="raise")
    with pytest.raises(UnreachableError, match=r"below 1\.57"):
        fm.psi(unit(2, 6, 0, 1.6))
    omegas = [
        np.mean(Sampled().rows(ACTIVATIONS["tanh"], -1, 1, 4000, torch.Generator().manual_seed(0), kappa)[0])
        for kappa in (0.1, 1.4)
    ]
    assert omegas[1] > 3 * omegas[0]


def test_very_long_inputs_are_bounded_unless_rows_are_asked_to_be_gaussian():
    x = unit(1, 8, 0)
    bounded = URF(8, 16, "cos", **F64)
    free = URF(8, 16, "cos", projection="iid", **F64)
    growth = (free.phi(9 * x).norm() / free.phi(x).norm()).item()
    assert growth == pytest.approx(math.exp((81 - 1) / 2), rel=1e-6)
    assert (bounded.phi(9 * x).norm() / bounded.phi(x).norm()).item() == pytest.approx(math.exp(5), rel=1e-6)
    assert (bounded.phi(3 * x).norm() / bounded.phi(x).norm()).item() == pytest.approx(math.exp(4), rel=1e-6)
    assert free.unbiased and not bounded.unbiased and not URF(2, 16, "cos").unbiased


def test_few_dimensions():
    """Rows of one length have one frequency; below four dimensions, and in ProjectedURF, they have chi lengths."""
    for d in (1, 2, 3):
        x, w = unit(50, d, 0), unit(20, d, 1)
        for fm in (URF(d, 4096, "sin", **F64), ProjectedURF(d, 64, "gelu", **F64)):
            error = (estimate(fm, x, w) - fm.exact(x, w)).square().mean()
            assert error < 0.02 * fm.exact(x, w).var()


@pytest.mark.parametrize("cls", [URF, ProjectedURF])
def test_degenerate_calibration(cls):
    fm, x, w = cls(4, 64, "gelu"), unit(9, 4, 0), unit(3, 4, 1)
    for zero in ((x, 0 * w), (0 * x, w), (x[:1], w), (x[:1].expand(5, 4), w)):
        assert fm.calibrate(*zero).psi(zero[1]).isfinite().all()
    assert fm.psi(w[:0]).shape == (0, 64)
    for bad, message in (((x[:0], w), "at least one row of input"), ((x, w[:0]), "at least one row of weight")):
        with pytest.raises(ValueError, match=message):
            fm.calibrate(*bad)
    with pytest.raises(ValueError, match="bias without a weight"):
        fm.calibrate(x, bias=torch.zeros(3))
    with pytest.raises(TypeError, match=r"must be a torch.Tensor; got list"):
        fm.calibrate([[1.0] * 4])
    with pytest.raises(ValueError, match="log must give a finite number"):
        cls(4, 64, torch.log).psi(w)


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


@pytest.mark.parametrize("cls", [URF, ProjectedURF])
def test_typical_norms_are_root_mean_squares(cls):
    """The predicted error is a mean of squares, over the distances of inputs to their mean and over weights."""
    x, w = torch.tensor([[3.0, 1], [3, -1], [-3, 5], [-3, -5]]), torch.tensor([[0.1, 0.0], [0.0, 0.7]])
    fm = cls(2, 64, "tanh", on_error="ignore", **F64).calibrate(x + 10, w)
    assert [float(fm.x_norm), float(fm.w_norm)] == pytest.approx([22**0.5, 0.5])


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


def test_other_proposals():
    for proposal in (stats.norm(scale=0.4), [stats.norm(scale=s) for s in (1, 1, 0.4, 0.5)]):
        fm = URF.paper(6, 400, "erf", proposal=proposal, rho="balanced", **F64)
        assert fm.psi(unit(2, 6, 0)).isfinite().all()
    with pytest.raises(ValueError, match=r"one distribution or four.*got 2"):
        URF.paper(6, 400, "erf", proposal=[stats.norm(), stats.norm()])
    with pytest.raises(ValueError, match="has 2 parts; num_features must be at least 4"):
        URF.paper(6, 2, "sigmoid")


def test_psi_is_differentiable():
    w, b = unit(3, 8, 0).requires_grad_(), torch.zeros(3, dtype=torch.float64, requires_grad=True)
    projected = ProjectedURF(8, 32, "sin", bandwidth=1.0, on_error="ignore", **F64)
    for fm in (URF(8, 256, "sin", **F64), projected, ArcCosine(8, 16, augment=True, **F64)):
        assert torch.autograd.gradcheck(lambda w, b, fm=fm: fm.psi(w, b)[:, :5], (w, b), atol=1e-5)


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
def test_bad_options_of_the_paper_map(options, message):
    with pytest.raises(ValueError, match=message):
        URF.paper(8, 16, "sin", **options)


def test_bad_seed():
    with pytest.raises(TypeError, match="seed must be an integer"):
        URF(8, 16, "sin", seed=1.5)


# --- normalize -------------------------------------------------------------------------------------------------------


def test_normalize():
    x, w = unit(4, 16, 0, 3.0), unit(5, 16, 1, 2.0)
    dim = URF(16, 32, "sin", normalize="dim", on_error="ignore", **F64)
    assert torch.allclose(dim.exact(x, w), torch.sin(x @ w.T / 4))
    assert torch.allclose(dim.phi(x), URF(16, 32, "sin", on_error="ignore", **F64).phi(x / 2))
    sphere = URF(16, 32, "sin", normalize="unit", on_error="ignore", **F64)
    assert torch.allclose(sphere.exact(x, w), torch.sin(x @ w.T / 6))
    assert torch.allclose(sphere.phi(x), sphere.phi(7 * x))


# --- arc-cosine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 1, 2])
def test_arccos_kernel_against_quadrature(order):
    x, w = unit(3, 4, 0, 1.5), unit(3, 4, 1, 0.7)
    exact = ArcCosine(4, 8, order, **F64).exact(x, w)
    for i in range(3):
        for j in range(3):
            assert float(exact[i, j]) == pytest.approx(
                oracles.half_arccos_kernel(x[i].numpy(), w[j].numpy(), order), abs=1e-6
            )


def test_relu_snnk_is_the_papers_map():
    """phi(x) = ReLU(Gx / sqrt(l)), and psi the same of w."""
    fm = ArcCosine(4, 9, projection="iid", **F64)
    x = unit(3, 4, 0)
    assert torch.allclose(fm.phi(x), torch.relu(x @ fm.projection.T))
    assert torch.allclose(fm.phi(x), fm.psi(x))
    many = ArcCosine(4, 40000, projection="iid", **F64)
    assert float(many.projection.square().mean()) * 40000 == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_arccos_is_no_function_of_the_dot_product(order):
    """Two pairs with equal x.w and different kernel values, exactly and as estimated: more than any f(x.w + b)."""
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    near, far = (torch.tensor([[0.5, height]], dtype=torch.float64) for height in (0.0, 2.0))
    assert torch.equal(x @ near.T, x @ far.T)
    fm = ArcCosine(2, 4000, order, **F64)
    a, b = fm.exact(x, near), fm.exact(x, far)
    assert (a - b).abs() > 0.1
    assert (estimate(fm, x, near) - estimate(fm, x, far) - (a - b)).abs() < 0.2 * (a - b).abs()


def test_arccos_bias():
    x, w, b = unit(3, 4, 0), unit(3, 4, 1), torch.tensor([0.5, -0.5, 1.0])
    plain = ArcCosine(4, 8, **F64)
    assert torch.equal(plain.psi(w, b), plain.psi(w))
    augmented = ArcCosine(4, 8, augment=True, **F64)
    assert not torch.allclose(augmented.psi(w, b), augmented.psi(w))
    assert (plain.exact(torch.zeros(1, 4), w) == 0).all()
    ones = torch.cat([x, torch.ones(3, 1)], 1), torch.cat([w, b[:, None]], 1)
    assert torch.allclose(augmented.exact(x, w, b), ArcCosine(5, 8, **F64).exact(*ones))
    with pytest.raises(ValueError, match="order must be 0, 1 or 2; got 3"):
        ArcCosine(4, 8, 3)


# --- power series ----------------------------------------------------------------------------------------------------


def test_power_series_exact_is_the_taylor_polynomial():
    x, w, b = unit(3, 4, 0, 0.5), unit(3, 4, 1), torch.tensor([0.1, 0.0, -0.2])
    for name in ("tanh", "gelu", "sigmoid", "sin"):
        fm = PowerSeries(4, 8, name, **F64)
        assert torch.allclose(fm.exact(x, w, b), ACTIVATIONS[name](x @ w.T + b), atol=2e-4)


def test_power_series_structure():
    fm = PowerSeries(4, 2000, "tanh", **F64)
    positive, negative = fm.degrees
    assert set(positive.tolist()) <= {1, 5, 9} and set(negative.tolist()) <= {3, 7, 11}
    assert (positive == 1).double().mean() == pytest.approx(256 / 273, abs=0.03)  # 2^-2 of 2^-2 + 2^-6 + 2^-10
    assert fm.projection.abs().unique().tolist() == [1.0]
    x = unit(3, 4, 0)
    first = x @ fm.projection[0, :, :-1].T + fm.projection[0, :, -1]  # shared by both parts
    row = int((positive == 1).nonzero()[0])
    p_one = 256 / 273
    assert torch.allclose(fm.phi(x)[:, row], first[:, row] * math.sqrt(1 / p_one / 1000))


def test_power_series_errors():
    with pytest.raises(ValueError, match="relu has no Taylor series at 0; known: sin, cos"):
        PowerSeries(4, 8, "relu")
    with pytest.raises(ValueError, match="not all zero"):
        PowerSeries(4, 8, coefficients=[0.0])
    assert PowerSeries(4, 7, coefficients=[1.0, 1.0, 0.5]).num_features == 7
    one = torch.ones(1, 4)
    assert float(estimate(PowerSeries(4, 6, coefficients=[2.0]), one, one)) == pytest.approx(2.0)


# --- projected -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "gelu", "sin"])
@pytest.mark.parametrize("norm", [1.0, 6.0])
def test_projected_psi_is_the_least_squares_one(name, norm):
    """Against ridge regression on a large Gaussian sample, and the predicted error against a fresh one."""
    d, m = 4, 12
    g = torch.Generator().manual_seed(0)
    x, test = (torch.randn(200000, d, generator=g, dtype=torch.float64) / d**0.5 + 0.2 for _ in range(2))
    w, b = unit(3, d, 1, norm), torch.tensor([0.3, 0.0, -0.8]).double()
    fm = ProjectedURF(d, m, name, on_error="ignore", bandwidth=1.0, **F64)
    fm.center.fill_(0.2)
    phi = fm.phi(x)
    best = torch.linalg.lstsq(phi, fm.exact(x, w, b)).solution.T
    error = (estimate(fm, test, w, b) - fm.exact(test, w, b)).square().mean(0)
    fitted = (fm.phi(test) @ best.T - fm.exact(test, w, b)).square().mean(0)
    assert torch.allclose(error, fitted, rtol=0.05)
    assert torch.allclose(error, fm.predicted_error(w, b), rtol=0.05)


def test_projected_needs_no_reach():
    """|x||w| = 6, far past the pi/2 of tanh: predicted is measured, and half the error of the calibrated URF."""
    d = 8
    w = unit(20, d, 1, 6.0)
    x = torch.randn(2000, d, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / d**0.5
    urf = URF(d, 256, "tanh", on_error="ignore").calibrate(x, w)
    blind = (estimate(urf, x.float(), w) - urf.exact(x, w)).square().mean()
    fm = ProjectedURF(d, 256, "tanh", on_error="ignore").calibrate(x, w)
    error = (estimate(fm, x.float(), w) - fm.exact(x, w)).square().mean()
    assert float(error / fm.predicted_error(w).mean()) == pytest.approx(1, abs=0.1)
    assert error < 0.5 * blind


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_projected_bandwidth_is_the_best_of_the_grid(shift):
    """For the layer as it is, its bias and the mean of its inputs included."""
    x, w = unit(500, 8, 0) + shift, unit(16, 8, 1, 3.0)
    options = {"on_error": "ignore", **F64}
    errors = {
        b: float(ProjectedURF(8, 64, "gelu", bandwidth=b, **options).calibrate(x, w).predicted_error(w).mean())
        for b in BANDWIDTHS
    }
    chosen = float(ProjectedURF(8, 64, "gelu", **options).calibrate(x, w).predicted_error(w).mean())
    assert chosen == pytest.approx(min(errors.values()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_projected_psi_counts_on_the_digits_that_features_have(dtype):
    """More features than their digits can tell apart: the error stays below the one that is predicted."""
    g = torch.Generator().manual_seed(5)
    x, w = (torch.randn(4000, 4, generator=g) / 2).to(dtype), unit(6, 4, 1)
    fm = ProjectedURF(4, 256, "gelu", bandwidth=1.0, dtype=dtype)
    error = (fm.phi(x).double() @ fm.psi(w).double().T - fm.exact(x.double(), w)).square().mean()
    assert float(error) < float(fm.predicted_error(w).mean()) < 0.01 * float(fm.exact(x.double(), w).var())


def test_projected_warns_and_refuses():
    w = unit(4, 64, 0)
    with pytest.raises(UnreachableError, match="Use more features"):
        ProjectedURF(64, 2, "sin").psi(w)
    with pytest.warns(UserWarning, match="Use more features"):
        ProjectedURF(64, 64, "sin").psi(w)


# --- registry --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_named_map_can_be_made(name):
    fm = make_feature_map(name, 6, 16)
    assert fm.phi(torch.ones(2, 6)).shape == (2, 16) and "num_features=16" in repr(fm)


def test_make_feature_map_errors():
    with pytest.raises(ValueError, match="unknown feature map 'rleu'; did you mean 'relu'"):
        make_feature_map("rleu", 6, 16)
    with pytest.raises(ValueError, match="map is 6 -> 8; the layer needs 6 -> 16"):
        make_feature_map(ArcCosine(6, 8), 6, 16)
    with pytest.raises(TypeError, match="normalize cannot change a feature map that is given"):
        make_feature_map(ArcCosine(6, 8), 6, 8, normalize="dim")
    assert isinstance(URF.paper(6, 8, "sin").variant.spectrum, Sampled)


@pytest.mark.parametrize("kind", [URF, ProjectedURF])
@pytest.mark.parametrize("value", [1e2, 1e10, 1e30, 3e38])
@pytest.mark.parametrize("count", [1, 9])
def test_outliers_among_calibration_inputs_are_refused(kind, value, count):
    """One input of 1e30 made all outputs NaN, and one of 1e10 made them 1e6, without a warning."""
    x, linear = torch.randn(1000, 64) / 8, torch.nn.Linear(64, 8)
    x[3 : 3 + count, 5] = value
    fm = kind(64, 32, "gelu", on_error="ignore")
    with pytest.raises(ValueError, match=r"row \d+, column 5 is .* remove them"):
        SNNKLinear.from_linear(linear, "gelu", 32, feature_map=fm, inputs=x)
    keep = x[:, 5].abs() < 50  # the advice
    layer = SNNKLinear.from_linear(linear, "gelu", 32, feature_map=fm, inputs=x[keep])
    assert layer(x[keep]).isfinite().all()


@pytest.mark.parametrize("kind", [URF, ProjectedURF])
def test_inputs_of_one_size_are_no_outliers(kind):
    flags = torch.zeros(500, 4)
    flags[:4] = 1  # rare, but no larger than others of their kind
    for x in (torch.ones(50, 4), torch.eye(4).repeat(9, 1), torch.randn(11, 4), torch.randn(500, 4).exp(), flags):
        kind(4, 8, "sin", on_error="ignore").calibrate(x)


@pytest.mark.parametrize("size", [1e30, 1e37])
def test_inputs_beyond_float32_squares_are_refused(size):
    """A predicted error or a variance that overflowed is not small."""
    x, linear = torch.randn(1000, 64) * size, torch.nn.Linear(64, 8)
    with pytest.raises(UnreachableError):
        SNNKLinear.from_linear(linear, "gelu", 32, inputs=x)
    with pytest.warns(UserWarning, match="predicted squared error"):  # it computes in float64
        SNNKLinear.from_linear(linear, "gelu", 32, feature_map=ProjectedURF(64, 32, "gelu"), inputs=x)
