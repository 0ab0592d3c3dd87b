"""Figures on held-out rows against scikit-learn's, the importances of columns, and what a file may hold."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn import metrics
from sklearn.inspection import permutation_importance

from snnk.tabular import FitConfig, TableModel, fit, quality
from snnk.tabular.quality import ALWAYS, FEWEST, assess, check_quality, cross_fitted

from helpers.tables import make_classes, make_table, split_fit


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """A classifier, and inputs and targets of 1,200 rows that it was not fitted to."""
    return split_fit(make_classes(), tmp_path_factory.mktemp("classes"), 1800)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A regression, and inputs and targets of 600 rows that it was not fitted to."""
    return split_fit(make_table(1600), tmp_path_factory.mktemp("numbers"), 1000)


def values_of(model, x, y):
    """Predicted and observed numbers."""
    target = model.columns.target
    return model.outputs(x)[:, 0].numpy(), y[:, 0].numpy() * target.scale + target.mean


def test_figures_of_classes_are_those_of_sklearn(classes):
    model, x, y = classes
    _, found = assess(model, x, y)
    labels, p = y.argmax(1), cross_fitted(model.outputs(x), y.argmax(1))
    guess = p.argmax(1)
    assert (found["task"], found["rows"], found["num_classes"]) == ("classification", 1200, 4)
    assert (
        found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, guess), abs=1e-12) and found["accuracy"] > 0.7
    )
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(labels, guess), abs=1e-12)
    assert found["log_loss"] == pytest.approx(metrics.log_loss(labels, p.numpy()), abs=1e-10)
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(labels, p.numpy(), multi_class="ovr"), abs=1e-10)
    counts, names = np.bincount(labels), model.columns.target.categories
    assert found["most_frequent_accuracy"] == pytest.approx(counts.max() / 1200, abs=1e-12)
    assert found["most_frequent_class"] == names[counts.argmax()]
    table = metrics.confusion_matrix(labels, guess)
    assert [row["rows"] for row in found["classes"]] == sorted(counts.tolist(), reverse=True)
    for row in found["classes"]:
        c = names.index(row["class"])
        wrong = np.where(np.arange(4) == c, 0, table[c])
        assert row["recall"] == pytest.approx(table[c, c] / counts[c], abs=1e-12)
        assert row["mistaken_for"] == (names[wrong.argmax()] if wrong.any() else None)
        assert row["precision"] == (pytest.approx(table[c, c] / n, abs=1e-12) if (n := table[:, c].sum()) else None)


def test_figures_of_numbers_are_those_of_sklearn(numbers):
    model, x, y = numbers
    calibration, found = assess(model, x, y)
    guess, observed = values_of(model, x, y)
    assert calibration is None and (found["task"], found["rows"], found["r2_of_the_mean"]) == ("regression", 600, 0)
    assert found["r2"] == pytest.approx(metrics.r2_score(observed, guess), abs=1e-10) and found["r2"] > 0.9
    assert found["mean_absolute_error"] == pytest.approx(metrics.mean_absolute_error(observed, guess), rel=1e-10)
    squared = metrics.mean_squared_error(observed, guess)
    assert found["root_mean_squared_error"] == pytest.approx(math.sqrt(squared), rel=1e-10)
    for row in found["residual_quantiles"]:
        assert row["residual"] == pytest.approx(np.quantile(observed - guess, row["share"]), abs=1e-10)
    order = np.argsort(guess)
    for i, row in enumerate(found["binned"]):
        mine = order[60 * i : 60 * i + 60]
        expected = guess[mine].mean(), observed[mine].mean(), *np.quantile(observed[mine], [0.1, 0.9])
        assert row["rows"] == 60
        assert [row[k] for k in ("predicted", "observed", "low", "high")] == pytest.approx(expected, abs=1e-10)


def test_groups_of_probabilities_give_the_calibration_error(classes):
    _, found = assess(*classes)
    groups = found["reliability"]
    assert sum(row["rows"] for row in groups) == 1200 and len(groups) > 3
    gaps = sum(row["rows"] * abs(row["predicted"] - row["observed"]) for row in groups)
    assert gaps / 1200 == pytest.approx(found["calibration_error"], abs=1e-12)
    right = sum(row["rows"] * row["observed"] for row in groups)
    assert right / 1200 == pytest.approx(found["accuracy"], abs=1e-12)


