"""`merge`: an adapter in the weights of its model, and what compression makes of the result."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from snnk.finetune import finetune, load, merge, predict
from snnk.hf import compress, compress_, doubts, export, plan
from snnk.hf.models import class_of, read_config, reads_pairs

from helpers.texts import make_english, make_texts, make_tokenizer
from helpers.tuning import make_config, outputs, save


@pytest.mark.parametrize(("method", "pooling"), [("lora", "model"), ("lora", "mean"), ("ia3", "mean")])
def test_linear_adapters_are_merged_exactly(root, tmp_path, method, pooling):
    finetune(make_config(root, tmp_path / "tuned", method=method, pooling=pooling, learning_rate=0.03))
    said = []
    assert merge(tmp_path / "tuned", tmp_path / "whole", say=said.append) == {"exact": True}
    assert doubts.merged(tmp_path / "whole") is None
    model, _ = load(tmp_path / "whole")
    before = load(tmp_path / "tuned")[0]
    torch.testing.assert_close(outputs(model), outputs(before), rtol=0, atol=1e-5)
    with before.disable_adapter():
        assert (outputs(model) - outputs(before)).abs().max() > 1e-3
    assert not hasattr(model, "peft_config") and said == ["the adapter was merged into the weights"]
    if pooling == "model":
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
        assert torch.equal(outputs(plain), outputs(model))
    with pytest.raises(ValueError, match="has no adapter to merge; it is a whole model already"):
        merge(tmp_path / "whole", tmp_path / "again")


@pytest.fixture(scope="module")
def tuned(root):
    """A folder with an SNNK adapter, which is not linear, and texts."""
    finetune(make_config(root, root / "snnk", method="snnk", num_features=4, max_steps=0, epochs=None))
    file, generator = root / "snnk" / "adapter_model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name in sorted(name for name in tensors if name.endswith("snnk_adapter.weight")):
        tensors[name] += 0.1 * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, file)
    (root / "texts.txt").write_text("\n".join(make_texts(400)) + "\n")
    return root / "snnk"


def logits(model):
    """Outputs for texts like those of the calibration."""
    with torch.inference_mode():
        return model(**make_tokenizer()(make_texts(40, seed=5), padding=True, return_tensors="pt")).logits


def test_of_an_snnk_adapter_the_nearest_lora_adapter_is_merged(tuned, root, tmp_path):
    found = merge(tuned, tmp_path / "whole", calibration=root / "texts.txt", max_loss=0.5)
    assert not found["exact"] and found["rank"] == 4 and 0.3 < found["explained"] < 1 and 0 <= found["loss"] <= 0.5
    (before, _), (after, _) = load(tuned), load(tmp_path / "whole")
    expected = logits(before)
    for name, p in before.named_parameters():
        if name.endswith("snnk_adapter.default.weight"):
            p.data.zero_()
    assert (logits(after) - expected).norm() < 0.7 * (logits(before) - expected).norm()
    assert json.loads((tmp_path / "whole" / "metrics.json").read_text())["merged"] == found
    card = (tmp_path / "whole" / "README.md").read_text()
    assert f"explains {found['explained']:.1%} of its effect" in card
    options = {"keep": 0.5, "refine": 0, "recover": 0, "widen": False}
    report = compress(tmp_path / "whole", root / "texts.txt", out=tmp_path / "small", **options)
    assert any(f"this loses {found['loss']:.4f} on" in warning for warning in report["warnings"])


def test_a_merge_that_changes_too_much_is_refused(tuned, root, tmp_path):
    with pytest.raises(ValueError, match=r"the loss of merging .* is above 1e-09; calibrate with .* the method lora"):
        merge(tuned, tmp_path / "whole", calibration=root / "texts.txt", max_loss=1e-9)
    assert list(tmp_path.iterdir()) == []


def test_a_mean_pooled_model_is_compressed_and_predicts(quick, tuned, root, tmp_path):
    merge(tuned, tmp_path / "whole", calibration=root / "texts.txt", max_loss=0.5)
    assert class_of(read_config(tmp_path / "whole")).__name__ == "MeanPooledBertForSequenceClassification"
    found = compress(
        tmp_path / "whole",
        root / "texts.txt",
        out=tmp_path / "small",
        keep=0.9,
        recover=0,
        refine=0,
        joint=False,
        widen=False,
    )
    assert found["saved_as"]["format"] == "snnk" and "means over tokens" in found["saved_as"]["reason"]
    big, small = (outputs(load(tmp_path / name)[0]) for name in ("whole", "small"))
    assert 0 < (big - small).norm() < 0.5 * big.norm()
    done = predict(tmp_path / "small", root / "test.tsv", out=tmp_path / "p.csv")
    assert done.rows == 60 and done.score["accuracy"] > 0.5
    block = (tmp_path / "small" / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    shutil.move(tmp_path / "small", tmp_path / "this folder")
    scope = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(compile(block, "README.md", "exec"), scope)
    assert torch.equal(outputs(scope["model"]), small)


@pytest.mark.parametrize("pooling", ["layers", "neurons"])
def test_merged_scales_leave_what_the_classifier_reads(root, tmp_path, pooling):
    """IA3 scales neurons behind the activation, and its merge moves the scales into the layer behind."""
    done = finetune(make_config(root, tmp_path / "ia3", method="ia3", pooling=pooling, learning_rate=0.1))
    assert merge(tmp_path / "ia3", tmp_path / "whole")["exact"]
    torch.testing.assert_close(outputs(load(tmp_path / "whole")[0]), outputs(done.model), atol=1e-5, rtol=1e-5)


OPTIONS = {"keep": 0.75, "recover": 0, "refine": 0, "joint": False, "widen": False}


def test_neurons_that_a_classifier_reads_are_not_removed(tuned, root, tmp_path):
    finetune(make_config(root, tmp_path / "tuned", method="closed-form", pooling="neurons", epochs=None))
    with pytest.raises(ValueError, match=r"reads neurons that compression would remove: tune with pooling 'layers'"):
        compress(tmp_path / "tuned", root / "texts.txt", out=tmp_path / "small", **OPTIONS)
    assert not (tmp_path / "small").exists()
    model, _ = load(tmp_path / "tuned")
    with pytest.raises(ValueError, match="reads neurons that compression would remove"):
        compress_(model, plan(model, keep=0.75), [{"input_ids": torch.randint(3, 43, (8, 16))}] * 10)


@pytest.mark.once
def test_what_that_message_advises_works(quick, tuned, root, tmp_path):
    for pooling in ("layers", "neurons"):
        finetune(make_config(root, tmp_path / pooling, method="closed-form", pooling=pooling, epochs=None))
    compress(tmp_path / "layers", root / "texts.txt", out=tmp_path / "small", **OPTIONS)
    export(tmp_path / "neurons", root / "texts.txt", to="onnx-int8", out=tmp_path / "served")
    assert list((tmp_path / "served").rglob("*.onnx"))


def test_a_model_of_pairs_is_marked_as_one(tmp_path):
    """compress then reads general text as pairs, and warns of single texts."""
    texts = make_texts(80)
    rows = [f"{a}\t{b}\t{len(a) > len(b)}" for a, b in zip(texts, texts[::-1], strict=True)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["one\ttwo\tlabel", *rows]) + "\n")
    save(transformers.BertModel, tmp_path / "bert", vocab_size=len(make_english()))
    options = {"train": str(tmp_path / "pairs.tsv"), "test": None, "text": "one", "text_pair": "two", "max_steps": 1}
    for method in ("lora", "full"):
        finetune(make_config(tmp_path, tmp_path / method, method=method, **options))
    merge(tmp_path / "lora", tmp_path / "whole")
    assert reads_pairs(read_config(tmp_path / "whole")) and reads_pairs(read_config(tmp_path / "full"))
    assert not reads_pairs(read_config(tmp_path / "bert"))


def test_the_code_of_the_page_on_tuned_models_runs(root, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "tuned.md").read_text()
    save(transformers.BertForMaskedLM, tmp_path / "bert")
    shutil.copy(root / "train.tsv", tmp_path)
    options = {"test": None, "method": "snnk-tuned", "num_features": 2, "max_steps": 4, "learning_rate": 1e-3}
    finetune(make_config(tmp_path, tmp_path / "tuned", pooling="model", **options))
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(400)) + "\n")
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, "tuned.md", "exec"), names)
    assert len(blocks) == 3 and float(names["probabilities"].sum()) == pytest.approx(1)
    assert names["nearest"].config.r == 8
    expected = logits(load("tuned")[0])
    merged = [transformers.AutoModelForSequenceClassification.from_pretrained(f) for f in ("merged", "whole")]
    for model in merged:
        assert (logits(model.eval()) - expected).norm() < 0.2 * expected.norm()
