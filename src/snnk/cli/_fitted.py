"""The report of a fitted table on the terminal, which `snnk fit` and `snnk merge` share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snnk._text import printable
from snnk.cli._printing import say, show_table, wrote

FILES = ("model.safetensors", "model.json", "report.json", "report.html")
MOST_COLUMNS = 5  # whose importance is shown
FIGURES = {
    "accuracy": "accuracy",
    "most_frequent_accuracy": "accuracy of the most frequent class",
    "auc": "AUC",
    "log_loss": "log-loss",
    "r2": "R2",
    "root_mean_squared_error": "RMSE",
}
FACTS = {
    "task": "task",
    "rows": "rows",
    "inputs": "inputs",
    "num_features": "features",
    "lam": "penalty",
    "degrees_of_freedom": "degrees of freedom",
    "seconds": "seconds",
}


def show_fitted(report: Mapping[str, Any], out: Path) -> None:
    """Print the figures of a report on held-out rows, the most important columns, warnings, and the files in `out`."""
    quality = report["quality"]
    rows = [{"what": name, "value": report[key]} for key, name in FACTS.items()]
    if report["unit"] != 1:
        rows.append({"what": "unit of the target", "value": report["unit"]})
    figures = {name: quality[key] for key, name in FIGURES.items() if key in quality}
    if figures:
        rows.append({"what": "held-out rows", "value": quality["rows"]})
        rows += [{"what": name, "value": value} for name, value in figures.items()]
    show_table(f"fit of {report['config']['target']}", {"what": "", "value": ""}, rows)
    importances = quality.get("importances", {})
    if columns := importances.get("columns"):
        loss = f"{importances['of']} lost if the column is permuted"
        show_table(
            f"the most important of {len(columns)} columns" if len(columns) > 1 else "the importance of the column",
            {"column": "column", "loss": loss},
            columns[:MOST_COLUMNS],
        )
    for warning in quality["warnings"]:
        say(f"warning: {printable(warning)}")
    wrote(*(out / name for name in FILES))
