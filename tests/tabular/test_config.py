"""Configurations are checked, and those from before the rename load."""

import json
from dataclasses import replace

import numpy as np
import pytest

from snnk.tabular import FitConfig, TableModel, fit

from helpers.tables import CONFIG, predictions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"feature_map": "random-rleu"}, "unknown feature map 'random-rleu'; did you mean 'random-relu'"),
        ({"num_features": 63, "feature_map": "random-fourier"}, "num_features must be even"),
        ({"num_features": 0}, "num_features must be a positive integer"),
        ({"num_features": 8193, "feature_map": "learned-deep"}, "learned-deep has at most 8192 features; got 8193"),
        ({"bandwidth": 0.0}, "bandwidth must be a positive number"),
        ({"task": "ranking"}, "unknown task 'ranking'"),
        ({"missing": "zero"}, "unknown policy for missing values 'zero'"),
        ({"lam": "best"}, "lam must be 'gcv' or a number >= 0; got 'best'"),
        ({"lam": -1.0}, "lam must be 'gcv' or a number >= 0; got -1.0"),
        ({"block_dtype": "float16"}, "unknown block_dtype 'float16'"),
    ],
)
@pytest.mark.once
def test_bad_configurations(wrong, message):
    with pytest.raises(ValueError, match=message):
        FitConfig("y", **wrong)


@pytest.mark.parametrize(("word", "old"), [("random-fourier", "fourier"), ("random-relu", "relu")])
def test_words_from_before_the_rename_load(word, old, parquet, tmp_path):
    fit(parquet, tmp_path / "m", replace(CONFIG, feature_map=word))
    path = tmp_path / "m" / "model.json"
    stored, expected = json.loads(path.read_text()), predictions(tmp_path / "m", parquet)
    assert stored["config"]["feature_map"] == word
    stored["config"]["feature_map"] = old
    path.write_text(json.dumps(stored))
    assert TableModel.load(tmp_path / "m").config.feature_map == word
    np.testing.assert_array_equal(predictions(tmp_path / "m", parquet), expected)
    with pytest.raises(ValueError, match=f"unknown feature map {old!r}; did you mean {word!r}"):
        FitConfig("y", feature_map=old)
