"""Agreement of a compressed model's outputs with the original's, without labels.

Each kind of output is measured in the words of its task: vectors by cosine and by how far they find the same
neighbours, classes by labels and KL divergence, single numbers by their order, and causal language models by what they
predict next (causal.py). Means hide the inputs that lost most, so that `compare` also returns quantiles over the
inputs, and which inputs are the worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from snnk.hf.calibration import Calibration
from snnk.hf.compression.causal import NEXT, Run, of_next_tokens
from snnk.hf.compression.outputs import MEAN, VECTORS, Outputs, outputs_of
from snnk.hf.models import evaluating

NEIGHBOURS = 10
MOST_CLASSES = 20  # of which each has a figure of its own
WORST = 10  # inputs that `compare` names
QUANTILES = {"1 %": 0.01, "5 %": 0.05, "median": 0.5}
LOW_IS_WORSE = ("cosine",)  # among the measures of single inputs


@dataclass(frozen=True)
class Case:
    """One input on which two models differ.

    Attributes:
        input: its number among all inputs.
        value: the first measure in `Agreement.quantiles` for this input.
        before, after: the original's and the compressed model's best class, or single number, if it has just one.
    """

    input: int
    value: float
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True)
class Agreement:
    """How far the outputs of two models agree on a set of inputs.

    Attributes:
        inputs: number of inputs.
        figures: means over all vectors by name, with the name of the output in front if there are several.
        quantiles: by the name of a measure of single inputs: the worst value, and the values that 1 %, 5 % and half of
            the inputs do not reach. An input's measure is the mean over its tokens, if they are compared. A quantile of
            less than one input is left out.
        classes: how often the original predicts each class, and the part of these predictions that stays; empty if
            there are many classes.
        worst: the inputs with the worst values of the first measure in `quantiles`, the worst first.
    """

    inputs: int
    figures: dict[str, float]
    quantiles: dict[str, dict[str, float]]
    classes: dict[int, tuple[int, float]]
    worst: tuple[Case, ...]


@dataclass(frozen=True)
class _Compared:
    """One output on n rows, which are inputs or their tokens."""

    figures: dict[str, float]
    measure: str
    values: Tensor | None  # the measure of each row, (n,)
    before: Tensor | None = None  # best class or single number of each row, (n,)
    after: Tensor | None = None
    classes: dict[int, tuple[int, float]] = field(default_factory=dict)


def measure(
    original: PreTrainedModel,
    compressed: PreTrainedModel,
    held_out: Calibration,
    *,
    pooling: Sequence[str] = (MEAN,),
    texts: bool = True,
    run: Run | None = None,
) -> dict[str, Any]:
    """Agreement of two models on inputs that nothing was fitted to, as report.json has it.

    Args:
        original, compressed: the models.
        held_out: the inputs, with their names.
        pooling: names in POOLINGS, for models without a head.
        texts: name the worst inputs, by the beginnings of their texts.
        run: what computes the outputs of the compressed model. Default: the model itself.
    """

    def outputs(model: PreTrainedModel, run: Run | None = None) -> Iterator[Outputs]:
        return (outputs_of(model, batch, pooling, run) for batch in held_out)

    with evaluating(original), evaluating(compressed):
        found = compare(outputs(original), outputs(compressed, run))
    named = "Classification" in type(original).__name__  # other heads have two labels in their configuration too
    labels: dict[Any, str] = (original.config.id2label or {}) if named else {}

    return {
        "name": held_out.source,
        "kind": held_out.kind,
        "inputs": found.inputs,
        "figures": found.figures,
        "quantiles": found.quantiles,
        "classes": [
            {"label": labels.get(number, number), "count": count, "same": same}
            for number, (count, same) in found.classes.items()
        ],
        "worst": [
            {
                "text": held_out.names[case.input],
                "value": case.value,
                "before": labels.get(case.before, case.before),
                "after": labels.get(case.after, case.after),
            }
            for case in found.worst
            if texts and case.input < len(held_out.names)
        ],
    }


def agreement(before: Iterable[Outputs], after: Iterable[Outputs]) -> dict[str, float]:
    """The figures of `compare`."""
    return compare(before, after).figures


def compare(before: Iterable[Outputs], after: Iterable[Outputs]) -> Agreement:
    """Compare the outputs of two models for the same batches, which are read one by one.

    Vectors are compared by cosine and by their neighbours among all inputs: how often the nearest is the same one, and
    how many of the ten nearest both have in common. Logits are compared by KL divergence and by how often the best
    class is the same. Single numbers (regression, rerankers, a score per token) are compared by correlations and by
    squared error over variance, as every cosine would be 1 or -1. Decoders are compared by perplexity and by how often
    they expect the same next token.

    Example:
        >>> a = Outputs({"logits": torch.tensor([[2.0, 0.0], [0.0, 1.0]])}, {"logits": torch.arange(2)}, 2)
        >>> b = Outputs({"logits": torch.tensor([[2.0, 0.0], [1.0, 0.0]])}, {"logits": torch.arange(2)}, 2)
        >>> found = compare([a], [b])
        >>> found.figures["same best"], found.worst[0].input
        (0.5, 1)
    """
    rows: dict[str, list[tuple[Tensor, ...]]] = {}
    inputs: dict[str, list[Tensor]] = {}
    widths: dict[str, int] = {}
    start = 0
    for a, b in zip(before, after, strict=True):
        for name, x in a.values.items():
            rows.setdefault(name, []).append(_condensed(x, b.values[name], logits=name not in (VECTORS, NEXT)))
            inputs.setdefault(name, []).append(a.inputs[name] + start)
            widths[name] = x.shape[1]
        start += a.size
    found: dict[str, _Compared] = {}
    for name, parts in rows.items():
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        if not len(columns[0]):
            raise ValueError("every held-out sequence is nothing but padding: there is nothing to compare")
        label = "" if len(rows) == 1 else name.removesuffix("logits").strip("_").replace("_", " ") + ": "
        if name == VECTORS:
            found[label] = _of_vectors(*columns)
        elif name == NEXT:
            found[label] = _Compared(of_next_tokens(*columns), "added surprisal", columns[1][:, 0] - columns[0][:, 0])
        elif widths[name] == 1:
            found[label] = _of_numbers(*columns)
        else:
            found[label] = _of_classes(*columns, few=widths[name] <= MOST_CLASSES)
    where = [torch.cat(parts) for parts in inputs.values()]
    return _joined(found, where)


def _joined(found: dict[str, _Compared], where: list[Tensor]) -> Agreement:
    """The comparison of all outputs by label; `where` has the input's number of each row, per output."""
    figures, quantiles = {}, {}
    for (label, one), rows in zip(found.items(), where, strict=True):
        figures.update({label + name: value for name, value in one.figures.items()})
        if one.values is not None:
            quantiles[label + one.measure] = _quantiles(_per_input(one.values, rows)[1], one.measure)
    first, rows = next(iter(found.values())), where[0]
    classes = first.classes if len(found) == 1 else {}
    return Agreement(len(rows.unique()), figures, quantiles, classes, _worst(first, rows))


