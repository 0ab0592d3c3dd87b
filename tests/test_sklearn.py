"""The contract of scikit-learn, exact `partial_fit`, and numbers of any size."""

import re

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import make_moons
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from snnk.sklearn import SNNKClassifier, SNNKFeatures, SNNKRegressor

SMALL = {"n_components": 32, "random_state": 0}
DRAWN = {"feature_map": "random-fourier", "bandwidth": 1.0, "random_state": 0}  # a map that does not depend on rows


@parametrize_with_checks(
    [
        SNNKFeatures(**SMALL),
        SNNKRegressor(**SMALL),
        SNNKClassifier(**SMALL),
        SNNKClassifier(**SMALL, feature_map="random-relu"),
        SNNKClassifier(**SMALL, discriminant=True, alpha=1e-3),
    ]
)
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def data(n=400, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(3, 5, size=(n, 3))
    return X, np.sin(X[:, 0] / 5) + X[:, 1] / 5


def test_regressor_is_ridge_on_its_features():
    X, y = data()
    ours = SNNKRegressor(64, alpha=0.1, **DRAWN).fit(X, y)
    features = SNNKFeatures(64, standardize=False, **DRAWN)
    pipe = make_pipeline(StandardScaler(), features, Ridge(alpha=0.1)).fit(X, y)
    np.testing.assert_allclose(ours.predict(X), pipe.predict(X), atol=1e-4)
    assert SNNKRegressor(64, alpha="gcv", random_state=0).fit(X, y).score(*data(seed=1)) > 0.9


def test_partial_fit_adds_rows_exactly():
    X, y = data()
    whole = SNNKRegressor(64, standardize=False, **DRAWN).fit(X, y)
    parts = SNNKRegressor(64, standardize=False, **DRAWN)
    for i in range(0, 400, 100):
        parts.partial_fit(X[i : i + 100], y[i : i + 100])
    np.testing.assert_allclose(parts.predict(X), whole.predict(X), atol=1e-8)


def test_classifiers_learn_what_a_line_cannot():
    X, y = make_moons(500, noise=0.1, random_state=0)
    names = np.array(["up", "down"])[y]
    for options in ({}, {"discriminant": True, "alpha": 1e-4}, {"feature_map": "random-relu"}):
        model = SNNKClassifier(128, random_state=0, **options).fit(X, names)
        assert model.score(X, names) > 0.97
        assert set(model.predict(X)) == {"up", "down"}
        assert ((model.decision_function(X) > 0) == (model.predict(X) == model.classes_[1])).all()


def test_partial_fit_of_classes():
    X, y = make_moons(200, random_state=0)
    model = SNNKClassifier(64, random_state=0).partial_fit(X[:100], y[:100], classes=[0, 1, 2])
    assert list(model.partial_fit(X[100:], y[100:]).classes_) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"classes \[5\] that are not among"):
        model.partial_fit(X[:1], [5])


def test_discriminant_waits_for_a_class_that_is_still_to_come():
    X, y = make_moons(200, random_state=0)
    y = y + (X[:, 0] > 1)
    first = y < 2
    model = SNNKClassifier(16, discriminant=True, alpha=1e-3, standardize=False, **DRAWN)
    model.partial_fit(X[first], y[first], classes=[0, 1, 2])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"needs rows of every class; got none of \[2\]"):
            model.predict(X)
    model.partial_fit(X[~first], y[~first])
    whole = SNNKClassifier(16, discriminant=True, alpha=1e-3, standardize=False, **DRAWN).fit(X, y)
    assert int(model.stats_.rows.sum()) == 200 and list(model.class_count_) == list(np.bincount(y))
    np.testing.assert_allclose(model.decision_function(X), whole.decision_function(X), atol=1e-6)
    assert model.alpha_ == 1e-3


def test_partial_fit_may_begin_with_rows_too_few_to_solve_with():
    X, y = data()
    model = SNNKRegressor(16, standardize=False, **DRAWN).partial_fit(X[:1], y[:1])
    with pytest.raises(ValueError, match="at least 2 rows; got 1"):
        model.predict(X)
    whole = SNNKRegressor(16, standardize=False, **DRAWN).fit(X, y)
    np.testing.assert_allclose(model.partial_fit(X[1:], y[1:]).predict(X), whole.predict(X), atol=1e-6)
    assert model.alpha_ == pytest.approx(whole.alpha_, rel=1e-4) and model.alpha_ == model.solution_.lam


