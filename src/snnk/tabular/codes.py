r"""Columns with many categories as a few numbers: cross-fitted target statistics and the log of their frequency.

    code(c) = sum of z over rows of c / (rows of c + k),    k = (1 - s) / s

z is the standardised target, or the standardised indicator of each class, and s the share of its variance that lies
between categories. Rows belong to one of five folds by a hash of their inputs. A row that is fitted gets the code from
the rows of all other folds, so that its own target is not in it, and a row that is predicted gets that from all rows.
The share s is estimated from products of different folds, so it is about 0 for a column of noise, and so is its code.
An identifier, most of whose values are in one row or fold only, has no codes. The fold depends on the values of a row
alone: it is the same in every pass, worker, engine and part.

Categories are hashed into 2^16 slots, so that memory is bounded; categories in one slot share their code.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

from snnk.tabular.sample import mix
from snnk.tabular.scaling import Array

if TYPE_CHECKING:
    import pyarrow as pa

FOLDS = 5
SLOTS = 1 << 16
MOST_RATES = 20  # with more classes, they share `GROUPS` rates
GROUPS = 16
LARGEST_CODE = 1024.0
IDENTIFIER = 0.5  # a column with a larger share of rows that share their category with no other fold has no codes
MOST_DEVIATIONS = 4.0  # of a log frequency


def text_hashes(text: pa.Array) -> Array:
    """Hashes (n,) of texts, from 0 to 2^63 - 1; 0 for a missing one."""
    encoded = text.dictionary_encode()
    crcs = [crc32(value.encode()) + 1 for value in encoded.dictionary.to_pylist()]
    hashes = np.append(mix(np.array(crcs, np.uint64)), 0)
    return hashes[encoded.indices.fill_null(len(crcs)).to_numpy(zero_copy_only=False)]


def row_folds(values: Mapping[str, Array], rows: int) -> Array:
    """Folds (n,) of rows by their inputs: float64 numbers, or hashes of texts, by name of the column."""
    total = np.zeros(rows, np.uint64)
    for name, found in values.items():
        if found.dtype == np.float64:
            found = np.where(np.isfinite(found), found, 0.0) + 0.0  # minus zero becomes zero
        factor = mix(np.array([crc32(name.encode())], np.uint64)).astype(np.uint64) | np.uint64(1)
        total += found.view(np.uint64) * factor
    return mix(total) % FOLDS


def rates(classes: Sequence[str] | None) -> list[str]:
    """What the codes of a column stand for: the mean target, or the rate of each class."""
    if classes is None:
        return ["mean target"]
    if len(classes) > MOST_RATES:
        return [f"rate of classes {i + 1}/{GROUPS}" for i in range(GROUPS)]
    return [f"rate of {name}" for name in (classes[1:] if len(classes) == 2 else classes)]


@dataclass(frozen=True, eq=False)
class Codes:
    """The codes of a column.

    Args:
        slots: those that have a category, (s,) uint16, ascending.
        table: codes (s + 1, FOLDS + 1, w) float16 of each slot for rows of each fold, and for rows to predict; the last
            row is for categories that were not seen.
    """

    slots: Array
    table: Array

    @property
    def width(self) -> int:
        return int(self.table.shape[2])

    @cached_property
    def _place(self) -> Array:
        """The row of the table that each slot has, (SLOTS,)."""
        place = np.full(SLOTS, len(self.slots), np.int64)
        place[self.slots] = np.arange(len(self.slots))
        return place

    @cached_property
    def _flat(self) -> Array:
        return self.table.astype(np.float32).reshape(-1, self.width)

    def encode(self, hashes: Array, folds: Array | int = FOLDS) -> tuple[Array, Array]:
        """Codes (n, w) of categories by their `text_hashes`, and which of them were seen (n,)."""
        place = self._place[hashes % SLOTS]
        return self._flat[place * (FOLDS + 1) + folds], place < len(self.slots)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Codes):
            return NotImplemented
        return np.array_equal(self.slots, other.slots) and np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        return hash(self.slots.tobytes())

    def to_dict(self) -> dict[str, Any]:
        """The codes as JSON."""
        stored = {"slots": self.slots.astype("<u2"), "table": self.table.astype("<f2")}
        texts = {name: base64.b64encode(array.tobytes()).decode("ascii") for name, array in stored.items()}
        return {"width": self.width, **texts}

    @classmethod
    def from_dict(cls, stored: Any, name: str) -> Codes:
        """Codes of the column `name` from a file; every key, type and size is checked."""
        if not isinstance(stored, dict) or set(stored) != {"width", "slots", "table"}:
            raise ValueError(f"the codes of column {name!r} must have width, slots and table")
        width = stored["width"]
        if isinstance(width, bool) or not isinstance(width, int) or not 2 <= width <= MOST_RATES + 1:
            raise ValueError(f"the codes of column {name!r} must be 2 to {MOST_RATES + 1} wide; got {width!r}")
        try:
            slots, table = (
                np.frombuffer(base64.b64decode(stored[key], validate=True), kind)
                for key, kind in (("slots", "<u2"), ("table", "<f2"))
            )
            table = table.reshape(len(slots) + 1, FOLDS + 1, width)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the codes of column {name!r} are damaged: {error}") from error
        if (np.diff(slots.astype(np.int64)) <= 0).any() or not (np.abs(table) <= LARGEST_CODE).all():
            raise ValueError(f"the codes of column {name!r} are damaged: their slots or numbers are wrong")
        return cls(slots.astype(np.uint16), table.astype(np.float16))


class Target(NamedTuple):
    """The targets of some rows: numbers, classes, or both where the numbers may be classes."""

    numbers: Array | None  # (n,)
    names: list[str] | None  # of the classes; None if the numbers cannot be classes
    chosen: Array  # (n,) into the names


class Tally:
    """Sums over the rows of each category and fold: of 1, of the target, and of each class; tallies of rows merge.

    Attributes:
        place: the row of the sums that each slot has, (SLOTS,), or -1.
        rows, total: sums (r, FOLDS) of 1 and of the target.
        classes: sums (r, FOLDS) of each class; None if the target has numbers that cannot be classes.
        grouped: whether classes of texts, which were too many, are in groups.
    """

    def __init__(self) -> None:
        self.place = np.full(SLOTS, -1, np.int32)
        self.rows = self.total = np.zeros((0, FOLDS))
        self.classes: dict[str, Array] | None = {}
        self.grouped = False

    def add(self, hashes: Array, folds: Array, target: Target) -> None:
        """Add rows by the `text_hashes` of their category, their folds and their targets, none of which is missing."""
        flat = self._places(hashes % SLOTS) * FOLDS + folds

        def sums(chosen: Array, weight: Array | None = None) -> Array:
            return np.bincount(chosen, weight, self.rows.size).reshape(self.rows.shape).astype(float)

        self.rows = self.rows + sums(flat)
        if target.numbers is not None:
            self.total = self.total + sums(flat, target.numbers)
        names = target.names
        self._add_classes(
            None if names is None else {name: sums(flat[target.chosen == j]) for j, name in enumerate(names)},
            may_group=target.numbers is None,
        )

    def merge(self, other: Tally) -> None:
        """Add the tally of other rows."""
        used = np.flatnonzero(other.place >= 0)
        place = self._places(used)

        def moved(sums: Array) -> Array:
            found = np.zeros(self.rows.shape)
            found[place] = sums[other.place[used]]
            return found

        self.rows, self.total = self.rows + moved(other.rows), self.total + moved(other.total)
        if other.grouped:
            self._group()
        found = None if other.classes is None else {name: moved(sums) for name, sums in other.classes.items()}
        self._add_classes(found, may_group=not other.total.any(), grouped=other.grouped)

    def _places(self, slots: Array) -> Array:
        """Rows of the sums for some slots; new ones get new rows."""
        new = np.unique(slots[self.place[slots] < 0])
        if len(new):
            self.place[new] = np.arange(len(self.rows), len(self.rows) + len(new))
            more = np.zeros((len(new), FOLDS))
            self.rows, self.total = np.concatenate([self.rows, more]), np.concatenate([self.total, more])
            if self.classes is not None:
                self.classes = {name: np.concatenate([sums, more]) for name, sums in self.classes.items()}
        return self.place[slots].astype(np.int64)

    def _add_classes(self, found: dict[str, Array] | None, may_group: bool, grouped: bool = False) -> None:
        if found is None or self.classes is None:
            self.classes = None
            return
        for name, sums in found.items():
            key = _group_of(name) if self.grouped and not grouped else name
            self.classes[key] = self.classes.get(key, 0.0) + sums
        if len(self.classes) > MOST_RATES:
            if may_group:
                self._group()
            else:
                self.classes = None

    def _group(self) -> None:
        old, self.grouped = {} if self.grouped else self.classes or {}, True
        if old:
            self.classes = {}
            for name, sums in old.items():
                self.classes[_group_of(name)] = self.classes.get(_group_of(name), 0.0) + sums

    def codes(self, classes: Sequence[str] | None, mean: float, scale: float) -> Codes | None:
        """The codes for a target with some classes, or for a number with its mean and scale.

        There are none if most rows are in a category that one fold alone has: nothing shows how to use its code.
        """
        used = np.flatnonzero(self.place >= 0)
        order = self.place[used]
        rows = self.rows[order]
        if rows[rows == rows.sum(1, keepdims=True)].sum() > IDENTIFIER * rows.sum():
            return None
        outcomes = []  # standardised, summed over rows: (s, FOLDS) each
        if classes is None:
            with np.errstate(over="ignore", invalid="ignore"):
                outcomes.append((self.total[order] - rows * mean) / scale)
        else:
            if len(classes) > MOST_RATES:
                self._group()
                keys = [str(group) for group in range(GROUPS)]
            else:
                keys = list(classes[1:] if len(classes) == 2 else classes)
            for key in keys:
                hits = (self.classes or {}).get(key, np.zeros(self.rows.shape))[order]
                share = hits.sum() / max(rows.sum(), 1)
                outcomes.append((hits - rows * share) / max(math.sqrt(share * (1 - share)), 1e-6))
        parts = [_shrunken(rows, np.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0)) for z in outcomes]
        table = np.stack([*parts, _log_frequency(rows)], 2)
        return Codes(used.astype(np.uint16), np.clip(table, -LARGEST_CODE, LARGEST_CODE).astype(np.float16))


def _group_of(name: str) -> str:
    return str(crc32(name.encode()) % GROUPS)


def _shrunken(rows: Array, z: Array) -> Array:
    """Codes (s + 1, FOLDS + 1) from numbers of rows (s, FOLDS) and sums of standardised outcomes (s, FOLDS)."""
    n, total = rows.sum(1, keepdims=True), z.sum(1, keepdims=True)
    pairs = float((n[:, 0] ** 2 - (rows**2).sum(1)).sum())  # of rows in different folds
    between = float((total[:, 0] ** 2 - (z**2).sum(1)).sum()) / pairs if pairs else 0.0
    between -= math.sqrt(2 / pairs) if pairs else 0.0  # one standard error for noise: rather no code than one of noise
    codes = np.zeros((len(rows) + 1, FOLDS + 1))
    if between > 0:
        k = max(1 - between, 0.0) / between
        sums, counts = np.hstack([total - z, total]), np.hstack([n - rows, n])
        codes[:-1] = np.divide(sums, counts + k, out=np.zeros_like(sums), where=counts > 0)
    return codes


def _log_frequency(rows: Array) -> Array:
    """Standardised logs of the number of rows, (s + 1, FOLDS + 1); that of fewer folds is scaled up."""
    n = rows.sum(1, keepdims=True)
    logs = np.log1p(np.vstack([np.hstack([(n - rows) * FOLDS / (FOLDS - 1), n]), np.zeros((1, FOLDS + 1))]))
    own = logs[:-1, :-1][rows > 0]  # what rows that are fitted have
    weight = rows[rows > 0]
    if not len(own):
        return np.zeros_like(logs)
    mean = np.average(own, weights=weight)
    deviation = math.sqrt(np.average(np.square(own - mean), weights=weight))
    logs = logs.clip(own.min(), own.max())  # nothing is seen at predict that was not there in the fit
    return ((logs - mean) / max(deviation, 1e-6)).clip(-MOST_DEVIATIONS, MOST_DEVIATIONS)
