"""`snnk fit` on tables against what a data scientist would use instead, at equal rows and with default settings.

    python benchmarks/tables.py --covertype FILE [--flights FILE] [--seeds 3] [--out FILE]
    python benchmarks/tables.py --quick

FILE is a Parquet file: UCI's CoverType with the target `Cover_Type`; or flights-3m.parquet of the npm package
vega-datasets, of which the target is whether a flight is at least 15 minutes late. Tables that come with scikit-learn
are always there. A fifth of the rows, at most 200,000, are test rows, which are evaluated once per row of the results;
the others, at most 600,000, are training rows. "5,500" in the name of a table means as many training rows.

Every fit has a process of its own with one thread, so that its processor time and its peak memory are its own. All
methods read the same columns. Rivals have scikit-learn's usual preparation in a pipeline, which counts in their time:
one-hot categories and standardised numbers for linear models and networks, categories as such for trees, and month,
weekday, hour and minute of a date. `snnk fit` reads a Parquet file, which counts in its time. The MLP stops early, as
its other default takes an hour here. Bandwidth and penalty of RBFSampler and Nystroem are the best of nine by accuracy
on a fifth of the training rows, and the time of that search does not count.

The memory of "nothing" is that of a process that has loaded packages and the table. --quick has small tables, which
show that the script runs.
"""

from __future__ import annotations

import argparse
import os
import resource
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
import pandas as pd

from snnk.experiments.lab.records import Results, Row

FEW = 5_500
MOST_ROWS, MOST_TEST = 600_000, 200_000
LATE = 15  # minutes
FEATURES = 1024  # of random features in scikit-learn
SNNK: dict[str, dict[str, Any]] = {  # what differs from the defaults of FitConfig
    "snnk fit": {},
    "snnk fit, 2048 features": {"num_features": 2048},
    "snnk fit, learned-deep": {"feature_map": "learned-deep"},
}
SKLEARN = ("breast_cancer", "digits", "wine", "diabetes")
LARGE = ("covertype", "flights")
KERNELS = [(b, penalty) for b in (0.7, 1.4, 2.8) for penalty in (1e-2, 1.0, 100.0)]


@dataclass(frozen=True)
class Config:
    seeds: int = 3
    seed: int = 0
    most_rows: int = MOST_ROWS
    kernel_features: int = FEATURES


@dataclass(frozen=True)
class Task:
    """A table without its target, the target, and which rows are for training and for the test."""

    x: pd.DataFrame
    y: Any
    train: Any
    test: Any
    classes: bool


def load(table: str, files: dict[str, str], seed: int, most_rows: int) -> Task:
    """A table by name; ", 5,500" behind it limits the training rows."""
    name = table.removesuffix(", 5,500")
    if name in SKLEARN:
        from sklearn import datasets

        found = getattr(datasets, f"load_{name}")(as_frame=True)
        x, y = found.data, found.target.to_numpy()
    else:
        frame = pd.read_parquet(files[name])
        if name == "flights":
            y = np.where(frame.pop("delay") >= LATE, "late", "on time")
        else:
            y = frame.pop("Cover_Type").to_numpy()
        x = frame
    order = np.random.default_rng(seed).permutation(len(x))
    test = min(len(x) // 5, MOST_TEST)
    train = order[test:][: FEW if name != table else most_rows]
    return Task(x, y, train, order[:test], table != "diabetes")


def dates_apart(x: pd.DataFrame) -> pd.DataFrame:
    """Month, day of the month, weekday, hour and minute in place of a date, and texts as categories."""
    parts = {}
    for name, column in x.items():
        if pd.api.types.is_datetime64_any_dtype(column):
            for part in ("month", "day", "dayofweek", "hour", "minute"):
                parts[f"{name} {part}"] = getattr(column.dt, part).astype("float32")
        elif pd.api.types.is_numeric_dtype(column):
            parts[str(name)] = column.astype("float32")
        else:
            parts[str(name)] = column.astype("category")
    return pd.DataFrame(parts)


def prepared(model: Any, x: pd.DataFrame) -> Any:
    """A pipeline with one-hot categories and standardised numbers."""
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    onehot = OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float32)
    encode = make_column_transformer(
        (onehot, make_column_selector(dtype_include="category")), remainder=StandardScaler()
    )
    return make_pipeline(encode, *model)


