import csv
import math
import re
from functools import partial

import pandas
import pytest
import torch
import transformers

from helpers.texts import save
from helpers.tuning import TINY


@pytest.fixture
def model(run, tmp_path):
    rows = "".join(f"{i % 7},{'uv'[i % 2]},{i % 3}\n" for i in range(60))
    (tmp_path / "t.csv").write_text(f"a,k,y\n{rows}")
    assert run("fit", tmp_path / "t.csv", "--target", "y", "--num-features", 8, "--out", tmp_path / "model")[0] == 0
    return tmp_path / "model"


@pytest.mark.parametrize(("missing", "predictions"), [("mean", 5), ("drop", 3)])
def test_values_unlike_the_training_data_are_counted(run, model, tmp_path, missing, predictions):
    """Missing values are not among them."""
    (tmp_path / "new.csv").write_text("a,k\n1,u\n1e30,u\n,u\n2,w\n3,v\n")
    code, out, _ = run("predict", model, tmp_path / "new.csv", "--missing", missing, "--out", tmp_path / "p.csv")
    assert code == 0 and f"{predictions} predictions" in out
    for column in "ak":
        assert f"{column}: 1 values not seen in training, or far outside its range, were ignored" in out
    code, _, err = run("predict", model, tmp_path / "new.csv", "--out", tmp_path / "q.csv")
    assert code == 2 and "policy for missing values" in err


def test_an_output_that_exists_is_kept(run, model, tmp_path):
    (tmp_path / "p.csv").write_text("mine")
    code, _, err = run("predict", model, tmp_path / "t.csv", "--out", tmp_path / "p.csv")
    assert code == 2 and "exists already" in err and (tmp_path / "p.csv").read_text() == "mine"


def test_the_score_is_shown_if_the_table_has_the_target(run, model, tmp_path):
    code, out, _ = run("predict", model, tmp_path / "t.csv", "--out", tmp_path / "p.csv")
    with (tmp_path / "p.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    own = [{c: float(row[f"probability_{c}"]) for c in "012"} for row in found]
    right = sum(row["predicted_y"] == str(i % 3) for i, row in enumerate(found))
    assert all(row["predicted_y"] == max(p, key=p.get) for row, p in zip(found, own, strict=True))
    loss = sum(-math.log(p[str(i % 3)]) for i, p in enumerate(own)) / 60
    assert code == 0 and list(found[0]) == ["predicted_y", *(f"probability_{c}" for c in "012")]
    said = re.search(r"60 predictions, accuracy (\S+), AUC (\S+), log-loss (\S+)", out)
    assert float(said[1]) == round(right / 60, 4) and 0 <= float(said[2]) <= 1
    assert abs(float(said[3]) - loss) < 1e-4  # four decimals are shown


def test_a_classifier_of_transformers_is_told_from_a_model_of_fit(run, model, tmp_path):
    torch.manual_seed(0)
    save(transformers.BertForSequenceClassification(transformers.BertConfig(**TINY)), tmp_path / "bert")
    (tmp_path / "rows.csv").write_text("id,text\n1,w1 w2\n2,w3\n")
    args = tmp_path / "rows.csv", "--text", "text"
    code, out, _ = run("predict", tmp_path / "bert", *args, "--out", tmp_path / "p.jsonl")
    assert code == 0 and "2 predictions" in out and len((tmp_path / "p.jsonl").read_text().splitlines()) == 2
    for folder, options, message in [
        (model, ("--out", tmp_path / "q.csv"), "is no model of texts or images; leave out --text"),
        (tmp_path / "bert", ("--missing", "drop", "--out", tmp_path / "q.csv"), "--missing is for models of snnk fit"),
        (tmp_path / "none", ("--out", tmp_path / "q.csv"), "none is no folder and cannot be the name of a model"),
    ]:
        code, _, err = run("predict", folder, *args, *options)
        assert code == 2 and message in err
    code, _, err = run("predict", model, tmp_path / "t.csv", "--out", tmp_path / "q.xlsx")
    assert code == 2 and "must end in .csv, .jsonl, .parquet" in err
    code, _, err = run("predict", tmp_path, tmp_path / "t.csv", "--out", tmp_path / "q.csv")
    assert code == 2 and "holds no model of snnk fit" in err


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_key_columns_are_copied_into_every_format(run, model, tmp_path, kind):
    out = tmp_path / f"p.{kind}"
    assert run("predict", model, tmp_path / "t.csv", "--key", "k,a", "--no-probabilities", "--out", out)[0] == 0
    found = {"csv": pandas.read_csv, "jsonl": partial(pandas.read_json, lines=True), "parquet": pandas.read_parquet}
    rows = found[kind](out)
    assert list(rows) == ["k", "a", "predicted_y"] and len(rows) == 60
    assert list(rows["k"]) == ["uv"[i % 2] for i in range(60)] and list(rows["a"]) == [i % 7 for i in range(60)]
    assert set(map(str, rows["predicted_y"])) <= {"0", "1", "2"}
