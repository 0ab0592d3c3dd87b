"""`predict`: the classes, numbers or scores that a model gives to the rows of a file, written to a new file.

Rows are read, run and written in parts of PART rows, so that the memory does not depend on the length of the file. The
rows of a part are run in batches of similar length, and written in their own order.

| model | columns of the output |
|---|---|
| classes, of which one holds | `predicted_<label>`, and one `probability_<class>` per class (softmax) |
| classes, of which several may hold | one `probability_<class>` per class (sigmoid) |
| a number (`snnk finetune` on numbers) | `predicted_<label>` |
| one output of any other model, such as a reranker | `score`, which is that of sentence-transformers' CrossEncoder |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snnk import _checks, _io, _rows
from snnk.finetune.data import as_number, class_name
from snnk.finetune.loading import is_tuned, load, read_metrics
from snnk.hf.data import (
    HEAD,
    arrow_schema,
    as_columns,
    find_images,
    pad_texts,
    read_images,
    read_rows,
    text_column,
    tokenize,
)
from snnk.hf.folders import find_folder, find_transformer, is_cross_encoder
from snnk.hf.models import (
    class_of,
    load_model,
    load_processor,
    place,
    quiet,
    read_config,
    reads_pairs,
    set_padding,
    token_limit,
)

PART = 2048  # rows that are in memory together
LONGEST = 512  # tokens per row, if neither model nor tokenizer has a limit
TEXTS, IMAGES = "ForSequenceClassification", "ForImageClassification"  # endings of the classes of transformers
# the outputs of a cross-encoder, by the class that its files name
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
    "torch.nn.modules.activation.Tanh": torch.tanh,
}
Columns = dict[str, list[Any]]


class RowPredictions(NamedTuple):
    """The result of `predict`.

    `score` is {"accuracy": ...} or {"R2": ...} if rows have labels, `scored` is the number of rows that it is computed
    on, and `unknown` the number of those whose labels are no class of the model, or no numbers: these are left out.
    """

    rows: int
    score: dict[str, float]
    scored: int = 0
    unknown: int = 0


@dataclass(frozen=True)
class Predictor:
    """A model with what is needed to read rows and to name its outputs.

    Args:
        model, processor: in eval mode, and its tokenizer or image processor.
        images: whether it reads images.
        text, text_pair: columns of the texts; None for the first column of texts, and for no pairs.
        pairs: whether the model reads pairs of texts for certain.
        label: name of what is predicted; a column with this name has the true values.
        names: classes; None if the output is a number.
        activate: logits (n, classes) or (n, 1) -> probabilities, numbers or scores of the same shape.
        several: whether several classes may hold.
        scores: whether the number is a score that has no label.
        max_length: tokens per row.
        spare: of `read_rows`.
    """

    model: Any
    processor: Any
    images: bool
    text: str | None
    text_pair: str | None
    pairs: bool
    label: str
    names: tuple[str, ...] | None
    activate: Callable[[Tensor], Tensor]
    several: bool = False
    scores: bool = False
    max_length: int = LONGEST
    spare: bool = False

    def columns(self, outputs: Tensor) -> Columns:
        """The columns of the output for logits (n, classes) or (n, 1)."""
        values = self.activate(outputs.double()).float().numpy()
        shown = [_rows.digits(column) for column in values.T]
        if self.names is None:
            return {"score" if self.scores else f"predicted_{self.label}": shown[0]}
        classes = {f"probability_{name}": column for name, column in zip(self.names, shown, strict=True)}
        if self.several:
            return classes
        return {f"predicted_{self.label}": [self.names[i] for i in outputs.argmax(1).tolist()], **classes}

    def run(self, inputs: Columns, batch_size: int, first: int, source: object) -> Tensor:
        """Logits of the rows of a part, (n, classes) or (n, 1); `first` and `source` are for errors."""
        if self.images:
            rows: list[Any] = inputs["file"]
            lengths, collate = [1] * len(rows), lambda part: read_images(part, self.processor)
        else:
            texts = [["" if text is None else str(text) for text in column] for column in inputs.values()]
            rows = tokenize(self.processor, *texts, max_length=self.max_length)
            lengths, collate = [len(row["input_ids"]) for row in rows], lambda part: pad_texts(part, self.processor)
            if 0 in lengths:
                raise ValueError(
                    f"the text of row {first + lengths.index(0) + 1} of {source} has no tokens; leave it out"
                )
        order = sorted(range(len(rows)), key=lambda i: -lengths[i])
        found = []
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                batch = collate([rows[i] for i in order[start : start + batch_size]])
                found.append(self.model(**place(batch, self.model)).logits.float().cpu())
        outputs = torch.empty_like(logits := torch.cat(found))
        outputs[order] = logits
        wrong = ~outputs.isfinite().all(1)
        if bool(wrong.any()):
            raise ValueError(f"the output for row {first + int(wrong.int().argmax()) + 1} of {source} is not finite")
        return outputs


@quiet()
def predict(
    model: str | Path,
    data: str | Path,
    *,
    out: str | Path,
    base: str | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    key: str | Sequence[str] = (),
    batch_size: int = 32,
    max_length: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RowPredictions:
    """Write the predictions of a classifier, a regression or a reranker for all rows of a file to a new file.

    Args:
        model: folder of `finetune`, of `snnk.hf.compress` or of a Hugging Face model with a head for classes, also a
            cross-encoder of sentence-transformers; or a name on the hub.
        data: .csv, .tsv, .jsonl (each also as .gz), .parquet, .arrow; or a folder of images.
        out: new file, .csv, .jsonl or .parquet, with one line per row, in the same order. For images, its first column
            is `file`. NaN and infinity in key columns are null in .jsonl, as JSON has neither.
        base: of `load`, for an adapter.
        text, text_pair: columns of the texts. Default: those of the training; otherwise the first column of texts, and
            no second one.
        key: columns that are copied into the output, as a list or with commas between them.
        batch_size: rows that the model reads together.
        max_length: tokens per row. Default: as in the training; otherwise the limit of the tokenizer and of the model.
        progress: called with the rows that are done and the number of rows, or 0 if that is unknown.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
        >>> folder, words = Path(tempfile.mkdtemp()), {"[UNK]": 0, "one": 1, "two": 2}
        >>> tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")  # doctest: +ELLIPSIS
        (...)
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> BertForSequenceClassification(BertConfig(vocab_size=3, **sizes)).save_pretrained(folder / "model")
        >>> _ = (folder / "rows.csv").write_text("id,text\\n7,one\\n8,two two\\n")
        >>> predict(folder / "model", folder / "rows.csv", out=folder / "found.csv", key="id").rows
        2
        >>> (folder / "found.csv").read_text().splitlines()[0]
        'id,predicted_label,probability_LABEL_0,probability_LABEL_1'
    """
    data, out = Path(data), Path(out)
    keys = _rows.key_names(key)
    _checks.positive_int(batch_size, "batch_size")
    _io.check_out(out)
    _rows.check_output(out)
    if not data.exists():
        raise FileNotFoundError(
            f"no file or folder {data}; expected .csv, .tsv, .jsonl, .parquet or a folder of images"
        )
    predictor = open_model(model, base, text, text_pair, max_length)
    if predictor.images != data.is_dir():
        needed = "a folder of images" if predictor.images else "a file of texts"
        raise ValueError(f"{model} reads {needed}; got {data}")
    parts, total, types = _image_parts(data) if predictor.images else _text_parts(predictor, data, keys)
    if torch.cuda.is_available():
        predictor.model.to("cuda")
    done, score = 0, _Score(predictor.names)
    with ExitStack() as held:
        write: Any = None
        for inputs, kept, labels in parts:
            outputs = predictor.run(inputs, batch_size, done, data)
            found = predictor.columns(outputs)
            if labels is not None and not predictor.several:
                score.add(labels, next(iter(found.values())))
            _rows.check_keys([*kept], [*found], data)
            if write is None:  # only now is it certain that the file and the model fit together
                write = held.enter_context(
                    _rows.writing(out, types, () if predictor.images else keys, predictor.names or ())
                )
            write({**kept, **found})
            done += len(outputs)
            progress(done, total)
        if write is None:
            raise ValueError(f"{data} is empty: it has no rows")
    return RowPredictions(done, score.result(), score.count, score.unknown)


def open_model(
    model: str | Path, base: str | None, text: str | None, text_pair: str | None, max_length: int | None
) -> Predictor:
    """The model of a folder or of the hub, with the columns and the length that its training recorded, if any."""
    root = find_folder(str(model))
    if is_tuned(root):
        facts = read_metrics(root)
        described = facts.get("data", {})
        network, processor = load(root, base=base)
        names = facts["labels"]
        text, text_pair = text or described.get("text"), text_pair or described.get("text_pair")
        most = max_length or described.get("max_length") or facts["config"].get("max_length")
        return Predictor(
            *(network, processor, facts["images"], text, text_pair, text_pair is not None),
            label=str(described.get("label") or "label"),
            names=None if names is None else tuple(names),
            activate=_same if names is None else _softmax,
            max_length=_limit(network, processor, most),
            spare=bool(described.get("task")),
        )
    if base is not None:
        raise ValueError(f"base is for adapters of snnk finetune; {model} is none, leave out base {base}")
    folder = root / find_transformer(root)
    config: Any = read_config(folder)
    kind = class_of(config)
    named = "no class" if kind is None else kind.__name__
    if kind is None or not named.endswith((TEXTS, IMAGES)):
        raise ValueError(
            f"{model} has {named} in its config.json, which has no head for classes; expected a class that ends in "
            f"{TEXTS} or {IMAGES}, or a folder of snnk finetune or snnk fit"
        )
    images = named.endswith(IMAGES)
    network = load_model(folder, dtype=torch.float32).model
    processor = load_processor(folder, images, vocab_size=getattr(config, "vocab_size", None) or 0)
    if not images:
        set_padding(network, processor)
    pairs = reads_pairs(config) or is_cross_encoder(root)
    limit = _limit(network, processor, max_length)
    opened = (network, processor, images, text, text_pair, pairs, "label")
    if config.num_labels == 1:
        number = config.problem_type == "regression" and not pairs
        activate = _same if number else _activation(root, config)
        return Predictor(*opened, None, activate, scores=not number, max_length=limit)
    names = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    if len(set(names)) < len(names):
        raise ValueError(f"{folder / 'config.json'} gives several classes one name; change its id2label")
    several = config.problem_type == "multi_label_classification"
    return Predictor(*opened, names, torch.sigmoid if several else _softmax, several, max_length=limit)


def _same(logits: Tensor) -> Tensor:
    return logits


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _activation(folder: Path, config: Any) -> Callable[[Tensor], Tensor]:
    """The function that sentence-transformers' CrossEncoder applies to the one output of a model."""
    file = folder / "config_sentence_transformers.json"
    found: Any = _io.read_json(file, "the settings of sentence-transformers") if file.is_file() else None
    marks = getattr(config, "sentence_transformers", None)
    for settings in (found, marks):
        if isinstance(settings, Mapping) and settings.get("activation_fn") is not None:
            name = settings["activation_fn"]
            break
    else:
        name = getattr(config, "sbert_ce_default_activation_function", None)
    if name is None:
        return torch.sigmoid
    known = ACTIVATIONS | {f"torch.nn.{full.rpartition('.')[2]}": function for full, function in ACTIVATIONS.items()}
    if name not in known:
        raise ValueError(f"{folder} names the activation {str(name)[:80]!r}; expected one of {', '.join(ACTIVATIONS)}")
    return known[name]


