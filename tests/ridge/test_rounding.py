"""The floors of the spectrum and of lam that follow from the precision of the features."""

import copy

import pytest
import torch

from snnk.ridge.sums import ROUNDINGS, RidgeStats

from helpers.ridge import data, fit


def low_rank(dtype, rows=1000, rank=4, outputs=16, seed=0):
    """Features (rows, outputs) of that rank but for rounding, computed twice as two processors might, and targets."""
    generator = torch.Generator().manual_seed(seed)
    u, a = torch.randn(rows, rank, generator=generator), torch.randn(outputs, rank, generator=generator)
    y = torch.tanh(u[:, :2]) + 0.3 * torch.randn(rows, 2, generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    large = 16 * torch.randn(rows, outputs, generator=generator).to(wide)  # cancels, as residual streams do
    terms = [u[:, [j]].to(wide) * a[:, j].to(wide) for j in range(rank)]
    found = [sum(order, start=large) - large for order in (terms, terms[::-1])]
    assert not torch.equal(*found)
    return *(phi.to(dtype) for phi in found), y.double()


def floor_of(phi, weight=None):
    u = torch.finfo(phi.dtype).eps / 2
    compute = torch.finfo(torch.promote_types(phi.dtype, torch.float32)).eps / 2
    squares = phi.double().square() * (1 if weight is None else weight[:, None])
    return (u + ROUNDINGS * compute) ** 2 * float(squares.sum(0).min())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lam", ["gcv", "kfold", 1e-30])
def test_directions_that_are_rounding_get_no_weight(dtype, lam):
    """Without the floor, weights of 1e5 stand on squared rounding errors, and predictions depend on the processor."""
    phi, other, y = low_rank(dtype)
    solution = RidgeStats(16, 2, folds=5).update(phi, y).solve(lam)
    assert solution.rank == 4
    exact = RidgeStats(16, 2).update(phi.double(), y).factor()  # the four directions, and nothing else
    least = (exact.vectors[:, -4:] @ (exact.target[-4:] / exact.values[-4:, None])).T
    assert float(solution.weight.norm()) <= float(least.norm()) * (1 + 1e-6)
    moved = (solution.predict(phi.double()) - solution.predict(other.double())).norm(dim=1)
    assert bool((moved <= least.norm() * (phi.double() - other.double()).norm(dim=1) + 1e-12).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_floor_belongs_to_the_precision_of_the_features(dtype):
    phi, y, weight = data(300, 7)
    phi = phi.to(dtype)
    stats = fit(phi, y, weight)
    floor = stats.factor().floor
    assert floor == pytest.approx(floor_of(phi, weight), rel=1e-9)
    path = stats.solve("gcv").path
    assert path[0][0] >= floor * (1 - 1e-9) and stats.solve("gcv").lam >= floor * (1 - 1e-9)
    assert stats.solve(floor / 10).lam == floor / 10  # what is given is used


def test_the_floor_adds_and_subtracts_like_all_sums(tmp_path):
    (phi, y, weight), keep = data(300, 7), torch.tensor([5, 1, 2])
    halves = [fit(phi[part], y[part], weight[part]) for part in (slice(0, 100), slice(100, 300))]
    whole = halves[0] + halves[1]  # whose shifts differ
    expected = floor_of(phi, weight)
    assert whole.factor().floor == pytest.approx(expected, rel=1e-12)
    assert (whole - halves[0]).factor().floor == pytest.approx(floor_of(phi[100:], weight[100:]), rel=1e-9)
    assert whole.select(keep).factor().floor == pytest.approx(floor_of(phi[:, keep], weight), rel=1e-12)
    assert whole.factor(3).floor == pytest.approx(floor_of(phi[:, :3], weight), rel=1e-12)
    assert copy.deepcopy(whole).reshift_(torch.zeros(9)).factor().floor == pytest.approx(expected, rel=1e-12)
    assert whole.downdate(phi[:9], y[:9], weight[:9]).factor().floor == pytest.approx(
        floor_of(phi[9:], weight[9:]), rel=1e-9
    )
    whole.save(tmp_path / "sums")
    assert RidgeStats.load(tmp_path / "sums").factor().floor == whole.factor().floor


def test_earlier_files_are_taken_for_float32(tmp_path):
    phi, y, _ = data(300, 7)
    stats = fit(phi.float(), y)
    expected = stats.factor().floor
    stats.sums[:, -1, 1:8] = 0  # as in earlier files
    stats.save(tmp_path / "sums")
    assert RidgeStats.load(tmp_path / "sums").factor().floor == pytest.approx(expected, rel=1e-12)


def test_a_discriminant_does_not_divide_by_rounding():
    phi, _, _ = low_rank(torch.float32)
    y = torch.nn.functional.one_hot((phi[:, 0] > 0).long(), 2).double()
    with pytest.raises(ValueError, match="use shrinkage > 0"):
        RidgeStats(16, 2).update(phi, y).discriminant()
    RidgeStats(16, 2).update(phi, y).discriminant(0.1)


def test_of_equal_scores_the_largest_lam_is_taken():
    """y is a linear function of the features, so every small lam fits it and rounding alone would choose."""
    phi, _, _ = data(300, 7)
    factor = fit(phi, (phi @ torch.ones(7, 1, dtype=torch.float64))).factor()
    for sign in (1, -1):  # scores that rise and fall by less than the tie
        found = factor.search(lambda lams, sign=sign: 1 + sign * 1e-8 * lams.log10())
        assert found.lam == max(lam for lam, _, _ in found.path)


@pytest.mark.parametrize("lam", ["gcv", 0.1])
def test_one_imprecise_feature_leaves_the_others_as_they_are(lam):
    """Rounding is relative to each feature: one with a large offset or size says nothing about another."""
    x, _, _ = data(500, 3)
    x = (x - x.mean(0)) / x.std(0)
    y = x[:, 0] + 2
    for phi in (x * torch.tensor([1, 1, 0]) + torch.tensor([0, 1e6, 1e9]), x * torch.tensor([1e-3, 1.0, 1e3])):
        solution = fit(phi.float(), y).solve(lam if lam == "gcv" else 1e-20)
        assert float((solution.predict(phi)[:, 0] - y).square().mean()) < 1e-6


@pytest.mark.parametrize("size", [1e7, 1e9])
def test_features_that_are_nothing_but_rounding_predict_the_mean(size):
    x, y, _ = data(300, 3)
    phi = (size + size * 1e-8 * x).float()
    with pytest.warns(UserWarning, match="none of 3 features varies by more than its rounding"):
        solution = fit(phi, y).solve("gcv")
    assert solution.rank == 0 and torch.allclose(solution.predict(phi.double()), y.mean(0).expand_as(y))
