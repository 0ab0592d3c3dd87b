import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from snnk.finetune.data import Data, Labels, encode_texts, image_files
from snnk.finetune.files import GLUE, glue_files, miscounted, read_columns, text_column
from snnk.finetune.scores import METRICS

from helpers.texts import make_images, make_tokenizer

COLUMNS = {"id": ["1", "2", "3"], "body": ['she said "no', "a, b", "c"], "label": ["x", "y", "x"]}


def write(folder, kind):
    path = folder / f"data.{kind}"
    rows = list(zip(*COLUMNS.values(), strict=True))
    if kind.startswith("tsv"):
        text = "\n".join("\t".join(row) for row in [tuple(COLUMNS), *rows]) + "\n"
    elif kind.startswith("csv"):
        quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in [tuple(COLUMNS), *rows]]
        text = "\r\n".join(quoted)
    elif kind == "parquet":
        pq.write_table(pa.table(COLUMNS), path)
        return path
    else:
        text = "\n".join(json.dumps(dict(zip(COLUMNS, row, strict=True))) for row in rows)
    data = ("\ufeff" + text).encode()  # MRPC's dev file has a byte order mark
    path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("kind", ["tsv", "tsv.gz", "csv", "csv.gz", "jsonl", "jsonl.gz", "parquet"])
def test_all_formats_give_the_same_columns(tmp_path, kind):
    assert read_columns(write(tmp_path, kind)) == COLUMNS


def test_the_format_is_told_by_the_last_ending(tmp_path):
    (tmp_path / "T.TSV").write_text('a\tb\n1, "2\t3\n')
    (tmp_path / "v.tsv.csv").write_text('a,b\n"1, ""2",3\n')
    (tmp_path / "V.CSV.GZ").write_bytes(gzip.compress(b'a,b\n"1, ""2",3\n'))
    for file in tmp_path.iterdir():
        assert read_columns(file) == {"a": ['1, "2'], "b": ["3"]}


def test_lines_of_glue_may_have_more_values(tmp_path):
    """As some of MNLI and QQP; but not of a .csv, which is no file of GLUE's."""
    (tmp_path / "a.tsv").write_text("a\tb\n1\t2\t3\n")
    assert read_columns(tmp_path / "a.tsv", glue=True) == {"a": ["1"], "b": ["2"]}
    (tmp_path / "a.csv").write_text("a,b\n1,2,3\n")
    with pytest.raises(ValueError, match="quote values"):
        read_columns(tmp_path / "a.csv", glue=True)
    (tmp_path / "train.tsv").write_text("question1\tquestion2\tis_duplicate\na\tb\t0\tmore\n")
    (tmp_path / "dev.tsv").write_text("question1\tquestion2\tis_duplicate\na\tb\t0\n")
    assert "1 and 1 rows" in miscounted("qqp", tmp_path)


def test_the_text_column_is_the_first_of_strings():
    assert text_column(COLUMNS, ["label"], "f") == "body"
    assert text_column({"b": ["x"], "a": ["y"], "label": ["z"]}, ["label", "b"], "f") == "a"
    with pytest.raises(ValueError, match="no column of f has texts; its columns are id"):
        text_column({"id": ["1"]}, ["label"], "f")


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


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["b", "a", "b", "a"], ("a", "b")),
        (["10", "9", "10", "9"], ("9", "10")),
        ([1, 0, 1, 0], ("0", "1")),
        ([True, False] * 2, ("0", "1")),
        (["5.000", "3"] * 2, None),
        (["0", "1", "none"] * 4, ("0", "1", "none")),
        (["none", "na"] * 4, ("na", "none")),
        ([0.5, 1.0, 2.0, 3.0], None),
        (["1.5", "x"] * 2, ("1.5", "x")),
    ],
)
def test_labels_are_told_apart(values, names):
    labels = Labels.of(values, "f")
    assert labels.names == names
    found = labels.encode(values, "f")
    assert found.is_floating_point() == (names is None)
    if names is not None:
        assert [names[i] for i in found] == [str(int(v)) if isinstance(v, bool) else str(v) for v in values]
    assert Labels.of(["1", "2", "3"], "f", regression=True).names is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "f is empty"),
        (["a", None, ""], "2 rows of 3 without a label, the first is row 2"),
        ([0.5, float("nan")], "1 rows of 2 without a label"),
        (["0.5", "1.5", "NaN"], "are numbers but for NaN; leave these out"),
        (["a", "a"], "all labels of f are 'a'"),
        (["a", "b", "c", "d"], "4 classes in 4 rows"),
    ],
)
def test_bad_labels(values, message):
    with pytest.raises(ValueError, match=message):
        Labels.of(values, "f")


def test_labels_of_other_files_must_be_known():
    with pytest.raises(ValueError, match="g has the labels c, which are not in the training data: a, b"):
        Labels(("a", "b")).encode(["a", "c"], "g")
    with pytest.raises(ValueError, match="must be finite numbers; got x, inf"):
        Labels(None).encode(["1.0", "x", "inf"], "g")


def numbers(count=103, classes=3):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    labels = torch.randint(classes, (count,), generator=generator)
    return Data(list(range(count)), labels, lambda rows: {"x": torch.tensor(rows)}, lengths)