def _limit(model: Any, processor: Any, most: int | None) -> int:
    """Tokens per row: what is asked for, within the limits of tokenizer and model."""
    limits = [most, getattr(processor, "model_max_length", None), token_limit(model.config.get_text_config())]
    return int(min([limit for limit in limits if limit is not None and limit < 1 << 20], default=LONGEST))


Part = tuple[Columns, Columns, list[Any] | None]  # inputs of the model, kept columns, and labels if there are any


def _image_parts(folder: Path) -> tuple[Iterator[Part], int, dict[str, Any]]:
    files = find_images(folder)
    starts = range(0, len(files), PART)
    parts = (files[start : start + PART] for start in starts)
    rows = (({"file": part}, {"file": [f.relative_to(folder).as_posix() for f in part]}, None) for part in parts)
    return rows, len(files), {}


def _text_parts(predictor: Predictor, file: Path, keys: list[str]) -> tuple[Iterator[Part], int, dict[str, Any]]:
    """Parts of a file, the number of its rows or 0, and the Arrow types of its key columns, if it has them."""
    schema, total = arrow_schema(file)
    head = as_columns(islice(read_rows(file, spare=predictor.spare, at_once=HEAD), HEAD), file)
    if not head:
        raise ValueError(f"{file} is empty: it has no rows")
    text, pair = predictor.text, predictor.text_pair
    if predictor.pairs and pair is None:
        raise ValueError(
            f"the model reads pairs of texts; name both columns with text and text_pair (--text, --text-pair). The "
            f"columns of {file} are {', '.join(head)}"
        )
    if text is None:
        text = text_column(head, file, others=(pair, *keys))
    texts = [text] if pair is None else [text, pair]
    absent = [name for name in (*texts, *keys) if name not in head]
    if absent:
        raise ValueError(
            f"no column {', '.join(map(repr, absent))} in {file}; its columns are {', '.join(head)}. Texts are read "
            f"from {' and '.join(map(repr, texts))}; text and text_pair (--text, --text-pair) name others"
        )
    label = predictor.label if predictor.label in head and not predictor.scores else None
    needed = list(dict.fromkeys([*texts, *keys, *([] if label is None else [label])]))

    def parts() -> Iterator[Part]:
        rows = read_rows(file, spare=predictor.spare, only=needed, at_once=PART)
        for first, part in _chunks(rows, PART):
            found = as_columns(part, f"{file}, from row {first + 1} on")
            columns = {name: found.get(name, [None] * len(part)) for name in needed}
            inputs = {name: columns[column] for name, column in zip(("text", "pair"), texts, strict=False)}
            yield inputs, {name: columns[name] for name in keys}, None if label is None else columns[label]

    # a column that the model adds may have the name of another one in the file, of another type
    return parts(), total, {field.name: field.type for field in schema or () if field.name in keys}


