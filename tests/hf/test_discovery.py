"""Blocks of models that the table does not have: found and verified by a run, or refused with the step that failed."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import save_file
from torch import nn

from snnk.hf import audit, compress_, find_ffns, plan
from snnk.hf.architectures import ARCHITECTURES, Architecture, ConfigNames
from snnk.hf.discovery import SEEN, discover
from snnk.hf.finding import find_attentions
from snnk.hf.record import observe

from helpers.architectures import (
    HEADS,
    IMAGE,
    KINDS,
    ROWS,
    TEXT,
    WIDTH,
    D,
    inputs,
    low_rank,
    make,
    output,
    perturb_,
    replaced,
    shorten_,
)
from helpers.compression import some_batches
from helpers.processes import in_a_fresh_process

UNKNOWN = {  # types that the table does not have
    "bart": lambda: hf.BartModel(
        hf.BartConfig(
            vocab_size=40,
            d_model=D,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=WIDTH,
            decoder_ffn_dim=WIDTH,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        )
    ),
    "beit": lambda: hf.BeitModel(hf.BeitConfig(**IMAGE)),
    "fnet": lambda: hf.FNetModel(hf.FNetConfig(**TEXT)),
    "glm": lambda: hf.GlmModel(hf.GlmConfig(**TEXT, **HEADS)),
    "olmo2": lambda: hf.Olmo2Model(hf.Olmo2Config(**TEXT)),
    "phi": lambda: hf.PhiModel(hf.PhiConfig(**TEXT)),
}
FOUND = {
    "bart": Architecture("encoder.layers.{}", "fc1", "activation_fn", "fc2", sum="final_layer_norm"),
    "beit": Architecture("layers.{}", "mlp.fc1", "mlp.activation_fn", "mlp.fc2", scale="lambda_2", masked=False),
    "fnet": replace(ARCHITECTURES["bert"], attention=None),
    "glm": replace(ARCHITECTURES["phi3"], attention=None),
    "olmo2": replace(ARCHITECTURES["gemma2"], attention=None),
    "phi": replace(ARCHITECTURES["vit"], attention=None, masked=True),
}
ATTENTIVE = {  # sum and scale of attention
    "bart": ("self_attn_layer_norm", None),
    "beit": ("layernorm_after", "lambda_1"),
    "glm": ("post_attention_layernorm", None),
    "olmo2": ("post_attention_layernorm", None),
    "phi": ("", None),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_rows_of_the_table_are_found_again(row, monkeypatch):
    model, wanted = make(row), ARCHITECTURES[row]
    before, tensors = output(model, row), {key: value.clone() for key, value in model.state_dict().items()}
    monkeypatch.setattr("snnk.hf.architectures.ARCHITECTURES", {})
    found = discover(model)
    names = replace(wanted.attention, size=(), fixed=SEEN, refused="")  # what a run does not show
    if row in ("gte", "jina_embeddings_v3", "nomic_bert"):  # one tensor in files
        names = None
    if row == "mpnet":  # the table names the module around it
        names = replace(names, module="attention.attn")
    assert found == replace(wanted, attention=names, config=ConfigNames())
    assert [ffn.index for ffn in find_ffns(model)] == [0, 1]
    assert torch.equal(output(model, row), before) and not hasattr(model.config, "quantization_config")
    assert all(torch.equal(value, tensors.pop(key)) for key, value in model.state_dict().items()) and not tensors
    assert not any(m._forward_hooks or m._forward_pre_hooks or m.training for m in model.modules())


def made(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = UNKNOWN[name]().eval()
    perturb_(model)
    return model


def run(model, name):
    batch = inputs("vit" if name == "beit" else "bert")
    with torch.no_grad():
        return model(**batch | ({"decoder_input_ids": batch["input_ids"]} if name == "bart" else {}))[0], batch


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_types(name):
    model = made(name)
    row = find_ffns(model)[0].row
    assert replace(row, attention=None) == replace(FOUND[name], config=ConfigNames())
    assert (None if row.attention is None else (row.attention.sum, row.attention.scale)) == ATTENTIVE.get(name)
    seen = []
    with observe(find_ffns(model), lambda ffn, one: seen.append(one)):
        run(model, name)
    replaced(model, "drop", [0])
    find_ffns(model)[0].slot("down").bias.data.zero_()
    again = []
    with observe(find_ffns(model), lambda ffn, one: again.append(one)):
        run(model, name)
    torch.testing.assert_close(again[0].sum, seen[0].residual, atol=1e-5, rtol=1e-5)


def test_files_have_the_row_and_a_fresh_process_loads_them(tmp_path):
    cases = {}
    for i, name in enumerate(UNKNOWN):
        model = made(name)
        replaced(model, KINDS[i % len(KINDS)], [0])
        replaced(model, "atoms", [1])
        low_rank(model, shorten_(model, (8, 5)))
        model.save_pretrained(tmp_path / name)
        found, batch = run(model, name)
        batch |= {"decoder_input_ids": batch["input_ids"].clone()} if name == "bart" else {}
        save_file(batch | {"output": found.contiguous()}, tmp_path / name / "example.safetensors")
        assert json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]["row"]["down"]
        cases[name] = ("AutoModel", name)
    answers = in_a_fresh_process(tmp_path, cases, "import snnk.hf")
    assert {name: error for name, error in answers.items() if error != 0} == {}
    answers = in_a_fresh_process(tmp_path, cases, "assert 'snnk' not in sys.modules")
    assert {name: answer for name, answer in answers.items() if "mismatch" not in str(answer)} == {}


def test_types_of_the_table_have_no_row_in_their_files():
    model = make("bert")
    replaced(model, "atoms", [0])
    assert model.config.quantization_config.row is None


class CustomConfig(hf.PretrainedConfig):
    model_type = "custom"

    def __init__(self, fault="", **options):
        super().__init__(**options)
        self.fault, self.vocab_size, self.hidden_size, self.num_attention_heads = fault, 40, D, 2


class Attending(nn.Module):
    """Self-attention with two heads; with `factors`, each number of the mixed values has a factor of its own."""

    def __init__(self, factors):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.factors = torch.arange(1.0, D + 1).tolist() if factors else [1.0] * D

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)  # (batch, heads, tokens, dimensions)
        return self.proj(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2) * torch.tensor(self.factors))


class Layer(nn.Module):
    """Gated, with a function for an activation and a factor behind the block; faults make it another thing."""

    def __init__(self, fault):
        super().__init__()
        self.norm, self.wide, self.gate = nn.LayerNorm(D), nn.Linear(D, WIDTH), nn.Linear(D, WIDTH, bias=False)
        self.narrow, self.factor, self.act = nn.Linear(WIDTH, D), nn.Parameter(torch.full((D,), 0.5)), torch.tanh
        self.mix, self.fault = nn.Linear(D, D), fault
        if fault == "two":
            self.more = nn.Sequential(nn.Linear(D, WIDTH), nn.ReLU(), nn.Linear(WIDTH, D))
        if fault.startswith("attends"):
            self.attend = Attending(fault == "attends otherwise")
        if fault == "norm":
            self.act = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states):
        if self.fault.startswith("attends"):
            hidden_states = hidden_states + self.attend(hidden_states)
            x = self.norm(hidden_states)
        else:
            x = self.norm(hidden_states + self.mix(hidden_states).mean(1, keepdim=True))
        gate = F.silu(self.gate(x)) if self.fault == "function" else self.act(self.gate(x))
        out = self.factor * self.narrow(gate * self.wide(x))
        if self.fault == "zero":
            out = 0 * out
        if self.fault == "reads":
            out = out + self.narrow.weight[0, 0]
        if self.fault == "product":
            return hidden_states * out
        return hidden_states + out + (self.more(hidden_states) if self.fault == "two" else 0)


class Custom(hf.PreTrainedModel):
    config_class = CustomConfig
    base_model_prefix = "custom"

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(40, D)
        self.stack = nn.ModuleList(Layer(config.fault) for _ in range(3))
        if config.fault == "shared":
            self.stack = nn.ModuleList([self.stack[0]] * 3)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids)
        if self.config.fault == "skips":
            return hf.modeling_outputs.BaseModelOutput(last_hidden_state=self.stack[1](self.stack[0](x)))
        for layer in self.stack:
            x = layer(x)
        return hf.modeling_outputs.BaseModelOutput(last_hidden_state=x)


def custom(fault=""):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Custom(CustomConfig(fault)).eval()
    perturb_(model)
    return model


def test_a_class_of_ones_own_is_compressed_saved_and_loaded(tmp_path):
    model = custom()
    row = Architecture("stack.{}", "wide", "act", "narrow", gate="gate", scale="factor")
    assert find_ffns(model)[0].row == row and find_attentions(model) == []
    report = compress_(model, plan(model, keep=0.5), some_batches(), refine=0)
    assert [(b.kind, b.num_features) for b in report.blocks] == [("atoms", WIDTH // 2)] * 3
    replaced(model, "atoms", [0], m=5)
    model.save_pretrained(tmp_path)
    loaded = Custom.from_pretrained(tmp_path)
    assert [ffn.width for ffn in find_ffns(loaded)] == [5, WIDTH // 2, WIDTH // 2]
    torch.testing.assert_close(output(loaded, "bert"), output(model, "bert"), atol=1e-6, rtol=1e-6)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "config.json").read_text()


def test_attention_is_used_only_if_it_is_verified(tmp_path):
    """With factors behind the values, the order of a head's dimensions matters: shorter heads could not be fitted."""
    model = custom("attends")
    (first, *_) = find_attentions(model)
    assert (first.name, first.names.out, first.names.sum) == ("stack.0.attend", "attend.proj", "norm")
    low_rank(model, shorten_(model, (8, 3)))
    model.save_pretrained(tmp_path)
    loaded = Custom.from_pretrained(tmp_path)
    assert {attention.kind for attention in find_attentions(loaded)} == {"low-rank"}
    torch.testing.assert_close(output(loaded, "bert"), output(model, "bert"), atol=1e-6, rtol=1e-6)
    otherwise = custom("attends otherwise")
    assert find_attentions(otherwise) == [] and len(find_ffns(otherwise)) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "function",
            "no linear layer, activation and linear layer follow each other.*layers are mix, gate, wide",
        ),
        ("norm", "no linear layer, activation and linear layer follow each other"),
        ("product", "no tensor behind narrow is a sum"),
        ("reads", "an equal block in place of that of stack.0 changes the model's outputs"),
        ("shared", "called more than once in a run: its weights are shared"),
        ("skips", "has 3 layers, of which a run calls 2"),
        ("two", "stack.0 has 2 feed-forward blocks"),
        ("zero", "no tensor behind narrow is a sum"),
    ],
)
def test_what_cannot_be_verified_is_refused_and_left_as_it_was(fault, message):
    model = custom(fault)
    before, keys = output(model, "bert"), list(model.state_dict())
    for _ in range(2):  # a row that failed is not kept
        with pytest.raises(ValueError, match=f"a 'custom' model were not discovered.*{message}.*A row in snnk.hf.arch"):
            find_ffns(model)
    assert torch.equal(output(model, "bert"), before) and list(model.state_dict()) == keys
    assert not hasattr(model.config, "quantization_config")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_models_that_cannot_be_run():
    with torch.device("meta"), pytest.raises(ValueError, match=r"meta device.*load it into memory"):
        find_ffns(UNKNOWN["phi"]())
    sounds = hf.Wav2Vec2Model(hf.Wav2Vec2Config(**TEXT, conv_dim=(8,), conv_stride=(2,), conv_kernel=(2,)))
    with pytest.raises(ValueError, match=r"cannot be run on inputs.*input_values"):
        find_ffns(sounds)
    turned = hf.XLNetModel(hf.XLNetConfig(d_model=D, n_layer=2, n_head=2, d_inner=WIDTH, vocab_size=40))
    with pytest.raises(ValueError, match=r"states \(6, 2\) and not \(texts, tokens\)"):
        find_ffns(turned)
    moe = hf.MixtralModel(hf.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4))
    with pytest.raises(ValueError, match="mixtures of experts"):
        find_ffns(moe)
    assert row_fails(moe, "mixture of experts")


