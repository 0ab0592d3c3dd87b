"""Unlabelled inputs for compression: batches for a model from a file of texts or of pairs, or a folder of images.

A pair has two texts, which a cross-encoder or a classifier of pairs reads as one input. Texts are sampled and shuffled
by a seed, so that a file sorted by topic or length gives a fair sample. The texts of a batch then have similar lengths,
so that little of it is padding, and the batches are shuffled, as `compress_` holds out every tenth to measure the
errors of blocks. The outputs of the whole model are measured on other inputs, which `compress_` never sees: `held_out`
of the result. Without a file, the texts are those of general.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from snnk import _checks
from snnk._text import printable
from snnk.hf.data import (
    ARROW,
    HEAD,
    LINES,
    TokenRow,
    arrow_columns,
    as_columns,
    column_of,
    file_format,
    find_images,
    pad_texts,
    read_images,
    read_lines,
    read_rows,
    text_column,
)
from snnk.hf.doubts import pieces
from snnk.hf.general import SOURCE as GENERAL
from snnk.hf.general import general_texts
from snnk.hf.splitting import FEWEST, Input, Texts, Tokens, read_inputs, split, take

HELD_OUT = 500  # inputs that are held out beside these, if there are enough
LONGEST = 200  # characters of a held-out text or pair that are kept, to show them in a report
BETWEEN = " / "  # the two texts of a pair, where they are shown
SHORT = 8  # tokens of a general text on average, at least
PARTS = 20  # batches at least, so that more than one is held out
MAX_TOKENS = 50_000
CHARACTERS = 16  # of a text that are kept per token that the model reads, so that long documents need no memory
MOST_UNKNOWN = 0.5  # largest part of unknown tokens
PATCH = 256  # pixels that are counted as one token of an image
T = TypeVar("T")


class UnknownWords(ValueError):
    """The tokenizer does not know most of the texts' tokens."""


class TooFewInputs(ValueError):
    """There are too few inputs to fit to some and to hold out others."""


class Calibration(list[dict[str, Tensor]]):
    """A list of batches that remembers their source.

    Args:
        batches: inputs of a model.
        source: name of the file or folder.
        kind: "texts", "pairs" or "images".
        items: number of texts, pairs or images in the batches.
        column: name of the column of the texts, or the two of pairs with a comma between them; None for plain lines and
            images.
        names: of held-out inputs, in the order of the batches: beginnings of texts, also of both texts of a pair, or
            paths of images in their folder.
        held_out: further inputs of the same source, all different and none of them among these, for measurements.
        more: batches of further texts, which are neither among these nor held out.
        pieces: tokens per word of the texts, None if there is no such figure.
        groups: of the texts or pairs of all three kinds, see splitting.py.
    """

    def __init__(
        self,
        batches: Iterable[dict[str, Tensor]],
        source: str,
        kind: str,
        items: int,
        column: str | None = None,
        *,
        names: Sequence[str] = (),
        held_out: Calibration | None = None,
        more: Iterable[dict[str, Tensor]] = (),
        pieces: float | None = None,
        groups: frozenset[Tokens] = frozenset(),
    ) -> None:
        super().__init__(batches)
        self.source, self.kind, self.items, self.column = source, kind, items, column
        self.names, self.held_out, self.more, self.pieces = names, held_out, list(more), pieces
        self.groups = groups

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column!r}"
        held = "" if self.held_out is None else f"; held out: {self.held_out.items:,}"
        return f"{self.items:,} {self.kind} of {printable(self.source)}{column}{held}"