def test_discriminant_does_not_solve_the_ridge(monkeypatch):
    monkeypatch.setattr("snnk.ridge.sums.RidgeStats.solve", None)
    X, y = make_moons(100, random_state=0)
    assert SNNKClassifier(16, discriminant=True, alpha=1e-3, **DRAWN).fit(X, y).score(X, y) > 0.8


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (SNNKRegressor, {"alpha": None}, "alpha must be a number >= 0 or 'gcv'; got None"),
        (SNNKRegressor, {"alpha": "kfold"}, "got 'kfold'"),
        (SNNKClassifier, {"alpha": -1.0}, r"got -1\.0"),
        (SNNKClassifier, {"alpha": [1.0]}, r"got \[1\.0\]"),
        (SNNKClassifier, {"alpha": "gcv", "discriminant": True}, "shrinkage, a number from 0 to 1; got 'gcv'"),
        (SNNKClassifier, {"alpha": 1.5, "discriminant": True}, r"from 0 to 1; got 1\.5"),
    ],
)
def test_a_bad_alpha_is_refused_before_any_row_is_counted(make, options, message):
    X, y = make_moons(40, random_state=0)
    model = make(8, random_state=0).partial_fit(X, y)
    with pytest.raises(ValueError, match=message):
        model.set_params(**options).partial_fit(X, y)
    assert int(model.stats_.rows.sum()) == 40
    with pytest.raises(ValueError, match=message):
        make(8, **options).fit(X, y)


def test_numpy_numbers_as_parameters():
    X, y = data()
    features = SNNKFeatures(np.int64(32), random_state=0).fit(X)
    assert features.transform(X).shape == (400, 32) and type(features.map_.num_features) is int
    search = GridSearchCV(SNNKRegressor(random_state=0), {"n_components": np.arange(31, 33)}, cv=3).fit(X, y)
    assert search.best_score_ > 0.9
    assert SNNKRegressor(8, alpha=np.float32(0.5), random_state=0).fit(X, y).alpha_ == 0.5


def test_pipeline_grid_search_and_pandas():
    pd = pytest.importorskip("pandas")
    X, y = data()
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    search = GridSearchCV(SNNKRegressor(32, random_state=0), {"bandwidth": [0.3, 1.0], "alpha": [1e-3, 10.0]}, cv=3)
    assert search.fit(frame, y).best_score_ > 0.9
    features = SNNKFeatures(4, random_state=0).set_output(transform="pandas").fit(frame)
    assert list(features.transform(frame).columns) == [f"snnkfeatures{i}" for i in range(4)]
    assert list(features.feature_names_in_) == ["a", "b", "c"]


