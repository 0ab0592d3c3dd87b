"""Hostile tables: each is fitted correctly, or refused with a message that names the fault and its place."""

import csv
import decimal
import gzip
import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from snnk.tabular import FitConfig, TableModel, fit

from helpers.tables import FILES

ROWS = 60
X = np.linspace(-2, 2, ROWS)
Y = np.sin(X)
SIGN = np.where(X > 0, 1.0, -1.0)
BIG = np.finfo(float).max
LINES = "".join(f"{a!r},{b!r}\n" for a, b in zip(X.tolist(), Y.tolist(), strict=True))
D = decimal.Decimal


def parquet(**columns):
    def write(folder):
        pq.write_table(pa.table(columns), folder / "t.parquet")
        return folder / "t.parquet"

    return write


def named(names, *arrays):
    def write(folder):
        pq.write_table(pa.Table.from_arrays([pa.array(a) for a in arrays], names=names), folder / "t.parquet")
        return folder / "t.parquet"

    return write


def raw(content, name="t.csv"):
    def write(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder / name

    return write


def files(**contents):
    """Write a folder of CSV files; the keyword `a` becomes the file a.csv."""

    def write(folder):
        for name, content in contents.items():
            (folder / f"{name}.csv").write_text(content)
        return folder

    return write


def cut(kind, keep):
    def write(folder):
        table, path = pa.table({"x": X, "y": Y}), folder / f"t.{kind}"
        pq.write_table(table, path) if kind == "parquet" else pa.feather.write_feather(table, path)
        content = path.read_bytes()
        path.write_bytes(content[: int(keep * len(content))])
        return path

    return write


def damaged_page(folder):
    path = folder / "t.parquet"
    pq.write_table(pa.table({"x": X, "y": Y}), path, compression="snappy", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[60:160] = bytes(100)
    path.write_bytes(content)
    return path


def folder_named_like_a_file(folder):
    (folder / "all.parquet").mkdir()
    parquet(x=X, y=Y)(folder / "all.parquet")
    return folder


def link(target):
    def write(folder):
        parquet(x=X, y=Y)(folder)
        os.symlink(target or folder / "loop.parquet", folder / "loop.parquet")
        return folder

    return write


def looping_link(folder):
    os.symlink(folder / "loop.parquet", folder / "loop.parquet")
    return folder / "loop.parquet"


def pipe(folder):
    os.mkfifo(folder / "t.csv")
    return folder / "t.csv"


def mixed_formats(folder):
    parquet(x=X, y=Y)(folder)
    return raw("x,y\n" + LINES)(folder).parent


def not_utf8():
    buffers = pa.py_buffer(np.arange(ROWS + 1, dtype=np.int32).tobytes()), pa.py_buffer(b"\xff" + b"a" * (ROWS - 1))
    return pa.StringArray.from_buffers(ROWS, *buffers)


def whole(values):
    return [int(value) for value in values]


def classes(low, high, kind):
    return pa.array([high if v > 0 else low for v in X], kind)


def classified(*names, accuracy=1.0, rows=ROWS):
    def check(report, score, model):
        assert report["task"] == "classification" and report["rows"] == rows
        assert model.columns.target.categories == names and score["accuracy"] >= accuracy

    return check


def regression(r2=0.999, rows=ROWS):
    def check(report, score, model):
        assert report["task"] == "regression" and report["rows"] == rows and score.get("R2", 0.0) >= r2

    return check


def texts(count):
    """Check that a column with one cell that is no number is read as texts."""

    def check(report, score, model):
        (column,) = (c for c in (*model.columns.inputs, model.columns.target) if c.categories is not None)
        assert len(column.categories) == report["rows"] == count

    return check


def one_hot(count):
    """Check that a column has one input per category: other rows say nothing of one, as all its rows are alike."""

    def check(report, score, model):
        (column,) = model.columns.inputs
        assert len(column.categories) == column.width == report["inputs"] == count

    return check


def read_as_numbers(rows):
    def check(report, score, model):
        assert report["rows"] == rows and [column.kind for column in model.columns.inputs] == ["number"]

    return check


RIGHT = regression()
IDS = [2**60 + i for i in range(ROWS)]
NO_NUMBER = "neither a number nor a category"
CASES = {
    # sizes of numbers
    "inputs of 1e-60": (parquet(x=X * 1e-60, y=Y), {}, RIGHT),
    "inputs of 1e-310": (parquet(x=X * 1e-310, y=Y), {}, RIGHT),
    "inputs of 1e160": (parquet(x=X * 1e160, y=Y), {}, RIGHT),
    "inputs of 8e307": (parquet(x=X * 8e307, y=Y), {}, RIGHT),
    "targets of 1e-60": (parquet(x=X, y=Y * 1e-60), {}, RIGHT),
    "targets of 1e-310": (parquet(x=X, y=Y * 1e-310), {}, RIGHT),
    "targets of 1e160": (parquet(x=X, y=Y * 1e160), {}, RIGHT),
    "targets of 1e307": (parquet(x=X, y=Y * 1e307), {}, RIGHT),
    "the largest numbers": (parquet(z=SIGN * BIG, x=X, y=Y), {}, RIGHT),
    "the largest targets": (parquet(x=X, y=SIGN * BIG), {"task": "regression"}, "beyond the largest float64"),
    "the smallest numbers": (parquet(z=SIGN * 5e-324, x=X, y=Y), {}, RIGHT),
    "the smallest targets": (parquet(x=X, y=SIGN * 5e-324), {"feature_map": "random-relu"}, regression(0.5)),
    "0 and the smallest number": (parquet(z=(X > 0) * 5e-324, x=X, y=Y), {}, RIGHT),
    "one number far from the others": (parquet(z=np.where(X < -1.99, 1e300, 0), x=X, y=Y), {}, RIGHT),
    "one number that dwarfs the others": (
        parquet(z=X, x=np.where(np.arange(ROWS) == 41, 1e30, X), y=Y),
        {},
        r"column 'x' has 1 of 60 numbers .* up to 1e\+30 in row 41 of t.parquet\[0\]",
    ),
    "one target that dwarfs the others": (
        parquet(x=X, y=np.where(np.arange(ROWS) == 41, -1e9, Y)),
        {},
        r"column 'y' has 1 of 60 numbers .* up to 1e\+09 in row 41",
    ),
    "a target of 1e300 beside 0": (parquet(x=X, y=np.where(X > 0, 1e300, 0.5)), {}, regression(0.9)),
    "integers that float64 cannot tell apart": (
        parquet(x=X, i=IDS, y=Y),
        {},
        r"column 'i' has numbers from 1152.*976 to 1152.*035",
    ),
    "integers with an offset of 5e15": (
        parquet(x=X, i=[5 * 10**15 + i for i in range(ROWS)], y=Y),
        {},
        "differ by less than",
    ),
    "a target that float64 cannot tell apart": (parquet(x=X, y=IDS), {}, "column 'y' has numbers from 1152"),
    "one integer above 2^53": (parquet(x=X, i=[2**60 + 1] * ROWS, y=Y), {}, RIGHT),
    "integers from -2^61 to 2^61": (parquet(i=[int(v * 2**60) for v in X], y=Y), {}, RIGHT),
    "uint64 up to its largest": (parquet(i=classes(0, 2**64 - 1, pa.uint64()), x=X, y=Y), {}, RIGHT),
    "decimals that float64 cannot tell apart": (
        parquet(x=X, z=pa.array([D(1) + D(i) / 10**25 for i in range(ROWS)]), y=Y),
        {},
        "column 'z' has numbers from 1",
    ),
    # classes, exactly
    "int64 classes 7 and 2^53 + 1": (
        parquet(x=X, y=classes(7, 2**53 + 1, pa.int64())),
        {"missing": "drop"},
        classified("7", "9007199254740993"),
    ),
    "uint64 classes 7 and 2^63 + 5": (
        parquet(x=X, y=classes(7, 2**63 + 5, pa.uint64())),
        {"missing": "drop"},
        classified("7", "9223372036854775813"),
    ),
    "neighbours above 2^53": (
        parquet(x=X, y=classes(2**60, 2**60 + 1, pa.int64())),
        {},
        classified(str(2**60), str(2**60 + 1)),
    ),
    "int64 extremes": (
        parquet(x=X, y=classes(-(2**63), 2**63 - 1, pa.int64())),
        {},
        classified(str(-(2**63)), str(2**63 - 1)),
    ),
    "decimal classes of 38 digits": (
        parquet(x=X, y=classes(D(10**37), D(10**37 + 1), pa.decimal128(38, 0))),
        {},
        classified(str(10**37), str(10**37 + 1)),
    ),
    "decimal classes with zeros behind the point": (
        parquet(x=X, y=classes(D("1.00"), D("2.00"), pa.decimal128(5, 2))),
        {},
        classified("1", "2"),
    ),
    "decimals with fractions": (parquet(x=X, y=classes(D("7.25"), D("7.5"), None)), {}, regression(0.9)),
    "a decimal whose fraction float64 loses": (
        parquet(x=X, y=classes(D(7), D("7.0000000000000000000000001"), None)),
        {"task": "classification"},
        "fractions",
    ),
    "decimals of 32 bits": (parquet(x=pa.array([D(f"{v:.3f}") for v in X], pa.decimal32(9, 3)), y=Y), {}, RIGHT),
    "decimals of 256 bits": (parquet(x=pa.array([D(f"{v:.3f}") for v in X], pa.decimal256(70, 3)), y=Y), {}, RIGHT),
    "half precision": (parquet(x=X.astype(np.float16), y=Y), {}, RIGHT),
    "booleans": (parquet(x=X, b=X > 1, y=X > 0), {}, classified("0", "1")),
    "whole floats": (parquet(x=X, y=SIGN), {}, classified("-1", "1")),
    "whole floats above 2^53": (parquet(x=X, y=SIGN * 1e17), {}, "floating numbers above 2\\^53.*'regression'"),
    "whole floats above 2^53 as numbers": (parquet(x=X, y=SIGN * 1e17), {"task": "regression"}, regression(0.9)),
    "a float fraction as a class": (parquet(x=X, y=SIGN / 2), {"task": "classification"}, "fractions"),
    "digits too many for int64 in a CSV": (
        raw("x,y\n" + "".join(f"{v},{2**63 + int(v > 0)}\n" for v in X)),
        {},
        "floating numbers above",
    ),
    "a class that is named twice by type": (
        parquet(x=X, y=pa.array(["1", "1.0"] * 30)),
        {},
        classified("1", "1.0", accuracy=0),
    ),
    "one class": (parquet(x=X, y=["a"] * ROWS), {}, "one class only, a"),
    "classes that look like formulas and markup": (
        parquet(x=X, y=["=1+1" if v > 0 else "[red]\x1b[31m" for v in X]),
        {},
        classified("=1+1", "[red]\x1b[31m"),
    ),
    # missing values
    "no rows": (parquet(x=pa.array([], pa.float64()), y=pa.array([], pa.float64())), {}, "no rows"),
    "one row": (parquet(x=[1.0], y=[2.5]), {}, "at least 2 rows"),
    "one row, and lam": (parquet(x=[1.0], y=[2.5]), {"lam": 1.0}, regression(0, rows=1)),
    "a column of nulls": (parquet(x=X, z=pa.nulls(ROWS), y=Y), {}, r"\(z: 60\), the first at row 0"),
    "a column of nulls, mean": (parquet(x=X, z=pa.nulls(ROWS), y=Y), {"missing": "mean"}, RIGHT),
    "a column of nulls, drop": (parquet(x=X, z=pa.nulls(ROWS), y=Y), {"missing": "drop"}, "no rows are left"),
    "a text column of nulls alone": (
        parquet(z=pa.nulls(ROWS, pa.string()), y=Y),
        {"missing": "mean"},
        "no input columns have a value",
    ),
    "a target of nulls": (parquet(x=X, y=pa.nulls(ROWS)), {"missing": "drop"}, "target 'y' has no values"),
    "a target of NaN": (parquet(x=X, y=X * np.nan), {"missing": "drop"}, "target 'y' has no values"),
    "a target of NaN, mean": (parquet(x=X, y=X * np.nan), {"missing": "mean"}, r"\(y: 60\)"),
    "NaN and infinity, drop": (
        parquet(x=np.where(X > 1, np.inf, np.where(X < -1, np.nan, X)), y=Y),
        {"missing": "drop"},
        regression(rows=30),
    ),
    "1e400 in a CSV": (raw(f"x,y\n{LINES}1e400,0.5\n"), {}, r"\(x: 1\), the first at row 60"),
    # columns
    "constants": (parquet(c=np.full(ROWS, 0.1), d=np.full(ROWS, 1e300), e=np.full(ROWS, -BIG), x=X, y=Y), {}, RIGHT),
    "constants alone": (parquet(c=np.ones(ROWS), y=Y), {}, regression(-1e-6)),
    "a constant target": (parquet(x=X, y=np.full(ROWS, 2.5)), {}, regression(0)),
    "a constant target of 1.5e300": (parquet(x=X, y=np.full(ROWS, 1.5e300)), {"task": "regression"}, regression(0)),
    "a column of rounding errors": (parquet(c=1e20 + 16384 * (np.arange(ROWS) % 2), x=X, y=Y), {}, RIGHT),
    "names that are equal": (
        named(["x", "x", "y"], X, X, Y),
        {},
        "t.parquet has several columns with the name 'x'; rename",
    ),
    "names that are equal in a CSV": (
        raw("x,x,y\n1,2,3.5\n2,3,4.5\n"),
        {},
        "t.csv has several columns with the name 'x'; rename",
    ),
    "a name that is empty": (named(["", "y"], X, Y), {}, RIGHT),
    "a name with a line break": (named(["a\nb", "y"], X, Y), {}, RIGHT),
    "a name with markup and escapes": (named(["[bold]\x1b[2J", "y"], X, Y), {}, RIGHT),
    "a name in another script": (named(["价格é\u202e", "y"], X, Y), {}, RIGHT),
    "the target alone": (parquet(y=Y), {}, "no input columns are left"),
    "a dictionary of texts": (parquet(k=pa.array(["a", "b"] * 30).dictionary_encode(), x=X, y=Y), {}, RIGHT),
    "a dictionary of integers": (parquet(k=pa.array([1, 2] * 30).dictionary_encode(), x=X, y=Y), {}, RIGHT),
    "a dictionary of times": (
        parquet(x=X, k=pa.array([1, 2] * 30, pa.timestamp("s")).dictionary_encode(), y=Y),
        {},
        RIGHT,
    ),
    "large strings": (parquet(k=pa.array(["a", "b"] * 30, pa.large_string()), x=X, y=Y), {}, RIGHT),
    "text that is no UTF-8": (parquet(x=X, k=not_utf8(), y=Y), {}, "'k' of t.parquet.* cannot be read as text"),
    "timestamps": (parquet(x=X, t=pa.array(range(ROWS), pa.timestamp("ns")), y=Y), {}, regression(0.99)),
    "timestamps alone": (
        parquet(t=pa.array(whole(10**9 + X * 3600), pa.timestamp("s", "Europe/Berlin")), y=Y),
        {},
        regression(0.99),
    ),
    "timestamps that differ by nanoseconds": (
        parquet(x=X, t=pa.array(range(10**18, 10**18 + ROWS), pa.timestamp("ns")), y=Y),
        {},
        "column 't' has times that differ by less than float64 keeps of them",
    ),
    "the first and the last timestamp": (
        parquet(x=X, t=classes(-(2**63) + 1, 2**63 - 1, pa.timestamp("us")), y=Y),
        {},
        regression(0.99),
    ),
    "dates": (parquet(t=pa.array(whole(20_000 + 100 * X), pa.date32()), y=Y), {}, regression(0.99)),
    "dates in milliseconds": (
        parquet(t=pa.array(whole(8.64e7 * (20_000 + 100 * X)), pa.date64()), y=Y),
        {},
        regression(0.99),
    ),
    "times of the day": (
        parquet(t=pa.array(whole(43_200 + 9000 * X), pa.time32("s")), y=Y),
        {},
        regression(0.9),
    ),
    "durations": (parquet(t=pa.array(whole(1e9 * X), pa.duration("ns")), y=Y), {}, RIGHT),
    "one date": (parquet(x=X, t=pa.array([20_000] * ROWS, pa.date32()), y=Y), {}, RIGHT),
    "dates, all of them missing": (parquet(x=X, t=pa.nulls(ROWS, pa.date32()), y=Y), {"missing": "mean"}, RIGHT),
    "dates in a CSV": (
        raw("t,y\n" + "".join(f"20{20 + i % 5}-0{1 + i % 9}-11,{i % 9}.5\n" for i in range(ROWS))),
        {},
        regression(0.9),
    ),
    "identifiers": (
        parquet(x=X.repeat(20), k=[f"k{i}" for i in range(1200)], y=Y.repeat(20)),
        {},
        regression(rows=1200),
    ),
    "identifiers alone": (
        parquet(k=[f"k{i}" for i in range(1200)], y=X.repeat(20)),
        {},
        "no input columns have a value",
    ),
    "categories alone": (
        parquet(k=[f"k{i // 4}" for i in range(1200)], y=X.repeat(20)),
        {"task": "regression"},
        one_hot(300),
    ),
    "identifiers, most of them missing": (
        parquet(x=X.repeat(20), k=[f"k{i}" if i % 3 else None for i in range(1200)], y=Y.repeat(20)),
        {"missing": "mean"},
        regression(rows=1200),
    ),
    "identifiers and targets of 1e307": (
        parquet(x=X.repeat(20), k=[f"k{i % 600}" for i in range(1200)], y=1e307 * Y.repeat(20)),
        {},
        regression(0.99, rows=1200),
    ),
    "lists": (parquet(x=X, t=[[1]] * ROWS, y=Y), {}, rf"'t' of .* is list.*{NO_NUMBER}"),
    "structs": (parquet(x=X, t=[{"a": 1}] * ROWS, y=Y), {}, rf"'t' of .* is struct.*{NO_NUMBER}"),
    "bytes": (parquet(x=X, t=[b"a"] * ROWS, y=Y), {}, rf"'t' of .* is binary.*{NO_NUMBER}"),
    "a target of times": (
        parquet(x=X, y=pa.array(range(ROWS), pa.timestamp("s"))),
        {},
        "the target 'y' of .* is timestamp.*make it a number",
    ),
    "a target of durations": (
        parquet(x=X, y=pa.array(range(ROWS), pa.duration("s"))),
        {},
        "is duration.*make it a number",
    ),
    # CSV
    "a byte order mark": (raw("\ufeffx,y\n" + LINES), {}, RIGHT),
    "lines that end in CR and LF": (raw(("x,y\n" + LINES).replace("\n", "\r\n")), {}, RIGHT),
    "line breaks in quotes": (
        raw("x,k,y\n" + "".join(f'{a},"u\n{i % 2}",{b}\n' for i, (a, b) in enumerate(zip(X, Y, strict=True)))),
        {},
        RIGHT,
    ),
    "semicolons": (raw(("x,y\n" + LINES).replace(",", ";")), {}, RIGHT),
    "semicolons and decimal commas": (raw(("x,y\n" + LINES).replace(",", ";").replace(".", ",")), {}, RIGHT),
    "tabs in a CSV": (raw(("x,y\n" + LINES).replace(",", "\t")), {}, RIGHT),
    "tabs": (raw(("x,y\n" + LINES).replace(",", "\t"), "t.tsv"), {}, RIGHT),
    "commas in names with semicolons": (raw('"x,a,b,c";y\n' + LINES.replace(",", ";")), {}, RIGHT),
    "gzip": (raw(gzip.compress(("x,y\n" + LINES).encode()), "t.csv.gz"), {}, RIGHT),
    "tabs and gzip": (raw(gzip.compress(("x,y\n" + LINES).replace(",", "\t").encode()), "t.TSV.gz"), {}, RIGHT),
    "gzip of which a part is left": (
        raw(gzip.compress(("x,y\n" + LINES).encode())[:-200], "t.csv.gz"),
        {},
        "t.csv.gz cannot be read as csv: Compressed file ended",
    ),
    "gzip by name only": (raw("x,y\n" + LINES, "t.csv.gz"), {}, "t.csv.gz cannot be read as csv: Not a gzipped file"),
    "a line that is too short": (raw(f"x,y\n{LINES}1\n"), {}, "t.csv"),
    "a line that is too long": (raw(f"x,y\n{LINES}1,2,3\n"), {}, "t.csv"),
    "a header alone": (raw("x,y\n"), {}, "no rows|has no values"),
    "a quote that is not closed": (raw(f'x,y\n{LINES}1,"2\n'), {}, texts(ROWS + 1)),
    "UTF-16": (raw(("x,y\n" + LINES).encode("utf-16")), {}, "byte 0, in line 1, is 0xFF.* iconv -f utf-16"),
    "Latin-1": (
        raw("x,k,y\n1,caf\xe9,1.5\n2,b,2.5\n".encode("latin-1")),
        {},
        "t.csv is not UTF-8 text: byte 11, in line 2, is 0xE9; save it as UTF-8, .* iconv -f latin1 -t utf-8",
    ),
    "Latin-1 behind a million bytes": (
        raw(b"x,k,y\n" + b"1,ab,1.5\n" * 150_000 + b"2,caf\xe9,2.5\n"),
        {},
        "t.csv is not UTF-8 text: byte 1350011, in line 150002, is 0xE9",
    ),
    "Latin-1 in the header": (
        raw("x\xe9,y\n1,2\n".encode("latin-1")),
        {},
        "t.csv is not UTF-8 text: byte 1, in line 1",
    ),
    "a zero byte": (raw("x,y\n" + LINES + "\0,1\n"), {}, r"column 'x' has '.x00' at row 60 of t.csv"),
    "a field of 200,000 characters": (
        raw("x,k,y\n" + "".join(f"{a},{'k' * 200_000 if a == X[5] else 'b'},{b}\n" for a, b in zip(X, Y, strict=True))),
        {},
        RIGHT,
    ),
    "a field of 3,000,000 characters": (raw(f"x,k,y\n1,{'k' * 3_000_000},2.5\n2,b,3.5\n"), {}, "t.csv"),
    "text behind a million bytes of numbers": (
        raw("x,y\n" + "1.5,2.5\n" * 150_000 + "abc,1\n"),
        {},
        "column 'x' has 'abc' at row 150000 of t.csv, and numbers in the first rows; correct it, empty the cell",
    ),
    "a fraction behind a million bytes of whole numbers": (
        raw("x,y\n" + "1,2.5\n" * 200_000 + "1.5,1\n"),
        {},
        read_as_numbers(200_001),
    ),
    "text behind a million bytes of empty cells": (
        raw("x,k,y\n" + "1,,2.5\n" * 200_000 + "1,red,1\n"),
        {"missing": "mean"},
        "column 'k' has 'red' at row 200000 of t.csv, and no values in the first rows",
    ),
    "a picture": (raw(b"\xff\xd8\xff\xe0" * 50), {}, "t.csv|no column 'y'"),
    "files with other columns": (files(a="x,y\n" + LINES, b="x,z\n" + LINES), {}, "absent in [ab].csv"),
    "files with their columns in another order": (
        files(a="x,y\n" + LINES, b="y,x\n" + "".join(f"{b},{a}\n" for a, b in zip(X, Y, strict=True))),
        {},
        regression(rows=2 * ROWS),
    ),
    "a second file that is empty": (files(a="x,y\n" + LINES, b=""), {}, "b.csv|cannot be read as csv"),
    "dates where numbers were": (
        files(a="x,y\n" + LINES, b="x,y\n2020-01-01,1.5\n"),
        {},
        "column 'x' has '2020-01-01' at row 0 of b.csv, and numbers in the first rows",
    ),
    # files
    "an empty CSV": (raw(""), {}, "t.csv cannot be read as csv"),
    "an empty Parquet file": (raw("", "t.parquet"), {}, "t.parquet cannot be read as parquet"),
    "an empty Arrow file": (raw("", "t.arrow"), {}, "t.arrow cannot be read as ipc"),
    "Parquet by name only": (raw("PAR1 nothing PAR1", "t.parquet"), {}, "t.parquet cannot be read as parquet"),
    "Parquet of which a part is left": (cut("parquet", 0.6), {}, "t.parquet cannot be read as parquet"),
    "Parquet without its last byte": (cut("parquet", 0.9999), {}, "t.parquet cannot be read as parquet"),
    "Arrow of which a part is left": (cut("arrow", 0.6), {}, "t.arrow cannot be read as ipc"),
    "Parquet with a damaged page": (damaged_page, {}, "t.parquet.* is damaged"),
    "another ending": (raw("x,y\n1,2\n", "t.txt"), {}, "is .txt; expected files of one format"),
    "an ending in capitals": (raw("x,y\n" + LINES, "t.CSV"), {}, RIGHT),
    "formats that are mixed": (mixed_formats, {}, "holds csv, parquet; expected files of one format"),
    "a folder that is named like a file": (folder_named_like_a_file, {}, RIGHT),
    "a link to nothing": (link("nothing.parquet"), {}, "loop.parquet is no regular file"),
    "a link to itself in a folder": (link(None), {}, "loop.parquet is no regular file"),
    "a link to itself": (looping_link, {}, "no file or folder"),
    "a pipe": (pipe, {}, "is no regular file"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_table_is_fitted_right_or_refused(case, tmp_path):
    make, options, expected = CASES[case]
    (tmp_path / "data").mkdir()
    source, out = make(tmp_path / "data"), tmp_path / "m"
    config = FitConfig("y", 32, block_dtype="float64", **options)

    def run():
        report = fit(source, out, config)
        model = TableModel.load(out)
        return report, model.write_predictions(source, tmp_path / "p.csv").score, model

    if isinstance(expected, str):
        with pytest.raises((ValueError, FileNotFoundError), match=expected):
            run()
        assert not (out / ".checkpoint" / "part-").exists() and not (tmp_path / "p.csv").exists()
        assert not list(tmp_path.rglob("*.tmp")) and not (out / ".lock").exists()
        return
    report, score, model = run()
    expected(report, score, model)
    assert {p.name for p in out.iterdir()} == FILES


def test_there_are_enough_cases():
    assert len(CASES) >= 100


TYPES = {
    "timestamp": pa.array(range(ROWS), pa.timestamp("s")),
    "date": pa.array(range(ROWS), pa.date32()),
    "duration": pa.array(range(ROWS), pa.duration("ms")),
    "time": pa.array(range(ROWS), pa.time32("s")),
    "list": [[1.0]] * ROWS,
    "struct": [{"a": 1}] * ROWS,
    "binary": [b"1"] * ROWS,
    "string": ["one"] * ROWS,  # new to the column of texts, and no number for the other
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    pq.write_table(pa.table({"x": X, "k": ["a", "b"] * 30, "y": Y}), folder / "t.parquet")
    fit(folder / "t.parquet", folder / "m", FitConfig("y", 32))
    return TableModel.load(folder / "m")


@pytest.mark.parametrize("column", ["x", "k"])
@pytest.mark.parametrize("kind", TYPES)
def test_another_type_where_a_number_or_a_text_was(model, column, kind, tmp_path):
    columns = {"x": X, "k": ["a", "b"] * 30, column: TYPES[kind]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    if (column, kind) == ("k", "string"):
        assert model.write_predictions(tmp_path / "t.parquet", tmp_path / "p.csv").unseen == {"k": ROWS}
        return
    with pytest.raises(ValueError, match=rf"column '{column}' is .*{kind}.* in t.parquet"):
        model.write_predictions(tmp_path / "t.parquet", tmp_path / "p.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.parquet"]


@pytest.mark.parametrize("value", [1e45, -1e300, BIG, 2e8])
def test_a_prediction_is_never_nan(model, value, tmp_path):
    """An input too far from the training data is refused by column and row, or dropped like an infinite one."""
    far = X.copy()
    far[41] = value
    pq.write_table(pa.table({"x": far, "k": ["a", "b"] * 30}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"column 'x' is .* at row 41 of t.parquet\[0\], more than 2\^24 standard dev"):
        model.write_predictions(tmp_path / "t.parquet", tmp_path / "p.csv")
    count = model.write_predictions(tmp_path / "t.parquet", tmp_path / "p.csv", missing="drop").rows
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert count == ROWS - 1 and lines[42] == '""' and np.isfinite([float(v) for v in lines[1:42] + lines[43:]]).all()


def test_predictions_hold_no_formula(tmp_path):
    """A name that a spreadsheet would run as a formula begins with an apostrophe; numbers stay numbers."""
    names = ["=1+1", "+cmd|' /C calc'!A0", "-2", "@SUM(A1)", "\tx", "-x", "3.5e-7", "plain;=1+1", "a"]
    kinds = np.arange(ROWS) % len(names)
    pq.write_table(pa.table({"x": kinds.astype(float), "y": [names[k] for k in kinds]}), tmp_path / "t.parquet")
    fit(tmp_path / "t.parquet", tmp_path / "m", FitConfig("y", 64))
    found = TableModel.load(tmp_path / "m")
    score = found.write_predictions(tmp_path / "t.parquet", tmp_path / "p.csv").score
    assert score["accuracy"] == 1
    with (tmp_path / "p.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    written = {name: lines[i][0] for i, name in enumerate(names)}
    changed = {name: f"'{name}" for name in ("=1+1", "+cmd|' /C calc'!A0", "@SUM(A1)", "\tx", "-x")}
    assert written == {name: changed.get(name, name) for name in names} | {"plain;=1+1": "plain;'=1+1"}
    pieces = [piece for text in (*header, *written.values()) for piece in re.split(r"[;\t]", text)]
    assert [piece for piece in pieces if piece[:1] in ("=", "+", "-", "@")] == ["-2"]
    assert [p for batch, _ in found.predict(tmp_path / "t.parquet") for p in batch][: len(names)] == names
