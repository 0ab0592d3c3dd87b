"""plan and compress_: what can be kept exactly is kept exactly, what cannot is chosen, measured and reported."""

import copy
import json
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers as hf

from snnk.hf import Plan, compress_, find_ffns
from snnk.hf import plan as plan_all
from snnk.hf.compression.distill import Recovery
from snnk.hf.compression.ffn import PENALTY, _solve, fit_ffn
from snnk.hf.compression.outputs import VECTORS, outputs_of
from snnk.hf.compression.plans import BlockPlan
from snnk.hf.compression.targets import Tokens
from snnk.hf.record import observe
from snnk.ridge.sums import RidgeStats

from helpers.architectures import ROWS, TOWERS, WIDTH, D, make, towers, width
from helpers.compression import explained, made_up_timings, some_batches, work_of

plan = partial(plan_all, blocks="ffn")  # attention has tests of its own


@torch.no_grad()
def outputs(model, batches):
    found = [model(**batch)[0] for batch in batches]
    masks = [batch.get("attention_mask") for batch in batches]
    return torch.cat([x.flatten(0, -2) if m is None else x[m.bool()] for x, m in zip(found, masks, strict=True)])


@torch.no_grad()
def double_neurons_(ffn):
    """Make the second half of the neurons a copy of the first: half of them can do all."""
    half = ffn.width // 2
    for weight in (ffn.up_weight(), ffn.gate_weight()):
        if weight is not None:
            weight[half:] = weight[:half]
    for bias in (ffn.up_bias(), ffn.gate_bias()):
        if bias is not None:
            bias[half:] = bias[:half]


REFINED = ("bert", "deberta-v2", "dinov2+swiglu", "gemma2", "gpt2", "llama", "opt", "phi3", "t5+gated", "whisper")


