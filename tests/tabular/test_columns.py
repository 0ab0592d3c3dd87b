"""Rows become inputs and targets; missing values are handled by the policy."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from snnk.tabular import FitConfig, TableModel, fit

from helpers.tables import make_table


@pytest.mark.parametrize("missing", ["raise", "drop", "mean"])
def test_missing_values(missing, tmp_path):
    t = make_table(500).to_pandas()
    t.loc[7, "x0"], t.loc[450, "x1"], t.loc[9, "kind"] = np.nan, np.inf, None
    pq.write_table(pa.Table.from_pandas(t, preserve_index=False), tmp_path / "t.parquet", row_group_size=100)
    config = FitConfig("y", 64, missing=missing)
    if missing == "raise":
        with pytest.raises(ValueError, match=r"x0: 1, x1: 1, kind: 1\), the first at row 7 of t.parquet\[0\]"):
            fit(tmp_path / "t.parquet", tmp_path / "m", config)
        return
    report = fit(tmp_path / "t.parquet", tmp_path / "m", config)
    assert report["rows"] == (497 if missing == "drop" else 500)
    kept = [int(keep.sum()) for _, keep in TableModel.load(tmp_path / "m").predict(tmp_path / "t.parquet")]
    assert sum(kept) == report["rows"]


def test_the_row_of_a_late_batch_is_that_of_the_block(parquet, tmp_path):
    """Errors count rows from the start of the block, which may have several batches."""
    x = np.random.default_rng(0).normal(size=150_000)
    pq.write_table(pa.table({"x": x, "y": np.sin(x)}), tmp_path / "t.parquet")
    fit(tmp_path / "t.parquet", tmp_path / "m", FitConfig("y", 8))
    x[140_000] = np.nan
    pq.write_table(pa.table({"x": x}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"the first at row 140000 of t.parquet\[0\]"):
        TableModel.load(tmp_path / "m").write_predictions(tmp_path / "t.parquet", tmp_path / "p.csv")


def test_targets_far_from_zero(tmp_path):
    t = make_table(2000)
    far = t.set_column(5, "y", pa.array(t["y"].to_numpy() + 1e9))
    found = []
    for name, table in (("near", t), ("far", far)):
        pq.write_table(table, tmp_path / f"{name}.parquet")
        report = fit(tmp_path / f"{name}.parquet", tmp_path / name, FitConfig("y", 128))
        done = TableModel.load(tmp_path / name).write_predictions(
            tmp_path / f"{name}.parquet", tmp_path / f"{name}.csv"
        )
        found.append((report["score"], done.score["R2"]))
    assert found[1] == pytest.approx(found[0], rel=1e-3)