def test_scores_that_are_too_sure_get_true_probabilities():
    """The error of true probabilities of n rows in ten bins: its mean is sqrt(10 / 4n) at most, by Jensen."""
    n, generator = 4000, torch.Generator().manual_seed(0)
    logits = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    limit = math.sqrt(10 / (4 * n)) + 5 * math.sqrt(1 / (4 * n))  # and five standard deviations
    sure = quality.expected_calibration_error((8 * logits).softmax(1), labels)
    found = quality._of_classes(cross_fitted(8 * logits, labels), labels, ("a", "b", "c"))
    assert found["calibration_error"] < limit < 0.1 < sure


def test_no_label_decides_on_the_probabilities_of_its_own_row(classes):
    model, x, y = classes
    scores, labels = model.outputs(x)[:200], y.argmax(1)[:200]
    before = cross_fitted(scores, labels)
    for row in range(0, 200, 23):
        changed = labels.clone()
        changed[row] = (labels[row] + 1) % 4
        differs = (cross_fitted(scores, changed) != before).any(1)
        assert not differs[row] and int(differs.sum()) == 100  # the other half


def test_importances_are_those_of_sklearn(classes):
    model, x, y = classes
    calibration, found = assess(model, x, y)
    fitted = replace(model, calibration=calibration)

    def score(_, inputs, labels):
        return float((fitted.probabilities(torch.from_numpy(inputs)).argmax(1).numpy() == labels).mean())

    names, labels = [column.name for column in model.columns.inputs], y.argmax(1).numpy()
    assert names[:4] == ["x0", "x1", "x2", "x3"]
    theirs = permutation_importance(_Fitted(), x.numpy(), labels, scoring=score, n_repeats=20, random_state=0)
    ours = {row["column"]: row["loss"] for row in found["importances"]["columns"]}
    assert found["importances"]["of"] == "accuracy" and found["importances"]["rows"] == 1200 and set(ours) == {*names}
    for i, name in enumerate(names[:4]):
        error = theirs.importances_std[i] * math.sqrt(1 / quality.PERMUTATIONS + 1 / 20)
        assert abs(ours[name] - theirs.importances_mean[i]) <= 5 * error + 1e-12, name
    order = [row["column"] for row in found["importances"]["columns"]]
    assert order[0] == "x0" and set(order[1:3]) == {"x1", "kind"} and list(ours.values()) == sorted(ours.values())[::-1]
    assert ours["x0"] > 0.3 and abs(ours["x2"]) < 0.02 and abs(ours["x3"]) < 0.02


class _Fitted:
    def fit(self, x, y):
        raise AssertionError


def test_a_column_is_permuted_as_a_whole(classes, monkeypatch):
    """Only the inputs of one column change, and a category stays one of its values."""
    model, x, y = classes
    seen = []
    outputs = TableModel.outputs
    monkeypatch.setattr(TableModel, "outputs", lambda self, x: seen.append(x.clone()) or outputs(self, x))
    assess(model, x, y)
    _, whole, *changed = seen  # all rows, the rows of the permutations, and these permuted
    assert len(changed) == quality.PERMUTATIONS * len(model.columns.inputs) and torch.equal(
        whole.sort(0).values, x.sort(0).values
    )
    place = 0
    for i, column in enumerate(model.columns.inputs):
        span = slice(place, place + column.width)
        place += column.width
        for part in changed[quality.PERMUTATIONS * i : quality.PERMUTATIONS * (i + 1)]:
            moved = (part != whole).any(0)
            assert bool(moved[span].all()) and int(moved.sum()) == column.width
            before, after = (found[:, span].unique(dim=0, return_counts=True) for found in (whole, part))
            assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_many_features_and_columns_use_fewer_rows(classes, monkeypatch):
    model, x, y = classes
    monkeypatch.setattr(quality, "WORK", quality.PERMUTATIONS * 5 * 64 * 333)
    assert assess(model, x, y)[1]["importances"]["rows"] == 333
    monkeypatch.setattr(quality, "WORK", 1)
    assert assess(model, x, y)[1]["importances"]["rows"] == quality.LEAST_ROWS


def test_few_rows_have_no_figures(classes, numbers):
    for model, x, y in (classes, numbers):
        calibration, found = assess(model, x[: FEWEST - 1], y[: FEWEST - 1])
        assert calibration is None and set(found) == set(ALWAYS) and found["rows"] == FEWEST - 1
        assert "Only 19 rows were held out, and figures need at least 20: fit to more rows" in found["warnings"][0]
        assert check_quality(json.loads(json.dumps(found))) == found
        calibration, found = assess(model, x[:FEWEST], y[:FEWEST])
        assert (calibration is None) == (found["task"] == "regression") and "importances" in found


