"""The paper's path: replaced, trained with labels, bundled, saved."""

import pytest
import torch
import transformers as hf

from snnk import SNNKLinear
from snnk.hf import bundle_, find_ffns, replace_ffn_

from helpers.architectures import GATED, ROWS, make, output


@pytest.mark.parametrize("row", [r for r in ROWS if r not in GATED])
def test_bundling_changes_nothing_but_the_size(row):
    model = make(row)
    assert [ffn.name for ffn in replace_ffn_(model, "top-1", num_features=6)] == [find_ffns(model)[1].name]
    before, size = output(model, row), sum(p.numel() for p in model.parameters())
    assert isinstance(find_ffns(model)[1].slot("up"), SNNKLinear)
    (new,) = bundle_(model)
    assert new.down.weight.shape == (16, 6) and sum(p.numel() for p in model.parameters()) < size
    assert torch.allclose(output(model, row), before, atol=1e-5)


def test_starts_from_psi_of_the_pretrained_layer():
    model = make("bert")
    weight, bias = (t.detach().clone() for t in (find_ffns(model)[0].up_weight(), find_ffns(model)[0].up_bias()))
    replace_ffn_(model, [0], num_features=64)
    layer = find_ffns(model)[0].slot("up")
    assert torch.allclose(layer.weight, layer.feature_map.psi(weight, bias))
    replace_ffn_(model, [1], num_features=64)
    other = find_ffns(model)[1].slot("up").feature_map
    assert not torch.equal(layer.feature_map.projection, other.projection)


def test_uptraining_with_accelerate(tmp_path):
    """Replace, train with labels, bundle, save, load: as in the README."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = make("bert", hf.AutoModelForSequenceClassification, num_labels=2)
    replace_ffn_(model, "all", num_features=8)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 40, (64, 7), generator=generator)
    labels = (ids[:, 1:] > 20).float().mean(1).gt(0.5).long()
    AcceleratorState._reset_state()  # it would keep the precision of an earlier training in this process
    accelerator = Accelerator(cpu=True)
    model, adam = accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters(), lr=3e-3))
    start = find_ffns(model)[0].slot("up").weight.detach().clone()
    losses = []
    for _ in range(30):
        loss = model(input_ids=ids, labels=labels).loss
        accelerator.backward(loss)
        adam.step()
        adam.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    model = accelerator.unwrap_model(model).eval()
    assert not torch.equal(find_ffns(model)[0].slot("up").weight, start)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        bundle_(model)
        assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-4)
        model.save_pretrained(tmp_path)
        loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
        assert torch.allclose(loaded(input_ids=ids).logits, before, atol=1e-4)


def test_bad_calls():
    with pytest.raises(ValueError, match=r"layers.0 is gated, so that it has no layer f\(Wx \+ b\)"):
        replace_ffn_(make("llama"), "all")
    model = make("bert")
    with pytest.raises(ValueError, match="no block of the model has an SNNK layer"):
        bundle_(model)
    replace_ffn_(model, [0])
    with pytest.raises(ValueError, match=r"encoder.layer.0 was replaced before"):
        replace_ffn_(model, "all")
    assert find_ffns(model)[1].kind == "dense"
