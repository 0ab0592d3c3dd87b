"""compress, finetune and reproduce give the same result, and leave nothing else, after a kill at any file event."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from snnk import _io

LEAST = {"compress": 20, "finetune": 25, "reproduce": 12}  # file events


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    driver = Path(__file__).with_name("killing.py")
    command = [sys.executable, "-W", "ignore", str(driver), str(tmp_path_factory.mktemp("killed"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", LEAST)
def test_the_next_run_gives_the_same_and_leaves_nothing(killed, command):
    found = killed[command]
    assert found["events"] >= LEAST[command] and len(found["left"]) > LEAST[command] / 2
    hidden = {name for tree in found["left"] for name in tree if name.startswith(".")}
    assert ".out.lock" in hidden or ".tiny.json.lock" in hidden  # the kills did leave something
    assert [tree for tree in found["again"] if tree != found["calm"]] == []


@pytest.mark.parametrize("command", ["compress", "finetune"])
def test_an_output_is_whole_or_not_there(killed, command):
    """The whole folder appears at once; before it there are only hidden names and the checkpoint."""
    whole = {name: digest for name, digest in killed[command]["calm"].items() if name.split("/")[0] == "out"}
    assert len(whole) > 5
    seen = [{n: d for n, d in tree.items() if n.split("/")[0] == "out"} for tree in killed[command]["left"]]
    assert all(found in ({}, whole) for found in seen)


def test_a_full_disk_and_a_folder_that_is_removed(killed):
    (full, left), (removed, nothing) = (killed["disturbed"][what] for what in ("full", "removed"))
    assert "run the command again" in full and "out" in full
    assert {name.split("/")[0] for name in left} == {"out.checkpoint"}  # the same command goes on from it
    assert "was removed while out was written to it; run the command again" in removed and nothing == {}


def test_a_second_run_is_refused_while_the_first_writes(tmp_path):
    code = f"from snnk.cli import main\nmain(['estimate', '--draws', '1', '--out', {str(tmp_path)!r}])"
    with _io.locked_output(tmp_path / "estimate.json"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "another run is writing to" in done.stderr
    assert list(tmp_path.iterdir()) == []
