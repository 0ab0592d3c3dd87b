import json

import snnk


def test_estimate_writes_rows_and_picture(run, tmp_path):
    args = [
        "estimate",
        "--in-features",
        "8",
        "--num-features",
        "16,64",
        "--draws",
        "3",
        "--activation",
        "tanh",
        "--out",
        tmp_path,
    ]
    code, out, _ = run(*args)
    assert code == 0 and "predicted" in out
    stored = json.loads((tmp_path / "estimate.json").read_text())
    assert [row["num_features"] for row in stored["rows"]] == [16, 64]
    assert stored["config"]["activation"] == "tanh" and stored["environment"]["snnk"] == snnk.__version__
    assert all(row["urf"] > 0 and row["seed"] == 0 for row in stored["rows"])
    assert (tmp_path / "estimate.png").read_bytes()[:4] == b"\x89PNG"
    assert {path.name for path in tmp_path.iterdir()} == {"estimate.json", "estimate.png"}


def test_unwritable_folder_and_foreign_file(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = run(
        "estimate", "--in-features", "4", "--num-features", "4", "--draws", "1", "--out", tmp_path / "file" / "x"
    )
    assert code == 2 and err.count("\n") == 1 and (tmp_path / "file").read_text() == "mine"
    code, _, err = run(
        "estimate", "--in-features", "4", "--num-features", "4", "--draws", "1", "--out", tmp_path / "file"
    )
    assert code == 2 and f"{tmp_path / 'file'} is no folder that can be written to" in err
    for foreign in ("{}", '{"config": [], "environment": {}, "rows": []}'):
        (tmp_path / "estimate.json").write_text(foreign)
        code, _, err = run("estimate", "--in-features", "4", "--num-features", "4", "--draws", "1", "--out", tmp_path)
        assert code == 2 and "not a result file of snnk" in err
        assert (tmp_path / "estimate.json").read_text() == foreign
