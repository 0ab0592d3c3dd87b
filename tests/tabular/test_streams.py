"""Frames, relations, batches and callables are read in blocks, in several passes, as files are."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from snnk.tabular import TableModel, fit
from snnk.tabular.source import Table
from snnk.tabular.streams import Stream

from helpers.tables import CONFIG, after, make_table, weights


def pandas(table):
    frame = pytest.importorskip("pandas").DataFrame(table.to_pandas())
    return frame.set_index(np.array([f"row {i}" for i in range(len(frame))])).astype({"kind": "category"})


def polars(table):
    pl = pytest.importorskip("polars")
    return pl.from_arrow(table).with_columns(pl.col("kind").cast(pl.Categorical))


def duckdb(table):
    return pytest.importorskip("duckdb").connect().from_arrow(table)


SOURCES = {
    "pandas": pandas,
    "polars": polars,
    "duckdb": duckdb,
    "pyarrow": lambda t: t,
    "batches": lambda t: t.to_batches(700),
    "tables": lambda t: [t.slice(0, 1000), t.slice(1000)],
    "callable of a reader": lambda t: lambda: t.to_reader(100),
    "callable of batches": lambda t: lambda: iter(t.to_batches(1100)),
    "callable of a frame": lambda t: lambda: polars(t),
    "callable of frames": lambda t: lambda: (pandas(t.slice(i, 999)) for i in range(0, len(t), 999)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_model(kind, parquet, tmp_path, monkeypatch):
    monkeypatch.setattr("snnk.tabular.streams.BATCH_ROWS", 800)
    fit(parquet, tmp_path / "p", CONFIG)
    report = fit(SOURCES[kind](make_table()), tmp_path / "m", CONFIG)
    assert report["rows"] == 3000 and report["blocks"] == 4
    assert torch.allclose(weights(tmp_path / "m"), weights(tmp_path / "p"), rtol=1e-8, atol=1e-10)
    model = TableModel.load(tmp_path / "m")
    found, same = (
        np.concatenate([p for p, _ in model.predict(source)]) for source in (SOURCES[kind](make_table()), parquet)
    )
    np.testing.assert_allclose(found, same, rtol=1e-9)


def test_what_can_be_read_once_is_refused_and_the_advice_works(tmp_path):
    table = make_table()
    for once in (table.to_reader(), iter(table.to_batches()), (batch for batch in table.to_batches())):
        with pytest.raises(ValueError, match=rf"a {type(once).__name__} can be read once.*give a callable"):
            fit(once, tmp_path / "m", CONFIG)
    assert fit(lambda: table.to_reader(), tmp_path / "m", CONFIG)["rows"] == 3000


def test_a_callable_is_never_held_in_memory(tmp_path, monkeypatch):
    """While a stream is read, few of its batches are alive at a time."""
    monkeypatch.setattr("snnk.tabular.streams.BATCH_ROWS", 1000)
    before, most = pa.total_allocated_bytes(), []
    size = make_table(1000).nbytes

    def batches():
        for i in range(200):
            most.append(pa.total_allocated_bytes() - before)
            yield make_table(1000, seed=i).to_batches()[0]

    table = Table(batches)
    table.fingerprint()
    assert sum(batch.num_rows for _, found in table.blocks() for batch in found) == 200_000
    assert len(most) == 400 and max(most) < 20 * size


@pytest.mark.once
def test_a_run_on_frames_that_was_killed_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("snnk.tabular.streams.BATCH_ROWS", 500)
    table = make_table()
    with pytest.raises(KeyboardInterrupt):
        fit(lambda: table.to_reader(77), tmp_path / "m", CONFIG, checkpoint_seconds=0, progress=after(1200))
    assert list((tmp_path / "m" / ".checkpoint").glob("part-*"))
    changed = table.set_column(0, "x0", pa.array(table["x0"].to_numpy() + 1e-9))
    with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
        fit(lambda: changed.to_reader(), tmp_path / "m", CONFIG)
    rows = []
    fit(lambda: table.to_reader(900), tmp_path / "m", CONFIG, progress=lambda what, done, _: rows.append((what, done)))
    assert not any(what == "reading columns" for what, _ in rows)  # other sizes of batches are the same rows
    fit(table, tmp_path / "calm", CONFIG)
    assert torch.allclose(weights(tmp_path / "m"), weights(tmp_path / "calm"), rtol=1e-10, atol=1e-12)


def test_fingerprints_are_of_the_values(monkeypatch):
    monkeypatch.setattr("snnk.tabular.streams.BATCH_ROWS", 1000)
    table = make_table()
    one = Table(table).fingerprint()
    kinds = table.set_column(4, "kind", table["kind"].dictionary_encode())
    for same in (lambda: table.to_reader(33), table.to_batches(999), kinds, kinds.to_batches(123)):
        assert Table(same).fingerprint() == one
    for other in (table[:-1], table.take(list(range(2999, -1, -1))), table.drop(["x0"])):
        assert Table(other).fingerprint() != one
    pieces = []
    for rank in range(3):
        Table(table).fingerprint(rank, 3, lambda found: pieces.append(found) or [found])
    assert [len(piece) for piece in pieces] == [1, 1, 1]
    assert Table(table).fingerprint(0, 3, lambda found: pieces) == one
    nulls = [pa.array(np.array([1.0, garbage]), mask=np.array([False, True])) for garbage in (2.0, 3.0)]
    a, b = (Table(pa.table({"a": values})).fingerprint() for values in nulls)
    assert a == b != Table(pa.table({"a": nulls[0][::-1]})).fingerprint()


def test_rows_that_change_between_passes(tmp_path, monkeypatch):
    monkeypatch.setattr("snnk.tabular.streams.BATCH_ROWS", 1000)
    table, calls = make_table(), []

    def shuffled():
        calls.append(1)
        order = np.random.default_rng(len(calls)).permutation(3000)
        return table.take(order)

    with pytest.raises(ValueError, match="the callable has other values in rows 0 and up than before; it must give"):
        fit(shuffled, tmp_path / "m", CONFIG)

    def shorter():
        calls.append(1)
        return table[: 3000 - len(calls)]

    with pytest.raises(ValueError, match=r"has other values in rows 2000|rows now, and had"):
        fit(shorter, tmp_path / "m", CONFIG)


def test_batches_that_are_not_alike():
    first = pa.record_batch({"a": [1], "b": ["x"]})
    turned = pa.record_batch({"b": ["y"], "a": [2]})
    assert [c.to_pydict() for c in Stream([first, turned]).chunks()] == [{"a": [1, 2], "b": ["x", "y"]}]
    for other in (pa.record_batch({"a": [1]}), pa.record_batch({"a": ["z"], "b": ["x"]})):
        with pytest.raises(ValueError, match=r"a batch of the list is not like the first one.*make them alike"):
            list(Stream([first, other]).chunks())
    with pytest.raises(ValueError, match="no record batches"):
        Stream([])
    with pytest.raises(TypeError, match="record batches, tables or frames; got int"):
        Stream([1])
    with pytest.raises(ValueError, match="several columns with the name 'a'"):
        Stream(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]))


def test_a_frame_with_equal_names(tmp_path):
    frame = pytest.importorskip("pandas").DataFrame([[1.0, 2.0, 3.0]] * 9, columns=["x", "x", "y"])
    with pytest.raises(ValueError, match="the frame has several columns with the name 'x'"):
        fit(frame, tmp_path / "m", CONFIG)
