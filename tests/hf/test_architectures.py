"""Every row of the table: the block it names is the block, and an equal block in its slots changes nothing."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from snnk.hf import find_ffns
from snnk.hf.architectures import ARCHITECTURES
from snnk.hf.compression.targets import importance
from snnk.hf.record import observe
from snnk.hf.replace import replace_

from helpers.architectures import CONFIGS, ROWS, inputs, make, observed, output, width


def test_every_row_has_a_model():
    assert set(CONFIGS) == set(ARCHITECTURES)


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


@pytest.mark.parametrize("row", ["bert", "distilbert"])
def test_chunked_blocks_are_seen_whole(row):
    whole, chunked = make(row), make(row, chunk_size_feed_forward=1)
    for a, b in zip(observed(whole, row), observed(chunked, row), strict=True):
        torch.testing.assert_close(a.sum, b.sum)
        torch.testing.assert_close(a.residual, b.residual)
    sizes = [getattr(m, "chunk_size_feed_forward", 1) for f in find_ffns(chunked) for m in f.layer.modules()]
    assert set(sizes) == {1}


def test_an_activation_may_be_a_function():
    model = make("bert")
    for ffn in find_ffns(model):
        parent = ffn.layer.intermediate
        del parent.intermediate_act_fn
        parent.intermediate_act_fn = torch.tanh
    before = output(model, "bert")
    seen = observed(model, "bert")[0]
    ffn = find_ffns(model)[0]
    torch.testing.assert_close(ffn.forward(seen.inputs), seen.outputs)
    handle = replace_(ffn, "relu", 8)
    assert isinstance(ffn.layer.intermediate.intermediate_act_fn, nn.Identity)
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
    factors = (1 + ffn.layer.post_feedforward_layernorm.weight).abs()
    torch.testing.assert_close(importance(ffn, seen.sum.flatten(0, 1))[1], factors, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", ["bert", "xlm-roberta", "modernbert", "gte"])
def test_cross_encoders_and_embedding_models(row):
    """BGE, E5 and GTE models are of these types, and rerankers are classifiers with one output."""
    model = make(row, hf.AutoModelForSequenceClassification, num_labels=1)
    before = output(model, row)
    assert before.shape == (3, 1)
    for ffn in find_ffns(model):
        replace_(ffn, "atoms", width(row)).copy_rows_(range(width(row)))
    torch.testing.assert_close(output(model, row), before, atol=1e-5, rtol=1e-5)
