"""Atoms against brute force: each choice is the best single addition, and its gain is what ridge regression gains."""

import pytest
import torch

from snnk.ridge.atoms import choose_atoms, refine_
from snnk.ridge.sums import RidgeStats

from helpers.compression import explained


def problem(rows=300, width=12, targets=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    phi = draw(rows, width) @ draw(width, width) + 3
    return phi, phi[:, ::4] @ draw(len(range(0, width, 4)), targets) + 0.3 * draw(rows, targets)


def test_every_choice_is_the_best_addition():
    gram, cross, _ = RidgeStats(12, 3).update(*problem()).centred()
    order, gains = choose_atoms(gram, cross, 12, 0.5)
    assert sorted(order.tolist()) == list(range(12))
    for k in range(12):
        before = order[:k].tolist()
        found = {j: explained(gram, cross, [*before, j], 0.5) for j in range(12) if j not in before}
        assert max(found, key=found.get) == int(order[k])
        assert float(gains[: k + 1].sum()) == pytest.approx(found[int(order[k])], rel=1e-10)


def test_penalty_keeps_copies_of_a_feature_apart():
    phi, y = problem()
    gram, cross, _ = RidgeStats(24, 3).update(torch.cat([phi, phi], 1), y).centred()
    order, gains = choose_atoms(gram, cross, 12, 1e-6 * float(gram.diagonal().mean()))
    assert len({int(j) % 12 for j in order}) == 12 and bool(gains.isfinite().all())


@pytest.mark.parametrize("block_rows", [7, 23, 2048])
def test_rounding_below_the_penalty_leaves_gains_finite(block_rows, monkeypatch):
    """Copies of twelve features are left with nothing but rounding, of either sign, which the order of sums decides."""
    monkeypatch.setattr("snnk.ridge.sums.BLOCK_ROWS", block_rows)
    phi, y = problem()
    gram, cross, _ = RidgeStats(24, 3).update(torch.cat([phi, phi], 1), y).centred()
    order, gains = choose_atoms(gram, cross, 24, 1e-20 * float(gram.diagonal().mean()))
    assert sorted(order.tolist()) == list(range(24)) and bool(gains.isfinite().all())
    assert float(gains[12:].sum()) < 1e-6 * float(gains[:12].sum())  # there is nothing left to explain


@pytest.mark.once
def test_bad_counts():
    gram, cross, _ = RidgeStats(12, 3).update(*problem()).centred()
    with pytest.raises(ValueError, match="count must be at most 12, the number of features; got 13"):
        choose_atoms(gram, cross, 13, 0.1)
    with pytest.raises(ValueError, match="penalty must be a positive number"):
        choose_atoms(gram, cross, 3, 0.0)


@pytest.mark.parametrize("weighted", [False, True])
def test_select_equals_sums_of_those_features(weighted):
    phi, y = problem()
    weight = torch.rand(len(phi), generator=torch.Generator().manual_seed(1)) if weighted else None
    chosen = torch.tensor([7, 0, 11])
    part = RidgeStats(12, 3, folds=4).update(phi, y, weight).select(chosen)
    alone = RidgeStats(3, 3, folds=4).update(phi[:, chosen], y, weight)
    for lam in (0.1, "gcv", "kfold"):
        a, b = part.solve(lam), alone.solve(lam)
        assert torch.allclose(a.weight, b.weight, rtol=1e-10) and torch.allclose(a.bias, b.bias, rtol=1e-10)
    for wrong in ([0, 0], [12], [0.5], []):
        with pytest.raises(ValueError, match="features must be different integers below 12"):
            RidgeStats(12, 3).select(torch.tensor(wrong))


def test_centred_sums():
    phi, y = problem()
    gram, cross, power = RidgeStats(12, 3).update(phi, y).centred()
    p, q = phi - phi.mean(0), y - y.mean(0)
    assert torch.allclose(gram, p.T @ p, rtol=1e-10)
    assert torch.allclose(cross, p.T @ q, rtol=1e-10, atol=1e-9)
    assert torch.allclose(power, q.square().sum(0), rtol=1e-10)


def test_refine_lessens_the_weighted_error_and_restores_requires_grad():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 6, generator=generator)
    truth = torch.randn(8, 6, generator=generator)
    y, weight, scale = (x @ truth.T).relu(), torch.rand(2000, generator=generator), torch.rand(8, generator=generator)
    layer = torch.nn.Linear(6, 8).requires_grad_(False)
    layer.weight.copy_(truth + 0.3 * torch.randn(8, 6, generator=generator))
    layer.bias.zero_().add_(0.1)

    def error():
        return float((weight[:, None] * (scale * (layer(x).relu() - y)).square()).mean())

    before, state = error(), torch.get_rng_state()
    refine_(lambda z: layer(z).relu(), list(layer.parameters()), x, y, weight, scale, steps=150)
    assert error() < 0.1 * before
    assert not layer.weight.requires_grad and layer.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_refine_counts_rows_by_their_weights():
    """Rows without weight ask for the opposite, and do not get it."""
    generator = torch.Generator().manual_seed(0)
    x, truth = torch.randn(400, 6, generator=generator), torch.randn(3, 6, generator=generator)
    y, weight = x @ truth.T, torch.ones(400)
    y[200:], weight[200:] = -y[200:], 0
    layer = torch.nn.Linear(6, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(truth + 0.3)
    refine_(layer, [layer.weight], x, y, weight, torch.ones(3), steps=150, rows=100)
    assert torch.allclose(layer.weight, truth, atol=0.03)


def test_refine_sees_every_row_once_in_a_round():
    seen = {seed: [] for seed in (0, 1)}
    for seed, steps in seen.items():
        p = torch.ones(1, 1)

        def forward(x, p=p, steps=steps):
            steps.append(x[:, 0].int().tolist())
            return x * p

        x = torch.arange(40.0)[:, None]
        refine_(forward, [p], x, x, torch.ones(40), torch.ones(1), steps=8, rows=10, seed=seed)
        for part in (steps[:4], steps[4:]):
            assert sorted(row for step in part for row in step) == list(range(40))
        assert steps[:4] != steps[4:]
    assert seen[0] != seen[1]


def test_refine_begins_and_ends_with_small_steps(monkeypatch):
    """The rate rises over twenty steps and falls to nothing, relative to the size of each parameter."""
    rates = []

    class Adam(torch.optim.Adam):
        def step(self, *args, **kwargs):
            rates.append([group["lr"] for group in self.param_groups])
            return super().step(*args, **kwargs)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    small, large = torch.full((1, 1), 0.5), torch.full((1,), 4.0)
    x = torch.arange(40.0)[:, None]
    refine_(lambda z: z * small + large, [small, large], x, x, torch.ones(40), torch.ones(1), steps=50)
    shape = [min(1, (step + 1) / 20) * (1 - step / 50) for step in range(50)]
    assert [r[0] for r in rates] == pytest.approx([0.05 * s for s in shape])
    assert [r[1] for r in rates] == pytest.approx([0.4 * s for s in shape])


def test_refine_weighs_outputs_by_their_scale():
    """One parameter for two outputs that ask for 1 and 3: least squares of scale 3 and 1 is (9 + 3) / 10."""
    x, y = torch.ones(64, 1), torch.tensor([[1.0, 3.0]]).expand(64, 2)
    p = torch.full((1, 1), 2.0)
    refine_(lambda z: (z * p).expand(-1, 2), [p], x, y, torch.ones(64), torch.tensor([3.0, 1.0]), steps=300)
    assert float(p) == pytest.approx(1.2, abs=0.01)
