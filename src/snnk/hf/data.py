"""Calibration inputs from files: lines of text, JSONL, CSV, Parquet, or a folder of images, as batches for a model.

Texts are sampled and shuffled by a seed, so that a file sorted by topic or length gives a fair sample; those of a batch
are then of similar length, so that little of it is padding; and the batches are shuffled, as `compress_` holds out
every tenth.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from snnk import _checks
from snnk._text import printable

IMAGES = (".png", ".jpg", ".jpeg")
FEWEST = 10  # inputs: one of ten is held out
PARTS = 20  # batches to have at least, so that what is held out is no single batch
MAX_TOKENS = 50_000
MOST_UNKNOWN = 0.5  # of the tokens
HEAD = 100  # rows by which columns of texts are told from others
T = TypeVar("T")


class Calibration(list[dict[str, Tensor]]):
    """Batches, and where they come from.

    Args:
        batches: inputs of a model.
        source: name of the file or folder.
        kind: "texts" or "images".
        items: how many of them are in the batches.
        column: of the file that the texts are in; None for plain lines and images.
    """

    def __init__(
        self, batches: Iterable[dict[str, Tensor]], source: str, kind: str, items: int, column: str | None = None
    ) -> None:
        super().__init__(batches)
        self.source, self.kind, self.items, self.column = source, kind, items, column

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column!r}"
        return f"{self.items:,} {self.kind} of {printable(self.source)}{column}"


def load_calibration(
    path: str | Path,
    processor: Any,
    *,
    column: str | None = None,
    max_length: int = 128,
    batch_size: int = 32,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
) -> Calibration:
    """Read a file of texts or a folder of images as batches of a model's inputs.

    Args:
        path: .jsonl, .csv, .tsv or .parquet; a folder of png and jpg images; any other file has one text a line.
        processor: the model's tokenizer or image processor.
        column: of the texts; else the first with strings, which the result's `column` names.
        max_length: tokens of one text; what comes after is cut off.
        batch_size: texts or images of a batch, at most.
        max_tokens: how many are enough; a sample of that size is taken from a longer file.
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
    """
    path = Path(path)
    for value, name in ((max_length, "max_length"), (batch_size, "batch_size"), (max_tokens, "max_tokens")):
        _checks.positive_int(value, name)
    if not path.exists():
        raise FileNotFoundError(f"no calibration file or folder {path}")
    wants_images = "pixel_values" in processor.model_input_names
    if path.is_dir() != wants_images:
        wanted = "a folder of images" if wants_images else "a file of texts"
        raise ValueError(f"the model is calibrated with {wanted}; {path} is a {'folder' if path.is_dir() else 'file'}")
    generator = random.Random(seed)
    if wants_images:
        return _images(path, processor, batch_size, max_tokens, generator)
    texts, column = _texts(path, column)
    # a text has a token at least, so that more texts than tokens are never needed
    chosen = _sample((text for text in map(str.strip, texts) if text), max_tokens, generator)
    if not chosen:
        raise ValueError(f"{path} is empty: there is no text in it")
    _enough(len(chosen), path, "texts")
    rows: list[dict[str, list[int]]] = []
    tokens, length = 0, min(max_length, processor.model_max_length)
    for start in range(0, len(chosen), batch_size):
        found = processor(chosen[start : start + batch_size], truncation=True, max_length=length)
        rows += [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
        tokens += sum(map(len, found["input_ids"]))
        if tokens >= max_tokens and len(rows) >= FEWEST:
            break
    rows = sorted((row for row in rows if row["input_ids"]), key=lambda row: len(row["input_ids"]))
    _enough(len(rows), path, "texts with tokens")
    _known(rows, path, processor)
    batches = [pad_texts(part, processor) for part in _parts(rows, batch_size)]
    generator.shuffle(batches)
    return Calibration(batches, path.name, "texts", len(rows), column)


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


def _enough(count: int, path: Path, what: str) -> None:
    if count < FEWEST:
        raise ValueError(f"{path} has {count} {what}; at least {FEWEST} are needed, of which one in ten is held out")


def _known(rows: list[dict[str, list[int]]], path: Path, processor: Any) -> None:
    """Refuse texts of another language or script than the tokenizer's, and a tokenizer without its vocabulary."""
    unknown = processor.unk_token_id
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
    special = {getattr(processor, name, None) for name in names}
    if unknown is None or unknown in special:  # of bytes, which know everything
        return
    tokens = [token for row in rows for token in row["input_ids"] if token not in special]
    share = tokens.count(unknown) / max(len(tokens), 1)
    if share > MOST_UNKNOWN:
        raise ValueError(
            f"{share:.0%} of the tokens of {path} are unknown to the tokenizer, which has {len(processor):,}; "
            "give texts such as the model is used for, and check that the tokenizer's files are there"
        )


