"""`load`: folders that `finetune` wrote, their padding, dtypes and versions."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from snnk.finetune import finetune, load
from snnk.finetune.data import encode_texts
from snnk.hf.models import set_padding

from helpers.texts import make_tokenizer
from helpers.tuning import TINY, make_config, outputs, save


@pytest.mark.parametrize("special", [{"eos_token": "[CLS]"}, {"pad_token": "[PAD]"}])
def test_a_decoder_reads_the_last_token_that_is_no_padding(root, tmp_path, special):
    """Also where the tokenizer has none, and where the model's configuration names another or none."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=8, n_inner=32, n_layer=1, n_head=2, vocab_size=43, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    make_tokenizer(**special).save_pretrained(tmp_path / "gpt2")
    config = make_config(root, tmp_path / "out", method="lora", pooling="model", max_steps=2)
    done = finetune(replace(config, model=str(tmp_path / "gpt2")))
    model, tokenizer = load(tmp_path / "out")
    texts = ["w1 w2 w3", "w4"]
    batch = encode_texts(tokenizer, texts, None, torch.tensor([0, 1]), 32).batch([0, 1])
    with torch.no_grad():
        together = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
        trained = done.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.equal(together, trained) and torch.allclose(together, alone, atol=1e-6)
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)


def test_positions_that_are_counted_from_the_padding_token_stay():
    model = transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**TINY, pad_token_id=1))
    set_padding(model, make_tokenizer())
    assert model.config.pad_token_id == 1  # the tokenizer's is 0


def test_a_model_that_was_saved_in_bfloat16_comes_back_as_it_was_trained(root, tmp_path):
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**TINY)).bfloat16().save_pretrained(tmp_path / "half")
    make_tokenizer().save_pretrained(tmp_path / "half")
    config = make_config(root, tmp_path / "out", method="snnk-relu", max_steps=2)
    done = finetune(replace(config, model=str(tmp_path / "half")))
    model, _ = load(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(outputs(model), outputs(done.model))


def test_load_refuses_other_folders(root):
    with pytest.raises(FileNotFoundError, match=r"no file .*metrics\.json, which should be a file of snnk finetune"):
        load(root / "bert")


def test_adapters_of_earlier_files_load(root, tmp_path):
    """Their files have peft_type SNNK, and no tensor in the place of the pooler."""
    done = finetune(make_config(root, tmp_path / "tuned", method="snnk", num_features=2, max_steps=0, epochs=None))
    file = tmp_path / "tuned" / "adapter_config.json"
    config = json.loads(file.read_text())
    assert "import snnk.peft" in config["peft_type"] and "bert.pooler.dense" in config["modules_to_save"]
    config["peft_type"] = "SNNK"
    config["modules_to_save"].remove("bert.pooler.dense")
    file.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    assert tensors.pop("base_model.model.bert.pooler.dense.weight").numel() == 0
    save_file(tensors, tmp_path / "tuned" / "adapter_model.safetensors")
    torch.testing.assert_close(outputs(load(tmp_path / "tuned")[0]), outputs(done.model))


@pytest.fixture
def moved(root, tmp_path):
    """The folder of an adapter, which was moved together with its base model, and the outputs before that."""
    shutil.copytree(root / "bert", tmp_path / "a" / "models" / "bert")
    config = make_config(root, tmp_path / "a" / "tuned" / "one", method="snnk", num_features=2, max_steps=1)
    done = finetune(replace(config, model=str(tmp_path / "a" / "models" / "bert")))
    (tmp_path / "a").rename(tmp_path / "b")
    return tmp_path / "b" / "tuned" / "one", outputs(done.model)


def test_an_adapter_and_its_base_model_move_together(moved, tmp_path, monkeypatch):
    folder, before = moved
    assert torch.equal(outputs(load(folder)[0]), before)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(outputs(load("link")[0]), before)  # the link is elsewhere than the folder


def test_an_adapter_moves_alone_to_a_base_model_that_is_named(moved, tmp_path):
    folder, before = moved
    folder.rename(tmp_path / "alone")
    base = tmp_path / "b" / "models" / "bert"
    assert torch.equal(outputs(load(tmp_path / "alone", base=base)[0]), before)
    with pytest.raises(ValueError, match=r"adapter of bert, .* at .*models/bert and .*/a/models/bert: .*--base"):
        load(tmp_path / "alone")
    with pytest.raises(ValueError, match=r"looked for at .*/nowhere: .* Name the folder"):
        load(tmp_path / "alone", base=tmp_path / "nowhere")


def test_a_base_model_with_other_weights_is_refused(moved, tmp_path):
    folder, _ = moved
    other = save(transformers.BertModel, tmp_path / "other", initializer_range=0.1)
    with pytest.raises(ValueError, match="other has other weights than bert, the base model that the adapter in"):
        load(folder, base=other)


def test_a_whole_model_needs_no_base_model(root, tmp_path):
    finetune(make_config(root, tmp_path / "whole", max_steps=0, epochs=None))
    with pytest.raises(ValueError, match="has all weights of its model and needs no base model; leave out base x"):
        load(tmp_path / "whole", base="x")


def test_a_correct_load_prints_nothing(root, tmp_path, capfd):
    """transformers reports the classifier, which the files of a base model lack, as a problem."""
    for method in ("lora", "snnk-relu", "linear-probe", "uptrain"):
        finetune(make_config(root, tmp_path / method, method=method, max_steps=0, epochs=None))
        capfd.readouterr()
        load(tmp_path / method)
        assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("key", "value"),
    [("base", 1), ("base", {"place": 1}), ("data", []), ("data", {"text": 1}), ("data", {"max_length": "9"})],
)
def test_metrics_that_were_changed_are_refused(root, tmp_path, key, value):
    """They name columns and places to look at."""
    (tmp_path / "tuned").mkdir()
    facts = {"adapter": False, "images": False, "labels": None, "config": {"pooling": "mean"}, key: value}
    (tmp_path / "tuned" / "metrics.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=rf"metrics\.json was changed: ({key}|max_length) must"):
        load(tmp_path / "tuned")
