import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from snnk.finetune import METHODS, FinetuneConfig, finetune, load
from snnk.finetune.data import Data, encode_texts
from snnk.finetune.methods import Method, snnk_adapter
from snnk.finetune.pooling import MeanPooled, mean_pooling_
from snnk.finetune.run import _some, _tell_padding
from snnk.finetune.settings import TrainingSettings
from snnk.finetune.trainer import evaluate, train
from snnk.peft import AdaptedLinear

from helpers.texts import make_images, make_tokenizer
from helpers.tuning import DIM, TINY, Stop, make_config, make_rows, save, write

HEAD = 2 * DIM + 2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    save(transformers.BertModel, folder / "bert")
    texts, labels = make_rows()
    write(folder / "train.tsv", texts, ["yes" if label else "no" for label in labels])
    texts, labels = make_rows(60, seed=1)
    write(folder / "test.tsv", texts, ["yes" if label else "no" for label in labels])
    return folder


@pytest.fixture(scope="module")
def data():
    texts, labels = make_rows()
    return encode_texts(make_tokenizer(), texts, None, torch.tensor(labels), 64)


def make_model(**options):
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**{**TINY, **options}))
    return mean_pooling_(model)


def outputs(model):
    tokenizer = make_tokenizer()
    with torch.no_grad():
        return model.eval()(**tokenizer(["w1 w2 w3", "w30"], padding=True, return_tensors="pt")).logits


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


