"""Rows become inputs and targets; missing values are handled by the policy."""

import copy
import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from snnk.tabular import FitConfig, TableModel, fit
from snnk.tabular.columns import Columns
from snnk.tabular.scan import Scan
from snnk.tabular.source import Table

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


def test_missing_values_have_an_input_of_their_own():
    """Where values are missing says something: here it is the only thing that does."""
    rng = np.random.default_rng(0)
    gone = rng.random((600, 3)) < 0.3
    table = pa.table(
        {
            "x": pa.array(rng.normal(size=600), mask=gone[:, 0]),
            "k": pa.array(rng.choice(["a", "b"], 600), mask=gone[:, 1]),
            "t": pa.array(rng.integers(0, 10**9, 600), pa.timestamp("s"), mask=gone[:, 2]),
            "full": rng.normal(size=600),
            "y": gone @ [1.0, 2.0, 4.0] + 0.5,
        }
    )
    source = Table(table)
    columns = Scan.start(source, "y").read(source).columns("regression", "mean")
    assert [column.indicator for column in columns.inputs] == [True, True, True, False]
    cycles = [f"t: {wave} of {cycle}" for cycle in ("day", "week", "year") for wave in ("sine", "cosine")]
    assert columns.names == ["x", "x: missing", "k=a", "k=b", "k: missing", "t", *cycles, "t: missing", "full"]
    x, y, keep = columns.encode(table.combine_chunks().to_batches()[0], "t")
    assert x.shape == (600, columns.width) and len(columns.names) == columns.width and bool(keep.all())
    for name, spot in (("x", 0), ("k", 1), ("t", 2)):
        own = [i for i, found in enumerate(columns.names) if found.split(":")[0].split("=")[0] == name]
        rows = x[torch.from_numpy(gone[:, spot])][:, own]
        last = own.index(columns.names.index(f"{name}: missing"))
        assert bool((rows[:, last] == 1).all()) and float(rows.abs().sum()) == len(rows)
    inputs = torch.cat([x, torch.ones(600, 1)], 1).double().numpy()
    weights = np.linalg.lstsq(inputs, y.numpy(), rcond=1e-10)[0]  # the inputs of one category have the sum 1
    np.testing.assert_allclose(inputs @ weights, y.numpy(), atol=1e-6)
    assert Columns.from_dict(json.loads(json.dumps(columns.to_dict()))) == columns
    dropped = Scan.start(source, "y").read(source).columns("regression", "drop")
    assert not any(column.indicator for column in dropped.inputs)


HOUR, DAY, YEAR = 3600, 86_400, 31_556_952
SPANS = {
    "a century of dates": (pa.array(range(0, 36_500, 7), pa.date32()), ["year"]),  # each of them is a Thursday
    "all days": (pa.array(range(3650), pa.date32()), ["week", "year"]),
    "a month of hours": (pa.array(range(0, 30 * DAY, HOUR), pa.timestamp("s")), ["day", "week"]),
    "a few years of hours": (pa.array(range(0, 3 * YEAR, 5 * HOUR), pa.timestamp("s", "UTC")), ["day", "week", "year"]),
    "an afternoon": (pa.array(range(0, 6 * HOUR, 60), pa.timestamp("s")), []),
    "noon of each day": (pa.array(range(12 * HOUR, 90 * DAY, DAY), pa.timestamp("s")), ["week"]),
    "times of the day": (pa.array(range(0, DAY, 60), pa.time32("s")), ["day"]),
    "durations": (pa.array(range(0, 3 * YEAR, DAY), pa.duration("s")), []),
}


