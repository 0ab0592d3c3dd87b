"""The files and columns of GLUE."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from snnk.finetune.glue import GLUE, glue_files, miscounted
from snnk.finetune.scores import METRICS
from snnk.hf.data import read_columns


def test_lines_of_qqp_may_have_more_values(tmp_path):
    (tmp_path / "train.tsv").write_text("question1\tquestion2\tis_duplicate\na\tb\t0\tmore\n")
    (tmp_path / "dev.tsv").write_text("question1\tquestion2\tis_duplicate\na\tb\t0\n")
    assert "1 and 1 rows" in miscounted("qqp", tmp_path)


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
