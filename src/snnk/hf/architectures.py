r"""Where the blocks of a transformer are: one row of names for each architecture.

A feed-forward block computes y = W2 f(W1 x + b1) + b2, or, if gated, y = W2 (f(Wg x + bg) * (W1 x + b1)) + b2. An
attention block computes y = Wo c + bo, where c has the values of all heads, mixed over tokens by their queries and
keys. The residual stream goes on with s = r + scale * y. With post-norm (BERT) the LayerNorm behind the block reads s;
with pre-norm (ViT, GPT-2, Llama) the norm of the next block reads it, or the whole layer returns it; with a norm before
the sum (Gemma 2) s is y alone. Names are relative to the base model and so the same for every head of the model.
"""

from __future__ import annotations

import numbers
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class AttentionNames:
    """Names of self-attention inside one layer of a model.

    Args:
        module: name of the module that computes attention; it can be called again with the arguments that it got.
        query, key, value: names of the linear layers, all of which read the input of `query`; the same name three times
            if one layer computes them all.
        out: name of the linear layer behind the heads, behind which adapters stand, too.
        sum: name of the module whose input is residual + attention output; "" if it is the output of the layer.
        scale: name of a parameter by which the output is multiplied before the sum.
        size: names of the attributes with the head size that the module reads for the shapes of heads and for nothing
            else, so that smaller heads need no padding. Without any, heads are padded to their old size.
        interleaved: whether one layer for all has its outputs in the order (head, query/key/value, number) instead of
            (query/key/value, head, number).
        fixed: the reason why queries and keys keep their sizes; "" if nothing but their dot products is used.
        refused: the reason why the block cannot be replaced at all; "" if it can.
    """

    module: str
    query: str
    key: str
    value: str
    out: str
    sum: str = ""
    scale: str | None = None
    size: tuple[str, ...] = ()
    interleaved: bool = False
    fixed: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Architecture:
    """Names inside one layer of a model.

    Args:
        block: pattern of a layer's name, relative to the base model, such as "encoder.layer.{}".
        up, activation, down: names of the first linear layer, the activation and the second linear layer.
        gate: name of the linear layer that the activation is applied to, if the block is gated. It is the name of `up`
            if both are one layer, whose first half of outputs is the gate.
        sum: name of the module whose input is residual + block output; "" if it is the output of the layer. With a
            norm between block and residual (Gemma 2), it is that norm, and the residual is 0: a norm has no inverse,
            so that the block is fitted to the original's own output instead of to the stream.
        scale: name of a parameter by which the block's output is multiplied before the sum.
        attention: names of self-attention.
        masked: whether attention_mask has one entry per token of the layer; images and sounds have no mask.
        together: whether files have `gate` and `up` as one tensor, which transformers splits while loading.
    """

    block: str
    up: str
    activation: str
    down: str
    gate: str | None = None
    sum: str = ""
    scale: str | None = None
    attention: AttentionNames | None = None
    masked: bool = True
    together: bool = False


ROTARY = "rotary embeddings turn pairs of their numbers by different angles, so that the pairs cannot be mixed"
_BERT_ATTENTION = AttentionNames(
    "attention",
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    sum="attention.output.LayerNorm",
    size=("attention.self.attention_head_size",),
)
_BERT = Architecture(
    "encoder.layer.{}",
    "intermediate.dense",
    "intermediate.intermediate_act_fn",
    "output.dense",
    sum="output.LayerNorm",
    attention=_BERT_ATTENTION,
)
_DEBERTA_ATTENTION = replace(
    _BERT_ATTENTION,
    query="attention.self.query_proj",
    key="attention.self.key_proj",
    value="attention.self.value_proj",
    size=(),
    fixed="queries and keys are compared with relative positions, too",
)
_MPNET_ATTENTION = AttentionNames(
    "attention",
    "attention.attn.q",
    "attention.attn.k",
    "attention.attn.v",
    "attention.attn.o",
    sum="attention.LayerNorm",
)
_DISTILBERT = Architecture(
    "transformer.layer.{}",
    "ffn.lin1",
    "ffn.activation",
    "ffn.lin2",
    sum="output_layer_norm",
    attention=AttentionNames(
        "attention",
        "attention.q_lin",
        "attention.k_lin",
        "attention.v_lin",
        "attention.out_lin",
        sum="sa_layer_norm",
        size=("attention.attention_head_size",),
    ),
)
_OPT_ATTENTION = AttentionNames(
    "self_attn",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    sum="final_layer_norm",
    size=("self_attn.head_dim",),
)
_OPT = Architecture("decoder.layers.{}", "fc1", "activation_fn", "fc2", attention=_OPT_ATTENTION)
_VIT_ATTENTION = AttentionNames(
    "attention",
    "attention.q_proj",
    "attention.k_proj",
    "attention.v_proj",
    "attention.o_proj",
    sum="layernorm_after",
    size=("attention.head_dim",),
)
_VIT = Architecture("layers.{}", "mlp.fc1", "mlp.activation_fn", "mlp.fc2", attention=_VIT_ATTENTION, masked=False)
_GPT2_ATTENTION = AttentionNames("attn", "attn.c_attn", "attn.c_attn", "attn.c_attn", "attn.c_proj", sum="ln_2")
_LLAMA_ATTENTION = AttentionNames(
    "self_attn",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    sum="post_attention_layernorm",
    fixed=ROTARY,
)
_LLAMA = Architecture(
    "layers.{}", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj", gate="mlp.gate_proj", attention=_LLAMA_ATTENTION
)

