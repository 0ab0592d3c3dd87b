"""Sums of parts of a table, which add up to the model of the whole, whichever machine or engine read which part.

    start = prepare("sample.parquet", FitConfig("price"))       # columns and features, the same for all parts
    parts = [start.part().read(path) for path in paths]         # anywhere, in any order
    model, report = merge(parts).solve()                        # the same model as that of all rows in one place

A `Start` is made once from some or all of the rows: it has the means, scales and categories of the columns, and the
feature map. A `Part` has the sums of some rows, a few of these rows for the assessment of the model, and its start, so
that a part can be sent and saved alone. Parts of one start add; a source that was counted before is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from snnk import _io
from snnk.maps import FeatureMap, feature_map_from_config
from snnk.ridge.sums import BLOCK_DTYPES, RidgeStats
from snnk.tabular.columns import Columns
from snnk.tabular.config import FitConfig
from snnk.tabular.learned import choose_bandwidth, learn
from snnk.tabular.model import ROWS, TableModel
from snnk.tabular.quality import FEWEST, assess
from snnk.tabular.sample import MOST_NUMBERS, MOST_ROWS, Held, Sample, content_hash, is_reserved
from snnk.tabular.scan import Scan
from snnk.tabular.source import Source, Table

if TYPE_CHECKING:
    import pyarrow as pa

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, how many there are (0: not known)
FORMAT = "snnk.Part 1"
HELD = ("held.hashes", "held.x", "held.y")


def _silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Start:
    """How rows become features: all that the sums of different parts must share.

    Args:
        config: what to fit, with its bandwidth chosen.
        columns: the encoding of rows.
        feature_map: phi.
        shift: origin of the sums, (m + t,): products in float32 are rounded about it, in whichever part.
    """

    config: FitConfig
    columns: Columns
    feature_map: FeatureMap
    shift: list[float]

    def part(self, device: Any = None) -> Part:
        """A part without rows."""
        return Part(self, device)

    def to_dict(self) -> dict[str, Any]:
        """The start as JSON."""
        tensors = {name: buffer.cpu().contiguous() for name, buffer in self.feature_map.state_dict().items()}
        return {
            "config": asdict(self.config),
            "columns": self.columns.to_dict(),
            "feature_map": self.feature_map.to_config(),
            "tensors": base64.b64encode(_io.safetensors().torch.save(tensors)).decode("ascii"),
            "shift": self.shift,
        }

    @classmethod
    def from_dict(cls, stored: Any) -> Start:
        """A start from what `to_dict` gave; anything missing or of another kind is a ValueError."""
        try:
            config, columns = FitConfig.from_dict(_listed(stored["config"])), Columns.from_dict(stored["columns"])
            tensors = _io.safetensors().torch.load(base64.b64decode(stored["tensors"], validate=True))
            fm = feature_map_from_config(stored["feature_map"], tuple(tensors["projection"].shape))
            fm.load_state_dict(tensors)
            shift = [float(value) for value in stored["shift"]]
        except (KeyError, TypeError, ValueError, RuntimeError, _io.SafetensorError) as error:
            raise ValueError(f"the start of the sums is damaged: {error}") from error
        sound = all(bool(buffer.isfinite().all()) for buffer in fm.buffers()) and all(map(math.isfinite, shift))
        if not sound or fm.in_features != columns.width or len(shift) != fm.num_features + columns.target.width:
            raise ValueError("the start of the sums is damaged: its sizes do not fit together")
        return cls(config, columns, fm, shift)

    @cached_property
    def key(self) -> str:
        """A hash of the start; parts add if theirs are equal."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def _listed(stored: Any) -> Any:
    return {**stored, "drop": list(stored["drop"])}


