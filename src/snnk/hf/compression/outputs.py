"""Outputs of a model for a batch that can be compared with those of another model, without labels.

These are the logits of all heads, what a causal language model predicts next (causal.py), or, for a model without a
head, the last hidden states, pooled over the tokens to one vector per input. Padding does not count, and neither does a
sequence of nothing but padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snnk.hf.compression.causal import NEXT, Run, is_causal, next_tokens, some_logits
from snnk.hf.models import Batch, evaluating, place

MOST_TOKENS = 256  # tokens per batch whose logits over a vocabulary are kept
# Heads with logits (batch, classes), which look like (batch, tokens) if there are as many tokens as classes.
SEQUENCE_HEADS = ("ForSequenceClassification", "ForNextSentencePrediction", "ForMultipleChoice")
SEQUENCE_LOGITS = "seq_relationship_logits"  # beside logits of tokens
VECTORS = "vectors"  # name of pooled hidden states
MEAN = "mean"


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


def read(model: PreTrainedModel, batch: Batch, run: Run | None = None) -> Read:
    """Run a model on a batch, with or without gradients, as the caller has set them.

    A causal language model returns the logits of so many positions as fit into causal.MOST_TAUGHT. With `run`, the
    outputs are those of the model in another runtime.
    """
    if run is None and is_causal(model) and "input_ids" in batch:
        rows, texts = some_logits(model, batch)
        return Read({"logits": rows}, inputs={"logits": texts})
    batch = place(batch, model)
    found = model(**batch) if run is None else run(batch)
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
def outputs_of(
    model: PreTrainedModel, batch: Batch, pooling: Sequence[str] = (MEAN,), run: Run | None = None
) -> Outputs:
    """Logits of all heads, next tokens, or pooled hidden states; a ValueError if they are not finite.

    With `run`, the outputs are those of the model in another runtime.
    """
    kept, inputs = {}, {}
    if is_causal(model) and "input_ids" in batch:
        kept[NEXT], inputs[NEXT] = (x.cpu() for x in next_tokens(model, batch, run))
    else:
        seen = read(model, batch, run)
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
