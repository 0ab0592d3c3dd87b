"""Small networks and their training."""

import numpy as np
import pytest
import torch

from snnk.experiments import mnist, uci
from snnk.experiments.lab import data
from snnk.experiments.lab.records import Results
from snnk.experiments.lab.training import evaluate, fit_classifier, mlp


def test_training_keeps_the_best_epoch():
    """The reported figures are those of the epoch of least validation loss, and the classes are learnt."""
    whole = data.made(1200, 6, 3, seed=0)
    parts = {key: whole.take(torch.arange(*span)) for key, span in (("train", (0, 800)), ("test", (800, 1200)))}
    parts["validation"] = parts["test"]
    made = []

    def make():
        made.append(mlp((6, 32, 32, 3), 32, mnist.Config(), seed=0))
        return made[0]

    before = torch.random.get_rng_state()
    row = fit_classifier(make, parts, epochs=6, batch_size=32, learning_rate=1e-2, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    assert row["best_epoch"] == 1 + int(np.argmin(row["validation_losses"])) and len(row["train_losses"]) == 6
    assert row["test_loss"] == pytest.approx(min(row["validation_losses"]), abs=1e-4)
    assert (row["test_loss"], row["test_accuracy"]) == evaluate(made[0], parts["test"])
    assert row["test_accuracy"] > 0.7 and row["train_losses"][-1] < row["train_losses"][0]
    assert "validation_accuracies" not in row


class Scripted(torch.nn.Module):
    """Epoch by epoch: two of four rows right; three right, with the fourth far off; one right."""

    margins = ((0.1, 0.1, -0.1, -0.1), (0.1, 0.1, 0.1, -9.0), (0.1, -0.1, -0.1, -0.1))

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("epoch", torch.tensor(0))

    def forward(self, x):
        self.epoch += self.training
        margin = torch.tensor(self.margins[int(self.epoch) - 1]) + 0 * self.weight
        return torch.stack([margin, torch.zeros(4)], 1)


@pytest.mark.parametrize(("choose", "best"), [("loss", 1), ("accuracy", 2)])
def test_loss_or_accuracy_chooses_the_epoch(choose, best):
    parts = dict.fromkeys(("train", "validation", "test"), data.Split(torch.zeros(4, 1), torch.zeros(4, dtype=int)))
    row = fit_classifier(Scripted, parts, epochs=3, batch_size=4, learning_rate=1.0, seed=0, choose=choose)
    assert row["best_epoch"] == best and row["test_accuracy"] == (0.5, 0.75)[best - 1]
    assert row.get("validation_accuracies") == ([0.5, 0.75, 0.25] if choose == "accuracy" else None)


def test_an_unknown_choice_is_named():
    with pytest.raises(ValueError, match="accuracy"):
        fit_classifier(Scripted, {}, epochs=1, batch_size=1, learning_rate=1.0, seed=0, choose="error")


@pytest.mark.parametrize("choose", ["loss", "accuracy"])
@pytest.mark.parametrize("late", [0, 2])
def test_a_network_that_diverges_is_reported(late, choose, tmp_path):
    """NaN from the first epoch on, or from a later one: training ends, and the best finite epoch is kept."""

    class Breaking(torch.nn.Linear):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + self.training
            return super().forward(x) * (float("nan") if self.calls > late else 1.0)

    whole = data.made(60, 6, 3, seed=0)
    parts = dict.fromkeys(("train", "validation", "test"), whole)
    row = fit_classifier(
        lambda: Breaking(6, 3), parts, epochs=4, batch_size=60, learning_rate=1e-2, seed=0, choose=choose
    )
    stored = Results(tmp_path / "rows.json", mnist.Config()).add(row)
    assert [loss is None for loss in stored["validation_losses"]] == [False] * late + [True] * (4 - late)
    assert stored["best_epoch"] in range(1, 1 + (late or 1))


def test_parameters_of_the_papers_networks():
    dense, ours = (
        sum(p.numel() for p in mlp((784, 512, 512, 10), m, mnist.Config(), 0).parameters()) for m in (None, 32)
    )
    assert dense == 784 * 512 + 512 + 512 * 512 + 512 + 5130
    assert ours == 784 * 512 + 512 + 512 * 32 + 5130
    assert [sum(p.numel() for p in mlp((54, 512, 64, 7), m, uci.Config(), 0).parameters()) for m in (None, 64)] == [
        54 * 512 + 512 + 512 * 64 + 64 + 64 * 7 + 7,
        54 * 512 + 512 + 64 * 64 + 64 * 7 + 7,
    ]
