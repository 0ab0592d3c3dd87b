"""Bundling: what is exact is demanded at 1e-10, what is an estimate against its own report."""

import copy
import dataclasses
import itertools
import json
import math
import re
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import nn

from snnk import URF, ArcCosine, PowerSeries, ProjectedURF, RidgeStats, SNNKLinear, UnreachableError
from snnk.maps import CLASSES, Directions, FeatureMap
from snnk.maps.affine import Affine
from snnk.maps.projections import PROJECTIONS, make_generator
from snnk.maps.sampled import Sampled
from snnk.maps.series import Series
from snnk.nn.bounds import ErrorBound, error_bound
from snnk.nn.bundling import Bundled, BundleReport, bundle

F64 = {"dtype": torch.float64}
EXACT = {"atol": 1e-10, "rtol": 1e-10}
QUIET = {"on_error": "ignore"}
OURS = {"rho": "balanced", "antithetic": True}


def seeded(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **F64) * scale


def linear(inputs, outputs, seed=0, bias=True, gain=1.0):
    """A float64 layer whose rows have length about `gain`."""
    layer = nn.Linear(inputs, outputs, bias=bias, **F64)
    with torch.no_grad():
        layer.weight.copy_(seeded(outputs, inputs, seed=seed, scale=gain / math.sqrt(inputs)))
        if bias:
            layer.bias.copy_(seeded(outputs, seed=seed + 1, scale=0.3))
    return layer


def mlp(*widths, activation=nn.Tanh, gain=1.0):
    layers = []
    for i, (d, o) in enumerate(itertools.pairwise(widths)):
        layers += [linear(d, o, seed=10 * i, gain=gain), activation()]
    return nn.Sequential(*layers[:-1])


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


def snnk(inputs, outputs, m, feature_map, seed=0, **options):
    layer = SNNKLinear(inputs, outputs, m, feature_map, seed=seed, **F64, **options)
    with torch.no_grad():
        layer.weight.copy_(seeded(outputs, m, seed=seed + 5))
    return layer


@pytest.fixture(scope="module")
def trained():
    """8 -> 32 -> 32 -> 2 with tanh, fitted to a curved target, and inputs (4000, 8)."""
    x = seeded(4000, 8, seed=3)
    y = torch.stack([torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2], x[:, 3:].norm(dim=1)], 1)
    net = mlp(8, 32, 32, 2)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net, x


# --- the algebra -----------------------------------------------------------------------------------------------------


def test_linear_behind_an_snnk_layer_merges_exactly():
    """phi(x) (W A)^T + b: the paper's uptraining case."""
    first, second, x = snnk(6, 5, 16, "relu"), linear(5, 3), seeded(7, 6)
    bundled = bundle([first, second])
    assert torch.allclose(bundled.weight, second.weight @ first.weight, **EXACT)
    assert torch.equal(bundled.bias, second.bias) and len(bundled.maps) == 1
    assert torch.allclose(bundled(x), second(first(x)), **EXACT)


@pytest.mark.parametrize("bias", [True, False])
def test_a_stack_of_snnk_layers_equals_its_bundle(bias):
    stack = nn.Sequential(
        linear(6, 7, 1, bias=bias),
        snnk(7, 5, 16, "gelu", seed=1, **QUIET),
        snnk(5, 4, 12, "relu", seed=2),
        nn.Dropout(0.5),
        linear(4, 8, 3, bias=bias),
        linear(8, 5, 4, bias=bias),
        snnk(5, 4, 10, ProjectedURF(5, 10, "tanh", **QUIET, **F64), seed=4),
        linear(4, 2, 5, bias=bias),
    )
    x, bundled = seeded(3, 7, 6), bundle(stack)
    assert torch.allclose(bundled(x), copy.deepcopy(stack).eval()(x), **EXACT)
    assert [type(fm) for fm in bundled.maps] == [Affine, URF, Affine, ArcCosine, Affine, ProjectedURF]
    assert (bundled.bias is not None) == bias
    assert bundled.report.method == "analytic" and bundled.report.predicted == ()
    assert stack[1].feature_map is not bundled.maps[1]


def test_composed_snnk_layers_are_not_the_papers_tower():
    """psi_2(W_1 A_1) against phi_2(phi_1(x)) is another function than phi_2(A_1 phi_1(x)) A_2."""
    net, x = mlp(6, 5, 4, 3, gain=0.5), seeded(400, 6, scale=0.3)
    tower = bundle(net, num_features=64, feature_map="urf", calibrate=x, method="analytic", **QUIET)
    layers = [SNNKLinear.from_linear(net[i], "tanh", 64, inputs=net[:i](x), **QUIET) for i in (0, 2)]
    composed = net[4](layers[1](layers[0](x)))
    assert not torch.allclose(tower(x), composed, atol=1e-3)


def test_analytic_tower_is_the_papers_recursion():
    """W_2 Psi_2(W_1 Psi_1(W_0, b_0), b_1), the second map on the features of the first."""
    net, x = mlp(6, 5, 4, 3, gain=0.5), seeded(7, 6)
    bundled = bundle(net, num_features=[32, 24], feature_map="urf", **QUIET)
    first, second = bundled.maps
    assert (second.in_features, second.num_features) == (32, 24)
    hat = net[2].weight @ first.psi(net[0].weight, net[0].bias)
    bar = net[4].weight @ second.psi(hat, net[2].bias)
    assert torch.allclose(bundled.weight, bar, **EXACT) and torch.allclose(bundled.bias, net[4].bias, **EXACT)
    assert torch.allclose(bundled(x), F.linear(second.phi(first.phi(x)), bar, net[4].bias), **EXACT)
    # the unbundled composition of section 3.3: an SNNK layer of the merged Linear, on phi_1(x)
    merged = nn.Linear(32, 4, **F64)
    merged.load_state_dict({"weight": hat, "bias": net[2].bias})
    layer = SNNKLinear.from_linear(merged, "tanh", 24, feature_map=second)
    assert torch.allclose(bundled(x), net[4](layer(first.phi(x))), **EXACT)


def test_whole_part_and_one_layer():
    net, x = mlp(6, 5, 4, 3, gain=0.5), seeded(50, 6, scale=0.3)
    options = {"num_features": 512, "feature_map": "urf", **QUIET}
    for start, stop in ((0, None), (0, 4), (0, 2), (2, 4), (2, None), (-3, None), (4, 5)):
        part = net[start:stop]
        u = net[: start % 5](x)
        bundled = bundle(net, start, stop, calibrate=u if start % 5 < 4 else None, method="analytic", **options)
        exact = part(u)
        error = (bundled(u) - exact).square().mean() / exact.var()
        assert error < (1e-20 if len(part) == 1 else 0.3), (start, stop)
        ends_in_linear = isinstance(part[-1], nn.Linear)
        assert (bundled.bias is not None) == ends_in_linear
        assert bundled.report.layers[0].startswith(f"{start % 5}: Linear")


