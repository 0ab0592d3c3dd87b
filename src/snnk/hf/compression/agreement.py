"""Agreement of a compressed model's outputs with the original's, without labels.

The logits of all heads are compared, or, for a model without a head, the mean of the last hidden states over the tokens
of each sequence. Padding does not count, and neither does a sequence of nothing but padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from snnk.hf.models import Batch, evaluating, place

MOST_TOKENS = 256  # tokens per batch whose logits over a vocabulary are kept
# Heads with logits (batch, classes), which look like (batch, tokens) if there are as many tokens as classes.
SEQUENCE_HEADS = ("ForSequenceClassification", "ForNextSentencePrediction", "ForMultipleChoice")
SEQUENCE_LOGITS = "seq_relationship_logits"  # beside logits of tokens
MEANS = "mean"  # name of the means of last hidden states


@dataclass(frozen=True)
class Outputs:
    """The outputs of one batch by name: vectors (n, k) of its sequences or tokens, in float32."""

    values: dict[str, Tensor]

    @property
    def pooled(self) -> bool:
        return MEANS in self.values

    @property
    def compared(self) -> str:
        """A description of the vectors, for reports."""
        if self.pooled:
            return "mean of the last hidden states over the tokens of each input (mean pooling)"
        return " and ".join(self.values)


@dataclass(frozen=True)
class Read:
    """Outputs of a model for a batch, without padding: logits (n, k) by name, or else states (n, tokens, d)."""

    logits: dict[str, Tensor]
    states: Tensor | None = None
    mask: Tensor | None = None  # (n, tokens, 1), for the states

    def __len__(self) -> int:
        return len(next(iter(self.logits.values()), self.states if self.states is not None else ()))

    def means(self) -> Tensor:
        """The means of the states over tokens, (n, d)."""
        if self.states is None or self.mask is None:
            raise ValueError("a model with logits has no hidden states here")
        return (self.states.float() * self.mask).sum(1) / self.mask.sum(1)  # in float16 a sum may overflow


def read(model: PreTrainedModel, batch: Batch) -> Read:
    """Run a model on a batch, with or without gradients, as the caller has set them."""
    batch = place(batch, model)
    found = model(**batch)
    if not isinstance(found, Mapping):
        raise ValueError(f"{type(model).__name__} returned a {type(found).__name__}; set return_dict in its config")
    logits = {
        name: _rows(value, batch, name == SEQUENCE_LOGITS or type(model).__name__.endswith(SEQUENCE_HEADS))
        for name, value in found.items()
        if name.endswith("logits") and isinstance(value, Tensor)
    }
    if logits:
        return Read(logits)
    states = found.get("last_hidden_state")
    if states is None:
        states = getattr(model.base_model(**batch), "last_hidden_state", None)
    if states is None:
        raise ValueError(f"{type(model).__name__} has no logits and no last_hidden_state to compare; it has {[*found]}")
    mask = _mask(batch)
    if mask is None or mask.shape != states.shape[:2]:
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    some = mask.any(1)
    return Read({}, states[some], mask[some][..., None])


@torch.no_grad()
def outputs_of(model: PreTrainedModel, batch: Batch) -> Outputs:
    """Logits of all heads, or the means of the last hidden states; a ValueError if they are not finite."""
    seen = read(model, batch)
    values = {name: x[:MOST_TOKENS] if x.shape[1] > 1 else x for name, x in seen.logits.items()}
    kept = {name: x.float().cpu() for name, x in (values or {MEANS: seen.means()}).items()}
    wrong = [name for name, x in kept.items() if not bool(x.isfinite().all())]
    if wrong:
        raise ValueError(
            f"outputs are not finite: the {', '.join(wrong)} of {type(model).__name__} in {model.dtype} "
            "has inf or nan; try float32"
        )
    return Outputs(kept)


def probe(model: PreTrainedModel, batch: Batch) -> Outputs:
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
            return outputs_of(model, batch)
    except ValueError:
        raise
    except Exception as error:  # the model's code may raise anything
        shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
        raise ValueError(f"{type(model).__name__} cannot be run on inputs {shapes}: {error}") from error


def agreement(before: list[Outputs], after: list[Outputs]) -> dict[str, float]:
    """Measures of agreement by name, with the name of the output in front if there are several.

    Vectors are compared by their mean and worst cosine; logits also by KL divergence and by how often the best class is
    the same; means of states by how similarly they rank neighbours. Single numbers (regression, a score per token) are
    compared by correlations and by squared error over variance, as every cosine would be 1 or -1.
    """
    found: dict[str, float] = {}
    for name in before[0].values:
        a, b = (torch.cat([o.values[name] for o in part]) for part in (before, after))
        if not len(a):
            raise ValueError("every held-out sequence is nothing but padding: there is nothing to compare")
        figures = _of_numbers(a[:, 0], b[:, 0]) if a.shape[1] == 1 else _of_vectors(a, b, logits=name != MEANS)
        label = "" if len(before[0].values) == 1 else name.removesuffix("logits").strip("_").replace("_", " ") + ": "
        found |= {label + figure: value for figure, value in figures.items()}
    return found


def _of_vectors(a: Tensor, b: Tensor, logits: bool) -> dict[str, float]:
    cosine = F.cosine_similarity(a, b, dim=1)
    found = {"cosine": float(cosine.mean()), "worst cosine": float(cosine.min())}
    if logits:
        p, q = a.log_softmax(1), b.log_softmax(1)
        found["KL divergence"] = float((p.exp() * (p - q)).sum(1).mean())
        found["same best"] = float((a.argmax(1) == b.argmax(1)).float().mean())
    else:  # similarities of neighbouring inputs, as a search by these vectors would rank them
        ours, theirs = (F.cosine_similarity(x[:-1], x[1:], dim=1) for x in (a, b))
        if _varies(ours):
            found["rank agreement"] = _correlation(_ranks(ours), _ranks(theirs))
    return found


def _of_numbers(a: Tensor, b: Tensor) -> dict[str, float]:
    spread = (a - a.mean()) if _varies(a) else a
    found = {"relative squared error": float((a - b).square().sum() / spread.square().sum().clamp_min(1e-30))}
    if _varies(a):
        found = {"Pearson": _correlation(a, b), "Spearman": _correlation(_ranks(a), _ranks(b)), **found}
    return found


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