_NORMED = "each of their heads goes through a norm of its own, which needs all numbers, and rotary embeddings follow"
_GEMMA2 = replace(_LLAMA, sum="post_feedforward_layernorm")
# Files of Nomic, GTE and Jina models have queries, keys and values as one tensor, which is split into equal parts.
_SPLIT_ATTENTION = replace(
    _LLAMA_ATTENTION, refused="files have its queries, keys and values as one tensor of three equal parts"
)
_NOMIC = replace(_LLAMA, sum="post_mlp_layernorm", attention=_SPLIT_ATTENTION)
_CLIP = Architecture(
    "encoder.layers.{}",
    "mlp.fc1",
    "mlp.activation_fn",
    "mlp.fc2",
    attention=replace(_OPT_ATTENTION, sum="layer_norm2"),
)
_DINOV2 = replace(
    _VIT,
    block="encoder.layer.{}",
    scale="layer_scale2.lambda1",
    attention=replace(_VIT_ATTENTION, sum="norm2", scale="layer_scale1.lambda1"),
)
_DINOV2_SWIGLU = replace(
    _DINOV2, up="mlp.up_proj", activation="mlp.act_fn", down="mlp.down_proj", gate="mlp.gate_proj", together=True
)
_GPT_NEOX_ATTENTION = AttentionNames(
    "attention",
    "attention.query_key_value",
    "attention.query_key_value",
    "attention.query_key_value",
    "attention.dense",
    interleaved=True,
    fixed=ROTARY,
)
_GPT_NEOX = Architecture(
    "layers.{}", "mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h", attention=_GPT_NEOX_ATTENTION
)
_BLOOM_ATTENTION = AttentionNames(
    "self_attention",
    "self_attention.query_key_value",
    "self_attention.query_key_value",
    "self_attention.query_key_value",
    "self_attention.dense",
    sum="post_attention_layernorm",
    size=("self_attention.head_dim",),
    interleaved=True,
)
_FALCON_ATTENTION = replace(_BLOOM_ATTENTION, sum="", size=(), interleaved=False, fixed=ROTARY)
_FALCON = replace(_GPT_NEOX, block="h.{}", attention=_FALCON_ATTENTION)
_T5 = Architecture(
    "encoder.block.{}",
    "layer.1.DenseReluDense.wi",
    "layer.1.DenseReluDense.act",
    "layer.1.DenseReluDense.wo",
    attention=AttentionNames(
        "layer.0.SelfAttention",
        "layer.0.SelfAttention.q",
        "layer.0.SelfAttention.k",
        "layer.0.SelfAttention.v",
        "layer.0.SelfAttention.o",
        sum="layer.1.layer_norm",
        size=("layer.0.SelfAttention.key_value_proj_dim",),
    ),
)
_GATED_T5 = replace(_T5, up="layer.1.DenseReluDense.wi_1", gate="layer.1.DenseReluDense.wi_0")

