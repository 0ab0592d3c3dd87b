"""Bundling: what is exact is demanded at 1e-10, what is an estimate against its own report."""

import copy
import math
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snnk import URF, ArcCosine, PowerSeries, ProjectedURF, RidgeStats, SNNKLinear, UnreachableError
from snnk.maps import FeatureMap
from snnk.maps.affine import Affine
from snnk.maps.projections import make_generator
from snnk.nn.bundling import Bundled, bundle

from helpers.bundles import EXACT, F64, QUIET, Sine, held_out, linear, mlp, relative_error, seeded, snnk


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
    """There are as many rows as features, where the error without a ridge is many times the variance."""
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


@pytest.mark.once
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
