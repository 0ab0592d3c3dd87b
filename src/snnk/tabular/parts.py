"""Sums of parts of a table, which add up to the model of the whole, whichever machine or engine read which part.

    start = prepare("sample.parquet", FitConfig("price"))       # columns and features, the same for all parts
    parts = [Part(start).read(path) for path in paths]         # anywhere, in any order
    report = merge(parts).save_model("model")                   # the same model as that of all rows in one place

A `Start` is made once from some or all of the rows: it has the means, scales and categories of the columns, and the
feature map. A `Part` has the sums of some rows, a few of these rows for the assessment of the model, and its start, so
that a part can be sent and saved alone. Parts of one start add; rows that were counted before are refused.

A file of either is a safetensors file. Its note is JSON with everything that is no tensor, and with a hash of all.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snnk import _checks, _io
from snnk.maps import FeatureMap
from snnk.ridge.sums import BLOCK_DTYPES, RidgeStats
from snnk.tabular.model import ROWS, TableModel
from snnk.tabular.page import write_page
from snnk.tabular.quality import FEWEST, assess
from snnk.tabular.sample import Held
from snnk.tabular.source import Source, Table
from snnk.tabular.start import FORMAT, MAP, Progress, Start, damaged, read_file, signed, silent

HELD = ("held.hashes", "held.x", "held.y")


class Part:
    """Sums of the features and targets of some rows; parts of the same start add.

    Args:
        start: the columns and features.
        device: of the sums.

    Attributes:
        stats: the sums.
        held: a few of the rows, for the assessment.
        sources: the number of rows of each source that was read, by the hash of its rows.
        unseen: the number of values, by column, that are unlike those of the start: other categories, and numbers that
            are too far away.

    Example:
        >>> import pyarrow as pa
        >>> from snnk.tabular import FitConfig, prepare
        >>> rows = pa.table({"x": [0.0, 1.0, 2.0], "y": [0.5, 1.5, 2.5]})
        >>> start = prepare(rows, FitConfig("y", num_features=4, feature_map="random-relu"))
        >>> Part(start).read(rows[:1]).merge(Part(start).read(rows[1:]))
        Part(rows=3, sources=2, features=4)
    """

    def __init__(self, start: Start, device: Any = None) -> None:
        self.start = start
        fm, t = start.feature_map, start.columns.target.width
        block_dtype = BLOCK_DTYPES[start.config.block_dtype]
        self.stats = RidgeStats(fm.num_features, t, block_dtype=block_dtype, device=device)
        self.stats.reshift_(torch.tensor(start.shift, dtype=torch.float64, device=device))
        self.held = Held.empty(start.columns.width, t)
        self.sources: dict[str, int] = {}
        self.unseen = Counter[str]()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.stats.rows.sum())

    @cached_property
    def _double_map(self) -> FeatureMap:
        return copy.deepcopy(self.start.feature_map).double()

    def _phi(self, x: Tensor) -> Tensor:
        """Features (n, m) float32 of encoded rows (n, d).

        With blocks in float64 they are computed in float64 and rounded once. Features that are computed in float32
        depend on the number of rows that are multiplied at once, and engines cut tables in different ways.
        """
        fm = self.start.feature_map
        x = x.to(fm.projection.device)
        double = self.stats.block_dtype == torch.float64
        return self._double_map.phi(x.double()).float() if double else fm.phi(x)

    @torch.no_grad()
    def add(self, x: Tensor, y: Tensor) -> Part:
        """Add encoded rows x (n, d), y (n, t)."""
        for part, target in zip(x.split(ROWS), y.split(ROWS), strict=True):
            self.held = self.held.add(part, target)
            self.stats.update(self._phi(part), target)
        return self

    def read(self, data: Source, *, name: str = "", progress: Progress = silent) -> Part:
        """Add all rows of a table, or none if it cannot be read.

        Args:
            data: that of `snnk.tabular.fit`; or an iterator of record batches, as the rows are read once.
            name: a name for the source. Rows that were read before are refused, unless their source has another name:
                small sources can have equal rows by chance.
            progress: a function that is called with (what is being done, rows done, rows in all or 0).
        """
        if isinstance(data, Iterator):
            first = next(data, None)
            if first is None:  # engines have empty partitions
                return self
            rest = chain([first], data)
            return self.read(lambda: rest, name=name, progress=progress)
        table, columns = Table(data, text=self.start.columns.texts), self.start.columns
        names = [c.name for c in (*columns.inputs, columns.target)]
        absent = [column for column in names if column not in table.names]
        if absent:
            raise ValueError(f"no column {', '.join(map(repr, absent))}; the table has {', '.join(table.names)}")
        new = Part(self.start, self.stats.sums.device)
        inputs, targets = (hashlib.blake2b(name.encode(), digest_size=16) for _ in range(2))
        for label, batches in table.blocks(columns=names):
            first = 0
            for batch in batches:
                x, y, _ = columns.encode(batch, label, first_row=first, unseen=new.unseen)
                first += batch.num_rows
                if y is not None and len(x):
                    new.add(x, y)
                    inputs.update(x.numpy().data)
                    targets.update(y.numpy().data)
                progress("fitting", new.rows, 0)
        table.check_unchanged()
        if new.rows:
            new.sources[inputs.hexdigest() + targets.hexdigest()] = new.rows
        return self.merge(new)

    def merge(self, other: Part) -> Part:
        """Add the rows of another part, in place."""
        if other.start.key != self.start.key:
            raise ValueError("its columns or features are those of another start; use one start for all parts")
        twice = sum(other.sources[source] for source in self.sources.keys() & other.sources.keys())
        if twice:
            raise ValueError(
                f"{twice:,} of its rows are counted already; leave it out. If they are other rows with equal values, "
                "read them under a name of their own: part.read(rows, name=...)"
            )
        self.stats.merge(other.stats)
        self.held = self.held.merge(other.held)
        self.sources |= other.sources
        self.unseen.update(other.unseen)
        return self

    def solve(self) -> tuple[TableModel, dict[str, Any]]:
        """The model of all rows, and a report with its figures on rows that were left out for that."""
        start, config, columns = self.start, self.start.config, self.start.columns
        if not self.rows:
            raise ValueError("there are no rows to fit; add some")
        solution = self.stats.solve(config.lam)
        model = self._model(solution)
        held = self.held.whole()
        enough = held.inputs >= FEWEST
        without = self._model((self.stats - self._sums_of(held)).solve(solution.lam)) if enough else model
        calibration, quality = assess(without, held.x, held.y)
        quality["warnings"] += columns.describe_unseen(self.unseen)
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

    def save_model(self, out: str | os.PathLike[str]) -> dict[str, Any]:
        """Solve, and write the model with its report to a new folder, whole or not at all; returns the report."""
        _io.check_out(out)
        began = time.monotonic()
        model, report = self.solve()
        report |= {"sources": len(self.sources), "seconds": time.monotonic() - began}
        with _io.new_folder(out) as folder:
            write_model(folder, model, report)
        return report

    def _model(self, solution: Any) -> TableModel:
        start = self.start
        target = start.columns.target
        bias = solution.bias.cpu() + target.mean / target.scale  # the mean of a category is 0
        return TableModel(start.columns, start.feature_map.cpu(), solution.weight.cpu(), bias, start.config)

    def _sums_of(self, held: Held) -> RidgeStats:
        """The sums of the rows for the assessment."""
        return Part(self.start, self.stats.sums.device).add(held.x, held.y).stats

    def tensors(self) -> dict[str, Tensor]:
        """The sums and the held rows."""
        return self.stats.state_dict() | dict(zip(HELD, self.held.tensors(), strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the part with its start to one file, whole or not at all."""
        own = {MAP + name: tensor for name, tensor in self.start.tensors().items()}
        unseen = {name: number for name, number in self.unseen.items() if number}
        note = {"format": FORMAT, "start": self.start.note(), "sources": self.sources, "unseen": unseen}
        self.stats.note = signed(note, self.tensors() | own)
        self.stats.save(path, dict(zip(HELD, self.held.tensors(), strict=True)) | own)

    def write(self, path: str | os.PathLike[str], note: str) -> None:
        """Write the sums and the held rows with a note."""
        self.stats.note = note
        self.stats.save(path, dict(zip(HELD, self.held.tensors(), strict=True)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Part:
        """Read a file that `save`, or `Start.save`, wrote; everything in it is checked."""
        start, note, names = read_file(path)
        try:
            own = [name for name in names if name.startswith(MAP)]
            part = cls(start) if names == own else cls.of(start, RidgeStats.load(path, extra=(*HELD, *own)), path)
            part.sources, part.unseen = _counts(note, "sources"), Counter(_counts(note, "unseen"))
            if sum(part.sources.values()) > part.rows:
                raise ValueError(f"it lists {sum(part.sources.values())} rows and has sums of {part.rows}")
        except (KeyError, ValueError) as error:
            raise damaged(path, error) from error
        return part

    @classmethod
    def of(cls, start: Start, stats: RidgeStats, path: str | os.PathLike[str]) -> Part:
        """The part of sums that were read from a file, with the held rows of that file."""
        m, t = start.feature_map.num_features, start.columns.target.width
        if stats.sums.shape != (1, 2 + m, 1 + m + t) or stats.block_dtype != BLOCK_DTYPES[start.config.block_dtype]:
            raise ValueError(f"{path} is damaged: its sums do not fit its columns and features")
        part = cls(start)
        part.stats = stats
        with _io.open_tensors(path) as file:
            if set(HELD) <= set(file.keys()):
                held = Held.of([file.get_tensor(name) for name in HELD])
                if not held.fits(part.held):
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


def _counts(note: Mapping[str, Any], name: str) -> dict[str, int]:
    found = note[name]
    if not isinstance(found, dict) or not all(_checks.is_integer(n) and n >= 0 for n in found.values()):
        raise ValueError(f"its {name} are no numbers by name")
    return found


def write_model(out: Path, model: TableModel, report: dict[str, Any]) -> None:
    """Write report and page, then the model, which ends a run: a kill before it loses nothing."""
    _io.write_json(out / "report.json", report)
    write_page(out / "report.html", report, report["quality"])
    model.save(out)


def merge(parts: Iterable[Part | bytes | str | os.PathLike[str]]) -> Part:
    """One part with the rows of all; the parts stay as they are.

    Args:
        parts: parts, their files, or what `Part.to_bytes` gave; one at a time is in memory. A file of a start counts as
            a part without rows.

    Example:
        >>> import numpy as np, pyarrow as pa
        >>> from snnk.tabular import FitConfig, prepare
        >>> x = np.random.default_rng(0).normal(size=600)
        >>> table = pa.table({"x": x, "y": np.sin(x)})
        >>> start = prepare(table[:300], FitConfig("y", num_features=32))
        >>> model, report = merge([Part(start).read(table[:300]), Part(start).read(table[300:])]).solve()
        >>> report["rows"]
        600
    """
    total, first = None, ""
    for index, item in enumerate(parts, 1):
        part = Part.from_bytes(item) if isinstance(item, bytes) else item if isinstance(item, Part) else Part.load(item)
        named = os.fspath(item) if isinstance(item, str | os.PathLike) else ""
        if total is None:
            total, first = Part(part.start), named
        try:
            total.merge(part)
        except ValueError as error:
            advice = f" (snnk fit ... --like {first} --stats-only)" if part.start.key != total.start.key else ""
            raise ValueError(f"{named or f'part {index}'} cannot be added: {error}{advice}") from error
    if total is None:
        raise ValueError("there are no parts to merge; name at least one")
    return total
