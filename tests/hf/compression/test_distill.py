"""Recovery takes as many steps as help, in float32, changes only what was replaced, and never leaves rubbish."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from snnk.hf import find_ffns
from snnk.hf.compression import distill, stages
from snnk.hf.compression.agreement import agreement
from snnk.hf.compression.distance import distance
from snnk.hf.compression.distill import recover_
from snnk.hf.compression.outputs import Read, outputs_of, read
from snnk.hf.replace import replace_

from helpers.architectures import perturb_
from helpers.heads import make

EMPTY = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "attention_mask": torch.zeros(1, 4, dtype=torch.long)}


def batches(count=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(43, (8, 10), generator=generator)} for _ in range(count)]


def held():
    return batches(2, seed=2)


def halved(model):
    """Half the neurons of each block, its second layer as it was for these: much is lost, and can be won back."""
    new = []
    for ffn in find_ffns(model):
        keep = range(0, ffn.width, 2)
        weight, bias = ffn.down_weight().detach()[:, list(keep)].clone(), ffn.slot("down").bias.detach().clone()
        new.append(replace_(ffn, "atoms", len(keep)).copy_rows_(keep).fill_(0.5 * weight, bias))
    return new


def lost(model, teacher):
    return agreement(*[[outputs_of(m, batch) for batch in batches()] for m in (teacher, model)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_gets_nearer_and_nothing_else_changes(dtype):
    model = make("BertModel")
    perturb_(model, scale=0.3)
    teacher = copy.deepcopy(model).to(dtype)
    new = halved(model.to(dtype))
    model.embeddings.LayerNorm.weight.requires_grad_(False)
    trained = {id(p) for each in new for module in (each.up, each.down) for p in module.parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    start = lost(model, teacher)
    recover_(model, teacher, new, batches(), held(), steps=40)
    assert lost(model, teacher)["cosine"] > 0.5 + 0.5 * start["cosine"] > start["cosine"] + 1e-3
    assert {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()} == {dtype}
    moved = {id(p) for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == trained and all(p.grad is None for p in model.parameters())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["embeddings.LayerNorm.weight"]


@pytest.mark.parametrize(
    ("name", "options", "figure", "sign"),
    [
        ("BertForQuestionAnswering", {}, "start: relative squared error", -1),
        ("BertForPreTraining", {}, "prediction: KL divergence", -1),
        ("BertForSequenceClassification", {"num_labels": 1}, "relative squared error", -1),
        ("BertForTokenClassification", {"num_labels": 4}, "cosine", 1),
    ],
)
def test_every_head_gets_nearer(name, options, figure, sign):
    model = make(name, initializer_range=0.3, **options)
    teacher = copy.deepcopy(model)
    new = halved(model)
    start = lost(model, teacher)[figure]
    recover_(model, teacher, new, batches(), held(), steps=40)
    assert sign * lost(model, teacher)[figure] > sign * start


def test_what_fails_leaves_the_model_as_it_was():
    model = make("BertModel")
    teacher = copy.deepcopy(model)
    new = halved(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        teacher.embeddings.LayerNorm.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"recovery failed, .* not finite: the distance on held-out inputs is nan"):
        recover_(model, teacher, new, batches(), held(), steps=3)
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in model.named_parameters())


def test_weights_that_overflow_in_the_models_dtype_are_refused(monkeypatch):
    model = make("BertModel").half()
    teacher, new = copy.deepcopy(model), halved(model)
    before = [p.detach().clone() for p in new[0].down.parameters()]

    def run(self, next_stage):
        self.parameters["0"].data.fill_(1e6)  # finite in float32 alone

    monkeypatch.setattr("snnk.hf.compression.distill._Run.run", run)
    with pytest.raises(ValueError, match=r"recovery failed, .*outputs are not finite.*float16"):
        recover_(model, teacher, new, batches(), held(), steps=3)
    assert all(torch.equal(p, old) for p, old in zip(new[0].down.parameters(), before, strict=True))
    assert bool(new[0].up.weight.isfinite().all())


def test_a_batch_of_padding_alone_teaches_nothing():
    """With such batches alone nothing moves, and among others they have no distance."""
    model = make("BertForSequenceClassification")
    teacher, new = copy.deepcopy(model), halved(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    done = recover_(model, teacher, new, [EMPTY, EMPTY], held(), steps=6)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert done.kept == 0 and all("training" not in point for point in done.curve)
    done = recover_(model, teacher, new, [*batches(1), EMPTY], held(), steps=6)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert sum("training" in point for point in done.curve) == 3  # a point per step, of which every second is taught


def test_distances_by_hand():
    """Half the relative squared error of states, and 1 - cosine of their means; of logits KL, and squared errors."""
    mask = torch.tensor([[[1.0], [1.0], [0.0]]])  # the third token is padding
    wanted = Read({}, torch.tensor([[[1.0, 0.0], [3.0, 0.0], [9.0, 9.0]]]), mask)
    found = Read({}, torch.tensor([[[1.0, 2.0], [3.0, 2.0], [7.0, 5.0]]]), mask)
    turned = 1 - 1 / math.sqrt(2)  # means (2, 0) and (2, 2)
    assert float(distance(found, wanted)) == pytest.approx(0.5 * 8 / 10 + turned, rel=1e-6)
    assert float(distance(wanted, wanted)) == pytest.approx(0, abs=1e-6)
    three = math.log(3)
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[three, 0.0]])  # (1/2, 1/2) and (3/4, 1/4)
    one, other = Read({"logits": q, "score": q[:, :1]}), Read({"logits": p, "score": p[:, :1]})
    kl = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)  # of the teacher's from the model's
    assert float(distance(one, other)) == pytest.approx(kl + three**2, rel=1e-6)


@pytest.fixture
def taken(monkeypatch):
    """The rate of every step of Adam, and whether it had gradients."""
    found = []

    class Adam(torch.optim.Adam):
        def step(self, *args, **kwargs):
            given = any(p.grad is not None for group in self.param_groups for p in group["params"])
            found.append((self.param_groups[0]["lr"], given))
            return super().step(*args, **kwargs)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    return found


@pytest.mark.parametrize("padding", [False, True])
def test_steps_begin_and_end_small(taken, padding):
    """The rate rises over ten steps and falls to nothing: the last of 40 is 1/40 of the first that is whole.

    Batches of padding alone teach nothing, and are steps of the schedule all the same.
    """
    model = make("BertForSequenceClassification" if padding else "BertModel")
    teacher, new = copy.deepcopy(model), halved(model)
    size = distill.RATE * float(new[0].up.weight.detach().square().mean().sqrt())
    recover_(model, teacher, new, [*batches(1), EMPTY] if padding else batches(), held(), steps=40)
    rates, given = zip(*taken, strict=True)
    assert rates == pytest.approx([size * min(1, (step + 1) / 10) * (1 - step / 40) for step in range(40)], rel=1e-6)
    assert any(given) and all(given) != padding


def test_recovery_sees_every_batch_in_each_pass_and_in_another_order():
    model, some, seen = make("BertModel"), batches(), []
    teacher, new = copy.deepcopy(model), halved(model)
    places = {tuple(batch["input_ids"][0].tolist()): i for i, batch in enumerate(some)}
    model.embeddings.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(places.get(tuple(kwargs["input_ids"][0].tolist()))), with_kwargs=True
    )
    recover_(model, teacher, new, some, held(), steps=12)
    trained = [i for i in seen[:-1] if i is not None]  # without held-out batches, and the last look at the first batch
    assert sorted(trained[:6]) == sorted(trained[6:]) == [*range(6)] and trained[:6] != trained[6:]


def lengths(each=0.1, seconds=300.0, most=10**6, gains=(0.1,) * 20):
    """Stages of "auto" for the seconds of a step and the gain of each stage, and the reason of the end."""
    run, gains = SimpleNamespace(stages=[], steps=0, gain=0.0, seconds=0.0, time_of_a_step=lambda: each), iter(gains)
    while (stage := stages.doubling(seconds, most)(run))[0]:
        run.stages.append(stage[0])
        run.steps, run.gain = sum(run.stages), next(gains)
        run.seconds = each * run.steps
    return run.stages, stage[1]


@pytest.mark.parametrize(
    ("options", "expected", "reason"),
    [
        ({}, [128, 256, 512, 1024, 1024], "1,024 more would take longer than the rest of 300 s"),
        ({"seconds": 192.0}, [128, 256, 512, 1024], "1,024 more"),  # 1,920 steps of 0.1 s, to the second
        ({"seconds": 191.0}, [128, 256, 512, 512], "512 more"),
        ({"gains": (0.3, 0.02, 0.0199)}, [128, 256, 512], "the last stage gained 1.99%, and less than 2% is not"),
        ({"gains": (-0.4,)}, [128], "the last stage gained 0.00%"),
        ({"each": 5.0}, [32], "32 more would take longer"),  # 128 steps of 5 s are halved until they fit
        ({"each": 30.0}, [], "there is no room for 16 steps of 30 s in 300 s"),
        ({"most": 384}, [128, 256], "256 more would be above 20 passes over the inputs"),
        ({"most": 640}, [128, 256, 256], "256 more would be above 20 passes"),
        ({"most": 100}, [64], "64 more would be above 20 passes"),
    ],
)
def test_lengths_of_stages(options, expected, reason):
    found, why = lengths(**options)
    assert found == expected and why.startswith(reason)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(stages, "FIRST", 16)


def test_the_best_end_of_a_stage_is_kept(short, monkeypatch):
    """The curve has all ends of stages, and the model the state at the best one, by inputs that no step sees."""
    model = make("BertModel")
    perturb_(model, scale=0.3)
    teacher, new = copy.deepcopy(model), halved(model)
    done = recover_(model, teacher, new, batches(), held(), minutes=60)
    assert done.stages == (16, 32, 64)[: len(done.stages)] and len(done.stages) > 1
    at = {point["step"]: point["held_out"] for point in done.curve}
    ends = [sum(done.stages[:i]) for i in range(len(done.stages) + 1)]
    assert {0, *ends} <= at.keys() and done.kept == min(ends, key=at.get) and done.distances == (at[0], at[done.kept])
    assert all(point["training"] > 0 for point in done.curve[1:])
    with torch.no_grad():
        found = [float(distance(read(model, b), read(teacher, b))) for b in held()]
    assert sum(found) / len(found) == pytest.approx(done.distances[1], rel=1e-2)  # of targets in bfloat16
    assert f"{done.steps:,} steps of distillation" in str(done) and f"to {done.distances[1]:.4f}" in str(done)


@pytest.mark.parametrize("steps", [20, "auto"])
def test_steps_that_do_not_help_are_taken_back(short, monkeypatch, steps):
    monkeypatch.setattr(distill, "RATE", 50.0)
    model = make("BertModel")
    teacher, new = copy.deepcopy(model), halved(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    done = recover_(model, teacher, new, batches(), held(), steps=steps)
    assert done.kept == 0 and done.stages in ((20,), (16,)) and "the model is as it was fitted" in str(done)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_modules_are_trained_as_well_as_objects_that_list_them():
    found = []
    for modules in (False, True):
        model = make("BertModel")
        teacher, new = copy.deepcopy(model), halved(model)
        listed = [module for each in new for module in each.modules] if modules else new
        recover_(model, teacher, iter(listed), batches(), held(), steps=5)
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_the_teachers_outputs_are_computed_once_if_there_is_room(monkeypatch):
    """Otherwise again in each step; the result is the same."""
    found, calls = [], []
    for room in (2**29, 0):
        monkeypatch.setattr(distill, "KEPT_BYTES", room)
        model = make("BertModel")
        teacher, new = copy.deepcopy(model), halved(model)
        count = calls.append
        teacher.register_forward_hook(lambda *_, room=room, count=count: count(room))
        recover_(model, teacher, new, batches(), held(), steps=12)
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    points = 1 + 12 // 3
    assert (calls.count(2**29), calls.count(0)) == (6 + 2, 12 + 2 * points)
