"""Means over tokens as input of the classifier, for encoders with an untrained [CLS] pooler.

    y = W dropout(mean_t h_t) + b                              over the tokens t that are no padding
    y = W dropout([|u - v|, u v]) + b,   u, v = mean_t h_t     over the tokens of the first and of the second text

h are the last hidden states ("mean"), or those of four layers side by side ("layers"): at a quarter, half and three
quarters of the depth, and the last. The last layer of a sentence encoder has lost what its training did not ask for,
such as grammar; earlier ones have it.

"pairs" is the second line, with the same four layers. The two texts of a row do not attend to each other, and the
positions of the second begin anew: a sentence encoder was trained on single texts, and compares them by such means.
Both attend to the first token of the row, which attends to itself alone, and is in neither mean: the second text has no
such token.

"neurons" and "neuron-pairs" read more: besides these four layers the neurons of every feed-forward block,

    m = mean_t f(W h_t + c)    W, c, f: first layer and activation of the block

Each block is thus a feature map of its tokens, with four times as many numbers as a hidden state in most models. A
StandardisedLinear reads them.

Hooks on the base model, which has the attention mask, compute the means, and hooks on the activations those of neurons.
A forward pass that ends leaves nothing behind, and adapters, saving and loading work as for any model. The weight of
the pooler is replaced by a tensor of shape [0], so that loading a saved model without the mean fails, where it would
otherwise draw a random pooler.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, initialization

from snnk.hf.classify.standardised import StandardisedLinear
from snnk.hf.finding import find_ffns
from snnk.hf.replace import SentinelIdentity

QUARTERS = 4
# model types that `pool_means_` takes and whose attention follows a mask of pairs of tokens
MEAN_TYPES = ("bert", "camembert", "electra", "mpnet", "roberta", "xlm-roberta")


@dataclass(frozen=True)
class Reading:
    """What a pooling reads: four layers instead of the last, neurons besides, and two texts apart."""

    layers: bool = False
    neurons: bool = False
    pairs: bool = False


READINGS = {
    "mean": Reading(),
    "layers": Reading(layers=True),
    "pairs": Reading(layers=True, pairs=True),
    "neurons": Reading(layers=True, neurons=True),
    "neuron-pairs": Reading(layers=True, neurons=True, pairs=True),
}


def other_pooling(pooling: str, **changes: bool) -> str:
    """The pooling that differs from another in these fields of its Reading.

    Example:
        >>> other_pooling("neuron-pairs", neurons=False), other_pooling("neuron-pairs", pairs=False)
        ('pairs', 'neurons')
    """
    wanted = replace(READINGS[pooling], **changes)
    return next(name for name, reading in READINGS.items() if reading == wanted)


def refuse_neurons(model: PreTrainedModel) -> None:
    """A ValueError for a model whose classifier reads the neurons of blocks that compression would replace."""
    pooling = getattr(model.config, "snnk_pooling", None)
    if pooling in READINGS and READINGS[pooling].neurons:
        other = other_pooling(pooling, neurons=False)
        raise ValueError(
            f"the classifier was tuned with pooling {pooling!r} and reads neurons that compression would remove: tune "
            f"with pooling {other!r} and compress the result, or export this model in int8"
        )


class MeanPooler(nn.Module):
    """Replaces BERT's pooler; the hook replaces its output by the mean."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense = SentinelIdentity(dim)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]


class MeanHead(nn.Module):
    """Replaces the classification head of RoBERTa and MPNet: dropout and one linear layer on the mean."""

    def __init__(self, dim: int, dropout: float, classifier: nn.Linear) -> None:
        super().__init__()
        self.dense = SentinelIdentity(dim)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = classifier

    def forward(self, features: Tensor, **kwargs: Any) -> Tensor:
        return self.out_proj(self.dropout(features[:, 0]))


def read_layers(depth: int) -> list[int]:
    """Numbers of the layers that "layers" reads, of a model with `depth` layers; 0 is in front of the first.

    Example:
        >>> read_layers(12), read_layers(6), read_layers(1)
        ([3, 6, 9, 12], [2, 3, 5, 6], [1])
    """
    return sorted({math.ceil(depth * i / QUARTERS) for i in range(1, QUARTERS + 1)})


