"""Ridge regression from rows, against the same from sums and against refits without each row."""

import pytest
import torch

from snnk.ridge import RidgeStats
from snnk.ridge.rows import factor_rows

LAMS = (1e-2, 1.0, 100.0)


def made(n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator) + 0.5
    return x, x[:, :2] @ torch.tensor([[1.0, 0.0], [2.0, -1.0]]) + torch.randn(n, 2, generator=generator) + 3


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(("n", "k"), [(30, 70), (70, 30), (40, 40), (20, 5000)])
def test_it_is_the_regression_on_sums(n, k, intercept):
    x, y = made(n, k)
    exact = None
    if k < 100:
        exact = RidgeStats(k, 2).update(x, y).factor(intercept=intercept)
    found = factor_rows(x, y, intercept=intercept)
    shift, middle = (x.double().mean(0), y.double().mean(0)) if intercept else (0.0, 0.0)
    centred, targets = x.double() - shift, y.double() - middle
    for lam in LAMS:
        solution = found.factor.solve(lam)
        weight = found.weight(solution.weight)
        # the optimum: X'(X w - y) + lam w = 0
        gradient = centred.T @ (centred @ weight.T - targets) + lam * weight.T
        assert gradient.abs().max() < 1e-9 * (centred.T @ targets).abs().max()
        if exact is not None:
            other = exact.solve(lam)
            torch.testing.assert_close(weight, other.weight, atol=1e-9, rtol=1e-9)
            for name in ("degrees_of_freedom", "residual"):
                one, two = (torch.as_tensor(getattr(s, name)) for s in (solution, other))
                torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-9)


def test_directions_of_rounding_are_left_out():
    """Those below 4e-6 of the largest eigenvalue, 2e-3 of its square root."""
    x, y = made(50, 3)
    x = torch.linalg.qr(x - x.mean(0))[0]
    for size, rank in ((1.5e-3, 2), (3e-3, 3)):
        assert len(factor_rows(x * torch.tensor([1.0, 0.5, size]), y).factor.values) == rank
    nothing = factor_rows(torch.ones(5, 9), y[:5])
    solution = nothing.factor.search()
    assert torch.equal(nothing.weight(solution.weight), torch.zeros(2, 9, dtype=torch.float64))
    torch.testing.assert_close(solution.bias, y[:5].double().mean(0))


def test_features_that_do_not_vary_and_equal_rows_are_no_directions():
    x, y = made(12, 40)
    x[:, 5:] = 1.0
    x[6:], y[6:] = x[:6], y[:6]
    found = factor_rows(x, y)
    assert len(found.factor.values) == 5
    assert bool((found.weight(found.factor.solve(0.1).weight)[:, 5:].abs() < 1e-9).all())
