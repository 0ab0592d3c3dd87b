"""The parts that all maps share: normalisation, and calibration for the maps that have it."""

import pytest
import torch

from snnk import URF, ArcCosine, ProjectedURF, SNNKLinear, UnreachableError

from helpers.maps import F64, estimate, unit


def test_normalize():
    x, w = unit(4, 16, 0, 3.0), unit(5, 16, 1, 2.0)
    dim = URF(16, 32, "sin", normalize="dim", on_error="ignore", **F64)
    assert torch.allclose(dim.exact(x, w), torch.sin(x @ w.T / 4))
    assert torch.allclose(dim.phi(x), URF(16, 32, "sin", on_error="ignore", **F64).phi(x / 2))
    sphere = URF(16, 32, "sin", normalize="unit", on_error="ignore", **F64)
    assert torch.allclose(sphere.exact(x, w), torch.sin(x @ w.T / 6))
    assert torch.allclose(sphere.phi(x), sphere.phi(7 * x))


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


@pytest.mark.parametrize("cls", [URF, ProjectedURF])
def test_typical_norms_are_root_mean_squares(cls):
    """The predicted error is a mean of squares, over the distances of inputs to their mean and over weights."""
    x, w = torch.tensor([[3.0, 1], [3, -1], [-3, 5], [-3, -5]]), torch.tensor([[0.1, 0.0], [0.0, 0.7]])
    fm = cls(2, 64, "tanh", on_error="ignore", **F64).calibrate(x + 10, w)
    assert [float(fm.x_norm), float(fm.w_norm)] == pytest.approx([22**0.5, 0.5])


def test_psi_is_differentiable():
    w, b = unit(3, 8, 0).requires_grad_(), torch.zeros(3, dtype=torch.float64, requires_grad=True)
    projected = ProjectedURF(8, 32, "sin", bandwidth=1.0, on_error="ignore", **F64)
    for fm in (URF(8, 256, "sin", **F64), projected, ArcCosine(8, 16, augment=True, **F64)):
        assert torch.autograd.gradcheck(lambda w, b, fm=fm: fm.psi(w, b)[:, :5], (w, b), atol=1e-5)


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
