"""Features that are learnt from rows: what they are, what they can do, and when others are better."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from snnk.maps import ProjectedURF, feature_map_from_config
from snnk.ridge.sums import RidgeStats
from snnk.tabular import FitConfig, TableModel, fit
from snnk.tabular import learned as module
from snnk.tabular.learned import REACH, LearnedFeatures, choose_bandwidth, find_bins, learn

from helpers.tables import predictions, run_fit


def rows_of_steps(n, seed=0):
    """Inputs (n, 4), and a target that jumps at places of two of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, ((x[:, 0] > 0.3) ^ (x[:, 1] > -0.5)).double()[:, None]


def held_out_error(fm, x, y, new_x, new_y):
    """Relative squared error on new rows of the closed form behind some features."""
    solution = RidgeStats(fm.num_features, y.shape[1]).update(fm.phi(x).double(), y).solve("gcv")
    return float((solution.predict(fm.phi(new_x).double()) - new_y).square().mean() / new_y.var())


@pytest.mark.parametrize("deep", [False, True])
def test_tables_have_the_product_with_the_codes(deep):
    """phi interpolates in tables what the training computes from all codes, at the ends of bins and beyond, too."""
    x = torch.stack([torch.linspace(-3, 3, 301), torch.arange(301) % 5.0, torch.arange(301) % 2.0], 1)
    fm = module._with_bins(3, 12, find_bins(x), outputs=2, deep=deep)
    generator = torch.Generator().manual_seed(0)
    for name in ("head", "skip", "offset"):
        getattr(fm, name).copy_(torch.randn(getattr(fm, name).shape, generator=generator))
    fm = fm.double()
    points = torch.cat([x, 2 * x, fm.edges.T[:, [0, 1, 1]].float()]).double()
    code = fm.encode(points)
    hidden = torch.cos(code @ fm.projection.T + fm.phase)
    if deep:
        hidden = torch.cos(hidden @ fm.deep_projection.T + fm.deep_phase)
    expected = torch.cat([hidden, hidden @ fm.head.T + code @ fm.skip.T + fm.offset], 1)
    torch.testing.assert_close(fm.phi(points), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(fm.logits(points), expected[:, -2:], rtol=0, atol=1e-10)


def test_phi_is_the_formula():
    """phi(x) = (cos(W e + b), softmax(H h + L e + c)) with e = (x, bins(x)), written out in numpy."""
    x, y = rows_of_steps(300)
    fm = learn(x, torch.cat([y, 1 - y], 1), 24, classes=True)
    assert isinstance(fm, LearnedFeatures) and fm.outputs == 2 and fm.classes
    points = torch.tensor([[0.1, -0.2, 3.0, -20.0]])  # the last is far beyond REACH
    cut = points.double().numpy().clip(-REACH, REACH)[0]
    edges = fm.edges.double().numpy()
    codes = ((cut[fm.source.numpy(), None] - edges[:, :-1]) / np.diff(edges)).clip(0, 1) - 0.5
    e = np.concatenate([cut, codes.ravel()])
    h = np.cos(fm.projection.double().numpy() @ e + fm.phase.double().numpy())
    o = fm.head.double().numpy() @ h + fm.skip.double().numpy() @ e + fm.offset.double().numpy()
    o = np.exp(o - o.max())
    np.testing.assert_allclose(fm.phi(points)[0], np.concatenate([h, o / o.sum()]), atol=1e-4)


def test_bins_are_quantile_intervals():
    """Each of 32 intervals has as many rows; columns with two values have none; ties make fewer intervals."""
    x = torch.stack([torch.linspace(-3, 3, 3201), torch.arange(3201) % 2.0, torch.arange(3201) % 5.0], 1)
    source, edges = find_bins(x)
    assert source.tolist() == [0, 2]
    np.testing.assert_allclose(edges[0], np.linspace(-3, 3, 33), atol=1e-5)
    assert edges[1].tolist() == [0.0, 1.0, 2.0, 3.0, *[4.0] * 29]


def test_many_columns_share_the_bins():
    x = torch.randn(500, 40, generator=torch.Generator().manual_seed(0))
    assert find_bins(x)[1].shape == (40, module.MOST_BINS // 40 + 1)
    wide = torch.randn(50, module.MOST_BINS, generator=torch.Generator().manual_seed(0))
    assert not len(find_bins(wide)[0])


def test_steps_are_learnt():
    """Random features of any bandwidth are far behind where the target jumps."""
    (x, y), (new_x, new_y) = rows_of_steps(4000), rows_of_steps(4000, seed=1)
    found = held_out_error(learn(x.float(), y, 128, classes=False), x, y, new_x, new_y)
    blind = [held_out_error(module._random(4, 128, b, 0), x, y, new_x, new_y) for b in module.BANDWIDTHS]
    assert found < 0.15 < 0.3 < min(blind)


def test_a_second_layer_learns_what_one_does_not():
    """A function of sums of functions; for 32 features of one layer, it is mostly noise."""
    generator = torch.Generator().manual_seed(0)
    x, new_x = (torch.randn(6000, 6, generator=generator) for _ in range(2))
    y, new_y = (torch.sin(3 * r[:, :3].sum(1).sin() + 3 * r[:, 3:].sum(1).cos()).double()[:, None] for r in (x, new_x))
    one, two = (held_out_error(learn(x, y, 32, classes=False, deep=d), x, y, new_x, new_y) for d in (False, True))
    assert two < 0.3 < 0.5 < one


def test_angles_of_a_second_layer_have_variance_one_at_the_start():
    """Var of V h, over V, is |h|^2 times the variance 2 / h of its entries, and |h|^2 is about h / 2."""
    x, n = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)), 400
    fm = LearnedFeatures(3, n, deep=True)
    hidden = torch.cos(x @ fm.projection.T + fm.phase)
    squares = (hidden @ fm.deep_projection.T).square().mean(0)  # of n independent rows of V
    exact = hidden.square().sum(1).mean() * 2 / n
    assert abs(squares.mean() - exact) < 5 * squares.std() / n**0.5 and abs(exact - 1) < 0.2


