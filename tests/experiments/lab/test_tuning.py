"""Fine-tuning as rows, and the order of two methods as a claim."""

import numpy as np
import pytest

from snnk.experiments.lab import tuning
from snnk.finetune import METHODS

from helpers.experiments import Rows, table_row


@pytest.mark.parametrize("name", ["snnk-pooler", "houlsby"])
def test_a_method_as_an_object_is_that_of_its_name(name, files):
    options = {"glue": "cola", "num_features": 4, "max_steps": 6, "batch_size": 16, "seed": 3}
    named = tuning.tuned(files, method=name, **options)
    given = tuning.tuned(files, METHODS[name], method=name, **options)
    first, second = (tuning.row_of(found, "mcc") for found in (named, given))
    for row in (first, second):
        assert row.pop("seconds") > 0 and row.pop("start_seconds") > 0
    assert first == second and named.metrics["scores"] == given.metrics["scores"]


def test_variants_differ_from_what_they_vary(files):
    known = tuning.variants()
    assert set(known) == {"pooler", "psi-pooler", "tanh-pooler", "random-pooler", "bundled-solved", "pfeiffer"}
    options = {"method": "snnk-pooler", "glue": "stsb", "num_features": 8, "max_steps": 0}
    ways = [known["tanh-pooler"][1], known["random-pooler"][1], None]
    losses = [tuning.tuned(files, way, **options).metrics["scores"]["test"]["loss"] for way in ways]
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    ("theirs", "ours", "answers", "holds", "tie"),
    [
        ((90, 80), (52, 50), 10**6, True, False),
        ((90, 80), (50, 52), 10**6, False, False),
        ((90, 80), (50.9, 50), 10**6, False, True),
        ((90, 80), (52, 50), 1000, False, True),  # 3.4 points by chance
        ((80, 90), (50, 52), 10**6, True, False),
        ((80, 80.9), (50.9, 50), 10**6, True, True),
        ((80, 80.9), (52, 50), 10**6, False, False),
        ((80, 80.9), (52, 50), 1000, True, True),
    ],
)
def test_an_order_holds_beyond_chance(theirs, ours, answers, holds, tie):
    rows = [table_row("cola", name, score) for name, score in zip("ab", ours, strict=True)]
    paper = {name: {"cola": score} for name, score in zip("ab", theirs, strict=True)}
    (found,) = tuning.orders(Rows(rows), [("a", "b", "b")], paper, {"cola": answers})
    assert found["holds"] is holds and (" (a tie);" in found["ours"]) is tie


@pytest.mark.parametrize("right", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("metric", ["mcc", "accuracy"])
def test_deviation_is_that_of_simulated_scores(metric, right):
    """Two classifiers on answers of their own."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, (4000, 400))
    given = np.where(rng.random(truth.shape) < right, truth, 1 - truth)
    if metric == "accuracy":
        scores = (truth == given).mean(1)
    else:
        scores = np.array([np.corrcoef(a, b)[0, 1] for a, b in zip(truth, given, strict=True)])
    spread = 100 * np.std(scores[:2000] - scores[2000:])
    assert tuning.deviation(metric, *2 * [100 * scores.mean()], 400) == pytest.approx(spread, rel=0.1)


def test_deviation_of_rank_correlations():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    truth, noise = rng.normal(size=(2, 1000, 200))
    scores = np.array([spearmanr(a, b).statistic for a, b in zip(truth, truth + 0.6 * noise, strict=True)])
    spread = 100 * np.std(scores[:500] - scores[500:])
    assert tuning.deviation("spearman", *2 * [100 * scores.mean()], 200) == pytest.approx(spread, rel=0.25)
