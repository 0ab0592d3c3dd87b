"""The base model is run once where only its head is trained, and the result is that of running it in every step."""

import pytest
import torch
import transformers as hf

from snnk.finetune import finetune
from snnk.finetune import run as running
from snnk.finetune.data import Data, encode_texts
from snnk.finetune.trunk import _digest, _find_view, run_trunk, without_trunk
from snnk.hf import replace_pooler_
from snnk.hf.classify.means import pool_means_
from snnk.hf.classify.sites import POOLERS
from snnk.hf.models import set_padding

from helpers.architectures import CONFIGS, TEXT, inputs, perturb_
from helpers.architectures import IMAGES as IMAGES_OF
from helpers.texts import make_tokenizer
from helpers.tuning import TINY, make_config, make_rows

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LLAMA = hf.LlamaConfig(**SMALL, intermediate_size=32, vocab_size=43, num_labels=3)
IMAGES = {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": 3}
MODELS = {
    "bert": (hf.BertForSequenceClassification, hf.BertConfig(**TINY), "first"),
    "roberta": (hf.RobertaForSequenceClassification, hf.RobertaConfig(**{**TINY, "pad_token_id": 0}), "first"),
    "distilbert": (
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig(vocab_size=43, dim=16, hidden_dim=32, n_layers=1, n_heads=2),
        "first",
    ),
    "llama": (hf.LlamaForSequenceClassification, LLAMA, "last"),
    "vit": (hf.ViTForImageClassification, hf.ViTConfig(**IMAGES, intermediate_size=32), "first"),
    "dinov2": (hf.Dinov2ForImageClassification, hf.Dinov2Config(**IMAGES), "first, and mean of the others"),
}
MORE = {
    "albert": lambda: hf.AlbertConfig(**TEXT | {"embedding_size": 8}),
    "deberta": lambda: hf.DebertaConfig(**TEXT),
}
WITHOUT_VIEW = ("albert",)  # the activation of its pooler is not inside the pooler


def rows_of(model):
    if model.main_input_name != "pixel_values":
        texts, labels = make_rows(40)
        set_padding(model, make_tokenizer())
        return encode_texts(make_tokenizer(), texts, None, torch.tensor(labels), 64)
    images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return Data(list(images), torch.arange(40) % 3, lambda part: {"pixel_values": torch.stack(part)}, [1] * 40)


def check(model, view):
    data = rows_of(model)
    assert _find_view(model.eval(), data) == view
    (seen,) = run_trunk(model, data)
    exact, order = {}, list(range(40))
    for i in order:
        batch = data.batch([i])
        del batch["labels"]
        exact[i] = model(**batch).logits[0]
    batch = seen.batch(order)
    assert torch.equal(batch.pop("labels"), data.labels)
    with without_trunk(model):
        found = model(**batch).logits
    torch.testing.assert_close(found, torch.stack([exact[i] for i in order]), atol=1e-5, rtol=1e-4)
    assert "forward" not in vars(model.base_model)


@pytest.mark.parametrize("name", MODELS)
def test_the_head_alone_gives_the_logits_of_the_whole_model(name):
    kind, config, view = MODELS[name]
    torch.manual_seed(0)
    with torch.no_grad():
        check(kind(config), view)


@pytest.mark.parametrize(
    ("name", "pooling", "view"),
    [
        ("bert", "mean", "mean"),
        ("roberta", "mean", "first"),
        ("bert", "layers", "first"),
        ("roberta", "layers", "first"),
    ],
)
def test_the_mean_of_all_tokens(name, pooling, view):
    """A hook puts the mean in the place of RoBERTa's first token; that of BERT takes the place of the pooler."""
    kind, config, _ = MODELS[name]
    torch.manual_seed(0)
    with torch.no_grad():
        check(pool_means_(kind(config), pooling), view)


def test_a_head_of_zeros_does_not_hide_what_it_reads():
    torch.manual_seed(0)
    model = pool_means_(hf.BertForSequenceClassification(hf.BertConfig(**TINY))).eval()
    torch.nn.init.zeros_(model.classifier.weight)
    (seen,) = run_trunk(model, rows_of(model))
    assert not model.classifier.weight.any()
    torch.nn.init.normal_(model.classifier.weight)
    batch = rows_of(model).batch([3, 5])
    labels, seen = batch.pop("labels"), seen.batch([3, 5])
    with torch.no_grad(), without_trunk(model):
        assert torch.equal(seen.pop("labels"), labels)
        found = model(**seen).logits
    torch.testing.assert_close(found, model(**batch).logits, atol=1e-5, rtol=1e-4)


def test_rows_hold_no_more_than_the_head_reads():
    model = hf.BertForSequenceClassification(hf.BertConfig(**TINY)).eval()
    (seen,) = run_trunk(model, rows_of(model))
    storages = {row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in seen.rows}
    assert sum(storages.values()) == 40 * 16 * 4


def test_models_without_such_a_head_have_no_view():
    """An encoder with a decoder behind it."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 43}
    config = hf.T5Config(**sizes, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    model = hf.T5ForSequenceClassification(config).eval()
    assert run_trunk(model, rows_of(model)) is None


def test_a_head_that_reads_all_tokens_has_no_view():
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**TINY)).eval()

    class Largest(torch.nn.Module):
        def forward(self, states):
            return states.amax(1)

    model.bert.pooler = Largest()
    assert run_trunk(model, rows_of(model)) is None
    assert "forward" not in vars(model.base_model)


@pytest.mark.parametrize("method", ["linear-probe", "snnk-pooler", "bundled"])
def test_the_result_is_that_of_the_whole_model_in_every_step(root, tmp_path, monkeypatch, method):
    options = {"method": method, "epochs": 3, "pooling": "mean" if method == "linear-probe" else "model"}
    if method != "linear-probe":
        options["num_features"] = 8
    found, calls = {}, []
    layer = hf.models.bert.modeling_bert.BertLayer
    before = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, *a, **k: calls.append(1) or before(self, *a, **k))
    for way in ("once", "always"):
        if way == "always":
            monkeypatch.setattr(running, "run_trunk", lambda *args, **kwargs: None)
        calls.clear()
        found[way] = finetune(make_config(root, tmp_path / way, **options)), len(calls)
    (one, few), (two, many) = found["once"], found["always"]
    for (name, a), b in zip(one.model.state_dict().items(), two.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3, msg=name)
    scores = [done.metrics["scores"]["test"]["loss"] for done in (one, two)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3) and few < many / 1.5


@pytest.mark.parametrize("method", ["linear-probe", "snnk-pooler", "bundled"])
def test_every_row_goes_through_the_model_once(root, tmp_path, monkeypatch, method):
    """Rows of training, validation and test, for the fit of a pooler, the classifier, training and all scores."""
    seen = count_rows(monkeypatch)
    size = None if method == "linear-probe" else 8
    done = finetune(make_config(root, tmp_path / "out", method=method, epochs=3, num_features=size, pooling="model"))
    assert seen[0] <= sum(done.metrics["data"]["rows"].values()) + 2 * 10  # and the few rows by which a view is found


def count_rows(monkeypatch):
    """The number of rows that pass the first layer of a BERT, in a list."""
    layer, seen = hf.models.bert.modeling_bert.BertLayer, [0]
    before = layer.forward

    def forward(self, states, *args, **kwargs):
        seen[0] += len(states) * self.first
        return before(self, states, *args, **kwargs)

    make = layer.__init__

    def init(self, config, layer_idx=None):
        make(self, config, layer_idx)
        self.first = layer_idx == 0

    monkeypatch.setattr(layer, "__init__", init)
    monkeypatch.setattr(layer, "forward", forward)
    return seen


@pytest.mark.parametrize("row", sorted(POOLERS))
def test_what_is_kept_serves_the_poolers_that_replace_the_own_one(row):
    """The outputs are computed before a method replaces the pooler; the new one reads the same vectors."""
    kind = hf.AutoModelForImageClassification if row in IMAGES_OF else hf.AutoModelForSequenceClassification
    torch.manual_seed(0)
    config = {**CONFIGS, **MORE}[row]()
    model = kind.from_config(config).eval()
    perturb_(model, scale=0.2)
    batch = {k: v for k, v in inputs(row).items() if torch.is_tensor(v)}
    rows = [{k: v[i] for k, v in batch.items()} for i in range(len(next(iter(batch.values()))))]
    labels = torch.zeros(len(rows), dtype=torch.long)
    data = Data(rows, labels, lambda part: {k: torch.stack([r[k] for r in part]) for k in part[0]}, [1] * len(rows))
    found = run_trunk(model, data)
    if row in WITHOUT_VIEW:
        assert found is None
        return
    replace_pooler_(model, 6, init="random", seed=0)
    kept = found[0].batch(range(len(rows)))
    del kept["labels"]
    with torch.no_grad():
        exact = model(**batch).logits
        with without_trunk(model):
            torch.testing.assert_close(model(**kept).logits, exact, atol=1e-5, rtol=1e-4)
    assert exact.std(0).max() > 1e-3


def test_runs_share_what_the_same_model_makes_of_the_same_rows(root, tmp_path, monkeypatch):
    seen = count_rows(monkeypatch)

    def run(out, **options):
        seen[0] = 0
        options = {"epochs": 1, "pooling": "model", **options}
        done = finetune(make_config(root, tmp_path / out, **options), shared=tmp_path)
        return done.metrics["scores"]["test"]["loss"], seen[0], len(list(tmp_path.glob("*.safetensors")))

    loss, rows, files = run("first")
    assert rows > 100 and files == 3
    again, few, files = run("again")
    assert again == loss and few < 30 and files == 3
    assert run("pooler", method="snnk-pooler", num_features=8)[1] < 30
    assert run("seed", seed=1)[1] > 100  # other rows for validation
    assert run("mean", pooling="mean")[1] > 100


@pytest.mark.parametrize("options", [{"dropout": True}, {"max_steps": 4}, {"method": "bitfit"}])
def test_every_step_runs_the_base_model_where_it_must(root, tmp_path, monkeypatch, options):
    """With dropout in it, where few of the 143 rows are read, and where its parameters are trained."""
    monkeypatch.setattr(running, "run_trunk", lambda *args, **kwargs: 1 / 0)
    finetune(make_config(root, tmp_path / "out", **{"epochs": 1, **options}))
    with pytest.raises(ZeroDivisionError):
        finetune(make_config(root, tmp_path / "other", max_steps=5))


def test_shared_outputs_are_told_apart_by_weights_buffers_and_rows():
    model = hf.ResNetForImageClassification(
        hf.ResNetConfig(num_channels=1, hidden_sizes=[4], depths=[1], layer_type="basic")
    )
    rows = [Data([[i]], torch.tensor([0]), lambda part: {}, [1]) for i in (1, 2)]
    found = [_digest(model, rows[0], "first"), _digest(model, rows[1], "first"), _digest(model, rows[0], "last")]
    for name, tensor in (*model.base_model.named_buffers(), *model.base_model.named_parameters()):
        if name.endswith(("0.normalization.running_mean", "0.normalization.weight")):
            tensor.data += 1
            found.append(_digest(model, rows[0], "first"))
    assert len(found) > 4 and len(set(found)) == len(found)
