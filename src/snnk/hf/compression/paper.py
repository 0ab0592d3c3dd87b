r"""The paper's own path (section 4.4, appendix "Uptraining Transformers"): replace, train with labels, bundle.

f(x) = W2 gelu(W1 x + b1) + b2 becomes W2 A phi(x) + b2 with A = psi(W1, b1), (4d, m), m = 8. A and W2 are trained with
the rest of the model in any loop, and then multiplied to one (d, m) matrix. `compress_` needs no labels and loses less.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from snnk.hf.finding import choose_layers, find_ffns
from snnk.hf.model_blocks import FFN, KEPT
from snnk.hf.replace import Replacement, place_of, replace_, set_slot
from snnk.maps import FeatureMap
from snnk.nn.linear import SNNKLinear


def replace_ffn_(
    model: PreTrainedModel,
    layers: str | Iterable[int] = "top-6",
    *,
    num_features: int = 8,
    feature_map: str = "relu",
    seed: int = 0,
    **options: Any,
) -> list[FFN]:
    """Replace the first linear layer and the activation of feed-forward blocks by SNNK layers, to be trained.

    Args:
        model: a transformers model with any head.
        layers: "all", "top-6" (the last six), "3,4,5", or a list of numbers.
        num_features: number m of features.
        feature_map: a name in FEATURE_MAPS; A starts as its psi(W1, b1).
        seed, **options: of the feature maps; each block draws its own.

    Returns:
        The blocks that were replaced.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
        >>> model = BertModel(BertConfig(**sizes)).eval()
        >>> _ = replace_ffn_(model, "top-1")
        >>> before = model(torch.arange(9)[None]).last_hidden_state
        >>> bundle_(model)[0].down.weight.shape
        torch.Size([8, 8])
        >>> bool(torch.allclose(model(torch.arange(9)[None]).last_hidden_state, before, atol=1e-5))
        True
    """
    if isinstance(feature_map, FeatureMap):
        raise TypeError("feature_map must be a name, as every block draws a map of its own")
    ffns = choose_layers(find_ffns(model), layers)
    for ffn in ffns:
        if ffn.gated:
            raise ValueError(f"{ffn.name} is gated, so that it has no layer f(Wx + b) to replace; use compress_")
        if ffn.kind != KEPT or isinstance(ffn.slot("up"), SNNKLinear):
            raise ValueError(f"{ffn.name} was replaced before; start from the original model")
    for ffn in ffns:
        weight, bias = ffn.up_weight().detach(), ffn.up_bias()
        layer = SNNKLinear(
            ffn.in_features,
            ffn.width,
            num_features,
            feature_map,
            bias is not None,
            seed=seed + ffn.index,
            weights=(weight, None if bias is None else bias.detach()),
            device=weight.device,
            dtype=weight.dtype,
            **options,
        )
        set_slot(ffn.layer, ffn.row.up, layer)
        set_slot(ffn.layer, ffn.row.activation, nn.Identity())
    return ffns


@torch.no_grad()
def bundle_(model: PreTrainedModel) -> list[Replacement]:
    """Multiply every SNNK layer of `replace_ffn_` with the linear layer behind it to one matrix, in place.

    Args:
        model: after `replace_ffn_`, trained or not. Its outputs stay the same, except for rounding.

    Returns:
        One `Replacement` per block, whose `down` has the matrix (d, m).

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
        >>> model = BertModel(BertConfig(**sizes))
        >>> [ffn.num_parameters for ffn in replace_ffn_(model, num_features=4, layers="all")][0] > 8 * 4
        True
        >>> [new.down.weight.shape for new in bundle_(model)]
        [torch.Size([8, 4]), torch.Size([8, 4])]
    """
    ffns = [ffn for ffn in find_ffns(model) if isinstance(ffn.slot("up"), SNNKLinear)]
    if not ffns:
        raise ValueError("no block of the model has an SNNK layer; call replace_ffn_ first")
    done = []
    for ffn in ffns:
        layer: SNNKLinear = ffn.slot("up")
        weight, bias = ffn.down_weight().double() @ layer.weight.double(), ffn.down_bias()
        set_slot(ffn.layer, ffn.row.up, nn.Linear(ffn.in_features, ffn.width, device="meta"))  # as replace_ expects
        done.append(replace_(ffn, layer.feature_map, **place_of(layer.weight)).fill_(weight, bias))
    return done