def load_calibration(
    path: str | Path | None,
    processor: PreTrainedTokenizerBase | BaseImageProcessor,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    pairs: bool = False,
    max_length: int = 128,
    batch_size: int = 32,
    max_tokens: int = MAX_TOKENS,
    held_out: int = 0,
    more_tokens: int = 0,
    without: frozenset[Tokens] = frozenset(),
    seed: int = 0,
) -> Calibration:
    """Read a file of texts or a folder of images as batches of a model's inputs.

    Args:
        path: a file of `snnk.hf.data`, such as .jsonl, .csv, .tsv or .parquet; a folder of images; any other file has
            one text per line. None: the general text of snnk, which is English.
        processor: the model's tokenizer or image processor.
        text: column of the texts. Default: the first column of texts, which the result's `column` names.
        text_pair: column of second texts, for cross-encoders and classifiers of pairs. Default: there are no pairs.
        pairs: read the general text as pairs of neighbouring texts; a file has pairs if `text_pair` is given.
        max_length: tokens per input; the rest of a longer text is cut off, and of a pair the end of the longer text.
        batch_size: texts or images per batch at most.
        max_tokens: tokens in all; a sample of about this size is drawn from a longer file.
        held_out: inputs for measurements at most, which the result has apart, as its `held_out`. They are taken from
            what is left of a longer file, or else are a tenth of all inputs, and have half of `max_tokens` at most.
            None of them is read by the model as the same tokens as another input, and no pair has the first text of
            another part. There are none if all texts, or the first texts of all pairs, are the same.
        more_tokens: tokens of further texts, if the file has them, in the result's `more`; images have none.
        without: `groups` of another result, whose texts or pairs are left out.
        seed: of the sample and the order.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> path = Path(tempfile.mkdtemp()) / "lines.txt"
        >>> _ = path.write_text("one two\\n" * 40)
        >>> found = load_calibration(path, PreTrainedTokenizerFast(tokenizer_object=words))
        >>> print(found, "in", len(found), "batches like", list(found[0]["input_ids"].shape))
        40 texts of lines.txt in 20 batches like [2, 2]
        >>> path = Path(tempfile.mkdtemp()) / "pairs.csv"
        >>> _ = path.write_text("question,answer\\n" + "one two,two\\n" * 40)
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        >>> print(load_calibration(path, tokenizer, text="question", text_pair="answer"))
        40 pairs of pairs.csv, column 'question,answer'
    """
    path = None if path is None else Path(path)
    for value, name in ((max_length, "max_length"), (batch_size, "batch_size"), (max_tokens, "max_tokens")):
        _checks.positive_int(value, name)
    if isinstance(held_out, bool) or not isinstance(held_out, int) or held_out < 0:
        raise ValueError(f"held_out must be an integer of at least 0; got {held_out!r}")
    images = "pixel_values" in processor.model_input_names
    if path is None:
        if images:
            raise ValueError("there is no general calibration for images; name a folder of images like those in use")
        if columns := _named(text, text_pair):
            raise ValueError(f"the {GENERAL} has no columns; got {columns}: name a file that has, too")
    elif not path.exists():
        raise FileNotFoundError(f"no calibration file or folder {path}")
    elif path.is_dir() != images:
        wanted = "a folder of images" if images else "a file of texts"
        raise ValueError(f"the model is calibrated with {wanted}; {path} is a {'folder' if path.is_dir() else 'file'}")
    generator = random.Random(seed)
    tokenizer = image_processor = cast(Any, processor)
    if images and path is not None:
        return _images(path, image_processor, batch_size, max_tokens, held_out, generator)
    source: str | Path = path or GENERAL
    length = min(max_length, tokenizer.model_max_length)
    names: Texts = ()
    if path is None:
        size = 2 if pairs else 1
        drawn = general_texts((max_tokens + more_tokens) // SHORT + size * (held_out + FEWEST), seed=seed)
        chosen: list[Texts] = list(zip(*(drawn[i::size] for i in range(size)), strict=False))
    else:
        texts, names = _texts(path, text, text_pair)
        room = slice(-length * CHARACTERS, None) if tokenizer.truncation_side == "left" else slice(length * CHARACTERS)
        stripped = (tuple(text.strip()[room] for text in parts) for parts in texts)
        # a text has at least one token, so that more texts than tokens are never needed
        most = max_tokens + held_out + more_tokens
        chosen = _sample((parts for parts in stripped if all(parts)), most, generator)
        pairs = len(names) > 1
    kind, header = "pairs" if pairs else "texts", ",".join(names) or None
    if not chosen:
        raise ValueError(f"{source} is empty: there is no {'pair of texts' if pairs else 'text'} in it")
    _enough(len(chosen), source, kind)
    inputs = (one for one in read_inputs(tokenizer, chosen, length, batch_size) if one.group not in without)
    fitted = take(islice(inputs, len(chosen) - _reserved(len(chosen), held_out)), max_tokens, batch_size)
    _enough(len(fitted), source, f"{kind} with tokens")
    _known([one.row for one in fitted], source, tokenizer)
    limits = {"held_out": held_out, "max_tokens": max_tokens // 2, "more_tokens": more_tokens}
    fitted, tested, further = split(fitted, inputs, **limits, batch_size=batch_size)
    batches, more = (_batches(sorted(part, key=_length), tokenizer, batch_size) for part in (fitted, further))
    generator.shuffle(batches)
    generator.shuffle(more)
    tested.sort(key=_length)
    held = Calibration(
        _batches(tested, tokenizer, batch_size),
        Path(source).name,
        kind,
        len(tested),
        header,
        names=[_shown(one.texts) for one in tested],
    )
    whole, special = [one for one in fitted if _length(one) < length], set(tokenizer.all_special_ids)
    count = sum(token not in special for one in whole for token in one.tokens)
    return Calibration(
        batches,
        Path(source).name,
        kind,
        len(fitted),
        header,
        held_out=held if tested else None,
        more=more,
        pieces=pieces((text for one in whole for text in one.texts), count),
        groups=frozenset(one.group for one in (*fitted, *tested, *further)),
    )


def _shown(parts: Texts) -> str:
    """The beginning of a text, or of both texts of a pair, for reports."""
    most = (LONGEST - (len(parts) - 1) * len(BETWEEN)) // len(parts)
    return BETWEEN.join(text if len(text) <= most else f"{text[: most - 3]}..." for text in parts)


def _reserved(count: int, held_out: int) -> int:
    """Inputs that are held out even if the others have few tokens."""
    return max(0, min(held_out, count // 10, count - FEWEST))


def _batches(inputs: list[Input], tokenizer: PreTrainedTokenizerBase, batch_size: int) -> list[dict[str, Tensor]]:
    return [pad_texts([one.row for one in part], tokenizer) for part in _parts(inputs, batch_size)]


def _length(one: Input) -> int:
    return len(one.tokens)


def _sample(items: Iterable[T], most: int, generator: random.Random) -> list[T]:
    """A uniform sample without replacement, shuffled, in one pass (a reservoir)."""
    chosen: list[T] = []
    for i, item in enumerate(items):
        if i < most:
            chosen.append(item)
        elif (j := generator.randrange(i + 1)) < most:
            chosen[j] = item
    generator.shuffle(chosen)
    return chosen


def _enough(count: int, path: str | Path, what: str) -> None:
    if count < FEWEST:
        raise TooFewInputs(f"{path} has {count} {what}; at least {FEWEST} are needed, of which one in ten is held out")


def _known(rows: list[TokenRow], path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse texts of another language or script than the tokenizer's, and a tokenizer without its vocabulary."""
    unknown = tokenizer.unk_token_id
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
    special = {getattr(tokenizer, name, None) for name in names}
    if unknown is None or unknown in special:  # a tokenizer of bytes, which has no unknown ones
        return
    tokens = [token for row in rows for token in row["input_ids"] if token not in special]
    share = tokens.count(unknown) / max(len(tokens), 1)
    if share > MOST_UNKNOWN:
        raise UnknownWords(
            f"{share:.0%} of the tokens of {path} are unknown to the tokenizer, which has {len(tokenizer):,}; "
            "give texts like those that the model is used for, and check that the tokenizer's files are there"
        )


def _parts(items: list[T], batch_size: int) -> Iterator[list[T]]:
    size = max(1, min(batch_size, len(items) // PARTS))
    return (items[start : start + size] for start in range(0, len(items), size))


def _texts(path: Path, text: str | None, text_pair: str | None) -> tuple[Iterable[Texts], Texts]:
    """The texts or pairs of a file, read one by one, and the names of their columns; plain lines have none."""
    named = _named(text, text_pair)
    if file_format(path)[0] not in (*LINES, *ARROW):
        if named:
            raise ValueError(f"{path} is read as lines of text, without columns; got {named}: leave it out")
        return ((line,) for line in read_lines(path)), ()
    types = arrow_columns(path)
    strings = [name for name, is_string in types.items() if is_string]
    head = list(islice(read_rows(path, quoted=True, only=strings or None, at_once=HEAD), HEAD))
    if head and isinstance(head[0], str):  # JSONL of one string per line
        if named:
            raise ValueError(f"{path} has a string per line, without columns; got {named}: leave it out")
        return ((row,) for row in read_rows(path) if isinstance(row, str)), ()
    objects = [row for row in head if isinstance(row, dict)]
    if head and not objects:
        raise ValueError(f"{path} must have an object or a string per line; the first is {head[0]!r:.60}")
    columns = {**{name: [] for name in types}, **as_columns(objects, path)}
    first = text_column(columns, path, others=(text_pair,), strings=strings) if text is None else text
    names = (first,) if text_pair is None else (first, text_pair)
    for name in names:
        column_of(columns, name, path)
    return _strings(path, names, list(columns)), names


def _named(text: str | None, text_pair: str | None) -> str:
    """The columns that were given, in words; two must differ.

    Example:
        >>> _named("question", "answer"), _named(None, None)
        ("text 'question' and text_pair 'answer'", '')
    """
    given = {name: value for name, value in (("text", text), ("text_pair", text_pair)) if value is not None}
    for name, value in given.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be the name of a column; got {value!r}")
    if text is not None and text == text_pair:
        raise ValueError(f"text and text_pair must be two different columns; got {text!r} for both")
    return " and ".join(f"{name} {value!r}" for name, value in given.items())


def _strings(path: Path, names: Texts, columns: list[str]) -> Iterator[Texts]:
    found: set[str] = set()
    for row in read_rows(path, quoted=True, only=names):
        values = [row.get(name) for name in names] if isinstance(row, dict) else [None]
        found.update(name for name, value in zip(names, values, strict=False) if isinstance(value, str))
        texts = tuple(value for value in values if isinstance(value, str))
        if len(texts) == len(names):
            yield texts
    for name in names:
        if name not in found:
            raise ValueError(f"column {name!r} of {path} has no texts; its columns are {', '.join(columns)}")


def _images(
    path: Path, processor: BaseImageProcessor, batch_size: int, max_tokens: int, held_out: int, generator: random.Random
) -> Calibration:
    files = find_images(path)
    _enough(len(files), path, "images")
    generator.shuffle(files)
    batches, used = _read(files[: len(files) - _reserved(len(files), held_out)], processor, batch_size, max_tokens)
    held, count = _read(files[used:][:held_out], processor, batch_size, max_tokens // 2)
    names = [str(file.relative_to(path)) for file in files[used:][:count]]
    others = Calibration(held, path.name, "images", count, names=names) if count else None
    return Calibration(batches, path.name, "images", used, held_out=others)


def _read(
    files: list[Path], processor: BaseImageProcessor, batch_size: int, max_tokens: int
) -> tuple[list[dict[str, Tensor]], int]:
    """Batches of the first images, until they have enough tokens, and the number of these images."""
    batches: list[dict[str, Tensor]] = []
    count = tokens = 0
    for part in _parts(files, batch_size):
        batches.append(read_images(part, processor))
        count += len(part)
        height, width = batches[-1]["pixel_values"].shape[-2:]
        tokens += len(part) * max(1, height * width // PATCH)
        if tokens >= max_tokens and len(batches) >= FEWEST:
            break
    return batches, count
