"""Turn a slow classifier into one matrix: boosted trees teach a model of `snnk fit`, on rows without labels.

pip install 'snnk[tables]' scikit-learn pandas
python examples/teach.py
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier

from snnk.tabular import FitConfig, TableModel, fit, teach

NAMES = [f"x{i}" for i in range(10)]


def make_rows(rows: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Ten numbers per row, and one of three classes that depends on six of them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 10))
    scores = np.stack([x[:, 0] * x[:, 1], np.sin(2 * x[:, 2]) + x[:, 3], (x[:, 4] > 0.5) + 0.5 * x[:, 5]], 1)
    return pd.DataFrame(x, columns=NAMES), (2 * scores + rng.gumbel(size=scores.shape)).argmax(1)


def seconds_per_million(predict, rows) -> float:
    """Processor time of a million predictions."""
    began = time.process_time()
    predict(rows)
    return (time.process_time() - began) * 1e6 / len(rows)


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    teacher = HistGradientBoostingClassifier(learning_rate=0.03, max_iter=600, early_stopping=False)
    teacher.fit(*make_rows(30_000, seed=0))
    unlabelled, _ = make_rows(100_000, seed=1)

    def probabilities(batch):
        return teacher.predict_proba(batch.to_pandas())

    teach(unlabelled, folder / "taught.parquet", probabilities, "kind", classes=["0", "1", "2"])
    fit(folder / "taught.parquet", folder / "model", FitConfig("kind", num_features=256))
    student = TableModel.load(folder / "model")

    def student_predict(rows: pd.DataFrame) -> np.ndarray:
        return np.concatenate([np.array(found, int) for found, _ in student.predict(rows)])

    rows, truth = make_rows(100_000, seed=2)
    taught, learnt = teacher.predict(rows), student_predict(rows)
    print(f"agreement with the teacher  {(taught == learnt).mean():.3f}")
    for name, guess, predict in (("teacher", taught, teacher.predict), ("student", learnt, student_predict)):
        spent = seconds_per_million(predict, rows)
        print(
            f"{name}: accuracy {(guess == truth).mean():.3f}, {spent:.1f} s of processor time per million predictions"
        )