ADAPTERS = ("snnk", "snnk-tuned", "snnk-relu", "snnk-cos", "lora", "houlsby", "ia3")
TRAINED = {  # of a BERT with two layers of width 16 and 32, four features, two classes
    "snnk": 4 * DIM * 4 + HEAD,
    "snnk-tuned": 4 * (DIM * 4 + 4 * (DIM + 1)) + HEAD,
    "snnk-relu": 4 * (DIM * 4 + DIM) + HEAD,
    "snnk-cos": 4 * (DIM * 4 + DIM) + HEAD,
    "snnk-pooler": DIM * 4 + HEAD,
    "bundled": 2 * 4 + 2,
    "lora": 2 * 2 * 2 * DIM * 4 + HEAD,
    "houlsby": 4 * (DIM * 4 + DIM + 4 * (DIM + 1)) + HEAD,
    "ia3": 2 * (DIM + DIM + DIM + 32) + HEAD,
    "linear-probe": HEAD,
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_what_it_says_and_comes_back(root, tmp_path, method, monkeypatch):
    pooling = "model" if METHODS[method].own_pooler else "mean"
    features = None if METHODS[method].features is None else 4
    rate = {"full": 1e-3, "uptrain": 1e-3}.get(method)  # else no step of so few is an improvement
    options = {"method": method, "pooling": pooling, "features": features, "learning_rate": rate}
    config = make_config(root, tmp_path / "this folder", **options)
    said = []
    done = finetune(config, say=said.append)
    found = json.loads((tmp_path / "this folder" / "metrics.json").read_text())
    assert found == done.metrics and found["method"] == method and found["labels"] == ["no", "yes"]
    if method in TRAINED:
        assert found["parameters"]["trained"] == TRAINED[method]
    assert (tmp_path / "this folder" / "adapter_model.safetensors").exists() == (method in ADAPTERS)
    if method in ADAPTERS:
        saved = json.loads((tmp_path / "this folder" / "adapter_config.json").read_text())["modules_to_save"]
        assert "classifier" in saved and len(saved) == len(set(saved))
    assert {path.name for path in tmp_path.iterdir()} == {"this folder"}  # no checkpoint, nothing temporary

    base = transformers.BertModel.from_pretrained(root / "bert").state_dict()
    frozen = [name for name in base if "pooler" not in name and not (method == "bitfit" and name.endswith("bias"))]
    if method in ADAPTERS:
        tuned = {
            k.removeprefix("base_model.model.bert.").replace("base_layer.", ""): v
            for k, v in weights(done.model).items()
        }
    else:
        tuned = {k.removeprefix("bert."): v for k, v in weights(done.model).items()}
    if method not in ("full", "uptrain"):
        assert all(torch.equal(tuned[name], base[name]) for name in frozen)
    else:
        assert not torch.equal(tuned["embeddings.word_embeddings.weight"], base["embeddings.word_embeddings.weight"])

    monkeypatch.chdir(tmp_path)
    card = (tmp_path / "this folder" / "README.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    assert torch.equal(outputs(names["model"]), outputs(done.model))
    assert names["model"].config.id2label == {0: "no", 1: "yes"} and names["processor"]("w1")["input_ids"] == [2, 4]
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


def test_figures_are_of_the_model_that_is_saved(root, tmp_path):
    done = finetune(make_config(root, tmp_path / "out", method="full", epochs=3, learning_rate=1e-3))
    model, tokenizer = load(tmp_path / "out")
    texts, labels = make_rows(60, seed=1)
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    accuracy = float((logits.argmax(-1) == torch.tensor(labels)).double().mean())
    assert done.metrics["scores"]["test"]["accuracy"] == pytest.approx(accuracy)
    training = done.metrics["training"]
    assert training["steps"] == 15 and len(training["epochs"]) == 4 and training["seconds"] > 0
    assert training["peak_memory_bytes"] > 1e6 and training["epochs"][0]["train_loss"] is None
    assert 0 < training["step_seconds"] < training["seconds"]
    assert training["epochs"][3]["train_loss"] < training["epochs"][1]["train_loss"]
    assert done.metrics["data"]["rows"] == {"train": 143, "validation": 17, "test": 60}
    assert {"snnk", "torch", "transformers", "accelerate"} <= set(done.metrics["versions"])
    assert done.metrics["settings"]["weight_decay"] == 0.01 and done.metrics["settings"]["learning_rate"] == 1e-3
    with pytest.raises(FileExistsError, match="exists already and is complete"):
        finetune(make_config(root, tmp_path / "out"), resume=True)


@pytest.mark.parametrize("options", [{"method": "lora", "pooling": "model"}, {"method": "lora", "bf16": True}])
def test_validation_figures_are_of_the_model_that_is_saved(root, tmp_path, options):
    """Also where the files of the model have no pooler, and where it is trained in bfloat16."""
    save(transformers.BertForMaskedLM, tmp_path / "bert")
    held = write(tmp_path / "held.tsv", *make_rows(80, seed=2))
    train = write(tmp_path / "train.tsv", *make_rows())
    options = {"train": train, "validation": held, "test": None, "features": 4, **options}
    done = finetune(make_config(tmp_path, tmp_path / "out", **options))
    loaded = [load(tmp_path / "out")[0] for _ in range(2)]
    assert torch.equal(*map(outputs, loaded)) and torch.equal(outputs(loaded[0]), outputs(done.model))
    assert done.metrics["parameters"]["trained"] == TRAINED["lora"]  # a random pooler is saved, not trained
    texts, labels = make_rows(80, seed=2)
    data = encode_texts(make_tokenizer(), texts, None, torch.tensor(labels), 64)
    scores = evaluate(loaded[0], data, ("accuracy",), 32)
    assert done.metrics["scores"]["validation"]["accuracy"] == scores["accuracy"]
    assert done.metrics["scores"]["validation"]["loss"] == pytest.approx(scores["loss"])


def test_the_closed_form_start_is_better_than_a_random_one(root, tmp_path):
    losses = {}
    for start in ("closed-form", "random"):
        config = make_config(root, tmp_path / start, max_steps=1, classifier_start=start)
        found = finetune(config).metrics
        losses[start] = found["training"]["epochs"][0]["loss"]
        assert found["classifier_start"]["kind"] == start and found["training"]["steps"] == 1
    assert losses["closed-form"] < 0.6 < losses["random"]


def test_no_steps_leave_the_closed_form(root, tmp_path, monkeypatch):
    monkeypatch.setattr("snnk.finetune.run.START_ROWS", 1)
    monkeypatch.setattr("snnk.finetune.run.FIT_BATCH", 16)
    monkeypatch.setattr("snnk.finetune.run.PER_FEATURE", 2)
    started = finetune(make_config(root, tmp_path / "other", method="linear-probe", max_steps=1))
    assert started.metrics["classifier_start"]["rows"] == 2 * started.model.config.hidden_size
    found = finetune(make_config(root, tmp_path / "out", method="linear-probe", max_steps=0)).metrics
    assert found["training"]["steps"] == found["training"]["planned_steps"] == 0
    assert found["classifier_start"]["rows"] > 100 and found["scores"]["validation"]["loss"] < 0.65
    model, _ = load(tmp_path / "out")
    assert model.classifier.weight.any()
    with pytest.raises(ValueError, match="max_steps must be 0 or more; got -1"):
        make_config(root, tmp_path / "none", max_steps=-1).settings(images=False, large=False)


def test_a_plain_load_of_a_mean_pooled_model_fails(root, tmp_path):
    for method in ("linear-probe", "lora"):
        finetune(make_config(root, tmp_path / method, method=method, max_steps=1))
    with pytest.raises((RuntimeError, ValueError), match="mismatched_sizes"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "linear-probe")
    with pytest.raises(ValueError, match=r"snnk\.finetune"):
        AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "lora")


def test_regression_and_its_unit(tmp_path, root):
    texts, _ = make_rows()
    target = [f"{1000 + 100 * sum(int(w[1:]) < 20 for w in text.split()) / len(text.split()):.1f}" for text in texts]
    file = write(tmp_path / "prices.tsv", texts, target)
    config = make_config(root, tmp_path / "out", train=file, test=file, text="sentence", method="bitfit")
    found = finetune(config).metrics
    assert found["labels"] is None and found["metric"] == "pearson" and found["scores"]["test"]["pearson"] > 0.6
    assert found["training"]["epochs"][1]["train_loss"] < 10  # in parts of the variance, which is 600
    model, tokenizer = load(tmp_path / "out")
    assert 900 < model(**tokenizer("w1 w30", return_tensors="pt")).logits.item() < 1200


def test_glue_task_and_metrics(root, tmp_path):
    texts, labels = make_rows(80)
    (tmp_path / "CoLA").mkdir()
    for name in ("train", "dev"):
        rows = [f'x\t{label}\t*\t"{text}' for text, label in zip(texts, labels, strict=True)]
        (tmp_path / "CoLA" / f"{name}.tsv").write_text("\n".join(rows))
    options = {"train": None, "test": None, "task": "cola", "data_dir": str(tmp_path), "max_steps": 1}
    found = finetune(make_config(root, tmp_path / "out", **options)).metrics
    assert found["metric"] == "mcc" and set(found["scores"]["test"]) == {"mcc", "accuracy", "loss"}
    assert found["data"]["rows"] == {"train": 72, "validation": 8, "test": 80}


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
    options = {"method": method, "batch_size": 8, "epochs": 1, "features": features}
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


KINDS = [transformers.RobertaForSequenceClassification, transformers.MPNetForSequenceClassification]


@pytest.mark.parametrize("kind", [transformers.BertForSequenceClassification, *KINDS])
def test_mean_pooling_is_a_masked_mean(kind, tmp_path):
    folder = save(kind, tmp_path / "base", num_labels=2)
    model = MeanPooled.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True).eval()
    ids, mask = torch.randint(3, 43, (2, 6)), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    base = getattr(kind.from_pretrained(folder), model.base_model_prefix).eval()
    classifier = getattr(model.classifier, "out_proj", model.classifier)
    with torch.no_grad():
        hidden = base(ids, attention_mask=mask).last_hidden_state
        mean = torch.stack([hidden[0].mean(0), hidden[1, :2].mean(0)])
        assert torch.allclose(model(ids, attention_mask=mask).logits, classifier(mean), atol=1e-5)
        assert torch.allclose(model(ids).logits, classifier(base(ids).last_hidden_state.mean(1)), atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    again = MeanPooled.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(ids).logits, model(ids).logits) and again.config.snnk_pooling == "mean"


