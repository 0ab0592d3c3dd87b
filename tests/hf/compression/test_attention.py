"""Attention in closed form: maps against their definitions, what can be kept is kept, and plans cover all blocks."""

import copy

import pytest
import torch

from snnk.hf import compress_, plan
from snnk.hf.architectures import ARCHITECTURES
from snnk.hf.compression.attention import HeadSums, shortened
from snnk.hf.compression.damage import measure, ranks_of
from snnk.hf.compression.plans import Plan, option
from snnk.hf.finding import find_attentions
from snnk.hf.record import context, observe

from helpers.architectures import ATTENTION, D, inputs, make, output, shorten_
from helpers.compression import some_batches

SIZE = D // 2


@torch.no_grad()
def seen_at(model, row="bert"):
    """Inputs of the first attention block, its mixed values, and its call."""
    found = []
    attention = find_attentions(model)[0]
    with observe([attention], lambda _, seen: found.append(seen)):
        model(**inputs(row))
    return attention, found[0]


def summed(attention, seen, weight=None):
    x, mixed = seen.inputs.reshape(-1, D), seen.hidden.reshape(-1, D)
    sums = HeadSums(attention)
    with torch.no_grad():
        sums.update(x, mixed, torch.ones(len(x)) if weight is None else weight)
    return sums, x, mixed


def test_the_dot_products_of_rank_r_have_the_least_error():
    """Against the truncated SVD of whitened dot products: no form of rank r is nearer to q . k, keys centred."""
    attention, seen = seen_at(make("bert"))
    sums, x, _ = summed(attention, seen)
    maps = sums.maps(torch.ones(D))
    for h in range(2):
        part = slice(h * SIZE, (h + 1) * SIZE)
        with torch.no_grad():
            q, k = (
                torch.nn.functional.linear(x, attention.weight(w)[part], attention.bias(w)[part]).double()
                for w in ("query", "key")
            )
        k = k - k.mean(0)
        exact = q @ k.T  # all pairs of tokens: their mean square is tr(Cq Ck)
        u, s, v = torch.linalg.svd(exact)
        for r in (2, 4, 6):
            found = (q @ maps.query[h, :r].T) @ (k @ maps.key[h, :r].T).T
            best = (u[:, :r] * s[:r]) @ v[:r]
            assert float((found - exact).norm()) == pytest.approx(float((best - exact).norm()), rel=1e-4)


def test_values_lose_what_the_sums_predict():
    """Against least squares: mixed values of rank t, put back, leave the predicted weighted error of the outputs."""
    attention, seen = seen_at(make("bert"))
    scale = torch.linspace(0.5, 2, D)
    weight = torch.rand(seen.inputs[..., 0].numel(), generator=torch.Generator().manual_seed(0)) + 0.5
    sums, _, mixed = summed(attention, seen, weight)
    maps, w = sums.maps(scale), weight.double()
    centred = mixed.double() - (w[:, None] * mixed.double()).sum(0) / w.sum()
    out = attention.weight("out").detach().double() * scale.double()[:, None]
    for t in (2, 5):
        errors = 0.0
        for h in range(2):
            part = slice(h * SIZE, (h + 1) * SIZE)
            kept = centred[:, part] @ maps.value[h, :t].T
            root = w.sqrt()[:, None]
            target = centred[:, part] @ out[:, part].T
            rest = target - kept @ torch.linalg.lstsq(root * kept, root * target).solution
            errors += float((w[:, None] * rest.square()).sum()) / float(w.sum())
        assert float(maps.lost[:, t].sum()) == pytest.approx(errors, rel=1e-4)


@pytest.mark.parametrize("row", [row for row in ATTENTION if not ARCHITECTURES[row].attention.fixed])
def test_all_dimensions_of_shortened_heads_change_nothing(row):
    """Mapped queries and keys of the full rank have the same attention, as a constant key is all that is lost."""
    attention, seen = seen_at(make(row), row)
    sums, _, _ = summed(attention, seen)
    maps = sums.maps(torch.ones(D))
    wrong = {}
    with torch.no_grad():
        before = context(attention, seen.call)
        for rank in (SIZE, 1):
            with shortened(attention, maps, rank):
                wrong[rank] = float((context(attention, seen.call) - before).abs().max())
    assert wrong[SIZE] < 1e-5 and wrong[1] > 1e-4


def fitted(row, less):
    """A model whose heads use three and five of their dimensions, its outputs, and the report on a fit to it.

    The fit has these ranks, less `less` dimensions of values.
    """
    model = make(row)
    parts = shorten_(model, (3, 5))
    before = output(model, row)
    ranks = [(r, t - less) for (r, t), *_ in parts]
    blocks = [option(a, "low-rank", ranks=pair) for a, pair in zip(find_attentions(model), ranks, strict=True)]
    report = compress_(model, Plan(model.config.model_type, tuple(blocks)), some_batches(row, count=20), refine=0)
    return model, before, report