@pytest.mark.parametrize(("row", "refine"), [*((row, 0) for row in ROWS), *((row, 30) for row in REFINED)])
def test_what_half_the_neurons_can_do_is_kept(row, refine):
    model, batches = make(row), some_batches(row)
    for ffn in find_ffns(model):
        double_neurons_(ffn)
    before = outputs(model, batches)
    report = compress_(model, plan(model, keep=0.5), batches, refine=refine)
    assert [(b.kind, b.num_features, b.refused) for b in report.blocks] == [("atoms", width(row) // 2, False)] * 2
    assert max(b.error for b in report.blocks) < (1e-4 if refine == 0 else 1e-3)
    assert torch.allclose(outputs(model, batches), before, atol=5e-3 if refine == 0 else 5e-2)
    assert report.agreement["worst cosine"] > 0.999
    assert report.model_parameters == sum(p.numel() for p in model.parameters()) < report.model_parameters_before


@pytest.mark.parametrize("name", TOWERS)
def test_both_towers_are_compressed(name):
    """Half of the neurons can do all, in both towers; agreement compares the vectors of texts and images."""
    model = towers(name)
    batches = [text | image for text, image in zip(some_batches("bert"), some_batches("vit"), strict=True)]
    for ffn in find_ffns(model):
        double_neurons_(ffn)
    before = outputs_of(model, batches[0]).values[VECTORS]
    report = compress_(model, plan(model, keep=0.5), batches, refine=0)
    assert [b.name.partition(".")[0] for b in report.blocks] == ["text_model"] * 2 + ["vision_model"] * 2
    assert max(b.error for b in report.blocks) < 1e-4
    after = outputs_of(model, batches[0]).values[VECTORS]
    assert before.shape == (16, 2 * D) and torch.allclose(after, before, atol=5e-3)


def test_padding_does_not_count():
    found = []
    for padding in (0, 5):
        model = make("bert")
        report = compress_(model, plan(model, keep=0.25), some_batches(padding=padding), refine=20)
        found.append((report.tokens, find_ffns(model)[1].down_weight().detach()))
    assert found[0][0] == found[1][0]
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-2, atol=1e-3)


def test_later_blocks_repair_what_earlier_ones_lost():
    """The target is the original's residual stream, so a block that is kept small hurts less with repair behind it."""
    torch.manual_seed(0)
    model, batches = make("bert"), some_batches(count=30)
    before = outputs(model, batches)
    sizes = plan(model, keep=0.25)
    alone = make("bert")
    compress_(alone, Plan("bert", sizes.blocks[:1]), batches, refine=0)
    compress_(model, Plan("bert", (sizes.blocks[0], _all_neurons(sizes.blocks[1]))), batches, refine=0)
    lost, repaired = ((outputs(m, batches) - before).square().mean() for m in (alone, model))
    assert repaired < 0.97 * lost


def _all_neurons(block):
    return BlockPlan(block.name, "atoms", WIDTH, *list(vars(block).values())[3:])


def test_refining_lessens_the_error():
    errors = []
    for refine in (0, 100):
        model = make("bert")
        report = compress_(model, plan(model, keep=0.25, layers=[0]), some_batches(count=40), refine=refine)
        errors.append(report.blocks[0].error)
    assert errors[1] < 0.9 * errors[0] < 0.9


def test_refused_blocks_stay():
    model = make("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = compress_(model, plan(model, keep=0.25), some_batches("llama"), max_error=1e-9)
    assert all(b.refused and b.kind == "dense" and b.error > 1e-9 for b in report.blocks)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert not hasattr(model.config, "quantization_config")
    assert report.agreement["cosine"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", ["random-relu", "random-fourier"])
@pytest.mark.parametrize("row", ["bert", "llama", "vit"])
def test_random_features(row, kind, tmp_path):
    """Enough of them do well; every block has its own; loaded again they do the same."""
    model, batches = make(row), some_batches(row, count=40)
    report = compress_(model, plan(model, keep=0.99, feature_map=kind), batches)
    first, second = (ffn.slot("up").map.projection for ffn in find_ffns(model))
    assert not torch.allclose(first / first.norm(), second / second.norm(), atol=1e-2)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(hf.AutoModel.from_pretrained(tmp_path), batches[:2]), outputs(model, batches[:2]))
    assert all(b.kind == kind for b in plan(make(row), keep=0.5, feature_map=kind).blocks)
    assert all(b.error < 0.9 for b in report.blocks) and report.agreement["cosine"] > 0.9


def test_bfloat16_and_heads():
    model = make("bert", hf.AutoModelForSequenceClassification, num_labels=3).bfloat16()
    report = compress_(model, plan(model, keep=0.5), some_batches(), refine=20)
    assert find_ffns(model)[0].up_weight().dtype == torch.bfloat16
    assert set(report.agreement) == {"cosine", "worst cosine", "KL divergence", "same best"}
    assert 0 <= report.agreement["KL divergence"] < 0.1
    causal = make("gpt2", hf.AutoModelForCausalLM)
    report = compress_(causal, plan(causal, keep=0.5), some_batches(), refine=20)
    assert report.agreement["same next token"] > 0.5
    assert report.agreement["perplexity"] < 1.1 * report.agreement["original perplexity"]


def test_recovery_brings_the_outputs_nearer_and_trains_nothing_else():
    batches, found = some_batches(count=20), []
    for recover in (0, 60):
        model = make("bert")
        before, other = outputs(model, batches), model.embeddings.word_embeddings.weight.clone()
        compress_(model, plan(model, keep=0.125), batches, refine=0, recover=recover)
        found.append(float((outputs(model, batches) - before).square().mean()))
        assert torch.equal(model.embeddings.word_embeddings.weight, other)
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert found[1] < 0.9 * found[0]


def test_the_distillation_reads_lessons_in_place_of_those_of_the_fit(monkeypatch):
    seen, chosen = [], []

    def note(model, teacher, replaced, batches, held_out, **options):
        seen.extend(batches)
        chosen.append(held_out)
        return Recovery()

    monkeypatch.setattr("snnk.hf.compression.blocks.recover_", note)
    model, batches, lessons = make("bert"), some_batches(count=20), some_batches(count=20, seed=5)
    more = some_batches(count=18, seed=6)
    options = {"refine": 0, "recover": 3, "more": more}
    compress_(model, plan(model, keep=0.5), batches, lessons=[None, *lessons[1:]], **options)
    fitted = [i for i in range(1, 20) if i % 10 != 9]
    assert list(map(id, seen)) == list(map(id, [*(lessons[i] for i in fitted), *more[16:]]))
    seen.clear()
    few = [batch if i % 5 == 1 else None for i, batch in enumerate(lessons)]  # few texts in much other text
    compress_(make("bert"), plan(make("bert"), keep=0.5), batches, lessons=few, refine=0, recover=3)
    assert list(map(id, seen)) == [id(few[i]) for i in (1, 6, 11)] and chosen[-1] == [few[16]]
    with pytest.raises(ValueError, match="lessons must have one batch for each of the 20 batches; got 3"):
        compress_(make("bert"), plan(make("bert"), keep=0.5), batches, lessons=lessons[:3], **options)


def test_saved_and_loaded(tmp_path):
    import snnk.hf  # noqa: F401

    model, batches = make("bert"), some_batches()
    report = compress_(model, plan(model, keep=0.5, batches=batches), batches)
    model.save_pretrained(tmp_path / "m")
    assert torch.allclose(outputs(hf.AutoModel.from_pretrained(tmp_path / "m"), batches), outputs(model, batches))
    json.dumps(report.to_dict())
    assert "on 16 held-out inputs" in str(report) and "encoder.layer.1" in str(report)


def test_plan_without_batches():
    model = make("bert")
    sizes = plan(model, keep=0.25)
    assert [(b.kind, b.num_features, b.width) for b in sizes.blocks] == [("atoms", WIDTH // 4, WIDTH)] * 2
    block, ffn = sizes.blocks[0], find_ffns(model)[0]
    assert block.parameters_before == ffn.num_parameters == 16 * 32 + 32 + 32 * 16 + 16
    assert (block.parameters, block.multiply_adds) == (16 * 8 + 8 + 8 * 16 + 16, 2 * 16 * 8)
    assert [b.name for b in plan(model, keep=0.5, layers="top-1").blocks] == ["encoder.layer.1"]
    assert [b.name for b in plan(model, keep=0.5, layers=[0]).blocks] == ["encoder.layer.0"]
    assert [b.kind for b in plan(model, keep=1.0).blocks] == ["dense", "dense"]
    assert "encoder.layer.0" in str(sizes) and ffn.kind == "dense"


def test_targets_are_met():
    model = make("bert")
    size = sum(p.numel() * 4 for p in model.parameters())
    work = work_of(model)
    small = plan(model, target_size=size - 4000)
    fast = plan(model, target_speedup=1.3, timings=made_up_timings(model))
    compress_(model, small, some_batches(), refine=0)
    assert 0.95 * (size - 4000) < sum(p.numel() * 4 for p in model.parameters()) <= size - 4000
    model = make("bert")
    compress_(model, fast, some_batches(), refine=0)
    assert 1.3 <= work / work_of(model) < 1.45


def test_joint_plan_finds_constants_and_linear_maps():
    """One block always gives the same, one is linear where its inputs are: neither needs a neuron."""
    model = make("bert", num_hidden_layers=4)
    ffns = find_ffns(model)
    with torch.no_grad():
        ffns[0].down_weight().zero_()
        ffns[1].up_bias().add_(30)  # gelu(z) = z there
    batches = some_batches(count=30)
    before = outputs(model, batches)
    sizes = plan(model, keep=0.6, batches=batches)
    kinds = [b.kind for b in sizes.blocks]
    assert kinds[:2] == ["drop", "linear"] and set(kinds[2:]) <= {"atoms", "dense"}
    assert sum(b.parameters for b in sizes.blocks) <= 0.6 * sum(b.parameters_before for b in sizes.blocks)
    compress_(model, Plan("bert", sizes.blocks[:2]), batches)
    assert torch.allclose(outputs(model, batches), before, atol=2e-2)


def test_joint_plan_predicts_the_error():
    model, batches = make("bert", num_hidden_layers=1), some_batches(count=60)
    with torch.no_grad():
        find_ffns(model)[0].up_weight().mul_(8)  # far from linear
    sizes = plan(model, keep=0.6, batches=batches)
    assert sizes.blocks[0].kind == "atoms"
    report = compress_(model, sizes, batches, refine=0)
    assert report.blocks[0].error == pytest.approx(sizes.blocks[0].predicted_error, rel=0.3)


def test_a_plan_is_json(tmp_path):
    sizes = plan(make("bert"), keep=0.25, batches=some_batches())
    sizes.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == sizes
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no.json is no plan of snnk: a plan has the format"):
        Plan.load(tmp_path / "no.json")
    with pytest.raises(ValueError, match=r"the plan is for a 'bert' model with blocks .* this is a 'llama' model"):
        compress_(make("llama"), sizes, some_batches("llama"))
    with pytest.raises(ValueError, match="the plan is for a 'bert' model"):
        compress_(make("bert", intermediate_size=64), sizes, some_batches())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.0}, "keep must be above 0 and at most 1; got 0.0"),
        ({"keep": 1.5}, "keep must be above 0 and at most 1; got 1.5"),
        ({}, "give one of keep, target_size, target_speedup"),
        ({"keep": 0.5, "target_size": "1MB"}, "give one of keep, target_size, target_speedup"),
        ({"target_size": "2kB"}, "target_size 2kB cannot be reached: without these blocks the model takes"),
        ({"target_size": "small"}, "target_size must be like '200MB' or a positive number of bytes; got 'small'"),
        ({"keep": 0.5, "layers": "top-3"}, "layers can be 'top-2' at most, as there are 2; got 'top-3'"),
        ({"keep": 0.5, "layers": [2]}, r"layers must be among 0 to 1; got \[2\]"),
        ({"keep": 0.5, "feature_map": "atom"}, "unknown feature_map 'atom'; did you mean 'atoms'"),
        ({"keep": 0.5, "feature_map": "random-relu", "batches": [{}]}, "numbers are chosen jointly for atoms only"),
        ({"keep": 0.5, "batches": []}, "there are no batches to calibrate with"),
    ],
)
@pytest.mark.once
def test_bad_plans(options, message):
    with pytest.raises(ValueError, match=message):
        plan(make("bert"), **options)