def test_mean_pooling_refuses_models_without_a_pooler():
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=43)
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification has no"):
        mean_pooling_(transformers.GPT2ForSequenceClassification(config))


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
    _tell_padding(model, make_tokenizer())
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


def test_a_variant_of_a_method(root, tmp_path):
    config = make_config(root, tmp_path / "out", method="snnk-relu", features=4, max_steps=1)
    variant = Method("one adapter per layer", wrap=snnk_adapter(feature_map="relu", target_modules="pfeiffer"))
    found = finetune(config, method=variant).metrics
    assert found["summary"] == "one adapter per layer" and found["method"] == "snnk-relu"
    assert found["parameters"]["trained"] == 2 * (DIM * 4 + DIM) + HEAD
    assert found["settings"]["learning_rate"] == 1e-3


def test_a_bottleneck_wider_than_the_model(root, tmp_path):
    done = finetune(make_config(root, tmp_path / "out", method="houlsby", features=20, max_steps=2))
    assert done.metrics["parameters"]["trained"] == 4 * (DIM * 20 + DIM + 20 * (DIM + 1)) + HEAD
    assert torch.equal(outputs(load(tmp_path / "out")[0]), outputs(done.model))


def test_the_papers_relu_adapters_have_gaussian_rows(root, tmp_path):
    done = finetune(make_config(root, tmp_path / "out", method="snnk-relu", features=4, max_steps=1))
    layer = next(m for m in done.model.modules() if isinstance(m, AdaptedLinear))
    norms = layer.snnk_adapter["default"].feature_map.projection.norm(dim=1)
    assert norms.std() > 0.01 * norms.mean()  # orthogonal rows are of one length


