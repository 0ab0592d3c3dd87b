"""Figures of agreement in words: one list for the page, the model card and the terminal.

A set is one entry of "held_out" in report.json, which `measure` in agreement.py returns: the figures of one source of
inputs that nothing was fitted to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snnk.hf.compression.agreement import LOW_IS_WORSE

# Name and meaning of each figure.
WORDS = {
    "cosine": (
        "mean cosine",
        "Cosine between the outputs of both models for the same input; 1 is best.",
    ),
    "same nearest": (
        "same nearest neighbour (top-1)",
        "Part of the inputs whose nearest neighbour among these inputs, by cosine, is the same for both models.",
    ),
    "ten nearest in common": (
        "ten nearest in common (top-10)",
        "Part of the ten nearest neighbours of an input among these inputs that is the same for both models.",
    ),
    "rank agreement": (
        "rank agreement",
        "Spearman correlation between both models' similarities of pairs of inputs; 1 is best.",
    ),
    "same best": (
        "same prediction",
        "Part of the inputs, or of their tokens, for which both models have the same most likely class.",
    ),
    "KL divergence": (
        "KL divergence",
        "Kullback-Leibler divergence of the second model's probabilities from the first's, in nats; 0 is best.",
    ),
    "Pearson": ("correlation (Pearson)", "Between the numbers that both models return; 1 is best."),
    "Spearman": ("same order (Spearman)", "Correlation between the ranks of both models' numbers; 1 is best."),
    "Kendall": (
        "same order (Kendall)",
        "Pairs that both models put in the same order, less those in the opposite order, as a part of all; 1 is best.",
    ),
    "relative squared error": (
        "squared error over variance",
        "Squared difference of both models' numbers over the variance of the first's; 0 is best.",
    ),
    "original perplexity": ("perplexity before", "e to the mean surprisal of the next token; less is better."),
    "perplexity": ("perplexity after", "The same for the second model; less is better."),
    "same next token": ("same next token", "Part of the tokens after which both models expect the same one."),
}
# Meaning of the measures of single inputs, of which there are quantiles, where it is not that of the figure.
MEASURES = {
    "difference": "Difference of the numbers that both models return, in standard deviations of the first's; "
    "0 is best.",
    "added surprisal": "Increase of the mean -log p of the next token, in nats; 0 is best.",
}
# The first figure of each row that a model has is shown at the top.
HEADLINE = (
    ("same best", "cosine", "Spearman", "original perplexity"),
    ("perplexity", "KL divergence", "same nearest", "relative squared error", "rank agreement"),
    ("same next token", "ten nearest in common"),
)


@dataclass(frozen=True)
class Line:
    """One figure, or one quantile, with a value per set; None where a set does not have it."""

    name: str
    meaning: str
    values: tuple[float | None, ...]


def described(held: Mapping[str, Any]) -> str:
    """A set in words, such as "500 texts of a.csv"."""
    return f"{held['inputs']:,} {held['kind']} of {held['name']}"


def lines(sets: Sequence[Mapping[str, Any]]) -> list[Line]:
    """All figures and quantiles of several sets.

    Example:
        >>> figures, quantiles = {"cosine": 0.9}, {"cosine": {"worst": 0.7, "1 %": 0.8, "median": 0.9}}
        >>> [line.name for line in lines([{"inputs": 500, "figures": figures, "quantiles": quantiles}])]
        ['mean cosine', 'cosine, worst of 500', 'cosine, 1 % are below', 'cosine, median']
    """
    found = []
    for key in dict.fromkeys(key for held in sets for key in held["figures"]):
        label, mark, figure = key.rpartition(": ")
        classes = any(f"{label}{mark}KL divergence" in held["figures"] for held in sets)
        if figure == "worst cosine" or (figure == "cosine" and classes):
            continue  # the one is among the quantiles, and the cosine of two logits means little
        name, meaning = WORDS.get(figure, (figure, ""))
        found.append(Line(_labelled(label, name), meaning, tuple(held["figures"].get(key) for held in sets)))
    for key, part in dict.fromkeys(
        (key, p) for held in sets for key, parts in held["quantiles"].items() for p in parts
    ):
        label, _, measure = key.rpartition(": ")
        counts = {held["inputs"] for held in sets}
        if part == "worst":
            what = f"worst of {counts.pop():,}" if len(counts) == 1 else "worst"
        else:
            what = part if part == "median" else f"{part} are {'below' if measure in LOW_IS_WORSE else 'above'}"
        values = tuple(held["quantiles"].get(key, {}).get(part) for held in sets)
        meaning = MEASURES.get(measure, "") if part == "worst" else ""
        found.append(Line(f"{_labelled(label, measure)}, {what}", meaning, values))
    return found


def shown(value: float | None) -> str:
    """A figure with four decimals, or two digits if it is very small.

    Example:
        >>> shown(0.98765), shown(0.0000123), shown(None)
        ('0.9877', '1.2e-05', '-')
    """
    if value is None:
        return "-"
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def headline(held: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The few figures of a set that are shown first, of the first of several outputs, and its worst input."""
    figures = held["figures"]
    first = {key.rpartition(": ")[2]: key for key in reversed(figures)}
    keys = [first[key] for row in HEADLINE if (key := next((key for key in row if key in first), None))]
    shown = lines([{**held, "figures": {key: figures[key] for key in keys}, "quantiles": {}}])
    worst = [line for line in lines([{**held, "figures": {}}]) if ", worst of " in line.name][:1]
    return [(line.name, line.values[0]) for line in (*shown, *worst) if line.values[0] is not None]


def measure_of(held: Mapping[str, Any]) -> str:
    """The measure that the worst inputs of a set were chosen by."""
    return next(iter(held["quantiles"]), "")


def _labelled(label: str, name: str) -> str:
    return f"{label}: {name}" if label else name
