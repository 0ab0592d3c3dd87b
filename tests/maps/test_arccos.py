"""Arc-cosine features against quadrature."""

import pytest
import torch

from snnk import ArcCosine

from helpers import oracles
from helpers.maps import F64, estimate, unit


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
