"""Inputs to fit to, held-out inputs for measurements, and further ones, none of which is an input of two kinds.

The tokens that the model reads count: texts that differ only behind the cut at the maximal length are the
same input. Pairs with the same first text, such as a query with several answers, are a group. A group is held out as a
whole or not at all, so that measurements show how the model does on queries that it was not fitted to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from snnk.hf.data import TokenRow, tokenize

FEWEST = 10  # inputs, as one in ten is held out
Texts = tuple[str, ...]  # of one input: one text, or the two of a pair
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """One text or pair: its outputs of the tokenizer, its texts, and the tokens that name its group."""

    row: TokenRow
    texts: Texts
    group: Tokens

    @property
    def tokens(self) -> Tokens:
        return tuple(self.row["input_ids"])


def read_inputs(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Texts], length: int, batch_size: int
) -> Iterator[Input]:
    """Texts or pairs as inputs, tokenized as they are asked for; those without tokens are left out."""
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        columns = [list(column) for column in zip(*part, strict=True)]
        rows = tokenize(tokenizer, *columns, max_length=length)
        groups: list[Any] = (
            [row["input_ids"] for row in rows] if len(columns) == 1 else _first(tokenizer, columns[0], length)
        )
        found = (Input(*values) for values in zip(rows, part, map(tuple, groups), strict=True))
        yield from (one for one in found if one.tokens)


def _first(tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int) -> list[list[int]]:
    """The beginnings of first texts of pairs that are left in every pair: of a pair, the longer text is cut."""
    room = max(1, (length - tokenizer.num_special_tokens_to_add(pair=True)) // 2)
    found: Any = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=room)
    return found["input_ids"]


def take(inputs: Iterable[Input], max_tokens: int, batch_size: int) -> list[Input]:
    """The first of the inputs, until they have enough tokens."""
    found: list[Input] = []
    count, stream = 0, iter(inputs)
    while part := list(islice(stream, batch_size)):
        found += part
        count += sum(len(one.tokens) for one in part)
        if count >= max_tokens and len(found) >= FEWEST:
            break
    return found


def split(
    fitted: list[Input], others: Iterator[Input], *, held_out: int, max_tokens: int, more_tokens: int, batch_size: int
) -> tuple[list[Input], list[Input], list[Input]]:
    """Inputs to fit to, inputs held out, and further ones.

    Args:
        fitted: inputs to fit to, possibly with copies.
        others: the inputs behind them. Those of other groups are held out. If these are few, as in a file with many
            copies, about a tenth of the groups that are fitted to are held out in place of being fitted to.
        held_out: number of held-out inputs at most.
        max_tokens, more_tokens: of the held-out inputs, and of the further ones.
        batch_size: inputs are taken by so many.

    Example:
        >>> inputs = [Input({"input_ids": [i]}, (str(i),), (i,)) for i in (1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5)]
        >>> parts = split(inputs[:9], iter(inputs[9:]), held_out=1, max_tokens=9, more_tokens=9, batch_size=1)
        >>> [len(part) for part in parts], [one.texts for one in parts[1]]
        ([9, 1, 1], [('4',)])
        >>> parts = split(inputs[:9], iter([]), held_out=1, max_tokens=9, more_tokens=9, batch_size=1)
        >>> [len(part) for part in parts], [one.texts for one in parts[1]]
        ([6, 1, 0], [('3',)])
    """
    seen, groups = {one.tokens for one in fitted}, {one.group for one in fitted}
    held: list[Input] = []
    aside: list[Input] = []  # other pairs of first texts that are fitted to
    others = _unseen(others, seen)
    while len(held) < held_out and (one := next(others, None)) is not None:
        (aside if one.group in groups else held).append(one)
    apart = {one.group for one in held}
    if held_out:
        wanted = min(held_out, max(1, (len(groups) + len(apart)) // FEWEST))
        moved = _some_groups(fitted, wanted - len(apart))
        new = {one.tokens: one for one in (*fitted, *aside) if one.group in moved}
        held += list(new.values())[: held_out - len(held)]
        fitted = [one for one in fitted if one.group not in moved]
        apart |= moved
    rest = (one for one in chain(aside, others) if one.group not in apart)
    more = take(rest, more_tokens, batch_size) if more_tokens else []
    return fitted, take(held, max_tokens, batch_size), more


def _unseen(inputs: Iterable[Input], seen: set[Tokens]) -> Iterator[Input]:
    for one in inputs:
        if one.tokens not in seen:
            seen.add(one.tokens)
            yield one


def _some_groups(inputs: list[Input], count: int) -> set[Tokens]:
    """As many groups, with a tenth of the inputs at most, or else the smallest; none if there is one group alone."""
    sizes = Counter(one.group for one in inputs)
    found: set[Tokens] = set()
    if len(sizes) < 2:
        return found
    room = max(len(inputs) // FEWEST, min(sizes.values()))
    for group in reversed(sizes):
        if len(found) < count and sizes[group] <= room:
            found.add(group)
            room -= sizes[group]
    return found
