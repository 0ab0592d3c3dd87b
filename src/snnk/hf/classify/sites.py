r"""The pooler of a model and the classifier behind it: one row of names per architecture.

A pooler computes f(W x + b) for one token x, and a classifier W_c f(W x + b) + b_c. f may be a module, or a call in the
forward of a module; then that module is replaced by one without f.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from snnk import _checks
from snnk.hf.replace import Features, SentinelIdentity, note_, place_of, rebuild_map, set_slot, zeros
from snnk.maps import FeatureMap
from snnk.nn.linear import SNNKLinear


class Layer(SentinelIdentity):
    """An SNNKLinear, with a `weight` of shape [0] at the key of the dense layer that it replaces."""

    def __init__(self, inner: SNNKLinear) -> None:
        super().__init__(inner.in_features, device=inner.weight.device, dtype=inner.weight.dtype)
        self.out_features, self.inner = inner.out_features, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class FirstToken(nn.Module):
    """Replaces a head or pooler with the activation in its forward: the same modules, without activation."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.dense: Any = old.dense
        self.dropout: Any = old.dropout
        self.out_proj: Any = getattr(old, "out_proj", None)

    def forward(self, features: Tensor, **kwargs: Any) -> Tensor:
        x = self.dense(self.dropout(features[:, 0]))
        return x if self.out_proj is None else self.out_proj(self.dropout(x))


class Signed(SentinelIdentity):
    """(h, -h) for h = inner(x): a ReLU behind it loses no information, and dropout acts as it would on h."""

    def __init__(self, inner: nn.Module, old: nn.Linear) -> None:
        super().__init__(old.in_features, device=old.weight.device, dtype=old.weight.dtype)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return torch.cat([h, -h], -1)


