"""Finding the blocks of a model, refusing models without any, and choosing layers."""

import pytest
import torch
import transformers as hf
from torch import nn

from snnk.hf import find_ffns
from snnk.hf.finding import choose_layers, parse_layers
from snnk.hf.record import ActivationCache
from snnk.hf.replace import replace_

from helpers.architectures import ROWS, TEXT, TOWERS, WIDTH, D, heads, inputs, make, output, towers, width


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
