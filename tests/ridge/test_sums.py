import copy
import itertools
import json
import os
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from snnk.ridge import sums as ridge
from snnk.ridge.sums import ROUNDINGS, TIE, RidgeStats

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Every test crosses the edges of blocks and panels."""
    monkeypatch.setattr(ridge, "BLOCK_ROWS", 23)
    monkeypatch.setattr(ridge, "PANEL", 3)


def data(n=120, m=7, t=2, seed=0, noise=0.5):
    g = torch.Generator().manual_seed(seed)
    phi, w, e = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((n, m), (m, t), (n, t)))
    phi = phi @ torch.randn(m, m, generator=g, dtype=torch.float64) + 3
    return phi, phi @ w + 5 + noise * e, torch.rand(n, generator=g, dtype=torch.float64) * 3


def fit(phi, y, weight=None, *, fold=None, parts=(50, 1), **options):
    """Statistics fed in uneven batches."""
    stats = RidgeStats(phi.shape[1], 1 if y.ndim == 1 else y.shape[1], **options)
    edges = [0, *np.cumsum(parts).tolist(), len(phi)]
    for a, b in itertools.pairwise(edges):
        stats.update(phi[a:b], y[a:b], *(None if x is None else x[a:b] for x in (weight, fold)))
    return stats


def refit(phi, y, lam, weight=None, intercept=True):
    """scikit-learn's weight and bias."""
    model = Ridge(alpha=lam, fit_intercept=intercept, solver="cholesky").fit(phi, y, weight)
    bias = torch.as_tensor(model.intercept_, dtype=torch.float64).reshape(-1)
    return torch.as_tensor(model.coef_).reshape(-1, phi.shape[1]), bias


def assert_same(a, b, **tolerance):
    tolerance = {**TIGHT, **tolerance}
    assert torch.allclose(a.weight, b.weight, **tolerance) and torch.allclose(a.bias, b.bias, **tolerance)


def hat(phi, lam, weight=None, intercept=True):
    """The matrix that maps sqrt(w) y to its fit; the unpenalised intercept is a column of ones."""
    x = np.c_[np.ones((len(phi), int(intercept))), phi.numpy()]
    x = x * (1 if weight is None else np.sqrt(weight.numpy())[:, None])
    penalty = lam * np.eye(x.shape[1])
    penalty[:intercept, :intercept] = 0
    return x @ np.linalg.solve(x.T @ x + penalty, x.T)


def brute_gcv(phi, y, lam, weight=None, intercept=True):
    h, root = hat(phi, lam, weight, intercept), 1 if weight is None else weight.sqrt().numpy()[:, None]
    n, target = len(phi), y.numpy() * root
    rss = np.square(target - h @ target).sum(0).mean()
    return n * rss / (n - np.trace(h)) ** 2


# --- one lam ---------------------------------------------------------------------------------------------------------


def test_least_squares_against_lstsq():
    phi, y, _ = data()
    solution = fit(phi, y).solve(0.0)
    full = np.c_[phi.numpy(), np.ones(len(phi))]
    best, rss, _, _ = np.linalg.lstsq(full, y.numpy())
    assert torch.allclose(solution.weight, torch.from_numpy(best[:-1].T.copy()), **TIGHT)
    assert torch.allclose(solution.bias, torch.from_numpy(best[-1]), **TIGHT)
    assert torch.allclose(solution.residual, torch.from_numpy(rss) / len(phi), **TIGHT)
    assert solution.degrees_of_freedom == pytest.approx(8, abs=1e-12)
    assert solution.score is None and solution.path == ()