class Unsigned(nn.Module):
    """A linear layer on h, whose input is the ReLU of (h, -h)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        positive, negative = x.chunk(2, -1)
        return self.linear(positive - negative)


class Inserted(SentinelIdentity):
    """A pooler in front of a classifier that had none."""

    def __init__(self, dense: nn.Module, out_proj: nn.Linear, old: nn.Linear) -> None:
        super().__init__(old.in_features, device=old.weight.device, dtype=old.weight.dtype)
        self.dense, self.out_proj = dense, out_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.dense(x))


@dataclass(frozen=True)
class Site:
    """One place for a pooler in an architecture.

    Args:
        dense, classifier, activation: names of the dense layer, the classifier behind it and the activation; the last
            is None if the activation is not a module.
        form: "slot" if dense layer and activation are modules to be replaced; "head" if a module has the activation in
            its forward; "relu" if the model has a ReLU in its forward; "insert" if there is no pooler, and one is
            placed before the classifier.
        in_base: whether the names of the pooler are relative to the base model; that of the classifier never is.
        function: the activation if it is not a module: a name in transformers' ACT2FN, or the entry of the
            configuration that has this name.
    """

    dense: str
    classifier: str
    activation: str | None = None
    form: str = "slot"
    in_base: bool = False
    function: str = "tanh"

    @property
    def new(self) -> tuple[str, str]:
        """Names of the modules that replace the dense layer and the classifier."""
        if self.form == "relu":
            return f"{self.dense}.inner", f"{self.classifier}.linear"
        if self.form == "insert":
            return f"{self.classifier}.dense", f"{self.classifier}.out_proj"
        return self.dense, self.classifier


_BASE = Site("pooler.dense", "classifier", "pooler.activation", in_base=True)
_HEAD = Site("classifier.dense", "classifier.out_proj", form="head")
_INSERT = Site("classifier", "classifier", form="insert")
_DEBERTA = Site("pooler.dense", "classifier", form="head", function="pooler_hidden_act")

# By config.model_type; of several sites, the first that a model has is used. To add a row, add a configuration to
# tests/hf/classify/test_poolers.py.
POOLERS: dict[str, tuple[Site, ...]] = {
    "albert": (Site("pooler", "classifier", "pooler_activation", in_base=True),),
    "bert": (_BASE,),
    "camembert": (_HEAD, _BASE),
    "deberta": (_DEBERTA,),
    "deberta-v2": (_DEBERTA,),
    "deit": (_BASE, _INSERT),
    "dinov2": (_INSERT,),
    "distilbert": (Site("pre_classifier", "classifier", form="relu", function="relu"),),
    "electra": (Site("classifier.dense", "classifier.out_proj", "classifier.activation"),),
    "mpnet": (_HEAD, _BASE),
    "roberta": (_HEAD, _BASE),
    "vit": (_BASE, _INSERT),
    "xlm-roberta": (_HEAD, _BASE),
}


@dataclass(eq=False)
class Pooler:
    """The pooler and the classifier of a model; properties describe the modules that are there at present."""

    model: PreTrainedModel = field(repr=False)
    site: Site

    def at(self, path: str, in_base: bool = False) -> Any:
        module: Any = self.model
        for name in self._full(path, in_base).split("."):
            module = getattr(module, name, None)
        return module

    @property
    def dense(self) -> Any:
        """The dense layer of the pooler, or its replacement; None if a pooler can be inserted."""
        new = self.at(self.site.new[0], self.site.in_base)
        return new if new is not None or self.site.form == "insert" else self.at(self.site.dense, self.site.in_base)

    @property
    def activation(self) -> Any:
        """f of the pooler; tanh if a pooler can be inserted."""
        site = self.site
        if site.activation is not None:
            return self.at(site.activation, site.in_base)
        return ACT2FN[getattr(self.model.config, site.function, site.function)]

    @property
    def classifier(self) -> Any:
        new = self.at(self.site.new[1])
        return new if new is not None else self.at(self.site.classifier)

    @property
    def kind(self) -> str:
        """The kind of pooler: "dense", "layer" (an SNNK layer), or "head" (features, merged with the classifier)."""
        dense = self.dense
        return "layer" if isinstance(dense, Layer) else "head" if isinstance(dense, Features) else "dense"

    @property
    def reader(self) -> Any:
        """The linear layer that has the pooler's inputs: the dense layer, or a classifier without pooler."""
        return self.classifier if self.site.form == "insert" else self.dense

    @property
    def shape(self) -> tuple[int, int]:
        """Sizes of the inputs and outputs of the pooler."""
        old = self.reader
        return old.in_features, old.in_features if self.site.form == "insert" else old.out_features

    @property
    def fits(self) -> bool:
        """Whether the model has the modules of this site."""
        linear = isinstance(self.classifier, nn.Linear)
        if self.site.form == "insert":
            return linear
        return isinstance(self.dense, nn.Linear | SentinelIdentity) and (linear or self.site.in_base)

    def put_(self, module: nn.Module, classifier: nn.Linear | None = None) -> None:
        """Replace dense layer and activation by a module, and the classifier by a linear layer."""
        site, behind = self.site, classifier or self.classifier
        owner = site.dense.rpartition(".")[0]
        if site.form == "relu" and not isinstance(self.at(site.dense), Signed):
            self._set(site.dense, Signed(module, self.dense))
            self._set(site.classifier, Unsigned(behind))
        elif site.form == "insert" and not isinstance(self.at(site.classifier), Inserted):
            self._set(site.classifier, Inserted(module, behind, self.classifier))
        elif site.form == "head" and not isinstance(self.at(owner), FirstToken):
            self._set(owner, FirstToken(self.at(owner)))
        elif site.activation is not None:
            self._set(site.activation, nn.Identity(), site.in_base)
        self._set(site.new[0], module, site.in_base)
        if classifier is not None:
            self._set(site.new[1], classifier)

    def note_(self, kind: str, feature_map: FeatureMap) -> None:
        """Write the kind of the pooler to the configuration; a map that no file can describe is an error."""
        entry = {"name": self.site.dense, "kind": kind, "num_features": feature_map.num_features}
        note_(self.configs, None, {**entry, "map": feature_map.to_config()})

    @property
    def configs(self) -> list[Any]:
        """The configurations of base model and head, which are one object for most models."""
        return list({id(c): c for c in (self.model.base_model.config, self.model.config)}.values())

    def _full(self, path: str, in_base: bool) -> str:
        below = in_base and self.model.base_model is not self.model
        return f"{self.model.base_model_prefix}.{path}" if below else path

    def _set(self, path: str, module: nn.Module, in_base: bool = False) -> None:
        set_slot(self.model, self._full(path, in_base), module.train(self.model.training))


def find_pooler(model: PreTrainedModel) -> Pooler:
    """The pooler of a model, or the place for one; a ValueError if there is none.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> find_pooler(model).kind, find_pooler(model).dense
        ('dense', Linear(in_features=8, out_features=8, bias=True))
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel; got {type(model).__name__}; unwrap it first")
    kind = model.config.model_type
    if kind not in POOLERS:
        raise ValueError(f"no pooler of {kind!r} models is known, only of {', '.join(POOLERS)}; add a row to POOLERS")
    for site in POOLERS[kind]:
        if (pooler := Pooler(model, site)).fits:
            return pooler
    names = ", ".join(site.dense for site in POOLERS[kind])
    raise ValueError(f"{type(model).__name__} has no pooler; {kind!r} models have it at {names}")


def rebuild_pooler_(model: PreTrainedModel, entry: dict[str, Any], room: int) -> Pooler:
    """The pooler of a configuration, whose tensors are loaded later; a model without that head is not changed."""
    names = {site.dense: site for site in POOLERS.get(model.config.model_type, ())}
    found = Pooler(model, _checks.look_up(entry["name"], names, "pooler"))
    if not found.fits:
        return found
    old, shape = found.reader, found.shape
    place = place_of(old.weight)
    fm = rebuild_map("the pooler", entry, shape[0], room).to(**place)
    found.note_(entry["kind"], fm)
    if entry["kind"] == "layer":
        found.put_(Layer(SNNKLinear(*shape, fm.num_features, fm, **place)))
    else:
        behind = found.classifier
        head = zeros(fm.num_features, behind.out_features, True, place) if isinstance(behind, nn.Linear) else None
        found.put_(Features(fm, **place), head)
    return found
