"""Scores against scikit-learn and scipy."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

from snnk.finetune.scores import METRICS, score


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_against_scikit_learn(classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, classes, generator=generator)
    wanted = torch.randint(classes, (200,), generator=generator)
    wanted[:80] = logits[:80].argmax(-1)
    found = score(logits, wanted, [name for name in METRICS if name not in ("pearson", "spearman")])
    y, p = wanted.numpy(), logits.argmax(-1).numpy()
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(y, p))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(y, p, average="macro"))
    assert found["mcc"] == pytest.approx(metrics.matthews_corrcoef(y, p))
    assert found["f1"] == pytest.approx(metrics.f1_score(y == 1, p == 1))
    assert found["loss"] == pytest.approx(metrics.log_loss(y, torch.softmax(logits.double(), -1).numpy()))


def test_scores_of_regression_against_scipy():
    generator = np.random.default_rng(0)
    y = generator.normal(size=50).round(1).astype(np.float32)  # with ties
    p = (y + generator.normal(size=50)).astype(np.float32)
    found = score(torch.tensor(p)[:, None], torch.tensor(y), ["pearson", "spearman"])
    assert found["pearson"] == pytest.approx(stats.pearsonr(p, y)[0], abs=1e-6)
    assert found["spearman"] == pytest.approx(stats.spearmanr(p, y)[0], abs=1e-6)
    assert found["loss"] == pytest.approx(float(((p - y) ** 2).mean()), rel=1e-5)


def test_scores_of_constant_predictions():
    flat, labels = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])
    assert score(flat, labels, ["mcc", "f1"])["mcc"] == 0 and score(flat, labels, ["f1"])["f1"] == 0
    assert score(torch.zeros(4, 1), labels.float(), ["pearson", "spearman"])["spearman"] == 0