def _condensed(a: Tensor, b: Tensor, logits: bool) -> tuple[Tensor, ...]:
    """Keep a summary of two outputs (n, k), as logits of many classes would take too much memory."""
    if not logits:
        return a, b
    if a.shape[1] == 1:
        return a[:, 0], b[:, 0]
    p, q = a.log_softmax(1), b.log_softmax(1)
    divergence = (p.exp() * (p - q)).sum(1)
    return F.cosine_similarity(a, b, dim=1), divergence.clamp_min(0), a.argmax(1), b.argmax(1)


def _of_vectors(a: Tensor, b: Tensor) -> _Compared:
    cosine: Tensor | None = None
    figures: dict[str, float] = {}
    if a.shape[1] == b.shape[1]:  # another kind of model may have vectors of another length
        cosine = F.cosine_similarity(a, b, dim=1)
        figures |= {"cosine": float(cosine.mean()), "worst cosine": float(cosine.min())}
    figures |= _neighbours(F.normalize(a, dim=1), F.normalize(b, dim=1))
    ours, theirs = (F.cosine_similarity(x[:-1], x[1:], dim=1) for x in (a, b))  # of pairs, as a search ranks them
    if _varies(ours):
        figures["rank agreement"] = _correlation(_ranks(ours), _ranks(theirs))
    return _Compared(figures, "cosine", cosine)