def test_features_without_outputs_are_the_trained_ones():
    x, y = rows_of_steps(300)
    rows = module._Rows(x, y.float(), torch.ones(300))
    for deep in (False, True):
        fm = module._with_bins(4, 24, find_bins(x), outputs=4, deep=deep)
        more = module._without_outputs(fm, rows, 24, find_bins(x), seed=1)
        torch.testing.assert_close(more.phi(x)[:, :20], fm.phi(x)[:, :20], rtol=0, atol=1e-5)


def test_few_rows_of_a_smooth_function_take_random_features():
    """A sum of sines in 60 rows is what Fourier features fit best."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    fm = learn(x, torch.sin(x).double().sum(1, keepdim=True), 64, classes=False)
    assert isinstance(fm, ProjectedURF)


@pytest.mark.parametrize(
    ("x", "m", "reason"),
    [
        (torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), 64, "few rows"),
        (torch.ones(100, 3), 64, "constant inputs"),
        (torch.randn(100, 3, generator=torch.Generator().manual_seed(0)), 2, "no room beside the outputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_can_be_learnt(x, m, reason):
    assert isinstance(learn(x, torch.arange(len(x))[:, None].double(), m, classes=False), ProjectedURF)


def test_random_targets_are_not_learnt_by_heart():
    """Features that were trained on noise, with its rows in the sums, do not look as if they explained it."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(1500, 6, generator=generator), torch.randn(1500, 1, generator=generator).double()
    new_x, new_y = torch.randn(1500, 6, generator=generator), torch.randn(1500, 1, generator=generator).double()
    error = held_out_error(learn(x, y, 128, classes=False), x, y, new_x, new_y)
    assert error < 1.15  # the mean of y has 1


def test_targets_of_any_size_give_the_same_features():
    x, y = rows_of_steps(600)
    one, two = learn(x, y, 32, classes=False), learn(x, 1024 * y + 4096, 32, classes=False)
    torch.testing.assert_close(one.phi(x), two.phi(x), rtol=0, atol=1e-3)


def test_weights_of_rows_count():
    """Rows of weight 0 do not take part: their targets may be anything."""
    x, y = rows_of_steps(2000)
    weight = (torch.arange(2000) % 2).double()
    spoiled = torch.where(weight[:, None] > 0, y, 1 - y)
    (new_x, new_y), kept = rows_of_steps(1000, seed=1), weight > 0
    fm = learn(x, spoiled, 64, classes=False, weight=weight)
    assert held_out_error(fm, x[kept], y[kept], new_x, new_y) < 0.35


@pytest.mark.parametrize("deep", [False, True])
def test_maps_are_restored_from_their_configuration(deep):
    x, y = rows_of_steps(300)
    fm = learn(x, y, 16, classes=False, deep=deep)
    assert fm.deep == deep
    other = feature_map_from_config(fm.to_config(), tuple(fm.projection.shape))
    other.load_state_dict(fm.state_dict())
    torch.testing.assert_close(other.phi(x), fm.phi(x), rtol=0, atol=0)
    assert other.phi(x.reshape(3, 100, 4)).shape == (3, 100, 16)


