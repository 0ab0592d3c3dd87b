"""Directions for adapters from data: principal components of the inputs, or of the gradients behind the adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from snnk import _checks
from snnk.hf.models import Batch, check_batches, evaluating, place
from snnk.hf.record import recording, rows_at, unchunked
from snnk.maps import Directions
from snnk.maps.base import NORMALIZERS
from snnk.nn.adapter import SNNKAdapter

Loss = Callable[[nn.Module, Batch], Tensor]


class Moments:
    """Sums, in float64, over normalised inputs x (n, d) of a feature map and gradients g (n, d) behind its adapter.

    Args:
        dim: d.
        normalize: how the feature map normalises its inputs.
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
        """Covariance of x, (d, d)."""
        return self.xx / self.count - torch.outer(self.mean, self.mean)

    def cross(self) -> Tensor:
        """Covariance of g with x, (d, d)."""
        return self.gx / self.count - torch.outer(self.g / self.count, self.mean)


def _pca(moments: Moments, count: int) -> Tensor:
    return torch.linalg.eigh(moments.covariance())[1].T.flip(0)[:count]


def _gradient(moments: Moments, count: int) -> Tensor:
    return torch.linalg.svd(moments.cross())[2][:count]


# (moments, m) -> directions (m, d), in descending order of importance; they are scaled to unit variance afterwards
FITS: dict[str, Callable[[Moments, int], Tensor]] = {"pca": _pca, "gradient": _gradient}


def fit_directions_(
    model: nn.Module,
    batches: Iterable[Batch],
    directions: str | None = None,
    *,
    loss: Loss | None = None,
    max_batches: int = 20,
) -> nn.Module:
    """Compute the directions of new adapters from their own inputs, in one pass over a few batches.

    Args:
        model: with adapters that are not trained yet and have `Directions` as feature map; in PEFT, adapters with
            directions="pca" or "gradient".
        batches: keyword arguments of the model, such as a DataLoader gives. Padding in `attention_mask` is left out.
        directions: "pca", the principal directions of the inputs, or "gradient", the directions of the inputs with the
            largest covariance with the gradient of the loss behind the adapter, which needs labels in the batches. By
            default the value that the active adapters of a PEFT model were configured with, else "pca".
        loss: (model, batch) -> scalar; by default model(**batch).loss.
        max_batches: number of batches that are read.

    Example:
        >>> adapter, x = SNNKAdapter(8, 2, Directions(8, 2, lambda z: z)), torch.randn(64, 8)
        >>> phi = fit_directions_(adapter, [{"x": x}]).feature_map(x)
        >>> bool(torch.allclose(phi.var(0, correction=0), torch.ones(2), atol=1e-4))
        True
    """
    directions = _configured(model) if directions is None else directions
    fit = _checks.look_up(directions, FITS, "directions")
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
    found = _read(model, adapters, islice(check_batches(batches), max_batches), directions == "gradient", loss)
    if not found:
        raise ValueError(f"no adapter was run: {', '.join(adapters)}; are there batches, and are the adapters active?")
    seen = {name: adapters[name] for name in found}
    few = [f"{name} ({found[name].count})" for name, a in seen.items() if found[name].count <= a.num_features]
    if few:
        raise ValueError(f"more tokens than features are needed; got {', '.join(few)}")
    trained = [name for name, a in seen.items() if not a.starts_as_identity]
    if trained:
        raise ValueError(f"new directions would be wrong for the trained matrix of {', '.join(trained)}")
    for name, moments in found.items():
        if not all(torch.isfinite(sums).all() for sums in (moments.xx, moments.gx)):
            raise ValueError(f"inputs or gradients of {name} are not all finite; check the model and the batches")
    for name, adapter in seen.items():
        rows, covariance = fit(found[name], adapter.num_features), found[name].covariance()
        spread = torch.einsum("md,de,me->m", rows, covariance, rows).clamp_min(0).sqrt()
        rows = rows / spread.clamp_min(1e-6 * spread.max().clamp_min(1e-30))[:, None]
        fm: Any = adapter.feature_map
        fm.set_(rows.to(fm.projection.device), found[name].mean)
    return model


def _configured(model: nn.Module) -> str:
    """The directions that the active adapters of a PEFT model, wrapped or not, are configured with; else "pca"."""
    modules: list[Any] = list(model.modules())
    configs: dict[str, Any] = next((m.peft_config for m in modules if hasattr(m, "peft_config")), {})
    active = {name for m in modules if hasattr(m, "snnk_adapter") for name in m.active_adapters}
    asked = {name: configs[name].directions for name in sorted(active) if name in configs}
    asked = {name: directions for name, directions in asked.items() if directions in FITS}
    if len(set(asked.values())) > 1:
        listed = ", ".join(f"{name} {directions!r}" for name, directions in asked.items())
        raise ValueError(f"the active adapters are configured with different directions: {listed}; give directions=")
    return next(iter(asked.values()), "pca")


def _read(
    model: nn.Module, adapters: dict[str, SNNKAdapter], batches: Iterable[Batch], gradients: bool, loss: Loss | None
) -> dict[str, Moments]:
    """The moments of each adapter that runs; in PEFT those that are not active do not."""
    found = {name: Moments(adapter.dim, adapter.feature_map.normalize) for name, adapter in adapters.items()}
    accumulated = [(p, p.grad) for p in model.parameters()] if gradients else []
    try:
        for p, _ in accumulated:
            p.grad = None  # ours would be added to the caller's
        with evaluating(model), unchunked(model), torch.set_grad_enabled(gradients):
            for batch in batches:
                batch = place(batch, model)
                with _watched(model, adapters, found, batch, gradients):
                    if not gradients:
                        model(**batch)
                        continue
                    value = getattr(model(**batch), "loss", None) if loss is None else loss(model, batch)
                    if value is None:
                        raise ValueError(
                            f"directions of the gradient need a loss; the batches have {', '.join(batch)}: put labels "
                            "in them, or give loss=, (model, batch) -> scalar"
                        )
                    value.backward()
    finally:
        for p, grad in accumulated:
            p.grad = grad
    return {name: moments for name, moments in found.items() if moments.count}


@contextmanager
def _watched(
    model: nn.Module, adapters: dict[str, SNNKAdapter], found: dict[str, Moments], batch: Batch, gradients: bool
) -> Iterator[None]:
    """Add to `found` the inputs of each adapter, and the gradients at its output, which equal those at the sum."""
    inputs: dict[str, Tensor] = {}
    owners = {name: name.partition(".snnk_adapter.")[0] for name in adapters}  # in PEFT the layer with the sum

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
                raise ValueError("directions of the gradient need adapters that are trained; this one is frozen")
            total.register_hook(lambda g, name=name, x=x: found[name].add(rows(name, x), rows(name, g)))

    maps = {name: adapter.feature_map for name, adapter in adapters.items()}
    sums = {owner: model.get_submodule(owner) for owner in owners.values()} if gradients else {}
    with recording(maps, read), recording(sums, added):
        yield
