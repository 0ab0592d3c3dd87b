"""Write requirements.lock: one exact version of every package that `make` installs, with the hashes of its files.

    make lock

constraints.txt chooses versions. The lock adds the packages that those need in turn, for all versions of Python and all
systems, and the SHA-256 of each of their files in the index. torch is left out, with the CUDA libraries that only it
needs: its builds for processors and for GPUs have one version but different hashes. constraints.txt alone pins it.
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
BUILD = "hatchling"  # builds the package itself
HEADER = """\
# Written by `make lock`; do not edit. Versions are chosen in constraints.txt, which also pins torch, left out here.
"""


def compile_lock(requirements: Path) -> str:
    """Return the output of `uv pip compile`: one block per package, with its hashes for every platform."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", str(requirements), "--extra", "dev"]
    command += ["--constraints", "constraints.txt", "--universal", "--python-version", PYTHON, "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--quiet"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def without_torch(text: str) -> str:
    """Remove the blocks of torch and of packages that depend on its build."""
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
