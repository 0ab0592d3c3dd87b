"""Sums of parts add up to the model of the whole, and nothing is added twice or from another start."""

import itertools
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from snnk import _io
from snnk.tabular import FitConfig, Part, Start, TableModel, fit, merge, prepare
from snnk.tabular.sample import Held, content_hash, is_reserved

from helpers.tables import CONFIG, make_table, weights

CLASSES = FitConfig("kind", 32, block_dtype="float64")  # learnt features, gcv and a calibration
SMALL = FitConfig("y", 16, feature_map="random-fourier", bandwidth=1.0, lam=1e-2, block_dtype="float64")


def of(model):
    return torch.cat([model.weight, model.bias[:, None]], 1)


@pytest.fixture
def start():
    return prepare(make_table(500), SMALL)


@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, lam="gcv"), CLASSES, replace(CLASSES, feature_map="learned-deep")],
    ids=["fixed", "gcv", "classes", "deep"],
)
def test_every_split_and_order_gives_the_model_of_one_fit(config, parquet, tmp_path):
    """To 1e-10, also the calibration; batches of any size, files and frames, through files and bytes."""
    report = fit(parquet, tmp_path / "whole", config)
    whole, table = TableModel.load(tmp_path / "whole"), make_table()
    start = prepare(parquet, config)
    for bounds in ([0, 3000], [0, 1, 700, 3000], [0, 100, 101, 1500, 2999, 3000]):
        parts = [table.slice(a, b - a) for a, b in itertools.pairwise(bounds)]
        parts = [Part(start).read(iter(rows.to_batches(max_chunksize=333))) for rows in parts]
        parts[0].save(tmp_path / f"{len(bounds)}.stats")
        total = merge([*(part.to_bytes() for part in parts[:0:-1]), tmp_path / f"{len(bounds)}.stats"])
        model, found = total.solve()
        assert found["rows"] == 3000 and found["lam"] == pytest.approx(report["lam"], rel=1e-9)
        assert torch.allclose(of(model), of(whole), rtol=0, atol=1e-10)
        if whole.calibration is not None:
            assert model.calibration.scale == pytest.approx(whole.calibration.scale, rel=1e-8)
            assert model.calibration.offset == pytest.approx(whole.calibration.offset, rel=1e-8)


def test_float32_differs_by_its_rounding(parquet, tmp_path):
    """Features and products in float32 depend on how many rows are multiplied at once."""
    config = replace(CONFIG, block_dtype="float32")
    fit(parquet, tmp_path / "whole", config)
    start, table = prepare(parquet, config), make_table()
    model, _ = merge(Part(start).read(table.slice(i, 500)) for i in range(0, 3000, 500)).solve()
    assert torch.allclose(of(model), weights(tmp_path / "whole"), rtol=0, atol=1e-3)


def test_held_rows_do_not_depend_on_the_order_of_equal_rows(monkeypatch):
    """Rows with equal inputs and different targets are ordered by their targets, also where only some are kept."""
    monkeypatch.setattr("snnk.tabular.sample.MOST_HELD", 5)
    x = torch.randn(100, 2)
    x = x[is_reserved(content_hash(x))][:1].expand(8, 2)
    y = torch.arange(8.0, dtype=torch.float64)[:, None]
    expected = Held.empty(2, 1).add(x, y).y
    for order in (torch.arange(8).flip(0), torch.randperm(8), torch.randperm(8)):
        one = Held.empty(2, 1).add(x[:6], y[order[:6]]).add(x[6:], y[order[6:]])
        two = Held.empty(2, 1).add(x[:3], y[order[:3]]).merge(Held.empty(2, 1).add(x[3:], y[order[3:]]))
        assert len(expected) == 5 and torch.equal(one.y, expected) and torch.equal(two.y, expected)


def test_rows_are_counted_once(start, tmp_path):
    """Under any file name and in any format; empty sources and equal rows of another name are no repetition."""
    table = make_table(100)
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    part = Part(start).read(tmp_path / "a.parquet")
    for again in (tmp_path / "b.parquet", table, iter(table.to_batches())):
        with pytest.raises(ValueError, match="100 of its rows are counted already; leave it out"):
            part.read(again)
    with pytest.raises(ValueError, match=r"part 2 cannot be added: 100 of its rows"):
        merge([part, part])
    assert part.rows == 100
    part.read(iter([])).read(table[:0]).read(table[:0]).read(table, name="another table with equal rows")
    assert part.rows == 200 and len(part.sources) == 2


