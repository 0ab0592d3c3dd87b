"""Calibration inputs beyond the texts at hand: words that these lack, and other kinds of text.

A fit is close where its inputs are, and arbitrary elsewhere. Texts of one kind have a small part of the words that the
model knows, and the same turns of phrase over and over. Two things make up for it without any data: in a part of the
batches, some tokens are replaced by words drawn from the tokenizer's vocabulary; and general text (general.py) is mixed
in. Held-out texts for measurements are never changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from snnk.hf.models import Batch

SHARE = 0.3  # of the tokens of a changed batch
SHORTEST = 3  # letters of a word
STARTS = ("Ġ", "▁")  # of tokens that begin a word: byte-level BPE, SentencePiece


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The tokens of whole words; all tokens but the special ones, where there are no such words.

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
    batch: Batch, words: Tensor, special: Sequence[int], *, share: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """The batch with a share of its tokens replaced by words; special tokens and padding stay.

    Example:
        >>> batch = {"input_ids": torch.tensor([[0, 5, 6, 7, 1]]), "attention_mask": torch.ones(1, 5)}
        >>> new = substitute(batch, torch.tensor([9]), [0, 1], share=1.0, generator=torch.Generator())
        >>> new["input_ids"].tolist()
        [[0, 9, 9, 9, 1]]
    """
    ids = batch["input_ids"]
    drawn = words[torch.randint(len(words), ids.shape, generator=generator)]
    changed = torch.rand(ids.shape, generator=generator) < share
    changed &= ~torch.isin(ids, torch.tensor([*special], dtype=ids.dtype))
    if "attention_mask" in batch:
        changed &= batch["attention_mask"].bool()
    return {**batch, "input_ids": torch.where(changed, drawn, ids)}


def widen(
    batches: Sequence[Batch], tokenizer: PreTrainedTokenizerBase, *, share: float = SHARE, every: int = 2, seed: int = 0
) -> list[Batch]:
    """The batches, in the same order; in every second one, words of the vocabulary replace a share of the tokens."""
    words, generator = vocabulary(tokenizer), torch.Generator().manual_seed(seed)
    special = tokenizer.all_special_ids
    return [
        substitute(batch, words, special, share=share, generator=generator) if i % every == 0 else batch
        for i, batch in enumerate(batches)
    ]
