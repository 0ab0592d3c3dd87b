"""Labelled rows for fine-tuning: tokenised texts or images, their labels, and batches of them.

Labels with a decimal point are numbers, all others classes. The batches of an epoch are a function of seed and epoch
alone, so that every process computes the same ones.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snnk.hf.data import pad_texts, read_images, tokenize

POOL = 50  # batches whose rows are sorted by length together
FEWEST = 4  # rows per part of the data
NO_NUMBERS = {"nan", "na", "n/a", "none", "null", "inf", "-inf", "+inf"}  # entries of tables for a missing number


@dataclass(frozen=True)
class Data:
    """Rows that are ready for a model, with their labels.

    Args:
        rows: n tokenised texts, or files of images.
        labels: (n,), long for classes, float for regression.
        collate: a list of rows -> inputs of the model.
        lengths: the length of each row; batches have rows of similar length.

    Example:
        >>> data = Data([[1.0], [2.0]], torch.tensor([0, 1]), lambda rows: {"x": torch.tensor(rows)}, [1, 1])
        >>> data.batch([1])["labels"]
        tensor([1])
    """

    rows: Sequence[Any]
    labels: Tensor
    collate: Callable[[list[Any]], dict[str, Tensor]]
    lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Inputs and labels of some rows."""
        return {**self.collate([self.rows[i] for i in indices]), "labels": self.labels[list(indices)]}

    def row_hashes(self) -> Iterator[bytes]:
        """A hash of each row: of a tokenised text, or of the content of a file."""
        for row in self.rows:
            yield hashlib.sha256(row.read_bytes() if isinstance(row, Path) else repr(row).encode()).digest()

    def take(self, indices: Sequence[int]) -> Data:
        """The data of some rows."""
        chosen = list(indices)
        return Data(
            [self.rows[i] for i in chosen], self.labels[chosen], self.collate, [self.lengths[i] for i in chosen]
        )

    def batches(self, size: int) -> list[list[int]]:
        """Indices of all rows in batches, from the longest rows to the shortest."""
        order = sorted(range(len(self)), key=lambda i: -self.lengths[i])
        return [order[start : start + size] for start in range(0, len(order), size)]

    def epoch(self, size: int, seed: int, epoch: int) -> list[list[int]]:
        """Indices of the batches of an epoch, in random order; the rows of a batch have similar lengths."""
        generator = random.Random(f"{seed} {epoch}")
        order = list(range(len(self)))
        generator.shuffle(order)
        found = []
        for start in range(0, len(order), size * POOL):
            part = sorted(order[start : start + size * POOL], key=lambda i: -self.lengths[i])
            found += [part[i : i + size] for i in range(0, len(part), size)]
        generator.shuffle(found)
        return found

    def split(self, share: float, seed: int) -> tuple[Data, Data]:
        """Two parts, the second with a fraction `share` of the rows of each class."""
        generator = random.Random(f"{seed} split")
        groups: dict[Any, list[int]] = {}
        for i in range(len(self)):
            groups.setdefault(0 if self.labels.is_floating_point() else int(self.labels[i]), []).append(i)
        held: list[int] = []
        for rows in groups.values():
            generator.shuffle(rows)
            held += rows[: math.floor(share * len(rows) + 0.5)]
        if len(held) < FEWEST or len(self) - len(held) < FEWEST:
            raise ValueError(
                f"{share:g} of {len(self)} rows for validation leaves {len(self) - len(held)} and {len(held)} rows; "
                f"{FEWEST} of each are needed: give more data, or a validation file"
            )
        out = set(held)
        return self.take([i for i in range(len(self)) if i not in out]), self.take(sorted(held))