def new_sample(columns: int) -> Sample:
    """An empty sample of rows with this number of columns."""
    return Sample(max(min(MOST_ROWS, MOST_NUMBERS // max(columns, 1)), ROWS))


def prepare(source: Source, config: FitConfig, *, progress: Progress = _silent) -> Start:
    """Learn columns and features from a table, or from a sample of its rows in random order or not.

    Args:
        source: a file or folder, a frame, or a callable that returns batches; see `snnk.tabular.fit`.
        config: what to fit.
        progress: a function that is called with (what is being done, how many are done, how many there are).

    Example:
        >>> import numpy as np, pyarrow as pa
        >>> x = np.random.default_rng(0).normal(size=400)
        >>> start = prepare(pa.table({"x": x, "y": np.sin(x)}), FitConfig("y", num_features=16))
        >>> start.part().read(pa.table({"x": x, "y": np.sin(x)})).rows
        400
    """
    table = Table(source)
    scan, sample = Scan.start(table, config.target, config.drop), new_sample(len(table.names))
    scan.read(table, progress=lambda rows: progress("reading columns", rows, 0), sample=sample)
    table.check_unchanged()
    return make_start(config, scan.columns(config.task, config.missing), sample.table(), progress)


def make_start(config: FitConfig, columns: Columns, sample: pa.Table, progress: Progress = _silent) -> Start:
    """The start for some columns: learn the features, or choose the bandwidth, from a sample of the rows."""
    most = max(MOST_NUMBERS // (columns.width + columns.target.width), ROWS)
    pairs = [columns.encode(batch, "the sample")[:2] for batch in sample.slice(0, most).to_batches(ROWS)]
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs if y is not None]
    if not sum(map(len, xs)):
        raise ValueError("no rows are left: each has a missing, NaN or infinite value, and is dropped")
    x, y = torch.cat(xs), torch.cat(ys)
    used = ~is_reserved(content_hash(x))
    if bool(used.any()):
        x, y = x[used], y[used]
    if config.feature_map == "random-fourier" and isinstance(config.bandwidth, str):
        config = replace(config, bandwidth=choose_bandwidth(x, y, min(config.num_features, 1024), config.seed))
    if config.feature_map == "learned":
        fm = learn(
            x,
            y,
            config.num_features,
            classes=columns.target.categories is not None,
            seed=config.seed,
            progress=lambda done, total: progress("learning features", done, total),
        )
    else:
        fm = config.make_map(columns)
    with torch.no_grad():
        shift = torch.cat([fm.phi(x[:ROWS]).double().mean(0), y[:ROWS].mean(0)]).tolist()
    return Start(config, columns, fm, shift)


class Part:
    """Sums of the features and targets of some rows; parts of the same start add.

    Args:
        start: the columns and features.
        device: of the sums.

    Attributes:
        stats: the sums.
        held: a few of the rows, for the assessment.
        sources: the rows of each source that was read, by the hash of its contents.
    """

    def __init__(self, start: Start, device: Any = None) -> None:
        self.start = start
        fm, t = start.feature_map, start.columns.target.width
        block_dtype = BLOCK_DTYPES[start.config.block_dtype]
        self.stats = RidgeStats(fm.num_features, t, block_dtype=block_dtype, device=device)
        self.stats.reshift_(torch.tensor(start.shift, dtype=torch.float64, device=device))
        self.held = Held.empty(start.columns.width, t)
        self.sources: dict[str, int] = {}

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.stats.rows.sum())

    @torch.no_grad()
    def add(self, x: Tensor, y: Tensor) -> Part:
        """Add encoded rows x (n, d), y (n, t)."""
        fm = self.start.feature_map
        for part, target in zip(x.split(ROWS), y.split(ROWS), strict=True):
            self.held = self.held.add(part, target)
            self.stats.update(fm.phi(part.to(fm.projection.device)), target)
        return self

    def read(self, source: Source, *, progress: Progress = _silent) -> Part:
        """Add all rows of a table.

        Args:
            source: a file or folder, a frame, or a callable that returns batches; see `snnk.tabular.fit`.
            progress: a function that is called with (what is being done, rows done, rows in all or 0).
        """
        table = Table(source)
        print_ = table.fingerprint()
        if print_ in self.sources:
            raise ValueError(f"the rows of {table.source} are in these sums already; leave the source out")
        before = self.rows
        columns = self.start.columns
        names = [c.name for c in (*columns.inputs, columns.target)]
        absent = [name for name in names if name not in table.names]
        if absent:
            raise ValueError(f"no column {', '.join(map(repr, absent))}; the table has {', '.join(table.names)}")
        for label, batches in table.blocks(columns=names):
            first = 0
            for batch in batches:
                x, y, _ = columns.encode(batch, label, first_row=first)
                first += batch.num_rows
                if y is not None and len(x):
                    self.add(x, y)
                progress("fitting", self.rows - before, 0)
        table.check_unchanged()
        self.sources[print_] = self.rows - before
        return self

    def merge(self, other: Part) -> Part:
        """Add the rows of another part, in place."""
        if other.start.key != self.start.key:
            raise ValueError(
                "parts with different columns or features do not add: make them with one start (snnk fit --like)"
            )
        twice = self.sources.keys() & other.sources.keys()
        if twice:
            raise ValueError(f"{len(twice)} source{'s' * (len(twice) > 1)} would be counted twice; leave one part out")
        self.stats.merge(other.stats)
        self.held = self.held.merge(other.held)
        self.sources |= other.sources
        return self

    def solve(self) -> tuple[TableModel, dict[str, Any]]:
        """The model of all rows, and a report with its figures on rows that were left out for that."""
        start, config, columns = self.start, self.start.config, self.start.columns
        if not self.rows:
            raise ValueError("there are no rows to fit; add some")
        solution = self.stats.solve(config.lam)
        model = self._model(solution)
        enough = len(self.held.x) >= FEWEST
        without = self._model((self.stats - self._held_sums()).solve(solution.lam)) if enough else model
        calibration, quality = assess(without, self.held.x, self.held.y)
        model = replace(model, calibration=calibration, quality=quality)
        report = {
            "rows": self.rows,
            "task": "regression" if columns.target.categories is None else "classification",
            "inputs": columns.width,
            "num_features": start.feature_map.num_features,
            "features": type(start.feature_map).__name__,
            "lam": solution.lam,
            "score": solution.score,
            "degrees_of_freedom": solution.degrees_of_freedom,
            "residual": solution.residual.tolist(),
            "unit": columns.target.scale,  # of the target; score and residual are in units of its square
            "condition": solution.condition if math.isfinite(solution.condition) else None,
            "quality": model.quality,
            "config": asdict(config),
        }
        return model, report

    def _model(self, solution: Any) -> TableModel:
        start = self.start
        target = start.columns.target
        bias = solution.bias.cpu() + target.mean / target.scale  # the mean of a category is 0
        return TableModel(start.columns, start.feature_map.cpu(), solution.weight.cpu(), bias, start.config)

    def _held_sums(self) -> RidgeStats:
        """The sums of the rows for the assessment."""
        held = Part(self.start, self.stats.sums.device)
        held.add(self.held.x, self.held.y)
        return held.stats

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a file of the part has."""
        return self.stats.state_dict() | dict(zip(HELD, self.held.tensors(), strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the part with its start to one file, whole or not at all."""
        self.write(path, json.dumps({"format": FORMAT, "start": self.start.to_dict(), "sources": self.sources}))

    def write(self, path: str | os.PathLike[str], note: str) -> None:
        """Write the sums and the held rows with a note."""
        self.stats.note = note
        self.stats.save(path, dict(zip(HELD, self.held.tensors(), strict=True)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Part:
        """Read a file that `save` wrote."""
        stats = RidgeStats.load(path, extra=HELD)
        try:
            note = json.loads(stats.note)
            if not isinstance(note, dict) or note.get("format") != FORMAT:
                raise ValueError(f"it is not {FORMAT!r}")
            sources = note["sources"]
            if not isinstance(sources, dict) or not all(isinstance(n, int) and n >= 0 for n in sources.values()):
                raise ValueError("it has no list of sources")
            start = Start.from_dict(note["start"])
        except (KeyError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} holds no sums of snnk fit --stats-only: {error}; copy it again, or make it again"
            ) from error
        part = cls.of(start, stats, path)
        part.sources = dict(sources)
        if sources and sum(sources.values()) != part.rows:
            raise ValueError(f"{path} is damaged: it lists {sum(sources.values())} rows and has sums of {part.rows}")
        return part

    @classmethod
    def of(cls, start: Start, stats: RidgeStats, path: str | os.PathLike[str]) -> Part:
        """The part of sums that were read from a file, with the held rows of that file."""
        part = cls(start)
        if stats.sums.shape != part.stats.sums.shape or stats.block_dtype != part.stats.block_dtype:
            raise ValueError(f"{path} is damaged: its sums do not fit its columns and features")
        part.stats = stats
        with _io.open_tensors(path) as file:
            header = _io.tensor_header(file)
            if set(HELD) <= header.keys():
                held = Held.of([file.get_tensor(name) for name in HELD])
                shapes = [h.shape[1:] for h in held.tensors()] == [h.shape[1:] for h in part.held.tensors()]
                if not shapes or len({len(h) for h in held.tensors()}) != 1:
                    raise ValueError(f"{path} is damaged: its rows for the assessment do not fit its columns")
                part.held = held
        return part

    def to_bytes(self) -> bytes:
        """The file of the part as bytes, for engines that pass values between processes."""
        with tempfile.TemporaryDirectory() as folder:
            self.save(path := Path(folder) / "part")
            return path.read_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Part:
        """A part from what `to_bytes` gave."""
        with tempfile.TemporaryDirectory() as folder:
            (path := Path(folder) / "part").write_bytes(data)
            return cls.load(path)

    def __repr__(self) -> str:
        return f"Part(rows={self.rows}, sources={len(self.sources)}, features={self.start.feature_map.num_features})"


def merge(parts: Iterable[Part]) -> Part:
    """One part with the rows of all; the parts stay as they are.

    Example:
        >>> import numpy as np, pyarrow as pa
        >>> x = np.random.default_rng(0).normal(size=600)
        >>> table = pa.table({"x": x, "y": np.sin(x)})
        >>> start = prepare(table[:300], FitConfig("y", num_features=32))
        >>> model, report = merge([start.part().read(table[:300]), start.part().read(table[300:])]).solve()
        >>> report["rows"]
        600
    """
    total: Part | None = None
    for part in parts:
        total = Part(part.start) if total is None else total
        total.merge(part)
    if total is None:
        raise ValueError("there are no parts to merge; name at least one")
    return total
