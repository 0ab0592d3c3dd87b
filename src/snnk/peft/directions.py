"""Directions for adapters from data: principal components of the activations, or of the gradients behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from snnk import _checks
from snnk.hf.models import Batch, place
from snnk.hf.record import recording, rows_at, unchunked
from snnk.maps import Directions
from snnk.maps.base import NORMALIZERS
from snnk.nn.adapter import SNNKAdapter


class Moments:
    """Sums over inputs x (n, d) of a feature map, normalised as it does, and gradients g (n, d) behind it, in float64.

    Args:
        dim: d.
        normalize: of the feature map.
    """

    def __init__(self, dim: int, normalize: str = "none") -> None:
        self.count, self.normalize = 0, normalize
        self.x, self.xx, self.g, self.gx = (torch.zeros(s, dtype=torch.float64) for s in ((dim,), (dim, dim)) * 2)

    def add(self, x: Tensor, g: Tensor | None = None) -> None:
        x = NORMALIZERS[self.normalize](x.detach().cpu().double())
        self.count += len(x)
        self.x += x.sum(0)
        self.xx += x.T @ x
        if g is not None:
            g = g.detach().cpu().double()
            self.g += g.sum(0)
            self.gx += g.T @ x

    @property
    def mean(self) -> Tensor:
        return self.x / self.count

    def covariance(self) -> Tensor:
        """Of x, (d, d)."""
        return self.xx / self.count - torch.outer(self.mean, self.mean)

    def cross(self) -> Tensor:
        """Of g with x, (d, d)."""
        return self.gx / self.count - torch.outer(self.g / self.count, self.mean)


def _pca(moments: Moments, count: int) -> Tensor:
    return torch.linalg.eigh(moments.covariance())[1].T.flip(0)[:count]


def _gradient(moments: Moments, count: int) -> Tensor:
    return torch.linalg.svd(moments.cross())[2][:count]


# (moments, m) -> directions (m, d), the most telling first; they are scaled to unit variance afterwards
METHODS: dict[str, Callable[[Moments, int], Tensor]] = {"pca": _pca, "gradient": _gradient}


def fit_directions_(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    method: str | None = None,
    *,
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None,
    max_batches: int = 20,
) -> nn.Module:
    """Point the features of new adapters along directions of their own inputs, in one pass over a few batches.

    Args:
        model: with adapters that are not trained yet and have `Directions` as feature map (in PEFT:
            directions="pca" or "gradient").
        batches: keyword arguments of the model, such as a DataLoader gives; `attention_mask` is respected.
        method: "pca", the inputs' principal directions, or "gradient", those in which the inputs tell most about the
            gradient of the loss behind the adapter; that needs labels in the batches. None is what the active adapters
            of a PEFT model were configured with, else "pca".
        loss: (model, batch) -> scalar; by default model(**batch).loss.
        max_batches: how many are enough.

    Example:
        >>> adapter, x = SNNKAdapter(8, 2, Directions(8, 2, lambda z: z)), torch.randn(64, 8)
        >>> phi = fit_directions_(adapter, [{"x": x}]).feature_map(x)
        >>> bool(torch.allclose(phi.var(0, correction=0), torch.ones(2), atol=1e-4))
        True
    """
    method = _configured(model) if method is None else method
    fit = _checks.look_up(method, METHODS, "method")
    adapters = {name: m for name, m in model.named_modules() if isinstance(m, SNNKAdapter)}
    adapters = {name: m for name, m in adapters.items() if isinstance(m.feature_map, Directions)}
    if not adapters:
        raise ValueError(
            "no adapter of the model has features along directions; in PEFT they come with directions='pca' or "
            "'gradient', elsewhere with Directions(...) as feature map"
        )
    small = [f"{name} ({m.num_features} of {m.dim})" for name, m in adapters.items() if m.num_features > m.dim]
    if small:
        raise ValueError(f"more features than directions: {', '.join(small)}")
    if isinstance(batches, Mapping | Tensor):
        raise TypeError(
            f"batches must be several, as a DataLoader gives; got one {type(batches).__name__}: use [batch]"
        )
    found = {name: Moments(adapter.dim, adapter.feature_map.normalize) for name, adapter in adapters.items()}
    gradients = method == "gradient"
    modes = [(module, module.training) for module in model.modules()]  # PEFT's wrapper of a model in eval mode trains
    accumulated = [(p, p.grad) for p in model.parameters()] if gradients else []
    model.eval()
    try:
        for p, _ in accumulated:
            p.grad = None  # ours would be added to the caller's
        for batch in islice(batches, max_batches):
            if not isinstance(batch, Mapping):
                raise TypeError(f"a batch must be a dict of the model's inputs; got {type(batch).__name__}")
            batch = place(batch, model)
            with (
                _watched(model, adapters, found, batch, gradients),
                unchunked(model),
                torch.set_grad_enabled(gradients),
            ):
                if not gradients:
                    model(**batch)
                    continue
                value = getattr(model(**batch), "loss", None) if loss is None else loss(model, batch)
                if value is None:
                    raise ValueError(
                        f"directions of the gradient need a loss; the batches have {', '.join(batch)}: put labels in "
                        "them, or give loss=, (model, batch) -> scalar"
                    )
                value.backward()
    finally:
        for module, training in modes:
            module.training = training
        for p, grad in accumulated:
            p.grad = grad
    if not any(moments.count for moments in found.values()):
        raise ValueError(f"no adapter was run: {', '.join(adapters)}; are there batches, and are the adapters active?")
    seen = {name: adapter for name, adapter in adapters.items() if found[name].count}  # others are not active in PEFT
    few = [f"{name} ({found[name].count})" for name, a in seen.items() if found[name].count <= a.num_features]
    if few:
        raise ValueError(f"more tokens than features are needed; seen by {', '.join(few)}")
    trained = [name for name, a in seen.items() if not a.starts_as_identity]
    if trained:
        raise ValueError(f"new directions would be wrong for the trained matrix of {', '.join(trained)}")
    for name in seen:
        if not all(torch.isfinite(sums).all() for sums in (found[name].xx, found[name].gx)):
            raise ValueError(f"inputs or gradients of {name} are not all finite; is the model, or a batch?")
    for name, adapter in seen.items():
        moments = found[name]
        rows = fit(moments, adapter.num_features)
        spread = torch.einsum("md,de,me->m", rows, moments.covariance(), rows).clamp_min(0).sqrt()
        rows = rows / spread.clamp_min(1e-6 * spread.max().clamp_min(1e-30))[:, None]
        fm: Any = adapter.feature_map
        fm.set_(rows.to(fm.projection.device), moments.mean)
    return model


def _configured(model: nn.Module) -> str:
    """What the active adapters of a PEFT model, wrapped or not, were configured with; "pca" where nothing says so."""
    modules: list[Any] = list(model.modules())
    configs: dict[str, Any] = next((m.peft_config for m in modules if hasattr(m, "peft_config")), {})
    active = {name for m in modules if hasattr(m, "snnk_adapter") for name in m.active_adapters}
    asked = {name: configs[name].directions for name in sorted(active) if name in configs}
    asked = {name: directions for name, directions in asked.items() if directions in METHODS}
    if len(set(asked.values())) > 1:
        told = ", ".join(f"{name} {directions!r}" for name, directions in asked.items())
        raise ValueError(f"the active adapters ask for different directions: {told}; name one with method=")
    return next(iter(asked.values()), "pca")


@contextmanager
def _watched(
    model: nn.Module, adapters: dict[str, SNNKAdapter], found: dict[str, Moments], batch: Batch, gradients: bool
) -> Iterator[None]:
    """Add to `found` what each adapter reads, and the gradient at what it adds, which is that at the sum behind it."""
    inputs: dict[str, Tensor] = {}
    owners = {name: name.partition(".snnk_adapter.")[0] for name in adapters}  # in PEFT the layer that adds them up

    def rows(name: str, x: Tensor) -> Tensor:
        return rows_at(name, x, batch, model)

    def read(name: str, x: Tensor, _: Tensor) -> None:
        if gradients:
            inputs[name] = x
        else:
            found[name].add(rows(name, x))

    def added(owner: str, _: Tensor, total: Tensor) -> None:
        for name in [name for name in inputs if owners[name] == owner]:
            x = inputs.pop(name)
            if not total.requires_grad or not any(p.requires_grad for p in adapters[name].parameters()):
                raise ValueError("directions of the gradient need an adapter that trains; this one is frozen")
            total.register_hook(lambda g, name=name, x=x: found[name].add(rows(name, x), rows(name, g)))

    maps = {name: adapter.feature_map for name, adapter in adapters.items()}
    sums = {owner: model.get_submodule(owner) for owner in owners.values()} if gradients else {}
    with recording(maps, read), recording(sums, added):
        yield