def test_a_sequential_inside_is_taken_layer_by_layer():
    flat, x = mlp(6, 5, 4, 3), seeded(100, 6)
    head = nn.Sequential(nn.Sequential(flat[1], nn.Dropout()), flat[2])
    nested = nn.Sequential(flat[0], head, flat[3], flat[4])
    a, b = (bundle(net, num_features=32, calibrate=x, **QUIET) for net in (flat, nested))
    assert torch.equal(a(x), b(x)) and a.report.fitted_error == b.report.fitted_error
    assert [layer.split(":")[0] for layer in b.report.layers] == ["0", "1.0.0", "1.1", "2", "3"]
    part = bundle(nested, 0, 2, num_features=32, calibrate=x, **QUIET)  # start and stop count entries of the outermost
    assert torch.equal(part(x), bundle(flat, 0, 3, num_features=32, calibrate=x, **QUIET)(x))


@pytest.mark.parametrize("position", ["0", "1", "2.0", "2", "3"])
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_refused_by_name(position, register):
    net = nn.Sequential(linear(6, 5), nn.Tanh(), nn.Sequential(linear(5, 4)), nn.Dropout())
    layer = net.get_submodule(position)
    handle = getattr(layer, register)(lambda *_: None)
    message = rf"layer {position}, {type(layer).__name__}, has forward hooks, which a bundle would not call: remove"
    with pytest.raises(ValueError, match=message):
        bundle(net, num_features=8)
    handle.remove()
    bundle(net, num_features=8, **QUIET)


def test_one_linear_layer_is_itself():
    net, x = mlp(6, 5, 4), seeded(7, 6)
    bundled = bundle(net, 0, 1)
    assert torch.equal(bundled.phi(x), x) and torch.allclose(bundled(x), net[0](x), **EXACT)
    assert torch.allclose(bundled.jacobian(x), net[0].weight.expand(7, 5, 6), **EXACT)


def test_dropout_and_identity_are_passed_over_and_nothing_changes():
    plain = mlp(6, 5, 3)
    noisy = nn.Sequential(nn.Identity(), plain[0], nn.Dropout(0.9), plain[1], nn.AlphaDropout(), plain[2], nn.Dropout())
    x = seeded(100, 6)
    before, state = torch.random.get_rng_state(), copy.deepcopy(noisy.state_dict())
    a, b = (bundle(net, num_features=32, calibrate=x, **QUIET) for net in (plain, noisy))
    assert torch.equal(a(x), b(x)) and a.report.fitted_error == b.report.fitted_error
    assert [layer.split(":")[0] for layer in b.report.layers] == ["1", "3", "5"]
    assert torch.equal(before, torch.random.get_rng_state())
    assert noisy.training and all(torch.equal(v, noisy.state_dict()[k]) for k, v in state.items())
    assert all(p.requires_grad and p.grad is None for p in noisy.parameters())


def test_inplace_activation_and_activation_of_ones_own():
    x = seeded(300, 6)
    kept = x.clone()
    inplace = nn.Sequential(linear(6, 5), nn.ELU(inplace=True), linear(5, 3))
    plain = nn.Sequential(inplace[0], nn.ELU(), inplace[2])
    for feature_map in ("projected", "urf"):
        options = {"num_features": 64, "feature_map": feature_map, "calibrate": x, **QUIET}
        reports = [bundle(net, **options).report for net in (inplace, plain)]
        assert reports[0].analytic_error == reports[1].analytic_error < 0.5 and torch.equal(x, kept)
    assert inplace[1].inplace
    net = nn.Sequential(linear(6, 5), Sine(), linear(5, 3))
    with pytest.raises(TypeError, match=r"layer 1 is Sine; .*name its class in activations="):
        bundle(net, num_features=64)
    bundled = bundle(net, num_features=128, calibrate=x, activations={Sine: "sin"})
    assert bundled.maps[0].activation.name == "sin" and bundled.report.analytic_error < 0.05


def test_maps_by_name_list_and_callable():
    net, x = mlp(6, 5, 4, 3), seeded(100, 6)
    made = []

    def make(d, m, activation, **options):
        made.append((d, m, activation.name))
        return ArcCosine(d, m, augment=True, **options)

    bundled = bundle(net, num_features=[16, 20], feature_map=["tanh_power", make], calibrate=x, seed=3)
    assert isinstance(bundled.maps[0], PowerSeries) and bundled.maps[1].augment and made == [(16, 20, "tanh")]
    assert bundled.report.predicted == (None, None)
    assert bundled.maps[0].seed == 3 != bundled.maps[1].seed  # or the rows of two maps would be the same
    same, other = (bundle(net, num_features=16, feature_map="relu", seed=s).maps[0].projection for s in (3, 4))
    assert not torch.equal(same, other)
    assert torch.equal(same, bundle(net, num_features=16, feature_map="relu", seed=3).maps[0].projection)


# --- the report ------------------------------------------------------------------------------------------------------


def relative_error(estimate, exact):
    return float(((estimate - exact).square().sum() / (exact - exact.mean(0)).square().sum()).detach())


@pytest.mark.parametrize("feature_map", ["projected", "urf", "relu"])
def test_report_tells_the_truth(trained, feature_map):
    """Recomputed on the rows that the seed holds out, for each matrix by itself."""
    net, x = trained
    options = {} if feature_map == "relu" else QUIET
    candidates = {
        method: bundle(net, num_features=128, feature_map=feature_map, calibrate=x, method=method, **options)
        for method in ("analytic", "fitted", "auto")
    }
    report = candidates["auto"].report
    assert report.held_out_rows == 800
    held = x[held_out(len(x), seed=0)]
    errors = {m: relative_error(candidates[m](held), net(held)) for m in ("analytic", "fitted")}
    assert report.analytic_error == pytest.approx(errors["analytic"], rel=1e-9)
    assert report.fitted_error == pytest.approx(errors["fitted"], rel=1e-9)
    best = min(errors, key=errors.get)
    assert report.method == best and torch.equal(candidates["auto"].weight, candidates[best].weight)
    for method in ("analytic", "fitted"):
        assert candidates[method].report.method == method
        assert candidates[method].report.fitted_error == report.fitted_error