def row_fails(model, reason):
    with pytest.raises(ValueError, match=reason):
        discover(model)
    return True


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("up", "__class__", "plain dotted name"),
        ("up", "mlp.__init__", "plain dotted name"),
        ("up", "os.system('ls')", "plain dotted name"),
        ("down", "mlp.absent", "does not have: .*absent"),
        ("activation", "mlp.training", "is no function"),
        ("scale", "mlp.fc1", "names modules that the model does not have"),
        ("layer", "layers.{0.__class__}", "plain dotted name"),
        ("layer", "absent.{}", "does not have: .*absent"),
        ("masked", "yes", "plain dotted name"),
        ("code", "x", "row must have the keys"),
        ("gate", 3, "plain dotted name"),
        ("attention", {"module": "self_attn"}, "attention of row must have the keys"),
        ("attention", "self_attn", "plain dotted name"),
        ("attention", dict.fromkeys(("module", "query", "key", "value", "out"), "mlp.absent"), "does not have"),
        ("attention", dict.fromkeys(("module", "query", "key", "value", "out"), "_modules"), "plain dotted name"),
    ],
)
def test_rows_in_files_are_names_of_the_model_and_nothing_else(key, value, message, tmp_path):
    model = made("phi")
    replaced(model, "atoms", [0])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["row"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        hf.AutoModel.from_pretrained(tmp_path)


def test_audits_of_files_read_the_row(tmp_path):
    model = made("phi")
    replaced(model, "atoms", [0])
    model.save_pretrained(tmp_path)
    found = audit(tmp_path, tokens=(1, 4)).blocks
    assert [block.kind for block in found if isinstance(block.features, int)] == ["atoms", "dense"]
    assert [block.kind for block in found if not isinstance(block.features, int)] == ["dense", "dense"]


def test_rows_of_earlier_files_have_block_for_layer(tmp_path):
    model = made("phi")
    replaced(model, "atoms", [0])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    row = config["quantization_config"]["row"]
    row["block"] = row.pop("layer")
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = hf.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, "phi")[0], run(model, "phi")[0])
    assert loaded.config.quantization_config.row == model.config.quantization_config.row


def test_zeros_are_no_scale_and_sixteen_bits_are_enough():
    """A parameter of zeros would explain any output as no change, and equality means little in bfloat16."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = hf.StableLmModel(hf.StableLmConfig(vocab_size=40, num_key_value_heads=2, **sizes))
    row = discover(model)
    assert (row.scale, row.attention.scale, row.attention.sum) == (None, None, "post_attention_layernorm")
    assert discover(copy.deepcopy(model).to(torch.bfloat16)) == row
