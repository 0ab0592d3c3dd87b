"""The potential of two coupled oscillators from conservation of energy: physics, training, rows, claims."""

from dataclasses import replace

import pytest
import torch

from snnk.experiments import qpnn
from snnk.experiments.lab.records import Results
from snnk.experiments.lab.training import grid, uniform
from snnk.maps.projections import make_generator

CONFIG = replace(qpnn.QUICK, width=32, num_features=8, more_features=12, steps=150, lr=5e-3, grid=9, other_boxes=(0.5,))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    results = Results(tmp_path_factory.mktemp("rows") / "qpnn.json", CONFIG)
    before = torch.get_rng_state()
    assert len(list(qpnn.run(CONFIG, results, None))) == qpnn.total(CONFIG) == 14
    assert torch.equal(torch.get_rng_state(), before)
    return results


@pytest.mark.parametrize(("frequency", "coupling"), [(1.0, 1.0), (0.7, 2.0), (1.3, 0.0)])
def test_local_energy_of_the_ground_state_is_constant(frequency, coupling):
    config = qpnn.Config(frequency=frequency, coupling=coupling)
    x = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    energy = qpnn.kinetic(x, config) + qpnn.potential(x, config)
    exact = (frequency + (frequency**2 + 2 * coupling) ** 0.5) / 2
    assert torch.allclose(energy, torch.full_like(energy, exact), atol=1e-10)


def test_kinetic_energy_is_that_of_the_wave_function():
    config = qpnn.Config(frequency=0.7, coupling=2.0)
    relative = (0.7**2 + 4) ** 0.5
    x = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    s, r = (x[:, 0] + x[:, 1]) / 2**0.5, (x[:, 0] - x[:, 1]) / 2**0.5
    psi = torch.exp(-(0.7 * s**2 + relative * r**2) / 2)
    (slope,) = torch.autograd.grad(psi.sum(), x, create_graph=True)
    laplacian = sum(torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(2))
    assert torch.allclose(qpnn.kinetic(x, config), -laplacian / psi / 2, atol=1e-10)


def test_training_needs_no_labels_but_the_gauge(monkeypatch):
    """The potential is asked for at the origin only, and training still finds it elsewhere."""
    asked = []
    true = qpnn.potential

    def watched(x, config):
        asked.append(x)
        return true(x, config)

    monkeypatch.setattr(qpnn, "potential", watched)
    net = qpnn.build(qpnn.BASELINE, CONFIG, seed=0)
    x = grid(CONFIG.grid, CONFIG.box)
    before = (net(x)[:, 0] - true(x, CONFIG)).abs().mean()
    qpnn.train(net, CONFIG, seed=0)
    after = (net(x)[:, 0] - true(x, CONFIG)).abs().mean()
    assert asked and all(not point.any() for point in asked)
    assert after < before / 4


@pytest.mark.parametrize("network", qpnn.NETWORKS[3:])
def test_closed_form_is_the_minimum(network):
    """No other A has a lower loss: its gradient is zero, and moving along any direction costs."""
    net = qpnn.build(network, CONFIG, seed=0)
    first = net[0].weight.clone()
    qpnn.fit(net, CONFIG, seed=0)
    assert torch.equal(net[0].weight, first)
    assert abs(float(net(torch.zeros(1, 2)).detach())) < 1e-4  # the gauge
    net = net.double()
    x = uniform(CONFIG.points, 2, bound=CONFIG.box, generator=make_generator(0, stream=1)).double()

    def loss(step):
        points = x.clone().requires_grad_()
        features = net[2][0](torch.tanh(net[0](points)))
        energy = qpnn.kinetic(points, CONFIG) + features @ (net[3].weight[0] @ net[2][1].weight + step)
        (slope,) = torch.autograd.grad(energy.sum(), points, create_graph=True)
        return slope.square().sum(1).mean()

    count = CONFIG.more_features if network.endswith(qpnn.MORE) else CONFIG.num_features
    zero = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    best = loss(zero)
    (gradient,) = torch.autograd.grad(best, zero)
    assert float(gradient.abs().max()) < 1e-4
    for i in range(count):
        assert loss(torch.eye(count, dtype=torch.float64)[i] * 0.1) > best


