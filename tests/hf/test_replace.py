"""What replaces a feed-forward block: what it computes, how it is undone, and which requests are refused."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import snnk
from snnk.hf import find_ffns
from snnk.hf.replace import cost_after, replace_

from helpers.architectures import FEATURELESS, KINDS, WIDTH, D, make, observed, output, replaced


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


def test_the_output_of_a_dropped_block_may_be_changed_in_place():
    model = make("falcon")
    (new, _) = replaced(model, "drop")
    bias = new.down.bias.detach().clone()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.long))  # with one token nothing is expanded
    assert torch.equal(new.down.bias, bias)


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
