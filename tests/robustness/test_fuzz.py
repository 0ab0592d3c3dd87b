"""A few hundred cases of the fuzzer; `make fuzz` runs 10,000. See fuzz.py."""

import subprocess
import sys
from pathlib import Path

CASES = 300


def test_damaged_files_are_refused_or_load_to_the_same(tmp_path):
    """The fuzzer forks, which is not safe in a process with the threads of other tests: it has its own process."""
    script = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, str(script), "--cases", str(CASES), "--out", str(tmp_path / "fuzz.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
