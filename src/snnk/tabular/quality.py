"""How good a fitted model is: figures on rows that it was not fitted to, and how much each column matters.

The predictions of classes depend on a calibration, which needs such rows too. So the figures of a classifier are cross-
fitted: a calibration of one half of the rows gives the probabilities of the other half, and vice versa. The calibration
that is returned is that of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from snnk import _checks
from snnk.tabular.calibration import BOUNDS, FLOORS, PlattScaling, expected_calibration_error, log_loss, roc_auc
from snnk.tabular.sample import content_hash
from snnk.tabular.scaling import LARGEST, Array, standardise

if TYPE_CHECKING:
    from snnk.tabular.columns import Column, Columns
    from snnk.tabular.model import TableModel

FEWEST = 20  # number of held-out rows for any figure
MOST_CLASSES = 20  # that are listed, the largest first
RARE = 0.01  # share of the rows below which a class is rare
BINS = 10
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
PERMUTATIONS = 3
MOST_ROWS, LEAST_ROWS = 2000, 200  # of the permutations
WORK = 1 << 30  # number of features that the permutations may compute before they use fewer rows
SEED = 0

KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number >= 0", lambda value: _checks.is_integer(value) and value >= 0),
    "number": ("a finite number", lambda value: _checks.is_number(value) and abs(value) <= LARGEST),
    "share": ("a number from 0 to 1", lambda value: _checks.is_number(value) and 0 <= value <= 1),
    "text": ("a text", lambda value: isinstance(value, str)),
}
IMPORTANCES = {
    "of": "text",
    "rows": "count",
    "columns": [{"column": "text", "loss": "number", "standard_deviation": "number"}],
}
SHAPES: dict[str, dict[str, Any]] = {  # of the figures of each task; a question mark stands for null
    "classification": {
        "accuracy": "share",
        "most_frequent_class": "text",
        "most_frequent_accuracy": "share",
        "balanced_accuracy": "share",
        "auc": "share?",
        "log_loss": "number",
        "calibration_error": "share",
        "num_classes": "count",
        "classes": [
            {"class": "text", "rows": "count", "recall": "share?", "precision": "share?", "mistaken_for": "text?"}
        ],
        "reliability": [{"predicted": "share", "observed": "share", "rows": "count"}],
        "importances": IMPORTANCES,
    },
    "regression": {
        "r2": "number?",
        "r2_of_the_mean": "number",
        "mean_absolute_error": "number?",
        "root_mean_squared_error": "number?",
        "residual_quantiles": [{"share": "share", "residual": "number?"}],
        "binned": [
            {"predicted": "number?", "observed": "number?", "low": "number?", "high": "number?", "rows": "count"}
        ],
        "importances": IMPORTANCES,
    },
}
ALWAYS = {"task": "text", "rows": "count", "warnings": ["text"]}


def assess(model_without: TableModel, x: Tensor, y: Tensor) -> tuple[PlattScaling | None, dict[str, Any]]:
    """Measure a model on held-out rows; returns a calibration for its classes, and a dict of figures for JSON.

    With fewer than 20 rows there is no calibration and no figure but their number.

    Args:
        model_without: a model that was fitted without these rows.
        x, y: inputs (n, width) and targets (n, t) of the rows, as `Columns.encode` returns them.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet as pq, tempfile
        >>> from pathlib import Path
        >>> from snnk.tabular import FitConfig, TableModel, fit
        >>> folder = Path(tempfile.mkdtemp())
        >>> a = np.linspace(-2, 2, 200)
        >>> table = pa.table({"a": a, "noise": np.cos(9 * a), "y": a > 0})
        >>> pq.write_table(table, folder / "data.parquet")
        >>> _ = fit(folder / "data.parquet", folder / "model", FitConfig("y", num_features=32))
        >>> model = TableModel.load(folder / "model")
        >>> x, y, _ = model.columns.encode(table.to_batches()[0], "rows")
        >>> calibration, figures = assess(model, x, y)
        >>> figures["accuracy"] > 0.9, figures["importances"]["columns"][0]["column"]
        (True, 'a')
    """
    target = model_without.columns.target
    task = "regression" if target.categories is None else "classification"
    found: dict[str, Any] = {"task": task, "rows": len(x), "warnings": _unused(model_without.columns)}
    if (inputs := len(content_hash(x).unique())) < FEWEST:
        different = f" with {inputs} different inputs" if inputs < len(x) else ""
        found["warnings"].append(
            f"Only {len(x)} rows{different} were held out, and figures need at least {FEWEST}: fit to more rows, of "
            "which about a tenth are held out, or measure the model with snnk predict on rows that it has not seen."
        )
        return None, found
    if target.categories is not None and target.width < 2:
        found["warnings"].append(f"All rows have the same {target.name!r}, so that there is nothing to measure.")
        return None, found
    outputs, calibration = model_without.outputs(x), None
    if target.categories is None:
        guess = standardise(outputs[:, 0].numpy(), target.mean, target.scale)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is null
            found |= _of_numbers(guess, y[:, 0].numpy(), target)
        found["warnings"] += _useless(found, target)
    else:
        labels = y.argmax(1)
        outputs = outputs.clamp(*BOUNDS)
        calibration = PlattScaling.fit(outputs, y, floors=FLOORS)  # which may be the probabilities of a teacher
        p = cross_fitted(outputs, y)
        found |= _of_classes(p, labels, target.categories)
        found["warnings"] += _imbalance(found, p.argmax(1), labels, target.categories)
    found["importances"] = _importances(replace(model_without, calibration=calibration), x, y)
    return calibration, found


def _unused(columns: Columns) -> list[str]:
    """A sentence on the columns that are no inputs: identifiers, and categories without a value."""
    names = [repr(column.name) for column in columns.inputs if not column.width]
    if not names:
        return []
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return [
        f"Not used: {', '.join(names[:5])}{more}. Almost every row has a category of its own there, or none, or the "
        "other columns follow from it: it looks like an identifier, from which nothing follows for other rows. If its "
        "categories come again in new rows, add a column that tells rows of one category apart, such as a time or a "
        "random number."
    ]


def cross_fitted(scores: Tensor, labels: Tensor) -> Tensor:
    """Probabilities (n, k) of scores (n, k), each half of the rows by the calibration of the other half.

    Labels are those of `PlattScaling.fit`: classes (n,), or their probabilities (n, k).

    Example:
        >>> scores = torch.eye(2).double().repeat(20, 1)
        >>> cross_fitted(scores, torch.arange(40) % 2).shape
        torch.Size([40, 2])
    """
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(SEED))
    half = len(order) // 2
    found = torch.empty(scores.shape, dtype=torch.float64)
    for rows, others in ((order[:half], order[half:]), (order[half:], order[:half])):
        found[rows] = PlattScaling.fit(scores[others], labels[others], floors=FLOORS).probabilities(scores[rows])
    return found


def _of_classes(p: Tensor, labels: Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    guess = p.argmax(1)
    right, k = guess == labels, len(names)
    rows, guessed, hits = (torch.bincount(c, minlength=k).double() for c in (labels, guess, labels[right]))
    recall = (hits / rows)[rows > 0]
    listed = []
    for c in rows.argsort(descending=True, stable=True)[:MOST_CLASSES].tolist():
        wrong = torch.bincount(guess[(labels == c) & ~right], minlength=k)
        listed.append(
            {
                "class": names[c],
                "rows": int(rows[c]),
                "recall": float(hits[c] / rows[c]) if rows[c] else None,
                "precision": float(hits[c] / guessed[c]) if guessed[c] else None,
                "mistaken_for": names[int(wrong.argmax())] if wrong.any() else None,
            }
        )
    return {
        "accuracy": float(right.double().mean()),
        "most_frequent_class": names[int(rows.argmax())],
        "most_frequent_accuracy": float(rows.max() / len(labels)),
        "balanced_accuracy": float(recall.mean().clamp(0, 1)),
        "auc": roc_auc(p, labels),
        "log_loss": log_loss(p, labels),
        "calibration_error": expected_calibration_error(p, labels),
        "num_classes": k,
        "classes": listed,
        "reliability": _reliability(p.max(1).values, right),
    }


def _reliability(confidence: Tensor, right: Tensor) -> list[dict[str, Any]]:
    """Bins of equal width of the largest probability; those without rows are left out."""
    place = (confidence * BINS).ceil().long().clamp(1, BINS)
    return [
        {
            "predicted": float(confidence[mine].mean().clamp(0, 1)),  # rounded, it may be above 1
            "observed": float(right[mine].double().mean()),
            "rows": int(mine.sum()),
        }
        for mine in (place == b for b in range(1, BINS + 1))
        if bool(mine.any())
    ]


def _imbalance(found: dict[str, Any], guess: Tensor, labels: Tensor, names: tuple[str, ...]) -> list[str]:
    """Sentences on rare classes, and on predictions that are no better than one class for all rows."""
    rows, guessed = (torch.bincount(c, minlength=len(names)) for c in (labels, guess))
    order = rows.argsort(stable=True).tolist()
    rare = [c for c in order if rows[c] < RARE * len(labels)]
    never = [c for c in order if rows[c] and not guessed[c]]

    def listed(classes: list[int]) -> str:
        more = f" and {len(classes) - 5:,} more" if len(classes) > 5 else ""
        return ", ".join(f"{names[c]!r} ({int(rows[c]):,} row{'s' * int(rows[c] != 1)})" for c in classes[:5]) + more

    said = []
    if rare:
        said.append(
            f"Imbalance: {len(rare):,} of {len(names):,} classes {'have' if len(rare) > 1 else 'has'} fewer than 1 % "
            f"of the {len(labels):,} held-out rows: {listed(rare)}. Accuracy hardly depends on them; look at the "
            f"recall of each class{', which classes without rows do not have' if not all(rows[rare]) else ''}."
        )
    if never:
        said.append(
            f"Imbalance: {len(never):,} of {len(names):,} classes {'are' if len(never) > 1 else 'is'} never "
            f"predicted: {listed(never)}. Compare their probabilities with a threshold of your own, or fit to more "
            "rows of them."
        )
    if found["accuracy"] <= found["most_frequent_accuracy"]:
        said.append(
            f"The predictions are no better than always {found['most_frequent_class']!r}, the most frequent class."
        )
    return said


def _of_numbers(guess: Array, y: Array, target: Column) -> dict[str, Any]:
    """Figures from standardised predictions and targets (n,), in which squares do not overflow."""
    rest = y - guess

    def size(value: Any) -> float | None:
        return _finite(value * target.scale)

    def real(value: Any) -> float | None:
        return _finite(value * target.scale + target.mean)

    bins = np.array_split(np.argsort(guess, kind="stable"), BINS)
    return {
        "r2": _r2(guess, y),
        "r2_of_the_mean": 0.0,
        "mean_absolute_error": size(np.abs(rest).mean()),
        "root_mean_squared_error": size(math.sqrt(np.square(rest).mean())),
        "residual_quantiles": [
            {"share": share, "residual": size(value)}
            for share, value in zip(QUANTILES, np.quantile(rest, QUANTILES), strict=True)
        ],
        "binned": [
            {
                "predicted": real(guess[rows].mean()),
                "observed": real(y[rows].mean()),
                "low": real(np.quantile(y[rows], 0.1)),
                "high": real(np.quantile(y[rows], 0.9)),
                "rows": len(rows),
            }
            for rows in bins
        ],
    }


def _useless(found: dict[str, Any], target: Column) -> list[str]:
    r2 = found["r2"]
    if r2 is None:
        return [f"All held-out values of {target.name!r} are the same, so that R2 is not defined."]
    if r2 > 0:
        return []
    return [
        f"The predictions are no better than the mean of {target.name!r}: R2 is {r2:.3f}. The columns may not "
        "determine it, or there may be too few rows."
    ]


def _r2(guess: Array, y: Array) -> float | None:
    """The share of the variance that is explained; None if all values are the same."""
    with np.errstate(over="ignore"):
        variation, rest = (float(np.square(y - other).sum()) for other in (y.mean(), guess))
    if not variation:
        return None
    found = 1 - rest / variation
    return found if found > -LARGEST else -LARGEST  # also if a prediction is no number


def _finite(value: float) -> float | None:
    """A number of JSON: neither infinite nor one of numpy's."""
    return float(value) if math.isfinite(value) else None


