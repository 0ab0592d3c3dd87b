"""Columns with many categories: their codes help where they can, leak nothing, and do not depend on who read what."""

import base64
import copy
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from snnk.tabular import FitConfig, Part, TableModel, fit, merge, prepare
from snnk.tabular.codes import FOLDS, GROUPS, SLOTS, Codes, Tally, Target, rates, row_folds, text_hashes
from snnk.tabular.columns import Columns
from snnk.tabular.scan import Scan
from snnk.tabular.source import Table

CONFIG = FitConfig("y", 64, feature_map="random-fourier", bandwidth=0.5)
TARGETS = {
    "number": lambda f: f,
    "two classes": lambda f: np.where(f > 0, "yes", "no"),
    "three classes": lambda f: np.digitize(f, [-0.5, 0.5]),
}


def make_table(rows, effect, target="number", categories=400, seed=0):
    """y depends on x, and by `effect` on the category k, whose effects are the same for all seeds."""
    rng = np.random.default_rng(seed)
    k, x = rng.integers(0, categories, rows), rng.normal(size=(rows, 2))
    effects = np.random.default_rng(99).normal(size=categories)
    f = np.sin(x[:, 0]) + effect * effects[k] + 0.5 * rng.normal(size=rows)
    return pa.table({"a": x[:, 0], "b": x[:, 1], "k": [f"city {i}" for i in k], "y": TARGETS[target](f)})


def scan(table):
    return Scan.start(table, "y").read(table).columns()


def batches(source, size):
    return Table([source.slice(i, size).combine_chunks() for i in range(0, len(source), size)])


