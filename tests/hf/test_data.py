import gzip
import json

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from snnk.hf.data import labelled_images, pad_id, pad_texts, read_columns, read_rows, text_column

from helpers.texts import make_images, make_tokenizer


@pytest.mark.parametrize(
    ("special", "wanted"),
    [({"pad_token": "[PAD]", "eos_token": "[CLS]"}, 0), ({"eos_token": "[CLS]"}, 2), ({"bos_token": "[CLS]"}, 0)],
)
def test_batches_are_filled_with_the_padding_token(special, wanted):
    tokenizer = make_tokenizer(**special)
    batch = pad_texts([{"input_ids": [2, 5, 6]}, {"input_ids": [2]}], tokenizer)
    assert pad_id(tokenizer) == wanted and batch["input_ids"].tolist() == [[2, 5, 6], [2, wanted, wanted]]


COLUMNS = {"id": ["1", "2", "3"], "body": ['she said "no', "a, b", "c"], "label": ["x", "y", "x"]}


def write(folder, kind):
    path = folder / f"data.{kind}"
    rows = list(zip(*COLUMNS.values(), strict=True))
    if kind.startswith("tsv"):
        text = "\n".join("\t".join(row) for row in [tuple(COLUMNS), *rows]) + "\n"
    elif kind.startswith("csv"):
        quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in [tuple(COLUMNS), *rows]]
        text = "\r\n".join(quoted)
    elif kind in ("parquet", "arrow"):
        (pq.write_table if kind == "parquet" else pyarrow.feather.write_feather)(pa.table(COLUMNS), path)
        return path
    else:
        text = "\n".join(json.dumps(dict(zip(COLUMNS, row, strict=True))) for row in rows)
    data = ("\ufeff" + text).encode()  # MRPC's dev file has a byte order mark
    path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("kind", ["tsv", "tsv.gz", "csv", "csv.gz", "jsonl", "jsonl.gz", "parquet", "arrow"])
def test_all_formats_give_the_same_columns(tmp_path, kind):
    assert read_columns(write(tmp_path, kind)) == COLUMNS


def test_the_last_ending_determines_the_format(tmp_path):
    (tmp_path / "T.TSV").write_text('a\tb\n1, "2\t3\n')
    (tmp_path / "v.tsv.csv").write_text('a,b\n"1, ""2",3\n')
    (tmp_path / "V.CSV.GZ").write_bytes(gzip.compress(b'a,b\n"1, ""2",3\n'))
    for file in tmp_path.iterdir():
        assert read_columns(file) == {"a": ['1, "2'], "b": ["3"]}


def test_lines_of_glue_may_have_more_values(tmp_path):
    """Some lines of MNLI and QQP have; those of a .csv, which is no file of GLUE's, may not."""
    (tmp_path / "a.tsv").write_text("a\tb\n1\t2\t3\n")
    assert read_columns(tmp_path / "a.tsv", spare=True) == {"a": ["1"], "b": ["2"]}
    (tmp_path / "a.csv").write_text("a,b\n1,2,3\n")
    with pytest.raises(ValueError, match="quote values"):
        read_columns(tmp_path / "a.csv", spare=True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('a\tb\n"x\t1\ny\t"z\nv w"\t2\n', [('"x', "1"), ("y", '"z'), ('v w"', "2")]),  # lone quotes, as in GLUE
        ('a\tb\n"x" y "z"\t"1"\n"x ""y"""\t2\n', [('"x" y "z"', "1"), ('x "y"', "2")]),
        ('"a"\t"b"\r\n"x\ty"\t1\r\n', [("x\ty", "1")]),
        ('a\tb\n1\t"x\ny"\n', [("1", "x\ny")]),
        ('a\n"x\ny"\nz\n', [("x\ny",), ("z",)]),
        ('a\n"x\ny\nz "w\n', [('"x',), ("y",), ('z "w',)]),
        ('a\tb\n"x\t1\t2\ny"\t"z\n', [('"x', "1"), ('y"', '"z')]),  # MNLI also has more values than columns
    ],
)
def test_quotes_of_a_tsv_are_those_of_its_values_or_of_its_texts(tmp_path, text, wanted):
    (tmp_path / "a.tsv").write_bytes(text.encode())
    assert [tuple(row.values()) for row in read_rows(tmp_path / "a.tsv", quoted=True)] == wanted


