"""Closed-form training from a table of any length: one cheap pass for the columns, one pass for the sums.

    snnk.stream.fit(source, out, FitConfig(target="y"))          # or: snnk fit DATA --target y --out DIR

Blocks of rows (see tables.py) are shared out over the workers of a torchrun cluster; their float64 sums are
all-reduced, so the result does not depend on the number of workers beyond rounding. A checkpoint is a set of parts. A
part belongs to one process and is one file: its sums, with the names of the blocks counted in them. Renaming it into
place is the one moment at which blocks become counted, so a run may be killed at any time. A restart leaves old parts
as they are, counts the blocks that no part names, and adds all parts at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snnk.features import FeatureMap
from snnk.models import ROWS, FitConfig, TableModel, write_json
from snnk.ridge import BLOCK_DTYPES, RidgeStats
from snnk.tables import Columns, Scan, Table, make_columns, plan_columns, scan

Progress = Callable[[str, int, int], None]  # what is being done, rows done, rows in all (0 if not known)


class Workers:
    """The processes of a torchrun cluster, or this one alone."""

    def __init__(self) -> None:
        self.started = False
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
            self.started = True
        self.on = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if self.on else (0, 1)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every worker, by rank."""
        if not self.on:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the workers, in place."""
        if self.on:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def close(self) -> None:
        if self.started:
            dist.destroy_process_group()


class Checkpoint:
    """Parts of a run in a folder; see the top of this file."""

    def __init__(self, folder: Path, key: str, workers: Workers) -> None:
        self.folder, self.key = folder, key
        self.path = folder / f"part-{uuid.uuid4().hex}.safetensors"
        note = folder / "config.json"
        folder.mkdir(parents=True, exist_ok=True)
        begun = any(folder.glob("part-*.safetensors"))
        if workers.rank == 0 and not begun:  # a run that failed before it counted anything is nothing to go on from
            write_json(note, {"key": key})
        workers.gather(None)  # the others wait for it
        if begun and note.exists() and json.loads(note.read_text())["key"] != key:
            raise ValueError(
                f"{folder} is the checkpoint of another configuration or table; remove it or name another --out"
            )

    def parts(self) -> dict[str, RidgeStats]:
        """Name -> sums of all parts that are here; the note of each is the list of its blocks."""
        return {path.stem: RidgeStats.load(path) for path in sorted(self.folder.glob("part-*.safetensors"))}

    def save(self, stats: RidgeStats, blocks: list[str]) -> None:
        """Replace this process's part."""
        stats.note = json.dumps(blocks)
        stats.save(self.path)


def accumulate(fm: FeatureMap, pairs: Iterable[tuple[Tensor, Tensor]], stats: RidgeStats | None = None) -> RidgeStats:
    """Sums of phi(x) and y over batches (x, y), such as a DataLoader gives: x (n, d), y (n,) or (n, t).

    Example:
        >>> from snnk import ArcCosine
        >>> batches = [(torch.randn(8, 4), torch.randn(8)) for _ in range(3)]
        >>> int(accumulate(ArcCosine(4, 16), batches).rows.sum())
        24
    """
    with torch.no_grad():
        for x, y in pairs:
            if stats is None:
                stats = RidgeStats(fm.num_features, 1 if y.ndim == 1 else y.shape[1])
            for part, target in zip(x.split(ROWS), y.split(ROWS), strict=True):
                stats.update(fm.phi(part), target)
    if stats is None:
        raise ValueError("there were no batches")
    return stats


