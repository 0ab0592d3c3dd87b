"""Every method: what it trains, with which hyperparameters, and that its folder loads."""

import json
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import transformers
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from snnk.finetune import METHODS, FinetuneConfig, finetune, load
from snnk.finetune.data import encode_texts
from snnk.finetune.methods import Method, Setup, snnk_adapter
from snnk.hf import replace_pooler_
from snnk.peft.layer import AdaptedLinear

from helpers.texts import make_images
from helpers.tuning import (
    DIM,
    HEAD,
    TINY,
    make_config,
    make_rows,
    outputs,
    weights,
)


class Row(NamedTuple):
    """The effect of a method on a BERT with two layers of width 16 and 32, with four features and two classes."""

    trained: int | None  # number of trained parameters; None if it is not a round sum
    changes: str = "$^"  # pattern of the tensors of the base model that training changes
    adapter: bool = False  # whether PEFT saves it as an adapter


# The test row of each method.
ROWS = {
    "snnk": Row(4 * DIM * 4 + HEAD, adapter=True),
    "snnk-tuned": Row(4 * (DIM * 4 + 4 * (DIM + 1)) + HEAD, adapter=True),
    "snnk-relu": Row(4 * (DIM * 4 + DIM) + HEAD, adapter=True),
    "snnk-cos": Row(4 * (DIM * 4 + DIM) + HEAD, adapter=True),
    "snnk-pooler": Row(DIM * 4 + HEAD),
    "bundled": Row(2 * 4 + 2),
    "uptrain": Row(None, changes="."),
    "lora": Row(2 * 2 * 2 * DIM * 4 + HEAD, adapter=True),
    "houlsby": Row(4 * (DIM * 4 + DIM + 4 * (DIM + 1)) + HEAD, adapter=True),
    "bitfit": Row(None, changes="bias$"),
    "ia3": Row(2 * (DIM + DIM + DIM + 32) + HEAD, adapter=True),
    "closed-form": Row(HEAD),
    "linear-probe": Row(HEAD),
    "full": Row(None, changes="."),
}


def test_every_method_has_a_test_row():
    assert set(METHODS) == set(ROWS)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_what_it_says_and_comes_back(root, tmp_path, method, monkeypatch, capsys):
    pooling = "model" if METHODS[method].own_pooler else "mean"
    features = None if METHODS[method].features is None else 4
    rate = {"full": 1e-3, "uptrain": 1e-3}.get(method)  # else no step of so few is an improvement
    options = {"method": method, "pooling": pooling, "num_features": features, "learning_rate": rate}
    config = make_config(root, tmp_path / "this folder", **options)
    said = []
    done = finetune(config, say=said.append)
    found = json.loads((tmp_path / "this folder" / "metrics.json").read_text())
    assert found == done.metrics and found["method"] == method and found["labels"] == ["no", "yes"]
    row = ROWS[method]
    assert row.trained is None or found["parameters"]["trained"] == row.trained
    assert (tmp_path / "this folder" / "adapter_model.safetensors").exists() == row.adapter
    if row.adapter:
        saved = json.loads((tmp_path / "this folder" / "adapter_config.json").read_text())["modules_to_save"]
        assert "classifier" in saved and len(saved) == len(set(saved))
    assert {path.name for path in tmp_path.iterdir()} == {"this folder"}  # no checkpoint, nothing temporary

    base = transformers.BertModel.from_pretrained(root / "bert").state_dict()
    frozen = [name for name in base if "pooler" not in name and not re.search(row.changes, name)]
    if row.adapter:
        tuned = {
            k.removeprefix("base_model.model.bert.").replace("base_layer.", ""): v
            for k, v in weights(done.model).items()
        }
    else:
        tuned = {k.removeprefix("bert."): v for k, v in weights(done.model).items()}
    assert all(torch.equal(tuned[name], base[name]) for name in frozen)
    first = next((name for name in base if re.search(row.changes, name)), None)  # in the embeddings
    assert first is None or not torch.equal(tuned[first], base[first])

    monkeypatch.chdir(tmp_path)
    card = (tmp_path / "this folder" / "README.md").read_text()
    names = {}
    capsys.readouterr()
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    said_by_card = capsys.readouterr().out.split()
    assert said_by_card[1::2] == ["no", "yes"] and sum(map(float, said_by_card[::2])) == pytest.approx(1, abs=2e-3)
    assert torch.equal(outputs(names["model"]), outputs(done.model))
    assert names["model"].config.id2label == {0: "no", 1: "yes"} and names["tokenizer"]("w1")["input_ids"] == [2, 4]
    assert f"{found['scores']['test']['accuracy']:.4f}" in card and 'base_model: "bert"' in card
    kept = found["training"]["epochs"][found["training"]["best"]]
    assert found["scores"]["validation"]["loss"] == pytest.approx(kept["loss"], rel=1e-2)  # merged: rounding
    assert (found["finish"] is not None) == (method in ("snnk-pooler", "uptrain"))
    assert (found["head_storage"] is not None) == METHODS[method].own_pooler
    if found["head_storage"] is not None:
        storage, dense = found["head_storage"], DIM * (DIM + 1) + HEAD
        assert (storage["dense"], storage["replaced"], storage["merged"]) == (dense, DIM * 4 + HEAD, 2 * 4 + 2)
        assert storage["mbit"]["dense"] == pytest.approx(32 * dense / 1e6)
        assert any(f"{dense:,} ({32 * dense / 1e6:.2f} Mbit) dense" in line for line in said)
    if found["finish"] is not None:
        assert found["finish"]["validation_before"]["loss"] == pytest.approx(kept["loss"], rel=1e-5)
        assert found["finish"]["validation_after"] == found["scores"]["validation"]


