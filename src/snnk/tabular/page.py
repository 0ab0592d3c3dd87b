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
    "inputs": "inputs",
    "num_features": "features",
    "feature_map": "kind of features",
    "bandwidth": "bandwidth",
    "lam": "penalty",
    "degrees_of_freedom": "degrees of freedom",
    "missing": "missing values",
    "drop": "columns left out",
    "workers": "workers",
    "seed": "seed",
    "seconds": "time",
}
MEANINGS = {  # of settings
    "learned": "learnt from a sample of the rows",
    "learned-deep": "learnt in two layers from a sample of the rows",
    "raise": "none (they are an error)",
    "drop": "rows with one are left out",
    "mean": "replaced by the mean of their column",
}
Z = 1.96  # standard errors to either end of an interval of 95 %
LARGEST = 1e300  # of an axis
WORDS = {
    "held-out rows": "Rows of the table that the measured model was not fitted to. The model that was written is "
    "fitted to them too.",
    "importance": "How much of the accuracy, or of R2, is lost if the values of one column are permuted among the "
    "rows, so that they no longer belong to their rows. It is the mean of three permutations; the number behind the "
    "sign ± is their standard deviation. Columns that carry the same information share their importance: each may look "
    "unimportant alone. An importance is no proof of a cause.",
    "inputs": "The numbers that a row becomes: one for a number, one per category for a column of categories.",
    "features": "Functions of the inputs; the model is a weighted sum of them.",
    "bandwidth": "How fast the features change with the inputs: a larger bandwidth fits finer detail.",
    "penalty": "The strength of the ridge regression, which keeps the weights small.",
    "generalised cross-validation": "An estimate of the error on new rows, from the sums that the fit has anyway.",
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
    "is the true one. If it is 0.02, probabilities are wrong by about two percentage points.",
    "imbalance": "Some classes have far fewer rows than others. Accuracy counts rows, so that it hides how well rare "
    "classes are found.",
    "recall": "Of the rows of a class, the share that is predicted as this class.",
    "precision": "Of the rows that are predicted as a class, the share that is of this class.",
}
NUMBER_WORDS = {
    "R2": "The share of the variance that the predictions explain: 1 is perfect, 0 is as good as always predicting the "
    "mean, and a negative number is worse. If a column is permuted, R2 may therefore lose more than 1.",
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
            _importances(quality["importances"], quality["accuracy"] if classes else quality["r2"]),
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
    if "importances" not in quality:
        return text
    return (
        f"{text} The figures on this page were measured on {quality['rows']:,} held-out rows, with a model that was "
        "fitted in the same way to all other rows."
    )


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
        f"The predicted class is right for {_percent(right)} of the held-out rows; the standard error is "
        f"{_points(error)}. Always predicting {quality['most_frequent_class']!r}, the most frequent class, would be "
        f"right for {_percent(quality['most_frequent_accuracy'])}. The mean of the recalls of all classes, the "
        f"balanced accuracy, is {_percent(quality['balanced_accuracy'])}. "
    )
    if quality["auc"] is not None:
        text += (
            "If a row of a class and a row of another class are drawn, the first one has the larger probability of "
            f"its class in {_percent(quality['auc'])} of the cases (AUC). "
        )
    return text + (
        f"On average, the probability of the predicted class differs by {_points(quality['calibration_error'])} from "
        "how often that class is the true one."
    )


def _of_numbers(quality: Mapping[str, Any], target: str) -> str:
    """The figures of a regression in words."""
    text = ""
    if (quality["r2"] or 0) > 0:
        text = (
            f"The predictions explain {_percent(quality['r2'])} of the variance of {target} in the held-out rows; "
            "always predicting the mean would explain 0 %. "
        )
    text += f"On average, a prediction is wrong by {_shown(quality['mean_absolute_error'])}. "
    found = {row["share"]: row["residual"] for row in quality["residual_quantiles"]}
    return text + (
        "In nine of ten rows, the observed value minus the predicted one is between "
        f"{_shown(found[0.05])} and {_shown(found[0.95])}."
    )


