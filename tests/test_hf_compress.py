"""plan and compress_: what can be kept exactly is kept exactly, what cannot is chosen, measured and reported."""

import json

import pytest
import torch
import transformers as hf
from test_hf_architectures import IMAGES, ROWS, WIDTH, make

from snnk.hf import BlockPlan, Plan, compress_, find_ffns, plan


def some_batches(row="bert", count=12, size=16, seed=0, padding=0):
    """Text with sequences of two lengths, or images; `padding` more tokens of padding behind all of them."""
    generator = torch.Generator().manual_seed(seed)
    if row in IMAGES:
        return [{"pixel_values": torch.randn(size, 3, 8, 8, generator=generator)} for _ in range(count)]
    batches = []
    for _ in range(count):
        ids, mask = torch.randint(3, 40, (size, 9), generator=generator), torch.ones(size, 9, dtype=torch.long)
        mask[: size // 2, 6:] = 0
        more = torch.full((size, padding), 7)
        batches.append({"input_ids": torch.cat([ids, more], 1), "attention_mask": torch.cat([mask, 0 * more], 1)})
    return batches


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


@pytest.mark.parametrize("refine", [0, 30])
@pytest.mark.parametrize("row", ROWS)
def test_what_half_the_neurons_can_do_is_kept(row, refine):
    model, batches = make(row), some_batches(row)
    for ffn in find_ffns(model):
        double_neurons_(ffn)
    before = outputs(model, batches)
    report = compress_(model, plan(model, keep=0.5), batches, refine=refine)
    assert [(b.kind, b.num_features, b.refused) for b in report.blocks] == [("atoms", WIDTH // 2, False)] * 2
    assert max(b.error for b in report.blocks) < (1e-4 if refine == 0 else 1e-3)
    assert torch.allclose(outputs(model, batches), before, atol=5e-3 if refine == 0 else 5e-2)
    assert report.agreement["worst cosine"] > 0.999
    assert report.model_parameters == sum(p.numel() for p in model.parameters()) < report.model_parameters_before


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


@pytest.mark.parametrize("features", ["relu", "cos"])
@pytest.mark.parametrize("row", ["bert", "llama", "vit"])
def test_random_features(row, features):
    """Enough of them do well; loaded again they do the same."""
    model, batches = make(row), some_batches(row, count=40)
    report = compress_(model, plan(model, keep=0.99, features=features), batches)
    assert all(b.kind == features for b in plan(make(row), keep=0.5, features=features).blocks)
    assert all(b.error < 0.9 for b in report.blocks) and report.agreement["cosine"] > 0.9


def test_bfloat16_and_heads():
    model = make("bert", hf.AutoModelForSequenceClassification, num_labels=3).bfloat16()
    report = compress_(model, plan(model, keep=0.5), some_batches(), refine=20)
    assert find_ffns(model)[0].up_weight().dtype == torch.bfloat16
    assert set(report.agreement) == {"cosine", "worst cosine", "KL divergence", "same best"}
    assert 0 <= report.agreement["KL divergence"] < 0.1
    causal = make("gpt2", hf.AutoModelForCausalLM)
    report = compress_(causal, plan(causal, keep=0.5), some_batches(), refine=20)
    assert report.agreement["same best"] > 0.5


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


def test_saved_and_loaded(tmp_path):
    import snnk.hf  # noqa: F401

    model, batches = make("bert"), some_batches()
    report = compress_(model, plan(model, keep=0.5, batches=batches), batches)
    model.save_pretrained(tmp_path / "m")
    assert torch.allclose(outputs(hf.AutoModel.from_pretrained(tmp_path / "m"), batches), outputs(model, batches))
    json.dumps(report.to_dict())
    assert "held-out" in str(report) and "encoder.layer.1" in str(report)


def test_plan_without_batches():
    model = make("bert")
    sizes = plan(model, keep=0.25)
    assert [(b.kind, b.num_features, b.width) for b in sizes.blocks] == [("atoms", WIDTH // 4, WIDTH)] * 2
    block, ffn = sizes.blocks[0], find_ffns(model)[0]
    assert block.parameters_before == ffn.parameters == 16 * 32 + 32 + 32 * 16 + 16
    assert (block.parameters, block.multiply_adds) == (16 * 8 + 8 + 8 * 16 + 16, 2 * 16 * 8)
    assert [b.name for b in plan(model, keep=0.5, layers="top-1").blocks] == ["encoder.layer.1"]
    assert [b.name for b in plan(model, keep=0.5, layers=[0]).blocks] == ["encoder.layer.0"]
    assert [b.kind for b in plan(model, keep=1.0).blocks] == ["dense", "dense"]
    assert "encoder.layer.0" in str(sizes) and ffn.kind == "dense"


def test_targets_are_met():
    model = make("bert")
    size = sum(p.numel() * 4 for p in model.parameters())
    work = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    small, fast = plan(model, target_size=size - 4000), plan(model, target_speedup=1.3)
    compress_(model, small, some_batches(), refine=0)
    assert 0.95 * (size - 4000) < sum(p.numel() * 4 for p in model.parameters()) <= size - 4000
    model = make("bert")
    compress_(model, fast, some_batches(), refine=0)
    left = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert 1.3 <= work / left < 1.45


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
        ({"target_size": "small"}, "target_size must be like '200MB' or a number of bytes; got 'small'"),
        ({"target_speedup": 9.0}, "target_speedup must be from 1 to"),
        ({"keep": 0.5, "layers": "top-3"}, "layers must be 'all', 'top-1' to 'top-2', or a list; got 'top-3'"),
        ({"keep": 0.5, "layers": [2]}, r"layers must be among 0 to 1; got \[2\]"),
        ({"keep": 0.5, "features": "atom"}, "unknown features 'atom'; did you mean 'atoms'"),
        ({"keep": 0.5, "features": "relu", "batches": [{}]}, "counts are chosen jointly for atoms only"),
        ({"keep": 0.5, "batches": []}, "there were no batches to calibrate with"),
    ],
)
def test_bad_plans(options, message):
    with pytest.raises(ValueError, match=message):
        plan(make("bert"), **options)


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
    with pytest.raises(ValueError, match="were replaced already; start from the original model"):
        twice = make("bert")
        compress_(twice, plan(twice, keep=0.5, features="relu"), some_batches())
        plan(twice, keep=0.5)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
