"""The server runs where neither torch nor snnk can be imported, and every other example runs offline."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from snnk.hf import export

from helpers.heads import make
from helpers.texts import make_paired, make_texts, make_tokenizer, save

PYTHON = (sys.base_prefix + "/bin/python3", "-S")  # no packages but those of PYTHONPATH
EXAMPLES = Path(__file__).parent.parent / "examples"
ALLOWED = ("onnxruntime", "tokenizers", "numpy")
CLS_AND_MEAN = ("pooling_mode_cls_token", "pooling_mode_mean_tokens")


@pytest.fixture
def alone(tmp_path):
    """An environment whose packages are the allowed ones and what these require."""
    wanted, chosen = list(ALLOWED), {}
    while wanted:
        name = re.match(r"[\w.-]+", wanted.pop())[0]
        if name not in chosen:
            chosen[name] = distribution(name)
            wanted += [line for line in chosen[name].requires or () if "extra ==" not in line and _is_there(line)]
    folder = tmp_path / "packages"
    folder.mkdir()
    for found in chosen.values():
        for top in {Path(file).parts[0] for file in found.files if Path(file).parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(found.locate_file(top)))
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": ""}
    for name in ("torch", "transformers", "snnk", "scipy"):
        failed = subprocess.run([*PYTHON, "-c", f"import {name}"], env=environment, capture_output=True, text=True)
        assert f"No module named '{name}'" in failed.stderr
    return environment


def _is_there(requirement):
    try:
        distribution(re.match(r"[\w.-]+", requirement)[0])
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model, and the folder of its export."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    tmp_path = tmp_path_factory.mktemp("served")
    model = make("BertModel").eval()
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(60)))
    export(save(model, tmp_path / "model"), tmp_path / "texts.txt", to="onnx", out=tmp_path / "served")
    return model, tmp_path / "served"


@contextmanager
def serving(folder, environment, python=PYTHON):
    """Runs the server; yields a function that sends a body and returns the answer."""
    command = [*python, EXAMPLES / "serve.py", folder, "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            address = f"http://127.0.0.1:{int(server.stdout.readline().split()[-1])}"

            def ask(body):
                with urllib.request.urlopen(urllib.request.Request(address, body)) as answer:
                    return json.load(answer)

            yield ask
        finally:
            server.terminate()


def test_vectors_over_http_are_those_of_the_model(served, alone):
    model, folder = served
    texts = make_texts(5, seed=1)
    with serving(folder, alone) as ask:
        found = torch.tensor(ask(json.dumps({"texts": texts}).encode())["vectors"])
        for wrong in (b"{", b"[]", b'{"texts": 3}', b'{"texts": []}', b'{"texts": [["a", "b"]]}'):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                ask(wrong)
    batch = make_tokenizer()(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    wanted = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    assert (batch["attention_mask"] == 0).any() and torch.allclose(found, wanted, atol=1e-5)


def test_the_same_server_answers_with_openvino(served, alone, tmp_path):
    pytest.importorskip("openvino")
    model, folder = served
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(60)))
    export(save(model, tmp_path / "model"), tmp_path / "texts.txt", to="openvino", out=tmp_path / "openvino")
    body = json.dumps({"texts": make_texts(5, seed=1)}).encode()
    with serving(folder, alone) as ask:
        wanted = torch.tensor(ask(body)["vectors"])
    with serving(tmp_path / "openvino", os.environ, (sys.executable,)) as ask:
        found = torch.tensor(ask(body)["vectors"])
    assert (found * wanted).sum(1).min() > 0.999  # OpenVINO computes in bfloat16 where the processor has it


@pytest.mark.parametrize(("labels", "several"), [(1, False), (3, False), (3, True)])
def test_classes_and_scores_over_http_are_those_of_the_model(alone, tmp_path, labels, several):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, tokenizer = make("BertForSequenceClassification", num_labels=labels), make_paired()
    model.config.id2label = {i: f"class {i}" for i in range(labels)}
    if several:
        model.config.problem_type = "multi_label_classification"
    texts = make_texts(60)
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    export(save(model, tmp_path / "model", tokenizer), tmp_path / "texts.txt", to="onnx", out=tmp_path / "served")
    pairs = [list(pair) for pair in zip(texts[:4], texts[4:8], strict=True)]
    pairs.append([texts[8], " ".join(texts)])  # longer than the model takes
    cut: dict = {"truncation": True, "max_length": model.config.max_position_embeddings}
    batch = tokenizer(*zip(*pairs, strict=True), padding=True, return_tensors="pt", **cut)
    assert batch["input_ids"].shape[1] == model.config.max_position_embeddings
    with torch.no_grad():
        wanted = model(**batch).logits
    with serving(tmp_path / "served", alone) as ask:
        found = ask(json.dumps({"texts": pairs}).encode())
        for wrong in (b'{"texts": [["a", "b", "c"]]}', b'{"texts": [["a", 3]]}'):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                ask(wrong)
    if labels == 1:
        assert torch.allclose(torch.tensor(found["scores"]), wanted[:, 0], atol=1e-5)
    else:
        probabilities = [list(row.values()) for row in found["probabilities"]]
        assert torch.allclose(
            torch.tensor(probabilities), wanted.sigmoid() if several else wanted.softmax(1), atol=1e-5
        )
        assert found["labels"] == [f"class {i}" for i in wanted.argmax(1)]
        assert list(found["probabilities"][0]) == ["class 0", "class 1", "class 2"]


def test_a_failure_of_the_model_is_not_the_fault_of_the_client(served, alone, tmp_path):
    shutil.copytree(served[1], tmp_path / "long")
    for name in ("config.json", "tokenizer_config.json"):  # without limits, texts are longer than the model takes
        for path in (tmp_path / "long").rglob(name):
            found = json.loads(path.read_text())
            path.write_text(json.dumps({**found, "max_position_embeddings": None, "model_max_length": None}))
    with serving(tmp_path / "long", alone) as ask:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            ask(json.dumps({"texts": [" ".join(make_texts(200))]}).encode())
        assert ask(b'{"texts": ["a text"]}').keys() == {"vectors"}


def test_a_model_of_tokens_is_not_served_as_a_classifier(alone, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(60)))
    source = save(make("BertForTokenClassification").eval(), tmp_path / "model")
    export(source, tmp_path / "texts.txt", to="onnx", out=tmp_path / "served")
    command = [*PYTHON, EXAMPLES / "serve.py", tmp_path / "served", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == 1 and "classifies no whole texts" in done.stderr


def test_the_load_test_compares_models(served, alone, tmp_path):
    options = ("--seconds", "0.2", "--warm-up", "0", "--out", tmp_path / "rates.json")
    command = [*PYTHON, EXAMPLES / "load_test.py", served[1], served[1], *options]
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    rates = re.findall(r"served: ([0-9.]+) requests per second, ([0-9.]+) times, median [0-9.]+ ms", done.stdout)
    assert len(rates) == 2 and all(float(rate) > 0 for rate, _ in rates) and rates[0][1] == "1.00"
    found = json.loads((tmp_path / "rates.json").read_text())["rows"]
    assert [f"{row['requests_per_second']:.1f}" for row in found] == [rate for rate, _ in rates]


@pytest.mark.parametrize(
    "pooling",
    [{"pooling_mode_cls_token": True}, {"pooling_mode": "cls"}, dict.fromkeys(CLS_AND_MEAN, True)],
)
def test_other_poolings_are_refused(served, alone, tmp_path, pooling):
    shutil.copytree(served[1], tmp_path / "other")
    (tmp_path / "other" / "1_Pooling").mkdir()
    (tmp_path / "other" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    command = [*PYTHON, EXAMPLES / "serve.py", tmp_path / "other", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == 1 and "does not return the mean of its tokens" in done.stderr


@pytest.mark.parametrize("pooling", [{"pooling_mode": "mean"}, {"pooling_mode_mean_tokens": True}])
def test_both_names_of_the_mean_are_served(served, alone, tmp_path, pooling):
    shutil.copytree(served[1], tmp_path / "same")
    (tmp_path / "same" / "1_Pooling").mkdir()
    (tmp_path / "same" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with serving(tmp_path / "same", alone) as ask:
        assert ask(b'{"texts": ["a text"]}').keys() == {"vectors"}


def test_a_folder_without_a_graph_is_refused(alone, tmp_path):
    command = [*PYTHON, EXAMPLES / "serve.py", tmp_path, "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == 1 and "has no model.onnx and no openvino_model.xml: name a folder" in done.stderr


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    """Runs an example in an empty folder; returns what it prints."""

    def call(name, *args):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_a_model_is_compressed_and_exported(example, quick, monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("snnk.hf.compression.opening.MORE_TOKENS", 1000)  # few steps of distillation
    said = example("compress.py", "--minutes", 0.01)
    before, after = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) bytes became ([\d,]+)", said).groups())
    assert after < 0.8 * before
    cosines = [float(value) for value in re.findall(r"^cosine (\S+)", said, flags=re.MULTILINE)]
    assert len(cosines) == 3 and min(cosines) > 0.9
    assert (tmp_path / "compressed" / "onnx" / "model.onnx").is_file()


def test_adapters_are_trained_with_trainer(example, tmp_path):
    said = example("trainer.py", "--epochs", 1)
    assert re.search(r"trainable params: [\d,]+ ", said)
    assert float(re.search(r"the logits differ by (\S+)", said)[1]) < 1e-5
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_messages_have_other_phrases_to_predict(example, tmp_path):
    example("messages.py")
    train = (tmp_path / "train.tsv").read_text().splitlines()[1:]
    rows = (tmp_path / "rows.csv").read_text().splitlines()[1:]
    assert (len(train), len(rows)) == (480, 40) and len(set(train)) == 480
    assert {line.split("\t")[1] for line in train} == {line.rpartition(",")[2] for line in rows}
    assert (tmp_path / "texts.txt").read_text().splitlines() == [line.split("\t")[0] for line in train]
    assert not any(line.split("\t")[0] in row for line in train for row in rows)


def test_the_tumours_are_a_table_for_fit(example, tmp_path):
    pytest.importorskip("sklearn")
    example("tumours.py")
    train, test = ((tmp_path / f"{name}.csv").read_text().splitlines() for name in ("train", "test"))
    assert (len(train), len(test)) == (401, 170) and len({*train[1:], *test[1:]}) == 569
    assert train[0] == test[0] and train[0].split(",")[::30] == ["mean radius", "target"]


def test_a_table_is_fitted_in_one_part_and_in_two(example, tmp_path):
    pytest.importorskip("sklearn")
    said = example("fit_table.py")
    accuracy = float(re.search(r"169 predictions, accuracy (\S+),", said)[1])
    same = int(re.search(r"the same class for (\d+) of 169 rows", said)[1])
    assert accuracy > 0.9 and same >= 168  # sums of float32 blocks differ in rounding
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 170


def test_a_layer_is_estimated(example):
    said = example("estimate_layer.py")
    error, predicted = map(float, re.search(r"error (\S+), predicted (\S+)", said).groups())
    assert 0.5 < error / predicted < 2
    assert float(re.search(r"the error is (\S+) of the variance", said)[1]) < 0.05


def test_every_example_has_a_test():
    names = {path.name for path in EXAMPLES.glob("*.py")} - {"tiny.py"}  # the model of two others
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert all(f'"{name}"' in tests for name in names), names
