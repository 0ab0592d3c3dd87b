"""Tiny models of every architecture, and their inputs."""

import torch
import transformers as hf

from snnk.hf import find_ffns
from snnk.hf.architectures import ARCHITECTURES
from snnk.hf.finding import find_attentions
from snnk.hf.low_rank import replace_attention_
from snnk.hf.model_blocks import weight_of
from snnk.hf.record import observe
from snnk.hf.replace import replace_

D, WIDTH = 16, 32


TEXT = {
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": WIDTH,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


IMAGE = {
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": WIDTH,
    "image_size": 8,
    "patch_size": 4,
}


OPT = {**TEXT, "ffn_dim": WIDTH, "word_embed_proj_dim": D}


DISTILBERT = {
    "dim": D,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": WIDTH,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}


GPT2 = {"n_embd": D, "n_layer": 2, "n_head": 2, "n_inner": WIDTH, "vocab_size": 40, "n_positions": 32}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


HEADS = {"num_key_value_heads": 2, "head_dim": 8}  # of models whose default has nothing to do with the other sizes


T5 = {"d_model": D, "d_ff": WIDTH, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
T5 |= {"initializer_factor": 0.3}  # T5 draws large weights, which would magnify rounding errors


DINOV2 = {**IMAGE, "mlp_ratio": WIDTH // D, "layerscale_value": 0.7}
SWIGLU = {**DINOV2, "mlp_ratio": 3, "use_swiglu_ffn": True}  # two thirds of it remain


WHISPER = {
    "d_model": D,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "num_mel_bins": 4,
    "max_source_positions": 6,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": WIDTH,
    "decoder_ffn_dim": 8,
    "vocab_size": 40,
    "max_target_positions": 12,
    "classifier_proj_size": 256,
    "suppress_tokens": [],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


CONFIGS = {
    "bert": lambda **k: hf.BertConfig(**TEXT | k),
    "bloom": lambda **k: hf.BloomConfig(**TEXT | k),
    "camembert": lambda **k: hf.CamembertConfig(**TEXT | k),
    "clip_text_model": lambda **k: hf.CLIPTextConfig(**TEXT | k),
    "clip_vision_model": lambda **k: hf.CLIPVisionConfig(**IMAGE | k),
    "deberta-v2": lambda **k: hf.DebertaV2Config(
        **TEXT | k, relative_attention=True, pos_att_type=["p2c", "c2p"], conv_kernel_size=3, conv_act="gelu"
    ),
    "deit": lambda **k: hf.DeiTConfig(**IMAGE | {"architectures": ["DeiTForImageClassification"]} | k),
    "dinov2": lambda **k: hf.Dinov2Config(**DINOV2 | k),
    "dinov2+swiglu": lambda **k: hf.Dinov2Config(**SWIGLU | k),
    "dinov2_with_registers": lambda **k: hf.Dinov2WithRegistersConfig(**DINOV2 | k),
    "dinov2_with_registers+swiglu": lambda **k: hf.Dinov2WithRegistersConfig(**SWIGLU | k),
    "distilbert": lambda **k: hf.DistilBertConfig(**DISTILBERT | k),
    "electra": lambda **k: hf.ElectraConfig(**TEXT | k, embedding_size=8),
    "falcon": lambda **k: hf.FalconConfig(**TEXT | {"ffn_hidden_size": WIDTH} | k),
    "falcon+grouped": lambda **k: hf.FalconConfig(
        **TEXT | {"ffn_hidden_size": WIDTH, "new_decoder_architecture": True, "num_kv_heads": 1, "bias": True} | k
    ),
    "falcon+sequential": lambda **k: hf.FalconConfig(
        **TEXT | {"ffn_hidden_size": WIDTH, "alibi": True, "parallel_attn": False, "multi_query": False} | k
    ),
    "gemma": lambda **k: hf.GemmaConfig(**TEXT | HEADS | k),
    "gemma2": lambda **k: hf.Gemma2Config(**TEXT | HEADS | k),
    "gemma3_text": lambda **k: hf.Gemma3TextConfig(**TEXT | HEADS | k),
    "gpt2": lambda **k: hf.GPT2Config(**GPT2 | k),
    "gpt_neox": lambda **k: hf.GPTNeoXConfig(**TEXT | k),
    "gpt_neox+sequential": lambda **k: hf.GPTNeoXConfig(**TEXT | {"use_parallel_residual": False} | k),
    "gte": lambda **k: hf.GteConfig(**TEXT | k),
    "jina_embeddings_v3": lambda **k: hf.JinaEmbeddingsV3Config(**TEXT | k),
    "llama": lambda **k: hf.LlamaConfig(**TEXT | k, num_key_value_heads=1),
    "mistral": lambda **k: hf.MistralConfig(**TEXT | k, num_key_value_heads=2),
    "modernbert": lambda **k: hf.ModernBertConfig(
        **TEXT | {"sep_token_id": 2, "cls_token_id": 1, "local_attention": 4, "global_attn_every_n_layers": 2} | k
    ),
    "mpnet": lambda **k: hf.MPNetConfig(**TEXT | k),
    "mt5": lambda **k: hf.MT5Config(**T5 | {"feed_forward_proj": "relu"} | k),
    "mt5+gated": lambda **k: hf.MT5Config(**T5 | {"feed_forward_proj": "gated-gelu"} | k),
    "nomic_bert": lambda **k: hf.NomicBertConfig(**TEXT | k),
    "opt": lambda **k: hf.OPTConfig(**OPT | k),
    "opt+post-norm": lambda **k: hf.OPTConfig(**OPT | k, do_layer_norm_before=False),
    "phi3": lambda **k: hf.Phi3Config(**TEXT | k, num_key_value_heads=1),
    "qwen2": lambda **k: hf.Qwen2Config(**TEXT | k, num_key_value_heads=2),
    "qwen3": lambda **k: hf.Qwen3Config(**TEXT | HEADS | k),
    "roberta": lambda **k: hf.RobertaConfig(**TEXT | k),
    "siglip_text_model": lambda **k: hf.SiglipTextConfig(**TEXT | {"projection_size": D} | k),
    "siglip_vision_model": lambda **k: hf.SiglipVisionConfig(**IMAGE | k),
    "t5": lambda **k: hf.T5Config(**T5 | {"feed_forward_proj": "relu"} | k),
    "t5+gated": lambda **k: hf.T5Config(**T5 | {"feed_forward_proj": "gated-gelu"} | k),
    "vit": lambda **k: hf.ViTConfig(**IMAGE | k),
    "whisper": lambda **k: hf.WhisperConfig(**WHISPER | k),
    "xlm-roberta": lambda **k: hf.XLMRobertaConfig(**TEXT | k),
}


ROWS = sorted(CONFIGS)


IMAGES = tuple(row for row in ROWS if row.startswith(("deit", "dinov2", "vit")) or "vision" in row)


CAUSAL = [
    row for row in ROWS if row.startswith(("bloom", "falcon", "gemma", "gpt", "llama", "mistral", "opt", "phi", "qwen"))
]


ATTENTION = [row for row in ROWS if not ARCHITECTURES[row].attention.refused]  # rows whose attention can be replaced


GATED = [row for row in ROWS if ARCHITECTURES[row].gate is not None]


def heads(row):
    """The names of three classes of a model: without a head, if there is such a class, and with two heads."""
    bare = "AutoModel"
    if "t5" in row:
        return ["AutoModelForTextEncoding", "AutoModelForTokenClassification", "AutoModelForTokenClassification"]
    if row == "whisper":
        return ["AutoModelForAudioClassification"] * 3
    if row in ("clip_vision_model", "siglip_vision_model", "clip_text_model"):
        return [bare] * 3
    if row == "siglip_text_model":
        return ["SiglipTextModel"] * 3
    if row in IMAGES:
        return [bare, "AutoModelForImageClassification", "AutoModelForImageClassification"]
    language = "AutoModelForCausalLM" if row in CAUSAL else "AutoModelForMaskedLM"
    return [bare, language, "AutoModelForSequenceClassification"]


FEATURELESS = ("linear", "drop")


KINDS = ("atoms", "linear", "drop", "relu", "cos", "tanh_power")


def width(row):
    """Neurons per block: BLOOM always has four times as many as hidden features."""
    return 4 * D if row == "bloom" else WIDTH


def perturb_(module, scale=0.1, seed=1):
    """Move all weights from their initial values, biases and projections included, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * scale)


def make(row, auto=None, **options):
    auto = auto or getattr(hf, heads(row)[0])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make_model = auto._from_config if issubclass(auto, hf.PreTrainedModel) else auto.from_config
        model = make_model(CONFIGS[row](**options)).eval()
    perturb_(model)
    return model


TOWERS = ("clip", "siglip")  # models of two towers


def towers(name):
    """A model of texts and images."""
    config = {"clip": hf.CLIPConfig, "siglip": hf.SiglipConfig}[name]
    text = {**TEXT, "projection_dim" if name == "clip" else "projection_size": D}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.AutoModel.from_config(config(text_config=text, vision_config=IMAGE, projection_dim=D)).eval()
    perturb_(model)
    return model


def conditional():
    """A language model that may also be given images."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        text = hf.LlamaConfig(**TEXT | {"num_key_value_heads": 2, "vocab_size": 44})
        config = hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(**IMAGE), text_config=text, image_token_index=43)
        model = hf.LlavaForConditionalGeneration(config).eval()
    perturb_(model)
    return model


def inputs(row):
    generator = torch.Generator().manual_seed(2)
    if row in TOWERS:
        return inputs("clip_text_model") | inputs("clip_vision_model")
    if row in IMAGES:
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
    if row == "whisper":
        return {"input_features": torch.randn(3, 4, 12, generator=generator)}
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": torch.randint(3, 40, (3, 7), generator=generator), "attention_mask": mask}


def output(model, row):
    with torch.no_grad():
        return model(**inputs(row))[0]


def replaced(model, kind, layers=(0, 1), m=6):
    """Replace blocks and fill the new modules at random."""
    new = []
    for ffn in find_ffns(model):
        if ffn.index in layers:
            new.append(replace_(ffn, kind, None if kind in FEATURELESS else m))
            for part in (new[-1].up, new[-1].gate, new[-1].down):
                if part is not None:
                    perturb_(part, seed=3 + ffn.index)
    return new


def shorten_(model, ranks):
    """Set the dimensions of each head behind the first few to zero, so that shorter heads compute the same.

    Returns for each attention block its weights and biases with those dimensions left out, as `fill_` wants them.
    """
    parts = []
    for attention in find_attentions(model):
        size, out = attention.head_size, attention.slot("out")
        kept = [size if attention.names.fixed else ranks[0]] * 2 + [ranks[1]]
        weights, biases = {}, {}
        with torch.no_grad():
            for which, rank in zip(("query", "key", "value"), kept, strict=True):
                layer, places = attention.slot(which), attention.places(which)
                weight = weight_of(layer)
                for tensor in (weight, layer.bias):
                    if tensor is not None:
                        tensor[places.view(-1, size)[:, rank:].flatten()] = 0
                rows = places.view(-1, size)[:, :rank].flatten()
                weights[which], biases[which] = weight[rows], None if layer.bias is None else layer.bias[rows]
        columns = weight_of(out).unflatten(1, (-1, size))[..., : kept[2]].flatten(1).detach()
        parts.append(((kept[0], kept[2]), weights, biases, columns, out.bias))
    return parts


def low_rank(model, parts):
    """Replace all attention blocks by the shorter heads that `shorten_` returned."""
    handles = []
    for attention, (ranks, weights, biases, columns, bias) in zip(find_attentions(model), parts, strict=True):
        new = replace_attention_(attention, ranks)
        handles.append(new.fill_heads_(weights, biases).fill_out_(columns, bias))
    return handles


def observed(model, row):
    """What `observe` sees of each feed-forward block while the model runs on `inputs(row)`."""
    seen = []
    with torch.no_grad(), observe(find_ffns(model), lambda ffn, s: seen.append(s)):
        model(**inputs(row))
    return seen
