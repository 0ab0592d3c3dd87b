"""The examples run where neither torch nor snnk can be imported."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from snnk.hf import export

from helpers.heads import make
from helpers.texts import make_texts, make_tokenizer, save

EXAMPLES = Path(__file__).parent.parent / "examples"
BLOCKED = "torch", "transformers", "snnk"


@pytest.fixture
def alone(tmp_path):
    """An environment in which the import of a blocked package fails."""
    folder = tmp_path / "blocked"
    folder.mkdir()
    for name in BLOCKED:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    for name in BLOCKED:
        failed = subprocess.run(
            [sys.executable, "-c", f"import {name}"], env=environment, capture_output=True, text=True
        )
        assert f"{name} is not installed" in failed.stderr
    return environment


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


def test_vectors_over_http_are_those_of_the_model(served, alone):
    model, folder = served
    texts = make_texts(5, seed=1)
    command = [sys.executable, EXAMPLES / "serve.py", folder, "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=alone) as server:
        try:
            port = int(server.stdout.readline().split()[-1])
            request = urllib.request.Request(f"http://127.0.0.1:{port}", json.dumps({"texts": texts}).encode())
            with urllib.request.urlopen(request) as answer:
                found = torch.tensor(json.load(answer)["vectors"])
        finally:
            server.terminate()
    batch = make_tokenizer()(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    wanted = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    assert (batch["attention_mask"] == 0).any() and torch.allclose(found, wanted, atol=1e-5)


def test_the_load_test_compares_models(served, alone):
    command = [sys.executable, EXAMPLES / "load_test.py", served[1], served[1], "--seconds", "0.2", "--warm-up", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    rates = re.findall(r"served: ([0-9.]+) requests per second, ([0-9.]+) times, median [0-9.]+ ms", done.stdout)
    assert len(rates) == 2 and all(float(rate) > 0 for rate, _ in rates) and rates[0][1] == "1.00"


def test_the_server_is_short():
    """Lines of code, without docstrings, comments and empty lines."""
    text = re.sub(r'"""[\s\S]*?"""', "", (EXAMPLES / "serve.py").read_text())
    assert len([line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]) <= 40
