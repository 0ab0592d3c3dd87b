"""Agreement of a compressed model's outputs with the original's, without labels.

The logits of all heads are compared, or, for a model without a head, the vectors of whole inputs: the last hidden
states, pooled over the tokens. Padding does not count, and neither does a sequence of nothing but padding.

Each kind of output is measured in the words of its task: vectors by cosine and by how far they find the same
neighbours, classes by labels and KL divergence, single numbers by their order, and causal language models by what they
predict next (causal.py). Means hide the inputs that lost most, so
that `compare` also returns quantiles over the inputs, and which inputs are the worst.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from snnk.hf.calibration import Calibration
from snnk.hf.compression.causal import NEXT, is_causal, next_tokens, of_next_tokens, some_logits
from snnk.hf.models import Batch, evaluating, place

MOST_TOKENS = 256  # tokens per batch whose logits over a vocabulary are kept
# Heads with logits (batch, classes), which look like (batch, tokens) if there are as many tokens as classes.
SEQUENCE_HEADS = ("ForSequenceClassification", "ForNextSentencePrediction", "ForMultipleChoice")
SEQUENCE_LOGITS = "seq_relationship_logits"  # beside logits of tokens
VECTORS = "vectors"  # name of pooled hidden states
MEAN = "mean"
NEIGHBOURS = 10
MOST_CLASSES = 20  # of which each has a figure of its own
WORST = 10  # inputs that `compare` names
QUANTILES = {"1 %": 0.01, "5 %": 0.05, "median": 0.5}
LOW_IS_WORSE = ("cosine",)  # among the measures of single inputs


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(1) / mask.sum(1)


def _last(x: Tensor, mask: Tensor) -> Tensor:
    return x[torch.arange(len(x), device=x.device), mask[..., 0].long().cumsum(1).argmax(1)]


# Pooling of hidden states (n, tokens, d) with a mask (n, tokens, 1), by the names of sentence-transformers. Vectors of
# several are joined.
POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda x, mask: x[:, 0],
    "lasttoken": _last,
    "max": lambda x, mask: x.masked_fill(~mask, -torch.inf).amax(1),
    MEAN: _mean,
    "mean_sqrt_len": lambda x, mask: (x * mask).sum(1) / mask.sum(1).sqrt(),
    "weightedmean": lambda x, mask: _mean(x, mask * torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]),
}


@dataclass(frozen=True)
class Outputs:
    """The outputs of one batch by name: vectors (n, k) of its inputs or of their tokens, in float32.

    Attributes:
        values: the vectors by name.
        inputs: by the same names, the number in the batch of the input that each vector belongs to, (n,).
        size: inputs in the batch.
        pooling: names in POOLINGS, for hidden states.
    """

    values: dict[str, Tensor]
    inputs: dict[str, Tensor]
    size: int
    pooling: tuple[str, ...] = (MEAN,)

    @property
    def pooled(self) -> bool:
        return VECTORS in self.values

    @property
    def compared(self) -> str:
        """A description of the vectors, for reports."""
        if self.pooled:
            return f"last hidden states of each input, by {' and '.join(self.pooling)} pooling"
        return " and ".join(self.values)


@dataclass(frozen=True)
class Read:
    """Outputs of a model for a batch, without padding: logits (n, k) by name, or else states (n, tokens, d)."""

    logits: dict[str, Tensor]
    states: Tensor | None = None
    mask: Tensor | None = None  # (n, tokens, 1), for the states
    inputs: dict[str, Tensor] = field(default_factory=dict)  # of `Outputs`

    def __len__(self) -> int:
        return len(next(iter(self.logits.values()), self.states if self.states is not None else ()))

    def means(self) -> Tensor:
        """The means of the states over tokens, (n, d)."""
        return self.vectors((MEAN,))

    def vectors(self, pooling: Sequence[str]) -> Tensor:
        """The pooled states, (n, d) per name of a pooling, side by side."""
        if self.states is None or self.mask is None:
            raise ValueError("a model with logits has no hidden states here")
        x = self.states.float()  # in float16 a sum may overflow
        return torch.cat([POOLINGS[name](x, self.mask) for name in pooling], 1)


def read(model: PreTrainedModel, batch: Batch) -> Read:
    """Run a model on a batch, with or without gradients, as the caller has set them.

    A causal language model returns the logits of so many positions as fit into causal.MOST_LOGITS.
    """
    if is_causal(model) and "input_ids" in batch:
        rows, texts = some_logits(model, batch)
        return Read({"logits": rows}, inputs={"logits": texts})
    batch = place(batch, model)
    found = model(**batch)
    if not isinstance(found, Mapping):
        raise ValueError(f"{type(model).__name__} returned a {type(found).__name__}; set return_dict in its config")
    logits, inputs = {}, {}
    for name, value in found.items():
        if name.endswith("logits") and isinstance(value, Tensor):
            sequence = name == SEQUENCE_LOGITS or type(model).__name__.endswith(SEQUENCE_HEADS)
            logits[name] = _rows(value, batch, sequence)
            inputs[name] = _rows(_numbers(value), batch, sequence)[:, 0]
    if logits:
        return Read(logits, inputs=inputs)
    states = found.get("last_hidden_state")
    embeds = [x for name, x in found.items() if name.endswith("_embeds") and isinstance(x, Tensor) and x.ndim == 2]
    if states is None and embeds and len({len(x) for x in embeds}) == 1:  # CLIP: vectors of a text and of an image
        states = torch.cat(embeds, -1)[:, None]
    if states is None:
        states = getattr(model.base_model(**batch), "last_hidden_state", None)
    if states is None:
        raise ValueError(f"{type(model).__name__} has no logits and no last_hidden_state to compare; it has {[*found]}")
    mask = _mask(batch)
    if mask is None or mask.shape != states.shape[:2]:
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    some = mask.any(1)
    return Read({}, states[some], mask[some][..., None], {VECTORS: some.nonzero()[:, 0]})


@torch.no_grad()
def outputs_of(model: PreTrainedModel, batch: Batch, pooling: Sequence[str] = (MEAN,)) -> Outputs:
    """Logits of all heads, next tokens, or pooled hidden states; a ValueError if they are not finite."""
    kept, inputs = {}, {}
    if is_causal(model) and "input_ids" in batch:
        kept[NEXT], inputs[NEXT] = (x.cpu() for x in next_tokens(model, batch))
    else:
        seen = read(model, batch)
        for name, x in (seen.logits or {VECTORS: seen.vectors(pooling)}).items():
            some = _spread(len(x)) if x.shape[1] > 1 and name != VECTORS else slice(None)
            kept[name], inputs[name] = x[some].float().cpu(), seen.inputs[name][some].cpu()
    wrong = [name for name, x in kept.items() if not bool(x.isfinite().all())]
    if wrong:
        raise ValueError(
            f"outputs are not finite: the {', '.join(wrong)} of {type(model).__name__} in {model.dtype} "
            "has inf or nan; try float32"
        )
    size = len(next(value for value in batch.values() if isinstance(value, Tensor)))
    return Outputs(kept, inputs, size, tuple(pooling))


def _spread(count: int) -> Tensor:
    """Numbers of the tokens that are kept, from the whole batch, so that every input has some."""
    return torch.arange(count) if count <= MOST_TOKENS else torch.linspace(0, count - 1, MOST_TOKENS).long()


def probe(model: PreTrainedModel, batch: Batch, pooling: Sequence[str] = (MEAN,)) -> Outputs:
    """Outputs of one batch; a ValueError, before any work, if there are none that could be compared.

    Example:
        >>> from transformers import BertConfig, BertForQuestionAnswering
        >>> config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> found = probe(BertForQuestionAnswering(config), {"input_ids": torch.ones(2, 5, dtype=torch.long)})
        >>> found.compared, found.values["end_logits"].shape
        ('start_logits and end_logits', torch.Size([10, 1]))
    """
    try:
        with evaluating(model):
            return outputs_of(model, batch, pooling)
    except ValueError:
        raise
    except Exception as error:  # the model's code may raise anything
        shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
        raise ValueError(f"{type(model).__name__} cannot be run on inputs {shapes}: {error}") from error


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
) -> dict[str, Any]:
    """Agreement of two models on inputs that nothing was fitted to, as report.json has it.

    Args:
        original, compressed: the models.
        held_out: the inputs, with their names.
        pooling: names in POOLINGS, for models without a head.
        texts: name the worst inputs, by the beginnings of their texts.
    """

    def outputs(model: PreTrainedModel) -> Iterator[Outputs]:
        return (outputs_of(model, batch, pooling) for batch in held_out)

    with evaluating(original), evaluating(compressed):
        found = compare(outputs(original), outputs(compressed))
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
    cosine = F.cosine_similarity(a, b, dim=1)
    figures = {"cosine": float(cosine.mean()), "worst cosine": float(cosine.min())}
    figures |= _neighbours(F.normalize(a, dim=1), F.normalize(b, dim=1))
    ours, theirs = (F.cosine_similarity(x[:-1], x[1:], dim=1) for x in (a, b))  # of pairs, as a search ranks them
    if _varies(ours):
        figures["rank agreement"] = _correlation(_ranks(ours), _ranks(theirs))
    return _Compared(figures, "cosine", cosine)


def _neighbours(a: Tensor, b: Tensor) -> dict[str, float]:
    """Agreement of the nearest neighbours of unit vectors (n, d) among the others, by cosine.

    Of few vectors the ten nearest are most of them, so that their agreement is left out.
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


def _mask(batch: Batch) -> Tensor | None:
    """True for tokens that are not padding, in the shape of the inputs; None for images."""
    mask, ids = batch.get("attention_mask"), batch.get("input_ids")
    return mask.bool() if mask is not None else None if ids is None else torch.ones_like(ids, dtype=torch.bool)


def _numbers(logits: Tensor) -> Tensor:
    """The number of each input, in a shape that `_rows` takes apart as it does the logits."""
    shape = (*logits.shape[:-1], 1) if logits.ndim > 2 else logits.shape
    numbers = torch.arange(len(logits), device=logits.device)
    return numbers.view(-1, *(1 for _ in shape[1:])).expand(shape)


def _rows(logits: Tensor, batch: Batch, sequence: bool) -> Tensor:
    """Logits (n, k) of tokens or sequences, without padding."""
    mask = _mask(batch)
    if logits.ndim > 2:
        flat = logits.flatten(0, -2)
        return flat if mask is None or mask.shape != logits.shape[:-1] else flat[mask.flatten()]
    if mask is None:
        return logits
    if mask.shape == logits.shape and not sequence:
        return logits[mask][:, None]
    return logits[mask.flatten(1).any(1)]