@pytest.mark.once
def test_bad_batches():
    model = make("bert")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sizes = plan(model, keep=0.5)
    with pytest.raises(ValueError, match="at least two batches are needed, one of them held out; got 0"):
        compress_(model, sizes, [])
    with pytest.raises(ValueError, match="15 tokens are too few to fit 16 features; give at least 32, better 160"):
        compress_(model, sizes, some_batches(count=2, size=2))
    with pytest.raises(TypeError, match="a batch must be a dict of the model's inputs; got Tensor"):
        compress_(model, sizes, [torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="were replaced before; start from the original model"):
        twice = make("bert")
        compress_(twice, plan(twice, keep=0.5, feature_map="random-relu"), some_batches())
        plan(twice, keep=0.5)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": 0.5}, r"plan must be a Plan, as snnk.hf.plan\(model, keep=0.5\) returns; got 0.5"),
        ({"refine": -1}, "refine must be a number of at least 0; got -1"),
        ({"refine": 1.5}, "refine must be an integer; got 1.5"),
        ({"recover": -2}, "recover must be a number of at least 0; got -2"),
        ({"recover": "always"}, "recover must be a number of steps or 'auto'; got 'always'"),
        ({"recover": 1.5}, "recover must be a number of steps or 'auto'; got 1.5"),
        ({"recover_minutes": 0}, "recover_minutes must be a positive number; got 0"),
        ({"max_error": -1}, "max_error must be a number of at least 0; got -1"),
        ({"max_error": float("nan")}, "max_error must be a number of at least 0; got nan"),
        ({"seed": "a"}, "seed must be an integer; got 'a'"),
        ({"max_tokens": 0}, "max_tokens must be a positive integer; got 0"),
        ({"batches": some_batches()[0]}, "batches must be a list of dicts of the model's inputs; got dict"),
        ({"batches": [{}]}, "a batch must hold the model's inputs as tensors"),
    ],
)
@pytest.mark.once
def test_bad_arguments(options, message):
    model = make("bert")
    with pytest.raises((TypeError, ValueError), match=message):
        compress_(model, **{"plan": plan(model, keep=0.5), "batches": some_batches(), **options})