@pytest.mark.parametrize("lam", [1e-3, 1.0, 50.0, 1e4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("targets", [1, 4])
@pytest.mark.parametrize("intercept", [True, False])
def test_ridge_against_scikit_learn(lam, weighted, targets, intercept):
    phi, y, weight = data(t=targets)
    weight = weight if weighted else None
    solution = fit(phi, y, weight).solve(lam, intercept=intercept)
    expected, bias = refit(phi, y, lam, weight, intercept)
    assert torch.allclose(solution.weight, expected, **TIGHT) and torch.allclose(solution.bias, bias, **TIGHT)
    squared = (y - phi @ expected.T - bias).square()
    w = torch.ones(len(phi), dtype=torch.float64) if weight is None else weight
    assert torch.allclose(solution.residual, (w[:, None] * squared).sum(0) / w.sum(), **TIGHT)
    assert solution.degrees_of_freedom == pytest.approx(np.trace(hat(phi, lam, weight, intercept)), abs=1e-9)
    assert torch.allclose(solution.predict(phi), phi @ expected.T + bias, **TIGHT)


def test_real_block_sizes(monkeypatch):
    monkeypatch.undo()
    phi, y, weight = data(5000, 400, 3)
    expected, bias = refit(phi, y, 2.0, weight)
    for folds in (0, 3):
        solution = fit(phi, y, weight, parts=(4097,), folds=folds).solve(2.0)
        assert torch.allclose(solution.weight, expected, rtol=1e-9, atol=1e-9)
        assert torch.allclose(solution.bias, bias, rtol=1e-9, atol=1e-9)


def test_a_fit_without_intercept_has_no_bias_and_leaves_the_sums_as_they_are():
    phi, y, _ = data()
    stats = fit(phi, y)
    before, shift = stats.sums.clone(), stats.shift.clone()
    assert not stats.solve("gcv", intercept=False).bias.any()
    assert torch.equal(stats.sums, before) and torch.equal(stats.shift, shift)
    few = RidgeStats(7, 2).update(phi[:4], y[:4])  # four rows span four directions about 0, three about their mean
    assert few.solve(0.1, intercept=False).rank == 4 and few.solve(0.1).rank == 3


def test_path_and_factor_are_the_single_solutions():
    phi, y, _ = data()
    stats = fit(phi, y)
    path = stats.solve([0.0, 0.5, 2])
    assert [s.lam for s in path] == [0, 0.5, 2] and path[0].degrees_of_freedom > path[2].degrees_of_freedom
    for solution in path:
        assert_same(solution, stats.solve(solution.lam), atol=0, rtol=0)
        assert_same(solution, stats.factor().solve(solution.lam), atol=0, rtol=0)
    assert len(stats.solve(np.array([1.0, 2.0]))) == len(stats.solve(torch.tensor([1.0, 2.0]))) == 2
    for number in (np.float32(0.5), np.array(0.5), torch.tensor(0.5)):
        assert_same(stats.solve(number), path[1])


def test_condition_numbers():
    phi, y, _ = data()
    gram = np.cov(phi.numpy().T, bias=True) * len(phi)
    solution = fit(phi, y).solve(3.0)
    assert solution.condition == pytest.approx(np.linalg.cond(gram + 3 * np.eye(7)), rel=1e-9)
    assert solution.gram_condition == pytest.approx(np.linalg.cond(gram), rel=1e-9)
    assert solution.rank == 7
    assert "lam=3, " in repr(solution) and "rank=7" in repr(solution) and "weight=[2, 7]" in repr(solution)


def test_singular_gram():
    """lam = 0 is refused; any lam > 0 leaves the null space alone, down to the least-norm solution."""
    phi, y, _ = data()
    phi = torch.cat([phi, phi[:, :1], torch.ones(len(phi), 1)], 1)
    stats = fit(phi, y)
    with pytest.raises(ValueError, match=r"got 7 of 9 features, condition number (inf|\d.*e\+1\d).*lam='gcv'"):
        stats.solve(0.0)
    centred = (phi - phi.mean(0)).numpy()
    least_norm = torch.from_numpy(np.linalg.pinv(centred, rcond=1e-10) @ y.numpy()).T
    for lam in (1e-300, 1e-12):
        assert torch.allclose(stats.solve(lam).weight, least_norm, rtol=1e-9, atol=1e-9)
    solution = stats.solve(1.0)
    assert torch.allclose(solution.weight, refit(phi, y, 1.0)[0], **TIGHT)
    assert solution.rank == 7 and solution.gram_condition > 1e14
    assert solution.condition == pytest.approx(np.linalg.cond(centred.T @ centred + np.eye(9)), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_a_perfect_fit_leaves_no_negative_residual(seed):
    phi, y, _ = data(noise=0.0, seed=seed)
    residual = fit(phi, y).solve(0.0).residual
    assert residual.min() >= 0 and (residual / y.var(0)).max() < 1e-12


def test_constant_features():
    stats = fit(torch.ones(60, 3), torch.arange(60.0))
    for lam in (1.0, "gcv"):
        solution = stats.solve(lam)
        assert solution.rank == 0 and solution.weight.abs().max() == 0 and float(solution.bias) == 29.5
        assert solution.degrees_of_freedom == 1 and solution.condition == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rows_are_summed_in_float64(dtype):
    phi, y, weight = (x.to(dtype) for x in data())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = fit(phi.requires_grad_(), y, weight).solve(1.0)
    assert_same(low, fit(*(x.detach().double() for x in (phi, y, weight))).solve(1.0), rtol=1e-12, atol=1e-12)
    assert low.predict(phi).dtype == dtype and not low.weight.requires_grad


def test_weights_repeat_rows():
    phi, y, _ = data()
    times = torch.arange(len(phi)) % 4
    weighted, repeated = (
        fit(phi, y, times.double()),
        fit(phi.repeat_interleave(times, 0), y.repeat_interleave(times, 0)),
    )
    assert_same(weighted.solve(0.3), repeated.solve(0.3))
    assert int(weighted.rows.sum()) == int((times > 0).sum())  # a row of weight 0 is as good as never seen
    assert_same(weighted.solve("gcv"), fit(phi[times > 0], y[times > 0], times[times > 0].double()).solve("gcv"))


def test_scaled_weights_scale_lam():
    phi, y, weight = data()
    one, thousandth = fit(phi, y, weight).solve("gcv"), fit(phi, y, weight / 1000).solve("gcv")
    assert_same(one, thousandth, rtol=1e-7)
    assert thousandth.lam == pytest.approx(one.lam / 1000, rel=1e-6)


# --- choosing lam ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(60, 7), (40, 30), (20, 30)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("intercept", [True, False])
def test_gcv_against_the_hat_matrix(n, m, weighted, intercept):
    phi, y, weight = data(n, m, noise=4.0)
    weight = weight if weighted else None
    factor = fit(phi, y, weight, parts=(15,)).factor(intercept=intercept)
    for lam in 10.0 ** np.arange(-3, 4):  # below, the oracle itself loses digits where m > n
        freedom, _, gcv = (float(x.mean()) for x in factor.curves(torch.tensor([lam], dtype=torch.float64)))
        assert gcv == pytest.approx(brute_gcv(phi, y, lam, weight, intercept), rel=1e-8)
        assert freedom == pytest.approx(np.trace(hat(phi, lam, weight, intercept)), rel=1e-8)
    best = factor.search()
    dense = [brute_gcv(phi, y, lam, weight, intercept) for lam in np.logspace(-3, 6, 400)]
    assert best.score <= min(dense) * (1 + TIE)
    assert best.score == pytest.approx(float(factor.curves(torch.tensor([best.lam], dtype=torch.float64))[2]))
    lams, scores, freedoms = zip(*best.path, strict=True)
    assert sorted(lams) == list(lams) and best.score == scores[lams.index(best.lam)]
    equal = [lam for lam, score in zip(lams, scores, strict=True) if score <= min(scores) * (1 + TIE)]
    assert best.lam == max(equal)
    assert best.degrees_of_freedom in [pytest.approx(f) for f in freedoms]


def test_gcv_as_lam_vanishes_with_more_features_than_rows():
    """0/0 as lam -> 0: the limit |K^-1 y|^2 n / tr(K^-1)^2, K the Gram of centred rows without the constant."""
    phi, y, _ = data(20, 30, 1)
    x = (phi - phi.mean(0)).numpy()
    inverse = np.linalg.pinv(x @ x.T, rcond=1e-10)
    limit = 20 * np.square(inverse @ y.numpy()).sum() / np.trace(inverse) ** 2
    assert float(fit(phi, y).factor().curves(torch.tensor([1e-12]))[2]) == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_features", [None, 5])
@pytest.mark.parametrize("intercept", [True, False])
def test_kfold_against_refitting(given, weighted, num_features, intercept):
    phi, y, weight = data(noise=6.0)
    weight = weight if weighted else None
    in_turn = torch.arange(len(phi)) % 4
    fold = in_turn[torch.randperm(len(phi), generator=torch.Generator().manual_seed(0))] if given else in_turn
    stats = fit(phi, y, weight, fold=fold if given else None, folds=4)
    best = stats.solve("kfold", num_features=num_features, intercept=intercept)
    phi, w = phi[:, :num_features], torch.ones(len(phi), dtype=torch.float64) if weight is None else weight

    def brute(lam):
        total = 0.0
        for f in range(4):
            train, test = fold != f, fold == f
            a, b = refit(phi[train], y[train], lam, None if weight is None else weight[train], intercept)
            total += float((w[test, None] * (y[test] - phi[test] @ a.T - b).square()).sum())
        return total / float(w.sum()) / 2

    for lam, score, _ in best.path[40::20]:  # the oracle loses digits at the smallest
        assert score == pytest.approx(brute(lam), rel=1e-9)
    assert best.score == pytest.approx(brute(best.lam), rel=1e-9)
    assert best.score <= min(brute(lam) for lam in np.logspace(-3, 5, 60)) * (1 + 1e-9)
    expected, bias = refit(phi, y, best.lam, weight, intercept)
    assert torch.allclose(best.weight, expected, **TIGHT) and torch.allclose(best.bias, bias, **TIGHT)


def test_kfold_with_an_empty_fold():
    phi, y, _ = data()
    fold = torch.arange(len(phi)) % 3
    three, four = (fit(phi, y, fold=fold, folds=k).solve("kfold") for k in (3, 4))
    assert_same(three, four)


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("lam", [0.0, 2.0, "gcv", "kfold"])
@pytest.mark.parametrize("intercept", [True, False])
def test_nested_counts_are_those_of_fewer_features(count, lam, intercept):
    phi, y, weight = data()
    nested = fit(phi, y, weight, folds=3).solve(lam, num_features=count, intercept=intercept)
    alone = fit(phi[:, :count], y, weight, folds=3).solve(lam, intercept=intercept)
    assert_same(nested, alone, rtol=1e-8)
    assert nested.lam == pytest.approx(alone.lam, rel=1e-6) and nested.residual.allclose(alone.residual)


# --- discriminant ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_features", [None, 3])
def test_discriminant_against_scikit_learn(classes, shrinkage, num_features):
    phi, _, _ = data(200)
    label = torch.randint(0, classes, (200,), generator=torch.Generator().manual_seed(1))
    phi = phi + label[:, None] * torch.linspace(-1, 1, 7)
    one_hot = torch.nn.functional.one_hot(label).double()
    ours = fit(phi, one_hot).discriminant(shrinkage, num_features=num_features)
    phi = phi[:, :num_features]
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage or None).fit(phi, label)
    values = ours.predict(phi)
    assert torch.allclose(values.softmax(1), torch.from_numpy(oracle.predict_proba(phi)), rtol=1e-8, atol=1e-10)
    expected = torch.from_numpy(oracle.decision_function(phi))
    if classes == 2:
        assert torch.allclose(values[:, 1] - values[:, 0], expected, rtol=1e-8, atol=1e-8)
        assert torch.allclose(ours.weight[1] - ours.weight[0], torch.from_numpy(oracle.coef_[0]), **TIGHT)
    else:
        assert torch.allclose(values - values[:, :1], expected - expected[:, :1], rtol=1e-8, atol=1e-8)


def test_discriminant_refuses():
    phi, y, _ = data()
    with pytest.raises(ValueError, match="y must be one-hot"):
        fit(phi, y).discriminant()
    label = torch.arange(len(phi)) % 2
    with pytest.raises(ValueError, match="class 2 has no rows"):
        fit(phi, torch.nn.functional.one_hot(label, 3).double()).discriminant()
    with pytest.raises(ValueError, match=r"singular covariance, condition number .*shrinkage > 0"):
        fit(phi[:, [0, 0, 1]], torch.nn.functional.one_hot(label).double()).discriminant()
    with pytest.raises(ValueError, match=r"from 0 to 1; got 1\.5"):
        fit(phi, torch.nn.functional.one_hot(label).double()).discriminant(1.5)


# --- sums of sums ----------------------------------------------------------------------------------------------------


def thirds(**options):
    phi, y, weight = data()
    cuts = (slice(0, 30), slice(30, 70), slice(70, None))
    return [fit(phi[c], y[c], weight[c], parts=(11,), **options) for c in cuts], fit(phi, y, weight, **options)


@pytest.mark.parametrize("folds", [0, 3])
def test_merging_in_any_order(folds):
    (a, b, c), _ = thirds(folds=folds)
    assert not torch.equal(a.shift, b.shift)
    ways = [
        (a + b) + c,
        a + (b + c),
        c + a + b,
        RidgeStats(7, 2, folds=folds) + b + RidgeStats(7, 2, folds=folds) + c + a,
    ]
    phi, y, weight = data()
    for lam in (0.5, "gcv", *(["kfold"] if folds else [])):
        solutions = [stats.solve(lam) for stats in ways]
        for solution in solutions[1:]:
            assert_same(solution, solutions[0])
            assert solution.lam == pytest.approx(solutions[0].lam, rel=1e-6)
    expected, bias = refit(phi, y, 0.5, weight)
    merged = ways[0].solve(0.5)
    assert torch.allclose(merged.weight, expected, **TIGHT) and torch.allclose(merged.bias, bias, **TIGHT)
    assert int(a.rows.sum()) == 30 and int(ways[0].rows.sum()) == 120  # a was left as it was


def test_merge_is_in_place_and_takes_itself():
    (a, b, _), _ = thirds()
    both = a + b
    assert a.merge(b) is a and torch.equal(a.sums, both.sums)
    double = copy.deepcopy(a)
    double.merge(double)
    assert_same(double.solve(2.0), a.solve(1.0))
    phi, y, _ = data()
    assert_same((RidgeStats(7, 2) + RidgeStats(7, 2)).update(phi, y).solve(1.0), fit(phi, y).solve(1.0))


def test_a_plain_sum_over_workers_after_one_shift():
    workers, whole = thirds(folds=3)
    workers.append(RidgeStats(7, 2, folds=3))  # one that had no rows
    shift = workers[1].shift.clone()
    for worker in workers:
        worker.reshift_(shift)
    reduced = workers[0]
    for i, mine in enumerate(reduced.tensors()):
        for worker in workers[1:]:
            mine += worker.tensors()[i]  # what all_reduce does
    assert_same(reduced.solve(0.5), whole.solve(0.5))
    assert int(reduced.rows.sum()) == 120


def test_reshift_there_and_back():
    _, stats = thirds()
    before, solution = stats.shift.clone(), stats.solve(0.5)
    assert_same(stats.reshift_(torch.linspace(-3, 3, 9)).solve(0.5), solution)
    assert not torch.equal(stats.shift, before)
    with pytest.raises(ValueError, match="shift must end in dimension 9"):
        stats.reshift_(torch.zeros(3))


@pytest.mark.parametrize(("folds", "block_dtype"), [(0, torch.float64), (3, torch.float64), (0, torch.float32)])
def test_removed_rows_were_never_there(folds, block_dtype):
    phi, y, weight = data()
    options = {"folds": folds, "block_dtype": block_dtype}
    close = TIGHT if block_dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-4}
    fold = torch.arange(len(phi)) % folds if folds else None
    gone = torch.arange(len(phi)) % 5 == 1
    cut = None if fold is None else fold[gone], None if fold is None else fold[~gone]
    removed = fit(phi, y, weight, fold=fold, **options).downdate(phi[gone], y[gone], weight[gone], cut[0])
    part = fit(phi[gone], y[gone], weight[gone], fold=cut[0], **options)
    subtracted = fit(phi, y, weight, fold=fold, **options) - part
    never = fit(phi[~gone], y[~gone], weight[~gone], fold=cut[1], **options)
    for lam in (0.0, 0.5, *(["kfold"] if folds else [])):
        assert_same(removed.solve(lam), never.solve(lam), **close)
        assert_same(subtracted.solve(lam), never.solve(lam), **close)
    assert torch.equal(removed.rows, never.rows) and torch.equal(subtracted.rows, never.rows)


def test_removing_almost_everything_leaves_the_rank_of_what_is_left():
    """The rounding of 100,000 rows that are gone is no third direction of three rows."""
    g = torch.Generator().manual_seed(0)
    phi, y = torch.randn(100_000, 5, generator=g, dtype=torch.float64) * 100, torch.randn(100_000, 1, generator=g)
    stats = RidgeStats(5, 1).update(phi, y).downdate(phi[3:], y[3:])
    solution = stats.solve(1e-3)
    assert solution.rank == 2
    assert torch.allclose(solution.weight, RidgeStats(5, 1).update(phi[:3], y[:3]).solve(1e-3).weight, rtol=1e-4)


def test_a_note_of_one_part_is_not_that_of_both():
    (a, b, c), _ = thirds()
    a.note, b.note, c.note = "rows 0 to 29", "rows 30 to 69", "rows 0 to 29"
    assert (a + b).note == (a - b).note == "" and (a + c).note == a.note == "rows 0 to 29"
    assert a.merge(b).note == "" and b.note == "rows 30 to 69"


def test_weights_that_vanish_are_said():
    phi, y, weight = data()
    gone = fit(phi, y, weight * 1e-200, block_dtype=torch.float32)
    for call in (lambda: gone.solve(1.0), gone.centred, gone.discriminant):
        with pytest.raises(ValueError, match=r"weights of 120 rows sum to 0, rounded: scale the weights up"):
            call()
    fold = torch.arange(len(phi)) % 2
    stats = fit(phi, y, torch.where(fold == 0, 1.0, 1e-200), fold=fold, folds=2)
    with pytest.raises(ValueError, match="all rows are in fold 0, or all weight"):
        stats.solve("kfold")


def test_removing_too_much():
    phi, y, _ = data()
    stats = fit(phi, y)
    with pytest.raises(ValueError, match=r"no rows to solve for, or more removed than added: \[0"):
        (stats - stats).solve(1.0)
    with pytest.raises(ValueError, match=r"more removed than added: \[-120"):
        (stats - stats - stats).solve(1.0)
    with pytest.raises(ValueError, match="downdate with 3 folds needs fold="):
        fit(phi, y, folds=3).downdate(phi, y)


@pytest.mark.parametrize("other", [RidgeStats(6, 2), RidgeStats(7, 1), RidgeStats(7, 2, folds=2), "stats"])
def test_unlike_statistics_do_not_merge(other):
    stats = fit(*data()[:2])
    before = stats.sums.clone()
    with pytest.raises(ValueError, match=r"must agree; got RidgeStats\(num_features=7, num_targets=2, folds=0"):
        stats.merge(other)
    with pytest.raises(ValueError, match="must agree"):
        stats.merge(RidgeStats(7, 2, block_dtype=torch.float32))
    assert torch.equal(stats.sums, before)


# --- accuracy --------------------------------------------------------------------------------------------------------


def far_data(n=4000):
    """phi and y on a grid of 2^-20, so that adding 2^20 is exact: the same problem near 0 and far from it."""
    phi, y, _ = data(n, noise=0.1)
    phi, y = (torch.round(x * 2**20) / 2**20 for x in (phi, y))
    return phi, y, phi + 2**20, y - 2**20


def test_data_far_from_zero():
    phi, y, far_phi, far_y = far_data()
    near, far = fit(phi, y).solve(0.5), fit(far_phi, far_y, parts=(1000, 7)).solve(0.5)
    assert torch.allclose(near.weight, far.weight, **TIGHT)
    assert torch.allclose(near.residual, far.residual, rtol=1e-9)
    assert torch.allclose(near.predict(phi), far.predict(far_phi) + 2**20, atol=1e-7)
    apart = (fit(far_phi[:900], far_y[:900]) + fit(far_phi[900:], far_y[900:])).solve(0.5)
    assert torch.allclose(near.weight, apart.weight, **TIGHT)
    # Without the shift eight digits are lost: the test is one that can fail.
    naive = RidgeStats(7, 2).reshift_(torch.zeros(9)).update(far_phi, far_y).solve(0.5)
    assert (naive.weight - near.weight).abs().max() > 1e-6


@pytest.mark.parametrize("far", [False, True])
def test_float32_blocks(far, monkeypatch):
    monkeypatch.undo()
    near_phi, near_y, far_phi, far_y = far_data(20000)
    phi, y = (far_phi, far_y) if far else (near_phi, near_y)
    phi = torch.cat([phi, torch.relu(phi - phi.mean(0))], 1)
    exact, mixed = fit(phi, y), RidgeStats(14, 2, block_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed.update(phi[:7000], y[:7000]).update(phi[7000:], y[7000:])
    mixed.reshift_(exact.shift)
    scale = exact.sums[0].diagonal()[1:15].sqrt()
    error = ((mixed.sums - exact.sums)[0, 1:-1, 1:15].triu() / scale / scale[:, None]).abs().max()
    assert 1e-9 < error < 2e-6  # above 0: it did run in float32
    assert (mixed.sums / exact.sums - 1)[0, -1, 15:].abs().max() < 2e-9  # y^2 is summed in float64 all the same
    assert exact.sums.dtype == mixed.sums.dtype == torch.float64
    a, b = exact.solve(1.0), mixed.solve(1.0)
    assert ((a.predict(phi) - b.predict(phi)).std(0) / y.std(0)).max() < 1e-5
    assert "block_dtype=torch.float32" in repr(mixed) and int(mixed.rows.sum()) == 20000


def test_float32_blocks_know_their_rank():
    phi, y, _ = data(5000)
    phi = torch.cat([phi, phi[:, :2] @ torch.ones(2, 1).double()], 1)
    mixed = fit(phi, y, block_dtype=torch.float32)
    with pytest.raises(ValueError, match="got 7 of 8 features"):
        mixed.solve(0.0)
    assert torch.allclose(mixed.solve(1e-9).predict(phi), fit(phi, y).solve(1e-9).predict(phi), rtol=1e-4, atol=1e-3)


def test_float32_rows_far_from_zero_keep_their_digits():
    """The shift is exact in float32, so the difference of two near values is too."""
    _, _, phi, y = far_data()
    phi, y = phi.float(), y.float()
    exact, mixed = (fit(phi, y, block_dtype=b).solve(1.0) for b in (torch.float64, torch.float32))
    assert torch.allclose(exact.weight, mixed.weight, rtol=1e-4, atol=1e-5)
    assert torch.allclose(exact.predict(phi.double()), mixed.predict(phi.double()), rtol=0, atol=1e-3)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"folds": 3, "block_dtype": torch.float32}])