def _importances(model: TableModel, x: Tensor, y: Tensor) -> dict[str, Any]:
    """The mean loss of accuracy or R2, and its deviation, if the inputs of one column are permuted among the rows."""
    generator = torch.Generator().manual_seed(SEED)
    inputs, target = model.columns.inputs, model.columns.target
    affordable = WORK // (PERMUTATIONS * len(inputs) * model.config.num_features)
    rows = torch.randperm(len(x), generator=generator)[: min(MOST_ROWS, max(LEAST_ROWS, affordable))]
    x, y = x[rows], y[rows]

    def score(x: Tensor) -> float | None:
        outputs = model.outputs(x)
        if target.categories is None:
            return _r2(standardise(outputs[:, 0].numpy(), target.mean, target.scale), y[:, 0].numpy())
        return float((model.probabilities_of(outputs).argmax(1) == y.argmax(1)).double().mean())

    whole, place = score(x), 0
    found: list[dict[str, Any]] = []
    for column in inputs:
        span = slice(place, place + column.width)
        place += column.width
        losses = []
        for _ in range(PERMUTATIONS):
            changed = x.clone()
            changed[:, span] = x[torch.randperm(len(x), generator=generator), span]
            permuted = score(changed)
            if whole is not None and permuted is not None:
                losses.append(whole - permuted)
        if losses:
            deviation = float(np.std(losses, ddof=1)) if len(losses) > 1 else 0.0
            found.append({"column": column.name, "loss": float(np.mean(losses)), "standard_deviation": deviation})
    found.sort(key=lambda row: -row["loss"])
    return {"of": "R2" if target.categories is None else "accuracy", "rows": len(x), "columns": found}


def check_quality(stored: Any) -> dict[str, Any]:
    """Figures of `assess` from a file; every key and every type is checked.

    Example:
        >>> check_quality({"task": "regression", "rows": 3, "warnings": []})["rows"]
        3
    """
    if not isinstance(stored, dict) or stored.get("task") not in list(SHAPES):
        raise ValueError(f"the quality must have a task, one of {', '.join(SHAPES)}; got {_short(stored)}")
    # without enough rows there are no figures
    shape = ALWAYS if set(stored) == set(ALWAYS) else ALWAYS | SHAPES[stored["task"]]
    _check(stored, shape, "the quality")
    return stored


def _check(value: Any, shape: Any, name: str) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict) or set(value) != set(shape):
            raise ValueError(f"{name} must have {', '.join(shape)}; got {_short(value)}")
        for key, inner in shape.items():
            _check(value[key], inner, f"{key} of {name}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list; got {_short(value)}")
        for item in value:
            _check(item, shape[0], f"an entry of {name}")
    elif not (value is None and shape.endswith("?")):
        said, right = KINDS[shape.removesuffix("?")]
        if not right(value):
            raise ValueError(f"{name} must be {said}; got {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