def scores(train, test, folder, config=CONFIG):
    """R2 or accuracy on rows of their own, and that of the report."""
    report = fit(train, folder, config)
    found = TableModel.load(folder).write_predictions(test, folder / "p.csv").score
    quality = report["quality"]
    return found.get("R2", found.get("accuracy")), quality.get("r2", quality.get("accuracy"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_column_of_noise_leaks_nothing(target, tmp_path):
    """One category per five rows: with their own targets in the codes, rows would look predictable."""
    train, test = (make_table(4000, 0.0, target, categories=800, seed=seed) for seed in (1, 2))
    with_it, apparent = scores(train, test, tmp_path / "with")
    without, _ = scores(train.drop(["k"]), test.drop(["k"]), tmp_path / "without")
    assert abs(with_it - without) < 0.02 and apparent < with_it + 0.06  # the report is on some 400 rows


def test_codes_with_their_own_targets_would_leak(tmp_path, monkeypatch):
    """The test above can fail: means of all rows, in place of those of other folds, make fit and report wrong."""
    monkeypatch.setattr("snnk.tabular.columns.row_folds", lambda values, rows: FOLDS)
    monkeypatch.setattr("snnk.tabular.codes._shrunken", _plain_means)
    train, test = (make_table(4000, 0.0, categories=800, seed=seed) for seed in (1, 2))
    with_it, apparent = scores(train, test, tmp_path / "with")
    without, _ = scores(train.drop(["k"]), test.drop(["k"]), tmp_path / "without")
    assert without - with_it > 0.04 and apparent > with_it + 0.08


def test_figures_of_held_rows_are_not_better_than_those_of_new_rows():
    """The codes of other rows have the targets of held rows in them, of which the figures must show nothing.

    Held rows have codes of four folds, and so have the new rows here. Each category has four rows.
    """
    differences = []
    for seed in range(40):
        rows, new = (make_table(4000, 1.0, categories=1100, seed=s) for s in (seed, 1000 + seed))
        model, report = Part(prepare(rows, CONFIG)).read(rows).solve()
        (batch,) = new.combine_chunks().to_batches()
        x, y, _ = model.columns.encode(batch, "new", fitted=True)
        guess, y = model.outputs(x)[:, 0], y[:, 0]
        differences.append(report["quality"]["r2"] - float(1 - (guess - y).square().mean() / y.var()))
    assert np.mean(differences) <= 5 * np.std(differences, ddof=1) / 40**0.5


def _plain_means(rows, z):
    n, total = rows.sum(1, keepdims=True), z.sum(1, keepdims=True)
    return np.vstack([np.repeat(total / n, FOLDS + 1, 1), np.zeros((1, FOLDS + 1))])


@pytest.mark.parametrize("target", TARGETS)
def test_a_column_that_determines_the_target_helps(target, tmp_path):
    train, test = (make_table(6000, 2.0, target, seed=seed) for seed in (1, 2))
    with_it, apparent = scores(train, test, tmp_path / "with")
    without, _ = scores(train.drop(["k"]), test.drop(["k"]), tmp_path / "without")
    assert with_it > without + 0.2 and abs(apparent - with_it) < 0.08


def test_the_code_of_a_row_does_not_depend_on_its_target():
    """Another target of one row changes the codes of other rows, but never its own."""
    table = make_table(1500, 1.0)
    y = table["y"].to_numpy().copy()
    y[700] += 100
    changed = table.set_column(3, "y", pa.array(y))
    codes = []
    for source in (table, changed):
        columns = scan(Table(source))
        codes.append(columns.encode(source.combine_chunks().to_batches()[0], "t")[0][:, 2])
    same = table["k"].to_numpy() == table["k"][700].as_py()
    ratio = float(codes[1][~torch.tensor(same)].abs().sum() / codes[0][~torch.tensor(same)].abs().sum())
    own = abs(float(codes[1][700]) - ratio * float(codes[0][700]))
    others = [abs(float(codes[1][i]) - ratio * float(codes[0][i])) for i in np.flatnonzero(same) if i != 700]
    assert max(others) > 10 * own


@pytest.mark.parametrize("target", TARGETS)
def test_columns_and_rows_do_not_depend_on_who_read_them(target):
    table = make_table(3000, 1.0, target)
    whole = scan(Table(table))
    assert whole.inputs[2].codes is not None
    shuffled = table.take(np.random.default_rng(0).permutation(3000))
    shares = [Scan.start(Table(t), "y").read(batches(t, 250)) for t in (shuffled[2000:], shuffled[:500])]
    shares.append(Scan.start(Table(table), "y").read(Table(shuffled[500:2000])))
    merged = shares[1].merge(shares[2]).merge(shares[0]).columns()
    assert merged == whole
    one = whole.encode(table.combine_chunks().to_batches()[0], "t").x
    assert torch.equal(whole.encode(table.combine_chunks().to_batches()[0], "t", with_target=False, fitted=True).x, one)
    parts = [merged.encode(b, "t").x for _, found in batches(shuffled, 77).blocks() for b in found]
    order = np.random.default_rng(0).permutation(3000)
    assert torch.equal(torch.cat(parts), one[order])
    pairs = set(zip(table["k"].to_pylist(), one[:, 2].tolist(), strict=True))
    assert len(pairs) > 2 * len(set(table["k"].to_pylist()))  # codes differ within a category, by fold


def test_an_identifier_is_not_used_and_named(tmp_path):
    table = pa.table({"id": [f"n{i}" for i in range(2000)], "a": np.arange(2000.0), "y": np.arange(2000.0)})
    report = fit(table, tmp_path / "m", replace(CONFIG, target="y", task="regression"))
    assert [text for text in report["quality"]["warnings"] if text.startswith("Not used: 'id'. ")]


@pytest.mark.parametrize("attributes", [False, True], ids=["alone", "with attributes"])
def test_rows_that_are_equal_but_for_the_target(attributes, tmp_path):
    """Folds are by the inputs, so that no fold shares a category with another; the advice is followed."""
    rng = np.random.default_rng(0)
    k, size = rng.integers(0, 1500, 24_000), rng.normal(size=1500)  # too many for one-hot vectors
    effects, noise = 3 * rng.normal(size=1500), rng.normal(size=24_000)  # the best R2 is 9 / 10
    columns = {"k": [f"zip {i}" for i in k], "y": effects[k] + noise} | ({"size": size[k]} if attributes else {})
    train, new = pa.table(columns)[:18_000], pa.table(columns)[18_000:]
    if attributes:
        said = fit(train, tmp_path / "m", CONFIG)["quality"]["warnings"]
        said = next(text for text in said if text.startswith("Not used: 'k'. "))
    else:
        with pytest.raises(ValueError, match="all rows of a category are equal but for the target") as error:
            fit(train, tmp_path / "m", CONFIG)
        said = str(error.value)
    assert "tells rows" in said and "such as a time or a random number" in said
    train, new = (t.append_column("chance", [rng.random(len(t))]) for t in (train, new))
    found, apparent = scores(train, new, tmp_path / "advised")
    assert found > 0.8 and abs(found - apparent) < 0.05


def test_parts_and_models_in_files(tmp_path):
    table, config = make_table(2000, 1.0, "two classes"), replace(CONFIG, lam=0.01, block_dtype="float64")
    start = prepare(table, config)
    model, _ = merge([Part(start).read(table[:700]), Part(start).read(table[700:])]).solve()
    assert start.from_dict(start.to_dict()).columns == start.columns
    fit(table, tmp_path / "m", config)
    loaded = TableModel.load(tmp_path / "m")
    assert loaded.columns == model.columns
    assert torch.allclose(loaded.weight, model.weight, rtol=1e-6, atol=1e-8)
    assert loaded.columns.names == ["a", "b", "k: rate of yes", "k: log frequency"]
    assert len(loaded.columns.names) == loaded.columns.width


def test_categories_that_were_not_seen_have_the_prior(tmp_path):
    train = make_table(6000, 2.0)
    fit(train, tmp_path / "m", CONFIG)
    model = TableModel.load(tmp_path / "m")
    new = pa.table({"a": [0.0] * 3, "b": [0.0] * 3, "k": ["city 1", "nowhere", None]})
    x, _, _ = replace(model.columns, missing="mean").encode(new.to_batches()[0], "t", with_target=False)
    assert x[0, 2] != 0 and x[1, 2] == 0 and (x[2, 2:] == 0).all()
    least = model.columns.encode(train.combine_chunks().to_batches()[0], "t").x[:, 3].min()
    assert x[1, 3] == least
    assert model.write_predictions(new, tmp_path / "p.csv", missing="mean").unseen == {"k": 1}
    with pytest.raises(ValueError, match=r"\(k: 1\), the first at row 2 of rows\[0\]"):
        model.write_predictions(new, tmp_path / "q.csv")


def test_targets_with_more_classes_than_rates():
    """They share rates, whether a tally has seen all of them or a few."""
    rng = np.random.default_rng(0)
    k, y = rng.integers(0, 300, 6000), rng.integers(0, 30, 6000)
    table = pa.table({"a": rng.normal(size=6000), "k": [f"k{i}" for i in k], "y": [f"class {i}" for i in y]})
    table = table.sort_by("y")  # so that a part has few classes
    whole = scan(Table(table))
    column = whole.inputs[1]
    assert column.width == GROUPS + 1 == len(rates(whole.target.categories)) + 1
    thirds = [Scan.start(Table(table), "y").read(Table(table[i : i + 2000])) for i in (0, 2000, 4000)]
    for first, *others in (thirds, copy.deepcopy(thirds)[::-1]):
        first = copy.deepcopy(first)
        for other in others:
            first.merge(other)
        assert first.columns() == whole


def test_numbers_that_turn_out_to_be_no_classes():
    """The first batches have a few whole numbers, and the last one has more of them."""
    rng = np.random.default_rng(0)
    k = [f"k{i}" for i in rng.integers(0, 300, 3000)]
    y = np.concatenate([rng.integers(0, 5, 2000), rng.integers(0, 500, 1000)])
    table = pa.table({"a": rng.normal(size=3000), "k": k, "y": y})
    one, two = (Scan.start(Table(table), "y").read(batches(t, 500)) for t in (table[:2000], table[2000:]))
    assert one.columns().target.categories is not None
    found = two.merge(one).columns()
    assert found.target.categories is None and found == scan(Table(table)) and found.inputs[1].codes.width == 2


def test_memory_is_bounded():
    tally, rng = Tally(), np.random.default_rng(0)
    for i in range(4):
        hashes = text_hashes(pa.array([f"id {j}" for j in range(60_000 * i, 60_000 * (i + 1))]))
        tally.add(hashes, rng.integers(0, FOLDS, 60_000), Target(rng.normal(size=60_000), None, np.zeros(60_000)))
    assert len(tally.rows) <= SLOTS and tally.rows.sum() == 240_000
    codes = tally.codes(None, 0.0, 1.0)
    assert codes.table.shape == (len(tally.rows) + 1, FOLDS + 1, 2)
    assert np.abs(codes.table[:, :, 0]).max() < 0.2  # noise


def test_folds_depend_on_values_alone():
    x = np.array([0.0, -0.0, np.nan, 1.5, 1.5, 2.0])
    k = text_hashes(pa.array(["a", "a", None, "b", "c", "b"]))
    folds = row_folds({"x": x, "k": k}, 6)
    assert folds[0] == folds[1] and (row_folds({"k": k[::-1], "x": x[::-1].copy()}, 6) == folds[::-1]).all()
    many = row_folds({"x": np.arange(50_000.0)}, 50_000)
    counts = np.bincount(many, minlength=FOLDS)
    assert len(counts) == FOLDS and np.abs(counts - 10_000).max() < 5 * np.sqrt(50_000 * 0.2 * 0.8)


def test_codes_in_a_file_are_checked():
    columns = scan(Table(make_table(1500, 1.0)))
    stored = columns.to_dict()
    assert Columns.from_dict(copy.deepcopy(stored)) == columns
    good = stored["inputs"][2]["codes"]

    def text(array):
        return base64.b64encode(array.tobytes()).decode()

    codes = columns.inputs[2].codes
    bad = {
        "width": [True, 1, "2", 3, 1 << 40],
        "slots": [None, "?", good["slots"][:-4], text(codes.slots[::-1].copy()), text(codes.slots * 0)],
        "table": [None, 7, good["table"][:-8], text(codes.table * np.float16(np.nan)), text(codes.table + 2000)],
    }
    for key, values in bad.items():
        for value in values:
            broken = copy.deepcopy(stored)
            broken["inputs"][2]["codes"][key] = value
            with pytest.raises(ValueError, match="codes"):
                Columns.from_dict(broken)
    for change in ({"codes": []}, {"codes": {**good, "more": 1}}, {"categories": ["a"]}, {"categories": None}):
        broken = copy.deepcopy(stored)
        broken["inputs"][2] |= change
        with pytest.raises(ValueError, match="codes"):
            Columns.from_dict(broken)
    broken = copy.deepcopy(stored)
    broken["target"]["categories"] = ["a", "b", "c"]
    with pytest.raises(ValueError, match="not 4 wide"):
        Columns.from_dict(broken)
    assert Codes.from_dict(good, "k") == codes != Codes(codes.slots, codes.table * 2)
