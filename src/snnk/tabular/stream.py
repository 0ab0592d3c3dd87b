"""Closed-form training on a table of any length: one pass for the columns and a sample, one pass for the sums.

    fit("train.parquet", "model", FitConfig(target="price"))     # snnk fit train.parquet --target price --out model

Blocks of rows are shared among the workers of a torchrun cluster. Their float64 sums are all-reduced, so the result
does not depend on the number of workers beyond rounding. A run that was killed goes on from its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snnk import _io
from snnk.maps import FeatureMap
from snnk.ridge.sums import RidgeStats
from snnk.tabular.checkpoint import Checkpoint
from snnk.tabular.config import FitConfig
from snnk.tabular.model import ROWS
from snnk.tabular.parts import Part, write_model
from snnk.tabular.sample import Held, Sample
from snnk.tabular.scan import Scan
from snnk.tabular.source import Source, Table
from snnk.tabular.start import Progress, Start, make_start, new_sample
from snnk.tabular.workers import Workers

VERSION = 3  # of the checkpoints


def fit(
    data: Source,
    out: str | os.PathLike[str],
    config: FitConfig,
    *,
    checkpoint_seconds: float = 60.0,
    progress: Progress = lambda what, rows, total: None,
) -> dict[str, Any]:
    """Fit phi(x) A^T + b to a table, write the model to the folder `out`, and return the report.

    Under torchrun every worker calls this with the same arguments, and the first one writes. A run that was killed goes
    on from its checkpoint in `out` when it is called again.

    Args:
        data: a Parquet, Arrow, CSV or TSV file (CSV and TSV also as .gz), or a folder of such files; a
            datasets.Dataset; anything with `__arrow_c_stream__`, such as a frame of pandas or Polars or a relation of
            DuckDB; a list of record batches; or a callable without arguments that returns a new iterator of them, as a
            fit reads its rows twice.
        out: folder for model.safetensors, model.json, report.json and report.html; must not hold a model yet.
        config: what to fit.
        checkpoint_seconds: time between checkpoints.
        progress: a function that is called with (what is being done, rows done by all workers, rows in all).

    Example:
        >>> import numpy as np, pyarrow as pa, pyarrow.parquet as pq, tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> x = np.linspace(-2, 2, 200)
        >>> pq.write_table(pa.table({"x": x, "y": np.sin(x)}), folder / "data.parquet")
        >>> report = fit(folder / "data.parquet", folder / "model", FitConfig("y", num_features=32))
        >>> report["rows"], report["task"]
        (200, 'regression')
    """
    out, began = Path(out), time.monotonic()
    if not checkpoint_seconds >= 0:
        raise ValueError(f"checkpoint_seconds must be a number >= 0; got {checkpoint_seconds!r}")
    workers = Workers()
    with ExitStack() as stack:
        stack.callback(workers.close)
        RidgeStats(config.num_features, 1, device=workers.device)  # too many features fail before anything is read
        table = Table(data)
        Scan.start(table, config.target, config.drop)  # bad columns fail before anything is written
        _claim(out, workers, stack)
        checkpoint = Checkpoint(out / ".checkpoint", checkpoint_key(config, table, workers), workers)
        run = _Run(table, config, workers, checkpoint, progress)
        first = run.first_pass()
        part, blocks = run.second_pass(first, checkpoint_seconds)
        if sorted(blocks) != sorted(first.blocks) or part.rows != sum(first.blocks.values()):
            raise ValueError(
                f"{len(blocks)} blocks with {part.rows} rows were counted and {len(first.blocks)} with "
                f"{sum(first.blocks.values())} are in the table: it changed, or two runs shared the folder; remove "
                f"{checkpoint.folder} and start again"
            )
        progress("solving", 0, 0)
        model, report = part.solve()
        report |= {"blocks": len(blocks), "workers": workers.size, "seconds": time.monotonic() - began}
        if workers.rank == 0:
            if not out.is_dir():
                raise ValueError(f"{out} was removed during the run; run the same command again")
            write_model(out, model, report)
        workers.wait()
        checkpoint.remove()
        return report


def accumulate(fm: FeatureMap, pairs: Iterable[tuple[Tensor, Tensor]], stats: RidgeStats | None = None) -> RidgeStats:
    """Sum phi(x) and y over batches (x, y), for example of a DataLoader: x (n, d), y (n,) or (n, t).

    Args:
        fm: the feature map phi.
        pairs: the batches.
        stats: sums to add to; by default new ones on the device of the first batch.

    Example:
        >>> from snnk import ArcCosine
        >>> batches = [(torch.randn(8, 4), torch.randn(8)) for _ in range(3)]
        >>> int(accumulate(ArcCosine(4, 16), batches).rows.sum())
        24
    """
    with torch.no_grad():
        for x, y in pairs:
            if stats is None:
                stats = RidgeStats(fm.num_features, 1 if y.ndim == 1 else y.shape[1], device=x.device)
            for part, target in zip(x.split(ROWS), y.split(ROWS), strict=True):
                stats.update(fm.phi(part), target)
    if stats is None:
        raise ValueError("there were no batches")
    return stats


def checkpoint_key(config: FitConfig, table: Table, workers: Workers) -> str:
    """A hash of everything that the sums depend on: not `lam`, which can be changed after the pass."""
    relevant = {k: v for k, v in asdict(config).items() if k != "lam"}
    body = json.dumps(
        [VERSION, relevant, table.fingerprint(workers.rank, workers.size, workers.gather)], sort_keys=True
    )
    return hashlib.sha256(body.encode()).hexdigest()


def _claim(out: Path, workers: Workers, stack: ExitStack) -> None:
    """The first worker takes the folder; if it cannot, all workers raise, as one left alone would wait for the rest."""
    refused = None
    if workers.rank == 0:
        try:
            _lock(out, stack)
        except ValueError as error:
            refused = str(error)
    refused = workers.gather(refused)[0]
    if refused:
        raise ValueError(refused)


def _lock(out: Path, stack: ExitStack) -> None:
    """Make the folder and lock it until `stack` ends, so that a folder without write access fails before the work.

    The lock comes before the look for a model, because the run that held it before may just have finished. A finished
    folder is cleared of the files of a run that was killed at its end. A folder that stays empty is removed.
    """
    if not out.exists():
        stack.callback(_remove_empty, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_io.locked(out / ".lock", str(out)))
    except OSError as error:
        raise ValueError(f"cannot write to the folder {out}: {error.strerror or error}; name another") from error
    if (out / "model.json").exists():
        shutil.rmtree(out / ".checkpoint", ignore_errors=True)
        for name in ("model.json", "model.safetensors", "report.json", "report.html"):
            _io.remove_leftovers(out / name)
        raise ValueError(f"{out} holds a model already; name another folder")
    stack.callback(_remove_empty, out / ".checkpoint")


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@dataclass(frozen=True)
class _First:
    """The result of the first pass, which is the same for all workers and all restarts."""

    start: Start
    rows: int
    blocks: dict[str, int]  # number of rows to count in each block, by label


@dataclass(frozen=True)
class _Run:
    """The two passes of one worker."""

    table: Table
    config: FitConfig
    workers: Workers
    checkpoint: Checkpoint
    progress: Progress

    def first_pass(self) -> _First:
        """Scan the columns together with the other workers and learn the features, or read both from the checkpoint."""
        workers, config, table = self.workers, self.config, self.table
        found = next((stored for stored in workers.gather(self.checkpoint.load_columns()) if stored), None)
        if found:
            return self._first(found)

        def show(rows: int) -> None:
            self.progress("reading columns", rows * workers.size, 0)

        show(0)
        scan, sample = Scan.start(table, config.target, config.drop), new_sample(len(table.names))
        scan.read(table, lambda i, _: i % workers.size == workers.rank, show, sample)
        scans: list[tuple[Scan, Sample]] = workers.gather((scan, sample))
        (scan, sample), *others = scans
        for other, rows in others:
            scan.merge(other)
            sample.merge(rows)
        columns = scan.columns(config.task, config.missing)
        # One worker learns: others would round differently, and with them the sums of the workers.
        made = None
        if workers.rank == 0:
            made = make_start(config, columns, sample.table(), self.progress).to_dict()
        made = workers.gather(made)[0]
        order = sorted(scan.blocks.items(), key=lambda item: item[1])
        blocks = {label: size.complete if config.missing == "drop" else size.rows for label, size in order}
        table.check_unchanged()
        body = {"rows": scan.rows, "blocks": blocks, "start": made}
        self.checkpoint.save_columns(body)
        return self._first(json.loads(json.dumps(body)))

    def _first(self, stored: dict[str, Any]) -> _First:
        # The penalty may be changed between the runs of one fit.
        start = Start.from_dict(stored["start"])
        return _First(
            replace(start, config=replace(start.config, lam=self.config.lam)), stored["rows"], stored["blocks"]
        )

    def second_pass(self, first: _First, every: float) -> tuple[Part, list[str]]:
        """The sums over all workers, and the labels of the blocks that they count; a checkpoint `every` seconds."""
        table, workers, checkpoint, columns = self.table, self.workers, self.checkpoint, first.start.columns
        everywhere = workers.gather(checkpoint.old)
        parts = {name: note for notes in everywhere for name, note in notes.items()}
        # The first worker that finds the file of a part adds it.
        owner = {name: rank for rank, notes in reversed(list(enumerate(everywhere))) for name in notes}
        done = checkpoint.counted(parts, first.blocks)
        rows_done = sum(note["rows"] for note in parts.values())

        def mine(index: int, label: str) -> bool:
            return index % workers.size == workers.rank and label not in done

        start = replace(first.start, feature_map=first.start.feature_map.to(workers.device))
        part = Part(start, workers.device)
        blocks: list[str] = []
        saved = time.monotonic()
        names = [c.name for c in (*columns.inputs, columns.target)]
        for label, batches in table.blocks(mine, names):
            row = 0
            for batch in batches:
                x, y, _ = columns.encode(batch, label, first_row=row)
                row += batch.num_rows
                if y is not None and len(x):
                    part.add(x, y)
                self.progress("fitting", rows_done + part.rows * workers.size, first.rows)
            blocks.append(label)
            if time.monotonic() - saved >= every:
                table.check_unchanged()  # before its rows are counted for good
                checkpoint.save(part, blocks)
                saved = time.monotonic()
        table.check_unchanged()
        checkpoint.save(part, blocks)
        for name, rank in owner.items():
            if rank == workers.rank:
                old = checkpoint.load(name, start)
                part.stats.merge(old.stats)
                part.held = part.held.merge(old.held)
        workers.sum_(part.stats.tensors())
        for rank, held in enumerate(workers.gather(part.held.tensors())):
            part.held = part.held if rank == workers.rank else part.held.merge(Held.of(held))
        counted = [b for found in workers.gather(blocks) for b in found]
        counted += [b for note in parts.values() for b in note["blocks"]]
        return part, counted
