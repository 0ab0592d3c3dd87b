"""Decoders: what a causal language model predicts at each token of some texts.

Logits over the vocabulary are computed for a few texts at a time and reduced at once, or at a few positions, so that
memory grows neither with the number of texts nor with the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from snnk.hf.models import Batch, place

MOST_LOGITS = 2**24  # at once, unless one text, or one position of every text, has more
MOST_TAUGHT = 2**26  # the same for a step of the distillation, to which a position without logits teaches nothing
NEXT = "next tokens"  # name of what `next_tokens` returns
Run = Callable[[Batch], Mapping[str, Tensor]]  # a model in another runtime: its outputs by name


def is_causal(model: PreTrainedModel) -> bool:
    """Whether a model predicts each token of a text from those before it."""
    config = model.config
    if type(model).__name__ not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return False
    # A BERT with such a head sees the whole text unless its configuration makes it a decoder.
    return config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or bool(getattr(config, "is_decoder", False))


def pieces(model: PreTrainedModel, batch: Batch) -> Iterator[dict[str, Any]]:
    """The batch in parts of so few texts that the logits of a part fit into MOST_LOGITS."""
    batch = place(batch, model)
    ids = batch["input_ids"]
    size = max(1, MOST_LOGITS // (ids.shape[1] * model.config.get_text_config().vocab_size))
    for start in range(0, len(ids), size):
        yield {name: x[start : start + size] for name, x in batch.items()}


def following(batch: Batch) -> Tensor:
    """True for each token that another one follows: (batch, tokens - 1)."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return mask[:, :-1] & mask[:, 1:]


def some_logits(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of a part of the positions of a batch, evenly spread, so few that they fit into MOST_TAUGHT.

    With and without gradients; the head is computed at these positions alone if the model can do that.

    Returns:
        (n, vocabulary), and (n,), the number in the batch of the text that each row belongs to. Padding is left out.
    """
    batch = place(batch, model)
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    step = -(-ids.numel() * model.config.get_text_config().vocab_size // MOST_TAUGHT)
    chosen = torch.arange((step - 1) % ids.shape[1], ids.shape[1], step, device=ids.device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(**batch, logits_to_keep=chosen).logits
    else:
        logits = model(**batch).logits[:, chosen]
    return logits[mask[:, chosen]], mask[:, chosen].nonzero()[:, 0]


@torch.no_grad()
def next_tokens(model: PreTrainedModel, batch: Batch, run: Run | None = None) -> tuple[Tensor, Tensor]:
    """For each token that another one follows: the surprisal of that one, and the token that the model expects.

    With `run`, the predictions are those of the model in another runtime.

    Returns:
        (n, 2), with -log p(the following token) and the number of the most likely one, and (n,), the number in the
        batch of the text that the token belongs to.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes)).eval()
        >>> found, texts = next_tokens(model, {"input_ids": torch.ones(2, 5, dtype=torch.long)})
        >>> found.shape, texts.tolist()
        (torch.Size([8, 2]), [0, 0, 0, 0, 1, 1, 1, 1])
    """
    found = []
    for part in pieces(model, batch):
        follows = following(part)
        logits = (model(**part) if run is None else run(part))["logits"][:, :-1][follows].float()
        surprisal = F.cross_entropy(logits, part["input_ids"][:, 1:][follows], reduction="none")
        found.append(torch.stack([surprisal, logits.argmax(1).float()], 1))
    return torch.cat(found), following(batch).nonzero()[:, 0]


def of_next_tokens(before: Tensor, after: Tensor) -> dict[str, float]:
    """Perplexities, and how often two models expect the same token, from the first results of `next_tokens`.

    Example:
        >>> of_next_tokens(torch.tensor([[0.0, 3.0], [0.0, 4.0]]), torch.tensor([[0.0, 3.0], [0.0, 5.0]]))
        {'original perplexity': 1.0, 'perplexity': 1.0, 'same next token': 0.5}
    """
    return {
        "original perplexity": float(before[:, 0].mean().exp()),
        "perplexity": float(after[:, 0].mean().exp()),
        "same next token": float((before[:, 1] == after[:, 1]).float().mean()),
    }
