"""`finetune` from files to a folder, and `load`."""

from dataclasses import replace

import pytest
import torch
import transformers

from snnk.finetune import finetune, load, trainer
from snnk.finetune import run as running
from snnk.finetune.data import encode_texts
from snnk.finetune.run import _some
from snnk.finetune.trainer import base_of, evaluate

from helpers.texts import make_tokenizer
from helpers.tuning import (
    DIM,
    HEAD,
    make_config,
    make_rows,
    outputs,
    save,
    write,
)


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
    options = {"train": train, "validation": held, "test": None, "num_features": 4, **options}
    done = finetune(make_config(tmp_path, tmp_path / "out", **options))
    loaded = [load(tmp_path / "out")[0] for _ in range(2)]
    assert torch.equal(*map(outputs, loaded)) and torch.equal(outputs(loaded[0]), outputs(done.model))
    assert done.metrics["parameters"]["trained"] == 2 * 2 * 2 * DIM * 4 + HEAD  # a random pooler is saved, not trained
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
    options = {"train": None, "test": None, "glue": "cola", "data_dir": str(tmp_path), "max_steps": 1}
    found = finetune(make_config(root, tmp_path / "out", **options)).metrics
    assert found["metric"] == "mcc" and set(found["scores"]["test"]) == {"mcc", "accuracy", "loss"}
    assert found["data"]["rows"] == {"train": 72, "validation": 8, "test": 80}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "snnk-rely"}, "did you mean 'snnk-relu'"),
        ({"pooling": "cls"}, "unknown pooling"),
        ({"classifier_start": "zero"}, "unknown classifier start"),
        ({"glue": "cola"}, "give either train"),
        ({"train": None}, "give either train"),
        (
            {"train": None, "glue": "cola", "data_dir": ".", "task": "regression"},
            "leave out text='sentence', task='regression'",
        ),
        ({"max_steps": -1}, "max_steps must be 0 or more; got -1"),
        ({"max_length": 1}, "exceed the 1 special tokens of a row; got 1"),
        ({"train": "{root}/twice.csv"}, "twice.csv has several columns 'label'"),
        ({"num_features": 3}, "has no features"),
        ({"method": "bundled"}, "own pooler"),
        ({"epochs": 0}, "epochs must be a positive integer"),
        ({"patience": 0}, "patience must be a positive integer"),
        ({"text": "body"}, r"no column 'body' in .*; its columns are sentence, label"),
        ({"text_pair": "other"}, r"no column 'other'"),
        (
            {"label": "score"},
            r"no column 'score' in .*; its columns are .*; name that of the labels with label \(--label\)",
        ),
        ({"train": "{root}/empty.tsv"}, "is empty: it has no rows"),
        ({"train": "{root}/empty.tsv", "text": None}, "is empty: it has no rows"),
        ({"train": "{root}/nothing.csv", "text": None}, "is empty: it has no rows"),
        ({"train": "{root}/nothing.jsonl"}, "is empty: it has no rows"),
        ({"method": "uptrain", "layers": "1,x"}, "layers must be 'all', 'top-6', or numbers .* got '1,x'"),
        ({"method": "uptrain", "layers": "top-"}, "layers must be .* got 'top-'"),
        ({"method": "snnk", "num_features": 17}, "at most 16 directions there; got num_features=17"),
        ({"method": "snnk-tuned", "num_features": 17}, "more features than directions"),
        ({"train": "{root}/one.tsv"}, "all labels of .* are 'a'"),
        ({"train": "{root}/none.tsv"}, "no file"),
        ({"test": "{root}/one.tsv"}, "not in the training data: no, yes"),
        ({"limit_train": 3}, "4 of each are needed: give more data, or a validation file"),
        ({"model": "{root}/none"}, "none is no folder and cannot be the name of a model on the hub"),
        ({"model": "{root}/t5"}, "cannot be loaded as MeanPooled: .* no classifier for texts"),
        (
            {"model": "{root}/albert", "method": "snnk", "num_features": 4, "pooling": "model"},
            "got a 'albert' model: use lora",
        ),
        ({"model": "{root}/xlnet", "pooling": "model"}, "is an XLNet, which classifies by the last position"),
        ({"out": "{root}/bert"}, "exists already"),
        ({"out": "{root}/train.tsv/x"}, "cannot be made"),
    ],
)
@pytest.mark.once
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


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("method", "asked"), [("lora", None), ("lora", False), ("linear-probe", None)])
@pytest.mark.once
def test_bfloat16_by_default_where_the_processor_has_it(root, tmp_path, monkeypatch, fast, method, asked):
    """On a processor attention is then computed in steps; the model that is returned has its own attention."""
    monkeypatch.setattr(running, "has_bfloat16", lambda device: fast)
    seen, used = [], []
    monkeypatch.setattr(running, "_key", lambda *args: seen.append(args[2].bf16) or "key")
    step = trainer._Run.step

    def noted(self, indices):
        config = base_of(self.accelerator.unwrap_model(self.model)).config
        used.append((config._attn_implementation, torch.is_autocast_enabled("cpu")))
        return step(self, indices)

    monkeypatch.setattr(trainer._Run, "step", noted)
    done = finetune(make_config(root, tmp_path / "out", method=method, max_steps=1, bf16=asked))
    bf16 = fast and asked is None and method == "lora"
    assert seen == [bf16] and done.metrics["settings"]["bf16"] == bf16
    assert used[0][0] == ("eager" if bf16 else "sdpa")
    assert base_of(done.model).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_of_the_base_model_can_be_left_out(root, tmp_path, monkeypatch, dropout):
    modes = []
    step = trainer._Run.step

    def noted(self, indices):
        model = self.accelerator.unwrap_model(self.model)
        modes.append((base_of(model).training, model.training))
        return step(self, indices)

    monkeypatch.setattr(trainer._Run, "step", noted)
    finetune(make_config(root, tmp_path / "out", method="lora", max_steps=1, dropout=dropout))
    assert modes == [(dropout, True)]


@pytest.mark.parametrize(
    ("options", "doubt"),
    [
        (
            {"method": "full", "learning_rate": 10.0, "epochs": 1},
            "the start was kept: try another learning rate than 10",
        ),
        (
            {"method": "full", "learning_rate": 1e-3, "classifier_start": "random", "epochs": 1},
            "more epochs or steps may",
        ),
        ({"max_steps": 0}, None),
    ],
)
def test_a_training_that_did_not_help_or_was_cut_off_is_warned_of(root, tmp_path, options, doubt):
    said = []
    found = finetune(make_config(root, tmp_path / "out", **options), say=said.append).metrics
    card = (tmp_path / "out" / "README.md").read_text()
    if doubt is None:
        assert found["warnings"] == [] and "Warning" not in card
        return
    (told,) = found["warnings"]
    assert doubt in told and f"warning: {told}" in said and f"Warning: {told}." in card
