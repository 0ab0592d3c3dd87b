"""Scores become probabilities; their measures are those of scikit-learn."""

import json

import mpmath
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn import metrics

from snnk.tabular.calibration import (
    FLOORS,
    PENALTY,
    PRIOR,
    PlattScaling,
    expected_calibration_error,
    log_loss,
    roc_auc,
)


def make_scores(n=400, k=3, seed=0):
    """Scores whose true probabilities are softmax(2 scores + offset), and classes drawn from them."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n, k))
    p = torch.softmax(torch.tensor(2 * scores + np.linspace(-1, 1, k)), 1)
    labels = (p.cumsum(1) < torch.tensor(rng.random((n, 1)))).sum(1).clamp(max=k - 1)
    return torch.tensor(scores), labels, p


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_fit_is_the_optimum_that_scipy_finds(k, weighted):
    scores, labels, _ = make_scores(k=k)
    weight = torch.arange(1.0, 401.0) if weighted else None
    found = PlattScaling.fit(scores, labels, weight)
    w = torch.ones(400).double() if weight is None else weight.double() / weight.mean()
    z = scores - scores.max(1, keepdim=True).values
    unit = float((w @ z.square()).mean() / 400) ** 0.5

    def loss(theta):
        logits = theta[0] / unit * scores.numpy() + theta[1:]
        chosen = torch.log_softmax(torch.tensor(logits), 1)[torch.arange(400), labels]
        return -float(w @ chosen) + PENALTY / 2 * float(theta @ theta)

    best = minimize(loss, np.zeros(1 + k), method="BFGS", options={"gtol": 1e-4})
    np.testing.assert_allclose([found.scale, *found.offset], [best.x[0] / unit, *best.x[1:]], atol=1e-4)


def test_fit_recovers_the_probabilities_that_drew_the_classes():
    scores, labels, p = make_scores(20_000)
    found = PlattScaling.fit(scores, labels)
    assert found.scale == pytest.approx(2, abs=0.1)  # the standard error is 0.02
    np.testing.assert_allclose(np.diff(found.offset), [1, 1], atol=0.15)
    assert float((found.probabilities(scores) - p).abs().max()) < 0.03
    assert expected_calibration_error(found.probabilities(scores), labels) < 0.02
    raw = torch.softmax(10 * scores, 1)
    assert expected_calibration_error(raw, labels) > 0.1  # scores that are sharper than the truth


def test_units_and_common_shifts_of_scores_do_not_matter():
    scores, labels, _ = make_scores()
    expected = PlattScaling.fit(scores, labels).probabilities(scores)
    shift = torch.linspace(-3, 3, 400).double()[:, None]
    for factor in (2.0**-900, 2.0**-30, 2.0**900):
        found = PlattScaling.fit(scores * factor, labels).probabilities(scores * factor)
        np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_allclose(PlattScaling.fit(scores + shift, labels).probabilities(scores), expected, atol=1e-8)
    weight = torch.full((400,), 1e-300, dtype=torch.float64)
    np.testing.assert_allclose(PlattScaling.fit(scores, labels, weight).probabilities(scores), expected, atol=1e-10)


def test_weights_are_repetitions():
    scores, labels, _ = make_scores(60)
    times = torch.arange(60) % 3 + 1  # of mean 2, so that the penalty counts the same rows if it is given per row
    weighted = PlattScaling.fit(scores, labels, times.double())
    repeated = PlattScaling.fit(scores.repeat_interleave(times, 0), labels.repeat_interleave(times))
    np.testing.assert_allclose(weighted.probabilities(scores), repeated.probabilities(scores), atol=2e-3)
    some = PlattScaling.fit(scores, labels, (times < 3).double())
    alone = PlattScaling.fit(scores[times < 3], labels[times < 3])
    np.testing.assert_allclose(some.probabilities(scores), alone.probabilities(scores), atol=1e-10)
    # rows without weight are no evidence against the penalty, however many there are
    most = torch.zeros(4_060).index_fill(0, torch.arange(60), 1.0)
    some = PlattScaling.fit(scores.repeat(68, 1)[:4_060], labels.repeat(68)[:4_060], most, floors=FLOORS)
    alone = PlattScaling.fit(scores, labels, floors=FLOORS)
    np.testing.assert_allclose(some.probabilities(scores), alone.probabilities(scores), atol=1e-10)


def test_probabilities_as_labels():
    scores, labels, p = make_scores()
    one_hot = torch.eye(3).double()[labels]
    assert PlattScaling.fit(scores, one_hot) == PlattScaling.fit(scores, labels)
    assert PlattScaling.fit(scores, p).scale == pytest.approx(2, rel=1e-3)


def test_separable_missing_and_misleading_classes():
    scores = torch.eye(3).double().repeat(20, 1)
    labels = torch.arange(3).repeat(20)
    separated = PlattScaling.fit(scores, labels)
    assert np.isfinite([separated.scale, *separated.offset]).all()
    assert float(separated.probabilities(scores).max()) < 1
    assert log_loss(separated.probabilities(scores), labels) < 0.01
    two = labels < 2
    missing = PlattScaling.fit(0 * scores[two], labels[two])
    assert 0 < float(missing.probabilities(torch.zeros(1, 3))[0, 2]) < 0.01
    mirrored = PlattScaling.fit(-scores, labels)  # the best scale would be negative
    assert mirrored.scale == 0
    np.testing.assert_allclose(mirrored.probabilities(scores), np.full((60, 3), 1 / 3), atol=1e-9)
    constant = PlattScaling.fit(torch.zeros(50, 2), (torch.arange(50) < 10).long())
    np.testing.assert_allclose(constant.probabilities(torch.zeros(1, 2)), [[0.8, 0.2]], atol=1e-3)


def test_scores_of_any_size_have_probabilities():
    found = PlattScaling(1e300, (0.0, 1.0)).probabilities(
        torch.tensor([[1e308, -1e308], [0.0, 0.0]], dtype=torch.float64)
    )
    np.testing.assert_allclose(found, [[1, 0], [0.26894142, 0.73105858]])
    flat = PlattScaling(0.0, (0.0, 0.0)).probabilities(torch.tensor([[1e308, -1e308]], dtype=torch.float64))
    np.testing.assert_allclose(flat, [[0.5, 0.5]])
    tiny = torch.tensor([[1e-320, 0.0], [0.0, 1e-320]], dtype=torch.float64)
    assert PlattScaling.fit(tiny, torch.tensor([0, 1])).scale < np.inf


def test_round_trip():
    calibration = PlattScaling.fit(*make_scores()[:2])
    assert PlattScaling.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([1], "must have scale and offset"),
        ({"scale": 1.0}, "must have scale and offset"),
        ({"scale": 1.0, "offset": [0.0, 0.0], "more": 1}, "must have scale and offset"),
        ({"scale": -1.0, "offset": [0.0, 0.0]}, "scale of a calibration must be a finite number >= 0; got -1.0"),
        ({"scale": True, "offset": [0.0, 0.0]}, "got True"),
        ({"scale": float("nan"), "offset": [0.0, 0.0]}, "got nan"),
        ({"scale": 1.0, "offset": [0.0]}, "offset of a calibration must be a list"),
        ({"scale": 1.0, "offset": 0.0}, "offset of a calibration must be a list"),
        ({"scale": 1.0, "offset": [0.0, "1"]}, "offset of a calibration must be a list"),
        ({"scale": 1.0, "offset": [0.0, float("inf")]}, "offset of a calibration must be a list"),
    ],
)
@pytest.mark.once
def test_a_damaged_file_is_refused(stored, message):
    with pytest.raises(ValueError, match=message):
        PlattScaling.from_dict(stored)


@pytest.mark.parametrize("k", [2, 3])
def test_measures_are_those_of_scikit_learn(k):
    _, labels, p = make_scores(k=k)
    p = (p * 8).round().clamp(1) / 8  # many ties
    p = p / p.sum(1, keepdim=True)
    weight = torch.arange(400.0)
    assert log_loss(p, labels) == pytest.approx(metrics.log_loss(labels, p), abs=1e-12)
    assert log_loss(p, labels, weight) == pytest.approx(metrics.log_loss(labels, p, sample_weight=weight), abs=1e-10)
    area = metrics.roc_auc_score(labels, p[:, 1] if k == 2 else p, multi_class="ovr", average="macro")
    assert roc_auc(p, labels) == pytest.approx(area, abs=1e-12)


def test_log_loss_of_a_class_taken_for_impossible():
    p = torch.tensor([[1.0, 0.0]]).double()
    assert log_loss(p, torch.tensor([1])) == pytest.approx(-np.log(np.finfo(float).eps))


def test_area_of_the_classes_that_are_present():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]])
    assert roc_auc(p, torch.tensor([0, 0, 0])) is None
    assert roc_auc(p[:, :2], torch.tensor([1, 1, 1])) is None
    # Class 0 against class 1: one pair of two is in order; class 1 against class 0: one of two as well.
    assert roc_auc(p, torch.tensor([0, 1, 0])) == 0.5


def test_expected_calibration_error_by_hand():
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.35, 0.65]])
    # The first bin is right once of twice at 0.9. The second has the mean 0.625 and is right once of twice.
    assert expected_calibration_error(p, torch.tensor([0, 1, 1, 0])) == pytest.approx((0.4 + 0.125) / 2)
    # One bin: confidence 3.05 / 4 and accuracy 1 / 2.
    assert expected_calibration_error(p, torch.tensor([0, 1, 1, 0]), bins=1) == pytest.approx(3.05 / 4 - 0.5)
    assert expected_calibration_error(torch.eye(2), torch.tensor([0, 1])) == 0


@pytest.mark.parametrize(
    ("scores", "labels", "weight", "kind", "message"),
    [
        (torch.zeros(3), torch.zeros(3).long(), None, ValueError, r"must be \(n, k\)"),
        (torch.zeros(0, 2), torch.zeros(0).long(), None, ValueError, "a row and two classes at least"),
        (torch.zeros(3, 1), torch.zeros(3).long(), None, ValueError, "a row and two classes at least"),
        (torch.zeros(3, 2).long(), torch.zeros(3).long(), None, TypeError, "must be a floating tensor; got torch.int"),
        (torch.full((3, 2), torch.nan), torch.zeros(3).long(), None, ValueError, "6 NaN or infinite"),
        (torch.zeros(3, 2), torch.zeros(2).long(), None, ValueError, r"from 0 to 1; got shape \(2,\)"),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), None, ValueError, "from 0 to 1; got 0 to 2"),
        (torch.zeros(3, 2), torch.zeros(3), None, TypeError, r"Convert it with .long\(\)"),
        (torch.zeros(3, 2), torch.zeros(3).long(), torch.ones(2), ValueError, r"weight must be a tensor \(3,\)"),
        (torch.zeros(3, 2), torch.zeros(3).long(), -torch.ones(3), ValueError, "weight must be >= 0"),
        (torch.zeros(3, 2), torch.zeros(3).long(), torch.zeros(3), ValueError, "above 0 for some row"),
    ],
)
def test_refusals(scores, labels, weight, kind, message):
    for call in (PlattScaling.fit, log_loss):
        with pytest.raises(kind, match=message):
            call(scores, labels, weight)


def test_the_number_of_classes_must_fit():
    with pytest.raises(ValueError, match="one column for each of 2 classes"):
        PlattScaling(1.0, (0.0, 0.0)).probabilities(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"\(4, 2\) probabilities; got \(4, 3\)"):
        PlattScaling.fit(torch.zeros(4, 2), torch.ones(4, 3))


def test_scores_that_are_probabilities_stay_what_they_are():
    """With a floor, the calibration of true probabilities is the identity; a softmax of them is far from it."""
    _, labels, p = make_scores(20_000)
    found = PlattScaling.fit(p, labels, floors=FLOORS)
    assert found.floor == min(FLOORS) and found.scale == pytest.approx(1, abs=0.05)  # the standard error is 0.01
    assert float((found.probabilities(p) - p).abs().max()) < 0.03
    plain = PlattScaling.fit(p, labels).probabilities(p)
    assert float((plain - p).abs().max()) > 0.06 and log_loss(plain, labels) > log_loss(p, labels) + 0.002


def test_the_floor_is_that_of_largest_likelihood():
    """Scores with noise of 0.05 say little about probabilities below it."""
    _, labels, p = make_scores(20_000)
    noisy = p + 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).double()
    each = {f: log_loss(PlattScaling.fit(noisy, labels, floors=(f,)).probabilities(noisy), labels) for f in FLOORS}
    found = PlattScaling.fit(noisy, labels, floors=FLOORS)
    assert found.floor == min(each, key=each.get) > min(FLOORS)


def test_floors_of_scores_below_zero():
    """log((s + sqrt(s^2 + 4 f^2)) / 2), with 60 digits; s + sqrt(...) cancels in float64."""
    mpmath.mp.dps = 60
    scores = [-1e6, -1.0, -1e-3, 0.0, 1e-3, 0.5, 2.0]
    found = PlattScaling(1.0, (0.0, 0.0), 0.01).logits(torch.tensor([[s, 3.0] for s in scores], dtype=torch.float64))
    for s, row in zip(scores, found.tolist(), strict=True):
        low, high = (
            mpmath.log((v + mpmath.sqrt(mpmath.mpf(v) ** 2 + 4 * mpmath.mpf(0.01) ** 2)) / 2) for v in (s, 3.0)
        )
        assert row[0] - row[1] == pytest.approx(float(low - high), rel=1e-10)


def test_floors_in_files():
    found = PlattScaling(1.5, (0.0, 0.25), 0.03)
    assert PlattScaling.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    for bad in (-0.1, 2.0, "0.1", True, None):
        with pytest.raises(ValueError, match="floor of a calibration must be a number from 0 to 1; got"):
            PlattScaling.from_dict({**found.to_dict(), "floor": bad})


def test_fit_with_a_floor_is_the_optimum_that_scipy_finds():
    """Scores count relative to their mean, and the penalty is about the scale 1 and the frequencies of the classes."""
    _, labels, p = make_scores(60)
    found = PlattScaling.fit(p**1.5, labels, floors=FLOORS)
    frequency = ((np.bincount(labels, minlength=3) + 1) / 63).tolist()

    def terms(floor):
        soft = (p.numpy() ** 1.5 + np.sqrt(p.numpy() ** 3 + 4 * floor**2)) / 2
        return np.log(soft), np.log(soft.mean(0))

    def loss(theta, floor):
        logs, mean = terms(floor)
        logits = theta[0] * (logs - mean) + np.log(frequency) + theta[1:]
        chosen = torch.log_softmax(torch.tensor(logits), 1)[torch.arange(60), labels]
        return -float(chosen.sum()) + PRIOR / 2 * float(((theta - [1, 0, 0, 0]) ** 2).sum())

    fits = {f: minimize(loss, np.array([1.0, 0, 0, 0]), (f,), method="BFGS", options={"gtol": 1e-5}) for f in FLOORS}
    best = min(fits, key=lambda f: fits[f].fun)
    scale, *own = fits[best].x
    assert found.floor == best
    expected = [scale, *(np.array(own) + np.log(frequency) - scale * terms(best)[1])]
    np.testing.assert_allclose([found.scale, *found.offset], expected, atol=1e-4)


def test_a_few_rows_that_are_all_right_prove_no_certainty():
    """Forty rows without an error are what scores of 0.9 give in one case of 70; the most likely scale is infinite."""
    labels = torch.arange(40) % 2
    scores = 0.1 + 0.8 * torch.eye(2).double()[labels]
    found = PlattScaling.fit(scores, labels, floors=FLOORS)
    assert 1 < found.scale < 2 and 0.9 < float(found.probabilities(scores).max()) < 0.98


def test_one_error_among_a_few_rows_moves_no_boundary():
    """Forty rows do not show that a class is preferred; a thousand times as many do."""
    labels = torch.arange(40) % 2
    scores = 0.1 + 0.8 * torch.eye(2).double()[labels]
    scores[1] = torch.tensor([0.6, 0.4])
    border = torch.tensor([[0.45, 0.55], [0.55, 0.45]])
    few = PlattScaling.fit(scores, labels, floors=FLOORS)
    assert few.probabilities(border).argmax(1).tolist() == [1, 0]
    many = PlattScaling.fit(scores.repeat(1000, 1), labels.repeat(1000), floors=FLOORS)
    assert many.probabilities(border).argmax(1).tolist() == [1, 1]


def test_many_rows_have_offsets_of_their_own():
    _, labels, p = make_scores(20_000)
    shifted = p * torch.tensor([1.0, 2.0, 4.0])
    many = PlattScaling.fit(shifted / shifted.sum(1, keepdim=True), labels, floors=FLOORS)
    np.testing.assert_allclose(np.diff(many.offset), [-np.log(2)] * 2, atol=0.15)


def test_scores_that_tell_nothing_give_the_frequencies_of_the_classes():
    """Scores of other rows, where nothing can be learnt, are a little lower for the own class: the scale is 0."""
    labels = torch.repeat_interleave(torch.arange(7), torch.tensor([18, 7, 7, 7, 7, 7, 7]))
    scores = torch.tensor([18.0, 7, 7, 7, 7, 7, 7]).double() / 60 - 0.05 * torch.nn.functional.one_hot(labels, 7)
    found = PlattScaling.fit(scores, labels, floors=FLOORS)
    assert found.scale == 0
    assert (found.probabilities(scores) == found.probabilities(scores)[0]).all()
    first, *others = found.probabilities(scores)[0].tolist()
    assert 19 / 67 < first < 18 / 60 and all(7 / 60 < p < 8 / 67 for p in others)  # a row more per class, or not
