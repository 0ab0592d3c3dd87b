"""Every row of the table: the block it names is the block, and an equal block in its slots changes nothing."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import snnk
from snnk.hf import find_ffns
from snnk.hf.architectures import ARCHITECTURES, choose_layers, parse_layers
from snnk.hf.compression.targets import importance
from snnk.hf.record import ActivationCache, observe
from snnk.hf.replace import cost_after, replace_

from helpers.architectures import (
    CONFIGS,
    FEATURELESS,
    KINDS,
    ROWS,
    TEXT,
    TOWERS,
    WIDTH,
    D,
    heads,
    inputs,
    make,
    output,
    replaced,
    towers,
    width,
)


def observed(model, row):
    seen = []
    with torch.no_grad(), observe(find_ffns(model), lambda ffn, s: seen.append(s)):
        model(**inputs(row))
    return seen


def test_every_row_has_a_model():
    assert set(CONFIGS) == set(ARCHITECTURES)


@pytest.mark.parametrize("row", ROWS)
def test_blocks_are_found_under_the_same_names_below_any_head(row):
    bare, headed = find_ffns(make(row)), find_ffns(make(row, getattr(hf, heads(row)[2])))
    assert [f.name for f in bare] == [f.name for f in headed]
    assert [f.index for f in bare] == [0, 1]
    for ffn in bare:
        assert (ffn.in_features, ffn.width, ffn.out_features, ffn.kind) == (D, width(row), D, "dense")
        matrices = 3 if ffn.gated else 2
        biases = sum(b.numel() for b in (ffn.up_bias(), ffn.gate_bias(), ffn.down_bias()) if b is not None)
        assert ffn.multiply_adds == matrices * D * width(row)
        assert ffn.num_parameters == matrices * D * width(row) + biases


@pytest.mark.parametrize("row", ROWS)
def test_getters_are_the_block_that_runs(row):
    model = make(row)
    for ffn, seen in zip(find_ffns(model), observed(model, row), strict=True):
        x = seen.inputs
        assert x.shape == seen.outputs.shape == seen.sum.shape
        assert x.ndim == 3
        hidden = F.linear(x, ffn.up_weight(), ffn.up_bias())
        if ffn.gated:
            hidden = ffn.activation(F.linear(x, ffn.gate_weight(), ffn.gate_bias())) * hidden
        else:
            hidden = ffn.activation(hidden)
        torch.testing.assert_close(ffn.hidden(x), hidden)
        torch.testing.assert_close(F.linear(hidden, ffn.down_weight(), ffn.down_bias()), seen.outputs)
        torch.testing.assert_close(ffn.forward(x), seen.outputs)


@pytest.mark.parametrize("row", ROWS)
def test_residual_is_the_sum_of_a_model_without_the_block(row):
    model = make(row)
    first = observed(model, row)[0]
    assert first.outputs.abs().max() > 1e-2
    find = find_ffns(model)[0]
    with torch.no_grad():
        for parameter in find.slot("down").parameters():
            parameter.zero_()
    torch.testing.assert_close(observed(model, row)[0].sum, first.residual, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row", ROWS)
def test_identity_swap(row):
    model = make(row)
    before = output(model, row)
    for ffn in find_ffns(model):
        rows = torch.randperm(width(row), generator=torch.Generator().manual_seed(4))
        new = replace_(ffn, "atoms", width(row)).copy_rows_(rows)
        assert isinstance(new.down, nn.Linear)
        assert isinstance(new.up, nn.Linear)
    torch.testing.assert_close(output(model, row), before, atol=1e-5, rtol=1e-5)
    assert [f.kind for f in find_ffns(model)] == ["atoms", "atoms"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ["bert", "dinov2", "dinov2+swiglu", "falcon", "gpt2", "llama", "opt", "phi3"])
def test_replaced_blocks_compute_down_of_phi(row, kind):
    model = make(row)
    dense = find_ffns(model)[0].multiply_adds
    costs = [cost_after(ffn, kind, None if kind in FEATURELESS else 6) for ffn in find_ffns(model)]
    new = replaced(model, kind)
    assert [handle.ffn.cost for handle in new] == costs
    for handle, seen in zip(new, observed(model, row), strict=True):
        phi = handle.phi(seen.inputs)
        m = {"linear": D, "drop": 0}.get(kind, 6)
        assert phi.shape == (*seen.inputs.shape[:-1], m)
        weight = torch.zeros(D, 0) if kind == "drop" else handle.down.weight
        torch.testing.assert_close(F.linear(phi, weight, handle.down.bias), seen.outputs)
        assert handle.ffn.kind == kind
        assert handle.ffn.multiply_adds < dense
        assert (handle.ffn.multiply_adds == 0) == (kind == "drop")
        assert (handle.map is not None) == (kind in snnk.FEATURE_MAPS)
        if kind != "atoms":
            with pytest.raises(ValueError, match=f"was replaced before \\({kind}\\)"):
                replace_(handle.ffn, "linear")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ["bert", "gpt2", "llama", "modernbert", "gte"])
def test_restore(row, kind):
    model = make(row)
    before, keys = output(model, row), list(model.state_dict())
    new = replaced(model, kind)
    assert not torch.allclose(output(model, row), before)
    new[0].restore_()
    assert list(model.config.quantization_config.blocks) == [new[1].ffn.name]
    new[1].restore_()
    assert torch.equal(output(model, row), before)
    assert list(model.state_dict()) == keys
    assert not hasattr(model.config, "quantization_config")


def test_restoring_a_second_replacement_leaves_the_first():
    model = make("bert")
    replaced(model, "atoms", m=10)
    before = output(model, "bert")
    again = replaced(model, "relu", layers=[0])
    again[0].restore_()
    assert torch.equal(output(model, "bert"), before)
    kinds = {name: entry["num_features"] for name, entry in model.config.quantization_config.blocks.items()}
    assert kinds == {"encoder.layer.0": 10, "encoder.layer.1": 10}


def test_a_map_as_an_object_and_its_options():
    model = make("bert")
    first, second = find_ffns(model)
    handle = replace_(first, snnk.ArcCosine(D, 8, order=2, seed=5))
    assert (handle.kind, handle.map.order, handle.map.seed) == ("features", 2, 5)
    assert replace_(second, "cos", 8, seed=3, projection="iid").map.kind.name == "iid"


def test_a_map_of_ones_own_in_the_registry_is_a_kind(monkeypatch):
    monkeypatch.setitem(snnk.FEATURE_MAPS, "mine", lambda *sizes, **k: snnk.ArcCosine(*sizes, order=2, **k))
    handle = replace_(find_ffns(make("bert"))[0], "mine", 8)
    assert (handle.kind, handle.map.order) == ("mine", 2)


@pytest.mark.parametrize("row", ["bert", "distilbert"])
def test_chunked_blocks_are_seen_whole(row):
    whole, chunked = make(row), make(row, chunk_size_feed_forward=1)
    for a, b in zip(observed(whole, row), observed(chunked, row), strict=True):
        torch.testing.assert_close(a.sum, b.sum)
        torch.testing.assert_close(a.residual, b.residual)
    sizes = [getattr(m, "chunk_size_feed_forward", 1) for f in find_ffns(chunked) for m in f.block.modules()]
    assert set(sizes) == {1}


def test_an_activation_may_be_a_function():
    model = make("bert")
    for ffn in find_ffns(model):
        parent = ffn.block.intermediate
        del parent.intermediate_act_fn
        parent.intermediate_act_fn = torch.tanh
    before = output(model, "bert")
    seen = observed(model, "bert")[0]
    ffn = find_ffns(model)[0]
    torch.testing.assert_close(ffn.forward(seen.inputs), seen.outputs)
    handle = replace_(ffn, "relu", 8)
    assert isinstance(ffn.block.intermediate.intermediate_act_fn, nn.Identity)
    handle.restore_()
    assert torch.equal(output(model, "bert"), before)


def test_hooks_are_removed_even_after_an_error():
    model = make("bert")

    def fail(ffn, seen):
        raise KeyError("from the callback")

    with pytest.raises(KeyError), observe(find_ffns(model), fail):
        model(**inputs("bert"))
    output(model, "bert")
    with pytest.raises(ValueError, match=r"model\.eval"), observe(find_ffns(model.train()), fail):
        pass


def test_nothing_is_drawn_from_the_global_generator():
    model = make("bert")
    state = torch.random.get_rng_state()
    for ffn, kind in zip(find_ffns(model), ("atoms", "relu"), strict=True):
        replace_(ffn, kind, 6)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_dtype_and_training_mode_follow_the_block():
    model = make("bert").to(torch.bfloat16).train()
    first, second = replaced(model, "atoms", [0]) + replaced(model, "cos", [1])
    assert first.up.weight.dtype == second.map.projection.dtype == second.down.weight.dtype == torch.bfloat16
    assert all(m.training for m in model.modules())
    assert output(model.eval(), "bert").isfinite().all()


VARIED = {  # models of one row that are wired otherwise
    "bloom": {"apply_residual_connection_post_layernorm": True},
    "clip_text_model": {"hidden_act": "gelu"},
    "falcon": {"bias": True, "num_ln_in_parallel_attn": 1},
    "gemma3_text": {"hidden_activation": "gelu"},
    "modernbert": {"mlp_bias": True},
    "siglip_vision_model": {"vision_use_head": False},
    "t5": {"feed_forward_proj": "gelu"},
}


@pytest.mark.parametrize("row", VARIED)
def test_variants_of_a_row(row):
    model = make(row, **VARIED[row])
    before, seen = output(model, row), observed(model, row)
    for ffn, one in zip(find_ffns(model), seen, strict=True):
        torch.testing.assert_close(ffn.forward(one.inputs), one.outputs)
    for ffn in find_ffns(model):
        replace_(ffn, "atoms", width(row)).copy_rows_(range(width(row)))
    torch.testing.assert_close(output(model, row), before, atol=1e-5, rtol=1e-5)


def test_a_norm_before_the_sum_leaves_no_residual():
    """Gemma 2: the block is fitted to the original's own output, and outputs count by the factors of the norm."""
    model = make("gemma2")
    ffn, seen = find_ffns(model)[0], observed(model, "gemma2")[0]
    assert not seen.residual.any() and torch.equal(seen.sum, seen.outputs)
    factors = (1 + ffn.block.post_feedforward_layernorm.weight).abs()
    torch.testing.assert_close(importance(ffn, seen.sum.flatten(0, 1))[1], factors, rtol=1e-5, atol=1e-5)