def _neighbours(a: Tensor, b: Tensor) -> dict[str, float]:
    """Agreement of the nearest neighbours of unit vectors (n, d) among the others, by cosine.

    The ten nearest are most of the vectors if these are few: their agreement is left out then.
    """
    count = min(NEIGHBOURS, len(a) - 1)
    if count < 1:
        return {}
    nearest = [torch.cat(list(_nearest(x, count))) for x in (a, b)]
    same = nearest[0][:, :, None] == nearest[1][:, None, :]
    found = {"same nearest": float(same[:, 0, 0].float().mean())}
    if len(a) > 2 * NEIGHBOURS:
        found["ten nearest in common"] = float(same.any(2).float().mean())
    return found


def _nearest(x: Tensor, count: int) -> Iterator[Tensor]:
    for numbers in torch.arange(len(x)).split(1024):
        similarity = x[numbers] @ x.T
        similarity[torch.arange(len(numbers)), numbers] = -torch.inf
        yield similarity.topk(count, dim=1).indices


def _of_classes(cosine: Tensor, divergence: Tensor, before: Tensor, after: Tensor, *, few: bool) -> _Compared:
    same = (before == after).double()
    figures = {
        "cosine": float(cosine.mean()),
        "worst cosine": float(cosine.min()),
        "KL divergence": float(divergence.mean()),
        "same best": float(same.mean()),
    }
    chosen = before.unique().tolist() if few else []
    each = {number: (int((before == number).sum()), float(same[before == number].mean())) for number in chosen}
    return _Compared(figures, "KL divergence", divergence, before, after, each)


def _of_numbers(a: Tensor, b: Tensor) -> _Compared:
    from scipy.stats import kendalltau

    if not _varies(a):
        error = (a - b).square().sum() / a.square().sum().clamp_min(1e-30)
        return _Compared({"relative squared error": float(error)}, "", None)
    error = (a - b).square().sum() / (a - a.mean()).square().sum()
    figures = {
        "Pearson": _correlation(a, b),
        "Spearman": _correlation(_ranks(a), _ranks(b)),
        "Kendall": float(kendalltau(a.numpy(), b.numpy()).statistic) if _varies(b) else 0.0,
        "relative squared error": float(error),
    }
    return _Compared(figures, "difference", (a - b).abs() / a.std(correction=0), a, b)


def _per_input(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the inputs that have rows, and the means of the rows' values, in float64."""
    numbers, place, count = rows.unique(return_inverse=True, return_counts=True)
    return numbers, torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, place, values.double()) / count


def _quantiles(values: Tensor, measure: str) -> dict[str, float]:
    low = measure in LOW_IS_WORSE
    found = {"worst": float(values.min() if low else values.max())}
    parts = {name: part for name, part in QUANTILES.items() if part * len(values) >= 1}
    return found | {name: float(values.quantile(part if low else 1 - part)) for name, part in parts.items()}


def _worst(found: _Compared, rows: Tensor) -> tuple[Case, ...]:
    if found.values is None:
        return ()
    numbers, values = _per_input(found.values, rows)
    order = values.argsort(descending=found.measure not in LOW_IS_WORSE, stable=True)[:WORST]
    cases = []
    for i in order.tolist():
        own = (rows == numbers[i]).nonzero()[:, 0]
        both = (found.before, found.after) if len(own) == 1 else (None, None)
        shown = [None if x is None else x[own].item() for x in both]
        cases.append(Case(int(numbers[i]), float(values[i]), *shown))
    return tuple(cases)


def _varies(x: Tensor) -> bool:
    return len(x) > 1 and bool(x.max() > x.min())


def _correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation; 0 if b is constant."""
    return float(F.cosine_similarity(a.double() - a.double().mean(), b.double() - b.double().mean(), dim=0))


def _ranks(x: Tensor) -> Tensor:
    from scipy.stats import rankdata

    return torch.from_numpy(rankdata(x.numpy()))