def test_rows_of_one_class_have_no_area(classes):
    model, x, y = classes
    c = model.columns.target.categories.index("middle")
    mine = y.argmax(1) == c
    _, found = assess(model, x[mine], y[mine])
    assert found["auc"] is None and found["most_frequent_class"] == "middle" and found["most_frequent_accuracy"] == 1
    assert [row["recall"] is None for row in found["classes"]] == [False, True, True, True]
    assert check_quality(json.loads(json.dumps(found, allow_nan=False))) == found


def test_a_target_of_one_class_has_no_figures(classes):
    model, x, y = classes
    target = replace(model.columns.target, categories=("only",))
    one = replace(model, columns=replace(model.columns, target=target), weight=model.weight[:1], bias=model.bias[:1])
    calibration, found = assess(one, x, y[:, :1])
    assert calibration is None and found["warnings"] == [
        "All rows have the same 'y', so that there is nothing to measure."
    ]


def test_equal_numbers_have_no_r2(numbers):
    model, x, y = numbers
    _, found = assess(model, x, torch.ones_like(y))
    assert found["r2"] is None and found["importances"]["columns"] == [] and found["mean_absolute_error"] > 0
    assert "All held-out values of 'y' are the same" in found["warnings"][0]
    assert check_quality(json.loads(json.dumps(found, allow_nan=False))) == found


@pytest.mark.parametrize("power", [-1060, -400, 400, 1015])
def test_numbers_of_any_size(numbers, power):
    """A target in another unit has the same R2 and importances; below 2^-1022 it keeps few digits."""
    model, x, y = numbers
    _, plain = assess(model, x, y)
    target = model.columns.target
    far = replace(target, mean=math.ldexp(target.mean, power), scale=math.ldexp(target.scale, power))
    _, found = assess(replace(model, columns=replace(model.columns, target=far)), x, y)
    digits = 1e-3 if power < -1022 else 1e-10
    assert found["r2"] == pytest.approx(plain["r2"], abs=digits)
    for name in ("mean_absolute_error", "root_mean_squared_error"):
        assert math.ldexp(found[name], -power) == pytest.approx(plain[name], rel=digits)
    for one, two in zip(found["binned"], plain["binned"], strict=True):
        assert math.ldexp(one["observed"], -power) == pytest.approx(two["observed"], abs=digits)
    assert check_quality(json.loads(json.dumps(found, allow_nan=False))) == found


def test_predictions_that_overflow_are_null(numbers):
    model, x, y = numbers
    _, found = assess(replace(model, weight=model.weight * 1e308), x, y)
    assert (
        found["r2"] < -1e300
        and found["mean_absolute_error"] is None
        and "no better than the mean" in found["warnings"][0]
    )
    assert check_quality(json.loads(json.dumps(found, allow_nan=False))) == found


def test_a_useless_regression_is_named(numbers):
    model, x, y = numbers
    _, found = assess(model, x, -y)
    assert found["r2"] < 0 and f"no better than the mean of 'y': R2 is {found['r2']:.3f}" in found["warnings"][0]
    assert assess(model, x, y)[1]["warnings"] == []


def test_imbalance_is_named(classes):
    _, found = assess(*classes)
    rare = sum(row["rows"] for row in found["classes"] if row["class"] == "rare")
    assert 0 < rare < 12
    few, never = found["warnings"]
    assert few.startswith("Imbalance: 1 of 4 classes has fewer than 1 % of the 1,200 held-out rows: 'rare' (")
    assert f"never predicted: 'rare' ({rare} rows). Compare their probabilities" in never


def test_a_classifier_without_skill_is_named(classes):
    model, x, y = classes
    flat = replace(model, weight=torch.zeros_like(model.weight))
    _, found = assess(flat, x, y)
    assert found["accuracy"] <= found["most_frequent_accuracy"]
    most = found["most_frequent_class"]
    assert found["warnings"][-1] == f"The predictions are no better than always {most!r}, the most frequent class."
    assert "classes are never predicted: 'rare' (" in found["warnings"][1] and "'low' (" in found["warnings"][1]


