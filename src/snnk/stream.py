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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snnk import _io
from snnk.features import FeatureMap
from snnk.models import ROWS, FitConfig, TableModel
from snnk.ridge import BLOCK_DTYPES, RidgeStats
from snnk.tables import Columns, Scan, Table, make_columns, plan_columns, scan

Progress = Callable[[str, int, int], None]  # what is being done, rows done, rows in all (0 if not known)


class Workers:
    """The processes of a torchrun cluster, or this one alone; each on its own GPU if the machine has them."""

    def __init__(self) -> None:
        self.started = False
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            # what is gathered is on the CPU, the sums are where the features are
            dist.init_process_group("gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl")
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
    """Parts of a run in a folder; see the top of this file.

    The note of a part says what it belongs to (`key`), its `blocks`, and how many `rows` they have.
    """

    def __init__(self, folder: Path, key: str, workers: Workers) -> None:
        self.folder, self.key = folder, key
        self.path = folder / f"part-{uuid.uuid4().hex}.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        self._first_here = workers.local_rank == 0
        self.old = {path.stem: _note(path) for path in sorted(folder.glob("part-*.safetensors"))}
        workers.gather(None)  # everyone has looked before anyone writes
        if any(note.get("key") != key for note in self.old.values()):
            raise ValueError(
                f"{folder} is the checkpoint of another configuration or table; remove it or name another --out"
            )

    def load(self, name: str) -> RidgeStats:
        return RidgeStats.load(self.folder / f"{name}.safetensors")

    def save(self, stats: RidgeStats, blocks: list[str]) -> None:
        """Replace this process's part."""
        stats.note = json.dumps({"key": self.key, "blocks": blocks, "rows": int(stats.rows.sum())})
        stats.save(self.path)

    def remove(self) -> None:
        """End of the run: the first worker of each machine clears it away, as the folder need not be shared."""
        if self._first_here:
            shutil.rmtree(self.folder, ignore_errors=True)