def test_an_epoch_has_every_row_once_and_depends_on_seed_and_epoch_only():
    data = numbers()
    epoch = data.epoch(8, seed=1, epoch=2)
    assert sorted(i for batch in epoch for i in batch) == list(range(103)) and len(epoch) == 13
    assert epoch == data.epoch(8, 1, 2)
    assert epoch != data.epoch(8, 1, 3) and epoch != data.epoch(8, 2, 2)
    batch = data.batch(epoch[0])
    assert batch["x"].tolist() == epoch[0] and torch.equal(batch["labels"], data.labels[epoch[0]])

    def padding(batches):
        return sum(max(data.lengths[i] for i in b) * len(b) for b in batches) - sum(data.lengths)

    plain = [list(range(i, min(i + 8, 103))) for i in range(0, 103, 8)]
    assert padding(epoch) < padding(plain) / 3


def test_the_split_is_stratified_and_disjoint():
    data = numbers(1000)
    train, held = data.split(0.1, seed=0)
    assert sorted([*train.rows, *held.rows]) == list(range(1000)) and len(held) == pytest.approx(100, abs=2)
    for c in range(3):
        assert int((held.labels == c).sum()) == pytest.approx(0.1 * int((data.labels == c).sum()), abs=0.5)
    assert torch.equal(held.labels, data.labels[list(held.rows)])
    assert held.rows == data.split(0.1, seed=0)[1].rows != data.split(0.1, seed=1)[1].rows
    with pytest.raises(ValueError, match="4 of each are needed"):
        numbers(20).split(0.1, seed=0)


def test_texts_and_pairs_are_tokenised_cut_and_padded():
    tokenizer = make_tokenizer()
    data = encode_texts(tokenizer, ["w1 w2", "w3"], None, torch.tensor([0, 1]), 64)
    batch = data.batch([0, 1])
    assert batch["input_ids"].tolist() == [[2, 4, 5], [2, 6, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    pairs = encode_texts(tokenizer, ["w1"], ["w2 w3 w4"], torch.tensor([0]), 64)
    assert {4, 5, 6, 7} <= set(pairs.rows[0]["input_ids"])
    assert encode_texts(tokenizer, ["w1 " * 9], None, torch.tensor([0]), 4).lengths == [4]


@pytest.mark.parametrize("task", GLUE)
def test_glue_files(tmp_path, task):
    row = GLUE[task]
    folder = tmp_path / row.folder
    folder.mkdir()
    names = row.columns or ("index", *(c for c in (row.text, row.pair, row.label) if c))
    rows = [[f'{name} "{i}' for name in names] for i in range(3)]
    lines = ["\t".join(r) for r in (rows if row.columns else [names, *rows])]
    (folder / "train.tsv").write_text("\n".join(lines))
    (folder / f"{row.dev}.tsv.gz").write_bytes(gzip.compress("\n".join(lines[:2]).encode()))
    for place in (tmp_path, folder):
        found, train, dev = glue_files(task, place)
        assert found is row and train.name == "train.tsv" and dev.name == f"{row.dev}.tsv.gz"
    columns = read_columns(train, row.columns)
    assert columns[row.text] == [f'{row.text} "{i}' for i in range(3)] and len(columns[row.label]) == 3
    assert set(row.metrics) <= set(METRICS)
    with pytest.raises(FileNotFoundError, match=rf"no train.tsv or train.tsv.gz of {row.folder} .*gluebenchmark\.com"):
        glue_files(task, Path(tmp_path / "none"))
    counts = " and ".join(f"{rows:,}" for rows in row.rows)
    dev_rows = len(lines[:2]) - (row.columns is None)
    assert miscounted(task, tmp_path) == f"{row.folder}: 3 and {dev_rows} rows of train and dev where GLUE has {counts}"


def test_as_many_rows_as_glue_has_are_not_mentioned(tmp_path, monkeypatch):
    monkeypatch.setitem(GLUE, "rte", replace(GLUE["rte"], rows=(2, 1)))
    for part, rows in (("train", 2), ("dev", 1)):
        (tmp_path / f"{part}.tsv").write_text("sentence1\tsentence2\tlabel\n" + "a\tb\tentailment\n" * rows)
    assert miscounted("rte", tmp_path) is None
    (tmp_path / "dev.tsv").write_text("sentence1\tsentence2\na\tb\n")
    with pytest.raises(ValueError, match="no column 'label'"):
        miscounted("rte", tmp_path)


def test_the_paper_reports_spearman_first():
    assert GLUE["stsb"].metrics == ("spearman", "pearson")  # the first chooses the epoch


def test_unknown_task():
    with pytest.raises(ValueError, match="did you mean 'cola'"):
        glue_files("colla", Path())


def test_images_have_the_class_of_their_folder(tmp_path):
    for name in ("cat", "dog"):
        make_images(tmp_path / name, 3)
    files, classes = image_files(tmp_path)
    assert classes == ["cat"] * 3 + ["dog"] * 3 and files[3].parent.name == "dog"
    with pytest.raises(ValueError, match="in subfolders, one for each class"):
        image_files(tmp_path / "cat")