def test_many_rare_classes_are_counted():
    names = tuple(f"c{i}" for i in range(12))
    labels = torch.cat([torch.zeros(2000, dtype=torch.long), torch.arange(12)])
    said = quality._imbalance({"accuracy": 1.0, "most_frequent_accuracy": 0.9}, labels, labels, names)
    assert said == [
        "Imbalance: 11 of 12 classes have fewer than 1 % of the 2,012 held-out rows: 'c1' (1 row), 'c2' (1 row), "
        "'c3' (1 row), 'c4' (1 row), 'c5' (1 row) and 6 more. Accuracy hardly depends on them; look at the recall "
        "of each class."
    ]
    said = quality._imbalance({"accuracy": 1.0, "most_frequent_accuracy": 0.9}, labels[:2000], labels[:2000], names[:2])
    assert said[0].endswith(
        "'c1' (0 rows). Accuracy hardly depends on them; look at the recall of each class, which "
        "classes without rows do not have."
    )


def test_the_same_rows_give_the_same_figures(classes):
    assert assess(*classes) == assess(*classes)


def changed(found, path, value):
    found = copy.deepcopy(found)
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("task",), "clustering", "must have a task, one of classification, regression"),
        (("rows",), -1, "rows of the quality must be a whole number >= 0; got -1"),
        (("rows",), True, "rows of the quality must be a whole number"),
        (("warnings",), "text", "warnings of the quality must be a list"),
        (("warnings",), [3], "an entry of warnings of the quality must be a text; got 3"),
        (("accuracy",), 1.5, "accuracy of the quality must be a number from 0 to 1; got 1.5"),
        (("accuracy",), None, "accuracy of the quality must be a number from 0 to 1; got None"),
        (("log_loss",), math.inf, "log_loss of the quality must be a finite number; got inf"),
        (("log_loss",), math.nan, "log_loss of the quality must be a finite number; got nan"),
        (("auc",), "high", "auc of the quality must be a number from 0 to 1"),
        (("classes", 0, "recall"), [1], "recall of an entry of classes of the quality must be a number from 0 to 1"),
        (("classes", 0), {"class": "a"}, "an entry of classes of the quality must have class, rows, recall"),
        (("reliability",), {}, "reliability of the quality must be a list"),
        (("importances", "columns"), [{"column": 3, "loss": 0, "standard_deviation": 0}], "column of an entry of"),
        (("importances",), [], "importances of the quality must have of, rows, columns"),
        (("more",), "x" * 999, "the quality must have task, rows, warnings, accuracy"),
    ],
)
def test_figures_of_a_file_are_checked(classes, path, value, message):
    found = json.loads(json.dumps(assess(*classes)[1], allow_nan=False))
    assert check_quality(found) == found
    with pytest.raises(ValueError, match=message) as error:
        check_quality(changed(found, path, value))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("stored", [None, [], "text", {}, {"task": []}, {"task": "regression", "rows": 3}])
def test_other_contents_are_refused(stored):
    with pytest.raises(ValueError, match="quality must have"):
        check_quality(stored)


def test_figures_of_another_task_are_refused(numbers):
    found = assess(*numbers)[1]
    assert check_quality(found) is found
    with pytest.raises(ValueError, match="the quality must have task, rows, warnings, accuracy"):
        check_quality(found | {"task": "classification"})


@pytest.mark.parametrize("values", [5, 300])
def test_tables_with_few_different_inputs_have_no_figures_of_a_part_of_them(values, tmp_path):
    """All rows of an input are held out or none, so that five by five inputs give no fair sample, and are not used."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, values, 60_000), rng.integers(0, 5, 60_000)
    y = rng.random(60_000) < np.where((a + b) % 2, 0.7, 0.3)
    table = pa.table({"a": a.astype(float), "b": b.astype(float), "y": np.where(y, "yes", "no")})
    report = fit(table, tmp_path / "m", FitConfig("y", 32, feature_map="random-fourier", bandwidth=1.0))
    model, figures = TableModel.load(tmp_path / "m"), report["quality"]
    x, target, _ = model.columns.encode(table.combine_chunks().to_batches()[0], "t")
    if values == 5:
        assert model.calibration is None and "different inputs were held out" in figures["warnings"][0]
    else:
        right = float((model.outputs(x).argmax(1) == target.argmax(1)).double().mean())
        assert figures["accuracy"] == pytest.approx(right, abs=0.05)
    assert float(model.probabilities(x)[:, 1].mean()) == pytest.approx(float(target[:, 1].mean()), abs=0.03)
