"""Tiny models of every architecture, and their inputs."""

import torch
import transformers as hf

from snnk.hf import find_ffns
from snnk.hf.architectures import find_attentions, weight_of
from snnk.hf.low_rank import replace_attention_
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


CONFIGS = {
    "bert": lambda **k: hf.BertConfig(**TEXT | k),
    "camembert": lambda **k: hf.CamembertConfig(**TEXT | k),
    "deberta-v2": lambda **k: hf.DebertaV2Config(
        **TEXT | k, relative_attention=True, pos_att_type=["p2c", "c2p"], conv_kernel_size=3, conv_act="gelu"
    ),
    "deit": lambda **k: hf.DeiTConfig(**IMAGE | {"architectures": ["DeiTForImageClassification"]} | k),
    "dinov2": lambda **k: hf.Dinov2Config(**IMAGE | {"mlp_ratio": WIDTH // D, "layerscale_value": 0.7} | k),
    "distilbert": lambda **k: hf.DistilBertConfig(**DISTILBERT | k),
    "electra": lambda **k: hf.ElectraConfig(**TEXT | k, embedding_size=8),
    "gpt2": lambda **k: hf.GPT2Config(**GPT2 | k),
    "llama": lambda **k: hf.LlamaConfig(**TEXT | k, num_key_value_heads=1),
    "mistral": lambda **k: hf.MistralConfig(**TEXT | k, num_key_value_heads=2),
    "mpnet": lambda **k: hf.MPNetConfig(**TEXT | k),
    "opt": lambda **k: hf.OPTConfig(**OPT | k),
    "opt+post-norm": lambda **k: hf.OPTConfig(**OPT | k, do_layer_norm_before=False),
    "qwen2": lambda **k: hf.Qwen2Config(**TEXT | k, num_key_value_heads=2),
    "roberta": lambda **k: hf.RobertaConfig(**TEXT | k),
    "vit": lambda **k: hf.ViTConfig(**IMAGE | k),
    "xlm-roberta": lambda **k: hf.XLMRobertaConfig(**TEXT | k),
}


ROWS = sorted(CONFIGS)


IMAGES = ("deit", "dinov2", "vit")


CAUSAL = ("gpt2", "llama", "mistral", "opt", "opt+post-norm", "qwen2")


FEATURELESS = ("linear", "drop")


KINDS = ("atoms", "linear", "drop", "relu", "cos", "tanh_power")


def perturb_(module, scale=0.1, seed=1):
    """Move all weights from their initial values, biases and projections included, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * scale)


def make(row, auto=hf.AutoModel, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(CONFIGS[row](**options)).eval()
    perturb_(model)
    return model


def inputs(row):
    generator = torch.Generator().manual_seed(2)
    if row in IMAGES:
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
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
    """Set the numbers of each head behind the first few to zero, so that shorter heads compute the same.

    Returns for each attention block its weights and biases with those numbers left out, as `fill_` wants them.
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