def test_two_tokens_for_each_number_to_be_fitted():
    """Counted as the model sees them: five for an image of 8 x 8 pixels; a linear map has as many as inputs."""
    model, images = make("vit"), some_batches("vit", count=2, size=3)
    sizes = plan(model, keep=0.25)
    with pytest.raises(ValueError, match="15 tokens are too few to fit 16 features"):
        compress_(model, Plan("vit", (replace(sizes.blocks[0], kind="linear", num_features=None),)), images)
    with pytest.raises(ValueError, match="15 tokens are too few to fit 8 features"):
        compress_(model, sizes, images)
    assert compress_(model, sizes, some_batches("vit", count=2, size=4), refine=0).tokens == 20
    model, text = make("bert"), some_batches(count=2, size=4)
    with pytest.raises(ValueError, match="30 tokens are too few to fit 16 features; give at least 32, better 160"):
        compress_(model, plan(model, keep=0.5), text)
    del text[0]["attention_mask"]
    assert compress_(model, plan(model, keep=0.5), text, refine=0).tokens == 36


def test_the_same_batch_again_and_again():
    model = make("bert")
    report = compress_(model, plan(model, keep=0.25), some_batches(count=1) * 20, refine=0)
    assert (report.tokens, report.held_out_tokens) == (18 * 120, 2 * 120)