# By config.model_type, followed by the variant that VARIANTS finds. A new row needs a tiny configuration in
# tests/helpers/architectures.py and nothing else: the tests of wiring and of saving run over all rows. Of models with
# an encoder and a decoder (T5, Whisper) a row names the layers of the encoder. A model of several towers (CLIP) needs
# no row of its own, as each tower has one.
ARCHITECTURES: dict[str, Architecture] = {
    "bert": _BERT,
    "bloom": replace(_GPT_NEOX, block="h.{}", activation="mlp.gelu_impl", attention=_BLOOM_ATTENTION),
    "camembert": _BERT,
    "clip_text_model": _CLIP,
    "clip_vision_model": replace(_CLIP, masked=False),
    "deberta-v2": replace(_BERT, attention=_DEBERTA_ATTENTION),
    "deit": _VIT,
    "dinov2": _DINOV2,
    "dinov2+swiglu": _DINOV2_SWIGLU,
    "dinov2_with_registers": _DINOV2,
    "dinov2_with_registers+swiglu": _DINOV2_SWIGLU,
    "distilbert": _DISTILBERT,
    "electra": _BERT,
    "falcon": _FALCON,  # 7B
    "falcon+grouped": replace(  # 40B and 180B
        _FALCON, attention=replace(_FALCON_ATTENTION, refused="its one layer has queries and keys in groups of heads")
    ),
    "falcon+sequential": replace(  # RW-1B and RW-7B
        _FALCON, attention=replace(_FALCON_ATTENTION, sum="post_attention_layernorm", interleaved=True)
    ),
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, attention=replace(_LLAMA_ATTENTION, fixed=_NORMED)),
    "gpt2": Architecture("h.{}", "mlp.c_fc", "mlp.act", "mlp.c_proj", attention=_GPT2_ATTENTION),
    "gpt_neox": _GPT_NEOX,
    "gpt_neox+sequential": replace(_GPT_NEOX, attention=replace(_GPT_NEOX_ATTENTION, sum="post_attention_layernorm")),
    "gte": replace(_NOMIC, together=True),
    "jina_embeddings_v3": replace(_VIT, sum="post_mlp_layernorm", attention=_SPLIT_ATTENTION, masked=True),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "modernbert": Architecture(
        "layers.{}",
        "mlp.Wi",
        "mlp.act",
        "mlp.Wo",
        gate="mlp.Wi",
        attention=AttentionNames(
            "attn", "attn.Wqkv", "attn.Wqkv", "attn.Wqkv", "attn.Wo", sum="mlp_norm", fixed=ROTARY
        ),
    ),
    "mpnet": replace(_BERT, attention=_MPNET_ATTENTION),
    "mt5": _T5,
    "mt5+gated": _GATED_T5,
    "nomic_bert": _NOMIC,
    "opt": _OPT,
    "opt+post-norm": replace(
        _OPT, sum="final_layer_norm", attention=replace(_OPT_ATTENTION, sum="self_attn_layer_norm")
    ),
    "phi3": replace(
        _LLAMA,
        up="mlp.gate_up_proj",
        gate="mlp.gate_up_proj",
        activation="mlp.activation_fn",
        attention=replace(
            _LLAMA_ATTENTION, query="self_attn.qkv_proj", key="self_attn.qkv_proj", value="self_attn.qkv_proj"
        ),
    ),
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, attention=replace(_LLAMA_ATTENTION, fixed=_NORMED)),
    "roberta": _BERT,
    "siglip_text_model": _CLIP,
    "siglip_vision_model": replace(_CLIP, masked=False),
    "t5": _T5,
    "t5+gated": _GATED_T5,
    "vit": _VIT,
    "whisper": replace(_OPT, block="encoder.layers.{}", masked=False),
    "xlm-roberta": _BERT,
}


def _swiglu(config: Any) -> str:
    return "+swiglu" if config.use_swiglu_ffn else ""


def _gated(config: Any) -> str:
    return "+gated" if config.is_gated_act else ""  # Flan-T5 and the 1.1 versions of T5


def _falcon(config: Any) -> str:
    if config.new_decoder_architecture or config.parallel_attn != config.multi_query:
        return "+grouped"
    return "" if config.parallel_attn else "+sequential"


