"""plan: what comes from users and files is checked, targets are met or refused, and padding does not count."""

import json
from dataclasses import replace
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
import torch
import transformers as hf

from snnk.hf import Plan, compress_, find_ffns
from snnk.hf import plan as plan_all
from snnk.hf.compression import damage, planning
from snnk.hf.compression.damage import BlockSums, measure
from snnk.hf.compression.ffn import PENALTY
from snnk.hf.compression.planning import Budget, _allocate
from snnk.hf.compression.plans import BlockPlan
from snnk.hf.compression.targets import importance
from snnk.hf.finding import find_blocks
from snnk.hf.model_blocks import FFN
from snnk.hf.record import observe, tokens_of
from snnk.ridge.atoms import choose_atoms
from snnk.ridge.sums import RidgeStats

from helpers.architectures import TOWERS, WIDTH, conditional, make, towers
from helpers.compression import explained, made_up_timings, some_batches, work_of

plan = partial(plan_all, blocks="ffn")  # attention has tests of its own


@pytest.fixture(scope="module")
def bert():
    return make("bert")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "atom"}, "unknown kind of encoder.layer.0 'atom'; did you mean 'atoms'"),
        ({"kind": None}, "kind of encoder.layer.0 must be one of atoms"),
        ({"num_features": "8"}, "num_features of encoder.layer.0 must be a positive integer; got '8'"),
        ({"num_features": -3}, "must be a positive integer; got -3"),
        ({"num_features": None}, "must be a positive integer; got None"),
        ({"kind": "random-fourier", "num_features": 7}, "num_features must be even"),
        ({"kind": "linear", "num_features": 32}, r"\(linear\) has no features to count; got 32"),
        ({"parameters": "many"}, "parameters of encoder.layer.0 must be a positive integer; got 'many'"),
        (
            {"predicted_error": "small"},
            "predicted_error of encoder.layer.0 must be a number of at least 0; got 'small'",
        ),
        ({"name": 3}, "the name of a block must be a text; got 3"),
        ({"more": 1}, "a block of a plan has the keys kind, multiply_adds, .*'more': 1"),
    ],
)
def test_blocks_of_a_file_are_checked(bert, tmp_path, change, message):
    stored = plan(bert, keep=0.5).to_dict()
    stored["blocks"] = [{**stored["blocks"][0], **change}, *stored["blocks"][1:]]
    with pytest.raises((ValueError, TypeError), match=message):
        Plan.from_dict(stored)
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"plan.json is no plan of snnk: .*" + message):
        Plan.load(tmp_path / "plan.json")


def test_plans_of_files_are_checked(bert):
    stored = plan(bert, keep=0.5).to_dict()
    first = stored["blocks"][0]
    for wrong, message in [
        ([stored], r"a plan has the format 'snnk.Plan/1'; got 'list'"),
        ({**stored, "blocks": []}, "one or more blocks, each once; got none"),
        ({**stored, "blocks": [first, first]}, r"each once; got \['encoder.layer.0'\] twice"),
        ({**stored, "blocks": "all"}, "a model_type and a list of blocks; got 'bert' and str"),
        ({**stored, "blocks": ["all"]}, "a block of a plan has the keys"),
        ({**stored, "model_type": None}, "a model_type and a list of blocks; got None"),
    ]:
        with pytest.raises(ValueError, match=message):
            Plan.from_dict(wrong)


@pytest.mark.parametrize(("old", "new"), [("relu", "random-relu"), ("cos", "random-fourier")])
def test_plans_from_before_the_rename_load(bert, old, new):
    sizes = plan(bert, keep=0.5, feature_map=new)
    stored = json.loads(json.dumps(sizes.to_dict()).replace(new, old))
    assert old in str(stored) and new not in str(stored)
    assert Plan.from_dict(stored) == sizes


def test_a_plan_must_fit_the_model(bert):
    sizes = plan(bert, keep=0.5)
    with pytest.raises(ValueError, match=r"layer.0 \(32 wide, 1,072 parameters\).*layer.0 \(32 wide, 552 parameters\)"):
        sizes.check(make("bert", hidden_size=8))
    for kind, count, most in (("atoms", 33, 32), ("random-relu", 1000, 67)):
        large = replace(sizes.blocks[0], kind=kind, num_features=count)
        with pytest.raises(ValueError, match=f"has room for {most} {kind}; got num_features {count}"):
            Plan("bert", (large,)).check(bert)


