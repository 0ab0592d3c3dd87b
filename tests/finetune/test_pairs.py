"""Classifiers that compare two texts: what they learn, and that predictions and exports read texts apart too."""

import csv
import json
import shutil

import pytest
import torch

from snnk.finetune import finetune, load, predict
from snnk.hf import export

from helpers.texts import WORDS, make_paired
from helpers.tuning import make_config

COLUMNS = {"text": "first", "text_pair": "second", "test": None}


def write_pairs(path, count=300):
    """Pairs of texts whose label tells whether the second has the words of the first, in another order."""
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
    """A folder whose tokenizer returns the text of each token, as that of a BERT does."""
    folder = tmp_path_factory.mktemp("pairs")
    shutil.copytree(root, folder, dirs_exist_ok=True)
    make_paired().save_pretrained(folder / "bert")
    return folder


@pytest.fixture(scope="module")
def pairs(home):
    return write_pairs(home / "pairs.csv")


@pytest.fixture(scope="module")
def tuned(home, pairs):
    """The closed form on comparisons, which is what pairs of texts get by default."""
    options = {"method": "closed-form", "pooling": None, "train": pairs, "epochs": None, **COLUMNS}
    return finetune(make_config(home, home / "compared", **options))


def test_comparisons_tell_equal_words_from_others_and_means_of_all_tokens_do_not(home, pairs, tuned, tmp_path):
    found = tuned.metrics
    assert found["config"]["pooling"] == "pairs" and tuned.model.classifier.in_features == 2 * 2 * 16
    options = {"method": "closed-form", "pooling": "layers", "train": pairs, "epochs": None, **COLUMNS}
    means = finetune(make_config(home, tmp_path / "means", **options)).metrics
    accuracy = [found["scores"]["validation"]["accuracy"] for found in (found, means)]
    assert accuracy[0] >= 0.9 and accuracy[1] <= 0.75


def test_predictions_and_exports_are_those_of_the_model(home, pairs, tuned, tmp_path):
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
    # export compares the graph with PyTorch, and writes nothing if they differ
    report = export(home / "compared", pairs, column="first,second", to="onnx", out=tmp_path / "served")
    assert (tmp_path / "served" / "onnx" / "model.onnx").exists() and report["outputs"] == ["logits"]


def test_adapters_are_trained_on_comparisons(home, pairs, tmp_path):
    config = make_config(home, tmp_path / "out", method="snnk", pooling="pairs", train=pairs, num_features=4, **COLUMNS)
    done = finetune(config)
    model, tokenizer = load(tmp_path / "out")
    batch = tokenizer(["w1 w2", "w3"], ["w2 w1", "w4 w5 w6"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        torch.testing.assert_close(model(**batch).logits, done.model(**batch).logits)


def test_sentence_encoders_have_means_or_comparisons_by_default(root, home, pairs, tmp_path):
    folder = tmp_path / "encoder"
    shutil.copytree(home / "bert", folder)
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    (folder / "modules.json").write_text(json.dumps([module]))
    for model, options, pooling in (
        (folder, {}, "mean"),
        (folder, {"train": pairs, **COLUMNS}, "pairs"),
        (home / "bert", {"train": pairs, **COLUMNS}, "model"),
        (folder, {"method": "snnk-pooler", "num_features": 8}, "model"),
    ):
        config = make_config(home, tmp_path / f"out-{len(list(tmp_path.iterdir()))}", pooling=None, epochs=1, **options)
        found = finetune(type(config)(**{**vars(config), "model": str(model)})).metrics["config"]["pooling"]
        assert found == pooling
    options = {"pooling": "pairs", "train": pairs, **COLUMNS}
    with pytest.raises(ValueError, match="must know where the second text begins"):
        finetune(make_config(root, tmp_path / "untyped", **options))
    with pytest.raises(ValueError, match="'pairs' compares two texts, and the rows have one"):
        finetune(make_config(home, tmp_path / "single", pooling="pairs"))
    assert not (tmp_path / "single").exists()
