"""Checkpoints of a fit: parts, each of which is one file with sums and the labels of the blocks that they count.

A part belongs to one process. Blocks count from the moment at which their part is renamed into place, so that a run may
be killed at any time. A restart leaves old parts as they are, counts the blocks that no part lists, and adds all parts
at the end.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

from snnk import _io
from snnk.ridge.sums import RidgeStats
from snnk.tabular.parts import HELD, Part
from snnk.tabular.start import Start, digest
from snnk.tabular.workers import Workers

ADVICE = "Remove it and run the same command again: its blocks are counted anew"


class Checkpoint:
    """The parts of a run in a folder.

    The note of a part has the `key` of the run, the labels of its `blocks`, the number of their `rows`, and a `digest`,
    the hash of these three and of the sums.

    Args:
        folder: where the parts are.
        key: the hash of everything that the sums depend on.
        workers: the processes of this run.
    """

    def __init__(self, folder: Path, key: str, workers: Workers) -> None:
        self.folder, self.key = folder, key
        self.path = folder / f"part-{uuid.uuid4().hex}.safetensors"
        self.first_here = workers.local_rank == 0
        self.old = {path.stem: _read_note(path) for path in sorted(folder.glob("part-*.safetensors"))}
        workers.wait()  # until all have looked: from here on they write
        if any(note["key"] != key for note in self.old.values()):
            raise ValueError(
                f"{folder} is the checkpoint of another configuration or table; remove it or name another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        _io.remove_leftovers_in(folder)

    def load(self, name: str, start: Start) -> Part:
        """The sums of an old part; a damaged one raises a ValueError."""
        path = self.folder / f"{name}.safetensors"
        part, note = Part.of(start, RidgeStats.load(path, extra=HELD), path), _read_note(path)
        if note.pop("digest") != digest(note, part.tensors()):
            raise ValueError(f"{path} is damaged: its sums are not those that were written. {ADVICE}")
        return part

    def save(self, part: Part, blocks: list[str]) -> None:
        """Write or replace the part of this process."""
        note = {"key": self.key, "blocks": blocks, "rows": part.rows}
        try:
            part.write(self.path, json.dumps({**note, "digest": digest(note, part.tensors())}))
        except FileNotFoundError:
            raise ValueError(f"{self.folder} was removed during the run; run the same command again") from None

    def load_columns(self) -> dict[str, Any] | None:
        """The result of the first pass of an earlier run with the same key, or None."""
        path = self.folder / "columns.json"
        if not path.exists():
            return None
        stored = _io.read_json(path, f"the first pass of snnk fit. {ADVICE}")
        if not isinstance(stored, dict) or stored.pop("digest", None) != digest(stored, {}):
            raise ValueError(f"{path} is damaged. {ADVICE}")
        return stored if stored.get("key") == self.key else None

    def save_columns(self, body: dict[str, Any]) -> None:
        """Keep the result of the first pass for a restart; the first worker of each machine does this."""
        if self.first_here:
            body = json.loads(json.dumps({"key": self.key, **body}))  # tuples become lists, as they will be in the file
            _io.write_json(self.folder / "columns.json", {**body, "digest": digest(body, {})})

    def counted(self, parts: dict[str, dict[str, Any]], blocks: dict[str, int]) -> set[str]:
        """The blocks of all parts, each of which must be in one part only, with the rows that the first pass found."""
        done: set[str] = set()
        for name, note in parts.items():
            listed = note["blocks"]
            expected = sum(blocks.get(block, 0) for block in listed)
            if expected != note["rows"] or len({*done, *listed}) < len(done) + len(listed):
                raise ValueError(
                    f"{self.folder / name}.safetensors counts {note['rows']} rows, but the {len(listed)} blocks that "
                    f"it lists have {expected}, or another part lists them, too: it is damaged. {ADVICE}"
                )
            done |= set(listed)
        return done

    def remove(self) -> None:
        """Remove the folder at the end of a run; on each machine one worker does, as the folder need not be shared."""
        if self.first_here:
            shutil.rmtree(self.folder, ignore_errors=True)


def _read_note(path: Path) -> dict[str, Any]:
    """The note of a part, without its sums: a hundred parts of a long run do not fit in memory."""
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
        raise ValueError(f"{path} is no whole part of a checkpoint: {error}. {ADVICE}") from error
    return note
