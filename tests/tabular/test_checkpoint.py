"""A run that is killed at any moment and started again gives the result of an undisturbed one."""

import json
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from snnk.ridge.sums import RidgeStats
from snnk.tabular import FitConfig, fit
from snnk.tabular.parts import HELD

from helpers.tables import CONFIG, after, make_table, predictions, run_fit, weights


@pytest.mark.once
def test_killed_and_started_again(tmp_path):
    """After SIGKILL at three moments, every block is counted once."""
    path = tmp_path / "data.parquet"
    pq.write_table(make_table(60000), path, row_group_size=200)
    fit(path, tmp_path / "calm", CONFIG)
    out, counted = tmp_path / "killed", []
    for pause in (0.0, 0.1, 0.4):
        process = run_fit(path, out, "--checkpoint-seconds", "0", wait=False)
        parts = len(list(out.glob(".checkpoint/part-*")))
        while process.poll() is None and len(list(out.glob(".checkpoint/part-*"))) <= parts:
            time.sleep(0.02)  # until it has counted something of its own
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if (out / "model.json").exists():
            break
        counted.append(
            sum(len(json.loads(load(p)[0].note)["blocks"]) for p in out.glob(".checkpoint/part-*.safetensors"))
        )
    assert counted and counted == sorted(counted) and 0 < counted[0] < 300
    if not (out / "model.json").exists():
        fit(path, out, CONFIG)
    assert json.loads((out / "report.json").read_text())["rows"] == 60000
    calm, killed = weights(tmp_path / "calm"), weights(out)
    assert (calm - killed).abs().max() <= 1e-10 * calm.abs().max()


def test_restarts_do_not_change_float32_results_either(parquet, tmp_path):
    config = replace(CONFIG, block_dtype="float32")
    fit(parquet, tmp_path / "calm", config)

    for count in (500, 1500, 2300):
        with pytest.raises(KeyboardInterrupt):
            fit(parquet, tmp_path / "m", config, checkpoint_seconds=0, progress=after(count))
    shown = []
    fit(parquet, tmp_path / "m", config, progress=lambda what, rows, total: shown.append((rows, total)))
    assert shown[-2:] == [(3000, 3000), (0, 0)]  # rows of earlier runs count as done
    calm, killed = (predictions(tmp_path / name, parquet) for name in ("calm", "m"))
    np.testing.assert_allclose(calm, killed, rtol=0, atol=1e-10)


