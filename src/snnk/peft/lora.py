r"""The LoRA adapter nearest to an SNNK adapter, for servers that support LoRA only.

Behind y = Wx + b an SNNK adapter adds delta(y), and LoRA adds B A x + c. Least squares of delta(y) on x, over
calibration tokens, gives M (out, in) and c. With S the covariance of x, the best M of rank r is U U^T M, with U the
first r eigenvectors of the covariance M S M^T of the fitted outputs (reduced-rank regression): B = U, A = U^T M. delta
has at most num_features directions, so that a higher rank gains nothing. The mean of delta needs c, which is PEFT's
`lora_bias`; without it M is fitted through the origin and explains the part of the mean that x can explain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from snnk import _checks, _io
from snnk.hf.model_blocks import weight_of
from snnk.hf.models import Batch, check_batches, evaluating, place
from snnk.hf.record import hold_out, recording, rows_at, unchunked
from snnk.peft.layer import AdaptedLinear
from snnk.peft.model import layers_of, plain_name
from snnk.ridge.sums import RidgeStats

MOST_BYTES = 2**31  # of sums in memory at once; if the layers need more, there are several passes over the batches
Layers = list[tuple[str, AdaptedLinear]]


@dataclass(frozen=True)
class LoraSite:
    """One layer, measured on held-out tokens: `explained` is 1 - squared error / variance of delta(y)."""

    name: str
    num_features: int
    error: float  # mean squared
    variance: float  # mean squared about the mean

    @property
    def explained(self) -> float:
        return _explained(self.error, self.variance)


@dataclass(frozen=True)
class LoraConversion:
    """A LoRA adapter, and the part of the SNNK adapter's effect that it explains; printed as a table.

    Args:
        config: its configuration in PEFT.
        state_dict: its tensors by their names in a file, with the modules that were trained in addition to the adapter.
        sites: one per layer.
        tokens, held_out_tokens: numbers of tokens for the fit and for the measurement.
    """

    config: LoraConfig
    state_dict: dict[str, Tensor] = field(repr=False)
    sites: tuple[LoraSite, ...]
    tokens: int
    held_out_tokens: int

    @property
    def explained(self) -> float:
        """The explained part over all layers together."""
        return _explained(sum(s.error for s in self.sites), sum(s.variance for s in self.sites))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter to a folder, which PeftModel.from_pretrained loads without snnk."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder, SAFETENSORS_WEIGHTS_NAME)
        _io.write_tensors(path, self.state_dict, {"format": "pt"})
        self.config.save_pretrained(os.fspath(folder))

    def __str__(self) -> str:
        width = max(len("all layers"), *(len(site.name) for site in self.sites)) + 2
        lines = [f"{'layer':<{width}}{'features':>9}{'rank':>6}{'explained':>11}"]
        for site in self.sites:
            lines.append(f"{site.name:<{width}}{site.num_features:>9}{self.config.r:>6}{site.explained:>11.4f}")
        lines.append(f"{'all layers':<{width}}{'':>9}{self.config.r:>6}{self.explained:>11.4f}")
        bias = "with a bias" if self.config.lora_bias else "without a bias"
        return "\n".join(
            [*lines, f"LoRA {bias}, fitted to {self.tokens:,} tokens, measured on {self.held_out_tokens:,} others"]
        )


def to_lora(
    model: Any,
    rank: int,
    batches: Iterable[Batch],
    adapter_name: str = "default",
    *,
    lora_bias: bool | None = None,
) -> LoraConversion:
    """Fit a LoRA adapter on the same layers to the outputs of an SNNK adapter on unlabelled inputs.

    Args:
        model: with the adapter, wrapped by PEFT or not; it is not changed.
        rank: rank of the LoRA adapter; at most the smallest size of a layer.
        batches: inputs of the model; padding in `attention_mask` is left out. Every tenth batch is held out to measure
            the error.
        adapter_name: name of the SNNK adapter.
        lora_bias: fit a bias too, for the mean of the adapter's outputs. Default: only if all layers have a bias, as
            PEFT cannot merge it otherwise. Some servers do not support `lora_bias`; use False for them.

    Example:
        >>> from peft import get_peft_model
        >>> from transformers import BertConfig, BertModel
        >>> from snnk.peft import SNNKConfig
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = get_peft_model(BertModel(BertConfig(vocab_size=50, **sizes)), SNNKConfig(init_weights=False))
        >>> batches = [{"input_ids": torch.randint(50, (8, 16))} for _ in range(10)]
        >>> print(to_lora(model, 4, batches))  # doctest: +ELLIPSIS
        layer                                    features  rank  explained
        encoder.layer.0.attention.output.dense         16     4     0...
    """
    rank = _checks.positive_int(rank, "rank")
    configs, layers = getattr(model, "peft_config", {}), layers_of(model, adapter_name)
    if adapter_name not in configs or not layers:
        raise ValueError(f"the model has no SNNK adapter {adapter_name!r}; its adapters are {list(configs)}")
    config = configs[adapter_name]
    bases: list[Any] = [layer.get_base_layer() for _, layer in layers]
    sizes = [_sizes(base) for base in bases]
    if rank > min(map(min, sizes)):
        raise ValueError(f"rank must be at most {min(map(min, sizes))}, the smallest size of a layer; got {rank}")
    if lora_bias is None:
        lora_bias = all(base.bias is not None for base in bases)
    training, held = hold_out(list(check_batches(batches)))
    tensors: dict[str, Tensor] = {}
    sites: list[LoraSite] = []
    tokens = held_tokens = 0
    with evaluating(model), torch.no_grad(), _only(model, adapter_name):
        for group in _groups(layers, sizes):
            fitted = _sums(model, group, training, adapter_name)
            solved = {name: _reduced_rank(stats, rank, lora_bias) for name, stats in fitted.items()}
            tokens = int(next(iter(fitted.values())).rows.sum())
            del fitted
            lost, held_tokens = _errors(model, group, held, adapter_name, solved)
            for name, layer in group:
                adapter: Any = layer.snnk_adapter[adapter_name]
                sites.append(LoraSite(name, adapter.num_features, *lost[name]))
                a, b, c = (t.float().contiguous() for t in solved[name])
                key = f"base_model.model.{name}"
                tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
                if lora_bias:
                    tensors[f"{key}.lora_B.bias"] = c
    beside = get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    tensors |= {
        key if key.startswith("base_model.model.") else f"base_model.model.{key}": value.detach().cpu().contiguous()
        for key, value in beside.items()
        if ".snnk_adapter." not in key
    }
    names = [name for name, _ in layers]
    endings = tuple(f".{name}" for name in names)  # PEFT also matches names as endings
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    others = [name for name in (plain_name(n) for n, _ in base.named_modules()) if name not in names]
    lora = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_bias=lora_bias,
        target_modules=names,
        exclude_modules="|".join(re.escape(name) for name in others if name.endswith(endings)) or None,
        fan_in_fan_out=isinstance(bases[0], Conv1D),
        modules_to_save=config.modules_to_save,
        task_type=config.task_type,
        base_model_name_or_path=config.base_model_name_or_path,
        inference_mode=True,
    )
    return LoraConversion(lora, tensors, tuple(sites), tokens, held_tokens)


def _reduced_rank(stats: RidgeStats, rank: int, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A (r, in), B (out, r) and c (out,): the best approximation of that rank to the ridge solution."""
    factor = stats.factor(intercept=bias)
    weight = factor.search().weight
    spread = weight @ factor.vectors * factor.values.sqrt()
    _, vectors = torch.linalg.eigh(spread @ spread.T)
    b = vectors[:, -rank:].flip(1)
    a = b.T @ weight
    x, d = factor.mean.split(list(weight.shape[::-1]))
    return a, b, d - b @ (a @ x)