def _importances(found: Mapping[str, Any], score: float | None) -> str:
    """Bars whose mark is the whole score, so that what matters little looks little."""
    rows = found["columns"]
    if not rows:
        return ""
    shown, of = rows[:MOST_BARS], found["of"]
    text = (
        f"The importance of a column is what the {of} loses if the values of this column are permuted among "
        f"{found['rows']:,} held-out rows. "
    )
    if len(shown) < len(rows):
        text += f"These are the largest {len(shown)} of {len(rows):,}; the others lose less. "
    whole = score if score and score > 0 else None
    mark = f"; the dashed line is the whole {of}, {_shown(whole)}" if whole else ""
    drawn = bars(
        [row["column"] for row in shown],
        [(f"loss of {of}{mark}", NEW, [max(row["loss"], 0.0) for row in shown])],
        [f"{_four(row['loss'])} ± {_four(row['standard_deviation'])}" for row in shown],
        whole,
    )
    return f"<h2>Which columns matter</h2>\n<p>{escape(text)}</p>\n{drawn}"


def _class_parts(quality: Mapping[str, Any]) -> str:
    """The reliability diagram and the table of classes."""
    found = quality["reliability"]
    points = [(row["predicted"], row["observed"], *interval(row["observed"], row["rows"])) for row in found]
    picture = diagonal(
        *(points, "predicted probability", "share that is right", (0.0, 1.0)),
        title="a group of held-out rows, with an interval of 95 %",
    )
    numbers = table(
        ["predicted probability", "share that is right", "rows"],
        ([_four(row["predicted"]), _four(row["observed"]), f"{row['rows']:,}"] for row in found),
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
                *map(_four, (row["recall"], row["precision"])),
                row["mistaken_for"] or "-",
            ]
            for row in listed
        ),
    )
    return f"""<h2>Whether the probabilities can be trusted</h2>
<p>Held-out rows are grouped by the probability of their predicted class. For groups on the dashed line, the class is
right as often as its probability states. Below the line the model is too sure, and above it not sure enough.</p>
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
    if None not in values and max(map(abs, values)) < LARGEST:
        heads = ["mean prediction", "mean observed value", "a tenth is below", "a tenth is above", "rows"]
        rows = ([*map(_shown, point), f"{row['rows']:,}"] for point, row in zip(points, found, strict=True))
        parts.append(
            f"""<h2>Predicted and observed values</h2>
<p>Held-out rows are grouped by their predictions, a tenth of the rows in each group. For groups on the dashed line,
the mean observed value of {escape(target)} is as large as the mean prediction.</p>
{diagonal(points, "predicted", "observed", title="mean of a group; the lines cover 80 % of its rows")}
<details><summary>The numbers of this picture</summary>
{table(heads, rows)}</details>
"""
        )
    rows = ([f"{100 * row['share']:g} %", _shown(row["residual"])] for row in quality["residual_quantiles"])
    return f"""{"".join(parts)}<h2>Residuals</h2>
<p>The residual is the observed value minus the predicted one. For each share of the held-out rows, the table has the
value that the residuals of so many rows are below.</p>
{table(["share of the rows", "residual below"], rows)}"""


def interval(share: float, rows: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a probability whose observed share of some rows is given.

    Example:
        >>> [round(end, 3) for end in interval(1.0, 10)]
        [0.722, 1.0]
    """
    extra = Z * Z / rows
    centre = (share + extra / 2) / (1 + extra)
    half = math.sqrt(share * (1 - share) * extra + extra * extra / 4) / (1 + extra)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    config = report["config"]
    values = {**config, **report}
    if values.get("feature_map") != "random-fourier":  # others have no bandwidth
        values["bandwidth"] = None
    found = {}
    for key, name in FACTS.items():
        value = values.get(key)
        if value is None or value == [] or value == ():
            continue
        found[name] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else _plain(value)
    if config.get("lam") == "gcv" and "penalty" in found:
        found["penalty"] += ", chosen by generalised cross-validation"
    if "time" in found:
        found["time"] += " s"
    return found


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return MEANINGS.get(value, value) if isinstance(value, str) else _shown(value)


def _shown(value: float | None) -> str:
    """A number with four digits; "-" if there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %" if abs(value) >= 0.01 or not value else f"{100 * value:.2g} %"


def _points(value: float) -> str:
    return f"{100 * value:.2g} percentage points"


def _four(value: float | None) -> str:
    """A share with four decimals; "-" if there is none."""
    return "-" if value is None else f"{round(value, 4) + 0.0:.4f}"  # minus zero becomes zero
