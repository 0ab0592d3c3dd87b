"""StandardisedLinear: scales from data, and its closed form against scikit-learn."""

import copy

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from snnk.hf import fit_classifier_
from snnk.hf.classify import heads
from snnk.hf.classify.standardised import StandardisedLinear

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 43}


def test_blocks_have_equal_shares_and_inputs_that_do_not_vary_have_none():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator) * torch.tensor([1.0, 100.0, 1e-3, 1.0, 1.0, 0.0]) + 7
    x[:, 2] -= 7
    x[:, 3] = 1e4 + x[:, 3] * 8  # varies by 8e-4 of its size
    assert float(StandardisedLinear([6], 1).standardise_(x - torch.tensor([0, 0, 0, 3e3, 0, 0])).scale[3]) > 0
    layer = StandardisedLinear([2, 4], 3).standardise_(x)
    z = layer.standardised(x)
    squares = z.square().mean(0)
    torch.testing.assert_close(squares[:3], torch.tensor([1 / 2, 1 / 2, 1 / 4]), rtol=1e-3, atol=0)
    assert squares[4] == pytest.approx(1 / 4, rel=1e-3) and squares[3] == squares[5] == 0
    torch.testing.assert_close(layer(x), z @ layer.weight.T + layer.bias)
    again = StandardisedLinear([2, 4], 3)
    again.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert torch.equal(again(x), layer(x))


class Reads(nn.Module):
    """Stands for a base model: its inputs are what the classifier reads."""

    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, ids):
        generator = torch.Generator().manual_seed(3)
        table = torch.randn(43, self.wide, generator=generator)
        return torch.tanh(table[ids].mean(1) * torch.linspace(0.1, 3, self.wide))


def model_of(wide, labels):
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=labels)).eval()
    model.classifier, model.reads = StandardisedLinear([wide - 6, 6], labels), Reads(wide)

    def forward(input_ids=None, **others):
        return type("Outputs", (), {"logits": model.classifier(model.reads(input_ids))})()

    model.forward = forward
    return model


@pytest.mark.parametrize(("rows", "wide"), [(60, 90), (150, 20)])
def test_its_closed_form_is_that_of_standardised_inputs(rows, wide):
    """Also the leave-one-out error, against refits without each row."""
    model = model_of(wide, 1)
    ids = torch.randint(3, 43, (rows, 6), generator=torch.Generator().manual_seed(1))
    x = model.reads(ids)
    y = x[:, 0] + 0.3 * torch.randn(rows, generator=torch.Generator().manual_seed(2))
    batches = [{"input_ids": i, "labels": t} for i, t in zip(ids.split(32), y.split(32), strict=True)]
    fit = fit_classifier_(model, batches, lam=0.7)
    layer = model.classifier
    z = layer.standardised(x).double().numpy()
    exact = Ridge(alpha=0.7).fit(z, y.numpy())
    torch.testing.assert_close(layer(x)[:, 0].double(), torch.from_numpy(exact.predict(z)), atol=1e-4, rtol=1e-4)
    errors = []
    for i in range(rows):
        kept = [j for j in range(rows) if j != i]
        errors.append(float(y[i]) - float(Ridge(alpha=0.7).fit(z[kept], y[kept].numpy()).predict(z[i : i + 1])[0]))
    expected = torch.tensor(errors).square().mean() / y.var(correction=0)
    assert fit.rows == rows and fit.error == pytest.approx(float(expected), rel=1e-3)


def test_a_fit_takes_no_more_rows_than_memory_allows(monkeypatch):
    """Rows in excess are left out evenly, so that classes in order do no harm."""
    monkeypatch.setattr(heads, "WIDE_ROWS", 50)
    model = model_of(30, 2)
    ids = torch.randint(3, 43, (260, 6), generator=torch.Generator().manual_seed(1))
    labels = (torch.arange(260) >= 130).long()
    ids[130:, 0] = 5
    batches = [{"input_ids": i, "labels": t} for i, t in zip(ids.split(32), labels.split(32), strict=True)]
    fit = fit_classifier_(model, batches)
    assert fit.rows == 50 and 0.4 < float(fit.left_out[1].double().mean()) < 0.6 and fit.accuracy > 0.8
    monkeypatch.setattr(heads, "WIDE_NUMBERS", 600)
    assert heads.wide_rows(30) == 20