def test_a_tsv_that_is_neither_lines_nor_quoted_is_refused(tmp_path):
    (tmp_path / "a.tsv").write_text('a\tb\n1\t"x\ny "z"\n')
    with pytest.raises(ValueError, match="row 3, has 1 values for the 2 columns a, b; complete it"):
        list(read_rows(tmp_path / "a.tsv", quoted=True))


def test_the_text_column_is_the_first_of_strings():
    assert text_column(COLUMNS, "f", others=["label"]) == "body"
    assert text_column({"b": ["x"], "a": ["y"], "label": ["z"]}, "f", others=["label", "b"]) == "a"
    with pytest.raises(ValueError, match="no column of f has texts; its columns are id"):
        text_column({"id": ["1"]}, "f", others=["label"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "a\tb\n1\n", "row 2, has 1 values for the 2 columns a, b"),
        ("a.tsv", "a\tb\n1\t2\t3\n", "row 2, has 3 values for the 2 columns a, b; take tabs out"),
        ("a.csv", "a,b\n1,x\n1,hello, world\n", "row 3, has 3 values for the 2 columns a, b; quote values with commas"),
        ("a.tsv.csv", "a,b\n1,hello, world\n", "quote values with commas"),
        ("a.csv", "text,text,label\n1,x,0\n", "has several columns 'text'; give each a name of its own"),
        ("a.parquet.gz", "", r"is none of .tsv, .csv, .jsonl, .ndjson, plain or .gz, and .parquet"),
        ("a.jsonl", '{"a": 1}\n{', "line 2, is no JSON"),
        ("a.jsonl", "[1]\n", "must be an object"),
        ("a.xlsx", "", "is none of .tsv"),
        ("a.csv.gz", "no gzip", "cannot be read"),
        ("a.csv", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_columns(tmp_path / name)


def test_a_table_may_end_in_empty_columns(tmp_path):
    (tmp_path / "a.csv").write_text("text,label,,\nx,1,,\n")
    assert read_columns(tmp_path / "a.csv")["label"] == ["1"]


def test_values_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_text(f"text,label\n{'x' * 200_000},1\n")
    assert len(read_columns(tmp_path / "a.csv")["text"][0]) == 200_000


@pytest.mark.parametrize("harm", [lambda raw: raw[:-12], lambda raw: raw[:10] + bytes([raw[10] | 6]) + raw[11:]])
def test_a_damaged_gzip_file(tmp_path, harm):
    """Cut short; with a kind of block that zlib does not know."""
    path = write(tmp_path, "tsv.gz")
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ValueError, match=r"data\.tsv\.gz cannot be read"):
        read_columns(path)


def test_what_is_no_file_is_a_hub_name(monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no file none\.tsv; expected .*\.parquet"):
        read_columns("none.tsv")
    with pytest.raises(FileNotFoundError, match="no file a/b/c"):
        read_columns("a/b/c")
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        if name == "org/offline":
            raise ConnectionError("no network")
        return pytest.importorskip("datasets").Dataset.from_dict(COLUMNS)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert read_columns("org/name:cola@validation") == COLUMNS and read_columns("name") == COLUMNS
    assert read_columns("org/data-v1.0") == COLUMNS
    assert asked == [("org/name", "cola", "validation"), ("name", None, "train"), ("org/data-v1.0", None, "train")]
    with pytest.raises(ValueError, match="the hub did not give it: no network"):
        read_columns("org/offline")


def test_images_have_the_class_of_their_folder(tmp_path):
    for name in ("cat", "dog"):
        make_images(tmp_path / name, 3)
    files, classes = labelled_images(tmp_path)
    assert classes == ["cat"] * 3 + ["dog"] * 3 and files[3].parent.name == "dog"
    with pytest.raises(ValueError, match="in subfolders, one for each class"):
        labelled_images(tmp_path / "cat")
