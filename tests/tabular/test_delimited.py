"""Files of delimited text are read by their header, or refused by the first byte or value that is wrong."""

import gzip
from dataclasses import replace

import pyarrow as pa
import pyarrow.csv
import pytest
import torch

from snnk.tabular import FitConfig, Part, TableModel, fit, prepare
from snnk.tabular.delimited import HEADER_BYTES, find_not_utf8, read_header
from snnk.tabular.source import Table

from helpers.tables import CONFIG, make_table, weights

HEADERS = {
    "a,b": (",", ["a", "b"]),
    "a;b": (";", ["a", "b"]),
    "a\tb": ("\t", ["a", "b"]),
    '"a;b;c",d': (",", ["a;b;c", "d"]),
    '"a\nb";c': (";", ["a\nb", "c"]),
    '"say ""x,y,z""";b': (";", ['say "x,y,z"', "b"]),
    "a": (",", ["a"]),
    "a,b;c": (",", ["a", "b;c"]),  # a tie goes to the delimiter of the ending
}


@pytest.mark.parametrize("line", HEADERS)
def test_headers(line, tmp_path):
    (tmp_path / "t.csv").write_text(line + "\n1\n")
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress((line + "\n1\n").encode()))
    for name in ("t.csv", "t.csv.gz"):
        delimiter, names = HEADERS[line]
        assert read_header(tmp_path / name)[:2] == (names, delimiter)


def test_decimal_commas(tmp_path):
    path = tmp_path / "t.csv"
    for content, decimal in (
        ("a;b\n1,5;2\n", ","),
        ("a\tb\n2\t-1,5\n", ","),
        ("a;b\n1.5;2\n", "."),
        ("a;b\n1,5;2.5\n", "."),  # 1,5 may be a text, or a pair
        ("a,b\n1,5\n", "."),
        ("a;b\nx1,5;2\n", "."),
    ):
        path.write_text(content)
        assert read_header(path).decimal == decimal, content


def test_every_form_of_text_gives_the_same_model(parquet, tmp_path):
    fit(parquet, tmp_path / "m", CONFIG)
    expected, table = weights(tmp_path / "m"), make_table()
    forms = {"a.tsv": "\t", "b.csv.gz": ",", "c.tsv.gz": "\t", "d.csv": ";"}
    for name, delimiter in forms.items():
        sink = pa.BufferOutputStream()
        pa.csv.write_csv(table, sink, pa.csv.WriteOptions(delimiter=delimiter))
        content = sink.getvalue().to_pybytes()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        fit(tmp_path / name, tmp_path / f"m-{name}", CONFIG)
        assert torch.allclose(weights(tmp_path / f"m-{name}"), expected, rtol=1e-8, atol=1e-10)
    (tmp_path / "folder").mkdir()
    for name in ("a.tsv", "d.csv"):
        (tmp_path / name).rename(tmp_path / "folder" / name)
    with pytest.raises(ValueError, match=r"a.tsv has '\\t' between its cells and d.csv has ';'; make them alike"):
        Table(tmp_path / "folder")


