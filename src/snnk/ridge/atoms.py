r"""Atoms: neurons that are kept from a pretrained layer, chosen for the outputs that are computed from them.

For hidden features phi in R^w with centred sums G = phi'phi, C = phi'y, ridge regression of y on a set S of them leaves
the error tr y'y - tr C_S' (G_SS + lam I)^-1 C_S. The next atom is the one that lowers it most, argmax_j
|c_j|^2 / d_j, where c_j and d_j are C_j and G_jj + lam after the projections onto the atoms chosen before it are
subtracted. This is a Cholesky factorisation with that choice of pivots (orthogonal matching pursuit for many outputs at
once). Choices are nested: the first k of m atoms are those for k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from snnk import _checks

BETAS = (0.9, 0.99)
DROPPED = 128  # atoms after whose choice their rows are left out


def choose_atoms(gram: Tensor, cross: Tensor, count: int, penalty: float) -> tuple[Tensor, Tensor]:
    """The indices of `count` features in the order of their choice, and by how much each lowers the squared error.

    Args:
        gram, cross: centred sums phi'phi (w, w) and phi'y (w, t), as RidgeStats.centred gives them.
        count: number of features to choose.
        penalty: lam > 0, in units of the sums.

    Example:
        >>> phi = torch.eye(4, dtype=torch.float64)
        >>> order, gains = choose_atoms(phi, torch.tensor([[1.0], [3.0], [0.0], [2.0]]).double(), 3, 1e-9)
        >>> order.tolist(), gains.round().tolist()
        ([1, 3, 0], [9.0, 4.0, 1.0])
    """
    width = len(gram)
    if _checks.positive_int(count, "count") > width:
        raise ValueError(f"count must be at most {width}, the number of features; got {count}")
    rest, diagonal = cross.clone(), gram.diagonal() + _checks.positive(penalty, "penalty")
    # Exact remainders are at least the penalty; what is below the rounding of the factorisation has no digits left.
    floor = (width * torch.finfo(gram.dtype).eps * gram.diagonal()).clamp_min(1e-3 * penalty)
    factor = gram.new_zeros(width, count)
    numbers = torch.arange(width, device=gram.device)  # of the rows
    free = torch.ones(width, dtype=torch.bool, device=gram.device)
    order = torch.empty(count, dtype=torch.int64, device=gram.device)
    gains = gram.new_empty(count)
    for k in range(count):
        if k % DROPPED == DROPPED - 1:  # most of the time is spent on reading rows: leave out those of chosen atoms
            gram = gram[free][:, free]
            rest, diagonal, floor, factor, numbers = (t[free] for t in (rest, diagonal, floor, factor, numbers))
            free = free[free]
        gain = torch.where(free, torch.linalg.vector_norm(rest, dim=1).square() / diagonal, -1.0)
        j = int(gain.argmax())
        column = gram[:, j] - factor[:, :k] @ factor[j, :k]
        column /= diagonal[j].sqrt()
        rest.addr_(column, rest[j] / diagonal[j].sqrt(), alpha=-1)
        diagonal = torch.maximum(diagonal - column.square(), floor)
        factor[:, k], free[j], order[k], gains[k] = column, False, numbers[j], gain[j]
    return order, gains


def relative_adam(
    parameters: Iterable[Tensor], *, rate: float, steps: int, warm_up: int = 20
) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.LambdaLR]:
    """Adam with learning rates relative to the root mean square of each parameter, and their schedule.

    The rates rise linearly over `warm_up` steps and fall linearly to 0 at `steps`. Call `schedule.step()` behind every
    `adam.step()`.

    Example:
        >>> p = torch.full((3,), 2.0, requires_grad=True)
        >>> adam, schedule = relative_adam([p], rate=0.1, steps=100, warm_up=1)
        >>> adam.param_groups[0]["lr"]
        0.2
    """
    groups = [{"params": [p], "lr": rate * float(p.detach().square().mean().sqrt())} for p in parameters]
    adam = torch.optim.Adam(groups, betas=BETAS)
    schedule = lambda step: min(1.0, (step + 1) / warm_up) * (1 - step / steps)  # noqa: E731
    return adam, torch.optim.lr_scheduler.LambdaLR(adam, schedule)


def advance_(adam: torch.optim.Adam, schedule: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Set the rates of `relative_adam` to those after a number of steps, for a training that goes on from there."""
    schedule.last_epoch, schedule._step_count = step, step + 1
    for group, rate, factor in zip(adam.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = rate * factor(step)


def refine_(
    forward: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    steps: int,
    rate: float = 0.1,
    rows: int = 1024,
    seed: int = 0,
) -> None:
    """Train atoms from their pretrained values, in place, by Adam on weight |scale (forward(x) - y)|^2.

    Args:
        forward: x (n, d) -> (n, t), through `parameters`.
        x, y, weight, scale: (n, d), (n, t), (n,) for the rows and (t,) for the outputs.
        steps, rows: number of steps, and of rows per step.
        rate: length of a step, relative to the root mean square of each parameter.
    """
    generator = torch.Generator().manual_seed(seed)
    weight, scale = weight / weight.mean(), scale / scale.square().mean().sqrt().clamp_min(1e-30)
    order = torch.empty(0, dtype=torch.int64)

    def loss() -> Tensor:
        nonlocal order
        if len(order) < min(rows, len(x)):
            order = torch.randperm(len(x), generator=generator)
        part, order = order[:rows].to(x.device), order[rows:]
        error = (forward(x[part]) - y[part]) * scale
        return (error.square().sum(1) * weight[part]).mean()

    descend(parameters, loss, rate=rate, steps=steps)


def descend(
    parameters: Sequence[Tensor], loss: Callable[[], Tensor], *, rate: float, steps: int, warm_up: int = 20
) -> None:
    """Train parameters in place by `relative_adam` on a loss, computed anew for each step; requires_grad comes back.

    Example:
        >>> p = torch.full((3,), 2.0)
        >>> descend([p], lambda: (p - 1).square().sum(), rate=0.05, steps=100)
        >>> bool((p - 1).abs().max() < 0.1), p.requires_grad
        (True, False)
    """
    adam, schedule = relative_adam(parameters, rate=rate, steps=steps, warm_up=warm_up)
    wanted = [p.requires_grad for p in parameters]
    try:
        for p in parameters:
            p.requires_grad_(True)
        for _ in range(steps):
            with torch.enable_grad():
                loss().backward()
            adam.step()
            schedule.step()
            adam.zero_grad()
    finally:
        for p, want in zip(parameters, wanted, strict=True):
            p.requires_grad_(want)
            p.grad = None
