"""The contract of scikit-learn, probabilities, weights, missing values, exact `partial_fit`, numbers of any size."""

import inspect
import pickle
import re
import subprocess
import sys
from dataclasses import fields

import joblib
import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import make_moons
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss, recall_score
from sklearn.model_selection import GridSearchCV
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import check_is_fitted

from snnk import FEATURE_MAPS
from snnk.sklearn import SNNKClassifier, SNNKFeatures, SNNKRegressor
from snnk.tabular import FitConfig
from snnk.tabular.calibration import expected_calibration_error
from snnk.tabular.learned import LearnedFeatures
from snnk.tabular.sample import content_hash

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


def band(n, seed=0):
    """Classes by two steps of one column of twelve, which learnt features find and random ones of all columns miss."""
    X = np.random.default_rng(seed).normal(size=(n, 12))
    return X, np.abs(X[:, 0]) > 0.67


def chances(n, seed, classes=2):
    """Classes drawn from probabilities that are a smooth function of three columns."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3))
    logits = np.stack([1.5 * np.sin(X[:, 0] * (c + 1)) + X[:, 1] * (c - 0.5) for c in range(classes)], 1)
    return X, (rng.random((n, 1)) > softmax(logits, 1).cumsum(1)).sum(1).clip(max=classes - 1)


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


CLASSIFIERS = {
    "drawn": {**DRAWN},
    "relu": {"feature_map": "random-relu", "random_state": 0},
    "learned": {"random_state": 0},
    "discriminant": {**DRAWN, "discriminant": True, "alpha": 0.1},
}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("way", ["fit", "partial_fit"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_probabilities_hold_on_fresh_rows(name, way, classes):
    """A calibration on 300 rows or more has offsets and a scale with errors of about 0.1, so that probabilities are
    wrong by 0.025 at most where they are near 1/2; chance alone gives an error below 0.01 on 20,000 rows in 10 bins.
    """
    X, y = chances(1500, 0, classes)
    model = SNNKClassifier(48, **CLASSIFIERS[name])
    if way == "fit":
        model.fit(X, y)
    else:
        for part in np.array_split(np.arange(1500), [700, 1000]):
            model.partial_fit(X[part], y[part])
    assert isinstance(model.map_, LearnedFeatures) == (name == "learned")
    X, y = chances(20_000, 1, classes)
    found, labels = model.predict_proba(X), torch.from_numpy(y)
    scores = model._outputs(X)
    cut = scores.clip(1e-12, 1)
    plain = {"softmax": softmax(scores, 1), "clip": cut / cut.sum(1, keepdims=True)}
    error = expected_calibration_error(torch.from_numpy(found), labels)
    assert error < 0.04
    if name != "discriminant":  # whose softmax is a posterior already
        assert error < 0.5 * expected_calibration_error(torch.from_numpy(plain["softmax"]), labels)
        assert all(log_loss(y, found) < log_loss(y, other) for other in plain.values())


@pytest.mark.parametrize("seed", range(5))
def test_a_few_huge_scores_do_not_determine_the_calibration(seed):
    """With more features than rows and hardly a penalty, scores of some rows that are left out are far beyond 1."""
    X, y = make_moons(80, noise=0.2, random_state=seed)
    model = SNNKClassifier(100, alpha=1e-10, **DRAWN).fit(X, y)
    X, y = make_moons(2000, noise=0.2, random_state=99)
    scores = model._outputs(X)
    assert np.abs(scores).max() > 5
    assert model.score(X, y) > np.mean(scores.argmax(1) == y) - 0.03
    assert model.predict_proba(X).max() < 1 - 1e-6


@pytest.mark.parametrize("options", [{}, {**DRAWN, "alpha": 1e-6}])
def test_where_nothing_can_be_learnt_probabilities_are_alike(options):
    """The scores of rows that determined them would seem to be right: there is one feature for two rows."""
    rng = np.random.default_rng(0)
    X, y, fresh = rng.normal(size=(400, 10)), rng.integers(0, 2, 400), rng.normal(size=(1000, 10))
    model = SNNKClassifier(200, **{"random_state": 0, **options}).fit(X, y)
    assert log_loss(rng.integers(0, 2, 1000), model.predict_proba(fresh)) < np.log(2) + 0.05


class ByHeart(LearnedFeatures):
    """The class of each row that it learnt from, and a number without a meaning for any other row."""

    def __init__(self, x, y, num_features):
        super().__init__(x.shape[1], num_features)
        self.known = dict(zip(content_hash(x).tolist(), y[:, 0].tolist(), strict=True))

    def _phi(self, x):
        found = x.new_zeros(len(x), self.num_features)
        found[:, 0] = x.new_tensor([self.known.get(key, key % 997 / 996) for key in content_hash(x).tolist()])
        return found


def test_features_that_know_rows_by_heart_are_calibrated_on_others(monkeypatch):
    monkeypatch.setattr("snnk.sklearn.features.learn", lambda x, y, m, **_: ByHeart(x, y, m))
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(400, 3)), rng.integers(0, 2, 400)
    model = SNNKClassifier(8, random_state=0).fit(X, y)
    assert isinstance(model.map_, ByHeart) and 250 < len(model.map_.known) < 350
    assert model.predict_proba(X).max() < 0.75


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("rows", [9, 60])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_predictions_follow_from_probabilities(name, rows, classes):
    X, y = chances(rows, 0, classes)
    y[:classes] = np.arange(classes)
    names = np.array(["x", "y", "z"])[y]
    model = SNNKClassifier(16, **CLASSIFIERS[name]).fit(X, names)
    X = chances(500, 1)[0]
    p, decision = model.predict_proba(X), model.decision_function(X)
    assert p.shape == (500, classes) and (p >= 0).all()
    np.testing.assert_allclose(p.sum(1), 1)
    np.testing.assert_array_equal(model.predict(X), model.classes_[p.argmax(1)])
    np.testing.assert_allclose(model.predict_log_proba(X), np.log(p), atol=1e-10)
    np.testing.assert_allclose(expit(decision) if classes == 2 else softmax(decision, 1)[:, 1], p[:, 1], atol=1e-10)


WEIGHTED = {
    "drawn": {**DRAWN},
    "auto": {"feature_map": "random-fourier", "random_state": 0},
    "learned": {"random_state": 0},
    "number": {**DRAWN, "alpha": 0.3},
}


@pytest.mark.parametrize("make", [SNNKRegressor, SNNKClassifier])
@pytest.mark.parametrize("name", WEIGHTED)
def test_a_weight_is_a_number_of_equal_rows(make, name):
    rng = np.random.default_rng(0)
    X, y = band(400)
    y = y if make is SNNKClassifier else y + 0.1 * rng.normal(size=400)
    weight = rng.integers(0, 4, 400)
    copies = rng.permutation(np.repeat(np.arange(400), weight))
    weighted = make(24, **WEIGHTED[name]).fit(X, y, sample_weight=weight)
    repeated = make(24, **WEIGHTED[name]).fit(X[copies], y[copies])
    assert isinstance(weighted.map_, LearnedFeatures) == (name == "learned")
    call = "predict_proba" if make is SNNKClassifier else "predict"
    # Training in float32 takes the same steps from inputs that are rounded differently, if at all.
    tolerance = 1e-4 if name == "learned" else 1e-8
    np.testing.assert_allclose(getattr(weighted, call)(X), getattr(repeated, call)(X), atol=tolerance)
    assert weighted.alpha_ == pytest.approx(repeated.alpha_, rel=1e-3)
    plain = make(24, **WEIGHTED[name]).fit(X, y)
    assert np.abs(getattr(weighted, call)(X) - getattr(plain, call)(X)).max() > 1e-3


def test_weights_that_are_no_whole_numbers_are_importances():
    X, y = data(300)
    weight = np.random.default_rng(0).random(300) + 0.1
    first = SNNKRegressor(32, **DRAWN).fit(X, y, sample_weight=weight)
    for unit in (1e-6, 2.0**20):
        found = SNNKRegressor(32, **DRAWN).fit(X, y, sample_weight=weight * unit)
        assert found.alpha_ == pytest.approx(first.alpha_ * unit, rel=1e-6)
        np.testing.assert_allclose(found.predict(X), first.predict(X), atol=1e-6)


@pytest.mark.parametrize("alpha", [0.1, "gcv"])
def test_class_weights(alpha):
    X, y = chances(900, 0)
    rare = (y == 0) | (np.arange(900) % 10 == 0)
    X, y = X[rare], np.where(y[rare] == 1, "rare", "usual")
    options = {"n_components": 32, "alpha": alpha, "standardize": False, **DRAWN}
    share = np.mean(y == "rare")
    weights = {"rare": 0.5 / share, "usual": 0.5 / (1 - share)}
    dictionary = SNNKClassifier(**options, class_weight=weights).fit(X, y)
    by_row = SNNKClassifier(**options).fit(X, y, sample_weight=[weights[name] for name in y])
    balanced = SNNKClassifier(**options, class_weight="balanced").fit(X, y)
    parts = SNNKClassifier(**options, class_weight=weights)
    for part in np.array_split(np.arange(len(X)), 3):
        parts.partial_fit(X[part], y[part], classes=["rare", "usual"])
    for other in (by_row, balanced, parts):
        np.testing.assert_allclose(other.predict_proba(X), dictionary.predict_proba(X), atol=1e-4)
    assert balanced.predict_proba(X)[:, 0].mean() == pytest.approx(0.5, abs=0.15)
    plain = SNNKClassifier(**options).fit(X, y)
    assert recall_score(y, balanced.predict(X), pos_label="rare") > recall_score(y, plain.predict(X), pos_label="rare")
    with pytest.raises(ValueError, match=r"'balanced' is not supported for partial_fit.*give them as a dict"):
        SNNKClassifier(class_weight="balanced").partial_fit(X, y)


def test_balanced_classes_and_repeated_rows():
    X, y = chances(300, 0)
    weight = np.random.default_rng(0).integers(0, 4, 300)
    copies = np.repeat(np.arange(300), weight)
    options = {"n_components": 24, **DRAWN, "class_weight": "balanced"}
    weighted = SNNKClassifier(**options).fit(X, y, sample_weight=weight)
    repeated = SNNKClassifier(**options).fit(X[copies], y[copies])
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-8)


@pytest.mark.parametrize("make", [SNNKRegressor, SNNKClassifier])
def test_the_split_of_rows_after_the_first_batch_does_not_matter(make):
    X, y = band(700)
    weight = np.random.default_rng(0).random(700)
    models = []
    for cuts in ([300], [300, 301, 500, 650], [300, 600]):
        models.append(make(24, random_state=0))
        for part in np.array_split(np.arange(700), cuts):
            models[-1].partial_fit(X[part], y[part], sample_weight=weight[part])
    assert isinstance(models[0].map_, LearnedFeatures)
    call = "predict_proba" if make is SNNKClassifier else "predict"
    for model in models[1:]:
        np.testing.assert_allclose(getattr(model, call)(X), getattr(models[0], call)(X), atol=1e-10)


def test_missing_values():
    X, y = data(300)
    holes = X.copy()
    holes[np.random.default_rng(0).random(X.shape) < 0.1] = np.nan
    whole = ~np.isnan(holes).any(1)
    options = {"n_components": 32, **DRAWN}
    for make in (SNNKRegressor, SNNKFeatures):
        with pytest.raises(ValueError, match=r"Input X contains NaN(.|\n)*choose missing='mean' or missing='drop'"):
            make(**options).fit(holes, y)
    mean = SNNKRegressor(**options, missing="mean").fit(holes, y)
    filled = np.where(np.isnan(holes), np.nanmean(holes, 0), holes)
    np.testing.assert_allclose(mean.mean_, filled.mean(0))
    np.testing.assert_allclose(mean.scale_, np.nanstd(holes, 0))
    np.testing.assert_allclose(mean.predict(holes), mean.predict(filled), atol=1e-10)
    assert mean.score(filled, y) > 0.5
    drop = SNNKRegressor(**options, missing="drop").fit(holes, y)
    rest = SNNKRegressor(**options).fit(X[whole], y[whole])
    np.testing.assert_allclose(drop.predict(X), rest.predict(X), atol=1e-10)
    first = int(np.argmin(whole))
    with pytest.raises(ValueError, match=f"a missing value in row {first}; missing='drop' leaves out rows in fit only"):
        drop.predict(holes)
    for make in (SNNKRegressor, SNNKFeatures):
        with pytest.raises(ValueError, match="no rows are left"):
            make(missing="drop").fit(np.full((5, 2), np.nan), np.arange(5))
    empty = np.c_[X, np.full(300, np.nan)]  # a column without a value is as good as none
    assert SNNKRegressor(**options, missing="mean").fit(empty, y).score(empty, y) > 0.9
    far = np.where(np.isnan(holes), np.inf, holes)
    for missing in ("mean", "drop"):
        with pytest.raises(ValueError, match="infinity"):
            SNNKRegressor(**options, missing=missing).fit(far, y)
    far = np.r_[holes, [[1e300, 0, 0]]]
    with pytest.raises(ValueError, match=r"X is 1e\+300 at row 300, column 0: too far"):
        drop.partial_fit(far, np.r_[y, 0])


def test_several_targets_are_each_fitted():
    X, y = data(300)
    both = np.stack([y, X[:, 2] ** 2], 1)
    model = SNNKRegressor(64, **DRAWN, alpha=0.1).fit(X, both)
    assert model.predict(X).shape == (300, 2) and model.score(X, both) > 0.9
    alone = SNNKRegressor(64, **DRAWN, alpha=0.1).fit(X, both[:, 1])
    np.testing.assert_allclose(model.predict(X)[:, 1], alone.predict(X), atol=1e-8)
    X, y = band(400)
    both = np.stack([y, X[:, 0] > 0.5], 1) + 0.0
    learnt = SNNKRegressor(32, random_state=0).fit(X, both)
    assert isinstance(learnt.map_, LearnedFeatures) and learnt.score(X, both) > 0.5


def collisions(n, seed):
    """Columns like those of HIGGS: skewed momenta, angles, and masses from products, of which one has a peak."""
    rng = np.random.default_rng(seed)
    signal = rng.random(n) < 0.53
    momenta = np.exp(0.5 * rng.normal(size=(n, 6))) * np.abs(rng.normal(size=(n, 6))) * (1 + 0.12 * signal[:, None])
    angles = rng.normal(size=(n, 4)) + 0.7 * signal[:, None] * rng.normal(size=(n, 1))
    masses = np.sqrt(momenta[:, :3] * momenta[:, 3:]) * np.exp(0.25 * rng.normal(size=(n, 3)))
    peak = signal & (rng.random(n) < 0.35)
    masses[peak, 1] = 1 + 0.05 * rng.normal(size=peak.sum())
    return np.c_[momenta, angles, masses].astype(np.float32), np.where(signal, "signal", "background")


def test_defaults_are_not_below_logistic_regression():
    """Both have the same fresh rows; the bound is five standard errors of the difference below none."""
    X, y = collisions(1500, 0)
    fresh, truth = collisions(10_000, 1)
    line = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y).predict(fresh) == truth
    ours = SNNKClassifier(128, random_state=0).fit(X, y).predict(fresh) == truth
    difference = ours.astype(float) - line
    assert difference.mean() > -5 * difference.std() / 100


@pytest.mark.once
def test_without_scikit_learn_the_error_names_the_extra():
    code = "import sys; sys.modules['sklearn'] = None; import snnk.sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "needs scikit-learn; install it with: pip install 'snnk[sklearn]'" in done.stderr


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
@pytest.mark.once
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


def test_options_have_the_names_values_and_defaults_of_a_fit():
    """Where scikit-learn has no word of its own, the word is that of FitConfig and of the command line."""
    words = {"n_components": "num_features", "alpha": "lam", "random_state": "seed"}
    ours = {words.get(name, name): p.default for name, p in inspect.signature(SNNKClassifier).parameters.items()}
    theirs = {field.name: field.default for field in fields(FitConfig)}
    shared = ("num_features", "feature_map", "bandwidth", "lam", "missing")
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert set(ours) - set(theirs) == {"class_weight", "discriminant", "standardize"}


@pytest.mark.parametrize("make", [SNNKFeatures, SNNKRegressor, SNNKClassifier])
def test_clones_and_files_are_the_same_estimator(make, tmp_path):
    X, y = data(60)
    y = y > y.mean() if make is SNNKClassifier else y
    model = make(15, random_state=0).fit(X, y)
    call = model.transform if make is SNNKFeatures else model.predict
    joblib.dump(model, tmp_path / "model")
    for other in (pickle.loads(pickle.dumps(model)), joblib.load(tmp_path / "model"), clone(model).fit(X, y)):
        found = other.transform(X) if make is SNNKFeatures else other.predict(X)
        np.testing.assert_array_equal(found, call(X))
    assert clone(model).get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        check_is_fitted(clone(model))


def test_grid_search_pipeline_and_column_transformer():
    X, y = data(150)
    grid = {"n_components": [16, 32], "bandwidth": [0.3, "auto"], "alpha": [1e-3, "gcv"]}
    search = GridSearchCV(SNNKRegressor(random_state=0, feature_map="random-fourier"), grid, cv=3)
    assert search.fit(X, y).best_score_ > 0.9
    parts = ColumnTransformer([("a", SNNKFeatures(16, random_state=0), [0, 1]), ("b", StandardScaler(), [2])])
    assert make_pipeline(parts, Ridge()).fit(X, y).score(X, y) > 0.8
    pipe = make_pipeline(SNNKFeatures(**SMALL), LogisticRegression())
    assert GridSearchCV(pipe, {"snnkfeatures__n_components": [8, 32]}, cv=3).fit(X, y > 0).best_score_ > 0.85


def test_features_learn_from_the_targets_of_a_pipeline():
    X, y = band(600)
    learnt = SNNKFeatures(**SMALL).fit(X, y)
    assert isinstance(learnt.map_, LearnedFeatures) and learnt.map_.num_features == 32
    assert not isinstance(SNNKFeatures(**SMALL).fit(X).map_, LearnedFeatures)  # nothing to learn from
    assert not isinstance(SNNKFeatures(**SMALL).fit(X[:199], y[:199]).map_, LearnedFeatures)
    fresh = band(2000, seed=1)
    scores = [
        make_pipeline(SNNKFeatures(**SMALL, feature_map=name), LogisticRegression()).fit(X, y).score(*fresh)
        for name in ("learned", "random-relu")
    ]
    assert scores[0] > scores[1] + 0.05


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (np.arange(240) % 3, True),
        (np.arange(240) % 20 + 0.0, True),
        (np.arange(240) % 21, False),  # more values than a few are numbers, as in the command line
        (np.arange(240) / 7, False),
        (np.array(["a", "b"])[np.arange(240) % 2], True),
    ],
)
def test_features_take_few_whole_numbers_for_classes(y, classes, monkeypatch):
    seen = []

    def learn(x, y, m, *, classes, **_):
        seen.append(classes)
        return FEATURE_MAPS["random-relu"](x.shape[1], m)

    monkeypatch.setattr("snnk.sklearn.features.learn", learn)
    SNNKFeatures(32).fit(data(240)[0], y)
    assert seen == [classes]


def test_refusals():
    X, y = data(20)
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        SNNKRegressor(8).fit(sparse.csr_matrix(X), y)
    with pytest.raises(ValueError, match="unknown feature map 'random-fouier'; did you mean 'random-fourier'"):
        SNNKRegressor(8, feature_map="random-fouier").fit(X, y)
    for wrong in (0, -1.0, "wide", None):
        with pytest.raises(ValueError, match="bandwidth must be a"):
            SNNKRegressor(8, bandwidth=wrong).fit(X, y)
    with pytest.raises(ValueError, match="unknown policy for missing values 'men'; did you mean 'mean'"):
        SNNKRegressor(8, missing="men").fit(X, y)
    with pytest.raises(ValueError, match=r"1d array of classes; got an array of shape \(20, 2\)"):
        SNNKClassifier(8).fit(X, np.stack([y > 0, y > 1], 1))
    several = MultiOutputClassifier(SNNKClassifier(8, random_state=0)).fit(X, np.stack([y > 0, y > 1], 1))
    assert several.predict(X).shape == (20, 2)
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


@pytest.mark.parametrize("order", ["sorted", "reversed"])
def test_the_calibration_does_not_depend_on_the_order_of_equal_rows(order):
    """900 inputs with about 50 rows each: an input of which only the first rows were held would have one class."""
    rng = np.random.default_rng(0)
    X = rng.integers(0, 30, (45_000, 2)).astype(float)
    y = (rng.random(45_000) < np.where(X.sum(1) > 29, 0.7, 0.3)).astype(int)
    rows = np.argsort(y, kind="stable")[:: 1 if order == "sorted" else -1]
    options = {"feature_map": "random-fourier", "bandwidth": 1.0, "alpha": 1.0, "random_state": 0}
    one, two = (SNNKClassifier(32, **options).fit(X[i], y[i]).predict_proba(X[:500]) for i in (slice(None), rows))
    np.testing.assert_allclose(one, two, atol=1e-6)
