import pytest


@pytest.fixture
def model(run, tmp_path):
    rows = "".join(f"{i % 7},{'uv'[i % 2]},{i % 3}\n" for i in range(60))
    (tmp_path / "t.csv").write_text(f"a,k,y\n{rows}")
    assert run("fit", tmp_path / "t.csv", "--target", "y", "--features", 8, "--out", tmp_path / "model")[0] == 0
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
    header, *found = (tmp_path / "p.csv").read_text().split()
    right = sum(int(value) == i % 3 for i, value in enumerate(found))
    assert code == 0 and header == "predicted_y" and f"60 predictions, accuracy {right / 60:.4f}" in out
