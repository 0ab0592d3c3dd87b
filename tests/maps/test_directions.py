"""Directions: phi(x) = f(G(x - c))."""

import copy

import pytest
import torch

from snnk import ACTIVATIONS
from snnk.maps import Directions

GENERATOR = torch.Generator().manual_seed(0)
X, G, C = (torch.randn(*shape, generator=GENERATOR, dtype=torch.float64) for shape in ((5, 8), (4, 8), (8,)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_oracle(activation):
    fm = Directions(8, 4, activation, dtype=torch.float64).set_(G, C)
    z = torch.stack([torch.stack([g @ (x - C) for g in G]) for x in X])
    assert torch.allclose(fm.phi(X), ACTIVATIONS[activation](z), atol=1e-10)
    assert torch.allclose(fm(X[0]), fm(X)[0], atol=1e-12) and fm(X[None, None]).shape == (1, 1, 5, 4)


def test_random_rows_are_orthonormal_until_set():
    fm = Directions(8, 4, "identity", seed=3, dtype=torch.float64)
    g = fm.projection[:, :-1]
    assert torch.allclose(g @ g.T, torch.eye(4).double(), atol=1e-6) and not fm.projection[:, -1].any()
    assert not torch.equal(fm.projection, Directions(8, 4, seed=4, dtype=torch.float64).projection)
    fm.set_(G)
    assert torch.equal(fm.projection[:, :-1], G)
    fm.reset_parameters()
    assert torch.equal(fm.projection[:, :-1], g)


def test_normalize_state_and_gradient():
    fm = Directions(8, 4, "tanh", normalize="unit", dtype=torch.float64).set_(G)
    assert torch.allclose(fm(X), fm(3 * X), atol=1e-12)
    state, other = torch.random.get_rng_state(), Directions(8, 4, "tanh", normalize="unit", seed=9).double()
    assert torch.equal(state, torch.random.get_rng_state())
    other.load_state_dict(fm.state_dict())
    assert torch.equal(other(X), fm(X)) and torch.equal(copy.deepcopy(fm)(X), fm(X))
    assert torch.autograd.gradcheck(fm, X.clone().requires_grad_())
    assert torch.isfinite(fm.bfloat16()(X.bfloat16())).all()
    assert "activation=tanh" in repr(fm)
    assert not list(fm.parameters())


def test_there_is_no_psi():
    fm = Directions(8, 4, dtype=torch.float64)
    for call in (lambda: fm.psi(G), lambda: fm.exact(X, G)):
        with pytest.raises(TypeError, match="no psi: train the matrix"):
            call()


@pytest.mark.once
def test_bad_input():
    fm = Directions(8, 4, dtype=torch.float64)
    before = fm.projection.clone()
    with pytest.raises(ValueError, match=r"must be \(4, 8\); got shape \(3, 8\)"):
        fm.set_(G[:3])
    with pytest.raises(ValueError, match="must end in dimension 8"):
        fm.set_(G[:, :7])
    with pytest.raises(ValueError, match="NaN"):
        fm.set_(G * float("nan"))
    with pytest.raises(ValueError, match="center has"):
        fm.set_(G, C * float("inf"))
    with pytest.raises(ValueError, match="did you mean 'gelu'"):
        Directions(8, 4, "gelo")
    with pytest.raises(ValueError, match="must end in dimension 8"):
        fm(X[:, :7])
    assert torch.equal(fm.projection, before)
