"""Calibration inputs beyond the texts at hand: words that these lack, and other kinds of text.

A fit is close where its inputs are, and arbitrary elsewhere. Texts of one kind have a small part of the words that the
model knows, and the same turns of phrase over and over. Two things make up for it without any data: in a part of the
batches, some tokens are replaced by words drawn from the tokenizer's vocabulary; and general text (general.py) is mixed
in. Held-out texts for measurements are never changed, and no changed text becomes one of them. The distillation reads
the given texts alone, as they are: in trials with MiniLM, general text among them brought the model less near to the
original on the given texts, and no nearer on others.

A model of pairs looks for what two texts have in common. A word that both texts of a pair have is therefore replaced in
both, by the same word. General text becomes pairs of neighbouring texts.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from snnk.hf.calibration import HELD_OUT, MAX_TOKENS, Calibration, TooFewInputs, UnknownWords, load_calibration
from snnk.hf.general import SOURCE as GENERAL
from snnk.hf.record import hold_out

SHARE = 0.3  # of the tokens of a changed batch
SHORTEST = 3  # letters of a word
Batch = dict[str, Tensor]
STARTS = ("Ġ", "▁")  # of tokens that begin a word: byte-level BPE, SentencePiece


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int | None = None) -> Tensor:
    """The tokens of whole words; all tokens but the special ones, where there are no such words.

    Args:
        size: number of tokens that the model has, if the tokenizer may have more.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = {"[UNK]": 0, "the": 1, "##ing": 2, "of": 3, "sea": 4, "[X]": 5}
        >>> wrapped = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
        >>> vocabulary(PreTrainedTokenizerFast(tokenizer_object=wrapped, unk_token="[UNK]")).tolist()
        [1, 4]
    """
    special = set(tokenizer.all_special_ids)
    tokens = {number: token for token, number in tokenizer.get_vocab().items() if number not in special}
    if size is not None:
        tokens = {number: token for number, token in tokens.items() if number < size}
    marked = any(token.startswith(STARTS) and len(token) > SHORTEST for token in tokens.values())
    words = [
        number
        for number, token in tokens.items()
        if token.startswith(STARTS if marked else "")
        and len(word := token.lstrip("".join(STARTS))) >= SHORTEST
        and word.isalpha()
    ]
    return torch.tensor(sorted(words or tokens))


def substitute(
    batch: Batch,
    words: Tensor,
    special: Sequence[int],
    *,
    share: float,
    generator: torch.Generator,
    alike: bool = False,
) -> Batch:
    """The batch with a share of its tokens replaced by words; special tokens and padding stay.

    Args:
        batch: inputs of a model.
        words: tokens to draw from, (n,).
        special: tokens that stay.
        share: of the tokens.
        generator: of the draw.
        alike: replace equal tokens of one input by the same word, or none of them.

    Example:
        >>> batch = {"input_ids": torch.tensor([[0, 5, 6, 7, 1]]), "attention_mask": torch.ones(1, 5)}
        >>> new = substitute(batch, torch.tensor([9]), [0, 1], share=1.0, generator=torch.Generator())
        >>> new["input_ids"].tolist()
        [[0, 9, 9, 9, 1]]
    """
    ids = batch["input_ids"]
    drawn = words[torch.randint(len(words), ids.shape, generator=generator)]
    changed = torch.rand(ids.shape, generator=generator) < share
    if alike:
        first = (ids[:, :, None] == ids[:, None, :]).int().argmax(2)  # the place of the first equal token, (n, tokens)
        drawn, changed = drawn.gather(1, first), changed.gather(1, first)
    changed &= ~torch.isin(ids, torch.tensor([*special], dtype=ids.dtype))
    if "attention_mask" in batch:
        changed &= batch["attention_mask"].bool()
    return {**batch, "input_ids": torch.where(changed, drawn, ids)}


def _tokens(batch: Batch) -> list[tuple[int, ...]]:
    """The tokens of each input, without padding."""
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    return [tuple(ids[mask].tolist()) for ids, mask in rows]


def widen(
    batches: Sequence[Batch],
    general: Sequence[Batch],
    tokenizer: PreTrainedTokenizerBase,
    *,
    pairs: bool = False,
    vocab_size: int | None = None,
    without: Container[tuple[int, ...]] = (),
    seed: int = 0,
) -> list[tuple[Batch, Batch]]:
    """Batches of texts and of general text in random order, with words of the vocabulary in every second of both.

    Each comes with the batch as it was.

    An input that would have the tokens of one in `without` stays as it is.
    """
    words, special = vocabulary(tokenizer, vocab_size), tokenizer.all_special_ids
    generator = torch.Generator().manual_seed(seed)

    def change(batch: Batch) -> Batch:
        new = substitute(batch, words, special, share=SHARE, generator=generator, alike=pairs)
        same = torch.tensor([tokens in without for tokens in _tokens(new)])
        return {**new, "input_ids": torch.where(same[:, None], batch["input_ids"], new["input_ids"])}

    mixed = [(change(batch) if i % 2 else batch, batch) for part in (batches, general) for i, batch in enumerate(part)]
    return [mixed[i] for i in torch.randperm(len(mixed), generator=generator)]


@dataclass(frozen=True)
class Gathered:
    """The inputs of one compression.

    Args:
        given: the inputs of the user, or general text.
        batches: what is fitted to.
        lessons: the same in the same order, for the distillation: given inputs as they were, and None for others.
        more: further inputs, for the distillation alone.
        held_out: what agreement is measured on: inputs like the given ones, then general text.
        general: the general text beside the given texts; None where there is none.
        mixed: number of general texts among those that are fitted to.
    """

    given: Calibration
    batches: list[Batch]
    lessons: list[Batch | None]
    more: list[Batch]
    held_out: list[Calibration]
    general: Calibration | None = None
    mixed: int = 0

    @property
    def own(self) -> list[Batch]:
        """The given inputs that are fitted to, as they are in use."""
        return [batch for batch in self.lessons if batch is not None]

    def __str__(self) -> str:
        return f"{self.given}\nmixed in: {self.general}" if self.mixed else str(self.given)


def gather(
    given: Calibration, processor: Any, *, max_length: int, wide: bool, vocab_size: int | None = None, seed: int = 0
) -> Gathered:
    """The given inputs with general text to measure on, and, if `wide`, mixed with general text and other words.

    `vocab_size` is the number of tokens of the model, if the tokenizer may have more. Images stay as they are, and
    general text is left out where most of its words are unknown to the tokenizer.
    """
    batches, held = list(given), given.held_out
    if held is None:  # all texts are the same, or there are few images
        batches, part = hold_out(batches)
        held = Calibration(part, given.source, given.kind, sum(len(next(iter(batch.values()))) for batch in part))
    if given.kind == "images":
        return Gathered(given, batches, [*batches], given.more, [held])
    general = _beside(given, processor, max_length, seed)
    sets = [held] if general is None or general.held_out is None else [held, general.held_out]
    if not wide:
        return Gathered(given, batches, [*batches], given.more, sets, general)
    options: dict[str, Any] = {"pairs": given.kind == "pairs", "vocab_size": vocab_size, "seed": seed}
    apart = {tokens for part in sets for batch in part for tokens in _tokens(batch)}
    mixed = widen(batches, general or [], processor, without=apart, **options)
    own = {id(batch) for batch in batches}
    lessons = [batch if id(batch) in own else None for _, batch in mixed]
    wider = [changed for changed, _ in mixed]
    return Gathered(given, wider, lessons, given.more, sets, general, 0 if general is None else general.items)


def _beside(given: Calibration, tokenizer: PreTrainedTokenizerBase, max_length: int, seed: int) -> Calibration | None:
    """General text beside texts from a file: half as much as there may be of these."""
    if given.source == GENERAL:
        return None
    try:
        return load_calibration(
            None,
            tokenizer,
            pairs=given.kind == "pairs",
            max_length=max_length,
            max_tokens=MAX_TOKENS // 2,
            held_out=HELD_OUT,
            without=given.groups,
            seed=seed,
        )
    except (UnknownWords, TooFewInputs):  # or it is the same to the tokenizer as the given texts
        return None