@pytest.mark.parametrize("place", [0, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_the_first_byte_that_is_no_utf8(place, tmp_path):
    """Characters of several bytes lie across the borders of what is read at once."""
    path = tmp_path / "t.csv"
    start = ("é\n" * place).encode()[:place]
    start = start[:-1] + b"x" if start.endswith(b"\xc3") else start
    path.write_bytes(start + b"\xff\n\xe9")
    lines = start.count(b"\n") + 1
    assert f"byte {place}, in line {lines}, is 0xFF" in find_not_utf8(path, "t.csv")
    path.write_bytes(start)
    assert find_not_utf8(path, "t.csv") == ""
    path.write_bytes(start + "é".encode()[:1])
    assert "ends within a character" in find_not_utf8(path, "t.csv")


def test_the_advice_on_a_spoiled_column(tmp_path):
    path, bad = tmp_path / "t.csv", "1.5,abc,0.25\n"
    rows = [f"{i % 7}.25,{i},{(i % 7) / 2}\n" for i in range(100_000)]
    content = ["x,k,y\n", *rows, bad, *rows[:10]]
    path.write_text("".join(content))
    with pytest.raises(ValueError, match=r"column 'k' has 'abc' at row 100000 of t.csv, and numbers in the first"):
        fit(path, tmp_path / "m", CONFIG)
    assert fit(path, tmp_path / "drop", replace(CONFIG, drop=("k",)))["rows"] == 100_011
    path.write_text("".join(content).replace("abc", ""))
    assert fit(path, tmp_path / "empty", replace(CONFIG, missing="drop"))["rows"] == 100_010


def test_duplicate_names_at_predict(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{i},{i / 2}\n" for i in range(50)))
    fit(path, tmp_path / "m", CONFIG)
    path.write_text("x,x,z,z\n1,2,3,4\n")
    with pytest.raises(ValueError, match=r"t.csv has several columns with the name 'x', 'z'; rename all but one"):
        TableModel.load(tmp_path / "m").write_predictions(path, tmp_path / "p.csv")


@pytest.mark.parametrize("row", [0, 70, 99])
def test_a_text_among_numbers_is_named_by_its_row(row, tmp_path):
    """pyarrow makes texts of the whole column: without a word, its numbers would become categories."""
    values = [f"{0.5 * i}" for i in range(100)]
    values[row] = "12 km"
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "".join(f"{value},{i}\n" for i, value in enumerate(values)))
    with pytest.raises(ValueError, match=rf"column 'a' has '12 km' at row {row} of t.csv.*, and numbers in 99 rows"):
        fit(path, tmp_path / "m", FitConfig("y", 16))
    path.write_text(path.read_text().replace("12 km", ""))  # the advice
    fit(path, tmp_path / "m", FitConfig("y", 16, missing="drop"))


def test_codes_with_a_letter_stay_categories(tmp_path):
    """Few different values are categories, and so are texts that are seldom numbers."""
    path = tmp_path / "t.csv"
    lines = [f"{'X' if i == 50 else i % 7},{'n' if i % 3 else ''}{i % 30},{i}" for i in range(100)]
    path.write_text("\n".join(["code,name,y", *lines]) + "\n")
    fit(path, tmp_path / "m", FitConfig("y", 16, task="regression"))
    assert [column.kind for column in TableModel.load(tmp_path / "m").columns.inputs] == ["category"] * 2


def test_texts_of_the_training_stay_texts_in_other_files(tmp_path):
    """A file that has only those that look like numbers or flags is read like the whole one."""
    zips, flags = ["01234", "05678", "AB123"], ["true", "false", "unknown"]
    rows = [f"{zips[i % 3]},{flags[i // 3 % 3]},{flags[i % 3]}" for i in range(300)]
    some = [row for row in rows if "AB123" not in row and "unknown" not in row]
    for name, lines in (("train", rows), ("some", some)):
        (tmp_path / f"{name}.csv").write_text("\n".join(["zip,flag,y", *lines]) + "\n")
    config = FitConfig("y", 16, feature_map="random-fourier", bandwidth=1.0)
    fit(tmp_path / "train.csv", tmp_path / "m", config)
    found = TableModel.load(tmp_path / "m").write_predictions(tmp_path / "some.csv", tmp_path / "p.csv")
    assert found.rows == len(some) > 0 and found.unseen == {} and found.score["accuracy"] == 1
    part = Part(prepare(tmp_path / "train.csv", config)).read(tmp_path / "some.csv")
    assert part.rows == len(some) and not any(part.unseen.values())


def test_decimal_commas_between_quotes(tmp_path):
    (tmp_path / "t.csv").write_text("a;y\n" + "".join(f'"{i},50";"{2 * i},25"\n' for i in range(60)))
    report = fit(tmp_path / "t.csv", tmp_path / "m", FitConfig("y", 16))
    assert report["task"] == "regression" and TableModel.load(tmp_path / "m").columns.inputs[0].kind == "number"


def test_a_fraction_behind_a_megabyte_of_whole_numbers_is_a_number(tmp_path):
    """pyarrow guesses types from the first megabyte; with integers from the guess, 1.5 was an error."""
    lines = [f"{i % 1000},{i % 7}" for i in range(400_000)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["a,y", *lines, "1.5,2.5", ",3"]) + "\n")
    assert path.stat().st_size > 2 * HEADER_BYTES
    table = Table(path)
    assert [str(column.type) for column in table.schema] == ["double", "double"]
    rows = [row for _, batches in table.blocks() for batch in batches for row in batch.to_pylist()]
    assert rows[-2:] == [{"a": 1.5, "y": 2.5}, {"a": None, "y": 3.0}]
    report = fit(path, tmp_path / "m", replace(CONFIG, missing="drop"))
    assert report["rows"] == 400_001 and report["task"] == "regression"


def test_whole_numbers_that_float64_would_round_stay_integers(tmp_path):
    (tmp_path / "t.csv").write_text(f"id,n,y\n{2**53 + 1},{2**53},1\n{-(2**53) - 1},-3,2\n")
    assert [str(column.type) for column in Table(tmp_path / "t.csv").schema] == ["int64", "double", "double"]


def test_copied_whole_numbers_keep_their_form(tmp_path):
    """Also if the model reads them as numbers."""
    (tmp_path / "t.csv").write_text("n,y\n" + "".join(f"{i},{i / 2}\n" for i in range(50)))
    fit(tmp_path / "t.csv", tmp_path / "m", CONFIG)
    TableModel.load(tmp_path / "m").write_predictions(tmp_path / "t.csv", tmp_path / "p.csv", key="n")
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[:4]] == ["n", "0", "1", "2"]


def test_types_of_several_files_are_those_of_all(tmp_path):
    """Whole numbers in the first file do not make an error of the fractions in the second."""
    (tmp_path / "data").mkdir()
    for name, step in (("1.csv", 1), ("2.csv", 0.25)):
        (tmp_path / "data" / name).write_text("a,y\n" + "".join(f"{i * step},{i}\n" for i in range(40)))
    assert fit(tmp_path / "data", tmp_path / "m", replace(CONFIG, task="regression"))["rows"] == 80