def pool_means_(model: PreTrainedModel, pooling: str = "mean") -> PreTrainedModel:
    """Change a BERT-like model in place, so that its classifier reads the masked mean of all tokens.

    Args:
        model: a classifier with a [CLS] pooler, in its base model or in its head.
        pooling: "mean" of the last layer, or another name in READINGS.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = pool_means_(BertForSequenceClassification(BertConfig(**sizes)).eval())
        >>> short, padded = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3, 0, 0]])
        >>> mask = torch.tensor([[1, 1, 1, 0, 0]])
        >>> bool(torch.allclose(model(short).logits, model(padded, attention_mask=mask).logits, atol=1e-5))
        True
    """
    base: Any = getattr(model, model.base_model_prefix, None)
    config: Any = model.config
    head = getattr(model, "classifier", None)
    inside = getattr(getattr(base, "pooler", None), "dense", None) is not None and isinstance(head, nn.Linear)
    behind = all(isinstance(getattr(head, name, None), nn.Linear) for name in ("dense", "out_proj"))
    if base is None or not (inside or behind):
        raise ValueError(f"{type(model).__name__} has no [CLS] pooler that a mean could replace; use pooling 'model'")
    reading = READINGS[pooling]
    if (reading.pairs or reading.neurons) and config.model_type not in MEAN_TYPES:
        known = ", ".join(MEAN_TYPES)
        raise ValueError(f"pooling {pooling!r} is for {known}; got a {config.model_type!r} model: use pooling 'layers'")
    dim, labels = config.hidden_size, config.num_labels
    layers = read_layers(config.num_hidden_layers) if reading.layers else [config.num_hidden_layers]
    blocks = find_ffns(model) if reading.neurons else []
    widths = [width * (2 if reading.pairs else 1) for width in (*(ffn.width for ffn in blocks), *(dim for _ in layers))]
    if inside:
        base.pooler = MeanPooler(dim)
    if reading.layers or not inside:
        wide = StandardisedLinear(widths, labels) if reading.neurons else nn.Linear(sum(widths), labels)
        model.classifier = wide if inside else MeanHead(dim, config.hidden_dropout_prob, wide)
    if reading.layers:
        base.register_forward_pre_hook(_ask_for_layers, with_kwargs=True)
    if reading.pairs:
        base.register_forward_pre_hook(_read_apart, with_kwargs=True)
    # by thread: how to pool, the means of neurons so far, and whether gradients are computed
    passing: dict[int, tuple[Any, list[Tensor], bool]] = {}

    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        passing[_thread()] = pooler_of(module, kwargs), [], torch.is_grad_enabled()

    def note(module: Any, args: Any, output: Tensor) -> None:
        pooler, found, graded = passing.get(_thread(), (None, [], False))
        if pooler is None:  # a block is run by itself
            return
        if graded and not torch.is_grad_enabled():
            raise ValueError(
                f"pooling {pooling!r} would get no gradients from blocks that are checkpointed in this way: give "
                "gradient_checkpointing_enable the argument gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        found.append(pooler([output]))

    def pooler_of(module: Any, kwargs: dict[str, Any]) -> Any:
        """The function that pools hidden states, for the inputs of one pass."""
        if not reading.pairs:
            return lambda states: _mean(kwargs.get("attention_mask"), states)
        if kwargs.get("position_ids") is None:
            return None
        positions = kwargs["position_ids"] - _first_position(module)
        return lambda states: _compared(positions, states)

    def pool(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        states = output.get("hidden_states")
        pooler, neurons, _ = passing.pop(_thread()) if reading.neurons else (pooler_of(module, kwargs), [], False)
        if not reading.layers:
            pooled = pooler([output.last_hidden_state])
        elif states is None:  # the output is what follows already: that of a base model that was run before
            pooled = output.last_hidden_state[:, 0]
        elif pooler is None:
            raise ValueError(f"pooling {pooling!r} finds the second text by tokens: give input_ids, not inputs_embeds")
        elif len(neurons) != len(blocks):
            raise ValueError(
                f"pooling {pooling!r} reads {len(blocks)} feed-forward blocks, and {len(neurons)} activations were "
                "run: blocks were replaced, or run in chunks (chunk_size_feed_forward). Use pooling "
                f"{other_pooling(pooling, neurons=False)!r}"
            )
        else:
            pooled = torch.cat([*neurons, pooler([states[i] for i in layers])], -1)
        found = {key: value for key, value in output.items() if not reading.layers or key != "hidden_states"}
        found |= {"pooler_output": pooled} if inside else {"last_hidden_state": pooled[:, None]}
        return type(output)(**found)

    if reading.neurons:
        base.register_forward_pre_hook(begin, with_kwargs=True)
        for ffn in blocks:
            ffn.slot("activation").register_forward_hook(note)
    base.register_forward_hook(pool, with_kwargs=True)
    config.snnk_pooling = pooling
    return model


def _thread() -> int:
    """The thread of a pass; a compiled model has one."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _ask_for_layers(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "output_hidden_states": True}


def _first_position(base: Any) -> int:
    """The position of the first token: RoBERTa and MPNet count from behind the index of padding."""
    padding = base.embeddings.position_embeddings.padding_idx
    return 0 if padding is None else int(padding) + 1


def second_text(config: Any, ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mask (n, tokens) of the second text, and the mask of tokens that are no padding.

    The second text is where token types are 1. A model without such types has separators: one or two of them stand
    between the texts, and the second of two counts as padding.
    """
    if types is None or getattr(config, "type_vocab_size", 2) < 2:
        if not isinstance(config.eos_token_id, int):
            raise ValueError(
                "pooling 'pairs' or 'neuron-pairs' does not find where the second text begins: the tokenizer gives no "
                "token_type_ids, and the model's configuration has no eos_token_id. Use pooling 'layers' or 'neurons'"
            )
        ends = (ids == config.eos_token_id).long()
        types = ((ends.cumsum(1) - ends) > 0).long()
        mask = mask * (1 - ends * nn.functional.pad(ends, (1, -1)))
    return (types * mask).bool(), mask.bool()


def _read_apart(base: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Inputs with a mask of pairs of tokens, (n, 1, tokens, tokens), and positions of each text.

    Positions are those of single texts, so that the first word of the second text has 1, and 0 for padding.
    """
    ids, mask = args[0] if args else kwargs.get("input_ids"), kwargs.get("attention_mask")
    if ids is None:  # the base model was run before
        return args, kwargs
    types = kwargs.get("token_type_ids")
    second, real = second_text(base.config, ids, torch.ones_like(ids) if mask is None else mask, types)
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    start = torch.where(second, index, ids.shape[1]).amin(1, keepdim=True)
    positions = torch.where(second, index - start + 1, index) * real
    first = index == 0
    allowed = (second[:, :, None] == second[:, None, :]) & real[:, None, :] & ~first[:, :, None]
    allowed = allowed | first[:, None, :] | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
    dtype = base.embeddings.position_embeddings.weight.dtype
    shut = torch.zeros(allowed.shape, dtype=dtype, device=ids.device).masked_fill(~allowed, torch.finfo(dtype).min)
    changed = {"attention_mask": shut[:, None], "position_ids": positions + _first_position(base)}
    if types is not None:
        changed["token_type_ids"] = torch.zeros_like(ids)
    return args, {**kwargs, **changed}


def _compared(positions: Tensor, states: Sequence[Tensor]) -> Tensor:
    """[|u - v|, u v] of hidden states (n, tokens, d) side by side, (n, 2 d per state); positions as in _read_apart."""
    one = positions == torch.arange(positions.shape[1], device=positions.device)
    one, two = one & (positions > 0), ~one & (positions > 0)
    found: list[Tensor] = []
    for hidden in states:
        u, v = (_mean(part, [hidden]) for part in (one, two))
        found += [(u - v).abs(), u * v]
    return torch.cat(found, -1)


def _mean(mask: Tensor | None, states: Sequence[Tensor]) -> Tensor:
    """The means (n, d) of hidden states (n, tokens, d), side by side."""
    if mask is None:
        return torch.cat([hidden.mean(1) for hidden in states], -1)
    weights = mask.to(states[0].dtype)[..., None]
    total = weights.sum(1).clamp_min(1)
    return torch.cat([(hidden * weights).sum(1) / total for hidden in states], -1)


class MeanPooled:
    """AutoModelForSequenceClassification with `pool_means_` before weights are loaded."""

    pooling = "mean"

    @classmethod
    def from_pretrained(cls, source: Any, **kwargs: Any) -> Any:
        """Load the model of a folder or of the hub, as the subclass with the mean of its own class."""
        known: Any = AutoModelForSequenceClassification._model_mapping
        # kwargs has options of the configuration and of the loader, which the loader separates
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if type(config) not in known:
            raise ValueError(f"{source} is a {config.model_type!r} model, which has no classifier for texts")
        kind = mean_pooled(known[type(config)], cls.pooling)
        return kind.from_pretrained(source, **{**kwargs, "trust_remote_code": False})


class LayersPooled(MeanPooled):
    """The same with the means of four layers."""

    pooling = "layers"


class PairsPooled(MeanPooled):
    """The same with comparisons of two texts that are read apart."""

    pooling = "pairs"


class NeuronsPooled(MeanPooled):
    """The same with the means of four layers and of the neurons of all feed-forward blocks."""

    pooling = "neurons"


class NeuronPairsPooled(MeanPooled):
    """The same with comparisons of these means, of two texts that are read apart."""

    pooling = "neuron-pairs"


KINDS = (MeanPooled, LayersPooled, PairsPooled, NeuronsPooled, NeuronPairsPooled)
POOLED: dict[str, type[MeanPooled]] = {kind.pooling: kind for kind in KINDS}
PREFIXES = tuple(kind.__name__ for kind in POOLED.values())  # of the names of classes


def mean_pooled(kind: type[PreTrainedModel], pooling: str) -> Any:
    """A subclass with the mean, so that transformers loads weights directly into it."""

    def start(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        pool_means_(self, pooling)

    def draw(self: Any, module: nn.Module) -> None:
        """Values that are not in a file; transformers' functions leave those that are."""
        kind._init_weights(self, module)
        if isinstance(module, StandardisedLinear):
            initialization.zeros_(module.mean)
            initialization.ones_(module.scale)

    return type(f"{POOLED[pooling].__name__}{kind.__name__}", (kind,), {"__init__": start, "_init_weights": draw})
