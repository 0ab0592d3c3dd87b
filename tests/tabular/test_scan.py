"""The statistics of columns, which do not depend on which worker read which block."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from snnk.tabular import FitConfig, TableModel, fit
from snnk.tabular.scan import Scan
from snnk.tabular.source import Table

from helpers.tables import CONFIG, make_table


def test_columns_do_not_depend_on_who_read_which_block(parquet):
    """The merged means differ in their last bits; the columns, which are rounded, do not."""
    table, found, means = Table(parquet), [], set()
    for workers in (1, 2, 3, 5):
        shares = [
            Scan.start(table, "y").read(table, lambda i, _, n=workers, r=rank: i % n == r) for rank in range(workers)
        ]
        for other in shares[1:]:
            shares[0].merge(other)
        found.append(shares[0].columns())
        means.add(shares[0].statistics["x0"].mean)
    assert len(means) > 1 and all(columns == found[0] for columns in found)


def test_columns_of_a_sorted_table(tmp_path):
    """The means of blocks are far apart, and only one worker sees the fraction and the missing values."""
    t = make_table(2000).sort_by("x0")
    x = t["x0"].to_numpy().copy()
    x[1900:] = np.nan
    whole = np.arange(2000.0) // 500
    whole[0] = 0.5
    t = t.set_column(0, "x0", pa.array(x)).set_column(5, "y", pa.array(whole))
    pq.write_table(t, tmp_path / "t.parquet", row_group_size=100)
    table = Table(tmp_path / "t.parquet")
    first, second = (Scan.start(table, "y").read(table, lambda i, _, r=r: i % 2 == r) for r in (1, 0))
    columns = first.merge(second).columns(missing="mean")
    assert columns.target.categories is None  # 0.5 is no class
    assert columns.inputs[0].scale == pytest.approx(np.nanstd(x), rel=1e-6)
    assert columns.inputs[0].mean == pytest.approx(np.nanmean(x), abs=2e-6 * np.nanstd(x))
    rows = [columns.encode(batch, label)[0] for label, batches in table.blocks() for batch in batches]
    encoded = torch.cat(rows)[:, 0]
    assert float(encoded.mean()) == pytest.approx(0, abs=1e-5) and bool((encoded[1900:] == 0).all())


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    t = pa.table({"a": np.arange(240.0), "y": np.tile(np.arange(12), 20)})
    pq.write_table(t, tmp_path / "t.parquet", row_group_size=100)
    table = Table(tmp_path / "t.parquet")
    columns = Scan.start(table, "y").read(table).columns()
    assert columns.target.categories == tuple(str(i) for i in range(12))


@pytest.mark.parametrize("feature_map", ["random-fourier", "random-relu"])
def test_columns_with_large_offsets_or_no_spread(feature_map, tmp_path):
    """Seconds since 1970, or a constant that is no binary fraction, do not disturb the other columns."""
    t = make_table(2000)
    pq.write_table(t, tmp_path / "plain.parquet")
    shifted = t.set_column(0, "x0", pa.array(t["x0"].to_numpy() + 1.7e9)).append_column(
        "c", pa.array(np.full(2000, 0.1))
    )
    pq.write_table(shifted, tmp_path / "shifted.parquet")
    scores = []
    for name in ("plain", "shifted"):
        report = fit(tmp_path / f"{name}.parquet", tmp_path / name, FitConfig("y", 256, feature_map))
        scores.append(report["score"])
    assert scores[1] < 1.3 * scores[0]
    constant = TableModel.load(tmp_path / "shifted").columns.inputs[-1]
    assert constant.scale == 1 and abs(constant.mean - 0.1) < 1e-6


@pytest.mark.once
def test_the_first_bad_value_is_named_by_its_place(tmp_path):
    a, b = np.zeros(150_000), np.zeros(150_000)
    a[140_000], b[130_000] = np.nan, np.inf
    pq.write_table(pa.table({"a": a, "b": b, "y": a * 0 + 1}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"a: 1, b: 1, y: 1\), the first at row 130000 of t.parquet\[0\], column 'b'"):
        fit(tmp_path / "t.parquet", tmp_path / "m", CONFIG)


def test_columns_that_cannot_be_used(parquet, tmp_path):
    def refused(source, message, config=CONFIG):
        path = tmp_path / "t.parquet"
        if isinstance(source, pa.Table):
            pq.write_table(source, path)
        with pytest.raises(ValueError, match=message):
            fit(path if isinstance(source, pa.Table) else source, tmp_path / "m", config)
        assert not (tmp_path / "m").exists()

    refused(parquet, r"no column 'z' in .*; its columns are x0, x1, x2, count, kind, y", FitConfig("z"))
    refused(parquet, r"no column 'Kinds' in .*; did you mean 'kind'\? Its columns are x0, .*", FitConfig("Kinds"))
    refused(make_table().rename_columns(["A", "b", "c", "d", "e", "f"]), "did you mean 'A'", FitConfig("a"))
    refused(parquet, "the target 'y' cannot be left out with drop", FitConfig("y", drop=("y",)))
    times = pa.table({"x": [0.0, 1.0], "y": pa.array([0, 1], pa.timestamp("s"))})
    refused(times, r"the target 'y' of .* is timestamp\[.*make it a number, such as the hours since a fixed time")
    lists = pa.table({"t": [[1], [2]], "y": [0.0, 1.0]})
    refused(lists, r"column 't' of .* is list.*neither a number nor a category nor a time")
    refused(make_table(50).set_column(5, "y", pa.array(["same"] * 50)), "'y' has one class only, same")
    refused(make_table(0), "no rows")
    ids = pa.table({"x": np.arange(1200.0), "y": [f"k{i}" for i in range(1200)]})
    refused(ids, "target 'y' has more than 1000 classes; join some of them")
