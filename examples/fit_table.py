"""Fit a table in closed form, in two parts as two machines would, and write predictions with probabilities.

    python examples/fit_table.py [FOLDER]

The table is the breast cancer data of scikit-learn: 569 rows of 30 numbers and a class.
"""

import sys
from pathlib import Path

from sklearn.datasets import load_breast_cancer

from snnk.tabular import FitConfig, TableModel, fit, merge, prepare

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
table = load_breast_cancer(as_frame=True).frame.sample(frac=1, random_state=0)
for name, rows in {"train": slice(400), "one": slice(200), "two": slice(200, 400), "test": slice(400, None)}.items():
    table[rows].to_csv(folder / f"{name}.csv", index=False)

config = FitConfig(target="target", num_features=256)
report = fit(folder / "train.csv", folder / "model", config)
print(f"fitted to {report['rows']} rows")

found = TableModel.load(folder / "model").write_predictions(folder / "test.csv", folder / "predictions.csv")
print(found)

# The same in two parts: a start that all parts share, sums that add, one solution.
start = prepare(folder / "train.csv", config)
parts = [start.part().read(folder / f"{name}.csv") for name in ("one", "two")]
model, _ = merge(parts).solve()
print(f"the sums of two parts give a model with {model.columns.target!r} as its target")
