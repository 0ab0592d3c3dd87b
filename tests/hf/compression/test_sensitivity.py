"""Sensitivities of blocks against the KL divergence that a small change of their outputs causes."""

import pytest
import torch

from snnk.hf.compression import causal
from snnk.hf.compression.sensitivity import sensitivities
from snnk.hf.finding import find_ffns
from snnk.hf.record import recording

from helpers.heads import make


def batch(texts, tokens=8, seed=0):
    return {"input_ids": torch.randint(43, (texts, tokens), generator=torch.Generator().manual_seed(seed))}


@torch.no_grad()
def divergence(model, layer, inputs, part, draws=200):
    """The KL divergence per token if a layer's outputs deviate from their mean a little more or less, by chance."""
    generator = torch.Generator().manual_seed(1)
    before = model(**inputs).logits[:, :-1].double().log_softmax(-1)
    found = []
    for _ in range(draws):
        sign = torch.randint(2, (*inputs["input_ids"].shape, 1), generator=generator) * 2.0 - 1
        with recording({"": layer}, lambda _, x, y, sign=sign: y + part * sign * (y - y.flatten(0, 1).mean(0))):
            after = model(**inputs).logits[:, :-1].double().log_softmax(-1)
        found.append(float((before.exp() * (before - after)).sum(-1).mean()))
    return torch.tensor(found)


def test_small_changes_cost_what_the_second_order_predicts():
    """The difference of two means is within five standard errors, which are below a tenth, and a third order of 2 %."""
    model, inputs = make("LlamaForCausalLM", initializer_range=0.3, mlp_bias=True).double(), batch(24)
    ffns = find_ffns(model)
    for ffn in ffns:  # a constant part, which a constant in place of the block would keep
        ffn.down_bias().data.copy_(torch.linspace(-1, 1, ffn.out_features))
    draws = [sensitivities(model, ffns, [inputs], seed=seed) for seed in range(40)]
    for ffn in ffns:
        predicted = torch.tensor([found[ffn.name] for found in draws])
        measured = divergence(model, ffn.slot("down"), inputs, 0.01) / 0.01**2
        error = float((predicted.var() / len(predicted) + measured.var() / len(measured)).sqrt())
        assert error < 0.1 * measured.mean()
        assert abs(float(predicted.mean() - measured.mean())) < 5 * error + 0.02 * float(measured.mean())


def test_padding_does_not_count_and_texts_may_come_one_by_one(monkeypatch):
    model, inputs = make("LlamaForCausalLM"), batch(3)
    ffns = find_ffns(model)
    wide = {"input_ids": torch.nn.functional.pad(inputs["input_ids"], (0, 4)), "attention_mask": torch.ones(3, 12)}
    wide["attention_mask"][:, 8:] = 0
    exact = sensitivities(model, ffns, [inputs])
    assert sensitivities(model, ffns, [wide]) == pytest.approx(exact, rel=1e-4)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda _, args, out: seen.append(len(out)))
    monkeypatch.setattr(causal, "MOST_LOGITS", 1)
    sensitivities(model, ffns, [inputs])
    hook.remove()
    assert seen == [1, 1, 1]


def test_the_model_stays_as_it_was_and_few_batches_are_read():
    model = make("LlamaForCausalLM").train()
    model.lm_head.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}

    def endless():
        while True:
            yield batch(128, 16)

    sensitivities(model, find_ffns(model), endless())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before and model.training
    assert all(p.grad is None for p in model.parameters())