def test_round_trip(tmp_path, options):
    _, stats = thirds(**options)
    stats.note = json.dumps({"row_groups": [0, 1]})
    stats.save(tmp_path / "stats.safetensors")
    loaded = RidgeStats.load(str(tmp_path / "stats.safetensors"))
    assert loaded.state_dict().keys() == stats.state_dict().keys()
    assert all(torch.equal(x, stats.state_dict()[name]) for name, x in loaded.state_dict().items())
    assert repr(loaded) == repr(stats) and loaded.note == stats.note
    phi, y, _ = data(seed=1)
    assert_same(loaded.update(phi, y).solve("gcv"), stats.update(phi, y).solve("gcv"), rtol=0, atol=0)
    assert os.listdir(tmp_path) == ["stats.safetensors"]


def test_empty_statistics_round_trip(tmp_path):
    RidgeStats(7, 2).save(tmp_path / "stats")
    phi, y, _ = data()
    assert_same(RidgeStats.load(tmp_path / "stats").update(phi, y).solve(1.0), fit(phi, y).solve(1.0))


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    _, stats = thirds()
    stats.save(tmp_path / "stats")
    old = (tmp_path / "stats").read_bytes()

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="disk full"):
        stats.update(*data()[:2]).save(tmp_path / "stats")
    assert (tmp_path / "stats").read_bytes() == old and os.listdir(tmp_path) == ["stats"]