VARIANTS: dict[str, Callable[[Any], str]] = {
    "bloom": lambda config: "+slow" if config.slow_but_exact and config.pretraining_tp > 1 else "",
    "dinov2": _swiglu,
    "dinov2_with_registers": _swiglu,
    "falcon": _falcon,
    "gpt_neox": lambda config: "" if config.use_parallel_residual else "+sequential",
    "mt5": _gated,
    "opt": lambda config: "" if config.do_layer_norm_before else "+post-norm",  # opt-350m
    "t5": _gated,
}
REFUSED = {
    "albert": "its layers are one shared layer, so that replacing a block in one replaces it in all",
    "bloom+slow": "with slow_but_exact it reads the weight of its second layer in slices; set slow_but_exact=False",
    **dict.fromkeys(
        (
            *("dbrx", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "jamba", "mixtral", "nllb-moe", "olmoe"),
            *("phimoe", "qwen2_moe", "qwen3_moe", "switch_transformers"),
        ),
        "its feed-forward blocks are mixtures of experts, each of which sees other tokens",
    ),
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"),
        "its layers mix tokens by a recurrence and have no linear layer, activation and linear layer in a row",
    ),
}


class Cost(NamedTuple):
    """Numbers that modules store, buffers of a feature map included, and multiply-adds of their matrices per token."""

    parameters: int
    multiply_adds: int


def cost_of(modules: Iterable[nn.Module | None]) -> Cost:
    """The cost of linear layers and feature maps."""
    tensors = [item for m in modules if m is not None for item in m.state_dict(keep_vars=True).items()]
    matrices = (t.numel() for name, t in tensors if name.rpartition(".")[2] in ("weight", "projection") and t.ndim > 1)
    return Cost(sum(t.numel() for _, t in tensors), sum(matrices))


class Chain(nn.Sequential):
    """The new modules of a gated block, in place of the module that multiplied by the gate."""

    def forward(self, x: Tensor) -> Tensor:
        down: Any = self[-1]
        return down(self.hidden(x).to(down.bias.dtype))  # as T5 does, whose second layers stay in float32

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the last module."""
        for module in list(self)[:-1]:
            x = module(x)
        return x


@dataclass(eq=False)
class ModelBlock(ABC):
    """A part of one layer that adds to the residual stream. Its properties follow the modules that stand there now."""

    layer: str  # name of the layer, relative to the base model
    index: int  # number of the layer; in a model of several towers all layers are counted, tower by tower
    row: Architecture
    block: nn.Module = field(repr=False)  # the layer
    config: PretrainedConfig = field(repr=False)  # that of the tower, or of the base model
    configs: tuple[PretrainedConfig, ...] = field(repr=False)  # those of base model and head, mostly one object

    @property
    @abstractmethod
    def names(self) -> Architecture | AttentionNames:
        """The names of the block's modules in the layer."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which plans, reports and files call the block, relative to the base model."""

    @property
    @abstractmethod
    def layers(self) -> tuple[Any, ...]:
        """The linear layers, or what replaced them, from the first to the last; None for one that is not there."""

    @property
    def out_features(self) -> int:
        return _sizes(self.layers[-1])[1]

    def slot(self, which: str) -> Any:
        """The module, function or tensor at a name of the row, such as "up" or "scale"; None if there is none."""
        path = getattr(self.names, which)
        return None if path is None else _at(self.block, path)

    @property
    def kind(self) -> str:
        """The kind of module that replaced the block, or "dense"."""
        blocks = getattr(getattr(self.configs[0], "quantization_config", None), "blocks", {})
        return str(blocks.get(self.name, {}).get("kind", "dense"))

    @property
    def found(self) -> dict[str, Any] | None:
        """The row, if files must name it, as the table has none for the type."""
        if kind_of(self.config) in ARCHITECTURES:
            return None
        row = asdict(self.row)
        for key in ("size", "fixed", "refused"):  # not found by looking
            (row["attention"] or {}).pop(key, None)
        return row

    @property
    def reader(self) -> nn.Module | None:
        """The module that reads the residual sum; None if the sum is the output of the layer."""
        return self.slot("sum") if self.names.sum else None

    @property
    def norm(self) -> nn.Module | None:
        """The norm through which all later layers see the residual sum (post-norm), or None."""
        return self.reader if self.row.sum else None

    @property
    def scale(self) -> Tensor | None:
        """Factor of the block's output in the residual sum, (out,), or None for 1."""
        return self.slot("scale")

    @property
    def cost(self) -> Cost:
        return cost_of({id(m): m for m in self.layers}.values())

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