def held_out(n, seed):
    return torch.randperm(n, generator=make_generator(seed, stream=2))[: n // 5]


def test_neither_method_sees_the_held_out_rows():
    """Held-out inputs far from all others leave maps, matrix and everything but the errors as they were."""
    net, x = mlp(6, 5, 3), seeded(200, 6)
    moved = x.clone()
    moved[held_out(200, seed=1)] *= 5
    a, b = (bundle(net, num_features=32, calibrate=inputs, seed=1, **QUIET) for inputs in (x, moved))
    assert all(torch.equal(value, b.state_dict()[key]) for key, value in a.state_dict().items())
    assert b.report.fitted_error > 2 * a.report.fitted_error


def test_fit_is_the_least_squares_solution():
    """A network that its features can express: fitted to rounding, whatever the analytic tower does."""
    stack = nn.Sequential(snnk(6, 5, 16, "relu"), linear(5, 3))
    bundled = bundle(stack, calibrate=seeded(300, 6), method="fitted")
    assert bundled.report.fitted_error < 1e-20
    assert torch.allclose(bundled.weight, stack[1].weight @ stack[0].weight, atol=1e-6)
    assert torch.allclose(bundled.bias, stack[1].bias, atol=1e-6)


def test_ridge_is_chosen_on_rows_left_out(trained):
    """As many rows as features, where the error without a ridge is many times the variance."""
    net, x = trained[0], trained[1][:300]
    bundled = bundle(net, num_features=240, calibrate=x, method="fitted", **QUIET)
    seen = torch.ones(300, dtype=torch.bool)
    seen[held_out(300, seed=0)] = False
    with torch.no_grad():
        sums = RidgeStats(240, 2).update(bundled.phi(x[seen]), net(x[seen]))
        fits = sums.solve([10.0**k for k in range(-9, 3)])
        errors = [relative_error(fit.predict(bundled.phi(x[~seen])), net(x[~seen])) for fit in fits]
    assert errors[0] > 10 and errors[-1] > 1.5 * min(errors)
    assert bundled.report.fitted_error < 1.1 * min(errors)  # the best for the very rows that are held out


@pytest.mark.parametrize(("rows", "lam"), [(79, "kfold"), (80, "gcv")])
def test_the_ridge_is_from_folds_below_two_rows_a_feature(trained, rows, lam):
    net, x = trained[0], trained[1][: rows * 5 // 4]
    bundled = bundle(net, num_features=40, calibrate=x, method="fitted", **QUIET)
    with torch.no_grad():
        order = torch.randperm(len(x), generator=make_generator(0, stream=2))[len(x) // 5 :]
        phi, y = bundled.phi(x[order]), net(x[order])
        fits = {k: RidgeStats(40, 2, folds=5).update(phi, y).solve(k).weight for k in ("gcv", "kfold")}
    assert len(order) == rows
    near = {k: float((bundled.weight.detach() - fit).norm() / fit.norm()) for k, fit in fits.items()}
    assert near.pop(lam) < 1e-4 and min(near.values()) > 1e-2


def test_maps_are_calibrated_on_the_features_before_them():
    net, x = mlp(6, 5, 4, 3), 2 + seeded(200, 6)
    for feature_map in ("projected", "urf"):
        first, second = bundle(net, num_features=32, feature_map=feature_map, calibrate=x, **QUIET).maps
        seen = torch.ones(200, dtype=torch.bool)
        seen[held_out(200, seed=0)] = False
        u = first.phi(x[seen])
        assert torch.allclose(first.center, x[seen].mean(0)) and torch.allclose(second.center, u.mean(0))
        assert second.x_norm == pytest.approx(float((u - u.mean(0)).square().sum(1).mean().sqrt()))


def test_analytic_is_chosen_in_reach_and_fitted_beyond(trained):
    near, x = mlp(6, 5, 3, gain=0.5), seeded(60, 6, scale=0.5)
    report = bundle(near, num_features=256, calibrate=x).report
    assert report.method == "analytic" and report.analytic_error < 1e-3 < report.fitted_error
    net, x = trained
    report = bundle(net, num_features=128, calibrate=x).report
    assert report.method == "fitted" and report.fitted_error < 0.5 < 1 < report.analytic_error


def test_a_refused_tower_is_reported_where_a_fit_exists(trained):
    net, x = trained
    bundled = bundle(net, num_features=64, feature_map="urf", calibrate=3 * x)
    assert bundled.report.method == "fitted" and math.isfinite(bundled.report.analytic_error)
    assert re.match(r"layer [13]: URF with 64 features: predicted squared error", bundled.report.refusal)
    assert f"refused: {bundled.report.refusal}" in bundled.summary()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first layer's
        with pytest.raises(UnreachableError, match="predicted squared error"):
            bundle(net, num_features=64, feature_map="urf", calibrate=3 * x, method="analytic")
    with pytest.raises(UnreachableError, match="predicted squared error"):
        net = nn.Sequential(linear(6, 5), Sine())
        bundle(net, num_features=64, feature_map="urf", x_norm=9.0, activations={Sine: "sin"})


def test_without_inputs_maps_judge_for_themselves():
    net = mlp(6, 5, 4, 3)
    with pytest.warns(UserWarning, match="predicted squared error"):
        bundle(net, 0, 2, num_features=8, feature_map="urf", x_norm=6.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = bundle(mlp(6, 5, 4, 3, gain=0.3), num_features=256).report
    told = [str(w.message) for w in caught if w.filename == __file__]
    assert "layer 3: error unknown, for features are not Gaussian inputs; pass calibrate=" in told
    assert not any(text.startswith("layer 1") for text in told)
    assert report.analytic_error is report.fitted_error is None and report.held_out_rows == 0


def test_predicted_errors_are_those_of_the_maps():
    net, x = mlp(6, 5, 4, 3, gain=0.5), seeded(100, 6, scale=0.5)
    bundled = bundle(net, num_features=64, feature_map=["projected", "urf"], calibrate=x, **QUIET)
    first, second = bundled.maps
    hat = net[2].weight @ first.psi(net[0].weight, net[0].bias)
    expected = first.predicted_error(net[0].weight, net[0].bias), second.predicted_error(hat, net[2].bias)
    assert bundled.report.predicted == pytest.approx([float(e.detach().mean()) for e in expected], rel=1e-9)


def test_overflowing_tower_does_not_stop_the_fit():
    net, x = mlp(6, 5, 4, 4, 3, gain=40.0).float(), seeded(200, 6).float()
    report = bundle(net, num_features=64, feature_map=["tanh_power", "tanh_power", "relu"], calibrate=x).report
    assert report.method == "fitted" and "overflows" in report.refusal and math.isfinite(report.fitted_error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constant_outputs_have_no_error_over_variance(dtype, tmp_path):
    """A dead layer: there is nothing to divide by, and the better matrix is taken all the same."""
    net, x = nn.Sequential(linear(6, 5), nn.ReLU(), linear(5, 3)).to(dtype), seeded(200, 6)
    nn.init.constant_(net[0].bias, -1e3)
    bundled = bundle(net, num_features=32, calibrate=x, **QUIET)
    assert bundled.report.analytic_error is bundled.report.fitted_error is None
    assert bundled.report.held_out_rows == 40 and bundled.report.method == "fitted"
    assert torch.allclose(bundled(x.to(dtype)), net(x.to(dtype)), atol=1e-5)
    assert "40 rows: unknown, the outputs are constant" in bundled.summary()
    bundled.save(tmp_path / "a")
    assert Bundled.load(tmp_path / "a").report == bundled.report


def test_pooler_and_classifier():
    """The appendix: tanh(X Wp' + bp) Wc' + bc as one (classes, k) matrix, and what that stores."""
    d, k, classes = 768, 64, 3
    pooler, classifier = nn.Linear(d, d), nn.Linear(d, classes)
    head = nn.Sequential(pooler, nn.Tanh(), nn.Dropout(0.1), classifier)
    bundled = bundle(head, num_features=k, feature_map="relu")
    psi = ArcCosine(d, k).psi(pooler.weight, pooler.bias)
    assert bundled.weight.shape == (classes, k)
    assert torch.allclose(bundled.weight, (classifier.weight.double() @ psi.double()).float(), atol=1e-6)
    assert torch.equal(bundled.bias, classifier.bias)
    x = seeded(5, d).float()
    assert torch.allclose(bundled(x), classifier(F.linear(bundled.phi(x), psi)), atol=1e-4)
    # the paper's "about 59k" is 590k for the pooler alone
    assert bundled.report.numbers == 768 * 768 + 768 + 768 * 3 + 3 == 592_899
    assert bundled.report.multiply_adds == 768 * 768 + 768 * 3
    assert sum(p.numel() for p in bundled.parameters()) == 64 * 3 + 3
    text = repr(bundled)
    assert "592,899 -> 195 trained + 49,152 frozen" in text and "592,128 -> 49,344" in text
    assert "0: Linear(in_features=768, out_features=768, bias=True)" in text and "1: Tanh()" in text


def test_a_bundled_pooler_estimates_the_original():
    """At a tenth of the size, weights and inputs of norms like BERT's pooler, within the prediction."""
    d, classes = 76, 3
    head = nn.Sequential(linear(d, d, gain=1.2), nn.Tanh(), linear(d, classes, seed=4))
    x = seeded(3000, d, seed=9, scale=0.5)
    small, large = (bundle(head, num_features=k, calibrate=x, **QUIET).report for k in (76, 760))
    assert min(large.analytic_error, large.fitted_error) < 0.1 < min(small.analytic_error, small.fitted_error)
    assert large.predicted[0] < small.predicted[0]


# --- the Jacobian ----------------------------------------------------------------------------------------------------

D = 6
MAPS = {
    "affine": lambda: filled(Affine(D, 10, **F64)),
    "arccos0": lambda: ArcCosine(D, 10, 0, **F64),
    "arccos1": lambda: ArcCosine(D, 10, **F64),
    "arccos2": lambda: ArcCosine(D, 10, 2, **F64),
    "arccos1-augment": lambda: ArcCosine(D, 10, augment=True, **F64),
    "arccos2-augment-unit": lambda: ArcCosine(D, 10, 2, augment=True, normalize="unit", **F64),
    "arccos1-dim": lambda: ArcCosine(D, 10, normalize="dim", **F64),
    "urf": lambda: URF(D, 10, "gelu", **QUIET, **F64).calibrate(seeded(50, D) + 1),
    "urf-unit": lambda: URF(D, 10, "tanh", normalize="unit", **QUIET, **F64),
    "urf-beyond-its-limit": lambda: URF(D, 10, "sin", x_norm=0.05, w_norm=5.0, **QUIET, **F64),
    "urf-A": lambda: URF.paper(D, 10, "cos", spectrum="series", rho="balanced", A="auto", **F64),
    "paper": lambda: URF.paper(D, 10, "sin", **F64),
    "sampled": lambda: URF.paper(D, 10, "tanh", block_size=2, **OURS, **F64).calibrate(seeded(50, D)),
    "directions": lambda: Directions(D, 10, "tanh", **F64),
    "power": lambda: PowerSeries(D, 10, "tanh", **F64),
    "power-one-sign-dim": lambda: PowerSeries(D, 10, coefficients=[0.3, 1.0, 0.5, 0.2], normalize="dim", **F64),
    "power-unit": lambda: PowerSeries(D, 10, coefficients=[0.0, 1.0, -0.5], normalize="unit", **F64),
    "power-constant": lambda: PowerSeries(D, 10, coefficients=[0.3], **F64),
    "projected": lambda: ProjectedURF(D, 10, "relu", **QUIET, **F64).calibrate(seeded(50, D) - 1),
    "projected-dim": lambda: ProjectedURF(D, 10, "tanh", normalize="dim", **QUIET, **F64),
}


def filled(fm):
    fm.projection.copy_(seeded(*fm.projection.shape, seed=2))
    return fm


@pytest.mark.parametrize("make", MAPS.values(), ids=MAPS)
def test_jacobian_of_each_map(make):
    """Behind it another map, so that the chain rule is in it too."""
    fm, x = make(), seeded(7, D)
    bundled = Bundled([fm, ArcCosine(10, 12, seed=3, **F64)], seeded(4, 12, seed=1), seeded(4))
    if isinstance(fm, URF) and fm.norms[0] == 0.05:
        norm = x.square().sum(-1, keepdim=True) - fm.x_norm**2
        assert (0.5 * fm.rho**2 * norm > fm.limit).all()
    expected = torch.func.vmap(torch.func.jacrev(bundled))(x)
    assert torch.allclose(bundled.jacobian(x), expected, **EXACT)
    constant = getattr(fm, "order", 1) == 0 or getattr(fm, "coefficients", ()) == (0.3,)
    assert bool((expected.abs() < 1e-3).all()) == constant
    alone = Bundled([fm], seeded(4, 10, seed=1))
    assert torch.allclose(alone.jacobian(x[0]), torch.func.jacrev(alone)(x[0]), **EXACT)
    assert torch.allclose(bundled.jacobian(x[:6].reshape(2, 3, D)), expected[:6].reshape(2, 3, 4, D), **EXACT)
    assert bundled.jacobian(x[:0]).shape == (0, 4, D)


def test_every_jacobian_is_tested():
    assert {type(make()) for make in MAPS.values()} == set(CLASSES.values())


def test_jacobian_of_a_deep_bundle_and_without_autograd(trained):
    net, x = trained
    bundled = bundle(net, num_features=64, calibrate=x, **QUIET)
    expected = torch.func.vmap(torch.func.jacrev(bundled))(x[:5])
    with torch.inference_mode():
        assert torch.allclose(bundled.jacobian(x[:5]), expected, **EXACT)
    assert torch.allclose(bundled.float().jacobian(x[:5].float()).double(), expected, atol=1e-4, rtol=1e-3)


def test_jacobian_of_a_power_series_where_a_factor_is_zero():
    """The product without a factor cannot be had by dividing by it."""
    fm = PowerSeries(2, 24, coefficients=[0.0, 1.0, 0.5, 0.2], **F64)
    bundled, x = Bundled([fm], seeded(3, 24)), torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.0, 1.0]], **F64)
    assert ((x @ fm.projection[..., :-1].mT + fm.projection[:, None, :, -1]) == 0).any()
    step = 1e-6 * torch.eye(2, **F64)
    slopes = torch.stack([(bundled(x + h) - bundled(x - h)) / 2e-6 for h in step], -1)  # autograd may divide too
    assert torch.allclose(bundled.jacobian(x), slopes, atol=1e-7)


def test_jacobian_of_an_unknown_map_is_refused():
    class Own(ArcCosine):
        pass

    with pytest.raises(TypeError, match=r"no Jacobian of Own is known; use torch.func.jacrev"):
        Bundled([Own(D, 10)], torch.ones(2, 10)).jacobian(torch.ones(D))


# --- the bound -------------------------------------------------------------------------------------------------------


def bounded(m, seed=0, depth=3, gain=0.1, **options):
    """A tower of the paper's own features, with no series to fit, for inputs of length one."""
    net = mlp(8, *[6] * (depth - 1), 3, activation=Sine, gain=gain)
    x = seeded(40, 8)
    x = x / x.norm(dim=1, keepdim=True)

    def make(d, m, activation, **rest):
        return URF.paper(d, m, activation, **options, **rest)

    return bundle(net, num_features=m, feature_map=make, activations={Sine: "sin"}, seed=seed), net, x


@pytest.mark.parametrize("options", [{}, OURS], ids=["paper", "ours"])
def test_measured_error_is_within_the_bounds_at_every_depth(options):
    for seed in range(40):
        bundled, net, x = bounded(128, seed, **options)
        bound = error_bound(bundled, net, x, confidence=0.5)
        assert bound.layers == ("1: Sine", "3: Sine", "4: Linear")
        assert all(0 < m <= b < a for m, b, a in zip(bound.measured, bound.bernstein, bound.azuma, strict=True))
        assert bound.bernstein[0] < 10 * bound.measured[0] * (1 if not options else 3)  # and not beside the point
    # what it says was measured is what one measures
    hidden, first = net[:2](x), bundled.maps[0]
    estimate = first.phi(x) @ first.psi(net[0].weight, net[0].bias).T
    assert bound.measured[0] == pytest.approx(float((estimate - hidden).detach().abs().max()))
    assert bound.measured[-1] == pytest.approx(float((bundled(x) - net(x)).detach().abs().max()))


@pytest.mark.parametrize(("spectrum", "limit"), [("series", 5), ("sampled", 20)])
def test_measured_error_is_within_the_bounds_for_a_curve_that_is_fitted(spectrum, limit):
    """Here the mean of the estimate is not f, and the inputs are any."""
    net, x = mlp(8, 6, 6, 3, gain=0.3), seeded(60, 8, scale=0.3)

    def make(d, m, activation, **rest):
        return URF.paper(d, m, activation, spectrum=spectrum, **OURS, **rest)

    options = {"num_features": 256, "feature_map": make}
    for seed in range(5):
        bound = error_bound(bundle(net, calibrate=x, seed=seed, method="analytic", **options), net, x)
        assert all(0 < m <= min(ab) for m, *ab in zip(bound.measured, bound.azuma, bound.bernstein, strict=True))
        assert bound.bernstein[0] < limit


def by_hand(fm, x, weight, bias, events, failure):
    """Azuma's and Bernstein's own part for each output, moments of the terms from rows drawn for them: (2, n, o)."""
    rows = len(fm.projection)
    t = math.sqrt(2 * math.log(rows * len(weight) / failure))
    many = copy.deepcopy(fm)
    many.projection = seeded(50_000, fm.in_features, seed=1)
    for name in ("rho", "eta", "alpha", "beta", "log_gain"):
        setattr(many, name, fm.get_buffer(name)[:1].expand(50_000))  # sin has one frequency
    phi, psi = (side.unflatten(1, (2, 50_000)) for side in (many.phi(x), many.psi(weight, bias)))
    terms = 50_000 * sum(phi[:, None, k] * psi[:, k] for k in (0, 1))  # (n, o, rows)
    z, length = x @ weight.T + bias, fm.eta[0] * weight.norm(dim=1)
    assert ((terms.mean(-1) - z.sin()).abs() <= 5 * terms.std(-1) / 50_000**0.5).all()
    grow = (lambda y: (math.exp(y) + math.exp(-y)) / 2) if fm.variant.antithetic else math.exp
    at_t = torch.tensor([grow(t * float(v)) for v in length], **F64)
    u = fm.rho[0] * x.norm(dim=1, keepdim=True)
    c = torch.exp((u.square() - length.square()) / 2) * at_t
    assert (terms.abs().amax(-1) <= c * 1.5).all()  # 50,000 rows go a little beyond the t of fewer
    beyond = torch.tensor([stats.norm.sf([t - v, t + v]).sum() for v in length.tolist()], **F64)
    log = math.log(2 * events / failure)
    azuma = c * math.sqrt(2 * log / rows)
    eps = torch.full_like(c, 1e-3)
    for _ in range(200):  # the fixed point of P eps^2 = 2 log (var + (c + |ET|) eps / 3)
        eps = (2 * log * (terms.var(-1) + (c + z.sin().abs()) * eps / 3) / rows).sqrt()
    return torch.stack([azuma, eps]) + torch.exp(u.square() / 2) * beyond


@pytest.mark.parametrize("options", [{}, OURS, {"rho": "balanced"}], ids=["paper", "ours", "balanced"])
@torch.no_grad()
def test_bounds_by_hand(options):
    """Its own part at each activation, plus the slope of sin, about 1, times |W|_inf times what came before."""
    bundled, net, x = bounded(64, **options)
    x = x[:4]
    first, second = bundled.maps
    bound = error_bound(bundled, net, x, confidence=0.9)
    expected = by_hand(first, x, net[0].weight, net[0].bias, 4 * 6, failure=0.1 / 4).amax((1, 2))
    assert bound.azuma[0] == pytest.approx(float(expected[0]), rel=1e-9)
    assert bound.bernstein[0] == pytest.approx(float(expected[1]), rel=0.01)
    hat = net[2].weight @ first.psi(net[0].weight, net[0].bias)
    own = by_hand(second, first.phi(x), hat, net[2].bias, 4 * 6, failure=0.1 / 4).amax((1, 2))
    gain = float(net[2].weight.abs().sum(1).max())
    for found, part in ((bound.azuma, own[0]), (bound.bernstein, own[1])):
        assert 0.8 * gain * found[0] < found[1] - 0.99 * float(part)
        assert found[1] - 1.01 * float(part) < gain * found[0] * (1 + 1e-6)
        assert found[2] == pytest.approx(float(net[4].weight.abs().sum(1).max()) * found[1])
    surer = error_bound(bundled, net, x, confidence=0.999)
    assert surer.azuma[0] > bound.azuma[0] and surer.bernstein[0] > bound.bernstein[0]
    first.alpha.add_(0.5)  # now the first map estimates sin(z) + cos(z) / 2
    assert error_bound(bundled, net, x).bernstein[0] > bound.bernstein[0] + 0.45


@pytest.mark.parametrize("depth", [1, 2])
def test_bounds_fall_like_the_root_of_m(depth):
    """c grows with the logarithm of m, and the part of it in Bernstein's falls like 1/m: both go away."""
    small, large = (error_bound(*bounded(m, depth=depth + 1)) for m in (1024, 4096))
    for name in ("azuma", "bernstein"):
        pairs = zip(getattr(small, name), getattr(large, name), strict=True)
        slopes = [math.log(b / a) / math.log(4) for a, b in pairs]
        assert len(slopes) == depth + 1 and all(-0.6 < slope < -0.4 for slope in slopes), name


def test_bound_beyond_reach_is_infinite_and_printed():
    bound = error_bound(*bounded(8, depth=2, gain=300.0))
    assert bound.azuma == bound.bernstein == (math.inf, math.inf)
    text = str(ErrorBound(("1: Tanh",), (2.0,), (0.5,), (0.0123,), 0.95))
    assert text.splitlines()[1].split() == ["1:", "Tanh", "2", "0.5", "0.0123"]
    assert text.endswith("each bound holds with probability 0.95 over the rows of the maps")


def test_bound_with_inplace_activations_and_dropout():
    """A first layer out of reach is estimated by about a constant, so the range of the second is that of its true z."""

    class InPlace(nn.Module):
        def forward(self, x):
            return x.sin_()

    layers, x = [linear(8, 6, gain=3.0), linear(6, 3, 2, gain=3.0)], seeded(40, 8)
    plain, inplace = (nn.Sequential(layers[0], f, nn.Dropout(), layers[1], f) for f in (Sine(), InPlace()))
    options = {"feature_map": "urf", "activations": {Sine: "sin"}, "calibrate": x, "projection": "iid", **QUIET}
    bundled = bundle(plain, num_features=8, **options)
    bounds = [error_bound(bundled, net, x) for net in (plain, inplace)]
    assert bounds[0].layers == ("1: Sine", "4: Sine")
    assert dataclasses.replace(bounds[1], layers=bounds[0].layers) == bounds[0]


def test_bound_refuses_what_it_does_not_hold_for():
    net, x = mlp(8, 6, 3), seeded(40, 8)
    for feature_map, options in (("projected", QUIET), ("relu", {}), ("urf", QUIET), ("urf", {"normalize": "dim"})):
        options = options if feature_map != "urf" or options is QUIET else {"projection": "iid", **QUIET, **options}
        bundled = bundle(net, num_features=32, feature_map=feature_map, calibrate=x, **options)
        with pytest.raises(ValueError, match="URF maps with projection='iid', without normalize or A; got"):
            error_bound(bundled, net, x)
    bundled = bundle(net, num_features=32, feature_map="urf", calibrate=x, projection="iid", **QUIET)
    for layers in (net[:1], net[1:]):
        with pytest.raises(ValueError, match="layers must be Linear and 1 activations, one for each map; got"):
            error_bound(bundled, layers, x)
    for inputs, message in ((x[:0], r"there are none; got shape \(0, 8\)"), (x / 0, "input has 320 NaN or infinite")):
        with pytest.raises(ValueError, match=message):
            error_bound(bundled, net, inputs)
    with pytest.raises(ValueError, match="confidence must be between 0 and 1; got 95"):
        error_bound(bundled, net, x, confidence=95)


# --- files and torch -------------------------------------------------------------------------------------------------


def every_map():
    """A bundle with every class that a file may name, each number in it disturbed."""
    maps = [
        ArcCosine(6, 8, 2, augment=True, normalize="dim", projection="orthogonal_chi", seed=3),
        URF.paper(8, 10, "gelu", range=(-2, 3), spectrum="series", A="auto"),
        Affine(10, 7),
        PowerSeries(7, 12, coefficients=[0.1, 1.0, 0.0, -0.3]),
        ProjectedURF(12, 6, nn.LeakyReLU(), bandwidth=0.5, x_norm=2.0, on_error="warn"),
        URF.paper(6, 12, "tanh", block_size=4, seed=5),
    ]
    report = BundleReport(("0: x",), 5, 6, (0.1, None), None, "fitted", 0.5, 0.25, 3)
    bundled = Bundled(maps, torch.ones(2, 12), torch.ones(2), report=report)
    with torch.no_grad():
        for i, tensor in enumerate(t for t in bundled.state_dict().values() if t.is_floating_point()):
            tensor.add_(seeded(*tensor.shape, seed=i, scale=0.01))
    return bundled


def test_save_and_load(tmp_path):
    bundled, x = every_map(), seeded(5, 6).float()
    bundled.save(tmp_path / "a.safetensors")
    loaded = Bundled.load(str(tmp_path / "a.safetensors"))
    assert torch.equal(loaded(x), bundled(x)) and torch.equal(loaded.phi(x), bundled.phi(x))
    assert repr(loaded) == repr(bundled) and loaded.report == bundled.report
    assert [p.requires_grad for p in loaded.parameters()] == [True, True]
    assert loaded.maps[4].bandwidth == 0.5 and loaded.maps[4].norms == (2.0, 1.0) and loaded.maps[4].on_error == "warn"
    assert (loaded.maps[0].normalize, loaded.maps[0].seed, loaded.maps[0].kind.name) == ("dim", 3, "orthogonal_chi")
    weight = seeded(3, 8)
    assert torch.equal(loaded.maps[1].psi(weight), bundled.maps[1].psi(weight))
    assert loaded.maps[5].variant.spectrum == Sampled(block_size=4) and loaded.maps[5].limit == math.inf
    loaded.maps[5].reset_parameters()
    paper = URF.paper(6, 12, "tanh", block_size=4, seed=5)
    assert all(torch.equal(value, paper.get_buffer(key)) for key, value in loaded.maps[5].named_buffers())
    loaded.maps[0].reset_parameters()  # from the seed, by the projection of that name
    assert torch.equal(
        loaded.maps[0].projection, ArcCosine(6, 8, 2, augment=True, projection="orthogonal_chi", seed=3).projection
    )
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    bundled.double().save(tmp_path / "a.safetensors")
    loaded = Bundled.load(tmp_path / "a.safetensors")
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in bundled.state_dict().items())
    x = 0.1 * x.double()  # at x itself features reach 1e17, and products of tensors in other places of memory differ
    assert torch.allclose(loaded(x), bundled(x), **EXACT)


def test_save_and_load_what_bundle_makes(tmp_path, trained):
    net, x = trained
    for feature_map in ("projected", "urf"):
        bundled = bundle(net, num_features=32, feature_map=feature_map, calibrate=x, **QUIET)
        bundled.save(tmp_path / "b")
        loaded = Bundled.load(tmp_path / "b")
        assert torch.equal(loaded(x), bundled(x)) and loaded.report == bundled.report
        assert loaded.summary() == bundled.summary()
    bundle(net, num_features=np.arange(32, 34)[0], **QUIET).save(tmp_path / "c")  # JSON takes no numpy integer
    assert Bundled.load(tmp_path / "c").num_features == 32
    Bundled([], torch.ones(2, 3)).save(tmp_path / "c")
    assert Bundled.load(tmp_path / "c").bias is None


def own_series():
    omega, alpha, counts = np.array([1.0]), np.array([0.5]), np.array([4])
    return Series(omega, alpha, alpha, counts)


def own_projection(m, d, generator):
    return torch.randn(m, d, generator=generator)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: URF(4, 8, lambda z: z**2, **QUIET), "activation <lambda> of URF"),
        (lambda: ProjectedURF(4, 8, nn.LeakyReLU(0.3), **QUIET), "activation leaky_relu of ProjectedURF"),
        (lambda: ArcCosine(4, 8, projection=own_projection), "projection of ArcCosine"),
        (lambda: URF.paper(4, 8, "tanh", proposal=stats.laplace(scale=0.2)), "proposal of URF"),
        (lambda: URF.paper(4, 8, "sin", spectrum=own_series()), "spectrum of URF"),
        (lambda: type("Own", (ArcCosine,), {})(4, 8), "class of Own"),
    ],
)
def test_what_a_file_cannot_name_is_refused_but_has_a_state_dict(tmp_path, make, named):
    bundled, other = Bundled([make()], torch.ones(2, 8)), Bundled([make()], torch.zeros(2, 8))
    with pytest.raises(TypeError, match=rf"a file cannot name the {named}; save the state_dict\(\)"):
        bundled.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    bundled.maps[0].projection.mul_(1.1)
    other.load_state_dict(bundled.state_dict(), strict=True)
    assert torch.equal(other(torch.ones(3, 4)), bundled(torch.ones(3, 4)))


