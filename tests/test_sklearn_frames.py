"""Frames of pandas, Polars and pyarrow in scikit-learn's estimators."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from snnk.sklearn import SNNKClassifier, SNNKFeatures, SNNKRegressor

pa = pytest.importorskip("pyarrow")
DRAWN = {"feature_map": "random-fourier", "bandwidth": 1.0, "random_state": 0}


def columns(n=300, seed=0):
    """A number, a text, a flag and a whole number, and classes that depend on the first two."""
    rng = np.random.default_rng(seed)
    found = {
        "age": rng.normal(40, 10, n),
        "town": rng.choice(["north", "south", "west"], n),
        "flag": rng.random(n) < 0.5,
        "count": rng.integers(0, 5, n),
    }
    return found, (found["age"] > 40) ^ (found["town"] == "south")


def as_pandas(found):
    pd = pytest.importorskip("pandas")
    return pd.DataFrame(found)


def as_pandas_categories(found):
    return as_pandas(found).astype({"town": "category", "count": "Int64"})


def as_polars(found):
    pl = pytest.importorskip("polars")
    return pl.DataFrame(found)


def as_polars_categories(found):
    pl = pytest.importorskip("polars")
    return as_polars(found).with_columns(pl.col("town").cast(pl.Categorical))


def as_arrow(found):
    return pa.table(found)


FRAMES = [as_pandas, as_pandas_categories, as_polars, as_polars_categories, as_arrow]


@pytest.mark.parametrize("frame", FRAMES)
def test_categories_become_inputs_and_every_frame_gives_the_same_model(frame):
    found, y = columns()
    X = frame(found)
    model = SNNKClassifier(64, **DRAWN).fit(X, y)
    assert list(model.feature_names_in_) == list(found) and model.n_features_in_ == 4
    assert model.columns_.names == ["age", "town=north", "town=south", "town=west", "flag", "count"]
    first = SNNKClassifier(64, **DRAWN).fit(as_pandas(found), y)
    np.testing.assert_allclose(model.predict_proba(X), first.predict_proba(as_pandas(found)), atol=1e-12)
    fresh, truth = columns(1000, seed=1)
    assert model.score(frame(fresh), truth) > 0.9
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


@pytest.mark.parametrize("frame", [as_pandas, as_polars])
def test_frames_of_numbers_are_arrays_with_names(frame):
    found, y = columns()
    numbers = {name: found[name] for name in ("age", "flag", "count")}
    model = SNNKRegressor(32, **DRAWN).fit(frame(numbers), y)
    array = np.stack([*numbers.values()], 1).astype(float)
    expected = SNNKRegressor(32, **DRAWN).fit(array, y).predict(array)
    np.testing.assert_allclose(model.predict(frame(numbers)), expected, atol=1e-12)
    assert list(model.feature_names_in_) == ["age", "flag", "count"] and model.columns_ is None


def test_a_frame_of_numbers_needs_no_pyarrow():
    pytest.importorskip("pandas")
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "import pandas as pd; from snnk.sklearn import SNNKRegressor\n"
        "X = pd.DataFrame({'a': [1.0, 2.0, 3.0], 'b': [True, False, True]})\n"
        "print(SNNKRegressor(4).fit(X, [1, 2, 3]).predict(X).shape)\n"
        "SNNKRegressor(4).fit(X.assign(c=pd.Categorical(['x', 'y', 'z'])), [1, 2, 3])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(3,)", done.stderr
    assert "ImportError: frames with texts, categories or dates need pyarrow" in done.stderr
    assert "pip install 'snnk[tables]'" in done.stderr


def test_columns_must_stay_as_they_were():
    found, y = columns()
    X = as_pandas(found)
    model = SNNKClassifier(32, **DRAWN).fit(X, y)
    with pytest.raises(ValueError, match=r"feature names should match(.|\n)*same order"):
        model.predict(X[["town", "age", "flag", "count"]])
    with pytest.raises(ValueError, match=r"feature names should match(.|\n)*unseen at fit time(.|\n)*town2"):
        model.predict(X.rename(columns={"town": "town2"}))
    with pytest.raises(ValueError, match=r"feature names should match(.|\n)*missing(.|\n)*count"):
        model.predict(X.drop(columns="count"))
    with pytest.raises(TypeError, match="X must be a frame with the columns age, town, flag, count; got ndarray"):
        model.predict(np.zeros((3, 4)))
    with pytest.raises(ValueError, match="0 sample"):
        model.predict(X[:0])
    with pytest.raises(ValueError, match="are standardised; use standardize=True"):
        SNNKClassifier(32, standardize=False).fit(X, y)


def test_categories_that_are_new_at_predict_count_as_none_of_the_known():
    found, y = columns()
    model = SNNKClassifier(32, **DRAWN).fit(as_pandas(found), y)
    new = as_pandas({**found, "town": ["elsewhere"] * 300})
    assert model.predict_proba(new).shape == (300, 2)
    x = model._all_inputs(new)
    assert float(x[:, 1:4].abs().sum()) == 0 and float(model._all_inputs(as_pandas(found))[:, 1:4].sum()) == 300


@pytest.mark.parametrize("frame", [as_pandas, as_polars])
def test_missing_values_of_frames(frame):
    found, y = columns()
    town = np.array(found["town"], dtype=object)
    town[7] = None
    age = found["age"].copy()
    age[11] = np.nan
    X = frame({**found, "town": town, "age": age})
    with pytest.raises(ValueError, match=r"age: 1.*the first at row 11 of X"):
        SNNKClassifier(32, **DRAWN).fit(X, y)
    mean = SNNKClassifier(32, **DRAWN, missing="mean").fit(X, y)
    assert mean.predict(X).shape == (300,)
    x = mean._all_inputs(X)
    assert float(x[7, 1:4].abs().sum()) == 0 and float(x[11, 0]) == 0
    drop = SNNKClassifier(32, **DRAWN, missing="drop").fit(X, y)
    assert int(drop.stats_.rows.sum()) == 298
    with pytest.raises(ValueError, match="a missing value in row 7; missing='drop' leaves out rows in fit only"):
        drop.predict(X)
    age[11] = np.inf
    for missing in ("raise", "mean", "drop"):
        with pytest.raises(ValueError, match="X is infinite at row 11, column 'age'"):
            SNNKClassifier(32, **DRAWN, missing=missing).fit(frame({**found, "age": age}), y)


def test_weights_are_numbers_of_rows_of_a_frame_too():
    found, y = columns()
    X, weight = as_pandas(found), np.random.default_rng(0).integers(0, 4, 300)
    copies = np.repeat(np.arange(300), weight)
    weighted = SNNKClassifier(24, **DRAWN).fit(X, y, sample_weight=weight)
    repeated = SNNKClassifier(24, **DRAWN).fit(X.iloc[copies], y[copies])
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-8)


def test_partial_fit_has_the_columns_of_the_first_frame():
    found, y = columns(600)
    X = as_pandas(found)
    models = []
    for cuts in ([200], [200, 201, 450]):
        models.append(SNNKClassifier(24, **DRAWN))
        for part in np.array_split(np.arange(600), cuts):
            models[-1].partial_fit(X.iloc[part], y[part])
    np.testing.assert_allclose(models[0].predict_proba(X), models[1].predict_proba(X), atol=1e-10)
    one = SNNKClassifier(24, **DRAWN).partial_fit(X[y][:50], y[y][:50], classes=[False, True])  # of a single class
    assert one.partial_fit(X, y).score(X, y) > 0.85


def test_transformer_and_pipelines():
    found, y = columns()
    X = as_pandas(found)
    for container, frame in (("pandas", as_pandas), ("polars", as_polars)):
        features = SNNKFeatures(4, random_state=0).set_output(transform=container)
        names = list(features.fit_transform(frame(found), y).columns)
        assert names == [f"snnkfeatures{i}" for i in range(4)] == list(features.get_feature_names_out())
    pipe = make_pipeline(SNNKFeatures(64, **DRAWN), LogisticRegression())
    assert cross_val_score(pipe, X, y, cv=3).mean() > 0.65
    assert SNNKFeatures(8, **DRAWN).fit(X).transform(X).shape == (300, 8)
    parts = make_column_transformer((OneHotEncoder(), ["town"]), (StandardScaler(), ["age", "count"]))
    assert cross_val_score(make_pipeline(parts, SNNKClassifier(64, **DRAWN)), X, y, cv=3).mean() > 0.85
    assert cross_val_score(SNNKClassifier(64, **DRAWN), X, y, cv=3).mean() > 0.85


def test_codes_of_categories_do_not_give_targets_away():
    """800 names with small effects, four rows each, help on fresh rows. Codes with the row's own target would hurt."""
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    effects = rng.normal(size=800) / 2

    def draw(n):
        i, a = rng.integers(0, 800, n), rng.normal(size=n)
        return pd.DataFrame({"name": [f"n{j}" for j in i], "a": a}), effects[i] + a + rng.normal(size=n)

    (X, y), (fresh, truth) = draw(3200), draw(3200)
    both, alone = (
        SNNKRegressor(32, random_state=0).fit(X[columns], y).score(fresh[columns], truth)
        for columns in (["name", "a"], ["a"])
    )
    assert both > alone + 0.01


def test_dates_are_features():
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    day = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 24 * 300, 2000), unit="h")
    X, y = pd.DataFrame({"day": day, "a": rng.normal(size=2000)}), np.sin(2 * np.pi * day.hour / 24).to_numpy()
    model = SNNKRegressor(64, random_state=0).fit(X[:1500], y[:1500])
    assert model.score(X[1500:], y[1500:]) > 0.95
