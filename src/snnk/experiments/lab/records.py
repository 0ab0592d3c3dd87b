"""Result rows: JSON with seed, versions, configuration and its hash beside each figure, written as they come."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from snnk import _environment, _io

Row = dict[str, Any]
UNREADABLE: tuple[type[Exception], ...] = (LookupError, TypeError, AttributeError, ArithmeticError, StopIteration)


def environment() -> dict[str, str]:
    """Versions, processor and, in a checkout, the commit."""
    return {**_environment.environment(), "commit": _commit()}


def _commit() -> str:
    """Of the checkout that this file belongs to; "" where it is installed, maybe inside another repository."""
    here = Path(__file__)
    try:
        for command in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty"]):
            git = ["git", "-C", str(here.parent), *command]
            run = subprocess.run(git, capture_output=True, text=True, timeout=5)
            if run.returncode:
                return ""
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()


class Results:
    """Rows of one configuration in one JSON file; a second run finds those that are done.

    Rows of the same configuration are taken over also from another commit or machine, which each row names, and
    whatever the number of seeds. A file with rows of another configuration is renamed, not overwritten, when the first
    row comes; a run of that configuration finds it again under its new name.

    Args:
        path: the file. It is replaced as a whole under a temporary name, so it is never half-written.
        config: a dataclass instance.
        resume: take over rows at all; a benchmark measures anew, and replaces the file.
        source: names of data and model, kept beside the configuration.
    """

    def __init__(
        self, path: Path, config: Any, *, resume: bool = True, source: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.config, self.source = json.loads(json.dumps(asdict(config))), dict(source or {})
        self.environment = environment()
        self.environments: dict[str, dict[str, str]] = {}  # of the rows, which name theirs
        self.rows: list[Row] = []
        self.aside: Path | None = None  # where the file that is there will go
        self.back: Path | None = None  # where rows of this configuration were put aside
        stored = Stored(path) if path.exists() else None  # a file that is no such one is refused
        if not resume:
            return
        own = self._renamed(self.hash)
        if stored is not None and stored.hash == self.hash:
            self._take(stored)
            if own.exists() and all(row in self.rows for row in Stored(own)):
                self.back = own  # a run was killed after it had brought these rows back
            return
        if stored is not None and stored.rows:
            self.aside = self._renamed(stored.hash)
        if own.exists():
            self.back = own
            self._take(Stored(own))

    def _renamed(self, digest: str) -> Path:
        return self.path.with_name(f"{self.path.stem}.{digest}{self.path.suffix}")

    def _take(self, stored: Stored) -> None:
        self.rows, self.environments = stored.rows, stored.environments
        if "seeds" in self.config:
            self.config["seeds"] = max(self.config["seeds"], stored.config["seeds"])

    @property
    def hash(self) -> str:
        """Of what makes rows comparable: configuration, version, data and model."""
        settings = {key: value for key, value in self.config.items() if key != "seeds"}
        return _digest([settings, self.environment["snnk"], *self.source.items()])

    def find(self, **key: Any) -> Row | None:
        """The row with these values, if it has been computed."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in key.items())), None)

    def add(self, row: Row) -> Row:
        """Add a row and write the file; a figure that is not finite becomes null, which JSON has."""
        row = _plain(row)
        row.setdefault("commit", self.environment["commit"])
        row["environment"] = _digest(self.environment)
        self.environments[row["environment"]] = self.environment
        self.rows.append(row)
        self.write()
        return row

    def write(self) -> None:
        """Put the rows where they belong, and those of another configuration aside."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.aside is not None:
            self.path.replace(_free(self.aside))
            self.aside = None
        body: Row = {"config": self.config, "config_hash": self.hash, "environment": self.environment}
        body |= {"environments": self.environments, "source": self.source, "rows": self.rows}
        _io.write_json(self.path, body)
        if self.back is not None:
            self.back.unlink(missing_ok=True)
            self.back = None

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


@contextmanager
def reading(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Turn errors while rows of a file are read into one that names the file: each experiment has its own keys."""
    try:
        yield
    except (*UNREADABLE, *more) as error:
        raise ValueError(
            f"{path} has rows that are not this experiment's ({type(error).__name__}: {error}); move it away or name "
            "another --out"
        ) from error


class Stored(Results):
    """The rows of a file as they are, to plot and to state claims from."""

    def __init__(self, path: Path) -> None:
        try:
            stored = _io.read_json(path, "a result file of snnk")
            parts = [stored["config"], stored["environment"], *stored["rows"]]
            parts += [stored.get("source", {}), *stored.get("environments", {}).values()]
            if not all(isinstance(part, dict) for part in parts) or not isinstance(stored["rows"], list):
                raise TypeError("config, environment, source and rows must be objects")
            if not isinstance(stored["config"].get("seeds", 0), int):
                raise TypeError(f"seeds is {stored['config']['seeds']!r}")
            self.config, self.environment = dict(stored["config"]), {"snnk": "", **stored["environment"]}
            self.source = dict(stored.get("source", {}))
            last = _digest(stored["environment"])
            self.rows = [{"environment": last, **row} for row in stored["rows"]]
            self.environments = {last: stored["environment"], **stored.get("environments", {})}
            unknown = {row["environment"] for row in self.rows} - set(self.environments)
            if unknown:
                raise ValueError(f"rows name the environments {unknown}, which are not in it")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a result file of snnk; move it away or name another --out") from error
        self.path, self.aside, self.back = path, None, None


def _free(path: Path) -> Path:
    """This name, or with a number where it is taken."""
    numbered = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in count(1))
    return path if not path.exists() else next(name for name in numbered if not name.exists())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def claim(paper: str, ours: str, holds: bool, tolerance: str = "none") -> Row:
    """One line of the claims table.

    Args:
        paper: the paper's statement.
        ours: our figures.
        holds: whether they bear it out.
        tolerance: by how much they may differ, in words.
    """
    return {"paper": paper, "ours": ours, "tolerance": tolerance, "holds": bool(holds)}


def _plain(value: Any) -> Any:
    """The same with null for figures that are not finite."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_figure(figure: Any, path: Path) -> Path:
    """Write a matplotlib figure, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _io.replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130, bbox_inches="tight")
    return path