def rewritten(path, change=lambda tensors, config: None, **metadata):
    """The same file with its tensors or configuration changed."""
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
    tensors, config = load_file(path), json.loads(meta["config"])
    change(tensors, config)
    save_file(tensors, path, metadata={**meta, "config": json.dumps(config), **metadata})


def first(config):
    return config["maps"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop("maps.1.center"), r'Missing key\(s\).*"maps.1.center"'),
        (lambda t, c: t.update(stray=torch.ones(1)), r'Unexpected key\(s\).*"stray"'),
        (lambda t, c: t.pop("weight"), "'weight'"),
        (lambda t, c: t.update(weight=torch.ones(2, 5)), r"weight and bias must be \(out, 12\)"),
        (lambda t, c: t.update({"maps.1.rho": torch.ones(9)}), "size mismatch for maps.1.rho"),
        (lambda t, c: first(c).update({"class": "os.system"}), "unknown feature map 'os.system'"),
        (lambda t, c: first(c).update(projection="evil"), "unknown projection 'evil'"),
        (lambda t, c: first(c).update(num_features=10**12), r"6 -> 1000000000000 .*projection of shape \(8, 7\)"),
        (lambda t, c: first(c).update(in_features=-1), "in_features must be a positive integer; got -1"),
        (lambda t, c: c["maps"][3].update(coefficients=[1.0] * 10**5), r"degree 99999 does not fit"),
        (lambda t, c: c["maps"][1].update(activation="__import__"), "unknown activation"),
        (lambda t, c: c["maps"][5].update(block_size=0), "block_size must be a positive integer; got 0"),
        (lambda t, c: c["maps"][1].update(spectrum={}), "unexpected keyword argument 'spectrum'"),
        (lambda t, c: first(c).update(surprise=1), "surprise"),
        (lambda t, c: c["report"].update(surprise=1), "surprise"),
        (lambda t, c: c.update(maps=[1]), "int"),
    ],
)
def test_a_tampered_file_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "a.safetensors"
    every_map().save(path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=rf"(?s)cannot load a bundle from .*a.safetensors: .*{message}"):
        Bundled.load(path)


