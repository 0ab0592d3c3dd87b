"""Poolers as SNNK layers: in the right place, merged exactly, counted, trained, fitted, saved and loaded."""

import copy
import json
import re

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from sklearn.linear_model import Ridge
from torch import nn

import snnk
from snnk.hf import bundled_head_, fit_classifier_, merge_pooler_, replace_pooler_
from snnk.hf.classify.poolers import freeze_but_head_
from snnk.hf.classify.sites import POOLERS, find_pooler

from helpers.architectures import CONFIGS, IMAGES, TEXT, D, inputs, perturb_, replaced
from helpers.processes import in_a_fresh_process

MORE = {
    "albert": lambda **k: hf.AlbertConfig(**TEXT | {"embedding_size": 8} | k),
    "deberta": lambda **k: hf.DebertaConfig(**TEXT | k),
}
TEXTS, PICTURES = "AutoModelForSequenceClassification", "AutoModelForImageClassification"
ROWS = sorted(POOLERS)
BASES = ("albert", "bert", "mpnet", "roberta", "vit")  # base models with a pooler of their own


def make(row, auto=None, **options):
    auto = auto or (PICTURES if row in IMAGES else TEXTS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(hf, auto).from_config({**CONFIGS, **MORE}[row](**options)).eval()
    perturb_(model, scale=0.2)
    return model


def answer(model, row):
    with torch.no_grad():
        kwargs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs(row).items()}
        out = model(**kwargs)
    return out.logits if hasattr(out, "logits") else out.pooler_output


def dense_of(row):
    """A pooler to insert where there is none; DINOv2's classifier reads a token and the mean of the others."""
    if row not in IMAGES:
        return None
    size = 2 * D if row == "dinov2" else D
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Linear(size, size)


def replace(model, row, **options):
    return replace_pooler_(model, **{"num_features": 12, "pooler": dense_of(row), **options})


# --- wiring ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_the_old_pooler_in_the_new_place_changes_nothing(row):
    model = make(row)
    before, pooler = answer(model, row), find_pooler(model)
    old = nn.Identity() if pooler.dense is None else nn.Sequential(pooler.dense, Activation(pooler.activation))
    pooler.put_(old)
    torch.testing.assert_close(answer(model, row), before, atol=1e-6, rtol=1e-6)
    with torch.no_grad():  # and that is where it is
        pooler.put_(nn.Sequential(old, nn.Threshold(1e9, 0.0)))
        bias = pooler.classifier.bias.expand_as(before)
    torch.testing.assert_close(answer(model, row), bias)


class Activation(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


@pytest.mark.parametrize("row", BASES)
def test_base_models_with_a_pooler(row):
    model = make(row, "AutoModel")
    before, pooler = answer(model, row), find_pooler(model)
    pooler.put_(nn.Sequential(pooler.dense, Activation(copy.copy(pooler.activation))))
    torch.testing.assert_close(answer(model, row), before, atol=1e-6, rtol=1e-6)
    model = make(row, "AutoModel")
    replace_pooler_(model, 12)
    assert answer(model, row).shape == before.shape
    with pytest.raises(ValueError, match="has no classifier behind its pooler to merge"):
        merge_pooler_(model)


def test_dropout_stays_where_it_was():
    """DistilBERT's ReLU reads (h, -h), of which dropout must drop the same share as of h; others keep their modules."""
    model = make("distilbert", seq_classif_dropout=0.5)
    replace(model, "distilbert")
    seen = []
    model.classifier.linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        h = model.pre_classifier.inner(torch.ones(2000, D))
        model.classifier(nn.functional.dropout(torch.cat([h, -h], -1).relu(), 0.5))
    ratio = seen[0] / h
    assert set(ratio.round(decimals=3).unique().tolist()) == {0.0, 2.0}
    assert float(ratio.mean()) == pytest.approx(1, abs=0.05)
    model = make("roberta", hidden_dropout_prob=0.3)
    replace(model, "roberta")
    assert model.classifier.dropout.p == 0.3


# --- what A starts as ------------------------------------------------------------------------------------------------


def test_starts_from_psi_of_the_pretrained_pooler():
    model = make("bert")
    dense = copy.deepcopy(model.bert.pooler.dense)
    found = replace_pooler_(model, 64, normalize="dim", seed=5, x_norm=2.0)
    wanted = snnk.SNNKLinear.from_linear(
        dense, "tanh", 64, feature_map="cos", seed=5, normalize="dim", x_norm=2.0, on_error="ignore"
    )
    assert found.kind == "layer" and torch.equal(model.bert.pooler.dense.inner.weight, wanted.weight)
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.bert.pooler.dense(x), wanted(x))