# appendix "Hyperparameters" of the paper: features, settings, and what is different for images and large data sets
ADAPTER = {"learning_rate": 1e-3, "batch_size": 64, "optimizer": "adamw", "schedule": "constant", "warmup": 0.06}


UPTRAIN = {"optimizer": "adamw", "schedule": "linear", "warmup": 0.06, "weight_decay": 0.1, "clip": 1.0}


PAPER = [
    *((name, 48 if name == "houlsby" else 16, False, False, ADAPTER) for name in ("snnk-relu", "snnk-cos", "houlsby")),
    *((name, None, True, False, ADAPTER | {"clip": 1.0}) for name in ("snnk-relu", "snnk-cos", "houlsby")),
    ("snnk-pooler", 512, False, False, ADAPTER | {"weight_decay": 1e-4, "warmup": 0.0}),
    ("snnk-pooler", 512, True, False, ADAPTER | {"weight_decay": 1e-4, "warmup": 0.01}),
    ("bundled", 1024, False, False, {"batch_size": 64, "optimizer": "adam", "weight_decay": 0.0, "clip": None}),
    ("uptrain", 8, False, False, UPTRAIN),
    ("uptrain", 8, True, False, UPTRAIN | {"weight_decay": 1e-3, "clip": None}),
    ("uptrain", 8, False, True, UPTRAIN | {"weight_decay": 1e-4, "clip": None}),
    ("uptrain", 8, True, True, UPTRAIN | {"weight_decay": 1e-3, "clip": None}),
]


@pytest.mark.parametrize(("method", "features", "images", "large", "wanted"), PAPER)
def test_hyperparameters_of_the_paper(method, features, images, large, wanted):
    found = FinetuneConfig("", "", method, train="x").settings(images=images, large=large)
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert features is None or METHODS[method].features == features


def test_listing_methods_and_tasks_loads_no_torch():
    code = "import sys, snnk.finetune.glue as glue; from snnk.finetune import METHODS as found; "
    code += "print(len(found), len(glue.GLUE), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(METHODS)), "9", "False"]


@pytest.mark.parametrize("method", ["snnk-relu", "lora", "ia3", "snnk-pooler"])
def test_images(tmp_path, method):
    sizes = {key: TINY[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    torch.manual_seed(0)
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    (tmp_path / "data").mkdir()
    for name in ("cat", "dog"):
        make_images(tmp_path / "data" / name, 20)
    features = None if METHODS[method].features is None else 4
    options = {"method": method, "batch_size": 8, "epochs": 1, "num_features": features}
    done = finetune(
        FinetuneConfig(str(tmp_path / "vit"), str(tmp_path / "out"), train=str(tmp_path / "data"), **options)
    )
    model, processor = load(tmp_path / "out")
    assert done.metrics["images"] and done.metrics["labels"] == ["cat", "dog"]
    assert done.metrics["settings"]["clip"] == (1.0 if method == "snnk-relu" else None)
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16)}
    with torch.no_grad():
        assert torch.equal(model(**pixels).logits, done.model(**pixels).logits)
    assert processor.size["height"] == 16


def test_a_variant_of_a_method(root, tmp_path):
    config = make_config(root, tmp_path / "out", method="snnk-relu", num_features=4, max_steps=1)
    variant = Method("one adapter per layer", wrap=snnk_adapter(feature_map="relu", target_modules="pfeiffer"))
    found = finetune(config, method=variant).metrics
    assert found["summary"] == "one adapter per layer" and found["method"] == "snnk-relu"
    assert found["parameters"]["trained"] == 2 * (DIM * 4 + DIM) + HEAD
    assert found["settings"]["learning_rate"] == 1e-3


def test_a_bottleneck_wider_than_the_model(root, tmp_path):
    done = finetune(make_config(root, tmp_path / "out", method="houlsby", num_features=20, max_steps=2))
    assert done.metrics["parameters"]["trained"] == 4 * (DIM * 20 + DIM + 20 * (DIM + 1)) + HEAD
    assert torch.equal(outputs(load(tmp_path / "out")[0]), outputs(done.model))


def test_the_papers_relu_adapters_have_gaussian_rows(root, tmp_path):
    done = finetune(make_config(root, tmp_path / "out", method="snnk-relu", num_features=4, max_steps=1))
    layer = next(m for m in done.model.modules() if isinstance(m, AdaptedLinear))
    norms = layer.snnk_adapter["default"].feature_map.projection.norm(dim=1)
    assert norms.std() > 0.01 * norms.mean()  # orthogonal rows are of one length


def test_an_snnk_pooler_starts_as_a_fit_to_the_pooler_of_the_model(root):
    """It is nearer to the pooler than psi of its weights, on texts that it was not fitted to."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "bert")
    texts, labels = make_rows(400)
    data = encode_texts(tokenizer, texts, None, torch.tensor(labels), 64)
    seen, held = data.take(range(300)), data.take(range(300, 400))

    def batches(count=0):
        return (seen.batch(indices) for indices in seen.batches(50))

    def error(change):
        model = transformers.BertForSequenceClassification.from_pretrained(root / "bert").eval()
        with torch.no_grad():
            batch = held.batch(range(100))
            del batch["labels"]
            states = model.bert(**batch).last_hidden_state
            exact = model.bert.pooler(states)
            found = change(model).bert.pooler(states)
        return float((found - exact).square().mean() / exact.var(0).mean())

    def psi(model):
        replace_pooler_(model, 64, "cos", seed=0)
        return model

    fitted = error(lambda model: METHODS["snnk-pooler"].edit(model, Setup(64, 0, False, str(root / "bert"), batches)))
    assert fitted < 0.7 < error(psi)
