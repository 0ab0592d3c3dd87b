"""The tasks of GLUE: their files, columns and metrics. Importing this module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from snnk import _checks

GLUE_HUB = "nyu-mll/glue"
GLUE_WHERE = "gluebenchmark.com/tasks, one folder per task, such as CoLA/train.tsv and CoLA/dev.tsv"


@dataclass(frozen=True)
class GlueTask:
    """One task: its folder, columns and metrics, of which the first chooses the best epoch."""

    folder: str
    rows: tuple[int, int]  # in train and dev
    text: str
    pair: str | None
    label: str
    metrics: tuple[str, ...] = ("accuracy",)
    columns: tuple[str, ...] | None = None  # names, for files without a header
    dev: str = "dev"
    large: bool = False  # the paper regularises less on large data sets


COLA = ("source", "label", "star", "sentence")
GLUE = {
    "cola": GlueTask("CoLA", (8551, 1043), "sentence", None, "label", ("mcc", "accuracy"), COLA),
    "sst2": GlueTask("SST-2", (67349, 872), "sentence", None, "label", large=True),
    "mrpc": GlueTask("MRPC", (3668, 408), "#1 String", "#2 String", "Quality", ("f1", "accuracy")),
    # Spearman first, which is the paper's metric
    "stsb": GlueTask("STS-B", (5749, 1500), "sentence1", "sentence2", "score", ("spearman", "pearson")),
    "qqp": GlueTask("QQP", (363846, 40430), "question1", "question2", "is_duplicate", ("f1", "accuracy"), large=True),
    "mnli": GlueTask("MNLI", (392702, 9815), "sentence1", "sentence2", "gold_label", dev="dev_matched", large=True),
    "qnli": GlueTask("QNLI", (104743, 5463), "question", "sentence", "label", large=True),
    "rte": GlueTask("RTE", (2490, 277), "sentence1", "sentence2", "label"),
    "wnli": GlueTask("WNLI", (635, 71), "sentence1", "sentence2", "label"),
}


def glue_files(task: str, folder: Path) -> tuple[GlueTask, Path, Path]:
    """The task, its training file and its dev file, plain or .gz, in `folder` or in the task's folder there."""
    row = _checks.look_up(task, GLUE, "glue task")
    found = []
    for part in ("train", row.dev):
        places = [d / f"{part}.tsv{end}" for d in (folder / row.folder, folder) for end in ("", ".gz")]
        file = next((p for p in places if p.is_file()), None)
        if file is None:
            raise FileNotFoundError(
                f"no {part}.tsv or {part}.tsv.gz of {row.folder} in {folder} or {places[0].parent}; "
                f"get it from {GLUE_WHERE}"
            )
        found.append(file)
    return row, found[0], found[1]


def miscounted(task: str, folder: Path) -> str | None:
    """A note on files with another number of rows than GLUE's, which may be intended; None if they have the same."""
    from snnk.hf.data import column_of, read_columns  # late: it loads torch

    row, *files = glue_files(task, folder)
    rows = tuple(len(column_of(read_columns(file, row.columns, spare=True), row.label, file)) for file in files)
    if rows == row.rows:
        return None
    ours, theirs = (f"{train:,} and {dev:,}" for train, dev in (rows, row.rows))
    return f"{row.folder}: {ours} rows of train and dev where GLUE has {theirs}"