@pytest.mark.parametrize(
    ("normalize", "x_norm", "w_norm"),
    [("dim", D**0.25, 3**-0.5 * D**-0.25), ("none", D**0.5, 3**-0.5), (None, D**0.5, 3**-0.5), ("unit", 1.0, 1.0)],
)
def test_the_norms_that_a_map_is_made_for(normalize, x_norm, w_norm):
    """Inputs behind a LayerNorm have sqrt(d), weights have the norm that torch draws; "dim" divides both by d^(1/4)."""
    options = {} if normalize == "dim" else {"normalize": normalize}  # the default
    found = replace_pooler_(make("bert"), 64, init="random", **options).dense.inner.feature_map
    wanted = snnk.URF(
        D, 64, "cos", normalize=normalize or "none", x_norm=x_norm, w_norm=w_norm, on_error="ignore", seed=0
    )
    assert found.normalize == wanted.normalize and found.norms == pytest.approx((x_norm, w_norm))
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found(x), wanted(x))


def test_random_knows_nothing_of_the_pretrained_pooler():
    weights = []
    for noise in (0.0, 1.0):
        model = make("bert")
        model.bert.pooler.dense.weight.data.add_(noise)
        replace_pooler_(model, 64, init="random")
        weights.append(model.bert.pooler.dense.inner.weight)
    assert torch.equal(*weights)
    replace_pooler_(other := make("bert"), 64, init="random", seed=1)
    assert not torch.equal(other.bert.pooler.dense.inner.weight, weights[0])


@pytest.mark.parametrize("row", ["deberta-v2", "distilbert", "electra", "vit"])
def test_fitted_is_near_the_pretrained_pooler(row):
    """Also where the activation is no module: what the classifier reads is, but for a few per cent, what it read."""
    model, pooler = make(row), dense_of(row)
    old = find_pooler(model)
    dense, f = pooler or old.dense, old.activation
    generator = torch.Generator().manual_seed(7)
    ids = {"input_ids": torch.randint(3, 40, (400, 7), generator=generator)}
    batch = {"pixel_values": torch.randn(400, 3, 8, 8, generator=generator)} if row in IMAGES else ids
    x = []
    handle = old.reader.register_forward_pre_hook(lambda _, args: x.append(args[0]))
    with torch.no_grad():
        model(**batch)
        handle.remove()
        wanted = f(dense(x[0]))
        replace_pooler_(model, 64, init="fitted", batches=[batch], pooler=pooler)
        error = (find_pooler(model).dense(x[0]) - wanted).square().mean() / wanted.var(0).mean()
    assert error < 0.05


# --- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merging_changes_nothing_but_the_size(row, dtype):
    model = make(row).to(dtype)
    replace(model, row)
    perturb_(find_pooler(model).dense, scale=0.1)  # as trained
    before = answer(model, row)
    report = merge_pooler_(model)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(answer(model, row), before, atol=tolerance, rtol=tolerance)
    found, k = find_pooler(model), before.shape[1]
    assert found.kind == "head" and found.classifier.weight.shape == (k, 12)
    assert report.merged == 13 * k and report.bits == 8 * dtype.itemsize


@pytest.mark.parametrize(
    ("labels", "figures"),
    [(1, ("591,361 (18.92 Mbit)", "513 (0.02 Mbit)")), (3, ("592,899 (18.97 Mbit)", "1,539 (0.05 Mbit)"))],
)
def test_the_sizes_of_bert_base(labels, figures):
    """The paper's 18.92 and 0.02 Mbit are those of one output, without the frozen map."""
    with torch.device("meta"):
        model = hf.BertForSequenceClassification(hf.BertConfig(num_labels=labels))
    replace_pooler_(model, 512, init="random")
    report = merge_pooler_(model)
    assert report.replaced == 768 * 512 + 769 * labels
    assert report.frozen > 256 * 768
    assert all(figure in str(report) for figure in figures)
    assert f"the last two do not include the frozen feature map, {report.frozen:,}" in str(report)
    assert model.classifier.weight.shape == (labels, 512) and model.classifier.weight.is_meta