LONG = TrainingSettings(epochs=4, batch_size=32, learning_rate=3e-3, schedule="linear", clip=1.0, patience=None)


@pytest.fixture(scope="module")
def whole(data):
    """A run of four epochs of four steps without a stop."""
    model = make_model()  # with dropout, which must be the same too
    return model, train(model, *data.split(0.2, 0), LONG)


@pytest.mark.parametrize(
    ("how", "stops", "first"),
    [("killed", (6,), 5), ("interrupted", (6,), 7), ("interrupted", (6, 11), 12), ("interrupted", (8, 16), 17)],
)
def test_a_run_that_is_resumed_ends_with_the_same_weights(data, whole, tmp_path, how, stops, first):
    """A stop at an epoch's last step does not cost its evaluation; after one at the run's last step nothing is left."""
    train_rows, held = data.split(0.2, 0)
    file = tmp_path / "run.checkpoint"

    def stop_at(steps):
        def progress(step, total, loss, scores):
            if step == steps and how == "killed":
                raise Stop
            if step == steps:
                os.kill(os.getpid(), signal.SIGINT)

        return progress

    for steps in stops:
        with pytest.raises(Stop if how == "killed" else KeyboardInterrupt):
            train(make_model(), train_rows, held, LONG, checkpoint=file, resume=True, progress=stop_at(steps))
        assert [path.name for path in tmp_path.iterdir()] == ["run.checkpoint"]
    seen = []
    model = make_model()
    with torch.no_grad():
        model.classifier.weight.zero_()  # the checkpoint has what is trained
    done = train(
        model,
        train_rows,
        held,
        LONG,
        checkpoint=file,
        resume=True,
        progress=lambda step, *rest: seen.append(step),
    )
    assert seen == list(range(first, 17)) and 0 < done.step_seconds < done.seconds
    assert same(weights(model), weights(whole[0]))
    for a, b in zip(done.history, whole[1].history, strict=True):
        assert a == pytest.approx(b, rel=1e-6, nan_ok=True)