@dataclass(eq=False)
class FFN(ModelBlock):
    """The feed-forward block of one layer, called by the name of the layer."""

    @property
    def names(self) -> Architecture:
        return self.row

    @property
    def name(self) -> str:
        return self.layer

    @property
    def layers(self) -> tuple[Any, ...]:
        return tuple(self.chain or map(self.slot, ("up", "gate", "down")))

    @property
    def in_features(self) -> int:
        return _sizes(self.slot("up"))[0]

    @property
    def width(self) -> int:
        """Number of hidden features, the columns of the second layer's weight."""
        return _sizes(self.slot("down"))[0]

    @property
    def chain(self) -> Chain | None:
        """The new modules of a gated block that was replaced by other features than its own neurons."""
        parent = _at(self.block, self.row.up.rpartition(".")[0])
        return parent if isinstance(parent, Chain) else None

    @property
    def gated(self) -> bool:
        return self.row.gate is not None and self.chain is None

    @property
    def fused(self) -> bool:
        """Whether gate and first layer are one layer."""
        return self.gated and self.row.gate == self.row.up

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        return self.slot("activation") or nn.Identity()

    def up_weight(self) -> Tensor:
        """(width, in)."""
        return self._half("up", weight_of(self._linear("up")))

    def up_bias(self) -> Tensor | None:
        return self._half("up", self._linear("up").bias)

    def gate_weight(self) -> Tensor | None:
        """(width, in), or None if the block has no gate."""
        return self._half("gate", weight_of(self._linear("gate"))) if self.gated else None

    def gate_bias(self) -> Tensor | None:
        return self._half("gate", self._linear("gate").bias) if self.gated else None

    def down_weight(self) -> Tensor:
        """(out, width)."""
        return weight_of(self._linear("down"))

    def down_bias(self) -> Tensor | None:
        return self._linear("down").bias

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the second layer: (*, in) -> (*, width)."""
        if self.chain is not None:
            return self.chain.hidden(x)
        up = self.slot("up")(x)
        if not self.gated:
            return self.activation(up)
        gate, up = up.chunk(2, -1) if self.fused else (self.slot("gate")(x), up)
        return self.activation(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        """The block without dropout and residual: (*, in) -> (*, out)."""
        return self.slot("down")(self.hidden(x))

    def _half(self, which: str, tensor: Any) -> Any:
        """The rows of "up" or "gate" in a tensor of its layer."""
        if tensor is None or not self.fused:
            return tensor
        half = len(tensor) // 2
        return tensor[half:] if which == "up" else tensor[:half]


@dataclass(eq=False)
class Attention(ModelBlock):
    """The self-attention of one layer, called by the name of its module."""

    @property
    def names(self) -> AttentionNames:
        if self.row.attention is None:
            raise ValueError(f"the row of {self.row.block} names no attention")
        return self.row.attention

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.names.module}"

    @property
    def layers(self) -> tuple[Any, ...]:
        return tuple(map(self.slot, ("query", "key", "value", "out")))

    @property
    def fused(self) -> bool:
        """Whether one layer computes queries, keys and values."""
        return self.names.query == self.names.value

    @property
    def heads(self) -> tuple[int, int]:
        """Number of heads of queries, and of keys and values."""
        heads = int(self.config.num_attention_heads)
        if getattr(self.config, "multi_query", False) and self.fused:  # Falcon
            return heads, 1
        return heads, int(getattr(self.config, "num_key_value_heads", None) or heads)

    @property
    def head_size(self) -> int:
        """Numbers per head in the original."""
        value = self.slot("value")
        heads, groups = self.heads
        full = getattr(value, "full_size", None)
        return full or _sizes(value)[1] // (heads + 2 * groups if self.fused else groups)

    @property
    def in_features(self) -> int:
        return _sizes(self.slot("query"))[0]

    def places(self, which: str) -> Tensor:
        """Where the outputs of "query", "key" or "value" are among those of its layer, (heads * head size,)."""
        size, (heads, groups) = self.head_size, self.heads
        count = heads if which == "query" else groups
        places = torch.arange(count * size)
        if not self.fused:
            return places
        part = ("query", "key", "value").index(which)
        if self.names.interleaved:
            return (places.view(count, size) + size * (2 * torch.arange(count)[:, None] + part)).flatten()
        return places + size * (0, heads, heads + groups)[part]

    def weight(self, which: str) -> Tensor:
        """(heads * head size, in), of "query", "key" or "value"; (out, heads * head size), of "out"."""
        weight = weight_of(self._linear(which))
        return weight if which == "out" else weight[self.places(which).to(weight.device)]

    def bias(self, which: str) -> Tensor | None:
        bias = self._linear(which).bias
        return bias if bias is None or which == "out" else bias[self.places(which).to(bias.device)]


def kind_of(config: PretrainedConfig | None) -> str:
    """The key in ARCHITECTURES of a model with this configuration, whether or not there is such a row."""
    kind = str(getattr(config, "model_type", ""))
    return kind + VARIANTS[kind](config) if config is not None and kind in VARIANTS else kind


def find_ffns(model: PreTrainedModel) -> list[FFN]:
    """The feed-forward blocks of a model with any head, by depth; a ValueError if its blocks cannot be replaced.

    Args:
        model: of a type in ARCHITECTURES, or of any other, if its blocks can be found and verified by running it.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
        >>> [(ffn.name, ffn.in_features, ffn.width) for ffn in find_ffns(model)]
        [('encoder.layer.0', 8, 3072), ('encoder.layer.1', 8, 3072)]
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel; got {type(model).__name__}; unwrap it first")
    base, kind, ffns = model.base_model, kind_of(model.config), list[FFN]()
    configs: dict[int, Any] = {id(config): config for config in (base.config, model.config)}
    if kind in REFUSED:
        raise ValueError(f"the blocks of a {kind!r} model cannot be replaced: {REFUSED[kind]}")
    rows = rows_of(model)
    if not rows:
        from snnk.hf.looking import row_by_looking  # late: it replaces blocks, to see whether anything changes

        rows = {"": row_by_looking(model)}
    for tower, row in rows.items():
        part: Any = _at(base, tower)
        layers = _at(part, row.block.removesuffix(".{}"))
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            where = f"{row.block!r} of {tower}" if tower else repr(row.block)
            raise ValueError(f"{type(model).__name__} has no layers at {where}, where models of its type have them")
        for i, block in enumerate(layers):
            name = ".".join(filter(None, (tower, row.block.format(i))))
            ffns.append(FFN(name, len(ffns), row, block, part.config, tuple(configs.values())))
    for ffn in ffns:
        wanted = [w for w in ("up", "activation", "down", "gate", "sum", "scale") if getattr(ffn.row, w)]
        if ffn.kind not in ("dense", "atoms"):
            wanted = [w for w in wanted if w not in ("activation", "gate")]
        missing = [getattr(ffn.row, which) for which in wanted if ffn.slot(which) is None]
        if missing:
            raise ValueError(
                f"{ffn.name} of {type(model).__name__} has no {', '.join(missing)}, as models of its type do"
            )
    return ffns