def test_a_second_layer_in_a_file_is_bounded():
    """Its matrix is larger than the projection, which therefore does not bound what a damaged file allocates."""
    config = LearnedFeatures(1, 64, deep=True).to_config()
    with pytest.raises(ValueError, match=r"at most 8192 features; got 1000000. Use fewer"):
        feature_map_from_config({**config, "num_features": 10**6}, (10**6, 1))
    with pytest.raises(ValueError, match="does not fit its projection"):
        feature_map_from_config({**config, "bins": 10**6, "binned": 10}, (64, 1))


@pytest.mark.parametrize("bad", [{"bins": -1}, {"binned": 1.5}, {"outputs": True}, {"outputs": 8}])
@pytest.mark.once
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match=r"must be an integer >= 0|leave none beside"):
        LearnedFeatures(3, 8, **bad)


def test_targets_that_do_not_belong_to_the_rows():
    with pytest.raises(ValueError, match="got 30 inputs and 20 targets"):
        learn(torch.randn(30, 2), torch.randn(20, 1), 16, classes=False)


def test_the_bandwidth_follows_the_detail_of_the_target():
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(3000, 3, generator=generator), torch.randn(3000, 1, generator=generator).double()

    def chosen(k, **options):
        return choose_bandwidth(x, torch.sin(k * x[:, :1]).double() + 0.3 * noise, 128, **options)

    assert chosen(0.5) < chosen(3.0)
    assert chosen(2.0, x_norm=2 * 3**0.5) == 2 * chosen(2.0)  # angles have the bandwidth times x / x_norm


LEARNED = FitConfig("y", 64, task="regression", block_dtype="float64", lam=1e-2)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    x, y = rows_of_steps(6000)
    columns = {f"x{i}": x[:, i].numpy() for i in range(4)}
    pq.write_table(pa.table({**columns, "y": y[:, 0].numpy() * 10}), folder / "t.parquet", row_group_size=500)
    return folder / "t.parquet"


@pytest.fixture(scope="module", params=["learned", "learned-deep"])
def calm(request, steps):
    """The configuration of a fit of the steps, the folder of its model, and its report."""
    config, folder = replace(LEARNED, feature_map=request.param), steps.parent / request.param
    return config, folder, fit(steps, folder, config)


@pytest.mark.once
def test_learnt_models_are_the_same_on_one_worker_or_two(steps, calm, tmp_path):
    """One worker learns from a sample that is the same for any number of workers."""
    config, folder, _ = calm
    assert TableModel.load(folder).feature_map.deep == (config.feature_map == "learned-deep")
    run_fit(steps, tmp_path / "two", "--feature-map", config.feature_map, "--task", "regression", workers=2)
    one, two = (predictions(found, steps) for found in (folder, tmp_path / "two"))
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-6 * np.abs(one).max())


def test_a_learnt_fit_goes_on_with_its_features(steps, calm, tmp_path):
    """The features of a run that was killed are not learnt again."""
    config, folder, _ = calm

    def stop(what, rows, total):
        if what == "fitting" and rows > 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(steps, tmp_path / "m", config, checkpoint_seconds=0, progress=stop)
    shown = set()
    fit(steps, tmp_path / "m", config, progress=lambda what, rows, total: shown.add(what))
    assert shown == {"fitting", "solving"}
    whole, killed = (predictions(found, steps) for found in (folder, tmp_path / "m"))
    np.testing.assert_allclose(whole, killed, rtol=0, atol=1e-9 * np.abs(whole).max())


def test_a_learnt_model_is_saved_and_beats_random_features(steps, calm, tmp_path):
    _, folder, learnt = calm
    random = fit(steps, tmp_path / "random", replace(LEARNED, feature_map="random-fourier"))
    assert isinstance(TableModel.load(folder).feature_map, LearnedFeatures)
    assert learnt["quality"]["r2"] > 0.8 > random["quality"]["r2"] + 0.2
    assert math.isfinite(random["config"]["bandwidth"])  # "auto" is replaced by what was chosen


def test_two_layers_that_are_too_wide_are_refused_before_anything_is_learnt(monkeypatch):
    """One of the widths that are tried has no outputs among the features, and a wider second layer."""
    monkeypatch.setattr("snnk.tabular.config.MOST_DEEP", 16)
    x, y = rows_of_steps(400)
    with pytest.raises(ValueError, match="learned-deep has at most 16 features; got 17"):
        learn(x, y, 17, classes=False, deep=True, progress=lambda done, total: pytest.fail("it learns"))
    assert learn(x, y, 16, classes=False, deep=True).num_features == 16
