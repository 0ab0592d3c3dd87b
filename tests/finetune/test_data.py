import gzip
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from snnk.finetune.data import Data, Labels, encode_texts
from snnk.finetune.glue import GLUE, glue_files, miscounted
from snnk.finetune.scores import METRICS
from snnk.hf.data import read_columns

from helpers.texts import make_tokenizer


def test_lines_of_qqp_may_have_more_values(tmp_path):
    (tmp_path / "train.tsv").write_text("question1\tquestion2\tis_duplicate\na\tb\t0\tmore\n")
    (tmp_path / "dev.tsv").write_text("question1\tquestion2\tis_duplicate\na\tb\t0\n")
    assert "1 and 1 rows" in miscounted("qqp", tmp_path)


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