def linear(classes: bool, seed: int) -> list[Any]:
    from sklearn.linear_model import LogisticRegression, Ridge

    return [LogisticRegression(max_iter=1000) if classes else Ridge()]


def network(classes: bool, seed: int) -> list[Any]:
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    return [(MLPClassifier if classes else MLPRegressor)(early_stopping=True, random_state=seed)]


def kernel(name: str, task: Task, seed: int, features: int) -> list[Any]:
    """Features of a kernel and ridge regression on them; bandwidth and penalty are chosen on rows of the training."""
    from sklearn import kernel_approximation
    from sklearn.linear_model import Ridge, RidgeClassifier

    width = task.x.shape[1]

    def make(bandwidth: float, penalty: float, m: int) -> list[Any]:
        sampler = getattr(kernel_approximation, name)(
            gamma=bandwidth**2 / (2 * width), n_components=m, random_state=seed
        )
        return [sampler, RidgeClassifier(alpha=penalty) if task.classes else Ridge(alpha=penalty)]

    rows = task.train[: min(len(task.train), 20_000)]
    cut = len(rows) - len(rows) // 5
    x, y = task.x, task.y
    scores = {
        (b, p): prepared(make(b, p, min(features, 512)), x)
        .fit(x.iloc[rows[:cut]], y[rows[:cut]])
        .score(x.iloc[rows[cut:]], y[rows[cut:]])
        for b, p in KERNELS
    }
    return make(*max(scores, key=lambda key: scores[key]), features)


def trees(library: str, classes: bool, seed: int) -> Any:
    if library == "lightgbm":
        import lightgbm

        kind = lightgbm.LGBMClassifier if classes else lightgbm.LGBMRegressor
        return kind(random_state=seed, n_jobs=1, verbose=-1)
    from sklearn import ensemble

    kind = ensemble.HistGradientBoostingClassifier if classes else ensemble.HistGradientBoostingRegressor
    return kind(random_state=seed, categorical_features="from_dtype")


