"""Next tokens of decoders against logits of the whole batch, and with few logits at a time."""

import copy
import math

import pytest
import torch
import transformers as hf

from snnk.hf import compress_, plan
from snnk.hf.compression import causal, distance, sensitivity
from snnk.hf.compression.agreement import compare
from snnk.hf.compression.causal import NEXT, is_causal, next_tokens
from snnk.hf.compression.outputs import outputs_of, read

from helpers.architectures import perturb_
from helpers.compression import some_batches
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


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM"])
def test_logits_at_few_positions(monkeypatch, name):
    """All of them if they fit, otherwise every second position; padding is left out."""
    options = {"ffn_dim": 16, "word_embed_proj_dim": 8} if name.startswith("OPT") else {}
    model, seen = make(name, **options), []
    with torch.no_grad():
        whole = model(**BATCH).logits
        found = read(model, BATCH)
        torch.testing.assert_close(found.logits["logits"], whole[MASK.bool()])
        assert found.inputs["logits"].tolist() == MASK.nonzero()[:, 0].tolist()
        hook = model.get_output_embeddings().register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
        monkeypatch.setattr(causal, "MOST_TAUGHT", 10 * 43)
        found = read(model, BATCH)
        hook.remove()
    some = MASK[:, [1, 3]].bool()
    torch.testing.assert_close(found.logits["logits"], whole[:, [1, 3]][some])
    assert found.inputs["logits"].tolist() == some.nonzero()[:, 0].tolist() and seen == [2]


def mark_as_gguf_(model):
    """What transformers leaves on a model that it has read from a GGUF file, also if it has unpacked the weights."""
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
    from transformers.utils.quantization_config import GgufConfig

    model.config.quantization_config = GgufConfig(gguf_file="model.gguf")
    model.config._is_quantized = model.is_quantized = True
    model.quantization_method = model.config.quantization_config.quant_method
    model.hf_quantizer = GgufHfQuantizer(model.config.quantization_config)
    return model


def test_a_model_from_gguf_is_compressed_and_saved(tmp_path):
    model = mark_as_gguf_(make("LlamaForCausalLM"))
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)
    compress_(model, plan(model, keep=0.5), some_batches("llama"), refine=0)
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**BATCH).logits, model(**BATCH).logits)
    assert model.half().dtype == torch.float16


def test_a_model_from_gguf_stays_as_it_was_after_an_error():
    model = mark_as_gguf_(make("LlamaForCausalLM"))
    config, quantizer = model.config.quantization_config, model.hf_quantizer

    def stop(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_(model, plan(model, keep=0.5), some_batches("llama"), refine=0, progress=stop)
    assert model.config.quantization_config is config and model.hf_quantizer is quantizer
    assert model.is_quantized and model.config._is_quantized and model.quantization_method == config.quant_method


def test_integers_of_a_gguf_file_are_refused():
    model = mark_as_gguf_(make("LlamaForCausalLM"))
    model.packed = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="quantized already"):
        compress_(model, plan(model, keep=0.5), some_batches("llama"), refine=0)


def test_the_fit_computes_no_logits(monkeypatch):
    """The plan computes those of a few batches, the fit none, and the held-out batch has some before and after."""
    model, rows = make("LlamaForCausalLM"), []
    model.lm_head.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    batches = some_batches("llama")
    monkeypatch.setattr(sensitivity, "TOKENS", 1)
    chosen = plan(model, keep=0.5, batches=batches)
    assert rows == [len(batches[0]["input_ids"])]
    rows.clear()
    compress_(model, chosen, batches, refine=10)
    assert rows == 2 * [len(batches[9]["input_ids"])]


def test_generation_with_a_cache_after_compression():
    model = make("LlamaForCausalLM")
    compress_(model, plan(model, keep=0.5), some_batches("llama"), refine=10)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    texts = {name: x[[0, 2]] for name, x in BATCH.items()}  # padding, if any, on the left
    cached, plain = (model.generate(**texts, use_cache=cache, **options) for cache in (True, False))
    assert cached.shape == (2, 13) and torch.equal(cached, plain)
    ids, with_cache = texts["input_ids"][:1], None
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        steps = []
        for t in range(ids.shape[1]):
            out = model(input_ids=ids[:, t : t + 1], past_key_values=with_cache, use_cache=True)
            with_cache = out.past_key_values
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("short", [True, False])
def test_recovery_in_bfloat16_where_that_is_fast(monkeypatch, short):
    monkeypatch.setattr(distance, "has_bfloat16", lambda device: short)
    model, dtypes = make("LlamaForCausalLM", initializer_range=0.3), set()
    original = copy.deepcopy(model)
    model.lm_head.register_forward_hook(lambda _, args, out: dtypes.add(out.dtype) if torch.is_grad_enabled() else None)
    options = {"recover": 160, "original": original, "refine": 0}
    report = compress_(model, plan(model, keep=0.5), some_batches("llama", count=24), **options)
    before, after = report.recovery.distances
    assert after < before
    assert dtypes == {torch.bfloat16 if short else torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
