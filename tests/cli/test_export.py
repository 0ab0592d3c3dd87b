"""`snnk export` of folders that `snnk finetune` wrote."""

import numpy as np
import pytest
import torch

from snnk.finetune import load

from helpers.texts import make_texts, make_tokenizer


def test_an_adapter_is_merged_into_the_graph(run, bert, texts, tmp_path):
    """Its classifier reads the mean of all tokens, which no class of transformers does."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    tune = "--method", "lora", "--max-steps", 2, "--train", tmp_path / "train.tsv", "--pooling", "mean"
    assert run("finetune", bert, *tune, "--out", tmp_path / "tuned")[0] == 0
    options = "--to", "onnx", "--calibration", texts, "--out", tmp_path / "served"
    code, out, err = run("export", tmp_path / "tuned", *options)
    assert code == 0, err
    assert "the adapter was merged into the weights" in out
    session = onnxruntime.InferenceSession(tmp_path / "served" / "onnx" / "model.onnx")
    inputs = make_tokenizer()(make_texts(5), padding=True, return_tensors="np")
    names = [x.name for x in session.get_inputs()]
    (found,) = session.run(["logits"], {name: inputs[name].astype(np.int64) for name in names})
    with torch.no_grad():
        expected = load(tmp_path / "tuned")[0](**make_tokenizer()(make_texts(5), padding=True, return_tensors="pt"))
    np.testing.assert_allclose(found, expected.logits.numpy(), atol=1e-4)
    assert np.ptp(found, axis=0).min() > 1e-3


def test_options_hold_for_the_merge_too(run, bert, texts, tmp_path, monkeypatch):
    """They are checked before it."""
    tune = "--method", "lora", "--max-steps", 1, "--train", tmp_path / "train.tsv"
    assert run("finetune", bert, *tune, "--out", tmp_path / "tuned")[0] == 0
    given = []

    def stop(*args, max_loss, seed, **others):
        given.append((max_loss, seed))
        raise ValueError("merged")

    monkeypatch.setattr("snnk.finetune.merge", stop)
    for command in (("export", "--to", "onnx"), ("compress",)):
        call = command[0], tmp_path / "tuned", *command[1:], "--calibration", texts, "--out", tmp_path / "out"
        wrong = ("--max-loss", -1) if command[0] == "export" else ("--keep", 2)
        code, _, err = run(*call, *wrong)
        assert code == 2 and "merged" not in err, err
        code, _, err = run(*call, "--max-loss", 0.2, "--seed", 7)
        assert code == 2 and "merged" in err, err
    assert given == [(0.2, 7)] * 2
