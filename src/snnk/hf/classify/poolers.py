r"""Poolers as SNNK layers (section 4.2.1; the appendices on poolers, on bundling them and on bundled networks).

    tanh(W_p x + b_p) W_c^T + b_c  ~  phi(x) psi(W_p, b_p)^T W_c^T + b_c  =  phi(x) M^T + b_c,    M = W_c psi(W_p, b_p)

`replace_pooler_` puts A = psi(W_p, b_p), (d, m), in the pooler's place, to be trained with the classifier;
`merge_pooler_` multiplies the two to M, (classes, m); `bundled_head_` starts with M, which `snnk.hf.fit_classifier_`
computes in closed form. transformers saves and loads all of them, see snnk/hf/quantizer.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from snnk import _checks
from snnk.hf.classify.heads import inputs_of
from snnk.hf.classify.sites import Layer, Pooler, find_pooler
from snnk.hf.models import Batch
from snnk.hf.replace import Features, place_of, zeros
from snnk.maps import FEATURE_MAPS, URF, FeatureMap
from snnk.nn.linear import SNNKLinear
from snnk.ridge.sums import RidgeStats

FOLDS = 5


@dataclass(frozen=True)
class HeadReport:
    """How many numbers one task stores for pooler and classifier: dense, with an SNNK layer, and merged."""

    dense: int
    replaced: int
    merged: int
    frozen: int  # numbers of the feature map, which all tasks share
    bits: int  # per number

    def mbit(self, numbers: int) -> float:
        return numbers * self.bits / 1e6

    def __str__(self) -> str:
        dense, replaced, merged, frozen = (
            f"{n:,} ({self.mbit(n):.2f} Mbit)" for n in (self.dense, self.replaced, self.merged, self.frozen)
        )
        return (
            f"numbers of pooler and classifier: {dense} dense, {replaced} with an SNNK layer, {merged} merged; "
            f"the last two do not include the frozen feature map, {frozen}, which is stored too; tasks can share it"
        )


def replace_pooler_(
    model: PreTrainedModel,
    num_features: int = 512,
    feature_map: str | FeatureMap = "cos",
    *,
    init: str = "pretrained",
    normalize: str | None = "dim",
    pooler: nn.Linear | None = None,
    batches: Iterable[Batch] | None = None,
    seed: int = 0,
    **options: Any,
) -> Pooler:
    """Replace a pooler and its activation by an SNNK layer, which is then trained with the classifier.

    A = psi(W, b) is only the start of training and need not be a good estimate, so that the warnings and errors of the
    map are off; on_error="warn" or "raise" turns them on.

    Args:
        model: a transformers model with a row in POOLERS.
        num_features: number m of features; the paper's values go up to the hidden size.
        feature_map: a name in FEATURE_MAPS or a FeatureMap. The paper has "cos", which is an even function: without a
            bias, the start does not depend on the sign of w.x, and training has to find it. "tanh", the activation of
            the pooler, has the same features and starts close to the pooler.
        init: "pretrained", psi of the weights of the pooler; "random", psi of random weights; "fitted", least squares
            from the features to the outputs of the pooler for `batches`. Only the last is accurate for large |w||x|.
        normalize: "dim" divides inputs and weights by d^(1/4), as the paper does for images; or "none" or "unit".
            With "none", |w||x| of a pretrained pooler is far too large for psi.
        pooler: a pretrained dense layer, for a model without one. ViTForImageClassification has none; use
            ViTModel.from_pretrained(name).pooler.dense.
        batches: inputs of the model for init="fitted", without labels.
        seed, **options: passed to the map, such as projection="iid".

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = BertForSequenceClassification(BertConfig(**sizes)).eval()
        >>> _ = replace_pooler_(model, num_features=16)
        >>> freeze_but_head_(model)
        ['bert.pooler.dense.inner.weight', 'classifier.weight', 'classifier.bias']
    """
    _checks.choose(init, ["pretrained", "random", "fitted"], "init")
    if (init == "fitted") != (batches is not None):
        raise ValueError(f"init='fitted' needs batches=, and no other init does; got init={init!r}")
    found = find_pooler(model)
    if found.kind != "dense":
        raise ValueError(f"the pooler of {type(model).__name__} is replaced already; start from the original model")
    old, shape = found.reader, found.shape
    place = place_of(old.weight)
    if pooler is not None and (pooler.in_features, pooler.out_features) != shape:
        raise ValueError(f"pooler must be a linear layer {shape[0]} -> {shape[1]}; got {pooler}")
    if init != "random" and pooler is None and found.dense is None:
        raise ValueError(
            f"{type(model).__name__} has no pretrained pooler, as its classifier reads the token itself: "
            "give pooler=, such as ViTModel.from_pretrained(name).pooler.dense, or use init='random'"
        )
    dense: Any = copy.deepcopy(pooler).to(**place) if pooler is not None else found.dense
    if isinstance(feature_map, FeatureMap):
        feature_map = copy.deepcopy(feature_map).to(**place)
    else:
        options = {**_defaults(feature_map, shape[0], normalize or "none"), **options}
    if init == "random":
        if not isinstance(feature_map, FeatureMap):
            options = {**options, **place}
        layer = SNNKLinear(*shape, num_features, feature_map, seed=seed, **options).to(**place)
    else:
        layer = SNNKLinear.from_linear(dense, None, num_features, feature_map=feature_map, seed=seed, **options)
    if batches is not None:
        inputs = inputs_of(model, old, batches)
        _fit(layer, (x for _, x, _ in inputs), lambda x: found.activation(dense(x)))
    found.note_("layer", layer.feature_map)
    found.put_(Layer(layer))
    return found


def freeze_but_head_(model: PreTrainedModel) -> list[str]:
    """Freeze everything but the pooler and the classifier; returns the names of the parameters that are trained."""
    found = find_pooler(model)
    model.requires_grad_(False)
    for module in (found.dense, found.classifier):
        if isinstance(module, nn.Module) and not isinstance(module, Features):
            for parameter in (module.inner.weight,) if isinstance(module, Layer) else module.parameters():
                parameter.requires_grad_(True)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@torch.no_grad()
def merge_pooler_(model: PreTrainedModel) -> HeadReport:
    """Merge an SNNK pooler and the classifier into one (classes, m) matrix on the features, in place.

    In eval mode the outputs stay the same up to rounding. In float32 the merged outputs are more accurate: M is
    computed in float64, and with a classifier of large weights, such as a closed form, large numbers cancel in the
    logits. If the head is trained further, dropout acts on the features.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = BertForSequenceClassification(BertConfig(**sizes)).eval()
        >>> _ = replace_pooler_(model, num_features=16)
        >>> print(merge_pooler_(model).merged, model.classifier)
        34 Linear(in_features=16, out_features=2, bias=True)
    """
    found = find_pooler(model)
    if found.kind != "layer":
        what = "merged already" if found.kind == "head" else "no SNNK layer; replace_pooler_ makes it one"
        raise ValueError(f"the pooler of {type(model).__name__} is {what}")
    classifier, layer = found.classifier, found.dense.inner
    if not isinstance(classifier, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no classifier behind its pooler to merge it with")
    place = place_of(layer.weight)
    head = zeros(layer.num_features, classifier.out_features, True, place)
    head.weight.copy_(classifier.weight.double() @ layer.weight.double())
    if classifier.bias is not None:
        head.bias.copy_(classifier.bias)
    behind = sum(p.numel() for p in classifier.parameters())
    report = HeadReport(
        dense=layer.out_features * (layer.in_features + layer.bias) + behind,
        replaced=layer.weight.numel() + behind,
        merged=sum(p.numel() for p in head.parameters()),
        frozen=sum(t.numel() for t in layer.feature_map.state_dict().values()),
        bits=8 * head.weight.element_size(),
    )
    found.note_("head", layer.feature_map)
    found.put_(Features(layer.feature_map, **place), head)
    return report


def bundled_head_(
    model: PreTrainedModel,
    num_features: int = 1024,
    feature_map: str | FeatureMap = "cos",
    *,
    init: str = "pretrained",
    **options: Any,
) -> HeadReport:
    """Replace pooler and classifier by a bundled network: one (classes, m) matrix and a bias on frozen features.

    Args:
        model, num_features, feature_map, **options: see `replace_pooler_`.
        init: "zeros", or an `init` of `replace_pooler_`, whose matrix is then multiplied with the classifier.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = BertForSequenceClassification(BertConfig(**sizes, num_labels=1))
        >>> bundled_head_(model, 64).merged, freeze_but_head_(model)
        (65, ['classifier.weight', 'classifier.bias'])
        >>> ids = torch.randint(9, (100, 5))
        >>> from snnk.hf import fit_classifier_
        >>> fit_classifier_(model, [{"input_ids": ids, "labels": ids[:, 0].float()}]).rows
        100
    """
    _checks.choose(init, ["pretrained", "random", "fitted", "zeros"], "init")
    start = "random" if init == "zeros" else init
    if not isinstance(find_pooler(model).classifier, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no classifier behind its pooler to bundle it with")
    replace_pooler_(model, num_features, feature_map, init=start, **options)
    report = merge_pooler_(model)
    if init == "zeros":
        for parameter in find_pooler(model).classifier.parameters():
            parameter.data.zero_()
    return report


def _defaults(feature_map: Any, d: int, normalize: str) -> dict[str, Any]:
    """Options for a map by its name; a URF needs the norms of inputs behind a LayerNorm and of random weights."""
    make = _checks.look_up(feature_map, FEATURE_MAPS, "feature map")
    options: dict[str, Any] = {"normalize": normalize}
    if isinstance(make, partial) and make.func is URF:
        norms = (1.0, 1.0) if normalize == "unit" else (d**0.5, 3**-0.5)
        scale = d**-0.25 if normalize == "dim" else 1.0
        options.update(x_norm=norms[0] * scale, w_norm=norms[1] * scale, on_error="ignore")
    return options


@torch.no_grad()
def _fit(layer: SNNKLinear, inputs: Iterable[Tensor], target: Callable[[Tensor], Tensor]) -> None:
    """Set A by least squares without intercept, as SNNK layers have none, and with lam by folds."""
    stats = RidgeStats(layer.num_features, layer.out_features, folds=FOLDS)
    for x in inputs:
        x = x.flatten(0, -2)
        stats.update(layer.feature_map.phi(x).cpu(), target(x).float().cpu())
    count = int(stats.rows.sum())
    if count < FOLDS:
        raise ValueError(f"the batches have {count} rows to fit the pooler to; at least {FOLDS} are needed")
    layer.weight.copy_(stats.solve("kfold", intercept=False).weight)
