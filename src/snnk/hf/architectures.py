r"""Where the feed-forward blocks of a transformer are: one row of names for each architecture.

A block computes y = W2 f(W1 x + b1) + b2, or, if gated, y = W2 (f(Wg x + bg) * (W1 x + b1)) + b2, and the residual
stream goes on with s = r + scale * y. With post-norm (BERT) the LayerNorm behind the block reads s; with pre-norm (ViT,
GPT-2, Llama) the whole layer returns it. Names are relative to the base model and so the same for every head.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Architecture:
    """Names inside one layer of a model.

    Args:
        block: pattern of a layer's name, relative to the base model, such as "encoder.layer.{}".
        up, activation, down: names of the first linear layer, the activation and the second linear layer.
        gate: name of the linear layer that the activation is applied to, if the block is gated.
        sum: name of the module whose input is residual + block output; "" if it is the output of the layer.
        scale: name of a parameter by which the block's output is multiplied before the sum.
        attention: name of the last linear layer of attention, behind which adapters stand, too.
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

# By config.model_type, followed by the variant that VARIANTS finds. A new row needs a tiny configuration in
# tests/helpers/architectures.py and nothing else: the tests of wiring and of saving run over all rows.
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
VARIANTS: dict[str, Callable[[PretrainedConfig], str]] = {
    "dinov2": lambda config: "+swiglu" if config.use_swiglu_ffn else "",
    "opt": lambda config: "" if config.do_layer_norm_before else "+post-norm",  # opt-350m
}
REFUSED = {
    "albert": "its layers are one shared layer, so that replacing a block in one replaces it in all",
    "dinov2+swiglu": "its gate and first layer are one tensor in files, and [0] for both cannot be split while loading",
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), "its blocks read wo.weight themselves, to choose a dtype"),
}


class Cost(NamedTuple):
    """Numbers that modules store, buffers of a feature map included, and multiply-adds of their matrices per token."""

    parameters: int
    multiply_adds: int


def cost_of(modules: Iterable[nn.Module | None]) -> Cost:
    """The cost of linear layers and feature maps."""
    tensors = [item for m in modules if m is not None for item in m.state_dict(keep_vars=True).items()]
    matrices = (t.numel() for name, t in tensors if name.rpartition(".")[2] in ("weight", "projection"))
    return Cost(sum(t.numel() for _, t in tensors), sum(matrices))


@dataclass(eq=False)
class FFN:
    """The feed-forward block of one layer. Its properties follow the modules that stand in the layer now."""

    name: str  # name of the layer, relative to the base model
    index: int  # number of the layer
    row: Architecture
    block: nn.Module = field(repr=False)  # the layer
    configs: tuple[PretrainedConfig, ...] = field(repr=False)  # those of base model and head, mostly one object

    def slot(self, which: str) -> Any:
        """The module, function or tensor at a name of the row, such as "up" or "scale"; None if there is none."""
        path = getattr(self.row, which)
        return None if path is None else _at(self.block, path)

    @property
    def kind(self) -> str:
        """The kind of module that replaced the block, or "dense"."""
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
        """The input of the second layer: (*, in) -> (*, width)."""
        up, gate = self.slot("up"), self.slot("gate")
        return self.activation(up(x)) if gate is None else self.activation(gate(x)) * up(x)

    def forward(self, x: Tensor) -> Tensor:
        """The block without dropout and residual: (*, in) -> (*, out)."""
        return self.slot("down")(self.hidden(x))

    @property
    def cost(self) -> Cost:
        return cost_of(map(self.slot, ("up", "gate", "down")))

    @property
    def num_parameters(self) -> int:
        """Numbers stored, buffers of a feature map included."""
        return self.cost.parameters

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the matrices per token."""
        return self.cost.multiply_adds

    def _linear(self, which: str) -> Any:
        layer = self.slot(which)
        if not isinstance(layer, nn.Linear | Conv1D):
            raise ValueError(f"{self.name} was replaced before ({self.kind}): {which} is no linear layer any more")
        return layer


def kind_of(config: PretrainedConfig | None) -> str:
    """The key in ARCHITECTURES of a model with this configuration, whether or not there is such a row."""
    kind = str(getattr(config, "model_type", ""))
    return kind + VARIANTS[kind](config) if config is not None and kind in VARIANTS else kind


def find_ffns(model: PreTrainedModel) -> list[FFN]:
    """The feed-forward blocks of a model with any head, by depth; a ValueError if its blocks cannot be replaced.

    Args:
        model: of a type in ARCHITECTURES.

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
            f"the blocks of a {kind!r} model cannot be replaced: {reason}. A row in snnk.hf.architectures adds a type"
        )
    row = ARCHITECTURES[kind]
    layers = _at(base, row.block.removesuffix(".{}"))
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ValueError(f"{type(model).__name__} has no layers at {row.block!r}, where {kind!r} models have them")
    configs: dict[int, Any] = {id(config): config for config in (base.config, model.config)}
    ffns = [FFN(row.block.format(i), i, row, block, tuple(configs.values())) for i, block in enumerate(layers)]
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


def weight_of(layer: nn.Module) -> Tensor:
    """The weight (out, in) of a linear layer or of a Conv1D, which keeps it as (in, out)."""
    weight: Any = layer.weight
    return weight.T if isinstance(layer, Conv1D) else weight


def _at(module: Any, path: str) -> Any:
    """The attribute at a dotted name below a module, or None."""
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return module


def _sizes(layer: Any) -> tuple[int, int]:
    """(in, out) of a linear layer, a Conv1D, or a module with in_features and out_features."""
    if hasattr(layer, "get_base_layer"):
        raise ValueError(
            f"the block has adapters of PEFT ({type(layer).__name__}): call merge_and_unload() to put LoRA into the "
            "weights, or unload() to remove other adapters"
        )
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    return layer.in_features, layer.out_features
