"""report.html: the page on a fitted model, with its figures on held-out rows and the columns that matter.

It is made from two dicts that JSON holds: the report of `fit`, and the figures of `assess`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from snnk import _io
from snnk._html import NEW, bars, diagonal, facts, glossary, page, table
from snnk._text import html as escape

MOST_BARS = 30  # columns whose importances are drawn
FACTS = {  # what the page shows of a report, and of its settings, in this order
    "rows": "rows",
    "inputs": "inputs of the feature map",
    "num_features": "random features",
    "feature_map": "feature map",
    "bandwidth": "bandwidth",
    "lam": "penalty",
    "degrees_of_freedom": "degrees of freedom",
    "missing": "missing values",
    "drop": "columns left out",
    "workers": "workers",
    "seed": "seed",
    "seconds": "seconds",
}
WORDS = {
    "held-out rows": "Rows of the table that the model of these figures was not fitted to.",
    "importance": "How much of the accuracy, or of R2, is lost if the values of one column are permuted among the "
    "rows, so that they no longer belong to their rows. It is the mean of three permutations; the number behind the "
    "sign ± is their standard deviation. Columns that carry the same information share their importance: each may look "
    "unimportant alone. An importance is no proof of a cause.",
    "random features": "The functions of the inputs that the model is a weighted sum of.",
    "penalty": "The strength of the ridge regression, which keeps the weights small.",
    "degrees of freedom": "How many weights the data effectively determine; the penalty makes them fewer than there "
    "are features.",
}
CLASS_WORDS = {
    "accuracy": "The share of rows whose class is predicted right.",
    "balanced accuracy": "The mean of the recalls of all classes: rare classes count as much as frequent ones.",
    "AUC": "The chance that a row of a class has a larger probability of this class than a row of another class: 0.5 "
    "is chance, and 1 is perfect. With more than two classes it is the mean over the classes.",
    "log-loss": "The mean of -log of the probability of the true class: 0 is perfect. A confident mistake costs much.",
    "calibration error": "The mean distance between the probability of the predicted class and how often that class "
    "is the true one. If it is 0.02, probabilities are wrong by about two percent points.",
    "recall": "Of the rows of a class, the share that is predicted as this class.",
    "precision": "Of the rows that are predicted as a class, the share that is of this class.",
}
NUMBER_WORDS = {
    "R2": "The share of the variance that the predictions explain: 1 is perfect, and 0 is as good as always predicting "
    "the mean.",
    "mean absolute error": "The mean distance between prediction and value, in the unit of the target.",
    "root mean squared error": "The square root of the mean squared distance, in the unit of the target; large errors "
    "count more.",
    "residual": "The observed value minus the predicted one.",
}


def write_page(path: str | os.PathLike[str], report: Mapping[str, Any], quality: Mapping[str, Any]) -> None:
    """Write the page on a fitted model: one file that loads nothing else.

    Args:
        path: the HTML file.
        report: what `fit` returns.
        quality: the figures of `assess`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp(), "report.html")
        >>> quality = {"task": "regression", "rows": 3, "warnings": ["Only 3 rows were held out."]}
        >>> write_page(path, {"rows": 30, "config": {"target": "price"}}, quality)
        >>> "<h1>A model of price</h1>" in path.read_text()
        True
    """
    with _io.replacing(path) as temporary:
        temporary.write_text(html(report, quality), encoding="utf-8")


def html(report: Mapping[str, Any], quality: Mapping[str, Any]) -> str:
    """The text of the page."""
    target = str(report["config"]["target"])
    classes = quality["task"] == "classification"
    parts = [f"<p>{escape(_fitted(report, quality))}</p>\n"]
    parts += [f"<p><b>Warning:</b> {escape(text)}</p>\n" for text in quality["warnings"]]
    if "importances" in quality:
        parts += [
            f'<div class="cards">{_cards(quality)}</div>\n',
            f"<p>{escape(_of_classes(quality) if classes else _of_numbers(quality, target))}</p>\n",
            '<p>The words are explained <a href="#words">below</a>.</p>\n',
            _importances(quality["importances"]),
            _class_parts(quality) if classes else _number_parts(quality, target),
        ]
    words = WORDS | (CLASS_WORDS if classes else NUMBER_WORDS)
    parts += ["<h2>How it was fitted</h2>\n", facts(_facts(report))]
    parts.append(glossary(words, "".join(parts)))
    return page(f"{target}, fitted by snnk", f"A model of {target}", "".join(parts))


def _fitted(report: Mapping[str, Any], quality: Mapping[str, Any]) -> str:
    """What was fitted, in a sentence."""
    kind = "A classifier" if quality["task"] == "classification" else "A regression"
    classes = f" with {quality['num_classes']:,} classes" if "num_classes" in quality else ""
    columns = quality.get("importances", {}).get("columns", ())
    count = f" from {len(columns):,} column{'s' * (len(columns) != 1)}" if columns else ""
    text = f"{kind} of {report['config']['target']}{classes}{count}, fitted in closed form to {report['rows']:,} rows."
    return f"{text} The figures are those of {quality['rows']:,} rows that were held out from a fit like it."


def _cards(quality: Mapping[str, Any]) -> str:
    """The first row of figures."""
    if quality["task"] == "classification":
        names = {"accuracy": "accuracy", "auc": "AUC", "log_loss": "log-loss", "calibration_error": "calibration error"}
    else:
        names = {
            "r2": "R2",
            "mean_absolute_error": "mean absolute error",
            "root_mean_squared_error": "root mean squared error",
        }
    return "".join(f"<div><b>{_shown(quality[key])}</b><span>{name}</span></div>" for key, name in names.items())


def _of_classes(quality: Mapping[str, Any]) -> str:
    """The figures of a classifier in words."""
    right, rows = quality["accuracy"], quality["rows"]
    error = math.sqrt(right * (1 - right) / rows)
    text = (
        f"The predicted class is right for {_percent(right)} of the held-out rows (standard error {_percent(error)}). "
        f"To predict always {quality['most_frequent_class']!r}, the most frequent class, would be right for "
        f"{_percent(quality['most_frequent_accuracy'])}. The mean of the recalls of all classes, the balanced "
        f"accuracy, is {_percent(quality['balanced_accuracy'])}. "
    )
    if quality["auc"] is not None:
        pair = "of the second class and one of the first" if quality["num_classes"] == 2 else "of a class and another"
        text += f"The probabilities put {_percent(quality['auc'])} of all pairs of a row {pair} in the right order. "
    return text + (
        f"The probability of the predicted class differs from how often it is right by "
        f"{_percent(quality['calibration_error'])} in the mean."
    )


def _of_numbers(quality: Mapping[str, Any], target: str) -> str:
    """The figures of a regression in words."""
    text = ""
    if quality["r2"] is not None:
        text = (
            f"The predictions explain {_percent(quality['r2'])} of the variance of {target} in the held-out rows; to "
            "predict always the mean would explain 0 %. "
        )
    text += f"A prediction is wrong by {_shown(quality['mean_absolute_error'])} in the mean. "
    found = {row["share"]: row["residual"] for row in quality["residual_quantiles"]}
    return text + (
        f"In nine of ten rows the observed value is between {_shown(found[0.05])} and {_shown(found[0.95])} above the "
        "predicted one (a negative number is below it)."
    )


def _importances(found: Mapping[str, Any]) -> str:
    rows = found["columns"]
    if not rows:
        return ""
    shown = rows[:MOST_BARS]
    text = (
        f"What is lost of the {found['of']} if the values of one column are permuted among {found['rows']:,} held-out "
        "rows. "
    )
    if len(shown) < len(rows):
        text += f"These are the largest {len(shown)} of {len(rows):,}; the others lose less. "
    drawn = bars(
        [row["column"] for row in shown],
        [(f"loss of {found['of']}", NEW, [max(row["loss"], 0.0) for row in shown])],
        [f"{row['loss']:.4f} ± {row['standard_deviation']:.4f}" for row in shown],
    )
    return f"<h2>Which columns matter</h2>\n<p>{escape(text)}</p>\n{drawn}"


def _class_parts(quality: Mapping[str, Any]) -> str:
    """The reliability diagram and the table of classes."""
    found = quality["reliability"]
    points = []
    for row in found:
        p, n = row["observed"], row["rows"]
        error = math.sqrt(p * (1 - p) / n)
        points.append((row["predicted"], p, max(p - 2 * error, 0.0), min(p + 2 * error, 1.0)))
    picture = diagonal(
        *(points, "predicted probability", "share that is right", (0.0, 1.0)),
        title="held-out rows; the lines are two standard errors long in each direction",
    )
    numbers = table(
        ["predicted probability", "share that is right", "rows"],
        ([_shown(row["predicted"]), _shown(row["observed"]), f"{row['rows']:,}"] for row in found),
    )
    listed = quality["classes"]
    some = (
        f"<p>These are the {len(listed)} most frequent of {quality['num_classes']:,} classes.</p>\n"
        if len(listed) < quality["num_classes"]
        else ""
    )
    classes = table(
        ["class", "held-out rows", "recall", "precision", "most often mistaken for"],
        (
            [
                row["class"],
                f"{row['rows']:,}",
                *map(_shown, (row["recall"], row["precision"])),
                row["mistaken_for"] or "-",
            ]
            for row in listed
        ),
    )
    return f"""<h2>Whether the probabilities can be trusted</h2>
