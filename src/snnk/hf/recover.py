"""Distillation after compression: the new matrices trained, by a few steps, towards the original's outputs."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snnk.hf.blocks import Replacement
from snnk.hf.plan import place, tokens_of

RATE, WARM_UP, BETAS = 0.02, 10, (0.9, 0.99)


def recover_(
    model: Any, teacher: Any, replacements: list[Replacement], batches: list[Any], *, steps: int, seed: int = 0
) -> None:
    """Train what replaced the blocks, in place, to give the teacher's outputs on the batches; nothing else changes."""
    from accelerate import Accelerator

    modules = [m for new in replacements for m in (new.up, new.gate, new.down) if m is not None]
    parameters = [p for module in modules for p in module.parameters()]
    others = {id(p): (p, p.requires_grad) for p in model.parameters()}
    for p, _ in others.values():
        p.requires_grad_(False)
    rates = [RATE * float(p.detach().float().square().mean().sqrt()) for p in parameters]
    groups = [{"params": [p], "lr": r} for p, r in zip(parameters, rates, strict=True)]
    accelerator = Accelerator()
    adam = accelerator.prepare(torch.optim.Adam(groups, betas=BETAS))
    teacher.eval()
    generator = random.Random(seed)
    try:
        for p in parameters:
            p.requires_grad_(True)
        for step in range(steps):
            batch = place(generator.choice(batches), model)
            with torch.no_grad():
                wanted = teacher(**batch)
            for group, rate in zip(adam.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
            with torch.enable_grad(), accelerator.autocast():
                accelerator.backward(_distance(model(**batch), wanted, batch))
            adam.step()
            adam.zero_grad()
    finally:
        for p, want in others.values():
            p.requires_grad_(want)
            p.grad = None


def _distance(found: Any, wanted: Any, batch: dict[str, Any]) -> Tensor:
    """KL divergence of logits, or squared error of last hidden states and cosine of their means."""
    if getattr(wanted, "logits", None) is not None:
        p, q = (x.logits.float().flatten(0, -2) for x in (wanted, found))
        if p.shape[-1] == 1:
            return F.mse_loss(q, p)
        if wanted.logits.ndim == 3:
            mask = tokens_of(batch, wanted.logits.shape[:-1]).to(p.device)
            p, q = p[mask], q[mask]
        return F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean")
    p, q = (x.last_hidden_state.float() for x in (wanted, found))
    mask = tokens_of(batch, p.shape[:-1]).to(p.device).view(*p.shape[:-1], 1).float()
    error = ((p - q).square() * mask).sum() / (p.square() * mask).sum()
    means = [(x * mask).sum(1) / mask.sum(1) for x in (p, q)]
    return 0.5 * error + (1 - F.cosine_similarity(*means)).mean()
