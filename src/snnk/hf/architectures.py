r"""Where the feed-forward blocks of a transformer are: one row of names for each architecture.

A block computes y = W2 f(W1 x + b1) + b2, or, if gated, y = W2 (f(Wg x + bg) * (W1 x + b1)) + b2, and the residual
stream goes on with s = r + scale * y. With post-norm (BERT) s is what the LayerNorm behind the block reads; with
pre-norm (ViT, GPT-2, Llama) it is what the whole layer returns. Names are relative to the base model, so that they are
the same for every head.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Architecture:
    """Names inside one layer of a model.

    Args:
        block: pattern of a layer's name, relative to the base model, like "encoder.layer.{}".
        up, activation, down: names of the first linear layer, the activation and the second linear layer.
        gate: name of the linear layer that the activation is applied to, if the block is gated.
        sum: name of the module whose input is residual + block output; "" if it is the output of the layer.
        scale: name of a parameter that the block's output is multiplied with before the sum.
        attention: name of the linear layer that attention ends with; adapters stand behind it too.
    """

    block: str
    up: str
    activation: str
    down: str
    gate: str | None = None
    sum: str = ""
    scale: str | None = None
    attention: str | None = None


_BERT = Architecture(
    "encoder.layer.{}",
    "intermediate.dense",
    "intermediate.intermediate_act_fn",
    "output.dense",
    sum="output.LayerNorm",
    attention="attention.output.dense",
)
_DISTILBERT = Architecture(
    "transformer.layer.{}",
    "ffn.lin1",
    "ffn.activation",
    "ffn.lin2",
    sum="output_layer_norm",
    attention="attention.out_lin",
)
_OPT = Architecture("decoder.layers.{}", "fc1", "activation_fn", "fc2", attention="self_attn.out_proj")
_VIT = Architecture("layers.{}", "mlp.fc1", "mlp.activation_fn", "mlp.fc2", attention="attention.o_proj")
_LLAMA = Architecture(
    "layers.{}", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj", gate="mlp.gate_proj", attention="self_attn.o_proj"
)

# By config.model_type, with a "+" and a variant where VARIANTS says so. A new row needs a tiny configuration in
# tests/test_hf_architectures.py, and nothing else: the tests of wiring and of saving run over all rows.
ARCHITECTURES: dict[str, Architecture] = {
    "bert": _BERT,
    "camembert": _BERT,
    "deberta-v2": _BERT,
    "deit": _VIT,
    "dinov2": replace(_VIT, block="encoder.layer.{}", scale="layer_scale2.lambda1"),
    "distilbert": _DISTILBERT,
    "electra": _BERT,
    "gpt2": Architecture("h.{}", "mlp.c_fc", "mlp.act", "mlp.c_proj", attention="attn.c_proj"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mpnet": replace(_BERT, attention="attention.attn.o"),
    "opt": _OPT,
    "opt+post-norm": replace(_OPT, sum="final_layer_norm"),
    "qwen2": _LLAMA,
    "roberta": _BERT,
    "vit": _VIT,
    "xlm-roberta": _BERT,
}
VARIANTS: dict[str, Callable[[Any], str]] = {
    "dinov2": lambda config: "+swiglu" if config.use_swiglu_ffn else "",
    "opt": lambda config: "" if config.do_layer_norm_before else "+post-norm",  # opt-350m
}
REFUSED = {
    "albert": "its layers are one shared layer, so that replacing a block in one replaces it in all",
    "dinov2+swiglu": "its gate and first layer are one tensor in files, and [0] for both cannot be split while loading",
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), "its blocks read wo.weight themselves, to choose a dtype"),
}


@dataclass(eq=False)
class FFN:
    """The feed-forward block of one layer; what it reports is that of the modules that are there now."""

    name: str  # of the layer, relative to the base model
    index: int  # of the layer
    row: Architecture
    block: nn.Module = field(repr=False)  # the layer
    configs: tuple[Any, ...] = field(repr=False)  # of base model and head, one object for most

    def slot(self, which: str) -> Any:
        """The module (or function) at "up", "activation", "down", "gate" or "sum" of the row; None if there is none."""
        path = getattr(self.row, which)
        return None if path is None else _at(self.block, path)

    @property
    def kind(self) -> str:
        """What replaced the block, or "dense"."""
        blocks = getattr(getattr(self.configs[0], "quantization_config", None), "blocks", {})
        return str(blocks.get(self.name, {}).get("kind", "dense"))

    @property
    def in_features(self) -> int:
        return _sizes(self.slot("up"))[0]

    @property
    def width(self) -> int:
        """Number of hidden features, the columns of the second layer's weight."""
        return _sizes(self.slot("down"))[0]

    @property
    def out_features(self) -> int:
        return _sizes(self.slot("down"))[1]

    @property
    def gated(self) -> bool:
        return self.slot("gate") is not None

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        return self.slot("activation") or nn.Identity()

    @property
    def norm(self) -> nn.Module | None:
        """The module that reads the residual sum, if the row names it (post-norm)."""
        return self.slot("sum") if self.row.sum else None

    @property
    def scale(self) -> Tensor | None:
        """Factor of the block's output in the residual sum, (out,), or None for 1."""
        return self.slot("scale")

    def up_weight(self) -> Tensor:
        """(width, in)."""
        return weight_of(self._linear("up"))

    def up_bias(self) -> Tensor | None:
        return self._linear("up").bias

    def gate_weight(self) -> Tensor | None:
        """(width, in), or None if the block has no gate."""
        return weight_of(self._linear("gate")) if self.gated else None

    def gate_bias(self) -> Tensor | None:
        return self._linear("gate").bias if self.gated else None

    def down_weight(self) -> Tensor:
        """(out, width)."""
        return weight_of(self._linear("down"))

    def down_bias(self) -> Tensor | None:
        return self._linear("down").bias

    def hidden(self, x: Tensor) -> Tensor:
        """What the second layer reads: (*, in) -> (*, width)."""
        up, gate = self.slot("up"), self.slot("gate")
        return self.activation(up(x)) if gate is None else self.activation(gate(x)) * up(x)

    def forward(self, x: Tensor) -> Tensor:
        """The block without dropout and residual: (*, in) -> (*, out)."""
        return self.slot("down")(self.hidden(x))

    @property
    def parameters(self) -> int:
        """Numbers stored, those of a feature map's buffers included."""
        return sum(t.numel() for _, t in self._tensors())

    @property
    def multiply_adds(self) -> int:
        """For one token, those of the matrices."""
        return sum(t.numel() for name, t in self._tensors() if name in ("weight", "projection"))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for module in map(self.slot, ("up", "gate", "down")):
            for name, tensor in module.state_dict(keep_vars=True).items() if module is not None else ():
                yield name.rpartition(".")[2], tensor

    def _linear(self, which: str) -> Any:
        layer = self.slot(which)
        if not isinstance(layer, nn.Linear | Conv1D):
            raise ValueError(f"{self.name} is already replaced ({self.kind}): {which} is no linear layer any more")
        return layer