# --- training --------------------------------------------------------------------------------------------------------


def test_training_pooler_and_classifier(tmp_path):
    model = make("bert", num_labels=2)
    replace_pooler_(model, 32)
    names = freeze_but_head_(model)
    assert names == ["bert.pooler.dense.inner.weight", "classifier.weight", "classifier.bias"]
    ids = torch.randint(3, 40, (64, 7), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": i, "labels": (i[0] > 20).long()} for i in ids]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    arguments = hf.TrainingArguments(
        str(tmp_path), max_steps=40, report_to=[], learning_rate=0.03, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, per_device_train_batch_size=64, save_strategy="no",
    )  # fmt: skip
    trainer = hf.Trainer(model, arguments, train_dataset=rows)
    labels = torch.stack([row["labels"] for row in rows])
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(float(model.eval()(input_ids=ids, labels=labels).loss))
        if len(losses) == 1:
            trainer.train()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == set(names) and losses[1] < 0.7 * losses[0]
    merge_pooler_(model)
    with torch.no_grad():
        assert float(model(input_ids=ids, labels=labels).loss) == pytest.approx(losses[1], rel=1e-4)
    assert freeze_but_head_(model) == ["classifier.weight", "classifier.bias"]


def test_what_is_trained_of_other_heads():
    assert freeze_but_head_(make("roberta"))[0] == "classifier.dense.weight"  # the paper's baseline
    assert freeze_but_head_(make("vit")) == ["classifier.weight", "classifier.bias"]
    model = make("distilbert")
    bundled_head_(model, 16)
    assert freeze_but_head_(model) == ["classifier.linear.weight", "classifier.linear.bias"]


# --- the bundled head and its closed form ----------------------------------------------------------------------------


def texts(n=300):
    return torch.randint(3, 40, (n, 6), generator=torch.Generator().manual_seed(0))


def test_the_bundled_head_starts_from_both_layers_or_from_nothing():
    model, other = make("bert", num_labels=3), make("bert", num_labels=3)
    dense, classifier = model.bert.pooler.dense, model.classifier
    bundled_head_(model, 64, seed=3)
    psi = model.bert.pooler.dense.map.psi(dense.weight, dense.bias, check=False)
    torch.testing.assert_close(model.classifier.weight, classifier.weight @ psi, atol=1e-4, rtol=1e-4)
    assert torch.equal(model.classifier.bias, classifier.bias)
    bundled_head_(other, 64, init="zeros")
    assert not answer(other, "bert").any()
    labels = torch.tensor([0, 1, 2])
    other(**inputs("bert"), labels=labels).loss.backward()
    assert other.classifier.weight.grad.abs().max() > 0


@pytest.mark.parametrize("row", ["bert", "distilbert", "roberta"])
def test_the_closed_form_is_ridge_regression(row):
    model, ids = make(row, num_labels=1), texts()
    y = ids[:, 0].float() / 10
    bundled_head_(model, 32, init="zeros")
    phi = []
    found = find_pooler(model)
    found.classifier.register_forward_pre_hook(lambda _, args: phi.append(args[0]))
    with torch.no_grad():
        model(input_ids=ids)
    batches = [{"input_ids": i, "labels": t} for i, t in zip(ids.split(70), y.split(70), strict=True)]
    fit = fit_classifier_(model, batches, lam="gcv")
    h, truth = phi[0].double().numpy(), y.double().numpy()
    wanted = Ridge(alpha=fit.solution.lam, solver="svd").fit(h, truth).predict(h)
    with torch.no_grad():
        got = model(input_ids=ids).logits[:, 0].double().numpy()
    np.testing.assert_allclose(got, wanted, atol=2e-3)
    plain = np.linalg.lstsq(np.c_[h, np.ones(len(h))], truth, rcond=1e-8)[0]
    assert np.square(got - truth).mean() < 1.5 * np.square(np.c_[h, np.ones(len(h))] @ plain - truth).mean()
    assert fit.solution.score > 0 and fit.error < 1


