"""The benchmarks run; what they measure is not asserted here, machines are noisy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
BENCHMARKS = sorted(path for path in FOLDER.glob("*.py") if "--quick" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda p: p.stem)
def test_quick(path, tmp_path):
    out = tmp_path / "rows.json"
    done = subprocess.run([sys.executable, str(path), "--quick", "--out", str(out)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(out.read_text())["rows"]
