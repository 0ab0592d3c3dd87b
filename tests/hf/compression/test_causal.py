"""Next tokens of decoders against logits of the whole batch, and with few logits at a time."""

import math

import pytest
import torch

from snnk.hf.compression import causal
from snnk.hf.compression.agreement import compare, outputs_of
from snnk.hf.compression.causal import NEXT, is_causal, next_tokens

from helpers.architectures import perturb_
from helpers.heads import make

IDS = torch.tensor([[2, 5, 6, 7, 8], [2, 8, 0, 0, 0], [0, 0, 2, 9, 10], [2, 0, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]])  # padding on both sides
BATCH = {"input_ids": IDS, "attention_mask": MASK}


@pytest.mark.parametrize(
    ("name", "options", "causal"),
    [
        ("LlamaForCausalLM", {}, True),
        ("GPT2LMHeadModel", {}, True),
        ("BertLMHeadModel", {}, False),  # attends to the whole text
        ("BertLMHeadModel", {"is_decoder": True}, True),
        ("BertForMaskedLM", {}, False),
        ("LlamaModel", {}, False),
        ("LlamaForSequenceClassification", {}, False),
    ],
)
def test_which_models_are_causal(name, options, causal):
    assert is_causal(make(name, **options)) == causal


def test_next_tokens_by_hand():
    model = make("LlamaForCausalLM")
    found, texts = next_tokens(model, BATCH)
    with torch.no_grad():
        logits = model(**BATCH).logits
    pairs = [(i, t) for i in range(4) for t in range(4) if MASK[i, t] and MASK[i, t + 1]]
    assert texts.tolist() == [i for i, _ in pairs] == [0, 0, 0, 0, 1, 2, 2]
    wanted = [[-float(logits[i, t].log_softmax(0)[IDS[i, t + 1]]), float(logits[i, t].argmax())] for i, t in pairs]
    torch.testing.assert_close(found, torch.tensor(wanted))


def test_perplexity_and_top_1_of_two_models():
    model = make("LlamaForCausalLM")
    before = outputs_of(model, BATCH)
    perturb_(model, scale=0.3)
    compared = compare([before], [outputs_of(model, BATCH)])
    found = compared.figures
    a, b = before.values[NEXT], next_tokens(model, BATCH)[0]
    assert found == {
        "original perplexity": pytest.approx(math.exp(float(a[:, 0].mean()))),
        "perplexity": pytest.approx(math.exp(float(b[:, 0].mean()))),
        "same next token": pytest.approx(float((a[:, 1] == b[:, 1]).float().mean())),
    }
    assert found["original perplexity"] != found["perplexity"]
    added = (b - a)[:, 0]
    each = {0: float(added[:4].mean()), 1: float(added[4]), 2: float(added[5:].mean())}  # text 3 has one token
    assert {case.input: case.value for case in compared.worst} == pytest.approx(each)
    assert (
        compared.quantiles["added surprisal"]["worst"] == compared.worst[0].value == pytest.approx(max(each.values()))
    )


def test_logits_of_few_sequences_are_in_memory(monkeypatch):
    """One sequence at a time if its logits fill the limit, with the same results."""
    model, seen = make("LlamaForCausalLM"), []
    wanted, _ = next_tokens(model, BATCH)
    hook = model.lm_head.register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape)))
    monkeypatch.setattr(causal, "MOST_LOGITS", 2 * 5 * 43)
    found, _ = next_tokens(model, BATCH)
    hook.remove()
    assert seen == [(2, 5, 43), (2, 5, 43)]
    torch.testing.assert_close(found, wanted)