@pytest.mark.parametrize("row", ATTENTION)
def test_dimensions_that_do_not_count_are_found_and_left_out(row):
    """At the ranks that the heads use, the closed form is the model up to float32: errors are squared."""
    model, before, report = fitted(row, less=0)
    assert max(block.error for block in report.blocks) < 1e-8
    torch.testing.assert_close(output(model, row), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("row", ["bert", "gpt2", "llama", "t5"])
def test_a_dimension_that_counts_is_missed(row):
    model, before, report = fitted(row, less=1)
    assert min(block.error for block in report.blocks) > 1e-4
    assert float((output(model, row) - before).abs().max()) > 1e-3


def test_refined_ranks_are_better_and_bfloat16_stays():
    """Steps on the block alone lower the held-out error of a hard case."""
    errors = {}
    for refine in (0, 60):
        model = make("bert")
        chosen = option(find_attentions(model)[0], "low-rank", ranks=(2, 3))
        report = compress_(model, Plan("bert", (chosen,)), some_batches(count=40), refine=refine)
        errors[refine] = report.blocks[0].error
    assert errors[60] < errors[0] < 1
    for row in ("llama", "t5"):  # T5 computes a bias of positions inside the module
        model = make(row).to(torch.bfloat16)
        dtypes = [p.dtype for p in model.parameters()]
        attention = find_attentions(model)[0]
        ranks = (SIZE if attention.names.fixed else 3, 3)
        chosen = option(attention, "low-rank", ranks=ranks)
        report = compress_(model, Plan(row, (chosen,)), some_batches(row, count=20), refine=4)
        assert {p.dtype for p in model.parameters()} == set(dtypes) and report.blocks[0].error < 1


def test_a_joint_plan_covers_all_blocks_and_meets_the_budget():
    model, batches = make("bert"), some_batches(count=20)
    sizes = plan(model, keep=0.4, batches=batches)
    assert {block.kind for block in sizes.blocks} <= {"low-rank", "atoms", "linear", "drop", "dense"}
    assert [block.name for block in sizes.blocks][:2] == ["encoder.layer.0.attention", "encoder.layer.0"]
    before, after = (sum(getattr(b, n) for b in sizes.blocks) for n in ("parameters_before", "parameters"))
    assert 0.3 * before < after <= 0.4 * before
    only = plan(model, keep=0.4, blocks="attention", batches=batches)
    assert [block.name for block in only.blocks] == ["encoder.layer.0.attention", "encoder.layer.1.attention"]
    assert Plan.from_dict(sizes.to_dict()) == sizes
    compressed = copy.deepcopy(model)
    report = compress_(compressed, sizes, batches, refine=4)
    assert [b.ranks for b in report.blocks] == [b.ranks for b in sizes.blocks]


def test_ranks_that_cost_nothing_are_free():
    """In a model whose heads use four dimensions, ranks from four on have no damage, and those below have."""
    model = make("bert")
    shorten_(model, (4, 4))
    blocks = find_attentions(model)
    for options in measure(blocks, model, some_batches(count=20)):
        damages = {block.ranks: damage for block, damage in options}
        assert set(damages) == {None, *((r, t) for r in ranks_of(SIZE) for t in ranks_of(SIZE))} - {(SIZE, SIZE)}
        for ranks, damage in damages.items():
            assert damage < 1e-8 if ranks is None or min(ranks) >= 4 else damage > 1e-7
    assert [attention.kind for attention in blocks] == ["dense", "dense"]


def test_equal_shares_meet_a_budget_although_queries_and_keys_stay():
    model = make("llama")
    for keep in (0.5, 0.7):
        sizes = plan(model, keep=keep)
        before, after = (sum(getattr(b, n) for b in sizes.blocks) for n in ("parameters_before", "parameters"))
        assert 0.8 * keep * before < after <= keep * before
        assert {b.ranks[0] for b in sizes.blocks if b.ranks} == {SIZE}


@pytest.mark.once
def test_bad_plans():
    model = make("bert")
    attention = find_attentions(model)[0]
    good = option(attention, "low-rank", ranks=(2, 2)).__dict__
    for change, message in (
        ({"ranks": None}, "ranks belong to 'low-rank'"),
        ({"kind": "atoms", "num_features": 4}, "ranks belong to"),
        ({"ranks": [2]}, "must be two numbers"),
        ({"ranks": [2, 0]}, "positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan.from_dict({"format": "snnk.Plan/1", "model_type": "bert", "blocks": [{**good, **change}]})
    for change, message in (
        ({"ranks": [2, 99]}, "have 8 dimensions"),
        ({"kind": "atoms", "num_features": 4, "ranks": None}, "is attention, which can become 'low-rank'"),
    ):
        wrong = Plan.from_dict({"format": "snnk.Plan/1", "model_type": "bert", "blocks": [{**good, **change}]})
        with pytest.raises(ValueError, match=message):
            wrong.check(model)
    with pytest.raises(ValueError, match="unknown blocks"):
        plan(model, keep=0.5, blocks="heads")
