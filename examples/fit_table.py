"""Fit a table in closed form, in two parts as two machines would, and write predictions with probabilities.

    python examples/fit_table.py [FOLDER]

The table is the breast cancer data of scikit-learn: 569 rows of 30 numbers and a class.
"""

import sys
from pathlib import Path

import tumours

from snnk.tabular import FitConfig, Part, TableModel, fit, merge, prepare

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
parts = {"train": slice(400), "one": slice(200), "two": slice(200, 400), "test": slice(400, None)}
tumours.write(folder, parts)

config = FitConfig(target="target", num_features=256)
fit(folder / "train.csv", folder / "model", config)
one = TableModel.load(folder / "model")
found = one.write_predictions(folder / "test.csv", folder / "predictions.csv")
print(f"{found.rows} predictions, " + ", ".join(f"{name} {value:.4f}" for name, value in found.score.items()))

# The same in two parts: a start that all parts share, sums that add, one solution.
start = prepare(folder / "train.csv", config)
merge([Part(start).read(folder / f"{name}.csv") for name in ("one", "two")]).save_model(folder / "both")
both = TableModel.load(folder / "both")
classes = [[name for names, _ in m.predict(folder / "test.csv") for name in names] for m in (one, both)]
same = sum(a == b for a, b in zip(*classes, strict=True))
print(f"the model of two parts predicts the same class for {same} of {found.rows} rows")
