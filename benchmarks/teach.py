"""Students of `snnk fit` beside their teachers: how often both agree, how often each is right, and what each costs.

    python benchmarks/teach.py --covertype FILE [--seeds 3] [--out FILE]
    python benchmarks/teach.py --quick

FILE is UCI's CoverType as Parquet, with the target `Cover_Type`. A fifth of the rows are test rows, as in
benchmarks/tables.py. Of the others, 100,000 have labels, from which the teacher learns, and 200,000 have none: the
teacher's probabilities are their target, and the student is fitted to them. The teachers are
HistGradientBoostingClassifier with its defaults, which stop early, with 200 and 600 trees per class, and with 600 at a
lower learning rate. The students have 512 features (the default of `snnk fit`) and 128. The teacher "labels" is no
model: its students are fitted to the 100,000 labels themselves, which shows whether a teacher is worth having.

Every teacher has a process of its own with one thread. Predictions are those of `predict` for a frame of all test rows,
which counts in the time of both. --quick has the digits of scikit-learn and two small teachers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tables import Task, load

from snnk.experiments.lab.records import Results, Row

TEACHERS: dict[str, dict[str, Any] | None] = {  # arguments of HistGradientBoostingClassifier; None for the labels
    "labels": None,
    "default": {},
    "200 trees": {"max_iter": 200, "early_stopping": False},
    "600 trees": {"max_iter": 600, "early_stopping": False},
    "600 trees, rate 0.03": {"max_iter": 600, "early_stopping": False, "learning_rate": 0.03},
}
STUDENTS = (512, 128)
FIGURES = (
    "teacher_accuracy",
    "student_accuracy",
    "agreement",
    "teacher_seconds_per_million",
    "student_seconds_per_million",
    "teacher_fit_seconds",
    "teaching_seconds",
    "student_fit_seconds",
)


@dataclass(frozen=True)
class Config:
    seeds: int = 3
    labelled: int = 100_000
    unlabelled: int = 200_000
    students: tuple[int, ...] = STUDENTS


def timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Processor seconds of a call, and its result."""
    began = time.process_time()
    found = call(*args)
    return time.process_time() - began, found


def measure(key: Row, config: Config, files: dict[str, str]) -> list[Row]:
    """The rows of one teacher: one per size of the student."""
    import torch
    from sklearn.ensemble import HistGradientBoostingClassifier

    torch.set_num_threads(1)
    task = load(key["table"], files, key["seed"], config.labelled + config.unlabelled)
    count = min(config.labelled, len(task.train) // 3)
    labelled, unlabelled = task.train[:count], task.train[count:]
    x, y, test = task.x.iloc[labelled], task.y[labelled], task.x.iloc[task.test]
    common: Row = {**key, "test_rows": len(test)}
    options, guess = TEACHERS[key["teacher"]], None
    with tempfile.TemporaryDirectory() as name:
        rows, taught = Path(name) / "rows.parquet", Path(name) / "taught.parquet"
        if options is None:
            x.assign(target=y).to_parquet(taught, row_group_size=1 << 16, index=False)
            common |= {"teacher_rows": 0, "student_rows": len(x)}
        else:
            task.x.iloc[unlabelled].to_parquet(rows, row_group_size=1 << 16, index=False)
            teacher = HistGradientBoostingClassifier(random_state=key["seed"], **options)
            common |= {"teacher_rows": len(x), "student_rows": len(unlabelled)}
            common["teacher_fit_seconds"], _ = timed(teacher.fit, x, y)
            seconds, guess = timed(teacher.predict, test)
            common |= {"iterations": teacher.n_iter_, "teacher_accuracy": float(np.mean(guess == task.y[task.test]))}
            common["teacher_seconds_per_million"] = seconds * 1e6 / len(test)
            common["teaching_seconds"], _ = timed(label, teacher, rows, taught)
        return [{**common, **student(taught, task, m, key["seed"], guess)} for m in config.students]


def label(teacher: Any, rows: Path, out: Path) -> None:
    """Write the table of a student: rows with the probabilities of the teacher."""
    from snnk.tabular import teach

    names = [str(c) for c in teacher.classes_]
    teach(rows, out, lambda batch: teacher.predict_proba(batch.to_pandas()), "target", classes=names)


def student(taught: Path, task: Task, features: int, seed: int, guess: Any) -> Row:
    """The figures of a student, with the predictions of the teacher for the test rows if there is one."""
    from snnk.tabular import FitConfig, TableModel, fit

    folder = taught.with_name(f"model-{features}")
    config = FitConfig("target", num_features=features, seed=seed, task="classification")
    spent, _ = timed(fit, taught, folder, config)
    model, test = TableModel.load(folder), task.x.iloc[task.test]
    seconds, found = timed(lambda: [values for values, _ in model.predict(test)])
    own = np.concatenate([np.asarray(values) for values in found]).astype(task.y.dtype)
    row = {"student": features, "student_accuracy": float(np.mean(own == task.y[task.test]))}
    row |= {"student_seconds_per_million": seconds * 1e6 / len(test), "student_fit_seconds": spent}
    return row if guess is None else {**row, "agreement": float(np.mean(own == guess))}


def keys(tables: list[str], teachers: list[str], seeds: int) -> Iterator[Row]:
    yield from ({"table": table, "teacher": t, "seed": s} for table in tables for s in range(seeds) for t in teachers)


def summary(results: Results) -> str:
    """A line per teacher and student: the mean of each figure over the seeds."""
    lines = []
    for teacher, features in dict.fromkeys((row["teacher"], row["student"]) for row in results):
        rows = [row for row in results if (row["teacher"], row["student"]) == (teacher, features)]
        shown = [f"{n.replace('_', ' ')} {np.mean([row[n] for row in rows]):.4g}" for n in FIGURES if n in rows[0]]
        lines.append(f"{teacher}, {features} features: {', '.join(shown)}, {len(rows)} seed{'s' * (len(rows) > 1)}\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small table and one seed")
    parser.add_argument("--covertype", help="Parquet file of CoverType")
    parser.add_argument("--teachers", help="names of teachers with semicolons between them; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/teach.json"))
    args = parser.parse_args()
    if not (args.quick or args.covertype):
        parser.error("name the file of --covertype, or give --quick")
    config = Config(1, 500, 900, (64,)) if args.quick else Config(args.seeds)
    teachers = args.teachers.split(";") if args.teachers else list(TEACHERS)[: 2 if args.quick else None]
    os.environ["OMP_NUM_THREADS"] = "1"
    results = Results(args.out, config)
    one = partial(measure, config=config, files={"covertype": args.covertype})
    tables = ["digits"] if args.quick else ["covertype"]
    missing = [key for key in keys(tables, teachers, config.seeds) if not results.find(**key)]
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for rows in pool.imap(one, missing):
            for row in rows:
                results.add(row)
            sys.stdout.write(f"{rows[0]['teacher']}, seed {rows[0]['seed']}: done\n")
            sys.stdout.flush()
    sys.stdout.write(summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
