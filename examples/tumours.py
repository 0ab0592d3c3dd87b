"""Write train.csv and test.csv: the breast cancer data of scikit-learn, 569 rows of 30 numbers and a class.

    python examples/tumours.py [FOLDER]

The column `target` is 1 for a benign tumour and 0 for a malignant one. The rows are in a random order.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer


def write(folder: Path, parts: dict[str, slice]) -> None:
    """Write the rows of each part to a file of its name."""
    data = load_breast_cancer()
    order = np.random.RandomState(0).permutation(len(data.target))
    for name, rows in parts.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*data.feature_names, "target"])
            writer.writerows([*data.data[i].tolist(), int(data.target[i])] for i in order[rows])


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "."), {"train": slice(400), "test": slice(400, None)})