def kind_of(config: Any) -> str:
    """The name in ARCHITECTURES that a model with this configuration has, or would have."""
    kind = str(getattr(config, "model_type", ""))
    return kind + VARIANTS[kind](config) if kind in VARIANTS else kind


def find_ffns(model: Any) -> list[FFN]:
    """The feed-forward blocks of a model with any head, by depth; a ValueError says why there are none.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> [(ffn.name, ffn.in_features, ffn.width) for ffn in find_ffns(model)]
        [('encoder.layer.0', 8, 3072), ('encoder.layer.1', 8, 3072)]
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel; got {type(model).__name__}; unwrap it first")
    base, kind = model.base_model, kind_of(model.config)
    if kind not in ARCHITECTURES:
        reason = REFUSED.get(kind, f"known are {', '.join(ARCHITECTURES)}")
        raise ValueError(
            f"the blocks of a {kind!r} model cannot be replaced: {reason}. A row in snnk.hf.ARCHITECTURES adds a type"
        )
    row = ARCHITECTURES[kind]
    layers = _at(base, row.block.removesuffix(".{}"))
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ValueError(f"{type(model).__name__} has no layers at {row.block!r}, where {kind!r} models have them")
    configs = tuple({id(c): c for c in (base.config, model.config)}.values())
    ffns = [FFN(row.block.format(i), i, row, block, configs) for i, block in enumerate(layers)]
    for ffn in ffns:
        wanted = [w for w in ("up", "activation", "down", "gate", "sum", "scale") if getattr(row, w)]
        if ffn.kind not in ("dense", "atoms"):
            wanted = [w for w in wanted if w not in ("activation", "gate")]
        missing = [getattr(row, which) for which in wanted if ffn.slot(which) is None]
        if missing:
            raise ValueError(f"{ffn.name} of {type(model).__name__} has no {', '.join(missing)}, as {kind!r} models do")
    return ffns


def parse_layers(layers: str | Iterable[int]) -> slice | list[int]:
    """Read a choice of layers, as arguments and options have it, before the number of layers is known.

    Args:
        layers: "all", "top-6" (the last six), numbers with commas such as "3,4,5", or a list of integers.

    Example:
        >>> parse_layers("top-6"), parse_layers("4, 3"), parse_layers([3, 4])
        (slice(-6, None, None), [3, 4], [3, 4])
    """
    expected = f"layers must be 'all', 'top-6', or numbers such as '3,4,5'; got {layers!r}"
    if isinstance(layers, str):
        if layers.strip() == "all":
            return slice(None)
        if top := re.fullmatch(r"top-0*([1-9]\d*)", layers.strip()):
            return slice(-int(top[1]), None)
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", layers):
            raise ValueError(expected)
        return sorted({int(number) for number in layers.split(",")})
    chosen = list(layers) if isinstance(layers, Iterable) else [None]
    if any(isinstance(i, bool) or not isinstance(i, numbers.Integral) for i in chosen):
        raise TypeError(expected)
    return sorted({int(i) for i in chosen if i is not None})


def choose_layers(ffns: list[FFN], layers: str | Iterable[int]) -> list[FFN]:
    """The blocks of the layers that `parse_layers` reads; a ValueError if the model does not have them."""
    chosen = parse_layers(layers)
    if isinstance(chosen, slice):
        if chosen.start is not None and -chosen.start > len(ffns):
            raise ValueError(f"layers can be 'top-{len(ffns)}' at most, as there are {len(ffns)}; got {layers!r}")
        return ffns[chosen]
    if not chosen or chosen[0] < 0 or chosen[-1] >= len(ffns):
        raise ValueError(f"layers must be among 0 to {len(ffns) - 1}; got {chosen}")
    return [ffns[i] for i in chosen]


def weight_of(layer: Any) -> Tensor:
    """(out, in), whichever way round the layer keeps it."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


def _at(module: Any, path: str) -> Any:
    """What a dotted name means below a module, or None."""
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return module


def _sizes(layer: Any) -> tuple[int, int]:
    """(in, out) of a linear layer, a Conv1D, or a module that says so itself."""
    if hasattr(layer, "get_base_layer"):
        raise ValueError(
            f"the block has adapters of PEFT ({type(layer).__name__}): merge_and_unload() puts LoRA into the weights, "
            "unload() takes others away"
        )
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    return layer.in_features, layer.out_features
