import math

import pytest
import torch

from snnk import PROJECTIONS
from snnk.maps.projections import Projection, haar, make_generator, resolve_projection


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize(("m", "d"), [(1, 1), (3, 1), (5, 8), (8, 8), (21, 8), (7, 6), (64, 3)])
def test_any_shape_repeatable_and_its_own_generator(name, m, d):
    before = torch.random.get_rng_state()
    g = PROJECTIONS[name](m, d, make_generator(3))
    assert g.shape == (m, d) and g.dtype == torch.float32 and torch.isfinite(g).all()
    assert torch.equal(g, PROJECTIONS[name](m, d, make_generator(3)))
    assert not torch.equal(g, PROJECTIONS[name](m, d, make_generator(4))) or d == 1
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.once
def test_rows_are_isotropic(name):
    """E[g] = 0 and E[g g^T] = I within five standard errors, over every row."""
    d, draws = 4, 3000
    g = torch.stack([PROJECTIONS[name](6, d, make_generator(s)) for s in range(draws)]).double()  # (draws, 6, d)
    for values, expected in ((g.mean(1), torch.zeros(d)), ((g[..., None] * g[..., None, :]).mean(1), torch.eye(d))):
        error = values.std(0) / math.sqrt(draws)
        assert ((values.mean(0) - expected).abs() <= 5 * error + 1e-6).all()


@pytest.mark.parametrize("name", [n for n, p in PROJECTIONS.items() if p.gaussian_rows])
@pytest.mark.once
def test_gaussian_rows_have_gaussian_moments(name):
    """Fourth moments 3 and the length's fourth moment d (d + 2): rows on a sphere fail this."""
    d, draws = 3, 4000
    g = torch.cat([PROJECTIONS[name](1, d, make_generator(s)) for s in range(draws)]).double()
    for values, expected in ((g**4, 3.0), (g.square().sum(1).square(), d * (d + 2.0))):
        assert ((values.mean(0) - expected).abs() <= 5 * values.std(0) / math.sqrt(draws)).all()


def test_haar_needs_the_signs_of_r():
    """Without them the first diagonal entry has mean -0.37 or so at d = 4."""
    q = torch.stack([haar(4, 4, make_generator(s)) for s in range(2000)])
    assert torch.allclose(q @ q.mT, torch.eye(4).double(), atol=1e-10)
    mean, error = q.mean(0), q.std(0) / math.sqrt(2000)
    assert (mean.abs() <= 5 * error).all()


@pytest.mark.parametrize("name", ["orthogonal", "orthogonal_chi"])
def test_orthogonal_blocks(name):
    g = PROJECTIONS[name](20, 8, make_generator(0)).double()
    for block in g.split(8):
        gram = block @ block.T
        assert torch.allclose(gram, torch.diag(gram.diagonal()), atol=1e-5)
    lengths = g.norm(dim=1)
    assert torch.allclose(lengths, torch.full_like(lengths, math.sqrt(8)), atol=1e-5) == (name == "orthogonal")


def test_seed_is_not_the_users_own_stream():
    torch_numbers = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(PROJECTIONS["iid"](4, 4, make_generator(0)), torch_numbers)


def test_resolve_and_errors():
    ones = resolve_projection(lambda m, d, generator: torch.ones(m, d))
    assert isinstance(ones, Projection) and ones(2, 3, make_generator(0)).sum() == 6
    with pytest.raises(ValueError, match="did you mean 'orthogonal'"):
        resolve_projection("orthogonl")
    with pytest.raises(ValueError, match=r"must return shape \(2, 3\)"):
        resolve_projection(lambda m, d, generator: torch.ones(d, m))(2, 3, make_generator(0))
    with pytest.raises(ValueError, match="positive integer"):
        PROJECTIONS["iid"](0, 3, make_generator(0))