def rival(method: str, task: Task, config: Config, seed: int) -> tuple[float, Any, Any]:
    """Processor seconds of the training, predictions for the test rows, and probabilities if the method has them."""
    if method in ("RBFSampler + Ridge", "Nystroem + Ridge"):
        model = prepared(kernel(method.split(" + ")[0], task, seed, config.kernel_features), task.x)
    elif method in ("logistic regression", "MLP"):
        make = linear if method == "logistic regression" else network
        model = prepared(make(task.classes, seed), task.x)
    else:
        model = trees({"LightGBM": "lightgbm"}.get(method, "sklearn"), task.classes, seed)
    began = time.process_time()
    model.fit(task.x.iloc[task.train], task.y[task.train])
    seconds = time.process_time() - began
    rows = np.array_split(task.test, max(len(task.test) // 10_000, 1))
    guess = np.concatenate([model.predict(task.x.iloc[part]) for part in rows])
    if not hasattr(model, "predict_proba"):
        return seconds, guess, None
    return seconds, guess, np.concatenate([model.predict_proba(task.x.iloc[part]) for part in rows])


def ours(method: str, task: Task, seed: int) -> tuple[float, Any, Any]:
    """The same for `snnk fit`."""
    from snnk.tabular import FitConfig, TableModel, fit

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("train", "test"):
            rows = getattr(task, part)
            frame = task.x.iloc[rows].assign(target=task.y[rows])
            frame.to_parquet(folder / f"{part}.parquet", row_group_size=1 << 16, index=False)
        del frame
        kind = "classification" if task.classes else "regression"
        config = FitConfig("target", seed=seed, task=kind, **SNNK[method])
        began = time.process_time()
        fit(folder / "train.parquet", folder / "model", config)
        seconds = time.process_time() - began
        model = TableModel.load(folder / "model")
        model.write_predictions(folder / "test.parquet", folder / "out.parquet")
        found = pd.read_parquet(folder / "out.parquet")
    guess = found.pop("predicted_target").to_numpy()
    if not task.classes:
        return seconds, guess, None
    order = np.unique(task.y)
    return seconds, guess.astype(task.y.dtype), found[[f"probability_{c}" for c in order]].to_numpy()


METHODS = (
    *SNNK,
    "logistic regression",
    "HistGradientBoosting",
    "LightGBM",
    "RBFSampler + Ridge",
    "Nystroem + Ridge",
    "MLP",
)


def measure(key: Row, config: Config, files: dict[str, str]) -> Row:
    """The row of one table, method and seed."""
    import torch
    from sklearn import metrics

    torch.set_num_threads(1)
    task = load(key["table"], files, key["seed"], config.most_rows)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    method, seed = key["method"], key["seed"]
    if method not in SNNK:
        task = Task(dates_apart(task.x), task.y, task.train, task.test, task.classes)
    seconds, guess, p = ours(method, task, seed) if method in SNNK else rival(method, task, config, seed)
    y = task.y[task.test]
    row = {**key, "rows": len(task.train), "test_rows": len(y), "processor_seconds": seconds}
    row |= {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "table_bytes": loaded}
    if not task.classes:
        return {**row, "r2": metrics.r2_score(y, guess)}
    row["accuracy"] = float(np.mean(guess == y))
    if p is not None:
        order, p = np.unique(task.y), p / p.sum(1, keepdims=True)
        row["auc"] = metrics.roc_auc_score(y, p[:, 1] if len(order) == 2 else p, multi_class="ovr", labels=order)
        row["log_loss"] = metrics.log_loss(y, p, labels=order)
    return row


def keys(tables: list[str], methods: tuple[str, ...], seeds: int) -> Iterator[Row]:
    for table in tables:
        for seed in range(seeds):
            for method in methods:
                yield {"table": table, "method": method, "seed": seed}


def summary(results: Results) -> str:
    """A line per table and method: the mean of each figure over the seeds."""
    lines = []
    for table in dict.fromkeys(row["table"] for row in results):
        lines.append(f"{table}:")
        for method in dict.fromkeys(row["method"] for row in results if row["table"] == table):
            rows = [row for row in results if (row["table"], row["method"]) == (table, method)]
            figures = [name for name in ("accuracy", "auc", "log_loss", "r2") if name in rows[0]]
            shown = [f"{name} {np.mean([row[name] for row in rows]):.4f}" for name in figures]
            seconds, peak = (np.mean([row[name] for row in rows]) for name in ("processor_seconds", "peak_bytes"))
            lines.append(f"  {method}: {', '.join(shown)}, {seconds:.1f} s, {peak / 1e9:.2f} GB, {len(rows)} seeds")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tables of scikit-learn and one seed")
    for name in LARGE:
        parser.add_argument(f"--{name}", help=f"Parquet file of {name}")
    parser.add_argument("--methods", help="names of methods with semicolons between them; default: all")
    parser.add_argument("--tables", help="names of tables with semicolons between them; default: all that are there")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tables.json"))
    args = parser.parse_args()
    files = {name: value for name in LARGE if (value := getattr(args, name))}
    config = Config(seeds=1, kernel_features=64) if args.quick else Config(args.seeds)
    methods = tuple(args.methods.split(";")) if args.methods else METHODS[: 3 if args.quick else None]
    tables = [*(f"{name}{few}" for few in ("", ", 5,500") for name in files), *SKLEARN[: 2 if args.quick else None]]
    tables = args.tables.split(";") if args.tables else tables
    os.environ["OMP_NUM_THREADS"] = "1"
    results = Results(args.out, config)
    one: Callable[[Row], Row] = partial(measure, config=config, files=files)
    missing = [key for key in keys(tables, methods, config.seeds) if not results.find(**key)]
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(one, missing):
            results.add(row)
            figure = row.get("accuracy", row.get("r2"))
            sys.stdout.write(f"{row['table']}, {row['method']}: {figure:.4f} in {row['processor_seconds']:.1f} s\n")
            sys.stdout.flush()
    sys.stdout.write(summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
