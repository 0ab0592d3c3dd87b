"""Sums add, subtract and move, and refuse rows that they cannot take."""

import copy

import pytest
import torch

from snnk.ridge.sums import RidgeStats

from helpers.ridge import TIGHT, assert_same, data, fit, refit, thirds


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


@pytest.mark.once
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
@pytest.mark.once
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
@pytest.mark.once
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
@pytest.mark.once
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