def test_a_source_that_fails_adds_nothing(start):
    table = make_table(50)

    def broken():
        yield from table.to_batches(max_chunksize=10)
        raise OSError("the disk is gone")

    part = Part(start).read(make_table(20, seed=1))
    before = part.stats.sums.clone()
    with pytest.raises((OSError, ValueError), match="the disk is gone"):
        part.read(broken())
    assert part.rows == 20 and torch.equal(part.stats.sums, before)
    assert part.read(table).rows == 70


def test_other_starts_are_refused_with_advice(start, tmp_path):
    """The advice is followed."""
    other = prepare(make_table(500), replace(SMALL, seed=1))
    Part(start).read(make_table(50)).save(tmp_path / "a.stats")
    Part(other).read(make_table(60)).save(tmp_path / "b.stats")
    with pytest.raises(ValueError, match=r"b.stats cannot be added: .*another start.*--like .*a.stats --stats-only"):
        merge([tmp_path / "a.stats", tmp_path / "b.stats"])
    Part(Start.load(tmp_path / "a.stats")).read(make_table(60)).save(tmp_path / "c.stats")
    assert merge([tmp_path / "a.stats", tmp_path / "c.stats"]).rows == 110


def test_numbers_far_from_those_of_the_start(tmp_path):
    """They count as missing, and the warning says so; it spoke of categories."""
    start = prepare(make_table(500), replace(SMALL, missing="mean"))
    table = make_table(100)
    far = table.set_column(0, "x0", pa.array([1e12, -1e12] * 10 + table["x0"].to_pylist()[20:]))
    _, report = merge([Part(start).read(far)]).solve()
    (said,) = [text for text in report["quality"]["warnings"] if "x0" in text]
    assert said.startswith("20 numbers of 'x0' are more than 2^24 standard deviations (") and "categor" not in said
    assert "count as missing. Correct them, or make the start from rows that have some" in said
    advised = prepare(pa.concat_tables([make_table(500), far]), replace(SMALL, missing="mean"))
    assert not Part(advised).read(far).unseen["x0"]


def test_a_file_of_a_start_is_a_part_without_rows(start, tmp_path):
    start.save(tmp_path / "start.stats")
    Part(start).read(make_table(50)).save(tmp_path / "a.stats")
    assert Start.load(tmp_path / "start.stats").key == Start.load(tmp_path / "a.stats").key == start.key
    assert merge([tmp_path / "start.stats", tmp_path / "a.stats"]).rows == 50
    with pytest.raises(ValueError, match="no rows to fit; add some"):
        merge([tmp_path / "start.stats"]).solve()
    with pytest.raises(ValueError, match="no parts to merge"):
        merge([])


def test_values_that_the_start_does_not_have(start):
    """A new category of an input is counted and reported; a new class is an error, because its rows would be lost."""
    table = make_table(100)
    purple = table.set_column(4, "kind", pa.array(["purple"] * 3 + table["kind"].to_pylist()[3:]))
    part = Part(start).read(purple)
    assert part.unseen["kind"] == 3 and Part.from_bytes(part.to_bytes()).unseen["kind"] == 3
    _, report = merge([part]).solve()
    assert any("3 values of 'kind' are not among those of the start" in text for text in report["quality"]["warnings"])
    classes = prepare(make_table(500), replace(SMALL, target="kind"))
    with pytest.raises(ValueError, match=r"'kind' has a class at row 0 .*make the start from rows with all classes"):
        Part(classes).read(purple)


def test_columns_that_are_missing_are_named(start):
    with pytest.raises(ValueError, match="no column 'x1', 'kind'; the table has x0, x2, count, y"):
        Part(start).read(make_table(10).drop_columns(["x1", "kind"]))


