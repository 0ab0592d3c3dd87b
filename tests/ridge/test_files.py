"""Files of RidgeStats."""

import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from snnk.ridge.sums import RidgeStats

from helpers.ridge import assert_same, data, fit, thirds


@pytest.mark.parametrize("options", [{}, {"folds": 3, "block_dtype": torch.float32}])
def test_round_trip(tmp_path, options):
    _, stats = thirds(**options)
    stats.note = json.dumps({"row_groups": [0, 1]})
    stats.save(tmp_path / "stats.safetensors")
    loaded = RidgeStats.load(str(tmp_path / "stats.safetensors"))
    assert loaded.state_dict().keys() == stats.state_dict().keys()
    assert all(torch.equal(x, stats.state_dict()[name]) for name, x in loaded.state_dict().items())
    assert repr(loaded) == repr(stats) and loaded.note == stats.note
    phi, y, _ = data(seed=1)
    assert_same(loaded.update(phi, y).solve("gcv"), stats.update(phi, y).solve("gcv"), rtol=0, atol=0)
    assert os.listdir(tmp_path) == ["stats.safetensors"]


def test_empty_statistics_round_trip(tmp_path):
    RidgeStats(7, 2).save(tmp_path / "stats")
    phi, y, _ = data()
    assert_same(RidgeStats.load(tmp_path / "stats").update(phi, y).solve(1.0), fit(phi, y).solve(1.0))


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    _, stats = thirds()
    stats.save(tmp_path / "stats")
    old = (tmp_path / "stats").read_bytes()

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="disk full"):
        stats.update(*data()[:2]).save(tmp_path / "stats")
    assert (tmp_path / "stats").read_bytes() == old and os.listdir(tmp_path) == ["stats"]


GOOD = {"format": "snnk.RidgeStats", "version": "1", "block_dtype": "float64", "note": ""}


def sums(*shape, dtype=torch.float64):
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"sums": sums(1, 4, 4)}, GOOD, r"with tensors shift, sums; got .* with \['sums'\]"),
        ({"sums": sums(1, 4, 4), "shift": sums(3), "extra": sums(1)}, GOOD, r"with \['extra', 'shift', 'sums'\]"),
        ({"sums": sums(1, 4, 4), "shift": sums(4)}, GOOD, r"do not fit together; got .*\(4,\)"),
        ({"sums": sums(1, 4, 3), "shift": sums(2)}, GOOD, "do not fit together"),
        ({"sums": sums(4, 4), "shift": sums(3)}, GOOD, "do not fit together"),
        ({"sums": sums(0, 4, 4), "shift": sums(3)}, GOOD, "do not fit together"),
        ({"sums": sums(1, 4, 4, dtype=torch.float32), "shift": sums(3)}, GOOD, "do not fit together; got .*F32"),
        ({"sums": sums(1, 4, 4) + torch.nan, "shift": sums(3)}, GOOD, "holds NaN or infinite"),
        (
            {"sums": sums(1, 4, 4), "shift": sums(3)},
            {**GOOD, "version": "2"},
            "must be .*'version': '1'.*'version': '2'",
        ),
        ({"sums": sums(1, 4, 4), "shift": sums(3)}, {**GOOD, "block_dtype": "int8"}, "unknown block_dtype .* 'int8'"),
        ({"weight": sums(3)}, None, r"must be .*snnk.RidgeStats.*got \{\} with \['weight'\]"),
    ],
)
def test_foreign_files(tmp_path, tensors, metadata, message):
    save_file(tensors, tmp_path / "file", metadata)
    with pytest.raises(ValueError, match=message):
        RidgeStats.load(tmp_path / "file")


def test_the_good_file_of_the_foreign_ones_loads(tmp_path):
    save_file({"sums": sums(2, 4, 4), "shift": sums(3)}, tmp_path / "file", GOOD)
    assert repr(RidgeStats.load(tmp_path / "file")).startswith("RidgeStats(num_features=2, num_targets=1, folds=2")


@pytest.mark.once
def test_damaged_files(tmp_path):
    _, stats = thirds()
    stats.save(tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    assert load_file(tmp_path / "whole")["sums"].shape == (1, 9, 10)
    for damaged in (content[:-8], content[:20], b"", b"not a file of ours", b"\xff" * 8 + content[8:]):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            RidgeStats.load(tmp_path / "damaged")
    with pytest.raises(FileNotFoundError, match="nothing"):
        RidgeStats.load(tmp_path / "nothing")


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        RidgeStats(2, 1).save(tmp_path / "stats")
    with pytest.raises(ImportError, match="pip install safetensors"):
        RidgeStats.load(tmp_path / "stats")
