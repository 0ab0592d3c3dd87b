"""SIREN and its SNNK variants on an image that needs no file: derivatives, rows, claims and pictures."""

import base64
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from snnk.experiments import siren
from snnk.experiments.lab.records import Results
from snnk.experiments.lab.training import grid

CONFIG = replace(
    siren.QUICK,
    image="waves",
    size=32,
    width=32,
    num_features=8,
    hidden=(3, 1),
    lr=2e-3,
    steps=60,
    batch=512,
    every=20,
    picture=16,
    seeds=2,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    results = Results(tmp_path_factory.mktemp("rows") / "siren.json", CONFIG)
    before = torch.get_rng_state()
    assert len(list(siren.run(CONFIG, results, None))) == siren.total(CONFIG) == 16
    assert torch.equal(torch.get_rng_state(), before)
    return results


class Waves(nn.Module):
    def forward(self, x):
        return torch.sin(3 * x[:, :1]) * torch.cos(2 * x[:, 1:])


def test_derivatives_of_a_known_function():
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, 65)] * 2, indexing="ij")
    found = siren.derivatives(Waves(), 65, chunk=1000)
    value = torch.sin(3 * y) * torch.cos(2 * x)
    down, across = 3 * torch.cos(3 * y) * torch.cos(2 * x), -2 * torch.sin(3 * y) * torch.sin(2 * x)
    assert torch.allclose(found["picture"], value, atol=1e-5)
    assert torch.allclose(found["gradient"], torch.stack([down, across], -1), atol=1e-5)
    assert torch.allclose(found["Laplacian"], -13 * value, atol=1e-4)
    # the differences of its picture have the same axes, signs and units
    measured = siren.measures(found, siren.differences(value))
    assert measured["psnr"] > 100 and measured["gradient_psnr"] > 50
    assert measured["gradient_error"] < 0.01 and measured["laplacian_error"] < 0.01


def test_measures_tell_a_turned_picture():
    signal = siren.derivatives(Waves(), 33)
    turned = {kind: value.transpose(0, 1) for kind, value in signal.items()}
    measured = siren.measures(turned, signal)
    assert measured["psnr"] < 20 and measured["gradient_error"] > 0.5 and measured["laplacian_error"] > 0.5


def test_psnr():
    assert siren.psnr(torch.full((4,), 0.2), 2.0) == pytest.approx(20)
    assert math.isnan(siren.psnr(torch.tensor([0.2, torch.inf]), 2.0))


@pytest.mark.parametrize("hidden", [1, 2, 3])
def test_networks_differ_in_one_layer_only(hidden):
    nets = [siren.build(name, hidden, CONFIG, seed=3) for name in (*siren.NETWORKS, *siren.VARIANTS)]
    middle = 1 + hidden // 2
    for net in nets[1:]:
        for i, (new, old) in enumerate(zip(net, nets[0], strict=True)):
            same = type(new) is type(old) and all(map(torch.equal, new.parameters(), old.parameters()))
            assert same == (i != middle)


def test_sine_layers_start_as_in_siren():
    net = siren.build(siren.BASELINE, 3, siren.Config(), seed=0)
    with torch.no_grad():
        h = net[0](grid(32))
        for layer in list(net)[1:-1]:
            angle = layer.omega * torch.nn.functional.linear(h, layer.weight)
            assert 0.7 < float(angle.std()) < 1.3
            h = layer(h)
        assert net[0].weight.abs().max() <= 0.5
        last = net[-1]
        assert torch.allclose(last(h), h @ last.weight.T + last.bias, atol=1e-5)  # no sine at the end


def test_unknown_network_is_named():
    with pytest.raises(ValueError, match="SNNK, neurons"):
        siren.build("MLP", 1, CONFIG, seed=0)


