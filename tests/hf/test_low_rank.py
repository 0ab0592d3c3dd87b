"""Attention with fewer dimensions per head: padded heads compute what the same heads without padding would."""

import json

import pytest
import torch
import transformers as hf

import snnk.hf
from snnk.hf.finding import find_attentions
from snnk.hf.low_rank import cost_after, replace_attention_

from helpers.architectures import ATTENTION, CAUSAL, IMAGES, D, heads, inputs, low_rank, make, output, shorten_

SIZE = D // 2  # dimensions per head
# transformers has one implementation, or two that differ (Falcon with alibi; ModernBERT at tokens of padding)
ONE_IMPLEMENTATION = ("bloom", "deberta-v2", "falcon+sequential", "gemma2", "modernbert", "mpnet")
RANKS = [(3, 5), (6, 2), (4, 4), (SIZE, 3)]


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row", ATTENTION)
def test_all_dimensions_of_all_heads_are_the_old_attention(row):
    model = make(row)
    before = output(model, row)
    handles = low_rank(model, shorten_(model, (SIZE, SIZE)))
    close(output(model, row), before)
    assert [handle.attention.kind for handle in handles] == ["low-rank", "low-rank"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("row", ATTENTION)
def test_dimensions_that_are_zero_can_be_left_out(row, ranks):
    model = make(row)
    parts = shorten_(model, ranks)
    before, old = output(model, row), find_attentions(model)
    costs = [cost_after(attention, part[0]) for attention, part in zip(old, parts, strict=True)]
    dense = [attention.multiply_adds for attention in old]
    handles = low_rank(model, parts)
    close(output(model, row), before)
    assert [handle.attention.cost for handle in handles] == costs
    assert all(cost.multiply_adds < full for cost, full in zip(costs, dense, strict=True))
    assert [handle.attention.head_size for handle in handles] == [SIZE, SIZE]


@pytest.mark.parametrize("row", ATTENTION)
def test_restore(row):
    model = make(row)
    before, keys = output(model, row), list(model.state_dict())
    first, second = low_rank(model, shorten_(make(row), (2, 2)))
    assert not torch.allclose(output(model, row), before)
    first.restore_()
    assert list(model.config.quantization_config.blocks) == [second.attention.name]
    second.restore_()
    assert torch.equal(output(model, row), before)
    assert list(model.state_dict()) == keys
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("row", ATTENTION)
def test_saved_and_loaded(row, tmp_path):
    model = make(row)
    low_rank(model, shorten_(model, (3, 5)))
    model.save_pretrained(tmp_path)
    loaded = getattr(hf, heads(row)[0]).from_pretrained(tmp_path).eval()
    assert torch.equal(output(loaded, row), output(model, row))
    assert [a.kind for a in find_attentions(loaded)] == ["low-rank", "low-rank"]


@pytest.mark.parametrize("row", [row for row in ATTENTION if row not in ONE_IMPLEMENTATION])
def test_implementations_of_attention_agree(row):
    found = []
    for implementation in ("eager", "sdpa"):
        model = make(row, attn_implementation=implementation)
        low_rank(model, shorten_(model, (3, 5)))
        assert model.config._attn_implementation == implementation
        found.append(output(model, row))
    close(*found)


@pytest.mark.parametrize("row", [row for row in CAUSAL if row in ATTENTION])
def test_generation_with_and_without_a_cache(row):
    model = make(row, hf.AutoModelForCausalLM)
    parts = shorten_(model, (3, 5))
    settings = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    ids = {"input_ids": inputs(row)["input_ids"][1:]}
    before = model.generate(**ids, **settings)
    low_rank(model, parts)
    assert torch.equal(model.generate(**ids, **settings), before)
    assert torch.equal(model.generate(**ids, **settings, use_cache=False), before)


@pytest.mark.parametrize("row", ["bert", "gpt2", "llama", "vit"])
def test_gradients_reach_all_new_layers_with_dropout(row):
    model = make(row).train()
    handles = low_rank(model, shorten_(make(row), (3, 5)))
    model(**inputs(row))[0].square().sum().backward()
    for handle in handles:
        for module in handle.modules:
            assert module.weight.grad.abs().max() > 0
        assert all(module.training for module in handle.modules)


def test_compiled_and_in_another_dtype():
    model = make("bert")
    low_rank(model, shorten_(model, (3, 5)))
    before = output(model, "bert")
    exported = torch.export.export(model, (), inputs("bert"), strict=False)
    close(exported.module()(**inputs("bert"))[0], before)
    assert output(model.to(torch.bfloat16), "bert").isfinite().all()


def test_bad_requests():
    bert, llama = find_attentions(make("bert"))[0], find_attentions(make("llama"))[0]
    for attention, ranks, message in (
        (bert, (SIZE + 1, 4), f"have {SIZE} dimensions; got ranks"),
        (bert, (0, 4), "positive integer"),
        (bert, 4, "two numbers"),
        (llama, (4, 4), "rotary embeddings"),
    ):
        with pytest.raises(ValueError, match=message):
            replace_attention_(attention, ranks)
    assert bert.kind == "dense"
    replace_attention_(bert, (4, 4))
    with pytest.raises(ValueError, match="was replaced before"):
        replace_attention_(bert, (2, 2))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "low-rank", "ranks": [4, 99]}, "have 8 dimensions"),
        ({"kind": "low-rank", "ranks": [4]}, "must be two numbers"),
        ({"kind": "low-rank", "ranks": [4, -1]}, "positive integer"),
        ({"kind": "low-rank", "ranks": [4, 4], "map": {}}, "must have the keys"),
        ({"kind": "linear"}, "cannot become 'linear'"),
        ({"kind": "low-rank", "ranks": [5, 3]}, "does not fit the model|mismatch"),
    ],
)
def test_files_that_are_wrong_are_refused(entry, message, tmp_path):
    model = make("bert")
    low_rank(model, shorten_(model, (3, 5)))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["blocks"]["encoder.layer.1.attention"] = entry
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        hf.AutoModel.from_pretrained(tmp_path)


def test_images_have_attention_too():
    assert {row for row in ATTENTION if row in IMAGES and find_attentions(make(row))} == set(IMAGES)
    assert snnk.hf.find_ffns(make("vit"))[0].name == "layers.0"
