"""Classifiers that compare two texts: what they learn, and that predictions and exports read texts apart too."""

import csv
import json
import shutil

import pytest
import torch
import transformers

from snnk.finetune import finetune, load, predict
from snnk.hf import export
from snnk.hf.classify.means import pool_means_

from helpers.texts import WORDS, make_paired
from helpers.tuning import TINY, make_config

COLUMNS = {"text": "first", "text_pair": "second", "test": None}


def write_pairs(path, count=300):
    """Pairs of texts with the label 1 if the second has the words of the first, in another order."""
    generator = torch.Generator().manual_seed(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["first", "second", "label"])
        for i in range(count):
            words = torch.randint(40, (2, 5), generator=generator).tolist()
            other = words[0][::-1] if i % 2 else words[1]
            writer.writerow([" ".join(WORDS[w] for w in part) for part in (words[0], other)] + [str(i % 2)])
    return str(path)


@pytest.fixture(scope="module")
def home(root, tmp_path_factory):
    """A folder with a sentence encoder, whose tokenizer returns the text of each token, as that of a BERT does."""
    folder = tmp_path_factory.mktemp("pairs")
    shutil.copytree(root, folder, dirs_exist_ok=True)
    make_paired().save_pretrained(folder / "bert")
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    (folder / "bert" / "modules.json").write_text(json.dumps([module]))
    return folder


@pytest.fixture(scope="module")
def pairs(home):
    return write_pairs(home / "pairs.csv")


@pytest.fixture(scope="module")
def tuned(home, pairs):
    """The closed form on comparisons, the default for pairs of texts and a sentence encoder."""
    options = {"method": "closed-form", "pooling": None, "train": pairs, "epochs": None, **COLUMNS}
    return finetune(make_config(home, home / "compared", **options))


def test_comparisons_tell_equal_words_from_others_and_means_of_all_tokens_do_not(home, pairs, tuned, tmp_path):
    found = tuned.metrics
    layers, width = tuned.model.config.num_hidden_layers, tuned.model.config.intermediate_size
    assert found["config"]["pooling"] == "neuron-pairs"
    assert tuned.model.classifier.in_features == 2 * (2 * 16 + layers * width)
    options = {"method": "closed-form", "pooling": "layers", "train": pairs, "epochs": None, **COLUMNS}
    means = finetune(make_config(home, tmp_path / "means", **options)).metrics
    accuracy = [found["scores"]["validation"]["accuracy"] for found in (found, means)]
    assert accuracy[0] >= 0.9 and accuracy[1] <= 0.75


def test_predictions_are_those_of_the_model(home, pairs, tuned, tmp_path):
    model, tokenizer = load(home / "compared")
    with open(pairs) as file:
        rows = list(csv.DictReader(file))[:20]
    texts = [[row[name] for row in rows] for name in ("first", "second")]
    with torch.inference_mode():
        exact = model(**tokenizer(*texts, padding=True, return_tensors="pt")).logits.softmax(-1)[:, 1]
    predict(home / "compared", pairs, out=tmp_path / "p.jsonl", batch_size=7)
    written = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()][:20]
    probabilities = torch.tensor([next(v for k, v in row.items() if k.endswith("1")) for row in written])
    torch.testing.assert_close(probabilities, exact, atol=1e-4, rtol=1e-3)


@pytest.mark.once
def test_exports_are_the_model(home, pairs, tuned, tmp_path, quick):
    """An export compares the graph with PyTorch, and writes nothing if they differ."""
    report = export(home / "compared", pairs, text="first", text_pair="second", to="onnx", out=tmp_path / "served")
    assert (tmp_path / "served" / "onnx" / "model.onnx").exists() and report["outputs"] == ["logits"]


@pytest.mark.parametrize("pooling", ["pairs", "neuron-pairs"])
def test_adapters_are_trained_on_comparisons(home, pairs, tmp_path, pooling):
    options = {"pooling": pooling, "train": pairs, "num_features": 4, **COLUMNS}
    config = make_config(home, tmp_path / "out", method="snnk", **options)
    done = finetune(config)
    model, tokenizer = load(tmp_path / "out")
    batch = tokenizer(["w1 w2", "w3"], ["w2 w1", "w4 w5 w6"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        torch.testing.assert_close(model(**batch).logits, done.model(**batch).logits)


@pytest.mark.parametrize(
    ("encoder", "options", "pooling"),
    [
        (True, {}, "mean"),
        (True, {"method": "closed-form", "epochs": None}, "neurons"),
        (True, {"method": "closed-form", "epochs": None, **COLUMNS}, "neuron-pairs"),
        (True, COLUMNS, "pairs"),
        (True, {"method": "snnk-pooler", "num_features": 8}, "model"),
        (False, COLUMNS, "model"),
        (False, {"method": "closed-form", "epochs": None, **COLUMNS}, "neurons"),
    ],
)
def test_sentence_encoders_have_means_or_comparisons_by_default(root, home, pairs, tmp_path, encoder, options, pooling):
    files = {"train": pairs} if "text_pair" in options else {}
    config = make_config(
        home if encoder else root, tmp_path / "out", **{"pooling": None, "epochs": 1, **files, **options}
    )
    assert finetune(config).metrics["config"]["pooling"] == pooling


def test_rows_whose_second_text_cannot_be_found_are_refused(root, home, pairs, tmp_path):
    options = {"train": pairs, "method": "closed-form", "epochs": None, **COLUMNS}
    with pytest.raises(ValueError, match=r"does not find where the second text begins.*Use pooling 'layers'"):
        finetune(make_config(root, tmp_path / "untyped", pooling="pairs", **options))
    shutil.copytree(home / "bert", tmp_path / "bert")
    file = tmp_path / "bert" / "tokenizer.json"
    file.write_text(file.read_text().replace('"type_id": 1', '"type_id": 0').replace('"type_id":1', '"type_id":0'))
    with pytest.raises(ValueError, match=r"found no second text: all token_type_ids .* Use pooling 'layers'"):
        finetune(make_config(tmp_path, tmp_path / "zeros", pooling="pairs", **options))
    for pooling, other in (("pairs", "layers"), ("neuron-pairs", "neurons")):
        with pytest.raises(ValueError, match=f"'{pooling}' compares two texts, and the rows have one: .* '{other}'"):
            finetune(make_config(home, tmp_path / "single", pooling=pooling))
    assert not any((tmp_path / name).exists() for name in ("untyped", "zeros", "single"))
    for folder in (root, tmp_path):  # what the messages advise
        finetune(make_config(folder, tmp_path / f"layers-{folder.name}", pooling="layers", **options))


def test_comparisons_are_for_types_whose_attention_follows_the_mask():
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY))
    model.config.model_type = "convbert"
    with pytest.raises(ValueError, match=r"'pairs' is for bert, .*; got a 'convbert' model: use pooling 'layers'"):
        pool_means_(model, "pairs")
    pool_means_(model, "layers")