def _chunks(rows: Iterable[Any], size: int) -> Iterator[tuple[int, list[Any]]]:
    """(index of its first row, rows) of each part."""
    rows, first = iter(rows), 0
    while part := list(islice(rows, size)):
        yield first, part
        first += len(part)


class _Score:
    """Accuracy or R2, from sums over the rows with a known label."""

    def __init__(self, names: Sequence[str] | None) -> None:
        self.names = None if names is None else set(names)
        self.count, self.unknown, self.loss = 0, 0, 0.0
        self.total, self.squares, self.origin = 0.0, 0.0, 0.0

    def add(self, labels: list[Any], found: list[Any]) -> None:
        given = [(y, guess) for y, guess in zip(labels, found, strict=True) if y is not None and y == y and y != ""]
        if self.names is not None:
            known = [(class_name(y), guess) for y, guess in given if class_name(y) in self.names]
            self.loss += sum(y == guess for y, guess in known)
            self.count += len(known)
            self.unknown += len(given) - len(known)
            return
        numbers = [(number, guess) for y, guess in given if (number := as_number(y)) is not None]
        if numbers and not self.count:
            self.origin = numbers[0][0]  # about it, sums of squares keep their digits
        self.count += len(numbers)
        self.unknown += len(given) - len(numbers)
        for y, guess in numbers:
            self.loss += (y - guess) ** 2
            self.total += y - self.origin
            self.squares += (y - self.origin) ** 2

    def result(self) -> dict[str, float]:
        if not self.count:
            return {}
        if self.names is not None:
            return {"accuracy": self.loss / self.count}
        variation = self.squares - self.total**2 / self.count
        return {"R2": 1 - self.loss / variation if variation > 0 else 0.0}
