r"""Short trigonometric series f(z) ~ sum_k alpha_k cos(omega_k z) + beta_k sin(omega_k z) on the range that z takes.

This is the paper's "discrete case with K atoms" (section 3.1) with atoms that we choose. One antithetic projection of
frequency omega estimates cos(omega z) or sin(omega z) with variance sinh^2(omega kappa) at |x||w| = kappa, x and w in
general position. So the mean squared error of the whole estimate is

    mean_z (f(z) - series(z))^2  +  sum_k (alpha_k^2 + beta_k^2) sinh^2(omega_k kappa) / P_k,

a ridge problem for given counts P_k; the best counts for given coefficients are proportional to |a_k| sinh(omega_k
kappa). `fit_series` alternates the two over a grid of base frequencies and lengths and keeps the least error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

MAX_TERMS = 8
SWEEPS = 6
# Stretch of the half period over the half range: 1 is Fourier's own, more lets a non-periodic f be smooth.
STRETCHES = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)
# The first atom stands for a constant and a straight line: a frequency so low that it costs no variance.
FLAT = 0.01


@dataclass(frozen=True)
class Series:
    """Frequencies, coefficients and the projections given to each term; all (K,)."""

    omega: Array
    alpha: Array
    beta: Array
    counts: Array

    def __call__(self, z: Array) -> Array:
        angle = np.asarray(z)[..., None] * self.omega
        return np.cos(angle) @ self.alpha + np.sin(angle) @ self.beta

    def variance(self, kappa: float, dim: int | None = None) -> float:
        """Predicted variance at |x||w| = kappa; `dim` as for `fit_series`."""
        return float(np.sum((self.alpha**2 + self.beta**2) * _cost(self.omega * kappa, self.counts, dim)))


def block_factor(counts: Array, dim: int) -> Array:
    """Variance of a mean that is constant over `dim` orthogonal rows, relative to independent rows.

    Whole blocks have none; the r rows left over are drawn without replacement.
    """
    left = counts % dim
    return left * (1 - (left - 1) / max(dim - 1, 1)) / counts


def _cost(t: Array, counts: Array, dim: int | None) -> Array:
    """Variance of one term of size 1 at t = omega kappa; orthogonal rows take t^2, its first order, out of blocks."""
    first = t**2
    return (np.sinh(t) ** 2 - first + first * (1.0 if dim is None else block_factor(counts, dim))) / counts


def _share(weights: Array, total: int) -> Array:
    """Integers >= 1 with the given sum, as near as possible to proportional to `weights`."""
    k = len(weights)
    weights = weights if weights.sum() > 0 else np.ones(k)
    exact = weights / weights.sum() * (total - k)
    counts = np.floor(exact).astype(int)
    spare = total - k - counts.sum()
    counts[np.argsort(exact - counts)[::-1][:spare]] += 1
    return counts + 1


def fit_series(z: Array, f: Array, kappa: float, projections: int, dim: int | None = None) -> Series:
    """Series of least predicted error for values `f` at points `z`, shared over `projections` projections.

    Args:
        z: points, (n,), drawn from or spread over the range that z really takes.
        f: the activation's values there, (n,).
        kappa: |x||w|, typically.
        projections: how many projections there are in all.
        dim: the size of blocks of orthogonal rows; None for independent rows.

    Example:
        >>> z = np.linspace(-2, 2, 200)
        >>> float(np.abs(fit_series(z, np.tanh(z), 0.1, 4096)(z) - np.tanh(z)).max()) < 1e-2
        True
    """
    reach = max(float(np.abs(z).max()), kappa, 1e-3)
    half = max((z.max() - z.min()) / 2, 1e-3 * reach)
    best: tuple[float, Series] | None = None
    for stretch in STRETCHES:
        base = np.pi / (half * stretch)
        for terms in range(min(MAX_TERMS, projections - 1) + 1):
            omega = np.concatenate([[FLAT / reach], base * np.arange(1, terms + 1)])
            if omega[-1] * kappa > 50:
                break  # exp(100) of variance: no series with this term can win, and sinh would overflow later
            candidate, error = _fit_terms(z, f, omega, kappa, projections, dim)
            if best is None or error < best[0]:
                best = error, candidate
    if best is None:
        raise RuntimeError("no series was tried")
    return best[1]


def _fit_terms(
    z: Array, f: Array, omega: Array, kappa: float, projections: int, dim: int | None
) -> tuple[Series, float]:
    angle = z[:, None] * omega
    basis = np.concatenate([np.cos(angle), np.sin(angle)], 1)
    gram, target = basis.T @ basis / len(z), basis.T @ f / len(z)
    rounding = 1e-13 * np.trace(gram) / len(gram)
    spread = np.sinh(omega * kappa)
    counts = _share(np.ones(len(omega)), projections)
    for sweep in range(SWEEPS):
        cost = np.tile(_cost(omega * kappa, counts, dim), 2)
        ab = np.linalg.solve(gram + np.diag(cost + rounding), target)
        alpha, beta = np.split(ab, 2)
        new = _share(np.hypot(alpha, beta) * spread, projections)
        if sweep == SWEEPS - 1 or np.array_equal(new, counts):
            break
        counts = new
    series = Series(omega, alpha, beta, counts)
    return series, float(np.mean((f - basis @ ab) ** 2)) + series.variance(kappa, dim)