def test_checkpoints_that_do_not_fit_are_refused(data, tmp_path):
    file = tmp_path / "c"
    train(make_model(), data, None, TrainingSettings(max_steps=1), checkpoint=file, key="a")
    with pytest.raises(ValueError, match="other options or data"):
        train(make_model(), data, None, TrainingSettings(max_steps=1), checkpoint=file, key="b", resume=True)
    for options in ({"hidden_size": 8}, {"num_labels": 3}, {"num_hidden_layers": 1}):
        model = make_model(**options)
        before = weights(model)
        with pytest.raises(ValueError, match="does not fit the model"):
            train(model, data, None, TrainingSettings(max_steps=1, bf16=True), checkpoint=file, key="a", resume=True)
        assert same(weights(model), before) and "_original_forward" not in vars(model)  # that of bfloat16 is gone
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match="is no checkpoint"):
        train(make_model(), data, None, TrainingSettings(max_steps=1), checkpoint=file, key="a", resume=True)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(data, tmp_path, monkeypatch):
    def half(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", half)
    with pytest.raises(OSError, match="no space left"):
        train(make_model(), data, None, TrainingSettings(max_steps=1), checkpoint=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_the_run_resumes_from_files(root, tmp_path):
    config = make_config(root, tmp_path / "out", method="snnk-relu", epochs=3, seed=5)
    whole = finetune(replace(config, out=str(tmp_path / "whole")))

    def stop(step, total, loss, scores):
        if step == 7:
            raise Stop

    with pytest.raises(Stop):
        finetune(config, progress=stop)
    assert (tmp_path / "out.checkpoint").exists() and not (tmp_path / "out").exists()
    with pytest.raises(FileExistsError, match="go on with resume, or delete it"):
        finetune(config)
    with pytest.raises(ValueError, match="other options or data"):
        finetune(replace(config, learning_rate=0.5), resume=True)
    done = finetune(config, resume=True)
    assert same(weights(done.model), weights(whole.model)) and not (tmp_path / "out.checkpoint").exists()
    a, b = (r.metrics["training"]["epochs"] for r in (done, whole))
    assert a == b


def test_the_best_epoch_is_kept_and_patience_ends_the_run(data):
    train_rows, held = data.split(0.3, 0)
    model = make_model()
    done = train(model, train_rows, held, TrainingSettings(epochs=40, learning_rate=0.05, patience=2, batch_size=64))
    assert done.stopped_early and len(done.history) == done.best + 3 and done.steps < done.total_steps
    kept = done.history[done.best]
    assert evaluate(model, held, ["accuracy"])["accuracy"] == kept["accuracy"]
    assert evaluate(model, held, ["accuracy"])["loss"] == pytest.approx(kept["loss"], rel=1e-5)
    assert all((row["accuracy"], -row["loss"]) <= (kept["accuracy"], -kept["loss"]) for row in done.history)


def test_without_validation_the_last_weights_stay(data):
    model = make_model()
    before = weights(model)
    done = train(model, data, None, TrainingSettings(max_steps=3, batch_size=64))
    assert done.steps == 3 and len(done.history) == 2 and not same(before, weights(model))


def test_steps_against_a_plain_loop(data):
    settings = TrainingSettings(epochs=2, batch_size=64, learning_rate=1e-2, warmup=0.5, weight_decay=0.1, clip=0.1)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, plain = make_model(**quiet), make_model(**quiet)
    train(model, data, None, settings)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    step = 0
    for epoch in range(2):
        for indices in data.epoch(64, 0, epoch):
            adam.param_groups[0]["lr"] = 1e-2 * min(1, (step + 1) / 3)
            plain(**data.batch(indices)).loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            adam.step()
            adam.zero_grad()
            step += 1
    assert step == 6
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_rates():
    linear = TrainingSettings(learning_rate=1.0, schedule="linear", warmup=0.2)
    assert [round(linear.rate(i, 10), 6) for i in range(10)] == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert {TrainingSettings(learning_rate=1.0, warmup=0).rate(i, 10) for i in range(10)} == {1.0}


def test_bf16_and_back_and_the_global_generator(data):
    found = {}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for name, bf16 in (("before", False), ("bf16", True), ("after", False)):
        model = make_model()
        torch.set_rng_state(state)
        train(model, data, None, TrainingSettings(max_steps=2, bf16=bf16))
        assert torch.equal(torch.get_rng_state(), state)
        found[name] = weights(model)
        assert outputs(model).dtype == torch.float32
    assert same(found["before"], found["after"]) and not same(found["before"], found["bf16"])
    for a, b in zip(found["before"].values(), found["bf16"].values(), strict=True):
        assert b.dtype == torch.float32 and (a - b).abs().max() < 0.01


SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from snnk.finetune import FinetuneConfig, finetune  # once, before the processes part: it takes longer than the rest
root, out, port, kind = sys.argv[1:]
if kind == "FSDP":  # accelerate leaves it to accelerators: all is as there but for this choice
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from snnk.finetune import trainer as loop

    make = loop.make_accelerator

    def make_sharded(bf16):
        made = make(bf16)
        made.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        return made

    loop.make_accelerator = make_sharded
child = os.fork()
rank = "0" if child else "1"
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # as torchrun does
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
finetune(FinetuneConfig(root + "/quiet", out, "snnk-relu", train=root + "/train.tsv", test=root + "/test.tsv",
                        epochs=2, batch_size=50, pooling="mean"))
torch.distributed.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def one(root):
    save(transformers.BertModel, root / "quiet", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = make_config(root, root / "one", method="snnk-relu", batch_size=50)
    return finetune(replace(config, model=str(root / "quiet")))


@pytest.mark.parametrize("kind", ["MULTI_CPU", "FSDP"])
def test_two_processes_give_what_one_gives(root, one, tmp_path, kind):
    """143 rows in batches of 50: the last has 43, 22 and 21 for the two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root), str(tmp_path / "two"), port, kind],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two, _ = load(tmp_path / "two")
    found = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert found["training"]["processes"] == 2 and one.metrics["training"]["processes"] == 1
    assert found["training"]["distributed"] == kind
    for a, b in zip(one.metrics["training"]["epochs"], found["training"]["epochs"], strict=True):
        assert {k: v for k, v in a.items() if v is not None} == pytest.approx(
            {k: v for k, v in b.items() if v is not None}, rel=1e-4
        )
    # PEFT keeps the classifier that it copied, unused and unsaved
    a, b = ({k: v for k, v in weights(m).items() if "original_module" not in k} for m in (one.model, two))
    assert a.keys() == b.keys()
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-5


def test_a_loss_that_is_not_finite_is_told(data):
    with pytest.raises(ValueError, match="try a lower learning rate"):
        train(make_model(), data, None, TrainingSettings(learning_rate=1e30, max_steps=5, warmup=0.0))


def test_bad_input_to_train(data):
    model = make_model().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        train(model, data)
    with pytest.raises(ValueError, match="no rows to train on"):
        train(make_model(), Data([], torch.tensor([]), data.collate, []))
    for options, message in (
        ({"learning_rate": 0}, "learning_rate must be a positive number"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"optimizer": "adamx"}, "did you mean 'adam'"),
        ({"schedule": "cosine"}, "unknown schedule"),
        ({"warmup": 1.0}, "warmup must be in"),
        ({"clip": -1.0}, "clip"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingSettings(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "snnk-rely"}, "did you mean 'snnk-relu'"),
        ({"pooling": "cls"}, "unknown pooling"),
        ({"classifier_start": "zero"}, "unknown classifier start"),
        ({"task": "cola"}, "give either train"),
        ({"train": None}, "give either train"),
        (
            {"train": None, "task": "cola", "data_dir": ".", "regression": True},
            "leave out text='sentence', regression=True",
        ),
        ({"max_steps": -1}, "max_steps must be 0 or more; got -1"),
        ({"max_length": 1}, "above the 1 special tokens of a row; got 1"),
        ({"train": "{root}/twice.csv"}, "twice.csv has several columns 'label'"),
        ({"features": 3}, "has no features"),
        ({"method": "bundled"}, "own pooler"),
        ({"epochs": 0}, "epochs must be a positive integer"),
        ({"text": "body"}, r"no column 'body' in .*; its columns are 'sentence', 'label'"),
        ({"text_pair": "other"}, r"no column 'other'"),
        ({"label": "score"}, r"no column 'score'"),
        ({"train": "{root}/empty.tsv"}, "is empty: it has no rows"),
        ({"train": "{root}/empty.tsv", "text": None}, "is empty: it has no rows"),
        ({"train": "{root}/nothing.csv", "text": None}, "is empty: it has no rows"),
        ({"train": "{root}/nothing.jsonl"}, "is empty: it has no rows"),
        ({"method": "uptrain", "layers": "1,x"}, "layers must be 'all', 'top-6', or numbers .* got '1,x'"),
        ({"method": "uptrain", "layers": "top-"}, "layers must be .* got 'top-'"),
        ({"method": "snnk", "features": 17}, "at most 16 directions there; got num_features=17"),
        ({"method": "snnk-tuned", "features": 17}, "more features than directions"),
        ({"train": "{root}/one.tsv"}, "all labels of .* are 'a'"),
        ({"train": "{root}/none.tsv"}, "no file"),
        ({"test": "{root}/one.tsv"}, "not in the training data: no, yes"),
        ({"limit_train": 20}, "4 of each are needed: give more data, or a validation file"),
        ({"model": "{root}/none"}, "none is no folder, and no name of a model on the hub"),
        ({"model": "{root}/t5"}, "cannot be loaded as MeanPooled: .* no classifier for texts"),
        (
            {"model": "{root}/albert", "method": "snnk", "features": 4, "pooling": "model"},
            "got a 'albert' model: use lora",
        ),
        ({"model": "{root}/xlnet", "pooling": "model"}, "is an XLNet, which classifies by the last position"),
        ({"out": "{root}/bert"}, "exists already"),
        ({"out": "{root}/train.tsv/x"}, "cannot be made"),
    ],
)
def test_bad_options(root, tmp_path, options, message):
    (root / "empty.tsv").write_text("sentence\tlabel\n")
    (root / "nothing.csv").touch()
    (root / "nothing.jsonl").touch()
    (root / "twice.csv").write_text("label,sentence,label\n0,w1,1\n")
    write(root / "one.tsv", make_rows()[0], ["a"] * 160)
    if "t5" in str(options) and not (root / "t5").exists():
        sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        sizes |= {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 43, "pad_token_id": 0}
        config = transformers.MarianConfig(**sizes, decoder_start_token_id=0)
        transformers.MarianModel(config).save_pretrained(root / "t5")
        make_tokenizer().save_pretrained(root / "t5")
    if "albert" in str(options):
        save(transformers.AlbertModel, root / "albert", embedding_size=8)
    if "xlnet" in str(options):
        config = transformers.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=16, vocab_size=43)
        transformers.XLNetModel(config).save_pretrained(root / "xlnet")
        make_tokenizer().save_pretrained(root / "xlnet")
    options = {k: v.format(root=root) if isinstance(v, str) else v for k, v in options.items()}
    out, model = options.pop("out", tmp_path / "out"), options.pop("model", str(root / "bert"))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises((ValueError, OSError), match=message):
        finetune(replace(make_config(root, out, **{"text": "sentence", **options}), model=model))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_what_transformers_says_is_as_before(root, tmp_path):
    told = transformers.utils.logging
    before = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_info()
    told.enable_progress_bar()
    try:
        with pytest.raises(ValueError, match="no column"):
            finetune(make_config(root, tmp_path / "out", label="score"))
        assert told.get_verbosity() == told.INFO and told.is_progress_bar_enabled()
    finally:
        told.set_verbosity(before[0])
        if not before[1]:
            told.disable_progress_bar()


def test_batches_for_closed_forms_are_made_one_at_a_time(data):
    made = []

    def collate(rows):
        made.append(len(rows))
        return data.collate(rows)

    found = _some(replace(data, collate=collate), 0, 100)
    assert made == []
    next(found)
    assert len(made) == 1
    assert len(list(found)) == 1 and len(made) == 2 and sum(made) < len(data)


def test_load_refuses_other_folders(root):
    with pytest.raises(FileNotFoundError, match=r"no file .*metrics\.json, which should be a file of snnk finetune"):
        load(root / "bert")


PLAIN = """
import json, sys
{imports}
import transformers, warnings
from peft import PeftModel
warnings.simplefilter("ignore")
transformers.utils.logging.disable_progress_bar()
auto = transformers.AutoModelForSequenceClassification
found = {{}}
for name in sys.argv[2:]:
    folder = sys.argv[1] + "/" + name
    for how, load in (
        ("auto", auto.from_pretrained),
        ("peft", lambda folder: PeftModel.from_pretrained(auto.from_pretrained(sys.argv[1] + "/bert"), folder)),
    ):
        try:
            found[name + " " + how] = str(load(folder).config.id2label)
        except Exception as error:
            found[name + " " + how] = type(error).__name__ + ": " + str(error)
print("ANSWERS", json.dumps(found))
"""


def test_without_the_mean_or_without_snnk_a_tuned_folder_fails_and_says_why(root, tmp_path):
    """Plain transformers and PEFT take the folder for another model: they must not load it."""
    methods = ("lora", "snnk", "linear-probe")
    for method in methods:
        features = None if method == "linear-probe" else 2
        finetune(make_config(root, tmp_path / method, method=method, features=features, max_steps=0, epochs=None))
    save(transformers.BertModel, tmp_path / "bert")
    config = json.loads((tmp_path / "linear-probe" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    for imports in ("", "import snnk.peft, snnk.finetune"):
        command = [sys.executable, "-c", PLAIN.format(imports=imports), str(tmp_path), *methods]
        done = subprocess.run(command, capture_output=True, text=True)
        found = json.loads(done.stdout.split("ANSWERS", 1)[1])
        errors = {case: told for case, told in found.items() if "Error: " in told}
        assert errors == found  # nothing loads
        assert all("mismatched_sizes" in errors[f"{method} auto"] for method in ("lora", "linear-probe"))
        assert "pooler.dense" in errors["lora peft"]
        for case in ("snnk auto", "snnk peft"):
            assert (
                ("pooler.dense" in errors[case] or "mismatched" in errors[case])
                if imports
                else ("import snnk.peft" in errors[case])
            )


def test_adapters_of_version_0_1_load(root, tmp_path):
    """Their files have peft_type SNNK, and no tensor in the place of the pooler."""
    done = finetune(make_config(root, tmp_path / "tuned", method="snnk", features=2, max_steps=0, epochs=None))
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


def test_a_checkpoint_beside_a_complete_folder_is_removed(root, tmp_path):
    config = make_config(root, tmp_path / "out", max_steps=0, epochs=None)
    finetune(config)
    left = tmp_path / "out.checkpoint"
    left.write_text("of a run that was killed after it had written the folder")
    with pytest.raises(FileExistsError, match="exists already"):
        finetune(config)
    assert not left.exists()