def _sums(model: nn.Module, group: Layers, batches: list[Batch], adapter_name: str) -> dict[str, RidgeStats]:
    """Statistics of (x, delta(y)) per layer, in one pass over the batches."""
    found: dict[str, RidgeStats] = {}
    for name, x, d in _rows(model, group, batches, adapter_name):
        block = torch.float64 if x.dtype == torch.float64 else torch.float32
        if name not in found:
            found[name] = RidgeStats(x.shape[1], d.shape[1], block_dtype=block)
        found[name].update(x, d)
    return found


def _errors(
    model: nn.Module,
    group: Layers,
    batches: list[Batch],
    adapter_name: str,
    solved: dict[str, tuple[Tensor, Tensor, Tensor]],
) -> tuple[dict[str, tuple[float, float]], int]:
    """Mean squared error of the fit and variance of delta(y), per layer; and the number of tokens."""
    sums: dict[str, list[Any]] = {name: [0, 0.0, 0.0, 0.0] for name, _ in group}
    for name, x, d in _rows(model, group, batches, adapter_name):
        a, b, c = solved[name]
        x, d = x.double(), d.double()
        terms = len(d), (d - (x @ a.T @ b.T + c)).square().sum(), d.square().sum(), d.sum(0)
        sums[name] = [old + new for old, new in zip(sums[name], terms, strict=True)]
    lost = {
        name: (float(error) / n, max(float(square) / n - float((total / n).square().sum()), 0.0))
        for name, (n, error, square, total) in sums.items()
    }
    return lost, next(iter(sums.values()))[0]


def _rows(
    model: nn.Module, group: Layers, batches: list[Batch], adapter_name: str
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(layer, x (n, in), delta (n, out)) for each batch and layer, without padding."""
    layers: dict[str, Any] = dict(group)
    seen: list[tuple[str, Tensor]] = []
    for batch in batches:
        batch = place(batch, model)
        with unchunked(model), recording(layers, lambda name, x, _: seen.append((name, x))):
            model(**batch)
        for name, read in seen:
            x = rows_at(name, read, batch, model)
            yield name, x.cpu(), layers[name].delta(adapter_name, layers[name].base_layer(x)).cpu()
        seen.clear()


@contextmanager
def _only(model: nn.Module, adapter_name: str) -> Iterator[None]:
    """Inside the `with` only this adapter is active. PEFT's own method would also change requires_grad."""
    layers = [layer for layer in model.modules() if isinstance(layer, AdaptedLinear)]
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:
            layer._active_adapter, layer._disable_adapters = [adapter_name], False
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = state


def _groups(layers: Layers, sizes: list[tuple[int, int]]) -> Iterator[Layers]:
    """Groups of layers whose sums fit into memory together."""
    group: Layers = []
    used = 0
    for layer, (d, o) in zip(layers, sizes, strict=True):
        size = 8 * d * (d + o)
        if group and used + size > MOST_BYTES:
            yield group
            group, used = [], 0
        group.append(layer)
        used += size
    yield group


def _sizes(layer: Any) -> tuple[int, int]:
    weight = weight_of(layer)
    return weight.shape[1], weight.shape[0]


def _explained(error: float, variance: float) -> float:
    return 1 - error / variance if variance else float(error == 0)
