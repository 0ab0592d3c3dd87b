r"""How much the predictions of a causal language model depend on each of its blocks.

If a block's output y changes by e, where the errors e of different tokens are uncorrelated, the model's distribution of
the next token changes by a KL divergence of E (g . e)^2 / 2 per token, to second order. Here g is the gradient of the
sum of -log p at the output, for tokens that are drawn from the model's own distribution. With e = mean(y) - y this is
the divergence that a constant in place of the block would cause. A choice that leaves the part r of the variance of y
costs about r times as much, in a unit that is the same for all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from snnk.hf.compression.causal import following, pieces
from snnk.hf.model_blocks import ModelBlock
from snnk.hf.models import Batch, evaluating
from snnk.hf.record import flat, recording

TOKENS = 4096  # at least, if there are so many


def sensitivities(
    model: PreTrainedModel, blocks: Sequence[ModelBlock], batches: Iterable[Batch], *, seed: int = 0
) -> dict[str, float]:
    """By the name of each block: the KL divergence per token if its output were constant, to second order.

    Args:
        model: a causal language model.
        blocks: blocks of this model.
        batches: typical inputs, of which the first ones are used, up to about 4,096 tokens.
        seed: of the tokens that are drawn.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from snnk.hf.finding import find_ffns
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes))
        >>> found = sensitivities(model, find_ffns(model), [{"input_ids": torch.ones(4, 5, dtype=torch.long)}])
        >>> list(found)
        ['layers.0', 'layers.1']
    """
    generator = torch.Generator().manual_seed(seed)
    totals, tokens = dict.fromkeys((block.name for block in blocks), 0.0), 0
    outputs: dict[str, Tensor] = {}
    probes: dict[str, Tensor] = {}

    def note(name: str, _: Any, out: Tensor) -> Tensor:
        outputs[name], probes[name] = out.detach(), torch.zeros_like(out, requires_grad=True)
        return out + probes[name]

    wanted = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in wanted:
            p.requires_grad_(False)
        with evaluating(model), torch.enable_grad(), recording({b.name: b.linears[-1] for b in blocks}, note):
            for batch in batches:
                for part in pieces(model, batch):
                    logits = model(**part).logits[:, :-1][following(part)].float()
                    drawn = torch.multinomial(logits.detach().softmax(1).cpu(), 1, generator=generator)[:, 0]
                    F.cross_entropy(logits, drawn.to(logits.device), reduction="sum").backward()
                    for name, y in outputs.items():
                        gradient = probes[name].grad
                        if gradient is not None:
                            totals[name] += _divergence(flat(y, part), flat(gradient, part))
                    tokens += len(logits)
                if tokens >= TOKENS:
                    break
    finally:
        for p, want in wanted:
            p.requires_grad_(want)
    return {name: total / max(tokens, 1) for name, total in totals.items()}


def _divergence(y: Tensor, gradient: Tensor) -> float:
    """The sum of (g . (y - mean y))^2 / 2 over tokens."""
    return float(((y - y.mean(0)) * gradient).double().sum(1).square().sum()) / 2
