"""One atomic write: whole or not at all, whatever happens, and what killed runs leave is removed."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from snnk import _io

KILLED = (
    "import os, signal, sys\n"
    "from snnk import _io\n"
    "with _io.{what}(sys.argv[1]) as temporary:\n"
    "    {write}\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n"
)
WRITE = {"replacing": "temporary.write_text('half')", "new_folder": "(temporary / 'a').write_text('half')"}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed_while_writing(what, path):
    code = KILLED.format(what=what, write=WRITE[what])
    done = subprocess.run([sys.executable, "-c", code, str(path)])
    assert done.returncode == -signal.SIGKILL


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    _io.write_json(path, [1])
    with pytest.raises(RuntimeError), _io.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    with pytest.raises(ValueError, match="JSON compliant"):
        _io.write_json(path, float("nan"))
    assert names(tmp_path) == ["a.json"] and _io.read_json(path, "a list") == [1]


def test_an_error_of_the_block_is_its_own(tmp_path):
    for what in (_io.replacing, _io.new_folder):
        with pytest.raises(FileNotFoundError), what(tmp_path / "a"):
            raise FileNotFoundError
    assert names(tmp_path) == []


def test_data_are_on_disk_before_the_name_is(tmp_path, monkeypatch):
    events, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda d: events.append(os.path.basename(os.readlink(f"/proc/self/fd/{d}"))) or fsync(d)
    )
    path = tmp_path / "folder" / "file"
    with _io.new_folder(path.parent) as temporary:
        (temporary / "file").write_text("1")
    assert events[0] == "file" and events[1].endswith(".tmp") and events[2:] == [tmp_path.name]
    events.clear()
    with _io.replacing(path) as temporary:
        temporary.write_text("2")
    assert events[0].endswith(".tmp") and events[1:] == ["folder"] and path.read_text() == "2"


@pytest.mark.parametrize("what", WRITE)
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path, what):
    path = tmp_path / "out"
    killed_while_writing(what, path)
    assert len(names(tmp_path)) == 1 and not path.exists()
    (tmp_path / ".other.out.tmp").touch()  # a user's
    with getattr(_io, what)(path) as temporary:
        assert names(tmp_path) == sorted([".other.out.tmp", temporary.name])
    assert names(tmp_path) == [".other.out.tmp", "out"]


@pytest.mark.parametrize("what", WRITE)
def test_what_is_being_written_is_no_leftover(tmp_path, what):
    path = tmp_path / "out"
    with getattr(_io, what)(path) as temporary:
        found = []
        thread = threading.Thread(target=lambda: found.append(_io.remove_leftovers(path)))
        thread.start()
        thread.join()
        assert found == [[]] and temporary.exists()


def test_a_folder_that_was_made_meanwhile_stays(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(FileExistsError, match="exists already"), _io.new_folder(path):
        path.mkdir()
    assert names(tmp_path) == ["out"] and names(path) == []


def test_two_runs_cannot_hold_one_lock(tmp_path):
    lock = tmp_path / ".lock"
    with _io.locked(lock, "out"):
        with pytest.raises(ValueError, match="another run is writing to out"), _io.locked(lock, "out"):
            pass
        assert lock.exists()
    assert not lock.exists()
    lock.touch()  # left by a run that was killed
    with _io.locked(lock, "out"):
        pass
    assert not lock.exists()


def test_a_lock_that_was_removed_after_it_was_opened_does_not_count(tmp_path, monkeypatch):
    lock, flock, opened = tmp_path / ".lock", _io.fcntl.flock, []

    def late(file, how):  # the last holder unlinks the file between our open and our lock
        if not opened:
            opened.append(file)
            lock.unlink()
        flock(file, how)

    monkeypatch.setattr(_io.fcntl, "flock", late)
    with _io.locked(lock, "out"):
        assert lock.exists()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\udcff", None])
def test_bad_json_names_the_file(tmp_path, text):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises((ValueError, FileNotFoundError), match=r"a\.json.* a plan"):
        _io.read_json(path, "a plan")


def test_bad_tensors_name_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    _io.write_tensors(path, {"x": torch.arange(12.0).reshape(3, 4).T})
    with _io.open_tensors(path) as file:
        assert torch.equal(file.get_tensor("x"), torch.arange(12.0).reshape(3, 4).T)
    path.write_bytes(path.read_bytes()[:-1])
    for bad, why in ((path, "whole safetensors"), (tmp_path / "b", "there is no file"), (tmp_path, "director|read")):
        with pytest.raises((ValueError, FileNotFoundError), match=why), _io.open_tensors(bad):
            pass


def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to("nowhere")
    _io.check_out(tmp_path / "a" / "b" / "new")
    _io.check_out(tmp_path, new=False)
    for path in (file, link):
        with pytest.raises(NotADirectoryError, match=f"{path.name} exists and is not a folder; choose"):
            _io.check_out(path, new=False)
    for path in (file, link, tmp_path):
        with pytest.raises(FileExistsError, match="exists already"):
            _io.check_out(path)
    for new in (True, False):
        with pytest.raises(PermissionError, match="file is no folder that can be written to"):
            _io.check_out(file / "a", new=new)


def test_a_lock_needs_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(PermissionError, match="file is no folder that can be written to"),
        _io.locked_output(tmp_path / "file" / "a"),
    ):
        pass


def test_an_output_leaves_room_for_the_names_of_its_temporary_files(tmp_path):
    for name in ("x" * 255, "x" * 256, "ü" * 100, "x" * (256 - _io.NAME_ROOM), f"{'x' * 256}/a"):
        with pytest.raises(ValueError, match="an output may have at most"):
            _io.check_out(tmp_path / name)
    path = tmp_path / ("x" * (255 - _io.NAME_ROOM))
    _io.check_out(path)
    checkpoint = path.with_name(f"{path.name}.checkpoint")  # the longest name that a command adds
    with _io.locked_output(checkpoint):
        _io.write_json(checkpoint, 1)


def test_a_tensor_that_cannot_be_written_names_the_file(tmp_path):
    def save():
        with _io.replacing(tmp_path / "a.safetensors"):
            raise _io.SafetensorError("disk full")

    with pytest.raises(OSError, match=r"a\.safetensors cannot be written: disk full; run the command again"):
        save()


def test_outputs_and_options_are_checked_without_torch():
    code = "import sys, snnk._io, snnk._checks, snnk._text; print([m for m in sys.modules if m.startswith('torch')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
