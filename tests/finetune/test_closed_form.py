"""A classifier that is solved and not trained."""

import pytest
import torch

from snnk.experiments.lab import tiny
from snnk.finetune import FinetuneConfig, finetune, load
from snnk.finetune.scores import METRICS, best_offset
from snnk.hf.classify.means import read_layers

from helpers.tuning import make_config


def test_it_reads_neurons_in_one_pass_and_takes_no_step(root, tmp_path):
    said = []
    done = finetune(
        make_config(root, tmp_path / "out", method="closed-form", pooling=None, epochs=None), say=said.append
    )
    found, config = done.metrics, done.model.config
    depth = config.num_hidden_layers
    assert found["training"]["steps"] == 0 and found["config"]["pooling"] == "neurons"
    neurons, states = depth * config.intermediate_size, len(read_layers(depth)) * config.hidden_size
    assert done.model.classifier.in_features == neurons + states
    assert found["scores"]["validation"]["accuracy"] > 0.6  # of two classes
    start = found["classifier_start"]
    assert start["rows"] == found["data"]["rows"]["train"] and start["seconds"] > 0 and start["offset"] == 0.0
    assert any(line.startswith("the classifier has its closed form") for line in said)
    model, tokenizer = load(tmp_path / "out")
    batch = tokenizer(["w1 w2", "w3"], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, done.model(**batch).logits)


def test_it_is_fitted_to_as_many_rows_as_a_wide_classifier_takes(root, tmp_path, monkeypatch):
    monkeypatch.setattr("snnk.finetune.run.wide_rows", lambda features: 64)
    found = finetune(make_config(root, tmp_path / "out", method="closed-form", pooling="neurons", epochs=None))
    assert found.metrics["classifier_start"]["rows"] == 64


def test_the_threshold_is_that_of_the_best_metric(tmp_path):
    """CoLA's is the Matthews correlation: with few rows, the most probable class is nearly always the larger one."""
    model, data_dir = tiny.make_bert(tmp_path / "bert"), tiny.make_glue(tmp_path)
    config = FinetuneConfig(model, str(tmp_path / "out"), "closed-form", glue="cola", data_dir=data_dir)
    found = finetune(config).metrics
    assert found["classifier_start"]["offset"] != 0.0 and "do not estimate frequencies" in found["warnings"][0]


@pytest.mark.parametrize("metric", ["mcc", "f1", "macro_f1"])
def test_no_other_offset_is_better(metric):
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(60, 2, generator=generator), (torch.rand(60, generator=generator) < 0.2).long()
    logits[:, 1] += 2 * labels - 1.5

    def at(offset):
        return METRICS[metric]((logits[:, 1] - logits[:, 0] + offset > 0).long().numpy(), labels.numpy())

    best = best_offset(logits, labels, metric)
    assert at(best) == max(at(float(offset)) for offset in torch.linspace(-6, 6, 2000)) > at(0.0)