@dataclass(frozen=True)
class Labels:
    """The kind of a label column: classes with their names in order, or numbers (`names` is None).

    Example:
        >>> labels = Labels.of(["b", "a", "b"], "f")
        >>> labels.names, labels.encode(["a", "b"], "g")
        (('a', 'b'), tensor([0, 1]))
        >>> Labels.of(["1.5", "2.0"], "f").names is None
        True
    """

    names: tuple[str, ...] | None

    @classmethod
    def of(cls, values: Sequence[Any], source: Any, regression: bool | None = None) -> Labels:
        """The kind of these labels: `regression`, or by default numbers if there are decimal points, else classes."""
        _complete(values, source)
        numbers = [as_number(v) for v in values]
        if regression is None:
            numeric = [v for v, number in zip(values, numbers, strict=True) if number is not None]
            odd = {str(v) for v, number in zip(values, numbers, strict=True) if number is None}
            decimal = any(isinstance(v, float) or (isinstance(v, str) and not _is_integer(v)) for v in numeric)
            if decimal and odd and {v.strip().lower() for v in odd} <= NO_NUMBERS:
                raise ValueError(f"labels of {source} are numbers except for {', '.join(sorted(odd))}; leave these out")
            regression = decimal and not odd
        if regression:
            return cls(None)
        names = sorted(
            {class_name(v) for v in values}, key=lambda n: (not _is_integer(n), int(n) if _is_integer(n) else 0, n)
        )
        if len(names) < 2:
            raise ValueError(f"all labels of {source} are {names[0]!r}; at least two classes are needed")
        if len(names) > max(2, len(values) // 2):
            raise ValueError(
                f"{source} has {len(names)} classes in {len(values)} rows; give the label column, or task regression"
            )
        return cls(tuple(names))

    def encode(self, values: Sequence[Any], source: Any) -> Tensor:
        """(n,) class numbers or floats."""
        _complete(values, source)
        if self.names is None:
            wrong = Counter(str(v) for v in values if as_number(v) is None)
            if wrong:
                raise ValueError(f"labels of {source} must be finite numbers; got {', '.join(list(wrong)[:5])}")
            return torch.tensor([as_number(v) for v in values], dtype=torch.float32)
        index = {name: i for i, name in enumerate(self.names)}
        unknown = Counter(class_name(v) for v in values if class_name(v) not in index)
        if unknown:
            raise ValueError(
                f"{source} has the labels {', '.join(list(unknown)[:5])}, which are not in the training data: "
                f"{', '.join(self.names[:20])}"
            )
        return torch.tensor([index[class_name(v)] for v in values])


def as_number(value: Any) -> float | None:
    """A finite number, or None if the value is not one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def class_name(value: Any) -> str:
    """The name of a class that a label stands for."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _is_integer(text: str) -> bool:
    return text.lstrip("+-").isdecimal()


def _complete(values: Sequence[Any], source: Any) -> None:
    if not values:
        raise ValueError(f"{source} is empty: it has no rows")
    missing = [i for i, v in enumerate(values) if v is None or v == "" or v != v]
    if missing:
        raise ValueError(
            f"{source} has {len(missing)} rows of {len(values)} without a label, the first is row {missing[0] + 1}; "
            "leave them out"
        )


def encode_texts(
    tokenizer: Any, texts: Sequence[Any], pairs: Sequence[Any] | None, labels: Tensor, max_length: int
) -> Data:
    """Tokenise texts, or pairs of texts, into rows that are padded batch by batch.

    Args:
        tokenizer: the tokenizer of the model.
        texts, pairs: n strings each.
        labels: (n,).
        max_length: tokens per row.
    """
    special = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    if max_length <= special:  # the tokenizer would not truncate
        raise ValueError(f"max_length must exceed the {special} special tokens of a row; got {max_length}")
    rows: list[dict[str, list[int]]] = []
    for start in range(0, len(texts), 1000):
        part = [["" if t is None else str(t) for t in col[start : start + 1000]] for col in (texts, pairs or [])]
        rows += tokenize(tokenizer, part[0], part[1] or None, max_length=max_length)
    empty = sum(not row["input_ids"] for row in rows)
    if empty:
        raise ValueError(f"{empty} of {len(rows)} texts have no tokens at all; leave them out")
    return Data(rows, labels, lambda part: pad_texts(part, tokenizer), [len(row["input_ids"]) for row in rows])


def encode_images(processor: Any, files: Sequence[Path], labels: Tensor) -> Data:
    """Images, which are opened batch by batch."""
    return Data(list(files), labels, lambda part: read_images(part, processor), [1] * len(files))