def test_offloaded_models_are_refused(tmp_path):
    from accelerate import disk_offload

    model, batches = make("bert"), some_batches(count=2)
    sizes = plan(model, keep=0.5)
    disk_offload(model, tmp_path, execution_device="cpu")
    assert find_ffns(model)[0].up_weight().is_meta
    for do in (lambda: compress_(model, sizes, batches), lambda: plan(model, keep=0.5, batches=batches)):
        with pytest.raises(ValueError, match=r"layer.0 the first, are offloaded .* load the whole model into memory"):
            do()


def test_tokens_of():
    mask = torch.tensor([[[1, 1, 0], [1, 0, 0]]])  # one question with two answers
    assert tokens_of({"attention_mask": mask}, torch.Size([2, 3])).tolist() == [True, True, False, True, False, False]
    assert tokens_of({"pixel_values": mask, "attention_mask": mask}, torch.Size([1, 5]), masked=False).all()
    assert tokens_of({"input_ids": mask}, torch.Size([2, 2])).shape == (4,)
    with pytest.raises(ValueError, match=r"one entry for each of \(2, 4\) tokens; got shape \(1, 2, 3\)"):
        tokens_of({"attention_mask": mask}, torch.Size([2, 4]))


def test_padding_of_multiple_choice_does_not_count():
    """Behind four tokens of padding, or eight: what is fitted is the same."""
    found = []
    for padding in (4, 8):
        model = make("bert", hf.AutoModelForMultipleChoice)
        flat = some_batches(count=6, size=16, padding=padding)
        batches = [{key: value.view(8, 2, -1) for key, value in batch.items()} for batch in flat]
        report = compress_(model, plan(model, keep=0.25, layers=[0]), batches, refine=0)
        assert report.tokens == 5 * (8 * 9 + 8 * 6)
        found.append(find_ffns(model)[0].down_weight().detach())
    assert torch.allclose(*found, rtol=1e-3, atol=1e-4)