def rows_of(model: PreTrainedModel) -> dict[str, Architecture]:
    """The row of a model, under "", or those of its towers, under their names; none if the table has no such type."""
    kind = kind_of(model.config)
    if kind in ARCHITECTURES:
        return {"": ARCHITECTURES[kind]}
    if model.config.is_encoder_decoder:  # every layer of a decoder reads what the encoder returns
        return {}
    return {
        name: ARCHITECTURES[kind_of(part.config)]
        for name, part in model.base_model.named_children()
        if isinstance(part, PreTrainedModel) and kind_of(part.config) in ARCHITECTURES
    }


def find_attentions(model: PreTrainedModel) -> list[Attention]:
    """The self-attention of each layer, by depth; none if it cannot be replaced, or if the model's row names none.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> [(attention.name, attention.heads, attention.head_size) for attention in find_attentions(model)]
        [('encoder.layer.0.attention', (2, 2), 4)]
    """
    found = [
        Attention(ffn.layer, ffn.index, ffn.row, ffn.block, ffn.config, ffn.configs)
        for ffn in find_ffns(model)
        if ffn.row.attention is not None and not ffn.row.attention.refused
    ]
    for attention in found:
        names = [w for w in ("module", "query", "key", "value", "out", "sum", "scale") if getattr(attention.names, w)]
        missing = [getattr(attention.names, which) for which in names if attention.slot(which) is None]
        if missing:
            raise ValueError(f"{attention.name} of {type(model).__name__} has no {', '.join(missing)}")
    return found


def find_blocks(model: PreTrainedModel) -> list[ModelBlock]:
    """The attention and feed-forward blocks of a model in the order in which they run."""
    return sorted([*find_attentions(model), *find_ffns(model)], key=lambda block: (block.index, isinstance(block, FFN)))


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