def _writable(folder: Path) -> None:
    """Make the folder and try it, so that hours of work do not end at a file that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to the folder {folder}: {error.strerror or error}; name another") from error


def _key(config: FitConfig, table: Table) -> str:
    """Hash of what the sums depend on. `lam` is not part of it: it can be changed after the pass."""
    relevant = {k: v for k, v in asdict(config).items() if k != "lam"}
    body = json.dumps([relevant, table.fingerprint()], sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()


def _columns(
    table: Table, config: FitConfig, checkpoint: Checkpoint, workers: Workers, progress: Progress
) -> tuple[Columns, int]:
    """The first pass, shared out: columns and number of rows; kept in the checkpoint for a restart."""
    note = checkpoint.folder / "columns.json"
    everywhere = [json.loads(text) for text in workers.gather(note.read_text() if note.exists() else "{}")]
    found = next((stored for stored in everywhere if stored.get("key") == checkpoint.key), None)
    if found:
        return Columns.from_dict(found["columns"]), int(found["rows"])
    progress("reading columns", 0, 0)
    mine = scan(table, plan_columns(table, config.target, config.drop), lambda i, _: i % workers.size == workers.rank)
    scans: list[Scan] = workers.gather(mine)
    first = scans[0]
    for other in scans[1:]:
        first.merge(other)
    columns = make_columns(first, config.target, config.task, config.missing)
    write_json(note, {"key": checkpoint.key, "columns": columns.to_dict(), "rows": first.rows})
    return columns, first.rows


def fit(
    source: Any,
    out: str | Path,
    config: FitConfig,
    *,
    checkpoint_seconds: float = 60.0,
    progress: Progress = lambda what, rows, total: None,
) -> dict[str, Any]:
    """Fit phi(x) A + b to a table in one pass and write model and report to the folder `out`.

    Under torchrun every worker calls this with the same arguments; the first one writes. A run that was killed goes on
    from its checkpoint in `out`.

    Args:
        source: a Parquet, CSV or Arrow file, a folder of them, or a datasets.Dataset.
        out: folder for model.safetensors, model.json and report.json; must not hold a model yet.
        config: what to fit.
        checkpoint_seconds: time between checkpoints.
        progress: called with (what, rows done by all, rows in all).
    """
    out, start = Path(out), time.monotonic()
    if (out / "model.json").exists():
        raise ValueError(f"{out} holds a model already; name another folder")
    workers = Workers()
    try:
        table = Table(source)
        plan_columns(table, config.target, config.drop)  # bad columns fail before anything is written
        _writable(out)
        checkpoint = Checkpoint(out / ".checkpoint", _key(config, table), workers)
        columns, total = _columns(table, config, checkpoint, workers, progress)
        fm = config.make_map(columns)
        stats, blocks, seen = _pass(
            table, columns, fm, config, checkpoint, workers, checkpoint_seconds, progress, total
        )
        if sorted(blocks) != sorted(seen):
            raise RuntimeError(f"{len(blocks)} blocks were counted, {len(seen)} are in the table; did it change?")
        solution = stats.solve(config.lam)
        report = {
            "rows": int(stats.rows.sum()),
            "blocks": len(blocks),
            "workers": workers.size,
            "task": "regression" if columns.target.categories is None else "classification",
            "inputs": columns.width,
            "num_features": config.num_features,
            "lam": solution.lam,
            "score": solution.score,
            "degrees_of_freedom": solution.degrees_of_freedom,
            "residual": solution.residual.tolist(),
            "condition": solution.condition,
            "seconds": time.monotonic() - start,
            "config": asdict(config),
        }
        if workers.rank == 0:
            # before the model, which ends the run: a kill in between loses nothing
            write_json(out / "report.json", report)
            TableModel(columns, fm, solution.weight, solution.bias, config).save(out)
            shutil.rmtree(checkpoint.folder)
        workers.gather(None)
        return report
    finally:
        workers.close()


def _pass(
    table: Table,
    columns: Columns,
    fm: FeatureMap,
    config: FitConfig,
    checkpoint: Checkpoint,
    workers: Workers,
    every: float,
    progress: Progress,
    total: int,
) -> tuple[RidgeStats, list[str], list[str]]:
    """Sums over all workers, the blocks counted in them, and the blocks that the table has."""
    here = checkpoint.parts()
    everywhere = workers.gather({name: json.loads(part.note) for name, part in here.items()})
    done = {block for parts in everywhere for blocks in parts.values() for block in blocks}
    # a part belongs to the first worker that sees its file
    owner = {name: rank for rank, parts in reversed(list(enumerate(everywhere))) for name in parts}
    seen: list[str] = []

    def mine(index: int, label: str) -> bool:
        seen.append(label)
        return index % workers.size == workers.rank and label not in done

    stats = RidgeStats(config.num_features, columns.target.width, block_dtype=BLOCK_DTYPES[config.block_dtype])
    blocks: list[str] = []
    saved = time.monotonic()
    names = [c.name for c in (*columns.inputs, columns.target)]
    for label, batches in table.blocks(mine, names):
        for batch in batches:
            x, y, _ = columns.encode(batch, label)
            if y is not None and len(x):
                accumulate(fm, [(x, y)], stats)
            progress("fitting", int(stats.rows.sum()) * workers.size, total)
        blocks.append(label)
        if time.monotonic() - saved >= every:
            checkpoint.save(stats, blocks)
            saved = time.monotonic()
    checkpoint.save(stats, blocks)
    for name, part in here.items():
        if owner[name] == workers.rank:
            stats.merge(part)
    shifts = [shift for shift in workers.gather(stats.shift) if not shift.isnan().any()]
    if shifts:  # sums add up about one origin; near the means, or digits are lost
        stats.reshift_(torch.stack(shifts).mean(0))
    workers.sum_(stats.tensors())
    counted = [b for part in workers.gather(blocks) for b in part]
    counted += [b for name, rank in owner.items() for b in everywhere[rank][name]]
    return stats, counted, seen