def test_padding_does_not_count_in_a_joint_plan(bert):
    a, b = (plan(bert, keep=0.4, batches=some_batches(padding=padding)) for padding in (0, 9))
    assert [(x.kind, x.num_features) for x in a.blocks] == [(x.kind, x.num_features) for x in b.blocks]
    errors = [[x.predicted_error for x in part.blocks] for part in (a, b)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_a_joint_plan_needs_tokens(bert):
    with pytest.raises(ValueError, match="60 tokens are too few to fit 32 features; give at least 64, better 320"):
        plan(bert, keep=0.3, batches=some_batches(count=2, size=4))


@pytest.mark.parametrize("name", TOWERS)
def test_both_towers_are_measured(name):
    """Whichever of them runs first."""
    model = towers(name)
    batches = [text | image for text, image in zip(some_batches("bert"), some_batches("vit"), strict=True)]
    blocks = find_blocks(model)
    found = measure(blocks, model, batches)
    for block, options in zip(blocks, found, strict=True):
        part = {key: batches[0][key] for key in batches[0] if (key == "pixel_values") == ("vision" in block.name)}
        tower = model.get_submodule(block.name.partition(".")[0])
        alone = find_blocks(tower)[block.index % 2 * 2 + isinstance(block, FFN)]
        inputs = [{key: batch[key] for key in part} for batch in batches]
        (wanted,) = measure([alone], tower, inputs)
        assert [damage for _, damage in options] == pytest.approx([damage for _, damage in wanted], rel=1e-6)
    assert {block.kind for block in plan_all(model, keep=0.5, batches=batches).blocks} - {"dense"}


def test_blocks_that_no_input_reaches_stay():
    model, batches = conditional(), some_batches()
    found = plan_all(model, keep=0.6, batches=batches)
    parts = {block.name.partition(".")[0]: [] for block in found.blocks}
    for block in found.blocks:
        parts[block.name.partition(".")[0]].append(block)
    assert {block.kind for block in parts["vision_tower"]} == {"dense"}
    assert {block.kind for block in parts["language_model"]} - {"dense"}
    report = compress_(model, found, batches, refine=0)
    assert [block.kind for block in report.blocks] == [block.kind for block in found.blocks]
    with pytest.raises(ValueError, match=r"input_ids, attention_mask, do not reach 4 of 8 .* vision_tower.*the first"):
        compress_(conditional(), plan_all(conditional(), keep=0.5), batches, refine=0)
    with pytest.raises(ValueError, match="reach none of 4 blocks"):
        plan_all(model, keep=0.5, batches=batches, layers=[0, 1])


def test_sums_that_do_not_fit_into_memory_together_are_measured_in_turns(bert, monkeypatch):
    blocks, batches = find_blocks(bert), some_batches()
    most = max(map(damage.sum_bytes, blocks))
    assert most == 8 * BlockSums(blocks[1]).stats.sums[:, 2:, 1:].numel()
    found, passes = [], []
    for memory in (None, damage.COPIES * most):
        monkeypatch.setattr(damage, "available_memory", lambda memory=memory: memory)
        passes.append(len(damage._parts(blocks, memory)))
        found.append(measure(blocks, bert, batches))
    assert passes == [1, 2] and [[choice for choice, _ in o] for o in found[0]] == [[c for c, _ in o] for o in found[1]]
    monkeypatch.setattr(damage, "available_memory", lambda: damage.COPIES * most - 1)
    with pytest.raises(ValueError, match=r"about 0\.0 GB of memory .*joint=False"):
        plan(bert, keep=0.5, batches=batches)


def test_importance_is_that_of_the_next_layer_norm():
    """Against the definition in float64: 1 / variance for tokens, LayerNorm's |gamma| times the block's |scale|."""
    for row, columns in (
        ("bert", lambda ffn: ffn.layer.output.LayerNorm.weight.abs()),
        ("dinov2", lambda ffn: ffn.layer.layer_scale2.lambda1.abs()),
        ("llama", lambda ffn: torch.ones(16)),
    ):
        ffn = find_ffns(make(row))[1]
        with torch.no_grad():
            for p in ffn.layer.parameters():
                p.mul_(torch.linspace(-2, 2, p.shape[-1]))
        stream = (
            torch.randn(50, 16, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 9, 50)[:, None] + 3
        )
        weight, scale = importance(ffn, stream)
        wanted = [1 / np.var(row) for row in stream.double().numpy()]
        assert torch.allclose(weight.double(), torch.tensor(wanted), rtol=1e-4)
        assert torch.allclose(scale, columns(ffn).detach()) and (row == "llama" or float(scale.std()) > 0.1)


def test_what_a_block_may_become_has_the_weighted_error_of_its_fit():
    """Every option against the rows themselves: tokens count by 1 / variance, outputs by the scale of the LayerNorm."""
    model, batches = make("bert", num_hidden_layers=1), some_batches(count=20)
    (ffn,) = find_ffns(model)
    with torch.no_grad():
        ffn.layer.output.LayerNorm.weight.copy_(torch.linspace(0.2, 3, 16))
        ffn.down_weight().mul_(torch.linspace(8, 72, 16)[:, None])
        for p in ffn.layer.attention.output.LayerNorm.parameters():
            p.mul_(8)  # inputs far larger than the features, whose penalty they must not change
        ffn.up_weight().mul_(4 / 8)
    rows = []
    with torch.no_grad(), observe([ffn], lambda _, seen: rows.append(seen)):
        for batch in batches:
            model(**batch)
    mask = torch.cat([batch["attention_mask"].bool().flatten() for batch in batches])
    x, y, stream = (torch.cat([getattr(r, n).flatten(0, 1) for r in rows])[mask] for n in ("inputs", "outputs", "sum"))
    with torch.no_grad():
        phi, x, y, w = ffn.hidden(x).double(), x.double(), y.double(), 1 / stream.double().var(1, correction=0)
    scale = torch.linspace(0.2, 3, 16, dtype=torch.float64)
    assert float(w.std() / w.mean()) > 0.3  # tokens that all count the same would show nothing

    def centred(v):
        return v - (w[:, None] * v).sum(0) / w.sum()

    def squared(error):
        return float((w[:, None] * (scale * error).square()).sum())

    total = squared(centred(y))
    linear = RidgeStats(16, 16).update(x.float(), y, w).solve("gcv")
    wanted = {("drop", None): 1.0, ("dense", None): 0.0, ("linear", None): squared(y - linear.predict(x)) / total}
    gram, cross = centred(phi).T @ (w[:, None] * phi), centred(phi).T @ (w[:, None] * y) * scale
    penalty = PENALTY * float(gram.diagonal().mean())
    order, _ = choose_atoms(gram, cross, WIDTH, penalty)
    for m in range(2, WIDTH, 2):
        wanted["atoms", m] = 1 - explained(gram, cross, order[:m].tolist(), penalty) / total
    (found,) = measure([ffn], model, batches)
    assert {(b.kind, b.num_features): b.predicted_error for b, _ in found} == pytest.approx(wanted, abs=1e-4)
    damages = {(b.kind, b.num_features): damage for b, damage in found}
    stream = stream.double() - stream.double().mean(1, keepdim=True)
    share = total / squared(stream)  # the error relative to what the next layer reads
    assert damages == pytest.approx({key: error * share for key, error in wanted.items()}, abs=1e-4 * share)


def option(cost, damage):
    return BlockPlan("b", "atoms", 2, 9, 99, cost, 99, cost), damage


def test_what_is_left_of_the_budget_is_spent():
    """A price alone buys nothing but ends of the convex hull: 1 + 1, then 21 + 1; 11 + 6 fit into 19."""
    first = [option(1, 10.0), option(11, 9.0), option(21, 0.0)]
    second = [option(1, 1.0), option(4, 0.9), option(6, 0.8), option(31, 0.0)]
    chosen = _allocate([first, second], Budget(19, attrgetter("parameters"), str))
    assert [block.parameters for block in chosen] == [11, 6]
    with pytest.raises(ValueError, match="the budget is 1, and the smallest choice for every block has 2; choose an"):
        _allocate([first, second], Budget(1, attrgetter("parameters"), str))


def test_a_joint_plan_leaves_less_than_a_step():
    model = make("bert", num_hidden_layers=4)
    sizes = plan(model, keep=0.3, batches=some_batches(count=12))
    left = 0.3 * sum(b.parameters_before for b in sizes.blocks) - sum(b.parameters for b in sizes.blocks)
    assert 0 <= left < 2 * (2 * 16 + 1) + 1  # two neurons more


@pytest.mark.parametrize(
    ("row", "kind", "dtype"),
    [
        ("bert", "atoms", torch.bfloat16),
        ("llama", "atoms", torch.float32),
        ("llama", "random-fourier", torch.float32),
        ("gpt2", "random-relu", torch.bfloat16),
    ],
)
def test_sizes_are_met_or_refused(row, kind, dtype):
    model = make(row).to(dtype)
    size, blocks = (x * dtype.itemsize for x in _sizes(model))
    step, refused = 2 * 3 * 17 * dtype.itemsize * 2, 0
    for share in (0.02, 0.1, 0.5, 0.97):
        target = size - blocks + share * blocks
        try:
            sizes = plan(model, target_size=target, feature_map=kind)
        except ValueError as error:
            assert "the target cannot be reached with equal shares: " in str(error) and share <= 0.1
            refused += 1
        else:
            after = size - blocks + dtype.itemsize * sum(b.parameters for b in sizes.blocks)
            assert target - step <= after <= target
    assert 1 <= refused <= 2
    with pytest.raises(ValueError, match=rf"target_size {size} is met by the model as it is, which takes .* MB"):
        plan(model, target_size=size, feature_map=kind)


def _sizes(model):
    return sum(t.numel() for t in model.state_dict().values()), sum(ffn.num_parameters for ffn in find_ffns(model))


@pytest.mark.parametrize("blocks", ["ffn", "all", "attention"])
def test_speedups_are_met_or_refused(bert, blocks):
    timings, work = made_up_timings(bert), work_of(bert)
    for speedup in (1.05, 1.1, 1.3):
        for batches in (None, some_batches(count=6)):
            sizes = plan_all(bert, target_speedup=speedup, batches=batches, timings=timings, blocks=blocks)
            saved = sum(b.multiply_adds_before - b.multiply_adds for b in sizes.blocks)
            assert speedup - 1e-9 <= work / (work - saved) < speedup + 0.12
            assert sizes.predicted_seconds == pytest.approx(1e-9 * (work - saved))
            seconds = timings.seconds / speedup
            latency = plan_all(bert, target_latency=seconds, timings=timings, blocks=blocks)
            assert batches is not None or latency.blocks == sizes.blocks


def test_a_latency_that_the_model_has_is_refused(bert):
    timings = made_up_timings(bert)
    with pytest.raises(ValueError, match=r"target_latency 10s is met by the model as it is, which takes .* ms"):
        plan(bert, target_latency="10s", timings=timings)


def test_a_target_that_cannot_be_reached_names_the_least(bert):
    timings, ffns = made_up_timings(bert), find_ffns(bert)
    rest = 1e-9 * (work_of(bert) - sum(ffn.multiply_adds for ffn in ffns))
    two = rest + 1e-9 * 2 * 64  # two neurons per block
    expected = (
        rf"the budget is {1e3 * two - 1e-6:.3g} ms, and equal shares of all blocks have {1e3 * two:.3g} ms at least"
    )
    with pytest.raises(ValueError, match=expected):
        plan(bert, target_latency=two - 1e-9, timings=timings)
    assert plan(bert, target_latency=two + 1e-12, timings=timings).blocks[0].num_features == 2
    joint = plan(bert, target_latency=two - 1e-9, timings=timings, batches=some_batches())
    assert "drop" in {block.kind for block in joint.blocks}
    with pytest.raises(
        ValueError, match=rf"and the smallest choice for every block has {1e3 * rest:.3g} ms; choose an"
    ):
        plan(bert, target_latency=rest - 1e-9, timings=timings)  # before any inputs are read


def test_times_and_not_parameters_decide(bert):
    """Attention that takes no time is left alone, however many parameters it has."""
    timings, batches = made_up_timings(bert), some_batches()
    idle = tuple(
        replace(g, times=tuple(replace(t, seconds=timings.seconds) for t in g.times))
        if "attention" in g.blocks[0]
        else g
        for g in timings.groups
    )
    sizes = plan_all(bert, target_speedup=1.3, timings=replace(timings, groups=idle), batches=batches)
    assert {b.kind for b in sizes.blocks if "attention" in b.name} == {"dense"}
    changed = plan_all(bert, target_speedup=1.3, timings=timings, batches=batches)
    assert {b.kind for b in changed.blocks if "attention" in b.name} != {"dense"}


@pytest.mark.parametrize("kind", ["random-relu", "random-fourier"])
def test_a_latency_of_random_features(kind):
    model = make("llama")
    timings = made_up_timings(model, kind)
    sizes = plan(model, target_speedup=1.2, feature_map=kind, timings=timings)
    assert {b.kind for b in sizes.blocks} == {kind} and sizes.predicted_seconds <= timings.seconds / 1.2
    with pytest.raises(
        ValueError, match=rf"have no times of {kind!r}, only of dense, drop, linear, atoms; measure them"
    ):
        plan(model, target_speedup=1.2, feature_map=kind, timings=made_up_timings(model))


def test_a_plan_keeps_its_timings(bert, tmp_path):
    sizes = plan_all(
        bert, target_latency=f"{1e3 * made_up_timings(bert).seconds / 1.2:.9f} ms", timings=made_up_timings(bert)
    )
    sizes.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == sizes and loaded.predicted_seconds == sizes.predicted_seconds
    assert f"predicted for this plan: {1e3 * sizes.predicted_seconds:.2f} ms" in str(loaded)
    assert "timings" not in plan(bert, keep=0.5).to_dict() and plan(bert, keep=0.5).predicted_seconds is None
    again = plan_all(bert, target_speedup=1.1, timings=loaded.timings)
    assert again.timings == sizes.timings
    with pytest.raises(ValueError, match=r"the timings have no times of layers.0; measure them for this model"):
        plan(make("llama"), target_speedup=1.1, timings=loaded.timings)
    stored = json.loads((tmp_path / "plan.json").read_text())
    stored["timings"]["groups"].pop()
    with pytest.raises(ValueError, match=r"the timings have no times of encoder.layer.1; measure them for this model"):
        Plan.from_dict(stored)


@pytest.mark.parametrize("kind", ["random-relu", "random-fourier"])
def test_keep_is_a_share_of_parameters_for_random_features_of_gated_blocks(kind):
    model = make("llama")
    for keep in (0.3, 0.5, 0.9):
        block = plan(model, keep=keep, feature_map=kind).blocks[0]
        assert keep - 2 * (16 + 17) / block.parameters_before < block.parameters / block.parameters_before <= keep
    assert plan(make("bert"), keep=0.5, feature_map=kind).blocks[0].num_features == WIDTH // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": True}, "keep must be above 0 and at most 1; got True"),
        ({"keep": "0.5"}, "keep must be above 0 and at most 1; got '0.5'"),
        ({"keep": float("nan")}, "keep must be above 0 and at most 1; got nan"),
        ({"target_size": "1.2.3MB"}, "target_size must be like '200MB' or a positive number of bytes; got '1.2.3MB'"),
        ({"target_size": True}, "target_size must be like .*; got True"),
        ({"target_size": "0MB"}, "target_size must be like .*; got '0MB'"),
        ({"target_speedup": True}, "target_speedup must be a number above 1; got True"),
        ({"target_speedup": 0.9}, "target_speedup must be a number above 1; got 0.9"),
        (
            {"target_speedup": 2, "target_latency": 1},
            "give one of keep, .*; got {'target_speedup': 2, 'target_latency'",
        ),
        ({"target_latency": "3MB"}, "target_latency must be like '3ms' or a positive number of seconds; got '3MB'"),
        ({"target_latency": 0}, "target_latency must be like '3ms' or a positive number of seconds; got 0"),
        ({"target_latency": 1, "tokens": 32}, r"tokens must be the number of inputs and of .* \(1, 32\); got 32"),
        ({"target_latency": 1, "tokens": (1, 0)}, "length of tokens must be a positive integer; got 0"),
        ({"target_latency": 1, "runtime": "onxx"}, "unknown runtime 'onxx'; did you mean 'onnx'"),
        ({"keep": 0.5, "layers": 1}, "layers must be 'all', 'top-6', or numbers such as '3,4,5'; got 1"),
        ({"keep": 0.5, "layers": None}, "layers must be 'all', 'top-6', or numbers such as '3,4,5'; got None"),
        ({"keep": 0.5, "layers": ["a"]}, r"layers must be 'all', 'top-6', or numbers such as '3,4,5'; got \['a'\]"),
        ({"keep": 0.5, "layers": [0.5]}, r"layers must be 'all', 'top-6', or numbers such as '3,4,5'; got \[0.5\]"),
        ({"keep": 0.5, "layers": [True]}, r"layers must be 'all', 'top-6', or numbers such as '3,4,5'; got \[True\]"),
        ({"keep": 0.5, "batches": [[1]]}, "a batch must be a dict of the model's inputs; got list"),
        ({"keep": 0.5, "batches": {"input_ids": 1}}, "batches must be a list of dicts of the model's inputs; got dict"),
        ({"keep": 0.5, "batches": 3}, "batches must be a list of dicts of the model's inputs; got int"),
        ({"keep": 0.5, "batches": [{}]}, "a batch must hold the model's inputs as tensors; got a dict with keys"),
    ],
)
def test_bad_arguments(bert, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        plan(bert, **options)


def test_numbers_of_numpy(bert):
    assert plan(bert, keep=np.float32(0.5), layers=np.array([1])) == plan(bert, keep=0.5, layers=[1])


@pytest.mark.parametrize("spared", [0, 1])
def test_a_decoder_keeps_what_its_predictions_depend_on(monkeypatch, spared):
    model = make("llama", hf.AutoModelForCausalLM)
    felt = {"layers.0": 1e-6, "layers.1": 1e-6, f"layers.{spared}": 1.0}
    monkeypatch.setattr(planning, "sensitivities", lambda model, ffns, batches: felt)
    found = plan(model, keep=0.5, batches=iter(some_batches("llama", count=40))).blocks
    assert found[spared].parameters > 5 * found[1 - spared].parameters