def test_the_output_of_a_dropped_block_may_be_changed_in_place():
    model = make("falcon")
    (new, _) = replaced(model, "drop")
    bias = new.down.bias.detach().clone()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.long))  # with one token nothing is expanded
    assert torch.equal(new.down.bias, bias)


@pytest.mark.parametrize("name", TOWERS)
def test_towers_are_found_and_padding_counts_for_texts_only(name):
    model = towers(name)
    ffns = find_ffns(model)
    assert [ffn.name for ffn in ffns] == [
        f"{part}_model.encoder.layers.{i}" for part in ("text", "vision") for i in (0, 1)
    ]
    assert [ffn.index for ffn in ffns] == [0, 1, 2, 3]
    before = output(model, name)
    for ffn in ffns:
        replace_(ffn, "atoms", WIDTH).copy_rows_(range(WIDTH))
    torch.testing.assert_close(output(model, name), before, atol=1e-5, rtol=1e-5)
    cache = ActivationCache(model, [inputs(name)])
    tokens = int(inputs(name)["attention_mask"].sum())
    patches = 3 * (5 if name == "clip" else 4)
    assert [len(cache.advance(ffn).inputs[0]) for ffn in find_ffns(model)] == [tokens, tokens, patches, patches]
    tower = type(model.vision_model)(model.config.vision_config)
    assert [ffn.name for ffn in find_ffns(tower)] == ["encoder.layers.0", "encoder.layers.1"]


