"""A pass that starts where the last one ended sees what a pass from the bottom sees."""

import inspect

import pytest
import torch
from transformers.models.bert.modeling_bert import BertLayer

from snnk.hf import find_ffns
from snnk.hf.finding import find_attentions
from snnk.hf.record import ActivationCache, context, flat, hold_out, observe, recording, rows_at

from helpers.architectures import ATTENTION, ROWS, inputs, make, replaced


def layers(row):
    names = {"distilbert": "n_layers", "gpt2": "n_layer", "whisper": "encoder_layers"}
    return "num_layers" if "t5" in row else names.get(row, "num_hidden_layers")


def walked(model, batches, indices, between=lambda i: None):
    cache, seen = ActivationCache(model, batches), []
    for i in indices:
        seen.append(cache.advance(find_ffns(model)[i]))
        between(i)
    return seen


@pytest.mark.parametrize("row", ROWS)
def test_as_from_the_bottom(row):
    model, other = (_deep(row) for _ in range(2))
    batches = [inputs(row), {k: v[:2] for k, v in inputs(row).items()}]

    def change(model):
        return lambda i: replaced(model, "atoms", layers=(i,), m=20)  # other values above

    found = walked(model, batches, (0, 1, 3), change(model))
    for i, one in zip((0, 1, 3), found, strict=True):
        two = ActivationCache(other, batches).advance(find_ffns(other)[i])
        for name in ("inputs", "residuals", "sums"):
            torch.testing.assert_close(getattr(one, name), getattr(two, name))
        change(other)(i)
    assert "forward" not in vars(find_ffns(model)[0].layer)
    with torch.no_grad():  # nothing is skipped any more
        torch.testing.assert_close(model(**batches[0])[0], other(**batches[0])[0])


def _deep(row, count=4):
    return make(row, **{layers(row): count})


def test_layers_are_run_at_most_twice_as_a_whole():
    model, count = _deep("bert"), [0] * 4
    for i, ffn in enumerate(find_ffns(model)):
        dense = ffn.layer.attention.self.query
        dense.register_forward_hook(lambda *_, i=i: count.__setitem__(i, count[i] + 1))
    walked(model, [inputs("bert")], range(4))
    assert count == [2, 2, 2, 1]


def test_a_forward_of_its_own_stays_and_a_failure_leaves_no_hook():
    model = _deep("bert")
    first, last = find_ffns(model)[0].layer, find_ffns(model)[3]
    own = first.forward

    def forward(*args, **kwargs):
        return own(*args, **kwargs)

    first.forward = forward
    cache = ActivationCache(model, [inputs("bert")])
    cache.advance(find_ffns(model)[1])
    assert first.forward is forward
    handle = last.slot("up").register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.advance(last)
    handle.remove()
    assert first.forward is forward
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    one, two = cache.advance(last), ActivationCache(model, [inputs("bert")]).advance(last)  # it can be asked again
    torch.testing.assert_close(one.inputs, two.inputs)


def test_layers_that_are_called_by_keyword():
    model, batch = _deep("bert"), inputs("bert")
    for ffn in find_ffns(model):
        ffn.layer.__class__ = ByKeyword
    found = walked(model, [batch], (0, 2, 3))
    usual = _deep("bert")
    for i, reached in zip((0, 2, 3), found, strict=True):
        again = ActivationCache(usual, [batch]).advance(find_ffns(usual)[i])
        torch.testing.assert_close(reached.inputs, again.inputs)


class ByKeyword(BertLayer):
    """A layer that behaves as if its encoder called layer(hidden_states=...)."""

    def __call__(self, *args, **kwargs):
        names = [*inspect.signature(BertLayer.forward).parameters][1:]
        return super().__call__(**dict(zip(names, args, strict=False)), **kwargs)


def test_nothing_is_kept_for_gradients_and_padding_is_left_out():
    model, batch = _deep("bert"), inputs("bert")
    cache = ActivationCache(model, [batch])
    found = cache.advance(find_ffns(model)[1])
    assert not cache.kept[0].requires_grad and not found.inputs[0].requires_grad
    tokens = int(batch["attention_mask"].sum())
    assert len(found.inputs[0]) == len(found.residuals[0]) == tokens < batch["input_ids"].numel()


@pytest.mark.parametrize("row", ATTENTION)
def test_attention_is_seen_with_its_call(row):
    """The stream behind attention is residual + output, and the call gives the same mixed values again."""
    model, seen = make(row), {}
    with torch.no_grad(), observe(find_attentions(model), lambda block, found: seen.__setitem__(block.index, found)):
        model(**inputs(row))
    for attention in find_attentions(model):
        found = seen[attention.index]
        with torch.no_grad():
            mixed = context(attention, found.call)
            torch.testing.assert_close(mixed.reshape(found.hidden.shape), found.hidden)
            torch.testing.assert_close(attention.slot("out")(found.hidden), found.outputs)
    first = find_attentions(model)[0]
    with torch.no_grad():
        for parameter in first.slot("out").parameters():
            parameter.zero_()
    reached = ActivationCache(model, [inputs(row)]).advance(first)
    expected = flat(seen[0].residual, inputs(row))
    torch.testing.assert_close(reached.sums[0], expected, atol=1e-5, rtol=1e-5)
    assert seen[0].outputs.abs().max() > 1e-2
    assert (expected.abs().max() > 0.1) != row.startswith(("gemma2", "gemma3"))  # a norm stands before their sum


def test_no_way_down():
    model = _deep("bert")
    cache = ActivationCache(model, [inputs("bert")])
    cache.advance(find_ffns(model)[2])
    with pytest.raises(ValueError, match=r"encoder.layer.1 is below layer 2"):
        cache.advance(find_ffns(model)[1])


def test_the_recorder_sees_inputs_and_outputs_and_may_replace_these():
    layer, seen = torch.nn.Linear(2, 3), []
    with recording({"a": layer}, lambda name, x, y: seen.append((name, x, y))):
        x, y = torch.ones(4, 2), layer(torch.ones(4, 2))
        layer(input=x)
    assert [name for name, _, _ in seen] == ["a", "a"] and not layer._forward_hooks
    assert all(torch.equal(read, x) and torch.equal(out, y) for _, read, out in seen)
    with recording({"a": layer}, lambda name, x, y: 2 * y):
        assert torch.equal(layer(x), 2 * y)


@pytest.mark.parametrize(("count", "held"), [(2, [1]), (9, [8]), (10, [9]), (25, [9, 19])])
def test_every_tenth_batch_is_held_out(count, held):
    training, found = hold_out(range(count))
    assert found == held and sorted(training + found) == list(range(count))
    with pytest.raises(ValueError, match="at least two batches are needed"):
        hold_out([1])


def test_rows_without_padding():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    x = torch.arange(12.0).reshape(2, 3, 2)
    assert torch.equal(rows_at("encoder.0", x, {"attention_mask": mask}, torch.nn.Linear(1, 1)), x[mask.bool()])
    assert torch.equal(rows_at("pooler", x[:, 0], {"attention_mask": mask}, torch.nn.Linear(1, 1)), x[:, 0])
    assert torch.equal(rows_at("encoder.0", x, {}, torch.nn.Linear(1, 1)), x.flatten(0, 1))
