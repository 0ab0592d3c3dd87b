"""Where the blocks of a transformer are: one row of names for each architecture.

The residual stream goes on with s = r + scale * y behind a block with output y (see snnk.hf.model_blocks). With
post-norm (BERT) the LayerNorm behind the block reads s; with pre-norm (ViT, GPT-2, Llama) the norm of the next block
reads it, or the whole layer returns it; with a norm before the sum (Gemma 2) s is y alone. Names are relative to the
base model and so the same for every head of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig


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
        interleaved: whether one layer for all has its outputs in the order (head, query/key/value, dimension)
            instead of (query/key/value, head, dimension).
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
class ConfigNames:
    """Fields of the configuration with the sizes of blocks, one for all layers, for checkpoints without snnk.

    Args:
        width: the number of neurons of a feed-forward block; "" if the configuration has no such field.
        per: the field that `width` counts multiples of, where it counts no neurons.
        biases: the switch for biases of feed-forward blocks that have none; "" if there is no such field.
        head_size: dimensions per head, where the model reads the size of all heads from it and queries and keys can
            have fewer; "" otherwise. With rotary embeddings queries and keys keep their size, and so `head_dim` of
            Llama is not named here.
        scaled: whether dot products are divided by the root of the head size.
        attention_biases: the switch for biases of attention blocks that have none.
    """

    width: str = "intermediate_size"
    per: str = ""
    biases: str = ""
    head_size: str = ""
    scaled: bool = True
    attention_biases: str = ""


# keys that a run of a model does not show, and that files do not have
UNSEEN = ("size", "fixed", "refused", "config")


@dataclass(frozen=True)
class Architecture:
    """Names inside one layer of a model.

    Args:
        layer: pattern of a layer's name, relative to the base model, such as "encoder.layer.{}".
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
        config: fields of the configuration with the sizes of blocks.
    """

    layer: str
    up: str
    activation: str
    down: str
    gate: str | None = None
    sum: str = ""
    scale: str | None = None
    attention: AttentionNames | None = None
    masked: bool = True
    together: bool = False
    config: ConfigNames = ConfigNames()


ROTARY = "rotary embeddings turn pairs of their dimensions by different angles, so that the pairs cannot be mixed"
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
    config=ConfigNames("hidden_dim"),
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
_OPT = Architecture(
    "decoder.layers.{}",
    "fc1",
    "activation_fn",
    "fc2",
    attention=_OPT_ATTENTION,
    config=ConfigNames("ffn_dim", biases="enable_bias", attention_biases="enable_bias"),
)
_VIT_ATTENTION = AttentionNames(
    "attention",
    "attention.q_proj",
    "attention.k_proj",
    "attention.v_proj",
    "attention.o_proj",
    sum="layernorm_after",
    size=("attention.head_dim",),
)
_VIT = Architecture(
    "layers.{}",
    "mlp.fc1",
    "mlp.activation_fn",
    "mlp.fc2",
    attention=_VIT_ATTENTION,
    masked=False,
    config=ConfigNames(head_size="head_dim"),
)
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

_BIASED = ConfigNames(biases="mlp_bias", attention_biases="attention_bias")
_UNBIASED = ConfigNames(attention_biases="attention_bias")  # no switch for biases of feed-forward blocks
_NORMED = "each of their heads goes through a norm of its own, which needs all dimensions, and rotary embeddings follow"
_GEMMA2 = replace(_LLAMA, sum="post_feedforward_layernorm", config=_UNBIASED)
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
    layer="encoder.layer.{}",
    scale="layer_scale2.lambda1",
    attention=replace(_VIT_ATTENTION, sum="norm2", scale="layer_scale1.lambda1"),
    config=ConfigNames("mlp_ratio", per="hidden_size", head_size="head_dim"),
)
_DINOV2_SWIGLU = replace(
    _DINOV2,
    up="mlp.up_proj",
    activation="mlp.act_fn",
    down="mlp.down_proj",
    gate="mlp.gate_proj",
    together=True,
    config=ConfigNames("", head_size="head_dim"),  # two thirds of the multiple, rounded up to eights
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
_FALCON = replace(
    _GPT_NEOX,
    layer="h.{}",
    attention=_FALCON_ATTENTION,
    config=ConfigNames("ffn_hidden_size", biases="bias", attention_biases="bias"),
)
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
    config=ConfigNames("d_ff", head_size="d_kv", scaled=False),
)
_GATED_T5 = replace(_T5, up="layer.1.DenseReluDense.wi_1", gate="layer.1.DenseReluDense.wi_0")

# By config.model_type, followed by the variant that VARIANTS finds. A new row needs a tiny configuration in
# tests/helpers/architectures.py and nothing else: the tests of wiring and of saving run over all rows. A row of
# models with an encoder and a decoder (T5, Whisper) names the layers of the encoder. A model of several towers (CLIP)
# needs no row of its own, as each tower has one.
ARCHITECTURES: dict[str, Architecture] = {
    "bert": _BERT,
    "bloom": replace(
        _GPT_NEOX, layer="h.{}", activation="mlp.gelu_impl", attention=_BLOOM_ATTENTION, config=ConfigNames("")
    ),
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
    "gemma": replace(_LLAMA, config=_UNBIASED),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, attention=replace(_LLAMA_ATTENTION, fixed=_NORMED)),
    "gpt2": Architecture(
        "h.{}", "mlp.c_fc", "mlp.act", "mlp.c_proj", attention=_GPT2_ATTENTION, config=ConfigNames("n_inner")
    ),
    "gpt_neox": _GPT_NEOX,
    "gpt_neox+sequential": replace(_GPT_NEOX, attention=replace(_GPT_NEOX_ATTENTION, sum="post_attention_layernorm")),
    "gte": replace(_NOMIC, together=True),
    "jina_embeddings_v3": replace(_VIT, sum="post_mlp_layernorm", attention=_SPLIT_ATTENTION, masked=True),
    "llama": replace(_LLAMA, config=_BIASED),
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
        config=_BIASED,
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
    "qwen3": replace(_LLAMA, attention=replace(_LLAMA_ATTENTION, fixed=_NORMED), config=_UNBIASED),
    "roberta": _BERT,
    "siglip_text_model": _CLIP,
    "siglip_vision_model": replace(_CLIP, masked=False),
    "t5": _T5,
    "t5+gated": _GATED_T5,
    "vit": _VIT,
    "whisper": replace(_OPT, layer="encoder.layers.{}", masked=False, config=ConfigNames("encoder_ffn_dim")),
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


def kind_of(config: PretrainedConfig | None) -> str:
    """The key in ARCHITECTURES of a model with this configuration, whether or not there is such a row."""
    kind = str(getattr(config, "model_type", ""))
    return kind + VARIANTS[kind](config) if config is not None and kind in VARIANTS else kind


def row_of(config: PretrainedConfig | None) -> Architecture | None:
    """The row of a model with this configuration, or None if the table has none."""
    return ARCHITECTURES.get(kind_of(config))
