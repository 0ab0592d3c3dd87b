"""Loading is strict, in eval mode, and names what differs; token limits, batches and eval mode of models."""

import pytest
import torch
import transformers as hf
from torch import nn

from snnk.hf.models import (
    check_batches,
    class_of,
    eager_attention,
    evaluating,
    has_bfloat16,
    load_model,
    load_processor,
    quiet,
    token_limit,
)

from helpers.architectures import make, towers
from helpers.texts import make_tokenizer


@pytest.fixture
def folder(tmp_path):
    make("bert", hf.AutoModelForSequenceClassification, num_labels=3).train().save_pretrained(tmp_path)
    return tmp_path


def test_the_class_of_config_json_is_loaded_in_eval_mode(folder):
    loaded = load_model(folder)
    assert type(loaded.model) is hf.BertForSequenceClassification and not loaded.model.training
    assert not loaded.missing | loaded.mismatched | loaded.unexpected
    assert load_model(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_a_new_head_is_drawn_and_named(folder):
    options = {"num_labels": 5, "id2label": {i: str(i) for i in range(5)}}
    loaded = load_model(folder, hf.AutoModelForSequenceClassification, new_head=True, **options)
    assert loaded.mismatched == {"classifier.weight", "classifier.bias"} and not loaded.missing
    with pytest.raises(ValueError, match="cannot be loaded as AutoModelForSequenceClassification"):
        load_model(folder, hf.AutoModelForSequenceClassification, **options)
    loaded = load_model(folder, hf.AutoModelForMaskedLM, new_head=True)
    assert "cls.predictions.bias" in loaded.missing and "classifier.bias" in loaded.unexpected
    with pytest.raises(ValueError, match=r"lacks cls\.predictions\.bias"):
        load_model(folder, hf.AutoModelForMaskedLM)


@pytest.mark.parametrize("names", [None, [], ["os"], ["BertConfig"], [3], 5, {"BertModel": 1}])
def test_only_models_of_transformers_are_classes(names):
    config = hf.BertConfig()
    config.architectures = names
    assert class_of(config) is None
    assert class_of(hf.BertConfig(architectures=["BertModel"])) is hf.BertModel


def test_a_tokenizer_must_be_the_model_s(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    assert len(load_processor(tmp_path, images=False, vocab_size=43)) == 43
    with pytest.raises(ValueError, match="has 43 tokens and the model 431"):
        load_processor(tmp_path, images=False, vocab_size=431)
    with pytest.raises(ValueError, match="has no image processor that can be loaded"):
        load_processor(tmp_path, images=True)


def test_token_limits():
    assert token_limit(hf.T5Config()) is None and token_limit(hf.XLNetConfig()) is None
    assert token_limit(hf.GPT2Config()) == 1024 and token_limit(hf.BertConfig(max_position_embeddings=64)) == 64
    assert token_limit(hf.RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512


@pytest.mark.parametrize("row", ["camembert", "mpnet", "roberta", "xlm-roberta"])
def test_positions_that_are_counted_from_the_padding_token(row):
    """A text of the longest length runs, and a text with one more token does not."""
    model = make(row)
    longest = token_limit(model.config)
    ids = torch.full((1, longest), 5)
    assert model(ids)[0].shape[1] == longest
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 5))


@pytest.mark.parametrize("bars", [True, False])
def test_logging_is_as_it_was(bars):
    log = hf.utils.logging
    level, before = log.get_verbosity(), log.is_progress_bar_enabled()
    switch = {True: log.enable_progress_bar, False: log.disable_progress_bar}
    switch[bars]()
    try:
        with quiet():
            assert log.get_verbosity() == log.ERROR and not log.is_progress_bar_enabled()
        assert log.get_verbosity() == level and log.is_progress_bar_enabled() == bars
    finally:
        switch[before]()


def test_batches_are_dicts_of_tensors():
    batch = {"input_ids": torch.ones(1, 2)}
    assert list(check_batches([batch])) == [batch]
    for wrong in (batch, torch.ones(2), "text", None):
        with pytest.raises(TypeError, match="batches must be a list of dicts"):
            list(check_batches(wrong))
    with pytest.raises(TypeError, match="a batch must be a dict of the model's inputs; got list"):
        list(check_batches([[1]]))


def test_every_module_gets_its_own_mode_back():
    model = make("bert").train()
    model.embeddings.eval()
    model.encoder.layer[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert len(set(modes.values())) == 2
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        for layer in model.encoder.layer:
            layer.intermediate = nn.Sequential(nn.Dropout()).eval()
    after = {name: module.training for name, module in model.named_modules()}
    assert {name: mode for name, mode in after.items() if name in modes} == {
        name: modes[name] for name in after if name in modes
    }
    assert [after[f"encoder.layer.{i}.intermediate.0"] for i in (0, 1)] == [True, False]


def test_eager_attention_is_undone_part_by_part():
    """Also after an error. The two towers of CLIP may have attention of different kinds."""
    model = towers("clip")
    model.set_attn_implementation("sdpa")
    model.config.text_config._attn_implementation_internal = "eager"
    parts = (model.config, model.config.text_config, model.config.vision_config)
    with pytest.raises(ValueError, match="broken"), eager_attention(model):
        assert [part._attn_implementation for part in parts] == ["eager"] * 3
        raise ValueError("broken")
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]


@pytest.mark.parametrize(("capability", "found"), [("AVX512", True), ("AVX2", False), ("DEFAULT", False)])
def test_bfloat16_needs_the_instructions_that_torch_uses(monkeypatch, capability, found):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert has_bfloat16("cpu") == found and not has_bfloat16("mps")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert not has_bfloat16("cpu")