def _note(path: Path) -> dict[str, Any]:
    """What a part says about itself, without its sums: a hundred parts of a long run do not fit in memory."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        note: dict[str, Any] = json.loads((file.metadata() or {}).get("note") or "{}")
    return note


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock that the system takes away with the process: two runs in one folder would count blocks twice."""
    path = folder / ".lock"
    with path.open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows
            pass
        except OSError:
            raise ValueError(f"another run is writing to {folder}; wait for it, or name another --out") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def accumulate(fm: FeatureMap, pairs: Iterable[tuple[Tensor, Tensor]], stats: RidgeStats | None = None) -> RidgeStats:
    """Sums of phi(x) and y over batches (x, y), such as a DataLoader gives: x (n, d), y (n,) or (n, t).

    They are made where the feature map is, or added to `stats`.

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


@dataclass(frozen=True)
class _Start:
    """What the second pass begins with, for all workers and all restarts the same."""

    columns: Columns
    rows: int
    shift: list[float]  # about which sums are taken: float32 products are rounded about one origin, whoever makes them


def _start(table: Table, config: FitConfig, checkpoint: Checkpoint, workers: Workers, progress: Progress) -> _Start:
    """The first pass, shared out; kept in the checkpoint for a restart."""
    note = checkpoint.folder / "columns.json"
    everywhere = [json.loads(text) for text in workers.gather(note.read_text() if note.exists() else "{}")]
    found = next((stored for stored in everywhere if stored.get("key") == checkpoint.key), None)
    if found:
        return _Start(Columns.from_dict(found["columns"]), int(found["rows"]), list(found["shift"]))

    def show(rows: int) -> None:
        progress("reading columns", rows * workers.size, 0)

    show(0)
    empty = plan_columns(table, config.target, config.drop)
    mine = scan(table, empty, lambda i, _: i % workers.size == workers.rank, show)
    scans: list[Scan] = workers.gather(mine)
    first = scans[0]
    for other in scans[1:]:
        first.merge(other)
    columns = make_columns(first, config.target, config.task, config.missing)
    shift = workers.gather(_shift(table, columns, config) if workers.rank == 0 else None)[0]
    _io.write_json(note, {"key": checkpoint.key, "columns": columns.to_dict(), "rows": first.rows, "shift": shift})
    return _Start(columns, first.rows, shift)


def _shift(table: Table, columns: Columns, config: FitConfig) -> list[float]:
    """Means of features and targets over the first rows that are kept."""
    fm, names = config.make_map(columns), [c.name for c in (*columns.inputs, columns.target)]
    for label, batches in table.blocks(columns=names):
        for batch in batches:
            x, y, _ = columns.encode(batch, label)
            if y is not None and len(x):
                with torch.no_grad():
                    return torch.cat([fm.phi(x[:ROWS]).double().mean(0), y[:ROWS].mean(0)]).tolist()
    raise ValueError("no rows are left: each has a missing, NaN or infinite value, and is dropped")


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
    out, began = Path(out), time.monotonic()
    if (out / "model.json").exists():
        raise ValueError(f"{out} holds a model already; name another folder")
    workers = Workers()
    with ExitStack() as stack:
        stack.callback(workers.close)
        table = Table(source)
        plan_columns(table, config.target, config.drop)  # bad columns fail before anything is written
        _writable(out)
        if workers.rank == 0:
            stack.enter_context(_locked(out))
        checkpoint = Checkpoint(out / ".checkpoint", _key(config, table), workers)
        start = _start(table, config, checkpoint, workers, progress)
        columns, fm = start.columns, config.make_map(start.columns)
        stats, blocks, seen = _pass(
            table, start, fm.to(workers.device), config, checkpoint, workers, checkpoint_seconds, progress
        )
        if sorted(blocks) != sorted(seen):
            raise ValueError(
                f"{len(blocks)} blocks were counted and {len(seen)} are in the table: it changed, or two runs shared "
                f"the folder; remove {checkpoint.folder} and start again"
            )
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
            "seconds": time.monotonic() - began,
            "config": asdict(config),
        }
        if workers.rank == 0:
            # before the model, which ends the run: a kill in between loses nothing
            _io.write_json(out / "report.json", report)
            bias = solution.bias.cpu() + (columns.target.mean if columns.target.categories is None else 0.0)
            TableModel(columns, fm.cpu(), solution.weight.cpu(), bias, config).save(out)
        workers.gather(None)
        checkpoint.remove()
        return report


def _pass(
    table: Table,
    start: _Start,
    fm: FeatureMap,
    config: FitConfig,
    checkpoint: Checkpoint,
    workers: Workers,
    every: float,
    progress: Progress,
) -> tuple[RidgeStats, list[str], list[str]]:
    """Sums over all workers, the blocks counted in them, and the blocks that the table has."""
    columns, everywhere = start.columns, workers.gather(checkpoint.old)
    parts = {name: note for notes in everywhere for name, note in notes.items()}
    # a part belongs to the first worker that sees its file
    owner = {name: rank for rank, notes in reversed(list(enumerate(everywhere))) for name in notes}
    done = {block for note in parts.values() for block in note["blocks"]}
    rows_done = sum(note["rows"] for note in parts.values())
    seen: list[str] = []

    def mine(index: int, label: str) -> bool:
        seen.append(label)
        return index % workers.size == workers.rank and label not in done

    stats = RidgeStats(
        config.num_features,
        columns.target.width,
        block_dtype=BLOCK_DTYPES[config.block_dtype],
        device=workers.device,
    )
    stats.reshift_(torch.tensor(start.shift, dtype=torch.float64, device=workers.device))
    blocks: list[str] = []
    saved = time.monotonic()
    names = [c.name for c in (*columns.inputs, columns.target)]
    for label, batches in table.blocks(mine, names):
        for batch in batches:
            x, y, _ = columns.encode(batch, label)
            if y is not None and len(x):
                accumulate(fm, [(x.to(workers.device), y.to(workers.device))], stats)
            progress("fitting", rows_done + int(stats.rows.sum()) * workers.size, start.rows)
        blocks.append(label)
        if time.monotonic() - saved >= every:
            checkpoint.save(stats, blocks)
            saved = time.monotonic()
    checkpoint.save(stats, blocks)
    for name, rank in owner.items():
        if rank == workers.rank:
            old = checkpoint.load(name)
            old.sums, old.shift = old.sums.to(workers.device), old.shift.to(workers.device)
            stats.merge(old)
    workers.sum_(stats.tensors())
    counted = [b for part in workers.gather(blocks) for b in part]
    counted += [b for note in parts.values() for b in note["blocks"]]
    return stats, counted, seen
