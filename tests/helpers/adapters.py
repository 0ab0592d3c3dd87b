"""Tiny models with SNNK adapters."""

import torch
import transformers as hf
from peft import get_peft_model

from snnk.peft import SNNKConfig
from snnk.peft.model import layers_of

from helpers.architectures import make, perturb_


def adapted(row="bert", auto=None, trained=True, dtype=None, **options):
    """A tiny model with adapters, nothing in them at its initial value if `trained`."""
    model = get_peft_model(make(row, auto).to(dtype or torch.float32), SNNKConfig(**{"num_features": 4, **options}))
    if trained:
        train_(model)
    return model.eval()


def train_(model, adapter_name="default", seed=1, scale=0.3):
    for _, layer in layers_of(model, adapter_name):
        perturb_(layer.snnk_adapter[adapter_name], scale, seed)


def maps(model, adapter_name="default"):
    return {name: layer.snnk_adapter[adapter_name].feature_map for name, layer in layers_of(model, adapter_name)}


def make_model():
    return adapted("bert", hf.AutoModelForSequenceClassification, dtype=torch.float64, modules_to_save=["classifier"])


def train(model, rows):
    """Two steps on this process's rows of one batch."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(3, 40, (4, 7), generator=generator), torch.tensor([0, 1, 1, 0])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
