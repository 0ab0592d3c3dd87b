"""Code in a model's folder never runs, and no command asks whether it may."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snnk.finetune import finetune, load
from snnk.finetune.config import FinetuneConfig
from snnk.hf.folders import refuse_unsafe

from helpers.commands import commands

ROOT = Path(__file__).parents[2]
CODE = "from pathlib import Path\nPath({canary!r}).touch()\n"
LOADERS = ("from_pretrained", "from_config")


def edit(file, **values):
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**found, **values}))


def plant(folder, canary):
    """Write every file that transformers, PEFT or sentence-transformers could take code from."""
    for name in ("modeling_own.py", "custom_generate/generate.py", "__init__.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CODE.format(canary=str(canary)))


OWN = {
    "AutoConfig": "modeling_own.C",
    "AutoModel": "modeling_own.M",
    "AutoModelForSequenceClassification": "modeling_own.M",
}
HOSTILE = {
    "model": ("config.json", {"auto_map": OWN}),
    "model of an unknown type": ("config.json", {"auto_map": OWN, "model_type": "own"}),
    "model of another repository": ("config.json", {"auto_map": {"AutoConfig": "someone/else--modeling_own.C"}}),
    "tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["modeling_own.T", None]}}),
    "image processor": ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "modeling_own.P"}}),
    "part of a model": ("config.json", {"text_config": {"auto_map": OWN}}),
    "kernel of the hub": ("config.json", {"attn_implementation": "kernels-community/flash-attn"}),
    "adapter": ("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "x", "auto_mapping": OWN}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_folder_with_code_of_its_own_is_refused(what, run, bert, texts, monkeypatch):
    """Every command refuses it in one line; a question on the terminal would be answered with "yes" here."""
    canary = bert.parent / "canary"
    plant(bert, canary)
    name, values = HOSTILE[what]
    edit(bert / name, **values)
    monkeypatch.setattr("builtins.input", lambda prompt: canary.touch() or "yes")
    for command, args in commands(bert, texts).items():
        code, out, err = run(*args)
        assert code == 2 and err.count("\n") == 1 and name in err, (command, out, err)
        assert not canary.exists() and not (bert.parent / "out").exists(), command


def test_yes_on_the_terminal_changes_nothing(bert):
    plant(bert, bert.parent / "canary")
    edit(bert / "config.json", **HOSTILE["model of an unknown type"][1])
    audit = [sys.executable, "-m", "snnk.cli", "audit", str(bert)]
    done = subprocess.run(audit, input="yes\n" * 100, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert "auto_map" in done.stderr and not (bert.parent / "canary").exists()


@pytest.mark.parametrize("place", ["tuned", "base"])
def test_a_tuned_folder_and_its_base_are_held_to_the_same(place, bert, texts):
    out, canary = bert.parent / "tuned", bert.parent / "canary"
    train = str(texts.parent / "train.tsv")
    finetune(FinetuneConfig(model=str(bert), out=str(out), train=train, method="snnk", num_features=4, max_steps=0))
    load(out)
    plant(out, canary)
    plant(bert, canary)
    name = {"tuned": out / "tokenizer_config.json", "base": bert / "config.json"}[place]
    edit(name, auto_map={"AutoTokenizer": ["modeling_own.T", None], **OWN})
    with pytest.raises(ValueError, match="names code of its own to run"):
        load(out)
    assert not canary.exists()


def test_an_adapter_that_is_a_pickle_is_refused(bert, texts):
    out, train = bert.parent / "tuned", str(texts.parent / "train.tsv")
    finetune(FinetuneConfig(model=str(bert), out=str(out), train=train, method="lora", num_features=4, max_steps=0))
    (out / "adapter_model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, out / "adapter_model.bin")
    with pytest.raises(ValueError, match="a pickle, which can run code"):
        load(out)


def test_names_of_files_stay_in_the_folder(bert):
    """Files are named in modules.json, in an index of weights, and in a tokenizer, which would copy its vocabulary."""
    elsewhere = bert.parent / "secret.txt"
    elsewhere.write_text("secret")
    for name, value in {
        "modules.json": [{"idx": 0, "path": "", "type": "modeling_own.Module"}],
        "modules.json ": [{"idx": 1, "path": "../x", "type": "sentence_transformers.models.Pooling"}],
        "model.safetensors.index.json": {"weight_map": {"a": "../other/model.safetensors"}},
        "tokenizer_config.json": {"vocab_file": str(elsewhere)},
        "special_config.json": {"vocab_file": "/home/someone/who/saved/it.txt"},  # no such file: does no harm
    }.items():
        file = bert / name.strip()
        before = file.read_text() if file.exists() else None
        file.write_text(json.dumps(value))
        if name.startswith("special"):
            refuse_unsafe(bert)
        else:
            with pytest.raises(ValueError, match=re.escape(file.name)):
                refuse_unsafe(bert)
        file.unlink() if before is None else file.write_text(before)
    refuse_unsafe(bert)


def test_weights_that_are_pickles_are_refused(run, bert, texts):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (bert.parent / "canary",)

    torch.save({"weight": Bomb()}, bert / "pytorch_model.bin")
    (bert / "model.safetensors").unlink()
    for command, args in commands(bert, texts).items():
        code, _, err = run(*args)
        assert code == 2 and "safetensors" in err and not (bert.parent / "canary").exists(), command


def test_code_is_not_copied(run, quick, bert, texts):
    plant(bert, bert.parent / "canary")
    (bert / "scaler.pkl").write_bytes(b"")
    (bert / "notes.txt").write_text("kept")
    assert run("compress", bert, "--calibration", texts, "--out", bert.parent / "out", "--refine", 0)[0] == 0
    names = {path.name for path in (bert.parent / "out").rglob("*") if path.is_file()}
    assert "notes.txt" in names and not any(name.endswith((".py", ".pkl")) for name in names)


def test_every_call_says_that_code_is_not_trusted():
    """transformers asks a question on the terminal if `trust_remote_code` is not given."""
    wrong, found = [], 0
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") not in LOADERS:
                continue
            owner = ast.unparse(node.func.value)
            if owner in ("super()", "PeftModel") or (file.parent.name == "maps" and owner == "cls"):
                continue  # PEFT and feature maps read tensors and settings, no code
            found += 1
            said = "trust_remote_code=False" in ast.unparse(node) or "'trust_remote_code': False" in ast.unparse(node)
            if not said:
                wrong.append(f"{file.name}:{node.lineno} {ast.unparse(node)[:80]}")
    assert found > 5 and not wrong, wrong
