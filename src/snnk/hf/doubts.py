"""Doubts in words: too few calibration inputs, another language than the model's, one kind alone, or a late model.

Each function returns a sentence with figures and advice, or None. English texts of five kinds had 1.15 to 1.34 tokens
per word in two tokenizers, code and other languages 1.8 and more. The other limits are rules of thumb;
`benchmarks/calibration.py --few` measures errors by the number of texts.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FEW = 20  # tokens per feature of the largest block
SCARCE = 100  # inputs that agreement is measured on
ONE_CLASS = 0.98  # of the predictions
BROKEN = 1.4  # tokens per word, in parts of those of general text
NARROW, LEAST = 2.0, 0.02  # loss on general text, in parts of the loss on the given inputs, and beyond that
ALIKE = ("cosine", "same best", "same next token", "Spearman")  # figures of which 1 is the best
BUSY = 0.2  # part of a measurement in which the process did not run
LATE = 1.1  # measured latency, in parts of the predicted one
WIDE = 0.3  # part of characters of scripts without spaces, from which on words cannot be counted


def few(tokens: int, features: int, texts: int) -> str | None:
    """Too few tokens for the largest number of features that is fitted.

    Example:
        >>> few(2000, 384, 150)  # doctest: +ELLIPSIS
        '150 inputs with 2,000 tokens are few for blocks of 384 features...give 580 or more...'
        >>> few(20000, 384, 1500) is None
        True
    """
    if tokens >= FEW * features:
        return None
    wanted = -(-FEW * features * texts // max(tokens, 1))
    return (
        f"{texts:,} inputs with {tokens:,} tokens are few for blocks of {features} features: their errors on other "
        f"inputs are larger than they seem here; give {-(-wanted // 10) * 10:,} or more"
    )


def scarce(inputs: int, kind: str) -> str | None:
    """Too few inputs to measure on: a mean of them is rough, and the worst of them is not the worst in use.

    Example:
        >>> scarce(15, "texts")  # doctest: +ELLIPSIS
        'agreement is measured on 15 held-out texts: ... give 1,000 texts or more'
        >>> scarce(500, "texts") is None
        True
    """
    if inputs >= SCARCE:
        return None
    return (
        f"agreement is measured on {inputs} held-out {kind}: figures of so few are rough, and the worst of them is not "
        f"the worst in use; give 1,000 {kind} or more"
    )


def one_class(classes: Sequence[Mapping[str, Any]]) -> str | None:
    """Almost all predictions are one class, as for general text: a model that always predicts it would agree, too.

    Example:
        >>> one_class([{"label": "yes", "count": 1}, {"label": "no", "count": 499}])  # doctest: +ELLIPSIS
        "the original predicts 'no' for 499 of 500 held-out inputs, ... of which it predicts other classes, too"
        >>> one_class([{"label": "yes", "count": 250}, {"label": "no", "count": 250}]) is None
        True
    """
    counts = {found["label"]: found["count"] for found in classes}
    total, most = sum(counts.values()), max(counts, key=counts.__getitem__, default=None)
    if total == 0 or counts[most] < ONE_CLASS * total:
        return None
    return (
        f"the original predicts {most!r} for {counts[most]:,} of {total:,} held-out inputs, so that agreement on them "
        "hardly shows what was lost; give inputs of which it predicts other classes, too"
    )


def one_sided(encoder_decoder: bool) -> str | None:
    """A decoder behind an encoder, which is left alone.

    Example:
        >>> one_sided(True)
        'the encoder alone is compressed: the decoder behind it stays as it is, and takes its time as before'
    """
    if not encoder_decoder:
        return None
    return "the encoder alone is compressed: the decoder behind it stays as it is, and takes its time as before"


def unreached(layers: int, kind: str) -> str | None:
    """Layers that do not run for the inputs, as those for images do not if there are texts only.

    Example:
        >>> unreached(12, "texts")
        '12 layers do not run for texts alone, such as those for another kind of input: they stay as they are'
    """
    if not layers:
        return None
    return (
        f"{layers} layers do not run for {kind} alone, such as those for another kind of input: they stay as they are"
    )


def alike(kind: str, held_out: bool) -> str | None:
    """Nothing to measure on but what the model was fitted to.

    Example:
        >>> alike("texts", held_out=False)  # doctest: +ELLIPSIS
        'the model reads all texts as the same tokens: agreement is measured on inputs that it was fitted to; ...'
    """
    if held_out or kind == "images":
        return None
    same = "the model reads all texts as the same tokens" if kind == "texts" else "all pairs have the same first text"
    return f"{same}: agreement is measured on inputs that it was fitted to; give different {kind}"


def single(pairs: bool, kind: str) -> str | None:
    """Single texts for a model that reads pairs.

    Example:
        >>> single(True, "texts")  # doctest: +ELLIPSIS
        'the model reads pairs of texts, and is fitted to single texts here: ...'
    """
    if not pairs or kind == "pairs":
        return None
    return (
        "the model reads pairs of texts, and is fitted to single texts here: its errors on pairs may be much larger; "
        "give a file of pairs, and name its two columns"
    )


def pieces(texts: Iterable[str], tokens: int) -> float | None:
    """Tokens per word; None for scripts without spaces between words.

    Example:
        >>> pieces(["one two", "three"], 6), pieces(["\u4eca\u5929"], 2)
        (2.0, None)
    """
    words = letters = wide = 0
    for text in texts:
        words += len(text.split())
        letters += len(text)
        wide += sum(unicodedata.east_asian_width(c) in "WF" for c in text) if not text.isascii() else 0
    return tokens / words if words and wide < WIDE * letters else None


def broken(given: float | None, general: float | None) -> str | None:
    """Words that the tokenizer breaks into many pieces: another language than the model's, code, or identifiers.

    Example:
        >>> broken(2.5, 1.2)  # doctest: +ELLIPSIS
        'the tokenizer breaks the words of the texts into 2.5 pieces on average, and those of general English text...'
    """
    if given is None or general is None or given <= BROKEN * general:
        return None
    return (
        f"the tokenizer breaks the words of the texts into {given:.1f} pieces on average, and those of general English "
        f"text into {general:.1f}: the texts may be in a language that the model was not made for, or be no sentences; "
        "check the file and its column"
    )


def narrow(given: Mapping[str, Any], general: Mapping[str, Any]) -> str | None:
    """A larger loss on general text than on the given texts, by the first figure that both have.

    Args:
        given, general: figures of agreement by name.

    Example:
        >>> narrow({"cosine": 0.95}, {"cosine": 0.8})  # doctest: +ELLIPSIS
        'the compressed model is close to the original on texts like these (cosine 0.950) and less so on general...'
    """
    name = next((name for name in given if name in general and name.rpartition(": ")[2] in ALIKE), None)
    if name is None or 1 - general[name] <= NARROW * (1 - given[name]) + LEAST:
        return None
    return (
        f"the compressed model is close to the original on texts like these ({name} {given[name]:.3f}) and less so on "
        f"general text ({general[name]:.3f}): for other uses, add texts of more kinds"
    )


def ruined(figures: Mapping[str, Any]) -> str | None:
    """Numbers that a constant would approximate better.

    Example:
        >>> ruined({"relative squared error": 1.5})  # doctest: +ELLIPSIS
        'the error of the outputs is 1.50 times their variance, and a constant has 1: ...'
        >>> ruined({"cosine": 0.9}) is None
        True
    """
    error = figures.get("relative squared error", 0.0)
    if error < 1:
        return None
    return (
        f"the error of the outputs is {error:.2f} times their variance, and a constant has 1: keep more of the model, "
        "or give more inputs"
    )


def busy(waited: float, threads: int) -> str | None:
    """Other work on the machine while times were measured; those of one thread do not count the waiting.

    Example:
        >>> busy(0.5, 2)  # doctest: +ELLIPSIS
        'the process waited for 50 % of the time in which times were measured: other programs used the processor, ...'
        >>> busy(0.5, 1)  # doctest: +ELLIPSIS
        'the process waited ... programs used the processor. Its own processor time does not count the waiting, but...'
        >>> busy(0.1, 2) is None
        True
    """
    if waited <= BUSY:
        return None
    found = (
        f"the process waited for {100 * waited:.0f} % of the time in which times were measured: other programs used "
    )
    if threads == 1:
        return (
            f"{found}the processor. Its own processor time does not count the waiting, but caches are shared, and wall "
            "times are longer than on an idle machine"
        )
    return f"{found}the processor, and the latency on an idle machine is another one; measure again when it is idle"


def unsteady(spread: float, wanted: float) -> str | None:
    """Times that differ from round to round.

    Example:
        >>> unsteady(0.05, 0.01)  # doctest: +ELLIPSIS
        'times are known within 5.0 % (standard error) and not within 1.0 %, as they differ from round to round; ...'
        >>> unsteady(0.01, 0.01) is None
        True
    """
    if spread <= wanted:
        return None
    return (
        f"times are known within {100 * spread:.1f} % (standard error) and not within {100 * wanted:.1f} %, as they "
        "differ from round to round; allow more rounds, or measure when the machine is idle"
    )


def clipped(asked: int, measured: int) -> str | None:
    """Times for shorter texts than those that were asked for.

    Example:
        >>> clipped(1024, 512)
        'times were measured for texts of 512 tokens, the most that the model has positions for, and not of 1024'
    """
    if asked <= measured:
        return None
    return (
        f"times were measured for texts of {measured} tokens, the most that the model has positions for, and not of "
        f"{asked}"
    )


def merged(folder: Path) -> str | None:
    """A model whose SNNK adapter `snnk.finetune.merge` has replaced by the nearest one that can be merged."""
    file = folder / "metrics.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["merged"]
        exact, explained, loss, inputs = (found.get(name) for name in ("exact", "explained", "loss", "held_out"))
        if exact is not False:
            return None
        return (
            f"the SNNK adapter was merged as the nearest LoRA adapter, which explains {explained:.1%} of its effect; "
            f"this loses {loss:.4f} on {inputs:,} held-out inputs, and agreement is with the merged model"
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # another program's file, or none
        return None


def padded(asked: str, saved: Mapping[str, Any], most: float) -> str | None:
    """A plain model that was asked for, and that there is none of, or none without many zeros.

    Example:
        >>> padded("plain", {"format": "plain", "padding": 0.2, "reason": "zeros add 20%"}, 0.05)
        'the plain model is larger than the compressed one: zeros add 20%; a larger max_error would replace all blocks'
        >>> padded("auto", {"format": "snnk", "padding": 0.0, "reason": "a block is linear"}, 0.05) is None
        True
    """
    if asked != "plain":
        return None
    if saved["format"] != "plain":
        return f"the model is not plain, though that was asked for: {saved['reason']}"
    if saved["padding"] <= most:
        return None
    return (
        f"the plain model is larger than the compressed one: {saved['reason']}; a larger max_error would replace all "
        "blocks"
    )


def untimed(error: Exception) -> str:
    """The latency for which the plan was made could not be measured.

    Example:
        >>> untimed(RuntimeError("no memory"))
        'the latency of the compressed model could not be measured: no memory; that of the plan is a prediction'
    """
    return f"the latency of the compressed model could not be measured: {error}; that of the plan is a prediction"


def late(predicted: float, measured: float) -> str | None:
    """A latency above the one that the plan was made for.

    Example:
        >>> late(0.003, 0.004)  # doctest: +ELLIPSIS
        'the latency is 4.00 ms, and 3.00 ms were predicted from times of blocks: ...'
    """
    if measured <= LATE * predicted:
        return None
    return (
        f"the latency is {1e3 * measured:.2f} ms, and {1e3 * predicted:.2f} ms were predicted from times of blocks: "
        "the machine may have been busier in the end, or a plan for another machine was used; measure again, or "
        "choose a harder target"
    )
