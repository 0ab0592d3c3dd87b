"""Ridge solutions, the choice of lam and discriminants, against scikit-learn and refits."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from snnk.ridge.solutions import TIE
from snnk.ridge.sums import RidgeStats

from helpers.ridge import TIGHT, assert_same, brute_gcv, data, fit, hat, refit


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
