"""Result rows: JSON with seed, versions, configuration and its hash beside each figure, written as they come."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

import snnk

Row = dict[str, Any]


def environment() -> dict[str, str]:
    """Versions, hardware and, in a checkout, the commit that the rows come from."""
    here = Path(__file__).parent
    try:
        run = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=5
        )
        commit = run.stdout.strip() if run.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        commit = ""
    return {
        "snnk": snnk.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "commit": commit,
    }


class Results:
    """Rows of one configuration in one JSON file; a second run finds those that are done.

    Args:
        path: the file. It is replaced as a whole under a temporary name, so it is never half-written.
        config: a dataclass instance; rows of another configuration, version or commit in the file are not taken over.
        resume: take over rows at all; a benchmark measures anew.
        source: names of data and model, kept beside the configuration.
    """

    def __init__(
        self, path: Path, config: Any, *, resume: bool = True, source: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.config, self.source = asdict(config), dict(source or {})
        self.environment = environment()
        key = [self.config, self.environment["snnk"], self.environment["commit"], *self.source.items()]
        self.hash = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
        self.rows: list[Row] = []
        if path.exists():
            stored = Stored(path)
            if resume and stored.hash == self.hash:
                self.rows = stored.rows

    def find(self, **key: Any) -> Row | None:
        """The row with these values, if it has been computed."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in key.items())), None)

    def add(self, row: Row) -> Row:
        """Add a row and write the file; a figure that is not finite becomes null, which JSON has."""
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.rows.append(row)
        body: Row = {"config": self.config, "config_hash": self.hash, "environment": self.environment}
        body |= {"source": self.source, "rows": self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(body, indent=1) + "\n")
        temporary.replace(self.path)
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


class Stored(Results):
    """The rows of a file as they are, to plot and to state claims from."""

    def __init__(self, path: Path) -> None:
        try:
            stored = json.loads(path.read_text())
            self.config, self.environment = dict(stored["config"]), dict(stored["environment"])
            self.hash, self.source = str(stored["config_hash"]), dict(stored.get("source", {}))
            self.rows = [dict(row) for row in stored["rows"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a result file of snnk; move it away or name another --out") from error
        self.path = path


def save_figure(figure: Any, path: Path) -> Path:
    """Write a matplotlib figure under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    figure.savefig(temporary, dpi=130, bbox_inches="tight")
    temporary.replace(path)
    return path
