"""A table has the same rows and the same fingerprint in every format, and bad files are refused by name."""

import os
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

from snnk.tabular import TableModel, fit
from snnk.tabular.source import Table

from helpers.tables import CONFIG, make_table, weights


def test_every_format_gives_the_same_model(parquet, tmp_path):
    t = make_table()
    pa.csv.write_csv(t, tmp_path / "data.csv")
    pa.feather.write_feather(t, tmp_path / "data.feather")
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    pq.write_table(t.slice(0, 1000), folder / "a.parquet")
    pq.write_table(t.slice(1000), folder / "b.parquet")
    fit(parquet, tmp_path / "m", CONFIG)
    expected = weights(tmp_path / "m")
    for i, source in enumerate((tmp_path / "data.csv", tmp_path / "data.feather", tmp_path / "folder")):
        fit(source, tmp_path / f"m{i}", CONFIG)
        assert torch.allclose(weights(tmp_path / f"m{i}"), expected, rtol=1e-8, atol=1e-10)


def test_hugging_face_dataset(parquet, tmp_path):
    datasets = pytest.importorskip("datasets")
    source = datasets.Dataset(make_table())
    fit(source, tmp_path / "m", CONFIG)
    fit(parquet, tmp_path / "p", CONFIG)
    assert torch.allclose(weights(tmp_path / "m"), weights(tmp_path / "p"), rtol=1e-8, atol=1e-10)
    turned = source.select(range(2999, -1, -1))  # an index of rows in front of the table
    found = np.concatenate([p for p, _ in TableModel.load(tmp_path / "m").predict(turned)])
    same = np.concatenate([p for p, _ in TableModel.load(tmp_path / "p").predict(parquet)])
    np.testing.assert_allclose(found[::-1], same, rtol=1e-4, atol=1e-4)


def test_files_of_a_folder_must_be_alike(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    pq.write_table(pa.table({"a": [1, 2], "y": [0.5, 1.5]}), folder / "1.parquet")
    pq.write_table(pa.table({"a": [1.5, 2.5], "y": [0.5, 1.5]}), folder / "2.parquet")
    with pytest.raises(
        ValueError, match=r"column 'a' is int64 in 1.parquet and double in 2.parquet; make the files alike"
    ):
        fit(folder, tmp_path / "m", CONFIG)
    pq.write_table(pa.table({"a": [1, 2], "b": [1, 2], "y": [0.5, 1.5]}), folder / "2.parquet")
    with pytest.raises(ValueError, match=r"column 'b' is absent in 1.parquet and int64 in 2.parquet"):
        fit(folder, tmp_path / "m", CONFIG)


def test_empty_cells_of_a_csv_are_missing(tmp_path):
    lines = ["a,k,y", *(f"{i},{'red' if i % 2 else 'blue'},{i % 7}.5" for i in range(100)), "1,,2.5"]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"\(k: 1\), the first at row 100 of t.csv"):
        fit(tmp_path / "t.csv", tmp_path / "m", CONFIG)
    report = fit(tmp_path / "t.csv", tmp_path / "m", replace(CONFIG, missing="drop"))
    assert report["rows"] == 100 and TableModel.load(tmp_path / "m").columns.inputs[1].categories == ("blue", "red")


def test_what_no_table_can_be_made_of(tmp_path):
    for source, got in ((3, "int"), ({"y": [1.0]}, "dict"), (b"y", "bytes")):
        with pytest.raises(TypeError, match=rf"a path, a frame or .*; got {got}"):
            fit(source, tmp_path / "m", CONFIG)
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset(make_table())
    with pytest.raises(TypeError, match="got DatasetDict"):
        fit(datasets.DatasetDict(train=rows), tmp_path / "m", CONFIG)
    with pytest.raises(TypeError, match="record batches, tables or frames; got dict"):
        fit(rows.to_iterable_dataset(), tmp_path / "m", CONFIG)


def test_files_that_are_no_table(parquet, tmp_path):
    out = tmp_path / "m"
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        fit(tmp_path / "nothing", out, CONFIG)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds nothing; expected files of one format"):
        fit(tmp_path / "empty", out, CONFIG)
    (tmp_path / "cut.parquet").write_bytes(parquet.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"cut.parquet cannot be read as parquet"):
        fit(tmp_path / "cut.parquet", out, CONFIG)
    assert not out.exists()


def test_a_table_that_is_replaced_while_it_is_read(parquet, tmp_path):
    """The new file has the same size and time; it is found in the first pass and in the second."""
    for when in ("reading columns", "fitting"):
        out = tmp_path / when

        def swap(what, rows, total, when=when):
            if what == when and rows > 1000:
                other = tmp_path / "other"
                other.write_bytes(parquet.read_bytes())
                os.utime(other, ns=(parquet.stat().st_atime_ns, parquet.stat().st_mtime_ns))
                other.replace(parquet)

        with pytest.raises(ValueError, match=r"data.parquet was changed or replaced while it was read; run the same"):
            fit(parquet, out, CONFIG, checkpoint_seconds=0, progress=swap)
        fit(parquet, out, CONFIG)  # the advice
    fit(parquet, tmp_path / "calm", CONFIG)
    assert torch.allclose(weights(out), weights(tmp_path / "calm"), rtol=1e-9, atol=1e-12)


def test_fingerprints(parquet, tmp_path, monkeypatch):
    """Workers that share the pieces find the same one. A copy has it, too; one changed row has another."""
    monkeypatch.setattr("snnk.tabular.source.PIECE_BYTES", 5000)
    one = Table(parquet).fingerprint()
    pieces = []
    for rank in range(3):
        Table(parquet).fingerprint(rank, 3, lambda found: pieces.append(found) or [found])
    assert sum(map(len, pieces)) > 10 and Table(parquet).fingerprint(0, 3, lambda found: pieces) == one
    content = bytearray(parquet.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / parquet.name).write_bytes(parquet.read_bytes())
    assert Table(tmp_path / "other" / parquet.name).fingerprint() == one
    (tmp_path / "other" / parquet.name).write_bytes(content)
    assert Table(tmp_path / "other" / parquet.name).fingerprint() != one
    datasets = pytest.importorskip("datasets")
    rows = make_table()
    x = rows["x0"].to_numpy().copy()
    found = [Table(datasets.Dataset(rows)).fingerprint()]
    x[1500] += 1e-9
    for table in (make_table(), rows.set_column(0, "x0", pa.array(x))):
        found.append(Table(datasets.Dataset(table)).fingerprint())
    assert found[0] == found[1] != found[2]
