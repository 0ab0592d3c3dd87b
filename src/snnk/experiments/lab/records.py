"""Result rows in JSON files, written one by one, with seed, versions, configuration and its hash beside each figure."""

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
from typing import TYPE_CHECKING, Any

from snnk import _environment, _io

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
# parts of a configuration that determine which rows there are; every row has its own value of them
AXES = ("seeds", "tasks", "methods", "rates", "variants", "trained_directions", "unit_sphere")
UNREADABLE: tuple[type[Exception], ...] = (LookupError, TypeError, AttributeError, ArithmeticError, StopIteration)


def environment() -> dict[str, str]:
    """Versions, processor, and the commit if this is a checkout."""
    return {**_environment.environment(), "commit": _commit()}


def _commit() -> str:
    """The commit of the checkout that this file belongs to; "" for an installed package, even inside a repository."""
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
    """The rows of one configuration in one JSON file, from which a second run continues.

    Rows of the same configuration are reused, whatever their number of seeds, their tasks and methods, commit and
    machine; each row names its own. If the file has rows of another configuration, it is renamed when the first new row
    is written. A later run of that configuration finds it under its new name.

    Args:
        path: the file. It is replaced as a whole, so it is never half-written.
        config: a dataclass instance.
        resume: whether to reuse rows; benchmarks measure again and replace the file.
        source: names of data and model, stored beside the configuration.
    """

    def __init__(
        self, path: Path, config: Any, *, resume: bool = True, source: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.config, self.source = json.loads(json.dumps(asdict(config))), dict(source or {})
        self.environment = environment()
        self.environments: dict[str, dict[str, str]] = {}  # by the key that each row stores
        self.rows: list[Row] = []
        self.aside: Path | None = None  # the new name of a file with rows of another configuration
        self.back: Path | None = None  # the file that holds rows of this configuration since it was renamed
        stored = Stored(path) if path.exists() else None  # raises if it is not a file of results
        if not resume:
            return
        own = self._renamed(self.hash)
        if stored is not None and stored.hash == self.hash:
            self._take(stored)
            if own.exists() and all(row in self.rows for row in Stored(own)):
                self.back = own  # a run was killed after it had moved these rows back
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
        for part in ("tasks", "methods"):  # a run of some of them leaves the others in the file
            if part in self.config:
                self.config[part] = list(dict.fromkeys([*stored.config.get(part, ()), *self.config[part]]))

    @property
    def hash(self) -> str:
        """A hash of everything that makes rows comparable: configuration, version, data and model."""
        settings = {key: value for key, value in self.config.items() if key not in AXES}
        return _digest([settings, self.environment["snnk"], *self.source.items()])

    def find(self, **key: Any) -> Row | None:
        """The row with these values, or None if it has not been computed."""
        return next((row for row in self.rows if all(row.get(k) == v for k, v in key.items())), None)

    def add(self, row: Row) -> Row:
        """Add a row and write the file. Figures that are not finite become null, as JSON has no NaN."""
        row = _plain(row)
        row.setdefault("commit", self.environment["commit"])
        row["environment"] = _digest(self.environment)
        self.environments[row["environment"]] = self.environment
        self.rows.append(row)
        self.write()
        return row

    def write(self) -> None:
        """Write the file, after renaming one with rows of another configuration."""
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
    """Turn an error that unexpected rows cause into a ValueError that names their file."""
    try:
        yield
    except (*UNREADABLE, *more) as error:
        raise ValueError(
            f"{path} has rows that are not this experiment's ({type(error).__name__}: {error}); move it away or name "
            "another --out"
        ) from error


class Stored(Results):
    """The rows of an existing file, for plots and claims."""

    def __init__(self, path: Path) -> None:
        try:
            stored = _io.read_json(path, "a result file of snnk")
            parts = [stored["config"], stored["environment"], *stored["rows"]]
            parts += [stored.get("source", {}), *stored.get("environments", {}).values()]
            if not all(isinstance(part, dict) for part in parts) or not isinstance(stored["rows"], list):
                raise TypeError("config, environment, source and rows must be objects")
            if not isinstance(stored["config"].get("seeds", 0), int):
                raise TypeError(f"seeds is {stored['config']['seeds']!r}")
            for part in ("tasks", "methods"):
                words = stored["config"].get(part, [])
                if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                    raise TypeError(f"{part} is {words!r}")
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
    """The path, with a number added if it exists already."""
    numbered = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in count(1))
    return path if not path.exists() else next(name for name in numbered if not name.exists())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def claim(paper: str, ours: str, holds: bool | None, tolerance: str = "none") -> Row:
    """One line of the table of claims.

    Args:
        paper: the paper's statement.
        ours: our figures.
        holds: whether our figures support the statement; None if they decide nothing, as training had not ended.
        tolerance: the difference that is allowed, in words.
    """
    return {"paper": paper, "ours": ours, "tolerance": tolerance, "holds": None if holds is None else bool(holds)}


def _plain(value: Any) -> Any:
    """The value with None in place of figures that are not finite."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a matplotlib figure as PNG, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _io.replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130, bbox_inches="tight")
    return path
