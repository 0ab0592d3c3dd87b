"""Closed-form training on a table of any length: one pass for the columns, one pass for the sums.

    fit("train.parquet", "model", FitConfig(target="price"))     # snnk fit train.parquet --target price --out model

Blocks of rows are shared among the workers of a torchrun cluster. Their float64 sums are all-reduced, so the result
does not depend on the number of workers beyond rounding. A run that was killed goes on from its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snnk import _io
from snnk.maps import FeatureMap
from snnk.ridge.sums import BLOCK_DTYPES, RidgeStats
from snnk.tabular.checkpoint import Checkpoint
from snnk.tabular.columns import Columns
from snnk.tabular.config import OLD_WORDS, FitConfig
from snnk.tabular.model import ROWS, TableModel
from snnk.tabular.scan import Scan
from snnk.tabular.source import Source, Table
from snnk.tabular.workers import Workers

Progress = Callable[[str, int, int], None]  # what is being done, rows done, rows in all (0 if not known yet)


def fit(
    source: Source,
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
        source: a Parquet, CSV or Arrow file, a folder of them, or a datasets.Dataset.
        out: folder for model.safetensors, model.json and report.json; must not hold a model yet.
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
        table = Table(source)
        Scan.start(table, config.target, config.drop)  # bad columns fail before anything is written
        _claim(out, workers, stack)
        checkpoint = Checkpoint(out / ".checkpoint", checkpoint_key(config, table, workers), workers)
        run = _Run(table, config, workers, checkpoint, progress)
        start = run.first_pass()
        columns, fm = start.columns, config.make_map(start.columns)
        stats, blocks = run.second_pass(start, fm.to(workers.device), checkpoint_seconds)
        rows = int(stats.rows.sum())
        if sorted(blocks) != sorted(start.blocks) or rows != sum(start.blocks.values()):
            raise ValueError(
                f"{len(blocks)} blocks with {rows} rows were counted and {len(start.blocks)} with "
                f"{sum(start.blocks.values())} are in the table: it changed, or two runs shared the folder; remove "
                f"{checkpoint.folder} and start again"
            )
        solution = stats.solve(config.lam)
        report = {
            "rows": rows,
            "blocks": len(blocks),
            "workers": workers.size,
            "task": "regression" if columns.target.categories is None else "classification",
            "inputs": columns.width,
            "num_features": config.num_features,
            "lam": solution.lam,
            "score": solution.score,
            "degrees_of_freedom": solution.degrees_of_freedom,
            "residual": solution.residual.tolist(),
            "unit": columns.target.scale,  # of the target; score and residual are in units of its square
            "condition": solution.condition if math.isfinite(solution.condition) else None,
            "seconds": time.monotonic() - began,
            "config": asdict(config),
        }
        if workers.rank == 0:
            if not out.is_dir():
                raise ValueError(f"{out} was removed during the run; run the same command again")
            # The model ends the run, so it comes last: a kill before it loses nothing.
            _io.write_json(out / "report.json", report)
            bias = solution.bias.cpu() + columns.target.mean / columns.target.scale  # the mean of a category is 0
            TableModel(columns, fm.cpu(), solution.weight.cpu(), bias, config).save(out)
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
    relevant["feature_map"] = OLD_WORDS[config.feature_map]  # so that checkpoints from before the rename are continued
    body = json.dumps([relevant, table.fingerprint(workers.rank, workers.size, workers.gather)], sort_keys=True)
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
        for name in ("model.json", "model.safetensors", "report.json"):
            _io.remove_leftovers(out / name)
        raise ValueError(f"{out} holds a model already; name another folder")
    stack.callback(_remove_empty, out / ".checkpoint")


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@dataclass(frozen=True)
class _Start:
    """The result of the first pass, which is the same for all workers and all restarts."""

    columns: Columns
    rows: int
    blocks: dict[str, int]  # number of rows to count in each block, by label
    shift: list[float]  # origin of the sums, (m + t,): float32 products are rounded about it, in whichever worker


@dataclass(frozen=True)
class _Run:
    """The two passes of one worker."""

    table: Table
    config: FitConfig
    workers: Workers
    checkpoint: Checkpoint
    progress: Progress

    def first_pass(self) -> _Start:
        """Scan the columns together with the other workers, or read the result from the checkpoint."""
        workers, config, table = self.workers, self.config, self.table
        found = next((stored for stored in workers.gather(self.checkpoint.load_columns()) if stored), None)
        if found:
            return _Start(Columns.from_dict(found["columns"]), found["rows"], found["blocks"], found["shift"])

        def show(rows: int) -> None:
            self.progress("reading columns", rows * workers.size, 0)

        show(0)
        scan = Scan.start(table, config.target, config.drop)
        scan.read(table, lambda i, _: i % workers.size == workers.rank, show)
        scans: list[Scan] = workers.gather(scan)
        scan = scans[0]
        for other in scans[1:]:
            scan.merge(other)
        columns = scan.columns(config.task, config.missing)
        shift = workers.gather(self._shift(columns) if workers.rank == 0 else None)[0]
        order = sorted(scan.blocks.items(), key=lambda item: item[1])
        blocks = {label: size.complete if config.missing == "drop" else size.rows for label, size in order}
        table.check_unchanged()
        body = {"rows": scan.rows, "blocks": blocks, "shift": shift, "columns": columns.to_dict()}
        self.checkpoint.save_columns(body)
        return _Start(columns, scan.rows, blocks, shift)

    def _shift(self, columns: Columns) -> list[float]:
        """Means of features and targets (m + t,) over the first rows that are kept."""
        fm, names = self.config.make_map(columns), [c.name for c in (*columns.inputs, columns.target)]
        for label, batches in self.table.blocks(columns=names):
            for batch in batches:
                x, y, _ = columns.encode(batch, label)
                if y is not None and len(x):
                    with torch.no_grad():
                        return torch.cat([fm.phi(x[:ROWS]).double().mean(0), y[:ROWS].mean(0)]).tolist()
        raise ValueError("no rows are left: each has a missing, NaN or infinite value, and is dropped")

    def second_pass(self, start: _Start, fm: FeatureMap, every: float) -> tuple[RidgeStats, list[str]]:
        """The sums over all workers, and the labels of the blocks that they count; a checkpoint `every` seconds."""
        table, workers, checkpoint, columns = self.table, self.workers, self.checkpoint, start.columns
        everywhere = workers.gather(checkpoint.old)
        parts = {name: note for notes in everywhere for name, note in notes.items()}
        # The first worker that finds the file of a part adds it.
        owner = {name: rank for rank, notes in reversed(list(enumerate(everywhere))) for name in notes}
        done = checkpoint.counted(parts, start.blocks)
        rows_done = sum(note["rows"] for note in parts.values())

        def mine(index: int, label: str) -> bool:
            return index % workers.size == workers.rank and label not in done

        block_dtype = BLOCK_DTYPES[self.config.block_dtype]
        stats = RidgeStats(fm.num_features, columns.target.width, block_dtype=block_dtype, device=workers.device)
        stats.reshift_(torch.tensor(start.shift, dtype=torch.float64, device=workers.device))
        blocks: list[str] = []
        saved = time.monotonic()
        names = [c.name for c in (*columns.inputs, columns.target)]
        for label, batches in table.blocks(mine, names):
            first = 0
            for batch in batches:
                x, y, _ = columns.encode(batch, label, first_row=first)
                first += batch.num_rows
                if y is not None and len(x):
                    accumulate(fm, [(x.to(workers.device), y.to(workers.device))], stats)
                self.progress("fitting", rows_done + int(stats.rows.sum()) * workers.size, start.rows)
            blocks.append(label)
            if time.monotonic() - saved >= every:
                table.check_unchanged()  # before its rows are counted for good
                checkpoint.save(stats, blocks)
                saved = time.monotonic()
        table.check_unchanged()
        checkpoint.save(stats, blocks)
        for name, rank in owner.items():
            if rank == workers.rank:
                old = checkpoint.load(name)
                old.sums, old.shift = old.sums.to(workers.device), old.shift.to(workers.device)
                stats.merge(old)
        workers.sum_(stats.tensors())
        counted = [b for part in workers.gather(blocks) for b in part]
        counted += [b for note in parts.values() for b in note["blocks"]]
        return stats, counted