@pytest.mark.parametrize("where", ["encoder.layer.0", "distilling, stage 1", "refining", "agreement"])
def test_whatever_stops_it_leaves_the_model_as_it_was(where, monkeypatch):
    model = make("bert").train()
    model.encoder.layer[0].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    modules = list(model.modules())
    calls = []

    def stop(what, *_):
        calls.append(what)
        if what == where:
            raise KeyboardInterrupt

    def stop_in_second_block(*args, **options):
        if len(calls) > 1:  # "original", then the first block
            raise KeyboardInterrupt

    if where in ("refining", "agreement"):
        name = "ffn.refine_" if where == "refining" else "blocks.agreement"
        monkeypatch.setattr(f"snnk.hf.compression.{name}", stop_in_second_block)
    with pytest.raises(KeyboardInterrupt):
        compress_(model, plan(model, keep=0.5), some_batches(), refine=2, recover=2, progress=stop)
    assert calls[1] == "encoder.layer.0"
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert list(model.modules()) == modules and [module.training for module in modules] == modes
    assert not hasattr(model.config, "quantization_config")


def test_training_mode_holds_for_new_modules_too():
    model = make("bert").train()
    model.encoder.layer[0].eval()
    compress_(model, plan(model, keep=0.5), some_batches(), refine=0)
    assert [find_ffns(model)[i].slot("down").training for i in (0, 1)] == [False, True]


@torch.no_grad()
def block_error(original, model, batches):
    """Definition, in float64, for a BERT of one layer: sum w |gamma (found - wanted)|^2 over that of wanted - mean."""
    wanted, found, weight = [], [], []
    for batch in batches:
        mask, seen = batch["attention_mask"].bool(), []
        with observe(find_ffns(original), lambda _, s, seen=seen: seen.append(s)):
            original(**batch)
        wanted.append(seen[0].outputs[mask].double())
        found.append(find_ffns(model)[0].forward(seen[0].inputs[mask]).double())
        weight.append(1 / seen[0].sum[mask].double().var(1, correction=0))
    wanted, found, weight = torch.cat(wanted), torch.cat(found), torch.cat(weight)[:, None]
    gamma = original.encoder.layer[0].output.LayerNorm.weight.double()
    mean = (weight * wanted).sum(0) / weight.sum()
    wrong, all_of_it = ((weight * (gamma * (wanted - x)).square()).sum() for x in (found, mean))
    return float(wrong / all_of_it)