@pytest.mark.parametrize("row", ["bert", "xlm-roberta", "modernbert", "gte"])
def test_cross_encoders_and_embedding_models(row):
    """BGE, E5 and GTE models are of these types, and rerankers are classifiers with one output."""
    model = make(row, hf.AutoModelForSequenceClassification, num_labels=1)
    before = output(model, row)
    assert before.shape == (3, 1)
    for ffn in find_ffns(model):
        replace_(ffn, "atoms", width(row)).copy_rows_(range(width(row)))
    torch.testing.assert_close(output(model, row), before, atol=1e-5, rtol=1e-5)


def test_unknown_models_are_refused_with_a_reason():
    albert = hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=8))
    slow = make("bloom", slow_but_exact=True, pretraining_tp=2)
    mamba = hf.MambaModel(hf.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9, state_size=4))
    for model, reason in ((albert, "shared"), (slow, "in slices"), (mamba, "recurrence")):
        with pytest.raises(ValueError, match=f"cannot be replaced.*{reason}"):
            find_ffns(model)
    slow.config.slow_but_exact = False  # as the message says
    assert len(find_ffns(slow)) == 2
    with pytest.raises(TypeError, match="unwrap it first"):
        find_ffns(nn.Sequential(albert))


def test_known_models_without_their_modules_are_refused():
    model = make("bert")
    model.encoder.layer[1].output.dense = None
    with pytest.raises(ValueError, match=r"encoder\.layer\.1 of BertModel has no output\.dense"):
        find_ffns(model)
    model.encoder.layer = nn.ModuleList()
    with pytest.raises(ValueError, match="no layers at"):
        find_ffns(model)