def test_an_empty_projection_cannot_stand_for_a_large_one(tmp_path):
    """Zero rows of a million columns take no bytes in a file; nothing may be allocated for them."""
    path = tmp_path / "a"
    Bundled([ArcCosine(4, 8)], torch.ones(2, 8)).save(path)

    def change(tensors, config):
        tensors["maps.0.projection"] = torch.empty(0, 10**9)
        first(config).update(in_features=10**9)

    rewritten(path, change)
    with pytest.raises(ValueError, match="does not fit its projection"):
        Bundled.load(path)


def test_a_large_block_of_frequencies_takes_no_memory(tmp_path):
    """np.repeat would make 10^15 numbers of one frequency; from as many as the rows on, all blocks are the same."""
    bundled, x = Bundled([URF.paper(4, 8, "tanh", block_size=8)], torch.ones(2, 8)), torch.ones(3, 4)
    fm = bundled.maps[0]
    fm.variant = dataclasses.replace(fm.variant, spectrum=Sampled(block_size=10**15))
    bundled.save(tmp_path / "a")
    assert torch.equal(Bundled.load(tmp_path / "a")(x), bundled(x))


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (every_map().save, Bundled.load):
        with pytest.raises(ImportError, match=r"save and load need safetensors: .*pip install 'snnk\[tables\]'"):
            call(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_loading_draws_no_d_by_d_matrix(tmp_path, monkeypatch):
    """orthogonal rows take d x d numbers for one row, more than the file that asks for it may hold."""

    def fail(m, d, generator):
        raise AssertionError("drawn")

    bundled = Bundled([ArcCosine(6, 2, projection="orthogonal_chi")], torch.ones(2, 2))
    monkeypatch.setitem(PROJECTIONS, "orthogonal_chi", dataclasses.replace(PROJECTIONS["orthogonal_chi"], draw=fail))
    bundled.maps[0].kind = PROJECTIONS["orthogonal_chi"]
    bundled.save(tmp_path / "a")
    loaded = Bundled.load(tmp_path / "a")
    assert loaded.maps[0].kind is PROJECTIONS["orthogonal_chi"]
    assert torch.equal(loaded.maps[0].projection, bundled.maps[0].projection)


def test_the_limit_of_long_inputs_comes_back(tmp_path):
    """It depends on whether a projection was asked for, which a file cannot tell."""
    for fm in (URF(3, 8, "tanh", **QUIET), URF(3, 8, "tanh", projection="orthogonal_chi", **QUIET)):
        bundled, x = Bundled([fm], torch.ones(2, 8)), 50 * torch.ones(3)
        bundled.save(tmp_path / "a")
        assert torch.equal(Bundled.load(tmp_path / "a")(x), bundled(x))


def test_files_that_are_none(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors"):
        Bundled.load(path)
    every_map().save(path)
    rewritten(path, format="pt")
    with pytest.raises(ValueError, match=r"its format is 'pt', not 'snnk\.Bundled/1'"):
        Bundled.load(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="cannot load a bundle from"):
        Bundled.load(path)
    kept = path.read_bytes()
    with pytest.raises(FileNotFoundError):
        every_map().save(tmp_path / "none" / "a")
    assert path.read_bytes() == kept and len(list(tmp_path.iterdir())) == 1


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path, written = tmp_path / "a", []
    monkeypatch.setattr(
        "safetensors.torch.save_file", lambda t, n, metadata: written.append(n) or save_file(t, n, metadata)
    )
    every_map().save(path)
    kept = path.read_bytes()
    assert len(written) == 1 and written[0] != str(path)

    def fail(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        every_map().save(path)
    assert path.read_bytes() == kept and list(tmp_path.iterdir()) == [path]


def test_state_dict_is_strict_and_carries_the_projections(trained):
    net, x = trained
    source, target = (bundle(net, num_features=32, calibrate=x, seed=s, **QUIET) for s in (0, 1))
    with torch.no_grad():
        source.maps[1].projection.mul_(1.01)
    assert not torch.allclose(source(x), target(x))
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(x), target(x))
    state = source.state_dict()
    state.pop("maps.1.projection")
    with pytest.raises(RuntimeError, match=r"maps\.1\.projection"):
        target.load_state_dict(state)


def test_deepcopy_dtypes_compile_and_training(trained):
    net, x = trained
    bundled = bundle(net, num_features=32, calibrate=x, **QUIET)
    assert torch.equal(copy.deepcopy(bundled)(x), bundled(x))
    single = copy.deepcopy(bundled).float()
    assert torch.allclose(single(x.float()).double(), bundled(x), atol=1e-3)
    assert torch.isfinite(copy.deepcopy(bundled).bfloat16()(x[:9].bfloat16())).all()
    torch._dynamo.reset()
    compiled = torch.compile(single, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x[:9].float()), single(x[:9].float()), atol=1e-5)
    assert torch.allclose(bundled(x[:6].reshape(2, 3, 8)), bundled(x[:6]).reshape(2, 3, 2))
    assert [name for name, _ in bundled.named_parameters()] == ["weight", "bias"]
    frozen = {key: value.clone() for key, value in bundled.named_buffers()}
    loss = (bundled(x) - 1).square().mean()
    loss.backward()
    torch.optim.SGD(bundled.parameters(), 1e-3).step()
    assert (bundled(x) - 1).square().mean() < loss
    assert all(torch.equal(value, frozen[key]) for key, value in bundled.named_buffers())


def test_follows_the_dtype_of_the_module():
    net, x = mlp(6, 5, 3).float(), seeded(100, 6)
    bundled = bundle(net, num_features=16, calibrate=x.reshape(4, 25, 6), **QUIET)
    assert {t.dtype for t in bundled.state_dict().values()} == {torch.float32}
    assert bundled.report.held_out_rows == 20


# --- refusals --------------------------------------------------------------------------------------------------------


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def stack(*middle):
    return nn.Sequential(nn.Linear(6, 5), *middle, nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bundle(stack(nn.LayerNorm(5))), TypeError, r"layer 1 is LayerNorm; bundle takes Linear, SNNKLinear, "),
        (lambda: bundle(stack(nn.Tanh(), nn.Conv1d(1, 1, 1))), TypeError, "layer 2 is Conv1d"),
        (lambda: bundle(stack(nn.Softmax(-1))), TypeError, "layer 1 is Softmax"),
        (lambda: bundle(stack(nn.PReLU())), TypeError, "layer 1 is PReLU"),
        (lambda: bundle(stack(Doubled())), TypeError, "layer 1 is Doubled"),
        (lambda: bundle(stack(nn.Sequential(nn.LayerNorm(5)))), TypeError, r"layer 1\.0 is LayerNorm"),
        (lambda: bundle([nn.Linear(6, 5), torch.tanh]), TypeError, "layer 1 is builtin_function_or_method"),
        (lambda: bundle([Scaled(6, 5)]), TypeError, "layer 0 is Scaled"),
        (lambda: bundle(Doubled(nn.Linear(6, 5))), TypeError, "module must be nn.Sequential.*; got Doubled"),
        (lambda: bundle(nn.Linear(6, 5)), TypeError, "module must be nn.Sequential.*; got Linear"),
        (
            lambda: bundle(stack(nn.Tanh()), 1, num_features=8),
            ValueError,
            "layer 1 is Tanh; a bundle starts with a Lin",
        ),
        (lambda: bundle(stack(nn.Tanh()), 3), ValueError, "no Linear or SNNKLinear from start=3 to stop=None of 3"),
        (lambda: bundle(stack(nn.Tanh())), ValueError, "name num_features=, the size of 1 maps: one number"),
        (lambda: bundle(stack(nn.Tanh()), num_features=[8, 8]), ValueError, r"list of 1; got \[8, 8\]"),
        (lambda: bundle(stack(nn.Tanh()), num_features=7), ValueError, "must be even.*got 7"),
        (lambda: bundle(stack(nn.Tanh()), num_features=8, feature_map="rleu"), ValueError, "did you mean 'relu'"),
        (lambda: bundle(stack(nn.Tanh()), num_features=8, feature_map=3), TypeError, "feature map must be one of"),
        (
            lambda: bundle(stack(nn.Tanh()), num_features=8, feature_map=lambda d, m, f, **k: ArcCosine(d, 4)),
            ValueError,
            "the feature map is 6 -> 4; the layer needs 6 -> 8",
        ),
        (lambda: bundle(stack(), method="best"), ValueError, "unknown method 'best'"),
        (lambda: bundle(stack(), method="fitted"), ValueError, "method 'fitted' needs inputs: pass calibrate="),
        (lambda: bundle(stack(), calibrate=torch.ones(50, 7)), ValueError, "calibrate must end in dimension 6"),
        (lambda: bundle(stack(), calibrate=torch.ones(9, 6)), ValueError, "calibrate has 9 rows; .* at least 10"),
        (lambda: bundle(stack(), calibrate=torch.full((50, 6), math.nan)), ValueError, "300 NaN or infinite"),
        (lambda: bundle(stack())(torch.ones(2, 7)), ValueError, "input must end in dimension 6"),
        (lambda: Bundled([ArcCosine(4, 8), ArcCosine(9, 8)], torch.ones(2, 8)), ValueError, "the layer needs 8 -> 8"),
        (lambda: Bundled([], torch.ones(2, 8), torch.ones(3)), ValueError, r"got shapes \(\(2, 8\), \(3,\)\)"),
    ],
)
def test_refusals_say_what_and_where(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_maps_are_frozen_and_affine_is_no_estimator():
    fm = Affine(4, 3)
    fm.extra = nn.Parameter(torch.ones(1))
    assert [name for name, p in Bundled([fm], torch.ones(2, 3)).named_parameters() if p.requires_grad] == ["weight"]
    assert isinstance(fm, FeatureMap)
    with pytest.raises(TypeError, match="Affine has no psi"):
        fm.psi(torch.ones(2, 4))
