"""How far a compressed model's outputs are from the original's, without labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnk.hf.plan import place, tokens_of

MOST_TOKENS = 256  # of a batch whose logits over a vocabulary are kept


@dataclass(frozen=True)
class Outputs:
    """Of one batch: a vector for each sequence or token, and whether they are logits."""

    values: Tensor  # (n, k), float32
    logits: bool


@torch.no_grad()
def outputs_of(model: Any, batch: Mapping[str, Any]) -> Outputs:
    """Logits if the model has a head; else the mean of the last hidden states over tokens that are not padding."""
    found = model(**place(batch, model))
    logits = getattr(found, "logits", None)
    if logits is None:
        states = found.last_hidden_state  # (batch, tokens, d)
        mask = tokens_of(batch, states.shape[:-1]).to(states.device).view((*states.shape[:-1], 1))
        return Outputs(((states * mask).sum(1) / mask.sum(1)).float().cpu(), logits=False)
    if logits.ndim == 3:
        logits = logits.flatten(0, 1)[tokens_of(batch, logits.shape[:-1]).to(logits.device)][:MOST_TOKENS]
    return Outputs(logits.float().cpu(), logits=True)


def agreement(before: list[Outputs], after: list[Outputs]) -> dict[str, float]:
    """Cosine of the vectors, mean and worst; for logits of classes also KL divergence and how often the best agrees."""
    a, b = (torch.cat([o.values for o in part]) for part in (before, after))
    cosine = F.cosine_similarity(a, b, dim=1)
    found = {"cosine": float(cosine.mean()), "worst cosine": float(cosine.min())}
    if before[0].logits and a.shape[1] > 1:
        p, q = a.log_softmax(1), b.log_softmax(1)
        found["KL divergence"] = float((p.exp() * (p - q)).sum(1).mean())
        found["same best"] = float((a.argmax(1) == b.argmax(1)).float().mean())
    elif a.shape[1] > 1 and len(a) > 2:
        found["rank agreement"] = _rank_agreement(a, b)
    return found


def _rank_agreement(a: Tensor, b: Tensor) -> float:
    """Spearman correlation of the similarities of neighbouring inputs: what a search by these vectors would rank."""
    from scipy.stats import spearmanr

    ours, theirs = (F.cosine_similarity(x[:-1], x[1:], dim=1).numpy() for x in (a, b))
    return float(spearmanr(ours, theirs)[0])