def test_bad_requests():
    ffn = find_ffns(make("bert"))[0]
    for arguments, message in (
        (("gelo", 4), "did you mean 'gelu'"),
        (("features", 4), "unknown kind"),
        (("atoms", WIDTH + 1), f"{WIDTH} neurons"),
        (("atoms", None), "positive integer"),
        (("relu", None), "positive integer"),
        (("linear", 4), "no features to count"),
    ):
        with pytest.raises(ValueError, match=message):
            replace_(ffn, *arguments)
    with pytest.raises(TypeError, match="only feature maps have options"):
        replace_(ffn, "atoms", 4, projection="iid")
    assert ffn.kind == "dense"
    handle = replace_(ffn, "atoms", 4)
    with pytest.raises(ValueError, match=r"\(16, 4\); got \(16, 5\)"):
        handle.fill_(torch.zeros(D, 5), None)
    with pytest.raises(ValueError, match="NaN"):
        handle.fill_(torch.full((D, 4), torch.nan), None)
    with pytest.raises(ValueError, match="needs 4 rows"):
        handle.copy_rows_([1, 2])
    square = find_ffns(hf.GPT2Model(hf.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_inner=8, vocab_size=9)))[0]
    with pytest.raises(ValueError, match="leave it as it is"):
        replace_(square, "atoms", 8)


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ("all", [0, 1, 2, 3]),
        (" top-2 ", [2, 3]),
        ("3, 1,1", [1, 3]),
        ((2, 0), [0, 2]),
        (torch.tensor([1]).numpy(), [1]),
    ],
)
def test_layers_are_read_from_texts_and_lists(layers, numbers):
    assert choose_layers(list(range(4)), layers) == numbers


@pytest.mark.parametrize("layers", ["", "top-0", "top-", "1,x", "1-3", ["1"], [True], 1.0, None])
def test_layers_that_cannot_be_read(layers):
    with pytest.raises((ValueError, TypeError), match="layers must be 'all', 'top-6', or numbers"):
        parse_layers(layers)
