r"""Modules that replace a feed-forward block, and the JSON that describes them.

    atoms      y = A f(W' x + b') + c, W' (m, d); gated: y = A (f(Wg' x + bg') * (W' x + b')) + c
    features   y = A phi(x) + c, phi a feature map with m features: the bundled block of section 4.4
    linear     y = A x + c
    drop       y = c

The new modules, filled with zeros, go into the slots of the old ones, so that dropout, residual and LayerNorm stay as
they are. Loading such a file without snnk must fail instead of drawing random weights: where no shape differs by
itself, a tensor `weight` of shape [0], the sentinel, makes sure that it does. Where files have the gate and the first
layer as one tensor, both have a sentinel of shape [1], as [0] cannot be split.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils.quantization_config import QuantizationConfigMixin

from snnk import _checks
from snnk.hf.architectures import UNSEEN, Architecture, AttentionNames
from snnk.hf.model_blocks import FFN, Chain, Cost, cost_of, weight_of
from snnk.maps import FEATURE_MAPS, FeatureMap, feature_map_from_config, make_feature_map
from snnk.maps.base import CLASSES

METHOD = "snnk"  # the quant_method of config.json
PLAIN = ("linear", "drop")  # kinds without features
OWN_KINDS = ("atoms", *PLAIN)  # beside the names in FEATURE_MAPS
LOW_RANK = "low-rank"  # the kind of attention with fewer dimensions per head, see low_rank.py
BIASED = ("atoms", LOW_RANK)  # kinds whose last layer may do without a bias that the original had not
Device = torch.device | str | None
Entry = dict[str, Any]  # JSON that describes a new block or pooler
NAME = r"[A-Za-z]\w*(\.([A-Za-z]\w*|\d+))*"  # of a module or its attribute; no part begins with an underscore
POOLER_KINDS = ("layer", "head")  # kinds of modules that replace a pooler, see classify/poolers.py


class FactoryKwargs(TypedDict):
    """Device and dtype of new modules."""

    device: torch.device | str
    dtype: torch.dtype


def place_of(tensor: Tensor) -> FactoryKwargs:
    return {"device": tensor.device, "dtype": tensor.dtype}


class Sentinel(nn.Module):
    """A module with the sentinel: a `weight` of shape [0] or [1], which no plain checkpoint has."""

    weight: Tensor

    def __init__(
        self, in_features: int, size: int = 0, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.in_features = self.out_features = in_features
        self.register_buffer("weight", torch.zeros(size, device=device, dtype=dtype))


class SentinelIdentity(Sentinel):
    """The identity, with the sentinel."""

    @property
    def bias(self) -> Tensor:
        """The sentinel: SigLIP's loader draws the bias of a first layer, unless it is a tensor that was loaded."""
        return self.weight

    @bias.setter
    def bias(self, value: Tensor) -> None:
        """PEFT gives a module that it unwraps weight and bias of the wrapper, which are both the sentinel."""
        self.weight = value

    def forward(self, x: Tensor) -> Tensor:
        return x