def test_refusals():
    X, y = data(20)
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        SNNKRegressor(8).fit(sparse.csr_matrix(X), y)
    with pytest.raises(ValueError, match="unknown feature map 'random-fouier'; did you mean 'random-fourier'"):
        SNNKRegressor(8, feature_map="random-fouier").fit(X, y)
    for wrong in (0, True, 8.0, np.int64(0), np.bool_(True)):
        with pytest.raises(ValueError, match=f"n_components must be a positive integer; got {re.escape(repr(wrong))}"):
            SNNKRegressor(wrong).fit(X, y)
    assert SNNKFeatures(7).fit_transform(X).shape == (20, 7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("feature_map", ["random-fourier", "random-relu"])
def test_numbers_of_any_size(dtype, feature_map):
    """Powers of two scale the data exactly, so that the predictions must scale exactly, too."""
    X, y = data()
    X, largest = X.astype(dtype), 120 if dtype == np.float32 else 1015
    options = {"n_components": 64, "feature_map": feature_map, "bandwidth": 1.0, "alpha": 1e-3, "random_state": 0}
    expected = SNNKRegressor(**options).fit(X, y).predict(X)
    for exponent in (-largest, -80, -63, 63, 100, largest):
        inputs = SNNKRegressor(**options).fit(np.ldexp(X, exponent), y).predict(np.ldexp(X, exponent))
        np.testing.assert_allclose(inputs, expected, atol=2e-6)
        targets = SNNKRegressor(**options).fit(X, np.ldexp(y, exponent)).predict(X)
        np.testing.assert_allclose(np.ldexp(targets, -exponent), expected, atol=1e-9)
    both = np.stack([y, np.ldexp(y, -900)], 1)
    found = SNNKRegressor(**options).fit(X, both).predict(X)
    np.testing.assert_allclose(np.ldexp(found[:, 1], 900), found[:, 0], atol=1e-9)


def test_targets_whose_size_is_known_late():
    X, y = data()
    model = SNNKRegressor(32, random_state=0).partial_fit(X[:200], 0 * y[:200])
    model.partial_fit(X[200:], 1e-50 * y[200:])
    whole = SNNKRegressor(32, random_state=0, standardize=True).partial_fit(X[:200], np.zeros(200))
    whole.partial_fit(X[200:], y[200:])
    np.testing.assert_allclose(1e50 * model.predict(X), whole.predict(X), atol=1e-9)
    with pytest.raises(ValueError, match=r"y has a number of .*e\+30.*begin with a batch that is like the others"):
        model.partial_fit(X, y * 1e30)
    assert int(model.stats_.rows.sum()) == 400


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, 1e38), (np.float32, 1e9), (np.float64, 1e300)])
def test_a_number_too_far_away_is_named_before_any_row_is_counted(dtype, value):
    X, y = data(3000)
    X = X.astype(dtype)
    model = SNNKRegressor(16, random_state=0).partial_fit(X, y)
    far = X.copy()
    far[2500, 1] = value
    for call in (model.predict, lambda rows: model.partial_fit(rows, y)):
        with pytest.raises(ValueError, match=r"at row 2500, column 1: too far from the mean"):
            call(far)
    assert int(model.stats_.rows.sum()) == 3000
    # Without standardising, angles of this size have no digits, while ReLU features are right.
    large = np.ldexp(X, 60)
    with pytest.raises(ValueError, match=r"at row 0, column 0"):
        SNNKFeatures(16, standardize=False, random_state=0).fit(large).transform(large)
    relu = SNNKFeatures(16, standardize=False, feature_map="random-relu", random_state=0).fit(large)
    assert np.isfinite(relu.transform(large)).all()


@pytest.mark.parametrize("count", [1, 3])
def test_numbers_that_dwarf_all_others_are_named(count):
    """One value of 1e30 would make the others of its column equal, and the score 0, without an error."""
    X, y = data()
    far, large = X.copy(), y.copy()
    far[40 : 40 + count, 1], large[7 : 7 + count] = -1e30, 1e9
    with pytest.raises(ValueError, match=rf"X has {count} of 400 numbers in column 1 .* up to -1e\+30 in row 40"):
        SNNKRegressor(16).fit(far, y)
    with pytest.raises(ValueError, match=rf"y has {count} of 400 numbers in column 0 .* up to 1e\+09 in row 7"):
        SNNKRegressor(16).fit(X, large)
    flag = np.c_[X, np.arange(400) < count]  # the size of a rare flag does not matter
    plain = SNNKRegressor(64, random_state=0).fit(flag, y).predict(flag)
    flag[:, -1] *= 2.0**100
    np.testing.assert_array_equal(SNNKRegressor(64, random_state=0).fit(flag, y).predict(flag), plain)
    for power in (3, 10):  # heavy tails have values of every size, and are no outliers
        SNNKFeatures(16).fit(np.random.default_rng(0).pareto(1, (4000, 2)) ** power)


def test_a_constant_of_any_size_takes_nothing_from_the_others():
    X, y = data()
    expected = SNNKRegressor(64, random_state=0).fit(np.c_[X, np.zeros(400)], y).score(np.c_[X, np.zeros(400)], y)
    for constant in (0.1, 1e20 + 16384 * (np.arange(400) % 2), -1e300, 1e-300):
        rows = np.c_[X, np.zeros(400) + constant]
        assert SNNKRegressor(64, random_state=0).fit(rows, y).score(rows, y) == pytest.approx(expected, abs=1e-6)


def test_too_many_features_fail_before_they_are_drawn():
    with pytest.raises(MemoryError, match="sums of 1000000000 features need"):
        SNNKRegressor(10**9).fit(*data(20))
