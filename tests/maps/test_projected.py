"""ProjectedURF against least squares on samples."""

import pytest
import torch

from snnk import URF, ProjectedURF, UnreachableError
from snnk.maps.projected import BANDWIDTHS

from helpers.maps import F64, estimate, unit


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