GOOD = {"format": "snnk.RidgeStats", "version": "1", "block_dtype": "float64", "note": ""}


def sums(*shape, dtype=torch.float64):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"sums": sums(1, 4, 4)}, GOOD, r"with tensors shift, sums; got .* with \['sums'\]"),
        ({"sums": sums(1, 4, 4), "shift": sums(3), "extra": sums(1)}, GOOD, r"with \['extra', 'shift', 'sums'\]"),
        ({"sums": sums(1, 4, 4), "shift": sums(4)}, GOOD, r"do not fit together; got .*\(4,\)"),
        ({"sums": sums(1, 4, 3), "shift": sums(2)}, GOOD, "do not fit together"),
        ({"sums": sums(4, 4), "shift": sums(3)}, GOOD, "do not fit together"),
        ({"sums": sums(0, 4, 4), "shift": sums(3)}, GOOD, "do not fit together"),
        ({"sums": sums(1, 4, 4, dtype=torch.float32), "shift": sums(3)}, GOOD, "do not fit together; got .*F32"),
        ({"sums": sums(1, 4, 4) + torch.nan, "shift": sums(3)}, GOOD, "holds NaN or infinite"),
        (
            {"sums": sums(1, 4, 4), "shift": sums(3)},
            {**GOOD, "version": "2"},
            "must be .*'version': '1'.*'version': '2'",
        ),
        ({"sums": sums(1, 4, 4), "shift": sums(3)}, {**GOOD, "block_dtype": "int8"}, "unknown block_dtype .* 'int8'"),
        ({"weight": sums(3)}, None, r"must be .*snnk.RidgeStats.*got \{\} with \['weight'\]"),
    ],
)
def test_foreign_files(tmp_path, tensors, metadata, message):
    save_file(tensors, tmp_path / "file", metadata)
    with pytest.raises(ValueError, match=message):
        RidgeStats.load(tmp_path / "file")


