"""Times of blocks: the table is fitted, stored and checked, and measured without a change of the model.

Nothing here depends on how fast anything is: where a test needs times, it makes them up.
"""

import copy
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers

from snnk.hf import plan
from snnk.hf.compression import timing
from snnk.hf.compression.plans import option
from snnk.hf.compression.times import Time, TimedBlocks, Timings
from snnk.hf.compression.timing import compare, measure_times, replace_as_planned
from snnk.hf.finding import find_blocks, find_ffns
from snnk.hf.models import example_inputs
from snnk.hf.serve import forms, graphs, latency
from snnk.hf.serve.forms import run_form
from snnk.hf.serve.latency import Latency, run_torch

from helpers.architectures import make, towers
from helpers.compression import made_up_timings, work_of
from helpers.packages import need


def made_up_latency(runs, inputs, scale=1.0, **_):
    """A run takes as many seconds as it returns, or one with a scale of 0."""
    times = {name: [scale * run() if scale else 1.0 + 0 * run()] for name, run in runs.items()}
    return Latency(inputs, "processor", 1, 0.0, {"processor": times})


@pytest.fixture
def counted(monkeypatch):
    """A model takes one nanosecond per multiply-add of a linear layer; the list has every model that was run."""
    made = []

    def run(model, batch):
        made.append((model, work_of(model), {name: tuple(x.shape) for name, x in batch.items()}))
        work = work_of(model)
        return lambda: 1e-9 * work

    monkeypatch.setitem(timing.RUNTIMES, "torch", run)
    monkeypatch.setattr(timing, "measure", made_up_latency)
    return made


def blocks_of(times, width=16, count=2):
    return TimedBlocks(tuple(f"b{i}" for i in range(count)), width, (Time("dense", None, None, 10.0), *times))


def test_between_numbers_of_features_times_are_a_polyline():
    group = blocks_of([Time("atoms", 4, None, 4.0), Time("atoms", 8, None, 5.0), Time("drop", None, None, 2.0)])
    found = {m: group.slower("atoms", m, None) for m in (2, 4, 6, 8, 12, 16)}
    # the whole model has two such blocks; all 16 neurons are the model as it is
    assert found == pytest.approx({2: -3.0, 4: -3.0, 6: -2.75, 8: -2.5, 12: -1.25, 16: 0.0})
    assert group.slower("drop", None, None) == pytest.approx(-4.0) and group.slower("dense", None, None) == 0
    assert group.misfit == pytest.approx(0, abs=1e-9)


def test_more_features_never_take_less_time():
    group = blocks_of([Time("atoms", 4, None, 6.0), Time("atoms", 8, None, 4.0)], count=1)
    assert group.slower("atoms", 4, None) == pytest.approx(group.slower("atoms", 8, None)) == pytest.approx(-5.0)
    assert group.misfit == pytest.approx(1.0)
    assert Timings("torch", (1, 32), "a processor", 1, 0.0, 10.0, (group,)).misfit == pytest.approx(0.1)


def test_times_of_ranks_are_found_again():
    def seconds(r, t):
        return 5 + 0.02 * r + 0.05 * t + 0.1 * max(r, t) + 0.7 * (r != t)

    ranks = [(2, 2), (8, 8), (12, 12), (2, 8), (8, 2), (2, 16), (16, 2)]
    group = blocks_of([Time("low-rank", None, pair, seconds(*pair)) for pair in ranks], count=3)
    for pair in [(4, 4), (4, 12), (10, 6), (16, 15)]:
        assert 10 + 3 * group.slower("low-rank", None, pair) == pytest.approx(seconds(*pair))
    assert group.misfit == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("row", ["bert", "llama", "opt", "vit", "t5"])
def test_the_prediction_is_the_count_of_the_planned_model(counted, row):
    """With times that add up, the table must predict what a model with the planned blocks takes, to the digit."""
    model = make(row)
    timings = measure_times(model)
    assert timings.seconds == pytest.approx(1e-9 * work_of(model))
    assert {name for group in timings.groups for name in group.blocks} == {b.name for b in find_blocks(model)}
    assert all(len(group.blocks) == 2 for group in timings.groups)  # one of two layers is not measured twice
    for speedup in (1.1, 1.3):
        sizes = plan(model, target_speedup=speedup, timings=timings)
        assert sizes.predicted_seconds <= timings.seconds / speedup + 1e-12
        changed = copy.deepcopy(model)
        blocks = {block.name: block for block in find_blocks(changed)}
        for planned in sizes.blocks:
            replace_as_planned(blocks[planned.name], planned)
        assert sizes.predicted_seconds == pytest.approx(1e-9 * work_of(changed))


