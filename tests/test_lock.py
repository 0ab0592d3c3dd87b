"""requirements.lock is what constraints.txt and pyproject.toml ask for, and every file in it has a hash."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"([\w.-]+)==([\w.+!]+)")


def test_the_lock_has_the_versions_of_the_constraints():
    lock = (ROOT / "requirements.lock").read_text()
    blocks = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
    pinned = {PIN.match(block).groups() for block in blocks if PIN.match(block)}
    chosen = {match.groups() for match in PIN.finditer((ROOT / "constraints.txt").read_text())}
    assert chosen - pinned == {next(pin for pin in chosen if pin[0] == "torch")}, "run make lock"
    project = (ROOT / "pyproject.toml").read_text()
    wanted = set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=', project)) - {"torch"}
    assert wanted and wanted <= {name for name, _ in pinned}, "run make lock"


def test_every_version_has_hashes_and_no_address():
    lock = (ROOT / "requirements.lock").read_text()
    lines = [line for line in lock.splitlines() if not line.startswith("#")]
    hashed = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
    pins = [i for i, line in enumerate(lines) if PIN.match(line)]
    assert len(pins) > 50 and all(hashed.fullmatch(lines[i + 1]) for i in pins)
    assert all(hashed.fullmatch(line) for i, line in enumerate(lines) if i not in pins)
    assert "://" not in lock and not any(PIN.match(lines[i])[1] in ("torch", "triton") for i in pins)
