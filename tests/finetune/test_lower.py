"""Frozen layers below the first trained one are run once, and the result is that of running them in every step."""

from collections import Counter

import pytest
import torch
import transformers as hf

from snnk.finetune import finetune
from snnk.finetune import run as running
from snnk.finetune.data import encode_texts
from snnk.finetune.lower import frozen_layers, run_lower
from snnk.hf.classify.means import pool_means_
from snnk.hf.models import set_padding

from helpers.texts import make_tokenizer
from helpers.tuning import TINY, make_config, make_rows

SMALL = {**TINY, "num_hidden_layers": 3}
MODELS = {
    "bert": (hf.BertForSequenceClassification, hf.BertConfig(**SMALL), "encoder.layer"),
    "roberta": (hf.RobertaForSequenceClassification, hf.RobertaConfig(**SMALL, pad_token_id=0), "encoder.layer"),
    "mpnet": (hf.MPNetForSequenceClassification, hf.MPNetConfig(**SMALL, pad_token_id=0), "encoder.layer"),
    "distilbert": (
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig(vocab_size=43, dim=16, hidden_dim=32, n_layers=3, n_heads=2),
        "transformer.layer",
    ),
}


def made(name, pooling=None):
    """A model whose last layer and head are trained, and rows of different lengths."""
    kind, config, layers = MODELS[name]
    torch.manual_seed(0)
    model = kind(config).eval()
    if pooling is not None:
        pool_means_(model, pooling)
    model.base_model.requires_grad_(False)
    model.base_model.get_submodule(layers)[2].requires_grad_(True)
    set_padding(model, make_tokenizer())
    texts, labels = make_rows(40)
    return model, encode_texts(make_tokenizer(), texts, None, torch.tensor(labels), 64)


@pytest.mark.parametrize(("name", "pooling"), [*((name, None) for name in MODELS), ("bert", "mean")])
def test_the_upper_layers_alone_give_the_logits_of_the_whole_model(name, pooling):
    model, data = made(name, pooling)
    below = frozen_layers(model)
    assert len(below) == 2
    (seen,), upper_alone = run_lower(model, below, data)
    whole, upper = data.batch(range(0, 40, 3)), seen.batch(range(0, 40, 3))
    assert torch.equal(whole.pop("labels"), upper.pop("labels"))
    exact = model(**whole).logits
    with torch.no_grad(), upper_alone():
        torch.testing.assert_close(model(**upper).logits, exact, atol=1e-5, rtol=1e-4)
    assert torch.equal(model(**whole).logits, exact)  # all layers are back


def test_nothing_is_left_out_where_something_in_front_is_trained_or_read():
    model, data = made("bert", "layers")  # its head reads hidden states of all layers
    assert run_lower(model, frozen_layers(model), data) is None
    model, data = made("bert")
    model.bert.embeddings.word_embeddings.weight.requires_grad_(True)
    assert frozen_layers(model) == []
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 43}
    t5 = hf.T5ForSequenceClassification(hf.T5Config(**sizes, eos_token_id=2, decoder_start_token_id=0)).eval()
    below = frozen_layers(t5.requires_grad_(False))
    assert run_lower(t5, below, data) is None  # its decoder reads tokens too


def test_rows_of_all_parts_are_verified():
    """A decoder reads the last position of a row, which is padding in shorter rows of another part."""
    sizes = {
        key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    torch.manual_seed(0)
    model = hf.LlamaForSequenceClassification(
        hf.LlamaConfig(**sizes, vocab_size=43, num_labels=2, pad_token_id=0)
    ).eval()
    model.model.requires_grad_(False)
    model.model.layers[2].requires_grad_(True)
    texts = ["w1 w2 w3"] * 20
    same = encode_texts(make_tokenizer(), texts, None, torch.arange(20) % 2, 64)
    other = encode_texts(make_tokenizer(), ["w1", "w2 w3 w4 w5"] * 10, None, torch.arange(20) % 2, 64)
    below = frozen_layers(model)
    assert len(below) == 2 and run_lower(model, below, same) is not None
    assert run_lower(model, below, same, other) is None


def test_too_many_states_for_the_memory_are_not_kept(monkeypatch):
    model, data = made("bert")
    tokens = sum(data.lengths)
    for most, kept in ((tokens * 16 * 4, True), (tokens * 16 * 4 - 1, False)):
        monkeypatch.setattr("snnk.finetune.lower.MOST_BYTES", most)
        assert (run_lower(model, frozen_layers(model), data) is not None) == kept


@pytest.mark.parametrize("method", ["snnk-tuned", "lora", "houlsby"])
def test_the_result_is_that_of_all_layers_in_every_step(root, tmp_path, monkeypatch, method):
    options = {"method": method, "epochs": 3, "layers": "top-1", "num_features": 4, "dropout": False}
    found, calls = {}, []
    layer = hf.models.bert.modeling_bert.BertLayer
    before = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, *a, **k: calls.append(id(self)) or before(self, *a, **k))
    for way in ("once", "always"):
        if way == "always":
            monkeypatch.setattr(running, "frozen_layers", lambda model: [])
        calls.clear()
        found[way] = finetune(make_config(root, tmp_path / way, **options)), min(Counter(calls).values())
    (one, few), (two, many) = found["once"], found["always"]
    adapters = [name for name, p in one.model.named_parameters() if p.requires_grad and "layer." in name]
    assert adapters and all("layer.1." in name for name in adapters)
    for (name, a), b in zip(one.model.state_dict().items(), two.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3, msg=name)
    scores = [done.metrics["scores"]["test"]["loss"] for done in (one, two)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3) and few < many / 1.5


@pytest.mark.parametrize("options", [{"dropout": True}, {"max_steps": 4}, {"layers": "all"}])
def test_every_step_runs_all_layers_where_it_must(root, tmp_path, monkeypatch, options):
    """With dropout in them, where few of the 143 rows are read, and where all layers are trained."""
    monkeypatch.setattr(running, "run_lower", lambda *args: 1 / 0)
    base = {"method": "snnk", "num_features": 4, "layers": "top-1", "dropout": False, "epochs": 1}
    finetune(make_config(root, tmp_path / "out", **{**base, **options}))
    with pytest.raises(ZeroDivisionError):
        finetune(make_config(root, tmp_path / "other", **base))