<p>Held-out rows are grouped by the probability of their predicted class. On the dashed line, the class is right as
often as its probability promises; below it the model is too sure, and above it not sure enough.</p>
{picture}<details><summary>The numbers of this picture</summary>
{numbers}</details>
<h2>Each class</h2>
{some}{classes}"""


def _number_parts(quality: Mapping[str, Any], target: str) -> str:
    """Predicted against observed values, and the quantiles of the residual."""
    found = quality["binned"]
    points = [tuple(row[key] for key in ("predicted", "observed", "low", "high")) for row in found]
    values = [value for point in points for value in point]
    parts = []
    if None not in values and math.isfinite(max(values) - min(values)):
        heads = ["mean prediction", "mean observed value", "a tenth is below", "a tenth is above", "rows"]
        rows = ([*map(_shown, point), f"{row['rows']:,}"] for point, row in zip(points, found, strict=True))
        parts.append(
            f"""<h2>Predicted and observed values</h2>
<p>Held-out rows are grouped by their predictions, a tenth of the rows in each group. On the dashed line, the observed
values of {escape(target)} are as large as the predicted ones in the mean.</p>
{diagonal(points, "predicted", "observed", title="mean of a group; the lines cover 80 % of its rows")}
<details><summary>The numbers of this picture</summary>
{table(heads, rows)}</details>
"""
        )
    rows = ([_percent(row["share"]), _shown(row["residual"])] for row in quality["residual_quantiles"])
    return f"""{"".join(parts)}<h2>Residuals</h2>
<p>The residual is the observed value minus the predicted one. This table has the values that given shares of the
held-out rows are below.</p>
{table(["share of the rows", "residual below"], rows)}"""


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    values = {**report["config"], **report}
    found = {}
    for key, name in FACTS.items():
        value = values.get(key)
        if value is None or value == [] or value == ():
            continue
        found[name] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else _plain(value)
    return found


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _shown(value)


def _shown(value: Any) -> str:
    """A number with four digits; "-" if there is none."""
    if value is None:
        return "-"
    if not isinstance(value, float | int):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if abs(value) >= 0.01 or not value else f"{100 * value:.2g} %"