def test_checkpoint_of_another_configuration(parquet, tmp_path):
    """It is refused if it counts rows, also for a table that was rewritten in place; otherwise the fit starts anew."""

    def stop(what, rows, total):
        if rows > when and (when < 0 or what == "fitting"):
            raise KeyboardInterrupt

    def interrupted(config):
        with pytest.raises(KeyboardInterrupt):
            fit(parquet, tmp_path / "m", config, checkpoint_seconds=0, progress=stop)

    when = -1
    interrupted(CONFIG)
    when = 1000
    interrupted(replace(CONFIG, seed=1))
    for config in (replace(CONFIG, lam=1.0, seed=2), CONFIG):
        with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
            fit(parquet, tmp_path / "m", config)
    old = parquet.read_bytes()
    pq.write_table(make_table(seed=1), parquet, row_group_size=400)
    with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
        fit(parquet, tmp_path / "m", replace(CONFIG, seed=1))
    parquet.write_bytes(old)
    fit(parquet, tmp_path / "m", replace(CONFIG, seed=1, lam=1.0))  # the penalty is not part of the sums
    fit(parquet, tmp_path / "calm", replace(CONFIG, seed=1, lam=1.0))
    assert torch.allclose(weights(tmp_path / "m"), weights(tmp_path / "calm"), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        {"num_features": 32},
        {"feature_map": "random-relu"},
        {"bandwidth": 0.5},
        {"missing": "drop"},
        {"drop": ("x2",)},
        {"block_dtype": "float32"},
        {"target": "x1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_checkpoint_is_for_one_configuration(parquet, tmp_path, change):
    with pytest.raises(KeyboardInterrupt):
        fit(parquet, tmp_path / "m", CONFIG, checkpoint_seconds=0, progress=after(1000))
    with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
        fit(parquet, tmp_path / "m", replace(CONFIG, **change))


def test_parts_of_another_configuration_are_never_added(parquet, tmp_path):
    """A folder that the machines do not share keeps old parts, as only the first worker cleans up its own."""
    with pytest.raises(KeyboardInterrupt):
        fit(parquet, tmp_path / "m", CONFIG, checkpoint_seconds=0, progress=after(1000))
    (tmp_path / "m" / ".checkpoint" / "columns.json").unlink()
    with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
        fit(parquet, tmp_path / "m", replace(CONFIG, seed=5))


def write_rows(path, sign):
    """Write 240 KB of CSV. The sign changes one character per row in the middle, but not the size or the ends."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=10_000)
    y = np.where((np.arange(10_000) > 3000) & (np.arange(10_000) < 5000), sign, 1) * np.sin(x)
    path.write_text("x,y\n" + "".join(f"{a:+.8f},{b:+.8f}\n" for a, b in zip(x, y, strict=True)))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_that_is_replaced_between_a_kill_and_the_restart(kind, tmp_path):
    """The new table has the same size, ends and time of modification; the checkpoint is refused all the same."""
    path, out = tmp_path / f"t.{kind}", tmp_path / "m"
    drawn = FitConfig("y", 512, feature_map="random-fourier", bandwidth=1.0)

    def write(sign):
        write_rows(tmp_path / "t.csv", sign)
        if kind == "parquet":  # as many bytes, and no statistics in its footer
            table = pa.csv.read_csv(tmp_path / "t.csv")
            pq.write_table(table, path, 1000, compression="none", use_dictionary=False, write_statistics=False)
        os.utime(path, ns=(10**18, 10**18))

    def stop(what, rows, total):
        if (out / ".checkpoint").exists() and list((out / ".checkpoint").glob("part-*")):
            raise KeyboardInterrupt

    write(1)
    size = path.stat().st_size
    if kind == "csv":  # all is one block: the run counts it, and fails when it solves
        with pytest.raises(ValueError, match="lam = 0 needs full rank"):
            fit(path, out, replace(drawn, lam=0.0))
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(path, out, CONFIG, checkpoint_seconds=0, progress=stop)
    config = drawn if kind == "csv" else CONFIG
    write(-1)
    assert path.stat().st_size == size > 1 << 17
    with pytest.raises(ValueError, match="checkpoint of another configuration or table"):
        fit(path, out, config)
    write(1)
    fit(path, out, config)
    fit(path, tmp_path / "calm", config)
    np.testing.assert_allclose(predictions(out, path), predictions(tmp_path / "calm", path), atol=1e-9)


@pytest.fixture
def interrupted(parquet, tmp_path):
    """A folder with a checkpoint of 4 of 8 blocks, and the one part in it."""
    out = tmp_path / "m"
    with pytest.raises(KeyboardInterrupt):
        fit(parquet, out, CONFIG, checkpoint_seconds=0, progress=after(1600))
    (part,) = out.glob(".checkpoint/part-*.safetensors")
    return out, part


def load(path):
    """The sums of a part, and its other tensors."""
    with safe_open(path, "pt") as file:
        return RidgeStats.load(path, extra=HELD), {name: file.get_tensor(name) for name in HELD}


def forget_a_block(content, part):
    stats, held = load(part)
    note = json.loads(stats.note)
    note["blocks"].pop(1)
    stats.note = json.dumps(note)
    stats.save(part, held)
    return part.read_bytes()


def change_a_sum(content, part):
    stats, held = load(part)
    stats.sums[0, 5, 9] += 1.0
    stats.save(part, held)
    return part.read_bytes()


def with_note(note):
    def change(content, part):
        stats, held = load(part)
        stats.note = note
        stats.save(part, held)
        return part.read_bytes()

    return change


DAMAGE = {
    "one block is forgotten": forget_a_block,
    "one sum is another": change_a_sum,
    "half of it": lambda content, part: content[: len(content) // 2],
    "nothing": lambda content, part: b"",
    "no note": with_note(""),
    "a deep note": with_note("[" * 100_000),
    "a note of another kind": with_note("[1, 2]"),
    "blocks that are no list": with_note('{"key": "a", "blocks": {"b": 1}, "rows": 5}'),
    "rows that are no number": with_note('{"key": "a", "blocks": [], "rows": "5"}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.once
def test_a_damaged_part_of_a_checkpoint_is_named(damage, parquet, tmp_path, interrupted):
    out, part = interrupted
    part.write_bytes(DAMAGE[damage](part.read_bytes(), part))
    with pytest.raises(ValueError, match=rf"{part.name} .*Remove it and run the same command again"):
        fit(parquet, out, CONFIG)
    part.unlink()  # the advice
    fit(parquet, out, CONFIG)
    fit(parquet, tmp_path / "calm", CONFIG)
    assert torch.allclose(weights(out), weights(tmp_path / "calm"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("change", ["", "{", "[" * 100_000, "null", "mean", "blocks", "\xff"])
@pytest.mark.once
def test_a_damaged_first_pass_is_named(change, parquet, tmp_path, interrupted):
    out, _ = interrupted
    path = out / ".checkpoint" / "columns.json"
    stored = json.loads(path.read_text())
    if change == "mean":
        stored["start"]["columns"]["inputs"][0]["mean"] += 1e-3
    if change == "blocks":
        stored["blocks"]["data.parquet[3]"] -= 1
    content = json.dumps(stored) if change in ("mean", "blocks") else change
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"columns.json is .*Remove it and run the same command again"):
        fit(parquet, out, CONFIG)
    path.unlink()
    fit(parquet, out, CONFIG)
    fit(parquet, tmp_path / "calm", CONFIG)
    assert torch.allclose(weights(out), weights(tmp_path / "calm"), rtol=1e-9, atol=1e-12)