def test_a_model_is_written_whole_or_not_at_all(start, tmp_path, monkeypatch):
    part = Part(start).read(make_table(400))
    report = part.save_model(tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "model.json",
        "model.safetensors",
        "report.json",
        "report.html",
    }
    assert report["sources"] == 1 and TableModel.load(tmp_path / "model").quality == report["quality"]
    with pytest.raises(FileExistsError, match="exists already"):
        part.save_model(tmp_path / "model")

    def fail(path, value):
        raise OSError("no room")

    monkeypatch.setattr(_io, "write_json", fail)
    with pytest.raises(OSError, match="no room"):
        part.save_model(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["sums", "shift", "held.hashes", "held.x", "held.y", "map.projection"])
def test_a_changed_number_is_found(name, start, tmp_path):
    path = tmp_path / "a.stats"
    Part(start).read(make_table(400)).save(path)
    with _io.open_tensors(path) as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=r"a.stats holds no whole sums .*; copy it again, or make it again"):
        Part.load(path)


CHANGES = {
    "no start": lambda note: note.pop("start"),
    "another format": lambda note: note.update(format="snnk.Part 9"),
    "sources that are no numbers": lambda note: note.update(sources={"a": -1}),
    "more rows than sums": lambda note: note.update(sources={"a": 1000}),
    "unseen that is a list": lambda note: note.update(unseen=[]),
    "no map": lambda note: note["start"].pop("feature_map"),
    "a map of another class": lambda note: note["start"]["feature_map"].update({"class": "os.system"}),
    "a map of another size": lambda note: note["start"]["feature_map"].update(num_features=1 << 40),
    "a shift that is too short": lambda note: note["start"]["shift"].pop(),
    "a shift that is no number": lambda note: note["start"].update(shift=["x"] * 17),
    "settings of another kind": lambda note: note["start"]["config"].update(drop="y"),
    "a column too few": lambda note: note["start"]["columns"]["inputs"].pop(),
    "another dtype": lambda note: note["start"]["config"].update(block_dtype="float32"),
}


def forge(path, change):
    """Change a file, and give it a digest that fits."""
    from snnk.tabular.start import signed

    with _io.open_tensors(path) as file:
        metadata = file.metadata()
    tensors, note = load_file(path), json.loads(metadata["note"])
    note.pop("digest")
    change(note, tensors)
    save_file(tensors, path, {**metadata, "note": signed(note, tensors)})


@pytest.mark.parametrize("change", CHANGES)
def test_a_forged_note_is_refused(change, start, tmp_path):
    path = tmp_path / "a.stats"
    Part(start).read(make_table(400)).save(path)
    forge(path, lambda note, tensors: CHANGES[change](note))
    with pytest.raises(ValueError, match=r"a\.stats"):
        Part.load(path)


FORGED = {
    "map.source": lambda found: found + 1000,
    "map.edges": lambda found: found.double(),
    "map.phase": lambda found: found * torch.nan,
    "map.head": lambda found: found[:, :-1].clone(),
    "held.x": lambda found: found + 1,
    "held.y": lambda found: found * torch.inf,
    "held.hashes": lambda found: found.flip(0),
    "sums": lambda found: found * torch.nan,
}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A file of sums of learnt features."""
    path = tmp_path_factory.mktemp("learnt") / "a.stats"
    Part(prepare(make_table(400), FitConfig("y", 8))).read(make_table(400)).save(path)
    assert {*FORGED} <= {*load_file(path)}
    return path


@pytest.mark.parametrize("name", FORGED)
def test_forged_tensors_are_refused(name, learnt, tmp_path):
    path = tmp_path / "b.stats"
    path.write_bytes(learnt.read_bytes())
    forge(path, lambda note, tensors: tensors.update({name: FORGED[name](tensors[name])}))
    with pytest.raises(ValueError, match=r"b\.stats"):
        Part.load(path)


def test_other_files_are_refused(start, tmp_path, parquet):
    (tmp_path / "cut.stats").write_bytes(Part(start).to_bytes()[:-10])
    save_file({"sums": torch.zeros(1)}, tmp_path / "tensor.stats")
    for name in ("cut.stats", "tensor.stats", parquet.name):
        with pytest.raises(ValueError, match=name):
            merge([tmp_path / name])
    with pytest.raises(FileNotFoundError, match=r"none.stats"):
        merge([tmp_path / "none.stats"])
