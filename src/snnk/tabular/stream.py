"""Closed-form training from a table of any length: one cheap pass for the columns, one pass for the sums.

    snnk.tabular.stream.fit(source, out, FitConfig(target="y"))          # or: snnk fit DATA --target y --out DIR

Blocks of rows (see source.py) are shared out over the workers of a torchrun cluster; their float64 sums are
all-reduced, so the result does not depend on the number of workers beyond rounding. A checkpoint is a set of parts. A
part belongs to one process and is one file: its sums, with the names of the blocks counted in them. Renaming it into
place is the one moment at which blocks become counted, so a run may be killed at any time. A restart leaves old parts
as they are, counts the blocks that no part names, and adds all parts at the end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from snnk import _io
from snnk.maps import FeatureMap
from snnk.ridge.sums import BLOCK_DTYPES, RidgeStats
from snnk.tabular.columns import Columns
from snnk.tabular.model import ROWS, FitConfig, TableModel
from snnk.tabular.scan import Scan
from snnk.tabular.source import Table

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

    The note of a part says what it belongs to (`key`), its `blocks`, how many `rows` they have, and the hash (`digest`)
    of these three and the sums.
    """

    def __init__(self, folder: Path, key: str, workers: Workers) -> None:
        self.folder, self.key = folder, key
        self.path = folder / f"part-{uuid.uuid4().hex}.safetensors"
        self._first_here = workers.local_rank == 0
        self.old = {path.stem: _note(path) for path in sorted(folder.glob("part-*.safetensors"))}
        workers.gather(None)  # everyone has looked before anyone writes
        if any(note["key"] != key for note in self.old.values()):
            raise ValueError(
                f"{folder} is the checkpoint of another configuration or table; remove it or name another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        _io.remove_leftovers_in(folder)

    def load(self, name: str) -> RidgeStats:
        path = self.folder / f"{name}.safetensors"
        stats = RidgeStats.load(path)
        note = _note(path)
        if note.pop("digest") != _digest(note, stats):
            raise ValueError(f"{path} is damaged: its sums are not those that were written. {ANEW}")
        return stats

    def save(self, stats: RidgeStats, blocks: list[str]) -> None:
        """Replace this process's part."""
        note = {"key": self.key, "blocks": blocks, "rows": int(stats.rows.sum())}
        stats.note = json.dumps({**note, "digest": _digest(note, stats)})
        try:
            stats.save(self.path)
        except FileNotFoundError:
            raise ValueError(f"{self.folder} was removed during the run; run the same command again") from None

    def remove(self) -> None:
        """End of the run: the first worker of each machine clears it away, as the folder need not be shared."""
        if self._first_here:
            shutil.rmtree(self.folder, ignore_errors=True)


ANEW = "Remove it and run the same command again: what it counts is counted anew"


def _digest(body: dict[str, Any], stats: RidgeStats | None = None) -> str:
    """Hash of what goes into a checkpoint, so that a damaged file is no wrong number."""
    digest = hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=32)
    for tensor in [] if stats is None else (stats.sums, stats.shift):
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _note(path: Path) -> dict[str, Any]:
    """What a part says about itself, without its sums: a hundred parts of a long run do not fit in memory."""
    try:
        with _io.open_tensors(path) as file:
            note = json.loads((file.metadata() or {}).get("note") or "{}")
        if not isinstance(note, dict) or not isinstance(note.get("key"), str):
            raise ValueError("its note has no key")
        blocks, rows = note.setdefault("blocks", []), note.setdefault("rows", 0)
        note.setdefault("digest", "")
        texts = isinstance(blocks, list) and all(isinstance(block, str) for block in blocks)
        if not texts or isinstance(rows, bool) or not isinstance(rows, int):
            raise ValueError("its note has no list of blocks, or no number of rows")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no whole part of a checkpoint: {error}. {ANEW}") from error
    return note


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