def test_the_closed_form_for_classes():
    model, ids = make("bert", num_labels=2), texts()
    y = (ids[:, 0] > 20).long()
    bundled_head_(model, 64)
    fit = fit_classifier_(model, [{"input_ids": ids, "labels": y}])
    with torch.no_grad():
        out = model(input_ids=ids, labels=y)
    assert (out.logits.argmax(1) == y).double().mean() > 0.8 and out.loss < 0.5
    assert fit.accuracy > 0.75 and fit.loss < 0.6


# --- saving and loading ----------------------------------------------------------------------------------------------

STATES = {
    "layer": lambda model, row: replace(model, row, num_features=D),  # as many as inputs: no shape tells them apart
    "merged": lambda model, row: (replace(model, row), merge_pooler_(model)),
    "bundled": lambda model, row: bundled_head_(model, D, pooler=dense_of(row)),
}


def saved(row, state, folder, compressed=False, auto=None):
    model = make(row, auto)
    if compressed:
        replaced(model, "atoms", [0])
        replaced(model, "relu", [1])
    STATES[state](model, row)
    perturb_(find_pooler(model).dense)  # a map that is drawn again from its seed would be noticed
    model.save_pretrained(folder)
    save_file({**inputs(row), "output": answer(model, row).contiguous()}, folder / "example.safetensors")
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every row replaced and merged, the latter with compressed blocks, some bundled; nobody writes here."""
    folder, cases = tmp_path_factory.mktemp("poolers"), {}
    for row in ROWS:
        for state in STATES if row in ("bert", "distilbert", "roberta", "vit") else ("layer", "merged"):
            both = state == "merged" and row not in MORE  # ALBERT and DeBERTa have no blocks to compress
            saved(row, state, folder / f"{row}-{state}", compressed=both)
            cases[f"{row}-{state}"] = (PICTURES if row in IMAGES else TEXTS, row)
    return folder, cases


@pytest.mark.once
def test_a_fresh_process_gives_equal_outputs(folders):
    answers = in_a_fresh_process(*folders, "import snnk.hf")
    assert {name: error for name, error in answers.items() if not (isinstance(error, float) and error < 1e-6)} == {}
    assert len(answers) == len(folders[1]) == 2 * len(ROWS) + 4


@pytest.mark.once
def test_without_snnk_loading_fails(folders):
    folder, cases = folders
    cases = {name: case for name, case in cases.items() if not name.endswith("merged")}  # those differ in shape
    answers = in_a_fresh_process(folder, cases, "assert 'snnk' not in sys.modules")
    assert {name: a for name, a in answers.items() if "mismatch" not in str(a)} == {}
    assert len(answers) == len(cases) == len(ROWS) + 4


@pytest.mark.parametrize("state", STATES)
def test_a_loaded_pooler_goes_on(folders, tmp_path, state):
    """Loaded, it casts, is merged, saved and loaded again."""
    model = hf.AutoModelForSequenceClassification.from_pretrained(folders[0] / f"roberta-{state}")
    assert find_pooler(model).kind == ("layer" if state == "layer" else "head")
    before = answer(model, "roberta")
    if state == "layer":
        merge_pooler_(model)
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(answer(again, "roberta"), before, atol=1e-5, rtol=1e-5)
    half = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert answer(half, "roberta").dtype == torch.bfloat16


def test_heads_that_are_left_out(folders, tmp_path):
    """A base model or another head without this pooler loads the rest, as transformers does."""
    base = hf.AutoModel.from_pretrained(folders[0] / "roberta-merged")
    assert base.config.quantization_config.pooler is None and len(base.config.quantization_config.blocks) == 2
    language = hf.AutoModelForMaskedLM.from_pretrained(folders[0] / "bert-layer")
    assert not hasattr(language.config, "quantization_config")
    with pytest.raises(ValueError, match=r"classifier.weight \(2, 12\) instead of \(2, 16\)"):
        hf.AutoModelForTokenClassification.from_pretrained(folders[0] / "bert-merged")
    # BERT's pooler is in the base model: its features are
    base = hf.AutoModel.from_pretrained(folders[0] / "bert-merged")
    assert answer(base, "bert").shape == (3, 12)
    base.save_pretrained(tmp_path)
    same = hf.AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(answer(same, "bert"), answer(base, "bert"), atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match=r"has no classifier.weight, classifier.bias"):
        hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(kind="os.system"), "unknown kind of pooler 'os.system'"),
        (lambda p: p.update(name="os.system"), "unknown pooler 'os.system'"),
        (lambda p: p.update(code="x"), "pooler must have the keys ['kind', 'map', 'name', 'num_features']; got"),
        (lambda p: p.pop("map"), "pooler must have the keys"),
        (lambda p: p.update(map=3), "map of the pooler must be a dict; got int"),
        (lambda p: p.update(num_features=-1), "num_features of the pooler must be a positive integer; got -1"),
        (lambda p: p.update(num_features=10**12), "the feature map of the pooler must be 16 -> 1000000000000"),
        (lambda p: p.update(num_features=10**12) or p["map"].update(num_features=10**12), "does not fit"),
        (lambda p: p["map"].update({"class": "nn.Linear"}), "unknown feature map of the pooler"),
        (lambda p: p.update(num_features=14) or p["map"].update(num_features=14), "instead of"),
        (lambda p: p.update(kind="layer"), "classifier.weight (2, 12) instead of (2, 16)"),
        (lambda p: p["map"].update(activation="eval"), "cannot make the feature map of the pooler"),
    ],
)
@pytest.mark.once
def test_bad_configurations_are_refused(folders, tmp_path, change, message):
    folder = folders[0] / "bert-merged"
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"]["pooler"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=re.escape(message)):
        hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_missing_and_unexpected_tensors_are_errors(folders, tmp_path):
    folder = folders[0] / "bert-layer"
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    less = {key: value for key, value in tensors.items() if not key.endswith("inner.weight")}
    save_file(less, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no pooler.dense.inner.weight"):
        hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "snnk", "blocks": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="feature maps that quantization_config does not name"):
        hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.once
def test_bad_calls():
    model = make("bert")
    with pytest.raises(ValueError, match="is no SNNK layer; replace_pooler_ makes it one"):
        merge_pooler_(model)
    with pytest.raises(ValueError, match="unknown init 'pretraind'; did you mean 'pretrained'"):
        replace_pooler_(model, init="pretraind")
    with pytest.raises(ValueError, match="init='fitted' needs batches="):
        replace_pooler_(model, init="fitted")
    with pytest.raises(ValueError, match="the batches have 0 rows to fit the pooler to"):
        replace_pooler_(model, 16, init="fitted", batches=[])
    with pytest.raises(ValueError, match=r"pooler must be a linear layer 16 -> 16; got Linear\(in_features=3"):
        replace_pooler_(model, pooler=nn.Linear(3, 4))
    with pytest.raises(TypeError, match="a file cannot name"):
        replace_pooler_(model, 16, snnk.URF(D, 16, nn.LeakyReLU(0.3), on_error="ignore"))
    assert find_pooler(model).kind == "dense" and not hasattr(model.config, "quantization_config")
    replace_pooler_(model, 16)
    with pytest.raises(ValueError, match="replaced already"):
        bundled_head_(model, 16)
    merge_pooler_(model)
    with pytest.raises(ValueError, match="is merged already"):
        merge_pooler_(model)
    with pytest.raises(ValueError, match="every batch needs 'labels'"):
        fit_classifier_(model, [inputs("bert")])
    with pytest.raises(ValueError, match="no classifier behind its pooler to bundle"):
        bundled_head_(make("bert", "AutoModel"))
    with pytest.raises(ValueError, match=r"BertForMaskedLM has no pooler; 'bert' models have it at pooler.dense"):
        replace_pooler_(make("bert", "AutoModelForMaskedLM"))
    with pytest.raises(ValueError, match="no pooler of 'llama' models is known"):
        replace_pooler_(make("llama", TEXTS))
    with pytest.raises(ValueError, match=r"has no pretrained pooler.*init='random'"):
        replace_pooler_(make("vit"))
    with pytest.raises(TypeError, match="PreTrainedModel; got Linear"):
        replace_pooler_(nn.Linear(2, 2))