@pytest.mark.parametrize("recover", [0, 15])
def test_the_error_is_that_of_held_out_inputs_in_the_end(recover):
    """Many features and few tokens: what was fitted to has a smaller error."""
    model, batches = make("bert", num_hidden_layers=1), some_batches(count=3, size=6)
    original = copy.deepcopy(model)
    more = some_batches(count=16, size=6, seed=3)  # so that the choice of steps takes nothing out of the fit
    report = compress_(model, plan(model, keep=0.95), batches, refine=0, recover=recover, more=more)
    assert report.blocks[0].error == pytest.approx(block_error(original, model, batches[2:]), rel=1e-3)
    assert block_error(original, model, batches[:2]) < 0.7 * report.blocks[0].error


def test_held_out_inputs_are_not_fitted_to():
    found = []
    for held in (0, 1):
        model, batches = make("bert"), some_batches()
        batches[9] = some_batches(seed=5)[0] if held else batches[9]
        report = compress_(model, plan(model, keep=0.25), batches, refine=5, recover=5)
        found.append((report.blocks[0].error, model.state_dict()))
    assert found[0][0] != found[1][0]
    assert all(torch.equal(value, found[1][1][key]) for key, value in found[0][1].items())


@pytest.mark.parametrize("more", [0, 20])
def test_the_length_of_the_distillation_is_chosen_by_inputs_of_its_own(more, monkeypatch):
    """They are neither fitted to, nor trained on, nor measured on."""
    given = {}

    def recover(model, teacher, new, training, choosing, **options):
        given.update(training=training, choosing=choosing)
        return Recovery()

    monkeypatch.setattr("snnk.hf.compression.blocks.recover_", recover)
    model, batches = make("bert"), some_batches(count=30)
    further = some_batches(count=more, seed=7)
    report = compress_(model, plan(model, keep=0.25), batches, refine=0, recover="auto", more=further)
    held = batches[9::10]
    assert report.held_out_tokens == 3 * 120
    if more:
        choosing, training = further[:16], [b for b in batches if not among(b, held)] + further[16:]
    else:
        rest = [b for b in batches if not among(b, held)]
        choosing, training = rest[9::10], [b for i, b in enumerate(rest) if i % 10 != 9]
    assert [id(b) for b in given["choosing"]] == [id(b) for b in choosing]
    assert [id(b) for b in given["training"]] == [id(b) for b in training]
    assert report.tokens == 120 * (27 if more else 25)


def among(batch, batches):
    return any(batch is other for other in batches)


def test_errors_that_are_no_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(Tokens, "error", lambda self, ffn: float("nan"))
    model = make("bert")
    report = compress_(model, plan(model, keep=0.5), some_batches(), refine=0, max_error=1e9)
    assert all(b.refused and b.error != b.error for b in report.blocks)
    assert [ffn.kind for ffn in find_ffns(model)] == ["dense", "dense"]


def test_the_seed_is_that_of_refining():
    found = []
    for seed in (0, 0, 1):
        model = make("bert")
        compress_(model, plan(model, keep=0.25, layers=[0]), some_batches(count=20), refine=10, seed=seed)
        found.append(find_ffns(model)[0].up_weight().detach())
    assert torch.equal(found[0], found[1]) and float((found[0] - found[2]).abs().max()) > 1e-4


def test_drop_is_the_weighted_mean():
    model, batches = make("bert", num_hidden_layers=1), some_batches()
    original = copy.deepcopy(model)
    block = replace(plan(model, keep=0.5).blocks[0], kind="drop", num_features=None)
    report = compress_(model, Plan("bert", (block,)), batches)
    training = batches[:9] + batches[10:]
    assert block_error(original, model, training) == pytest.approx(1, abs=1e-5)
    assert report.blocks[0].error == pytest.approx(1, abs=0.1)
    find_ffns(model)[0].slot("down").bias.data.zero_()
    assert block_error(original, model, training) > 1.1


