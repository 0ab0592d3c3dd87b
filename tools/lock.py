"""Write requirements.lock: one exact version of every package that `make` installs, with the hashes of its files.

    make lock

constraints.txt is where versions are chosen; this adds what those packages need in turn, for all versions of Python
and all systems at once, and the SHA-256 of each file that the index has of them. torch is left out, with the CUDA
libraries that only it needs: its builds for processors and for GPUs have other hashes under the same version, and
which one is right depends on the machine. constraints.txt alone pins it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
PYTHON = "3.10"  # the oldest version of Python that pyproject.toml allows
OUTSIDE = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
BUILD = "hatchling"  # what builds the package itself is locked too
HEADER = """\
# Written by `make lock`; do not edit. Versions are chosen in constraints.txt, which also pins torch, left out here.
"""


def compile_lock(requirements: Path) -> str:
    """The output of `uv pip compile`: blocks of a requirement and its hashes, for every platform."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", str(requirements), "--extra", "dev"]
    command += ["--constraints", "constraints.txt", "--universal", "--python-version", PYTHON, "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--quiet"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def without_torch(text: str) -> str:
    """The blocks of all packages that do not depend on which build of torch a machine has."""
    blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return "".join(block for block in blocks if block and not OUTSIDE.match(block))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, "build.in")
        requirements.write_text(f"{BUILD}\neditables\n")
        text = without_torch(compile_lock(requirements))
    LOCK.write_text(HEADER + text)
    sys.stdout.write(f"wrote {LOCK.name}: {text.count('==')} versions, {text.count('--hash=')} hashes\n")


if __name__ == "__main__":
    main()
