"""Samples of rows that do not depend on how the rows were read: those with the least hash of all.

Hashes of rows are as good as random numbers, and the k least of several parts are among the k least of each. Samples of
parts therefore merge into the sample of the whole, whichever worker or engine read which part. `Sample` hashes the
place of a row in its table, and has rows to learn features from. `Held` hashes the contents of an encoded row, and has
rows to assess a model on: those of the least tenth of all hashes are reserved for that, and no features are learnt from
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from snnk.tabular.scaling import Array

if TYPE_CHECKING:
    import pyarrow as pa

MOST_ROWS = 1 << 19
MOST_NUMBERS = 1 << 26  # of a sample, also when its rows are encoded: 256 MB
MOST_HELD, MOST_HELD_NUMBERS = 4096, 1 << 24
RESERVED = 0.1  # share of the rows that features are not learnt from
MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64 (Steele, Lea and Flood, 2014)
CHUNK = 1 << 20  # number of inputs that are hashed at once


def mix(values: Array) -> Array:
    """splitmix64 of unsigned integers, without the sign bit, as torch has no unsigned ones."""
    z = values + np.uint64(MIX[0])
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX[1])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX[2])
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def content_hash(x: Tensor) -> Tensor:
    """Hashes (n,) of encoded rows (n, d) float32, from 0 to 2^63 - 1; equal rows have equal hashes."""
    factors = mix(np.arange(1, x.shape[1] + 1, dtype=np.uint64)).astype(np.uint64) | np.uint64(1)
    found = []
    for part in x.split(max(CHUNK // max(x.shape[1], 1), 1)):
        bits = (part.cpu().float() + 0.0).contiguous().numpy().view(np.uint32)  # minus zero becomes zero
        found.append(mix((bits * factors).sum(1, dtype=np.uint64)))
    return torch.from_numpy(np.concatenate(found)) if found else torch.zeros(0, dtype=torch.int64)


def is_reserved(hashes: Tensor) -> Tensor:
    """Which rows are reserved for an assessment, by their `content_hash`."""
    return hashes < int(RESERVED * 2**63)


class Sample:
    """At most `most` rows of a table, as good as random.

    Args:
        most: number of rows.

    Example:
        >>> import pyarrow as pa
        >>> rows = pa.table({"a": range(100)}).to_batches()[0]
        >>> one, two = Sample(5), Sample(5)
        >>> one.add(rows[:60], 0, 0), two.add(rows[60:], 0, 60)
        (None, None)
        >>> whole = Sample(5)
        >>> whole.add(rows, 0, 0)
        >>> one.merge(two).table().equals(whole.table())
        True
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._hashes: list[Array] = []
        self._parts: list[pa.RecordBatch] = []
        self._bound = np.int64(2**63 - 1)  # no row above it is among the least

    def add(self, batch: pa.RecordBatch, block: int, first_row: int) -> None:
        """Add rows of a block of the table, the first of which has this number in its block."""
        rows = np.arange(first_row, first_row + batch.num_rows, dtype=np.uint64)
        hashes = mix(rows + (np.uint64(block) << np.uint64(40)))
        chosen = np.flatnonzero(hashes <= self._bound)
        if len(chosen):
            self._hashes.append(hashes[chosen])
            self._parts.append(batch.take(chosen))
            if sum(map(len, self._hashes)) > 2 * self.most:
                self._shrink()

    def merge(self, other: Sample) -> Sample:
        """Add the sample of other rows."""
        self._hashes += other._hashes
        self._parts += other._parts
        self._shrink()
        return self

    def table(self) -> pa.Table:
        """The rows in random order."""
        self._shrink()
        import pyarrow as pa

        return pa.Table.from_batches(self._parts)

    def _shrink(self) -> None:
        import pyarrow as pa

        if not self._parts:
            return
        hashes = np.concatenate(self._hashes)
        order = np.argsort(hashes, kind="stable")[: self.most]
        table = pa.Table.from_batches(self._parts).take(order).combine_chunks()
        self._hashes, self._parts = [hashes[order]], table.to_batches()
        if len(order) == self.most:
            self._bound = hashes[order[-1]]


@dataclass(frozen=True)
class Held:
    """Encoded rows of a table that are reserved for an assessment, the ones with the least hashes.

    Args:
        hashes: of the rows, (k,) int64, ascending.
        x, y: encoded inputs (k, d) and targets (k, t).
    """

    hashes: Tensor
    x: Tensor
    y: Tensor

    @classmethod
    def empty(cls, inputs: int, targets: int) -> Held:
        x, y = torch.zeros(0, inputs), torch.zeros(0, targets, dtype=torch.float64)
        return cls(torch.zeros(0, dtype=torch.int64), x, y)

    @property
    def most(self) -> int:
        """The largest number of rows, by the number of inputs."""
        return min(MOST_HELD, max(MOST_HELD_NUMBERS // max(self.x.shape[1], 1), 1))

    def add(self, x: Tensor, y: Tensor) -> Held:
        """With other encoded rows."""
        hashes = content_hash(x)
        bound = int(self.hashes[-1]) if len(self.hashes) == self.most else 2**63 - 1
        new = is_reserved(hashes) & (hashes <= bound)
        return self.merge(Held(hashes[new], x[new].cpu(), y[new].cpu())) if bool(new.any()) else self

    def merge(self, other: Held) -> Held:
        """With the rows of another part."""
        hashes, x, y = (torch.cat(pair) for pair in zip(self.tensors(), other.tensors(), strict=True))
        order = content_hash(y).argsort(stable=True)  # equal inputs may have different targets
        order = order[hashes[order].argsort(stable=True)][: self.most]
        return Held(hashes[order], x[order], y[order])

    def whole(self) -> Held:
        """Without the inputs of which some rows are not here: if these are as many as there may be, the last ones.

        Rows with equal inputs are held together or not at all. Some of them would have targets by their order.
        """
        if len(self.hashes) < self.most:
            return self
        kept = self.hashes < self.hashes[-1]
        return Held(*(tensor[kept] for tensor in self.tensors()))

    @property
    def inputs(self) -> int:
        """Number of different inputs."""
        return len(self.hashes.unique())

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hashes, self.x, self.y

    def fits(self, other: Held) -> bool:
        """Whether these rows, from a file, are what `add` would have kept, with the columns of the other rows."""
        same = all(
            a.dtype == b.dtype and a.ndim == b.ndim and a.shape[1:] == b.shape[1:]
            for a, b in zip(self.tensors(), other.tensors(), strict=True)
        )
        if not same or len({len(tensor) for tensor in self.tensors()}) != 1 or len(self.x) > other.most:
            return False
        finite = bool(self.x.isfinite().all()) and bool(self.y.isfinite().all())
        return finite and torch.equal(self.hashes, content_hash(self.x).sort().values)

    @classmethod
    def of(cls, tensors: Any) -> Held:
        """From what `tensors` gave."""
        return cls(*tensors)