def test_the_model_stays_as_it_is(counted):
    model = make("bert").train()
    before, config, state = copy.deepcopy(model.state_dict()), model.config.to_dict(), torch.get_rng_state()
    measure_times(model)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert model.config.to_dict() == config and all(block.kind == "dense" for block in find_blocks(model))
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    shared = counted[1][0]
    assert shared is not model and shared.embeddings.word_embeddings.weight is model.embeddings.word_embeddings.weight


def test_the_batch_is_the_one_that_was_asked_for(counted):
    timings = measure_times(make("bert"), tokens=(3, 7))
    assert timings.tokens == (3, 7) and {shapes["input_ids"] for *_, shapes in counted} == {(3, 7)}
    measure_times(make("vit"), tokens=(3, 7))
    assert counted[-1][2] == {"pixel_values": (3, 3, 8, 8)}


@pytest.mark.parametrize(
    ("model", "tokens", "wanted"),
    [
        (lambda: make("bert"), (2, 7), "2 x 7 tokens"),
        (lambda: make("bert", max_position_embeddings=20), (2, 50), "2 x 20 tokens"),
        (lambda: make("vit"), (1, 32), "1 image of 8 x 8"),
        (lambda: make("whisper"), (3, 32), "3 sounds of 12 frames"),
        (lambda: towers("clip"), (2, 7), "2 x 7 tokens and 2 images of 8 x 8"),
    ],
)
def test_timings_name_what_was_measured(counted, model, tokens, wanted):
    """Texts are cut to the positions that the model has, and a model of images reads no tokens."""
    timings = measure_times(model(), tokens=tokens)
    assert timings.inputs == wanted and f"measured with torch for {wanted} on" in str(timings)
    assert timings.tokens == ((2, 20) if tokens == (2, 50) else tokens)
    stored = timings.to_dict()
    assert Timings.from_dict(stored) == timings
    del stored["inputs"]  # as in older files
    assert Timings.from_dict(stored) == replace(timings, inputs="")


@pytest.mark.parametrize("name", ["BertForMultipleChoice", "BertForQuestionAnswering", "GPT2LMHeadModel"])
def test_models_with_heads_are_run(name, monkeypatch):
    """Both models are run on the batch that was asked for, three times to warm up, then in turns."""
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(latency, "TURN", 1e-9)
    monkeypatch.setattr(latency, "WARM", 0.0)
    config = make("gpt2").config if name.startswith("GPT2") else make("bert").config
    models, calls = [getattr(transformers, name)(config) for _ in range(2)], []
    for i, model in enumerate(models):
        model.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: calls.append((i, tuple(kwargs["input_ids"].shape))), with_kwargs=True
        )
    times = compare(models, tokens=(2, 5), runtime="torch")
    assert [i for i, _ in calls] == [0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0] and len(times) == 2
    shape = (2, 1, 5) if name.endswith("MultipleChoice") else (2, 5)
    assert {found for _, found in calls} == {shape}


def test_blocks_of_different_shapes_are_measured_apart(counted):
    model = towers("clip")
    assert sorted(len(group.blocks) for group in measure_times(model).groups) == [2, 2, 2, 2]  # two towers


@pytest.mark.parametrize("kind", ["random-relu", "random-fourier"])
def test_random_features_are_measured_as_such(counted, kind):
    timings = measure_times(make("bert"), kind=kind)
    assert {time.kind for group in timings.groups for time in group.times} == {"dense", "low-rank", kind}


@pytest.mark.parametrize("row", ["bert", "llama", "gpt2", "vit", "t5", "modernbert", "deberta-v2"])
def test_every_choice_runs(monkeypatch, row):
    """Real runs, one each."""
    ones = partial(made_up_latency, scale=0.0)
    monkeypatch.setattr(timing, "measure", ones)
    timings = measure_times(make(row), tokens=(2, 5))
    assert timings.seconds == 1 and 0 <= timings.waited <= 1
    for group in timings.groups:
        sizes = [(time.kind, time.num_features, time.ranks) for time in group.times]
        assert len(set(sizes)) == len(sizes) >= 4


def test_two_models_are_compared(counted):
    model, small = make("bert"), make("bert", intermediate_size=8)
    assert compare([model, small], tokens=(1, 4), runtime="torch") == pytest.approx(
        [1e-9 * work_of(model), 1e-9 * work_of(small)]
    )