def test_rows(results):
    width, m = CONFIG.width, CONFIG.num_features
    for r in results:
        others = 3 * width + width + 1 + (r["hidden"] - 1) * (width * width + width)
        baseline = r["network"] == siren.BASELINE
        variant = siren.VARIANTS.get(r["network"], siren.Variant())
        count = width if variant.wide else m
        inner = count * (width + 1)  # directions and phases
        assert r["trained"] == others + (width * width + width if baseline else count * width + variant.trained * inner)
        if baseline or variant.trained:
            assert r["frozen"] == 0
        else:
            assert r["frozen"] == (inner if "neurons" in r["network"] else m // 2 * width)
        assert [step for step, _ in r["curve"]] == [0, 20, 40, 60]
        assert r["psnr"] == pytest.approx(r["curve"][-1][1], abs=0.01)
        assert r["curve"][-1][1] > r["curve"][0][1] + 3  # it learns
        assert ("pictures" in r) == (r["hidden"] == 3 and r["seed"] == 0 and r["network"] in siren.NETWORKS)
    assert [r["seed"] for r in results if r["hidden"] == 1] == [0, 0, 0, 0]  # further depths have one seed
    scores = {r["network"]: r["psnr"] for r in results if r["hidden"] == 1}
    assert len(set(scores.values())) == 4
    assert results.path.stat().st_size < 300_000


def test_pictures_are_those_of_the_image(results):
    row = results.find(network=siren.BASELINE, hidden=3)
    image = torch.nn.functional.interpolate(siren.IMAGES["waves"]()[None, None], (32, 32), mode="area")
    small = torch.nn.functional.interpolate(image, (16, 16), mode="area")[0, 0]
    levels = torch.tensor(list(base64.b64decode(row["reference"]["picture"]))).reshape(16, 16)
    assert (levels / 127.5 - 1 - small.clamp(-1, 1)).abs().max() < 0.005
    fitted = torch.tensor(list(base64.b64decode(row["pictures"]["picture"]))).reshape(16, 16)
    assert 0 < (fitted - levels).abs().float().mean() < 40


def test_rows_are_found_again(results):
    again = Results(results.path, CONFIG)
    assert list(siren.run(CONFIG, again, None)) == list(results)
    few = Results(
        results.path, replace(CONFIG, variants=())
    )  # rows without variants are those of the same configuration
    assert few.hash == again.hash and len(few.rows) == len(again.rows)


def made_rows(**changed):
    """Three networks of one layer; `changed` are figures of the third."""
    row = {"hidden": 1, "gradient_psnr": 20.0, "gradient_error": 0.4, "laplacian_error": 0.5, "frozen": 0, "seed": 0}
    row |= {"seconds": 2.0, "psnr": 30.0, "trained": 100, "curve": [[0, 9.0], [20, 25.0], [40, 30.0]]}
    short = {**row, "trained": 50, "psnr": 28.9, "seconds": 1.7, "curve": [[0, 9.0], [20, 24.5], [40, 28.9]]}
    near = {**short, "psnr": 29.1, "frozen": 40, "seconds": 1.9, "curve": [[0, 9.0], [20, 24.5], [40, 29.1]]}
    return [
        {**row, "network": "SIREN"},
        {**short, "network": "SNNK, paper"},
        {**near, "network": "SNNK, neurons", **changed},
    ]


def test_claims_follow_the_rows(results, tmp_path):
    table = siren.claims(results)
    assert len(table) == 18 and all(set(claim) == {"paper", "ours", "tolerance", "holds"} for claim in table)
    assert "after 60 steps" in table[0]["ours"] and "(seeds " in table[0]["ours"] and "(seeds " not in table[7]["ours"]
    made = Results(tmp_path / "made.json", replace(CONFIG, hidden=(1,)))
    made.rows = made_rows()
    table = siren.claims(made)
    assert [claim["holds"] for claim in table] == [False, True, True, True, True, False]
    assert [claim["tolerance"][:4] for claim in table[3:]] == ["1 dB", "erro", "less"]
    assert siren.BUNDLED in table[0]["ours"] and siren.BUNDLED not in table[3]["ours"]
    assert (
        "29.10 dB against 30.00, 0.90 behind, after 20 0.50; 50 trained and 40 frozen against 100" in table[3]["ours"]
    )
    longer = Results(tmp_path / "longer.json", replace(CONFIG, hidden=(1,)))
    longer.rows = [{**r, "curve": [[25 * step, dB] for step, dB in r["curve"]]} for r in made.rows]
    early = [claim for claim in siren.claims(longer) if "after its authors' 500 steps" in claim["paper"]]
    assert [claim["holds"] for claim in early] == [True, True] and early[1]["ours"] == "0.50 dB behind"
    longer.rows[2]["curve"][1][1] -= 0.6
    early = [claim for claim in siren.claims(longer) if "after its authors' 500 steps" in claim["paper"]]
    assert [claim["holds"] for claim in early] == [True, False] and early[1]["ours"] == "1.10 dB behind"
    for figure, value, place in (
        ("frozen", 60, 3),
        ("gradient_error", 0.51, 4),
        ("laplacian_error", 0.53, 4),
        ("gradient_psnr", 18.9, 4),
    ):
        made.rows = made_rows(**{figure: value})
        held = [claim["holds"] for claim in siren.claims(made)]
        assert not held[place] and sum(held) == 3, figure
    made.rows = [{**r, "laplacian_error": 0.9} for r in made_rows()]  # alike, but neither is accurate
    assert not siren.claims(made)[4]["holds"]
    for psnr, holds in ((29.8, True), (27.8, False)):  # the paper's sine layer has 28.9
        made.rows = [*made_rows(), {**made_rows()[1], "network": siren.COSINE, "psnr": psnr}]
        *others, last = siren.claims(made)
        assert len(others) == 6 and last["paper"].startswith("the cosine variant") and last["holds"] is holds


def test_claims_on_variants_compare_the_same_seed(tmp_path):
    made = Results(tmp_path / "made.json", replace(CONFIG, hidden=(1,)))
    variant = {**made_rows()[2], "network": "SNNK, trained neurons"}
    other = [{**r, "seed": 1, "curve": [[0, 1.0], [20, 2.0], [40, 3.0]]} for r in made_rows()]
    # the mean of all three points: SIREN has 64 / 3, frozen neurons have 62.6 / 3
    for last, holds in ((29.9, True), (29.7, False)):
        made.rows = [*other, *made_rows(), {**variant, "curve": [[0, 9.0], [20, 24.5], [40, last]]}]
        *_, claim = siren.claims(made)
        assert claim["holds"] is holds and "SNNK, trained neurons" in claim["paper"]
        assert (
            f"SIREN 21.33, SNNK, neurons 20.87: {(30.5 - last) / 3:.2f} behind instead of 0.47, seed 0" in claim["ours"]
        )
    made.rows = [r for r in made.rows if r["network"] != "SNNK, neurons"]
    assert not any("halves" in claim["paper"] for claim in siren.claims(made))
    made.rows = [*made_rows(), {**variant, "curve": [[0, 9.0], [20, None], [40, None]]}]
    assert siren.claims(made)[-1]["ours"] == "diverged"


def test_a_factor_leaves_the_function_and_changes_the_steps():
    h = torch.rand(5, CONFIG.width, generator=torch.Generator().manual_seed(0))
    usual, scaled = (
        siren.build(name, 3, CONFIG, seed=0)[2] for name in ("SNNK, neurons", "SNNK, neurons, A times omega")
    )
    assert torch.allclose(usual(h), scaled(h), atol=1e-5)
    (a,), (b,) = (layer.parameters() for layer in (usual, scaled))
    assert torch.allclose(a, CONFIG.omega * b)


def test_what_diverged_is_said_and_drawn(tmp_path):
    """A rate that no network bears: rows have nulls, claims say so."""
    config = replace(CONFIG, hidden=(1,), variants=(), lr=1e36, steps=4, every=2, seeds=1)
    results = Results(tmp_path / "siren.json", config)
    rows = list(siren.run(config, results, None))
    assert any(r["psnr"] is None for r in rows)
    table = siren.claims(results)
    assert len(table) == 7 and {(c["ours"], c["holds"]) for c in table} == {("diverged", False)}
    siren.plot(results).savefig(tmp_path / "siren.png")


def test_plot(results):
    figure = siren.plot(results)
    left, right = figure.subfigs
    assert len(left.axes) == 3 * 5 and len(right.axes) == 2
    assert [len(axes.lines) for axes in right.axes] == [2 * 4 + 4, 4]  # two seeds and the variants of one, then one


def test_without_scikit_image_the_error_says_what_to_install(monkeypatch, tmp_path):
    for name in ("skimage", "skimage.data"):  # another test of this process may have imported it
        monkeypatch.setitem(sys.modules, name, None)
    config = replace(CONFIG, image="camera")
    with pytest.raises(ImportError, match="pip install scikit-image"):
        next(siren.run(config, Results(tmp_path / "siren.json", config), None))


def test_camera():
    pytest.importorskip("skimage")
    image = siren.IMAGES["camera"]()
    assert image.shape == (512, 512) and float(image.min()) >= -1 and float(image.max()) <= 1 and image.std() > 0.3