@pytest.mark.parametrize("span", SPANS)
def test_cycles_are_those_that_times_go_through(span):
    times, expected = SPANS[span]
    table = pa.table({"t": times, "y": np.arange(len(times)) + 0.5})
    source = Table(table)
    columns = Scan.start(source, "y").read(source).columns()
    halves = [
        Scan.start(source, "y").read(Table(part)) for part in (table[: len(table) // 3], table[len(table) // 3 :])
    ]
    assert columns.inputs[0].cycles == tuple(expected)
    assert halves[1].merge(halves[0]).columns() == columns  # neither half need go through all of them
    x = columns.encode(table.combine_chunks().to_batches()[0], "t").x
    assert x.shape[1] == 1 + 2 * len(expected) == len(columns.names)
    assert float(x[:, 0].mean()) == pytest.approx(0, abs=1e-4) and float(x[:, 0].std()) == pytest.approx(1, abs=1e-2)
    for i in range(len(expected)):
        assert torch.allclose(x[:, 1 + 2 * i] ** 2 + x[:, 2 + 2 * i] ** 2, torch.ones(len(x)), atol=1e-5)
    assert Columns.from_dict(json.loads(json.dumps(columns.to_dict()))) == columns


def test_times_as_features(tmp_path):
    """The hour of the day decides; three months later it still does."""
    hours = np.arange(0, 200 * 24)
    load = np.cos(2 * np.pi * (hours % 24) / 24) + 0.3 * (hours // 24 % 7 >= 5)
    table = pa.table({"t": pa.array(hours * HOUR, pa.timestamp("s")), "y": load})
    csv = tmp_path / "t.csv"
    pa.csv.write_csv(table[:3000], csv)
    config = FitConfig("y", 256, feature_map="random-fourier", bandwidth=1.0)
    for i, source in enumerate((table[:3000], csv)):
        fit(source, tmp_path / f"{i}", config)
        model = TableModel.load(tmp_path / f"{i}")
        assert model.write_predictions(table[:3000], tmp_path / "p.csv").score["R2"] > 0.98
    gaps = table.take(np.flatnonzero(np.random.default_rng(0).random(3000) < 0.5))
    assert model.write_predictions(gaps, tmp_path / "p.csv").score["R2"] > 0.98
    zoned = pa.table({"t": table["t"].cast(pa.timestamp("s", "UTC"))})
    with pytest.raises(
        ValueError, match=r"'t' is timestamp\[s, tz=UTC\] in rows\[0\], and was a timestamp in training"
    ):
        model.write_predictions(zoned, tmp_path / "p.csv")
    nothing = pa.table({"t": pa.nulls(3)})
    assert model.write_predictions(nothing, tmp_path / "p.csv", missing="mean").rows == 3
    far = pa.table({"t": pa.array([2**62], pa.timestamp("s"))})
    with pytest.raises(
        ValueError, match=r"column 't' is .* at row 0 of rows\[0\], more than 2\^24 standard deviations"
    ):
        model.write_predictions(far, tmp_path / "p.csv")


def test_times_in_a_file_are_checked():
    source = Table(pa.table({"t": pa.array(range(0, 30 * DAY, HOUR), pa.timestamp("s")), "y": np.arange(720.0)}))
    stored = Scan.start(source, "y").read(source).columns().to_dict()
    for change in (
        {"time": "epoch"},
        {"time": None},
        {"time": ["timestamp"]},
        {"cycles": "day"},
        {"cycles": ["week", "day"]},
        {"cycles": ["day", "day"]},
        {"cycles": ["month"]},
        {"cycles": [["day"]]},
        {"categories": []},
        {"indicator": False},
        {"indicator": 1},
        {"zone": "UTC"},
    ):
        broken = copy.deepcopy(stored)
        broken["inputs"][0] |= change
        with pytest.raises(ValueError, match=r"column|indicator"):
            Columns.from_dict(broken)
    for change in ({"time": "time", "cycles": []}, {"indicator": True}):
        broken = copy.deepcopy(stored)
        broken["target"] |= change
        with pytest.raises(ValueError, match="the target is neither a number nor has it classes"):
            Columns.from_dict(broken)
    without = copy.deepcopy(stored)
    del without["inputs"][0]["time"]
    with pytest.raises(ValueError, match="kind of time"):
        Columns.from_dict(without)