@pytest.mark.parametrize(("form", "tolerance"), [("onnx", 1e-5), ("onnx-int8", 0.1), ("openvino-int8", 0.1)])
def test_a_form_runs_the_model(form, tolerance):
    """In int8, of weights with 127 steps from 0, up to a tenth."""
    need("onnxscript", "onnxruntime", *(["openvino", "nncf"] if form == "openvino-int8" else []))
    model = make("bert", num_hidden_layers=1).to(torch.bfloat16)
    batch = example_inputs(model, (2, 5))
    (found,) = run_form(model, batch, form)().values()
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        expected = model.float()(**batch)[0]
        assert (found - expected).norm() < tolerance * expected.norm()
        assert run_torch(model, batch)() == float(model(**batch)[0].flatten()[0])


def test_times_of_a_form_are_measured(monkeypatch):
    """Each size is exported on its own."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(timing, "SECONDS", 0.05)
    monkeypatch.setattr(timing, "_choices", lambda block, kind: [option(block, "drop"), option(block, "atoms", 8)])
    written, write = [], graphs.write_onnx

    def counted(model, *args):
        written.append(model.num_parameters())
        write(model, *args)

    monkeypatch.setattr(graphs, "write_onnx", counted)
    model = make("bert", num_hidden_layers=1)
    found = measure_times(model, find_ffns(model), runtime="onnx", tokens=(1, 5))
    assert found.runtime == "onnx" and written[0] > written[2] > written[1]
    assert [time.kind for time in found.groups[0].times] == ["dense", "drop", "atoms"]


def test_a_missing_runtime_is_named(monkeypatch):
    monkeypatch.setattr(forms, "find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(ImportError, match="an export to onnx needs onnxruntime; install the extra serve"):
        measure_times(make("bert"), runtime="onnx")
    assert torch.is_grad_enabled()  # nothing of the measurement stays


def test_timings_are_json():
    timings = made_up_timings(make("bert"))
    assert Timings.from_dict(json.loads(json.dumps(timings.to_dict()))) == timings
    text = str(replace(timings, tokens=(1, 64), threads=2))
    assert text.startswith("measured with torch for 1 x 64 tokens on 2 thread(s): 0.00 ms; the table fits within 0.0 %")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), [], r"timings must have the keys runtime, tokens, processor, threads, waited, seconds, groups; got \[\]"),
        (("seconds",), -1, "seconds must be a positive number; got -1"),
        (("seconds",), float("nan"), "seconds must be a positive number; got nan"),
        (("waited",), 2, "waited must be from 0 to 1; got 2"),
        (("threads",), 0, "threads must be a positive integer; got 0"),
        (("runtime",), 3, "runtime must be a text; got 3"),
        (("processor",), None, "processor must be a text; got None"),
        (("tokens",), [1], r"tokens must be the number of inputs and of tokens per text, .*; got \[1\]"),
        (("groups",), 3, "groups of timings must be a list; got int"),
        (("groups", 0), {}, "a group of timings must have the keys blocks, width, times; got {}"),
        (("groups", 0, "blocks"), [3], r"times must name their blocks; got \(3,\)"),
        (("groups", 0, "width"), 0, "width of timed blocks must be a positive integer; got 0"),
        (("groups", 0, "times"), [], "the first time of .* must be that of the model as it is"),
        (("groups", 0, "times", 1, "seconds"), "x", "seconds of a time must be a positive number; got 'x'"),
        (("groups", 0, "times", 1, "kind"), 3, "kind of a time must be a text; got 3"),
        (("groups", 0, "times", 1, "ranks"), [1], r"ranks of a time must be two numbers, of queries .*; got \[1\]"),
        (("groups", 0, "times", 1, "ranks"), [1, 0], "rank of a time must be a positive integer; got 0"),
        (("groups", 1, "times", 1, "num_features"), "a", "num_features of a time must be a positive integer; got 'a'"),
        (("groups", 1, "times", 1, "num_features"), 10**400, "sizes of encoder.layer.0 must be 10,000,000 at most"),
        (
            ("groups", 1, "times"),
            300 * [{"kind": "drop", "num_features": None, "ranks": None, "seconds": 1}],
            "256 times",
        ),
        (("groups", 1, "times", 1, "more"), 1, "a time must have the keys kind, num_features, ranks, seconds; got"),
    ],
)
def test_timings_of_a_file_are_checked(path, value, message):
    stored = json.loads(json.dumps(made_up_timings(make("bert")).to_dict()))
    if not path:
        stored = value
    else:
        at = stored
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
    with pytest.raises((ValueError, TypeError), match=message):
        Timings.from_dict(stored)