def test_the_good_file_of_the_foreign_ones_loads(tmp_path):
    save_file({"sums": sums(2, 4, 4), "shift": sums(3)}, tmp_path / "file", GOOD)
    assert repr(RidgeStats.load(tmp_path / "file")).startswith("RidgeStats(num_features=2, num_targets=1, folds=2")


def test_damaged_files(tmp_path):
    _, stats = thirds()
    stats.save(tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    assert load_file(tmp_path / "whole")["sums"].shape == (1, 9, 10)
    for damaged in (content[:-8], content[:20], b"", b"not a file of ours", b"\xff" * 8 + content[8:]):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            RidgeStats.load(tmp_path / "damaged")
    with pytest.raises(FileNotFoundError, match="nothing"):
        RidgeStats.load(tmp_path / "nothing")


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        RidgeStats(2, 1).save(tmp_path / "stats")
    with pytest.raises(ImportError, match="pip install safetensors"):
        RidgeStats.load(tmp_path / "stats")


# --- bad input -------------------------------------------------------------------------------------------------------

P, Y = torch.ones(4, 3), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((P[:, :2], Y), ValueError, r"phi must end in dimension 3; got shape \(4, 2\)"),
        ((P, Y[:, 0]), ValueError, r"y must end in dimension 2; got shape \(4,\)"),
        ((P, Y[:3]), ValueError, r"phi must be \(n, 3\) and y \(n, 2\); got \(4, 3\) and \(3, 2\)"),
        ((P[None], Y), ValueError, r"got \(1, 4, 3\) and \(4, 2\)"),
        ((P.numpy(), Y), TypeError, "phi must be a torch.Tensor; got ndarray"),
        ((P, Y.long()), TypeError, r"y must be a floating tensor; got torch.int64. Convert it with .float\(\)"),
        ((P.index_fill(0, torch.tensor([1]), torch.nan), Y), ValueError, "phi has 3 NaN or infinite values of 12"),
        ((P, Y / torch.tensor([1, 0])), ValueError, "y has 4 NaN or infinite values of 8"),
        ((P, Y, torch.tensor([1.0, -1, 1, 1])), ValueError, r"weight must be \(4,\) and >= 0; got shape \(4,\), -1"),
        ((P, Y, P[:, :1]), ValueError, "weight must end in dimension 4"),
        ((P, Y, torch.full((4,), torch.nan)), ValueError, "weight has 4 NaN"),
        ((P, Y, None, torch.tensor([0, 1, 2, 0])), ValueError, r"fold must be \(4,\) integers below folds=2; got"),
        ((P, Y, None, torch.zeros(4)), ValueError, r"fold must be \(4,\) integers"),
        ((P, Y, None, [0, 1, -1, 0]), ValueError, r"below folds=2; got tensor\(\[ 0,  1, -1,  0\]\)"),
        ((P, Y, None, torch.tensor([0])), ValueError, r"fold must be \(4,\) integers"),
    ],
)
def test_bad_rows_change_nothing(arguments, error, message):
    stats = RidgeStats(3, 2, folds=2).update(2 * P, Y)
    before = stats.sums.clone()
    with pytest.raises(error, match=message):
        stats.update(*arguments)
    assert torch.equal(stats.sums, before)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 1), {}, "num_features must be a positive integer; got 0"),
        ((3, 1.0), {}, r"num_targets must be a positive integer; got 1\.0"),
        ((3, 1), {"folds": 1}, "folds must be 0 or an integer of at least 2; got 1"),
        ((3, 1), {"folds": -2}, "got -2"),
        ((3, 1), {"block_dtype": torch.bfloat16}, "must be torch.float64 or torch.float32; got torch.bfloat16"),
    ],
)
def test_bad_layouts(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        RidgeStats(*arguments, **options)


@pytest.mark.parametrize(
    ("lam", "options", "message"),
    [
        (-1.0, {}, r"lam must be a number >= 0.*got -1\.0"),
        (float("nan"), {}, "got nan"),
        ([1.0, float("inf")], {}, "got inf"),
        ("gvc", {}, "unknown lam 'gvc'; did you mean 'gcv'. Known: gcv, kfold"),
        ("kfold", {}, "needs folds: make the statistics with folds=K"),
        (1.0, {"num_features": 8}, "num_features must be at most 7, the features of the sums; got 8"),
        (1.0, {"num_features": 0}, "num_features must be a positive integer; got 0"),
    ],
)
def test_bad_solves(lam, options, message):
    with pytest.raises(ValueError, match=message):
        fit(*data()[:2]).solve(lam, **options)


@pytest.mark.parametrize("lam", [None, [None], [[1.0]]])
def test_what_is_no_number(lam):
    with pytest.raises(TypeError, match=r"lam must be a number >= 0, several, 'gcv' or 'kfold'; got (None|\[1\.0\])"):
        fit(*data()[:2]).solve(lam)


def test_too_few_rows():
    stats = RidgeStats(3, 1, folds=2)
    with pytest.raises(ValueError, match="no rows to solve for"):
        stats.update(P[:0], Y[:0, :1]).solve(1.0)
    stats.update(P[:1], Y[:1, :1])
    with pytest.raises(ValueError, match="needs at least 2 rows; got 1"):
        stats.solve("gcv")
    with pytest.raises(ValueError, match="all rows are in fold 0"):
        stats.solve("kfold")
    assert float(stats.solve(1.0).predict(P[:1])) == 1


def test_overflow_is_said():
    huge = torch.tensor([[1e25], [-1e25], [3e25]])
    with pytest.raises(ValueError, match=r"sums overflowed.*block_dtype=torch\.float64"):
        RidgeStats(1, 1, block_dtype=torch.float32).update(huge, huge).solve(1.0)
    assert float(RidgeStats(1, 1).update(huge, huge).solve(1.0).weight) == pytest.approx(1)


def test_sums_that_no_machine_can_hold():
    with pytest.raises(MemoryError, match=r"sums of 20000000 features need 3,200,00\d GB"):
        RidgeStats(20_000_000, 1)
    with pytest.raises(RuntimeError, match="foo"):
        RidgeStats(10, 1, device="foo")


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
    """Version 0.1 put weights of 1e5 on squared rounding errors, and its predictions depended on the processor."""
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


def test_files_of_version_0_1_are_taken_for_float32(tmp_path):
    phi, y, _ = data(300, 7)
    stats = fit(phi.float(), y)
    expected = stats.factor().floor
    stats.sums[:, -1, 1:8] = 0  # as version 0.1 wrote it
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
