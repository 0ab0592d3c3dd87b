"""The masked mean of the last hidden states as input of the classifier, for encoders with an untrained [CLS] pooler.

    y = W dropout(sum_t mask_t h_t / sum_t mask_t) + b

A hook on the base model, which has the attention mask, computes the mean. No state is kept between modules, and
adapters, saving and loading work as for any model. The weight of the pooler is replaced by a tensor of shape [0], so
that loading a saved model without the mean fails, where it would otherwise draw a random pooler.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from snnk.hf.replace import SentinelIdentity

PREFIX = "MeanPooled"  # of the names of classes


class MeanPooler(nn.Module):
    """Replaces BERT's pooler; the hook replaces its output by the mean."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense = SentinelIdentity(dim)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]


class MeanHead(nn.Module):
    """Replaces the classification head of RoBERTa and MPNet: dropout and one linear layer on the mean."""

    def __init__(self, dim: int, labels: int, dropout: float) -> None:
        super().__init__()
        self.dense = SentinelIdentity(dim)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(dim, labels)

    def forward(self, features: Tensor, **kwargs: Any) -> Tensor:
        return self.out_proj(self.dropout(features[:, 0]))


def mean_pooling_(model: PreTrainedModel) -> PreTrainedModel:
    """Change a BERT-like model in place, so that its classifier reads the masked mean of all tokens.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = mean_pooling_(BertForSequenceClassification(BertConfig(**sizes)).eval())
        >>> short, padded = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3, 0, 0]])
        >>> mask = torch.tensor([[1, 1, 1, 0, 0]])
        >>> bool(torch.allclose(model(short).logits, model(padded, attention_mask=mask).logits, atol=1e-5))
        True
    """
    base: Any = getattr(model, model.base_model_prefix, None)
    config: Any = model.config
    head = getattr(model, "classifier", None)
    if getattr(getattr(base, "pooler", None), "dense", None) is not None:
        base.pooler = MeanPooler(config.hidden_size)
        base.register_forward_hook(_mean_as_pooler, with_kwargs=True)
    elif base is not None and all(isinstance(getattr(head, name, None), nn.Linear) for name in ("dense", "out_proj")):
        model.classifier = MeanHead(config.hidden_size, config.num_labels, config.hidden_dropout_prob)
        base.register_forward_hook(_mean_as_token, with_kwargs=True)
    else:
        raise ValueError(f"{type(model).__name__} has no [CLS] pooler that a mean could replace; use pooling 'model'")
    config.snnk_pooling = "mean"
    return model


def _mean(kwargs: dict[str, Any], hidden: Tensor) -> Tensor:
    mask = kwargs.get("attention_mask")
    if mask is None:
        return hidden.mean(1)
    weights = mask.to(hidden.dtype)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1).clamp_min(1)


def _mean_as_pooler(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    output["pooler_output"] = _mean(kwargs, output.last_hidden_state)
    return output


def _mean_as_token(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    output["last_hidden_state"] = _mean(kwargs, output.last_hidden_state)[:, None]
    return output


class MeanPooled:
    """AutoModelForSequenceClassification with `mean_pooling_` before weights are loaded."""

    @classmethod
    def from_pretrained(cls, source: Any, **kwargs: Any) -> Any:
        """Load the model of a folder or of the hub, as the subclass with the mean of its own class."""
        known: Any = AutoModelForSequenceClassification._model_mapping
        # kwargs has options of the configuration and of the loader, which the loader separates
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if type(config) not in known:
            raise ValueError(f"{source} is a {config.model_type!r} model, which has no classifier for texts")
        return mean_pooled(known[type(config)]).from_pretrained(source, **{**kwargs, "trust_remote_code": False})


def mean_pooled(kind: type[PreTrainedModel]) -> Any:
    """A subclass with the mean, so that transformers loads weights directly into it."""

    def start(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        mean_pooling_(self)

    return type(f"{PREFIX}{kind.__name__}", (kind,), {"__init__": start})