class Features(SentinelIdentity):
    """phi(x) of a feature map: (*, in_features) -> (*, num_features)."""

    def __init__(self, feature_map: FeatureMap, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(feature_map.in_features, device=device, dtype=dtype)
        self.out_features = feature_map.num_features
        self.map = feature_map.to(device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x)


class Constant(Sentinel):
    """The vector `bias` for every token: (*, any) -> (*, out_features)."""

    def __init__(self, out_features: int, *, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(0, device=device, dtype=dtype)  # GPT-2's loader reads its weight
        self.out_features = out_features
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        # a copy, as Falcon adds to the output of its blocks in place
        return self.bias.expand(*x.shape[:-1], self.out_features).clone()


class SNNKQuantizationConfig(QuantizationConfigMixin):
    """`quantization_config` of config.json: the blocks, and the pooler, that are replaced, and by what.

    Args:
        blocks: {name of the block: {"kind": ..., "num_features": ..., "map": ..., "ranks": ...}}; the last three only
            where the kind has them. With "bias": false, the last layer has no bias that the original had not.
        pooler: None, or {"name": ..., "kind": "layer" or "head", "num_features": ..., "map": ...}.
        row: names of the blocks' modules, as in `Architecture`, for a model type that the table does not have.

    Example:
        >>> SNNKQuantizationConfig({"encoder.layer.0": {"kind": "atoms", "num_features": 8}}).to_dict()["quant_method"]
        'snnk'
    """

    pooler: Entry | None = None
    row: Entry | None = None

    def __init__(
        self, blocks: Any = None, quant_method: str = METHOD, pooler: Any = None, row: Any = None, **unknown: Any
    ) -> None:
        if quant_method != METHOD or unknown or not isinstance(blocks, dict):
            keys = {"quant_method": quant_method, "blocks": blocks, **unknown}
            raise ValueError(f"quantization_config must be quant_method {METHOD!r} and blocks; got {str(keys)[:500]}")
        for name, entry in blocks.items():
            _check_entry(name, entry)
        self.quant_method: Any = METHOD
        self.blocks: dict[str, Entry] = copy.deepcopy(blocks)
        if pooler is not None:  # otherwise files do not have the key
            _check_pooler(pooler)
            self.pooler = copy.deepcopy(pooler)
        if row is not None:
            self.row = check_row(row)

    def get(self, key: str, default: Any = None) -> Any:
        """Mirrors dict.get: transformers treats an in-memory configuration as a dict."""
        return getattr(self, key, default)


def _check_entry(name: object, entry: object) -> None:
    """Refuse unknown kinds, keys that the kind does not have or lacks, and sizes that are no positive integers."""
    if not isinstance(name, str) or not isinstance(entry, dict):
        raise ValueError(f"blocks must be {{name: {{kind: ...}}}}; got {name!r}: {entry!r}")
    kind = _checks.choose(entry.get("kind"), [*OWN_KINDS, LOW_RANK, "features", *FEATURE_MAPS], f"kind of {name}")
    if kind == LOW_RANK:
        wanted = {"kind", "ranks"}
    else:
        wanted = {"kind"} if kind in PLAIN else {"kind", "num_features"} | ({"map"} if kind != "atoms" else set())
    if set(entry) - ({"bias"} if kind in BIASED else set()) != wanted:
        raise ValueError(f"{name} ({kind}) must have the keys {sorted(wanted)}; got {sorted(map(str, entry))}")
    if entry.get("bias", False) is not False:
        raise ValueError(f"bias of {name} can only be false; got {str(entry['bias'])[:200]!r}")
    _check_sizes(name, entry)
    if kind == LOW_RANK:
        _checks.ranks(entry["ranks"], name)


def check_row(row: object) -> dict[str, Any]:
    """A copy of the row of a quantization_config, if it consists of plain dotted names; a ValueError otherwise."""
    if isinstance(row, Mapping) and "block" in row and "layer" not in row:  # the key of earlier files
        row = {"layer" if key == "block" else key: value for key, value in row.items()}
    found = _check_names("row", row, {f.name: f for f in fields(Architecture) if f.name not in UNSEEN})
    if found.get("attention") is not None:
        known = {f.name: f for f in fields(AttentionNames) if f.name not in UNSEEN}
        found["attention"] = _check_names("attention of row", found["attention"], known)
    return found


def _check_names(what: str, names: object, known: Mapping[str, Field[Any]]) -> dict[str, Any]:
    needed = {name for name, f in known.items() if f.default is MISSING}
    if not isinstance(names, Mapping) or not needed <= set(names) <= set(known):
        raise ValueError(
            f"{what} must have the keys {sorted(needed)} and may have {sorted(known)}; got {str(names)[:500]}"
        )
    for key, value in names.items():
        default = known[key].default
        if isinstance(default, bool):
            right = isinstance(value, bool)
        elif key == "attention":
            right = value is None or isinstance(value, Mapping)
        else:
            pattern = NAME + r"\.\{\}" if key == "layer" else NAME
            empty = default is not MISSING and value == default
            right = empty or (isinstance(value, str) and re.fullmatch(pattern, value) is not None)
        if not right:
            raise ValueError(f"{key} in {what} must be a plain dotted name, as of a module; got {str(value)[:200]!r}")
    return dict(names)


def _check_pooler(entry: object) -> None:
    wanted = ["kind", "map", "name", "num_features"]
    if not isinstance(entry, dict) or sorted(map(str, entry)) != wanted or not isinstance(entry["name"], str):
        raise ValueError(f"pooler must have the keys {wanted}; got {str(entry)[:500]}")
    _checks.choose(entry["kind"], POOLER_KINDS, "kind of pooler")
    _check_sizes("the pooler", entry)


def _check_sizes(name: str, entry: Entry) -> None:
    if "num_features" in entry:
        _checks.positive_int(entry["num_features"], f"num_features of {name}")
    if "map" in entry:
        if not isinstance(entry["map"], dict):
            raise ValueError(f"map of {name} must be a dict; got {type(entry['map']).__name__}")
        _checks.choose(entry["map"].get("class"), CLASSES, f"feature map of {name}")


@dataclass(eq=False)
class Replacement:
    """A block's new modules, to be filled, and its old ones, to be copied from or put back.

    `down` is an nn.Linear, or for "drop" a module with a `bias`; `up` and `gate` are nn.Linear for "atoms". If they are
    one layer, it is `up`, and `gate` is None. The old modules are kept as long as this object.
    """

    ffn: FFN
    kind: str
    up: nn.Module
    down: Any
    gate: nn.Module | None = None
    map: FeatureMap | None = None
    original: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def modules(self) -> list[nn.Module]:
        """The new modules, in the order up, gate, down."""
        return [module for module in (self.up, self.gate, self.down) if module is not None]

    def phi(self, x: Tensor) -> Tensor:
        """The features that `down` is linear in: (*, in) -> (*, m); x itself for "linear", m = 0 for "drop"."""
        return x[..., :0] if self.kind == "drop" else self.ffn.hidden(x)

    @torch.no_grad()
    def fill_(self, weight: Tensor | None, bias: Tensor | None) -> Replacement:
        """Set `down`: (out, m), None for "drop", and (out,), None for zeros."""
        for name, new in (("weight", weight), ("bias", bias)):
            old = None if (self.kind, name) == ("drop", "weight") else getattr(self.down, name)
            shapes = [None if t is None else tuple(t.shape) for t in (old, new)]
            if (name, new) != ("bias", None) and shapes[0] != shapes[1]:
                raise ValueError(
                    f"{name} of {self.ffn.name} ({self.kind}) must have shape {shapes[0]}; got {shapes[1]}"
                )
            if old is not None:
                _ = old.zero_() if new is None else old.copy_(_checks.finite(new, name))
        return self

    @torch.no_grad()
    def copy_rows_(self, rows: Sequence[int] | Tensor) -> Replacement:
        """For "atoms": keep these neurons as they are, m row numbers of the old first layer."""
        if self.kind != "atoms":
            raise ValueError(f"only atoms are rows of the old layer; {self.ffn.name} is {self.kind}")
        old_down: Any = self.original["down"]
        rows = torch.as_tensor(rows, device=old_down.weight.device)
        if rows.shape != (self.down.in_features,):
            raise ValueError(f"{self.ffn.name} needs {self.down.in_features} rows; got shape {tuple(rows.shape)}")
        for which in ("up", "gate"):
            new: Any = getattr(self, which)
            if new is not None:
                chosen = torch.cat([rows, rows + weight_of(old_down).shape[1]]) if self.ffn.fused else rows
                new.weight.copy_(weight_of(self.original[which])[chosen])
                if new.bias is not None:
                    new.bias.copy_(self.original[which].bias[chosen])
        return self.fill_(weight_of(old_down)[:, rows], old_down.bias)

    def restore_(self) -> None:
        """Put the old modules back."""
        for path, module in self.original["slots"].items():
            set_slot(self.ffn.layer, path, module)
        note_(self.ffn.configs, self.ffn.name, self.original["entry"], self.ffn.found)


def replace_(
    ffn: FFN,
    kind: str | FeatureMap,
    num_features: int | None = None,
    *,
    new_bias: bool = True,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: Device = None,
    **options: Any,
) -> Replacement:
    """Put modules of another kind, filled with zeros, into a block's slots, and note it in the model's configuration.

    Args:
        ffn: a block of `find_ffns`.
        kind: "atoms", "linear", "drop", a name in FEATURE_MAPS, or a FeatureMap.
        num_features: number m of features; None for "linear" and "drop".
        new_bias: whether `down` gets a bias where the original has none, for "atoms".
        seed, **options: of the feature map.
        dtype, device: of the new modules. Default: those of the block.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from snnk.hf import find_ffns
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> new = replace_(find_ffns(model)[0], "relu", 16)
        >>> new.fill_(torch.ones(8, 16), torch.zeros(8)).phi(torch.ones(2, 8)).shape
        torch.Size([2, 16])
        >>> model.config.quantization_config.blocks["encoder.layer.0"]["kind"]
        'relu'
    """
    old = ffn.up_weight()
    place: FactoryKwargs = {"device": device or old.device, "dtype": dtype or old.dtype}
    return _swap(ffn, *_entry(ffn, kind, num_features, place, seed, new_bias, **options), place)


def cost_after(ffn: FFN, kind: str | FeatureMap, num_features: int | None = None, *, new_bias: bool = True) -> Cost:
    """The cost of a block after `replace_`; the block itself stays as it is."""
    place: FactoryKwargs = {"device": "meta", "dtype": ffn.up_weight().dtype}
    entry, feature_map = _entry(ffn, kind, num_features, place, new_bias=new_bias)
    up, gate, down = _modules(ffn, entry, feature_map, place)
    return cost_of(_chain(ffn.row, up, down, place) if _chained(ffn, entry) else (up, gate, down))


def _entry(
    ffn: FFN,
    kind: str | FeatureMap,
    num_features: int | None,
    place: FactoryKwargs,
    seed: int = 0,
    new_bias: bool = True,
    **options: Any,
) -> tuple[Entry, FeatureMap | None]:
    """The JSON of a new block, and its feature map."""
    feature_map: FeatureMap | None = None
    if isinstance(kind, FeatureMap):
        feature_map = make_feature_map(kind, ffn.in_features, num_features or kind.num_features, **options)
        kind, num_features = "features", feature_map.num_features
    elif _checks.choose(kind, [*OWN_KINDS, *FEATURE_MAPS], "kind") in FEATURE_MAPS:
        num_features = _checks.positive_int(num_features, "num_features")
        feature_map = make_feature_map(kind, ffn.in_features, num_features or 0, seed=seed, **place, **options)
    elif options:
        raise TypeError(f"{', '.join(options)}: only feature maps have options; {kind!r} has none")
    if kind in PLAIN and num_features:
        raise ValueError(f"{kind!r} has no features to count; got num_features={num_features!r}")
    entry: Entry = {"kind": kind} if kind in PLAIN else {"kind": kind, "num_features": num_features}
    if feature_map is not None:
        entry["map"] = feature_map.to_config()
    if not new_bias:
        entry["bias"] = False
    _check_entry(ffn.name, entry)
    return entry, feature_map


def rebuild_(ffn: FFN, entry: Entry, room: int) -> Replacement:
    """Put back what `replace_` made, from its JSON; `room`, the bytes of the file, bounds what is allocated."""
    _check_entry(ffn.name, entry)
    old, feature_map = ffn.up_weight(), None
    if "map" in entry:
        feature_map = rebuild_map(ffn.name, entry, ffn.in_features, room)
    return _swap(ffn, entry, feature_map, place_of(old))


def rebuild_map(name: str, entry: Entry, in_features: int, room: int) -> FeatureMap:
    """The feature map of an entry, its sizes checked against the block and against `room`, the bytes of the file."""
    config, sizes = dict(entry["map"]), (in_features, entry["num_features"])
    if (config.get("in_features"), config.get("num_features")) != sizes:
        raise ValueError(f"the feature map of {name} must be {sizes[0]} -> {sizes[1]}; got {config}")
    try:
        return feature_map_from_config(config, (room // 2,))  # a number takes at least two bytes
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"cannot make the feature map of {name}: {error}") from error


def _modules(
    ffn: FFN, entry: Entry, feature_map: FeatureMap | None, place: FactoryKwargs
) -> tuple[nn.Module, nn.Module | None, nn.Module]:
    """New modules (up, gate, down) for a block."""
    d, width, out, kind = ffn.in_features, ffn.width, ffn.out_features, entry["kind"]
    m = entry.get("num_features", d if kind == "linear" else 0)
    if kind != "atoms":
        up = SentinelIdentity(d, **place) if feature_map is None else Features(feature_map, **place)
        return up, None, Constant(out, **place) if kind == "drop" else zeros(m, out, True, place)
    if m > width:
        raise ValueError(f"{ffn.name} has {width} neurons; num_features={m} atoms cannot be taken from them")
    if isinstance(ffn.slot("up"), Conv1D) and m == width == d:
        raise ValueError(f"{ffn.name} with all its {m} neurons is the old block; leave it as it is")
    gate = zeros(d, m, ffn.gate_bias() is not None, place) if ffn.gated and not ffn.fused else None
    # With all neurons the shapes are the old ones, and a file must not have a bias that plain transformers ignores.
    new = m < width and entry.get("bias", True)
    down = zeros(m, out, new or ffn.down_bias() is not None, place)
    return zeros(d, 2 * m if ffn.fused else m, ffn.up_bias() is not None, place), gate, down


def _swap(ffn: FFN, entry: Entry, feature_map: FeatureMap | None, place: FactoryKwargs) -> Replacement:
    up, gate, down = _modules(ffn, entry, feature_map, place)
    row, kind = ffn.row, entry["kind"]
    slots = {which: ffn.slot(which) for which in ("up", "gate", "activation", "down")}
    paths = {getattr(row, which): module for which, module in slots.items() if getattr(row, which)}
    old_entry = getattr(getattr(ffn.configs[0], "quantization_config", None), "blocks", {}).get(ffn.name)
    note_(ffn.configs, ffn.name, entry, ffn.found)
    if _chained(ffn, entry):
        parent = row.up.rpartition(".")[0]
        paths = {parent: ffn.layer.get_submodule(parent)}
        set_slot(ffn.layer, parent, _chain(row, up, down, place))
    else:
        set_slot(ffn.layer, row.up, up)
        set_slot(ffn.layer, row.down, down)
        if gate is not None:
            set_slot(ffn.layer, str(row.gate), gate)
        if kind != "atoms":
            set_slot(ffn.layer, row.activation, nn.Identity())
    ffn.layer.train(ffn.layer.training)
    return Replacement(ffn, kind, up, down, gate, feature_map, {**slots, "slots": paths, "entry": old_entry})


def _chained(ffn: FFN, entry: Entry) -> bool:
    return ffn.gated and entry["kind"] != "atoms"


def _chain(row: Architecture, up: Any, down: nn.Module, place: FactoryKwargs) -> Chain:
    """The modules that replace a gated block, under the names of the old ones."""
    names = {which: getattr(row, which).rpartition(".")[2] for which in ("gate", "up", "down")}
    if not row.together:
        return Chain(OrderedDict({names["up"]: up, names["down"]: down}))
    marks = {names[which]: SentinelIdentity(up.in_features, 1, **place) for which in ("gate", "up")}
    return Chain(OrderedDict({**marks, "features": up, names["down"]: down}))


def zeros(in_features: int, out_features: int, bias: bool, place: FactoryKwargs) -> nn.Linear:
    """A linear layer of zeros, made without a draw from the global generator."""
    layer = nn.Linear(in_features, out_features, bias, device="meta", dtype=place["dtype"])
    layer.to_empty(device=place["device"])
    for parameter in layer.parameters():
        parameter.data.zero_()
    return layer


def set_slot(layer: nn.Module, path: str, module: Any) -> None:
    """Put a module, or a function, at a dotted name below a layer."""
    parent, _, name = path.rpartition(".")
    owner = layer.get_submodule(parent)
    if name in owner._modules and not isinstance(module, nn.Module):
        delattr(owner, name)  # an activation may be a function, which torch does not assign over a module
    setattr(owner, name, module)


def note_(configs: Iterable[PretrainedConfig], name: str | None, entry: Entry | None, row: Entry | None = None) -> None:
    """Write into a model's configurations what replaced a block, or the pooler (name None); None removes the entry.

    `row` is that of a model type which the table does not have.
    """
    for config in configs:
        old = getattr(config, "quantization_config", None)
        if old is not None and dict(old).get("quant_method") != METHOD:
            what = name or "the pooler"
            raise ValueError(f"{what} is part of a model that is quantized already; compress first, quantize then")
        blocks = {n: e for n, e in getattr(old, "blocks", {}).items() if n != name}
        pooler = entry if name is None else getattr(old, "pooler", None)
        if name is not None and entry is not None:
            blocks[name] = entry
        if blocks or pooler:
            config.quantization_config = SNNKQuantizationConfig(
                dict(sorted(blocks.items())), pooler=pooler, row=row or getattr(old, "row", None)
            )
        elif old is not None:
            del config.quantization_config