def made_rows(n=500):
    """Made-up rows for a block of the tiny BERT; the second half asks for something else, by almost no weight."""
    generator = torch.Generator().manual_seed(3)
    x, m = torch.randn(n, D, generator=generator), torch.randn(D, D, generator=generator)
    y = x @ m.T + 1
    y[n // 2 :] = torch.randn(n - n // 2, D, generator=generator) * 9
    weight = torch.where(torch.arange(n) < n // 2, torch.rand(n, generator=generator) + 0.5, 1e-9)
    return Tokens(x, y, weight, torch.ones(D)), m


def fit(ffn, kind, count, rows, refine=0):
    block = replace(plan(make("bert"), keep=0.5).blocks[0], kind=kind, num_features=count)
    with torch.no_grad(), ExitStack() as undo:
        new = fit_ffn(ffn, block, rows, refine, 0, undo)
        undo.pop_all()
    return new


def test_tokens_count_by_their_weights():
    rows, m = made_rows()
    new = fit(find_ffns(make("bert"))[0], "linear", None, rows)
    assert torch.allclose(new.down.weight, m, atol=1e-2) and torch.allclose(new.down.bias, torch.ones(D), atol=1e-2)
    new = fit(find_ffns(make("bert"))[0], "drop", None, rows)
    assert torch.allclose(new.down.bias, rows.y[:250].T @ rows.weight[:250] / rows.weight[:250].sum(), atol=1e-4)


def test_atoms_are_chosen_for_outputs_by_their_scales():
    """Against brute force in float64: each atom is the best addition, for outputs as the next LayerNorm scales them."""
    rows, _ = made_rows()
    ffn, orders = find_ffns(make("bert"))[0], []
    phi = ffn.hidden(rows.x).double().detach()
    root = rows.weight.double().sqrt()[:, None]
    centre = lambda z: root * (z - (root**2 * z).sum(0) / (root**2).sum())  # noqa: E731
    for scale in (torch.ones(D), torch.logspace(-3, 3, D)):
        gram, cross = centre(phi).T @ centre(phi), centre(phi).T @ centre(rows.y.double() * scale)
        order, penalty = [], PENALTY * float(gram.diagonal().mean())
        for _ in range(6):
            rest = [j for j in range(WIDTH) if j not in order]
            order.append(max(rest, key=lambda j: explained(gram, cross, [*order, j], penalty)))
        orders.append(order)
        block = find_ffns(make("bert"))[0]
        old = block.up_weight()
        new = fit(block, "atoms", 6, replace(rows, scale=scale.float()))
        assert torch.equal(new.up.weight, old[order])
    assert orders[0] != orders[1]


def test_the_matrix_behind_moved_atoms_is_in_closed_form():
    rows, _ = made_rows()
    ffn = find_ffns(make("bert"))[0]
    old = ffn.up_weight()
    new = fit(ffn, "atoms", 8, rows, refine=10)
    assert not (new.up.weight[:, None] == old).all(-1).any()
    with torch.no_grad():
        phi = torch.cat([new.phi(rows.x), torch.ones(len(rows.x), 1)], 1).double()
    root = rows.weight.double().sqrt()[:, None]
    best = torch.linalg.lstsq(root * phi, root * rows.y.double()).solution
    assert float((new.down.weight.detach() - best[:-1].T).norm()) < 0.03 * float(best.norm())


def test_all_neurons_without_a_bias_are_fitted_without_one():
    """Features far from zero and a target with a mean: an intercept that is left out must not be fitted either."""
    ffn, rows = find_ffns(make("llama"))[0], 400
    generator = torch.Generator().manual_seed(0)
    phi, y = torch.rand(rows, WIDTH, generator=generator) + 1, torch.randn(rows, D, generator=generator) + 2
    new = fit(
        ffn, "atoms", WIDTH, Tokens(torch.randn(rows, D, generator=generator), y, torch.ones(rows), torch.ones(D))
    )
    assert new.down.bias is None
    _solve(new, RidgeStats(WIDTH, D).update(phi, y))
    best = torch.linalg.lstsq(phi.double(), y.double()).solution
    errors = [float((phi.double() @ a - y).square().sum()) for a in (new.down.weight.double().T.detach(), best)]
    assert errors[1] <= errors[0] < 1.1 * errors[1]
