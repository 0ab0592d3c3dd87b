"""A fit to the predictions of a teacher: numbers, names of classes, and probabilities."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from snnk.tabular import FitConfig, Part, TableModel, fit, prepare, teach

ROWS = 3000
CONFIG = FitConfig("y", 64, feature_map="random-fourier", bandwidth=1.0)


@pytest.fixture
def rows():
    """Rows without labels, and a target that the teacher is not shown."""
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    return pa.table({"a": x[:, 0], "b": x[:, 1], "y": np.zeros(ROWS)})


def probabilities(batch):
    """A smooth teacher of three classes."""
    a, b = (batch[name].to_numpy() for name in "ab")
    scores = np.exp(np.stack([np.sin(2 * a), b, 0 * a], 1))
    return scores / scores.sum(1, keepdims=True)


def test_numbers(rows, tmp_path):
    assert teach(rows, tmp_path / "t.parquet", lambda batch: np.sin(batch["a"].to_numpy()), "y") == ROWS
    report = fit(tmp_path / "t.parquet", tmp_path / "m", CONFIG)
    assert report["task"] == "regression" and report["quality"]["r2"] > 0.999


def test_the_teacher_sees_each_row_once_and_no_target(rows, tmp_path):
    seen = []

    def teacher(batch):
        seen.append(batch)
        return np.array(["no", "yes"])[(batch["a"].to_numpy() > 0).astype(int)]

    teach(lambda: rows.to_batches(max_chunksize=700), tmp_path / "t.parquet", teacher, "y")
    assert sum(batch.num_rows for batch in seen) == ROWS and {*seen[0].schema.names} == {"a", "b"}
    found = pq.read_table(tmp_path / "t.parquet")
    assert found["a"].equals(rows["a"]) and set(found["y"].to_pylist()) == {"no", "yes"}


def test_probabilities_are_learnt_as_such(rows, tmp_path):
    """The student's probabilities are those of the teacher, not certainties about its likeliest class."""
    teach(rows, tmp_path / "t.parquet", probabilities, "y", classes=["x", "z", "m"])
    report = fit(tmp_path / "t.parquet", tmp_path / "m", CONFIG)
    model, batch = TableModel.load(tmp_path / "m"), rows.combine_chunks().to_batches()[0]
    assert model.columns.target.categories == ("m", "x", "z") and report["task"] == "classification"
    x, _, _ = model.columns.encode(batch, "rows", with_target=False)
    expected = probabilities(batch)[:, [2, 0, 1]]
    assert np.abs(model.probabilities(x).numpy() - expected).mean() < 0.03
    hard = np.abs(np.eye(3)[expected.argmax(1)] - expected).mean()
    assert hard > 0.2  # what is lost if only names are kept
    assert report["quality"]["accuracy"] > 0.9  # the share of rows with the teacher's class
    found = model.write_predictions(tmp_path / "t.parquet", tmp_path / "p.csv")
    assert found.score["accuracy"] > 0.9


@pytest.mark.parametrize(("missing", "count"), [("raise", 0), ("drop", ROWS - 1)])
def test_missing_probabilities(missing, count, rows, tmp_path):
    teach(rows, tmp_path / "t.parquet", probabilities, "y", classes=["x", "z", "m"])
    table = pq.read_table(tmp_path / "t.parquet")
    column = pa.array([None, *table["y"].to_pylist()[1:]], table["y"].type)
    table = table.set_column(2, "y", column)
    config = FitConfig("y", 16, feature_map="random-fourier", bandwidth=1.0, missing=missing)
    if count:
        assert Part(prepare(table, config)).read(table).rows == count
        return
    with pytest.raises(ValueError, match=r"missing.* \(y: 1\), the first at row 0"):
        prepare(table, config)


@pytest.mark.parametrize("values", [[0.5, 0.6], [-0.1, 1.1]])
def test_probabilities_that_are_none(values, tmp_path):
    soft = [{"no": 0.25, "yes": 0.75}] * 30
    table = pa.table({"a": np.arange(31.0), "y": [*soft, dict(zip(("no", "yes"), values, strict=True))]})
    with pytest.raises(ValueError, match=r"'y' at row .* must be at least 0 and have the sum 1; got"):
        fit(table, tmp_path / "m", CONFIG)


@pytest.mark.parametrize(
    ("teacher", "classes", "message"),
    [
        (lambda batch: np.zeros(3), None, r"must return \(3000,\), one prediction per row"),
        (probabilities, None, r"for probabilities, name the classes; got \(3000, 3\)"),
        (probabilities, ["x", "z"], r"must return \(3000, 2\), probabilities; got \(3000, 3\)"),
        (probabilities, ["x", "x", "z"], "two or more different names"),
    ],
)
@pytest.mark.once
def test_bad_teachers_leave_no_file(teacher, classes, message, rows, tmp_path):
    with pytest.raises(ValueError, match=message):
        teach(rows, tmp_path / "t.parquet", teacher, "y", classes=classes)
    assert not list(tmp_path.iterdir())
    (tmp_path / "t.parquet").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        teach(rows, tmp_path / "t.parquet", teacher, "y", classes=classes)


@pytest.mark.slow
def test_the_example_runs():
    pytest.importorskip("sklearn")
    script = Path(__file__).parents[2] / "examples" / "teach.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"agreement with the teacher +([0-9.]+)", done.stdout)[1]) > 0.9
    assert len(re.findall(r"accuracy 0\.7\d\d, [0-9.]+ s of processor time per million", done.stdout)) == 2