def _parts(items: list[T], batch_size: int) -> Iterator[list[T]]:
    size = max(1, min(batch_size, len(items) // PARTS))
    return (items[start : start + size] for start in range(0, len(items), size))


def pad_id(processor: Any) -> int:
    """The token that batches are filled up with: the tokenizer's for padding, else for the end of a text, else 0."""
    return next((int(i) for i in (processor.pad_token_id, processor.eos_token_id) if i is not None), 0)


def pad_texts(rows: list[dict[str, list[int]]], processor: Any) -> dict[str, Tensor]:
    """One batch, padded on the right; by hand, as the tokenizer of a GPT has no padding and is not to be changed."""
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": pad_id(processor)}
    batch = {
        key: torch.tensor([row[key] + [fill.get(key, 0)] * (width - len(row[key])) for row in rows]) for key in rows[0]
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch.setdefault("attention_mask", (torch.arange(width) < lengths[:, None]).long())
    return batch


def _texts(path: Path, column: str | None) -> tuple[Iterable[str], str | None]:
    """The texts of a file, read as they are asked for, and the column that they are in."""
    read = READERS.get(path.suffix.lower())
    if read is not None:
        return read(path, column)
    if column is not None:
        raise ValueError(f"{path} is read as lines of text, without columns; got column {column!r}")
    return _lines(path), None


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def _jsonl(path: Path, column: str | None) -> tuple[Iterable[str], str | None]:
    def rows() -> Iterator[Any]:
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
                    raise ValueError(f"{path}, line {number}, is no JSON: {error}") from error

    head = [row for row, _ in zip(rows(), range(HEAD), strict=False)]
    if not head:
        return (), column
    if isinstance(head[0], str) and column is None:  # a string a line
        return (row for row in rows() if isinstance(row, str)), None
    objects = [row for row in head if isinstance(row, Mapping)]
    if not objects:
        raise ValueError(f"{path} must have an object or a string a line; the first is {head[0]!r:.60}")
    strings = {key: any(isinstance(row.get(key), str) for row in objects) for row in objects for key in row}
    name = _column(path, strings, column)
    values = (row.get(name) for row in rows() if isinstance(row, Mapping))
    return (value for value in values if isinstance(value, str)), name


def _csv(path: Path, column: str | None) -> tuple[Iterable[str], str | None]:
    def rows() -> Iterator[dict[str, str]]:
        # lines are joined again by csv where a quoted value has a line break
        try:
            yield from csv.DictReader(_lines(path), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        except csv.Error as error:
            raise ValueError(f"{path} cannot be read as CSV: {error}") from error

    csv.field_size_limit(2**31 - 1)  # of Python 131,072 characters: a long document has more

    head = [row for row, _ in zip(rows(), range(HEAD), strict=False)]
    if not head:
        return (), column
    strings = {key: any(not _number(row[key] or "") for row in head) for key in head[0] if key is not None}
    name = _column(path, strings, column)
    return (row[name] or "" for row in rows()), name


def _number(text: str) -> bool:
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


def _parquet(path: Path, column: str | None) -> tuple[Iterable[str], str | None]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as missing:
        raise ValueError(f"reading {path} needs pyarrow; install it with: pip install 'snnk[tables]'") from missing
    try:
        file = pq.ParquetFile(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error

    def is_string(kind: Any) -> bool:
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        return bool(pa.types.is_string(plain) or pa.types.is_large_string(plain))

    name = _column(path, {field.name: is_string(field.type) for field in file.schema_arrow}, column)

    def values() -> Iterator[str]:
        try:
            for part in file.iter_batches(columns=[name]):
                yield from (value or "" for value in part.column(0).to_pylist())
        except (OSError, ValueError, pa.ArrowException) as error:  # a damaged page, or bytes that are no UTF-8
            raise ValueError(f"{path}, column {name!r}, cannot be read: {error}") from error

    return values(), name


def _column(path: Path, strings: Mapping[str, bool], wanted: str | None) -> str:
    """The column named, or the first of strings."""
    told = f"the columns of {path} are {', '.join(strings)}"
    if wanted is None:
        found = next((name for name, is_string in strings.items() if is_string), None)
        if found is None:
            raise ValueError(f"no column has texts; {told}")
        return found
    if not strings.get(wanted):
        fault = f"column {wanted!r} has no texts" if wanted in strings else f"no column {wanted!r}"
        raise ValueError(f"{fault}; {told}")
    return wanted


READERS: dict[str, Callable[[Path, str | None], tuple[Iterable[str], str | None]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}


def _images(path: Path, processor: Any, batch_size: int, max_tokens: int, generator: random.Random) -> Calibration:
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES)
    if not files:
        raise ValueError(f"{path} has no images, which end in {', '.join(IMAGES)}")
    _enough(len(files), path, "images")
    generator.shuffle(files)
    batches: list[dict[str, Tensor]] = []
    count = tokens = 0
    for part in _parts(files, batch_size):
        pixels = processor(images=[open_image(file) for file in part], return_tensors="pt")["pixel_values"]
        batches.append({"pixel_values": pixels})
        count += len(part)
        tokens += pixels.shape[0] * max(1, pixels.shape[-1] * pixels.shape[-2] // 256)  # as compress_ counts them
        if tokens >= max_tokens and len(batches) >= FEWEST:
            break
    return Calibration(batches, path.name, "images", count)


def open_image(file: Path) -> Any:
    from PIL import Image

    if not file.is_file():  # a pipe would never end
        raise ValueError(f"{file} is no image, but a folder, a pipe, a device or a link to nothing; remove it")
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} cannot be read as an image: {error}") from error
