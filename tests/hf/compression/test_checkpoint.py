"""A run of compress that was stopped goes on, and ends with the weights that it would have had without the stop."""

import json
import os
import shutil
import signal
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from snnk._checkpoint import CheckpointError, read_checkpoint
from snnk.hf import compress
from snnk.hf.compression import blocks, distill, report, stages
from snnk.hf.compression.checkpoint import CompressionCheckpoint, fingerprint, remove_checkpoint

from helpers.architectures import make
from helpers.heads import make as make_head
from helpers.processes import run_code
from helpers.texts import make_texts, save

OPTIONS = {"keep": 0.5, "refine": 2, "recover": 24}
KILLED = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from snnk.hf import compress
from snnk.hf.compression import report

report.SECONDS = 0.0

def progress(what, done, total, note=""):
    if (what, done) == ("distilling, stage 1", 15):
        os.kill(os.getpid(), signal.SIGKILL)

compress(sys.argv[1], sys.argv[2], out=sys.argv[3], progress=progress, **{options!r})
"""


class Stopped(BaseException):
    """Ends a run as Ctrl-C does."""


def stop_at(where, step, seen=None):
    def progress(what, done, total, note=""):
        if seen is not None:
            seen.append((what, done))
        if (what, done) == (where, step):
            raise Stopped

    return progress


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def curve(folder):
    recovery = json.loads((folder / "report.json").read_text())["report"]["recovery"]
    return recovery["curve"], recovery["stages"], recovery["kept"]


@pytest.fixture(autouse=True)
def brief(quick):
    """All runs are as brief as they can be, also those of a module."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, texts, and the output of a run that is not stopped."""
    folder = tmp_path_factory.mktemp("home")
    save(make_head("BertModel"), folder / "bert")
    (folder / "texts.txt").write_text("\n".join(make_texts(120)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "SECONDS", 0.0)
        patch.setattr(stages, "PASSES", 1)
        compress(folder / "bert", folder / "texts.txt", out=folder / "calm", **OPTIONS)
        with pytest.raises(Stopped):
            compress(
                folder / "bert",
                folder / "texts.txt",
                out=folder / "out",
                progress=stop_at("distilling, stage 1", 15),
                **OPTIONS,
            )
    return folder


@pytest.fixture
def bert(home):
    return home / "bert"


@pytest.fixture
def texts(home):
    return home / "texts.txt"


@pytest.fixture
def calm(home):
    return home / "calm"


@pytest.fixture
def stopped(home, tmp_path):
    """The checkpoint of a run that was stopped in the distillation."""
    return shutil.copytree(home / "out.checkpoint", tmp_path / "out.checkpoint")


def test_a_process_that_is_killed_at_a_step(calm, bert, texts, tmp_path):
    out, seen, said = tmp_path / "out", [], []
    code = KILLED.format(options=OPTIONS)
    done = run_code(code, bert, texts, out)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists() and (tmp_path / "out.checkpoint").is_dir()
    compress(bert, texts, out=out, progress=stop_at("never", 0, seen), say=said.append, **OPTIONS)
    assert [step for what, step in seen if what.startswith("distilling")] == [*range(13, 25)]  # 12 was kept, 6 each
    assert not [what for what, _ in seen if what.startswith("encoder")]
    assert f"going on from {out}.checkpoint, which has 4 blocks, and a part of the distillation" in said
    assert weights(out) == weights(calm) and curve(out) == curve(calm)
    assert not (tmp_path / "out.checkpoint").exists()


@pytest.mark.parametrize(
    ("where", "step"),
    [
        ("encoder.layer.0.attention", 1),
        ("distilling, stage 1", 3),
        ("distilling, stage 1", 24),
        ("measuring latency", 4),
    ],
)
def test_a_run_that_is_stopped_anywhere(calm, bert, texts, tmp_path, monkeypatch, where, step):
    """The report has the time of both runs; by this clock, each block takes 100 s."""
    monkeypatch.setattr(distill, "SAVE_SECONDS", -1.0)  # a checkpoint after each step
    monkeypatch.setattr(blocks, "time", SimpleNamespace(monotonic=partial(next, count(step=100.0))))
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        compress(bert, texts, out=out, progress=stop_at(where, step), **OPTIONS)
    assert {path.name for path in tmp_path.glob("out*")} == {"out.checkpoint"}
    done = compress(bert, texts, out=out, **OPTIONS)["report"]
    assert weights(out) == weights(calm) and curve(out) == curve(calm)
    assert [block["seconds"] for block in done["blocks"]] == [100.0] * 4 and done["seconds"] >= 600


def test_stages_of_a_length_that_was_chosen(bert, texts, tmp_path, monkeypatch):
    """Stopped in the second stage, whose rates follow from the end of the first."""
    monkeypatch.setattr(stages, "FIRST", 16)
    monkeypatch.setattr(stages, "PASSES", 3)
    monkeypatch.setattr(stages, "LEAST_GAIN", -1.0)  # there is a second stage in any case
    options = {**OPTIONS, "recover": "auto", "recover_minutes": 600}
    compress(bert, texts, out=tmp_path / "calm", **options)
    with pytest.raises(Stopped):
        compress(bert, texts, out=tmp_path / "out", progress=stop_at("distilling, stage 2", 21), **options)
    compress(bert, texts, out=tmp_path / "out", **options)
    assert curve(tmp_path / "calm")[1] == [16, 32]
    assert weights(tmp_path / "out") == weights(tmp_path / "calm")
    assert curve(tmp_path / "out") == curve(tmp_path / "calm")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_another_run_is_refused(stopped, bert, texts, tmp_path):
    """Other options, texts or weights; the checkpoint stays, and the first command still goes on from it."""
    before = contents(stopped)
    lines = texts.read_text().splitlines()
    (tmp_path / "other.txt").write_text("\n".join([*lines[1:], "w1 w2 w3"]))
    shutil.copytree(bert, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    runs = [
        (bert, texts, {**OPTIONS, "recover": 25}),
        (bert, texts, {**OPTIONS, "keep": 0.25}),
        (bert, tmp_path / "other.txt", OPTIONS),
        (tmp_path / "other", texts, OPTIONS),
    ]
    for model, calibration, options in runs:
        with pytest.raises(ValueError, match=r"out\.checkpoint belongs to a run that was stopped, with other options"):
            compress(model, calibration, out=tmp_path / "out", **options)
    assert contents(stopped) == before
    compress(bert, texts, out=tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("name", ["start.json", "block-encoder.layer.1.safetensors", "distillation.safetensors"])
def test_a_damaged_file_is_named(stopped, bert, texts, tmp_path, name):
    """Advice: delete the checkpoint. Nothing else changes."""
    whole = (stopped / name).read_bytes()
    (stopped / name).write_bytes(whole[:-9])
    before = contents(stopped)
    with pytest.raises(ValueError, match=f"{name} .*delete"):
        compress(bert, texts, out=tmp_path / "out", **OPTIONS)
    assert contents(stopped) == before and not (tmp_path / "out").exists()
    shutil.rmtree(stopped)
    compress(bert, texts, out=tmp_path / "out", **OPTIONS)


def test_a_block_that_does_not_fit_is_named(stopped, bert, texts, tmp_path):
    first, second = (stopped / f"block-encoder.layer.{i}.safetensors" for i in (0, 1))
    key = json.loads((stopped / "start.json").read_text())["key"]
    parts, facts = read_checkpoint(first, key, {"entry": bool, "report": bool})
    facts["entry"]["num_features"] -= 1
    distill.write_checkpoint(second, {k: v for k, v in parts.items() if v}, {"key": key, **facts})
    with pytest.raises(ValueError, match=r"(?s)layer\.1\.safetensors does not fit encoder\.layer\.1.*delete"):
        compress(bert, texts, out=tmp_path / "out", **OPTIONS)


def test_a_checkpoint_beside_a_complete_output_is_removed(stopped, bert, texts, tmp_path):
    """Its run was killed after it had written the output."""
    aside = tmp_path / "aside"
    shutil.copytree(stopped, aside)
    compress(bert, texts, out=tmp_path / "out", **OPTIONS)
    os.rename(aside, stopped)
    with pytest.raises(FileExistsError, match="out exists already"):
        compress(bert, texts, out=Path(tmp_path / "out"), **OPTIONS)
    assert not stopped.exists()


def test_a_folder_of_the_users_own_stays(tmp_path):
    """A folder that has the name of the checkpoint, and something else in it, is neither used nor removed."""
    folder = tmp_path / "small.checkpoint"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt, which is not part of one; move it away"):
        CompressionCheckpoint(folder, "key")
    remove_checkpoint(folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_key_of_a_run_has_the_configuration_without_its_place():
    """Weights alone do not determine the model: another activation is another run, another folder is not."""
    models = [make("bert"), make("bert"), make("bert", hidden_act="relu"), make("bert", layer_norm_eps=0.1)]
    models[1].config._name_or_path = "another/folder"
    keys = [fingerprint({"keep": 0.5}, model, []) for model in models]
    assert keys[0] == keys[1] and len(set(keys)) == 3