def _own(out: Path, stack: ExitStack) -> None:
    """Make the folder and lock it until `stack` ends, so that hours of work do not end at what cannot be written.

    A model in it is looked for under the lock: a run that held it before may just have finished. What a run left there
    that was killed after its last file is cleared away. A folder that stays empty is removed.
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


def _key(config: FitConfig, table: Table, workers: Workers) -> str:
    """Hash of what the sums depend on. `lam` is not part of it: it can be changed after the pass."""
    relevant = {k: v for k, v in asdict(config).items() if k != "lam"}
    body = json.dumps([relevant, table.fingerprint(workers.rank, workers.size, workers.gather)], sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()


@dataclass(frozen=True)
class _Start:
    """What the second pass begins with, for all workers and all restarts the same."""

    columns: Columns
    rows: int
    blocks: dict[str, int]  # rows of each that count
    shift: list[float]  # about which sums are taken: float32 products are rounded about one origin, whoever makes them


def _start(table: Table, config: FitConfig, checkpoint: Checkpoint, workers: Workers, progress: Progress) -> _Start:
    """The first pass, shared out; kept in the checkpoint for a restart."""
    path = checkpoint.folder / "columns.json"
    found = next((stored for stored in workers.gather(_stored(path, checkpoint.key)) if stored), None)
    if found:
        return _Start(Columns.from_dict(found["columns"]), found["rows"], found["blocks"], found["shift"])

    def show(rows: int) -> None:
        progress("reading columns", rows * workers.size, 0)

    show(0)
    empty = Scan.start(table, config.target, config.drop)
    mine = empty.read(table, lambda i, _: i % workers.size == workers.rank, show)
    scans: list[Scan] = workers.gather(mine)
    first = scans[0]
    for other in scans[1:]:
        first.merge(other)
    columns = first.columns(config.task, config.missing)
    shift = workers.gather(_shift(table, columns, config) if workers.rank == 0 else None)[0]
    order = sorted(first.blocks.items(), key=lambda item: item[1])
    blocks = {label: complete if config.missing == "drop" else rows for label, (_, rows, complete) in order}
    table.check_unchanged()
    if workers.local_rank == 0:
        body = {"key": checkpoint.key, "rows": first.rows, "blocks": blocks, "shift": shift}
        body |= json.loads(json.dumps({"columns": columns.to_dict()}))  # tuples become lists, as they are in the file
        _io.write_json(path, {**body, "digest": _digest(body)})
    return _Start(columns, first.rows, blocks, shift)


def _stored(path: Path, key: str) -> dict[str, Any] | None:
    """What an earlier run has found in its first pass, if it had the same key."""
    if not path.exists():
        return None
    stored = _io.read_json(path, f"the first pass of snnk fit. {ANEW}")
    if not isinstance(stored, dict) or stored.pop("digest", None) != _digest(stored):
        raise ValueError(f"{path} is damaged. {ANEW}")
    return stored if stored.get("key") == key else None


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
    if not checkpoint_seconds >= 0:
        raise ValueError(f"checkpoint_seconds must be a number >= 0; got {checkpoint_seconds!r}")
    workers = Workers()
    with ExitStack() as stack:
        stack.callback(workers.close)
        RidgeStats(config.num_features, 1, device=workers.device)  # too many features fail before anything is read
        table = Table(source)
        Scan.start(table, config.target, config.drop)  # bad columns fail before anything is written
        refused = None
        if workers.rank == 0:
            try:
                _own(out, stack)
            except ValueError as error:
                refused = str(error)
        refused = workers.gather(refused)[0]
        if refused:  # by all workers: one that is left alone would wait, and end in a traceback
            raise ValueError(refused)
        checkpoint = Checkpoint(out / ".checkpoint", _key(config, table, workers), workers)
        start = _start(table, config, checkpoint, workers, progress)
        columns, fm = start.columns, config.make_map(start.columns)
        stats, blocks = _pass(
            table, start, fm.to(workers.device), config, checkpoint, workers, checkpoint_seconds, progress
        )
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
            "unit": columns.target.scale,  # of the target; score and residual are in its squares
            "condition": solution.condition if math.isfinite(solution.condition) else None,
            "seconds": time.monotonic() - began,
            "config": asdict(config),
        }
        if workers.rank == 0:
            # before the model, which ends the run: a kill in between loses nothing
            if not out.is_dir():
                raise ValueError(f"{out} was removed during the run; run the same command again")
            _io.write_json(out / "report.json", report)
            # a class has mean 0
            bias = solution.bias.cpu() + columns.target.mean / columns.target.scale
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
) -> tuple[RidgeStats, list[str]]:
    """Sums over all workers, and the blocks counted in them."""
    columns, everywhere = start.columns, workers.gather(checkpoint.old)
    parts = {name: note for notes in everywhere for name, note in notes.items()}
    # a part belongs to the first worker that sees its file
    owner = {name: rank for rank, notes in reversed(list(enumerate(everywhere))) for name in notes}
    done = _counted(checkpoint.folder, parts, start.blocks)
    rows_done = sum(note["rows"] for note in parts.values())

    def mine(index: int, label: str) -> bool:
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
        first = 0
        for batch in batches:
            x, y, _ = columns.encode(batch, label, first_row=first)
            first += batch.num_rows
            if y is not None and len(x):
                accumulate(fm, [(x.to(workers.device), y.to(workers.device))], stats)
            progress("fitting", rows_done + int(stats.rows.sum()) * workers.size, start.rows)
        blocks.append(label)
        if time.monotonic() - saved >= every:
            table.check_unchanged()  # before its rows count for good
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


def _counted(folder: Path, parts: dict[str, dict[str, Any]], blocks: dict[str, int]) -> set[str]:
    """The blocks of all parts, each of them in one part only and with as many rows as the first pass found."""
    done: set[str] = set()
    for name, note in parts.items():
        listed = note["blocks"]
        expected = sum(blocks.get(block, 0) for block in listed)
        if expected != note["rows"] or len({*done, *listed}) < len(done) + len(listed):
            raise ValueError(
                f"{folder / name}.safetensors counts {note['rows']} rows, but the {len(listed)} blocks that it lists "
                f"have {expected}, or another part lists them, too: it is damaged. {ANEW}"
            )
        done |= set(listed)
    return done