def test_networks_differ_in_the_hidden_layer_only():
    nets = [qpnn.build(name, CONFIG, seed=3) for name in qpnn.NETWORKS]
    for net in nets[1:]:
        assert torch.equal(net[0].weight, nets[0][0].weight) and torch.equal(net[-1].weight, nets[0][-1].weight)
        assert str(net[2]) != str(nets[0][2])
    h = torch.randn(4, CONFIG.width)
    cos, sin = nets[3][2][0], nets[4][2][0]
    assert torch.allclose(cos(h) ** 2 + sin(h) ** 2, torch.ones(4, CONFIG.num_features), atol=1e-5)


def test_unknown_network_is_named():
    with pytest.raises(ValueError, match="SNNK sin, closed form"):
        qpnn.build("MLP", CONFIG, seed=0)


def test_rows(results):
    width = CONFIG.width
    for r in results:
        name = r["network"]
        m = CONFIG.more_features if name.endswith(qpnn.MORE) else CONFIG.num_features
        if "closed form" in name:  # a row of numbers and a bias; all else is as drawn
            assert (r["trained"], r["frozen"]) == (m + 1, 3 * width + m * (width + 1))
        else:
            hidden = width * width + width if name == qpnn.BASELINE else m * width
            assert r["trained"] == 3 * width + hidden + width + 1
            assert r["frozen"] == (0 if name == qpnn.BASELINE else m // 2 * width)
        assert ("potential" in r) == (r["box"] == CONFIG.box)
        if r["box"] != CONFIG.box:
            continue
        learnt = torch.tensor(r["potential"])
        error = (learnt - qpnn.potential(grid(CONFIG.grid, CONFIG.box), CONFIG)).abs()
        assert r["mean_error"] == pytest.approx(float(error.mean()), abs=1e-4)
        assert r["max_error"] == pytest.approx(float(error.max()), abs=1e-4)
        assert r["mean_error"] < 0.3  # a constant is 0.5 off
    assert results.path.stat().st_size < 300_000


def test_rows_are_found_again(results):
    again = Results(results.path, CONFIG)
    assert list(qpnn.run(CONFIG, again, None)) == list(results)


def test_claims_follow_the_rows(results, tmp_path):
    table = qpnn.claims(results)
    assert len(table) == 24 and sum("[-0.5, 0.5]^2" in claim["paper"] for claim in table) == 12
    assert all(set(claim) == {"paper", "ours", "tolerance", "holds"} for claim in table)
    assert "after 150 steps, its authors take 300,000" in table[0]["ours"]
    made = Results(tmp_path / "made.json", CONFIG)
    row = {"seed": 0, "box": CONFIG.box, "max_error": 0.3, "energy": 1.4, "frozen": 0, "seconds": 2.0}
    made.rows = [
        {**row, "network": "QPNN", "mean_error": 0.2, "trained": 100},
        {**row, "network": "SNNK cos, paper", "mean_error": 0.3, "trained": 50, "seconds": 1.7},
        {**row, "network": "SNNK sin, paper", "mean_error": 0.2, "trained": 50, "frozen": 49, "seconds": 1.9},
        {**row, "network": "SNNK cos, closed form", "mean_error": 0.1, "trained": 50, "frozen": 50},
        {**row, "network": "SNNK sin, closed form", "mean_error": 0.1, "max_error": 0.31, "trained": 9},
    ]
    held = [claim["holds"] for claim in qpnn.claims(made)]
    assert held == [False, True, True, False, False, False, False, False]
    # the second seed of a network alone has no baseline to compare with
    made.rows.append({**made.rows[1], "seed": 1, "mean_error": 0.0})
    assert [claim["holds"] for claim in qpnn.claims(made)] == held
    made.rows.append({**made.rows[0], "seed": 1})
    assert "mean error 0.1500 against 0.2000 (no larger in 1 of 2 seeds)" in qpnn.claims(made)[0]["ours"]


def test_what_diverged_is_said_and_drawn(tmp_path):
    config = replace(CONFIG, other_boxes=(), lr=1e36, steps=3)
    results = Results(tmp_path / "qpnn.json", config)
    rows = {r["network"]: r for r in qpnn.run(config, results, None)}
    assert rows["QPNN"]["mean_error"] is None or rows["SNNK cos, paper"]["mean_error"] is None
    results.rows[0] |= {"mean_error": None, "potential": [None] * config.grid**2}
    assert {(c["ours"], c["holds"]) for c in qpnn.claims(results)} == {("diverged", False)}
    qpnn.plot(results).savefig(tmp_path / "qpnn.png")


def test_plot(results):
    figure = qpnn.plot(results)
    assert len(figure.axes) == 2 * 8 + 2
    assert qpnn.plot(Results(results.path.with_name("none.json"), CONFIG)).axes
