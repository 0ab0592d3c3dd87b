"""Data for ridge regression, and slow solutions of it."""

import itertools

import numpy as np
import torch
from sklearn.linear_model import Ridge

from snnk.ridge.sums import RidgeStats

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def data(n=120, m=7, t=2, seed=0, noise=0.5):
    g = torch.Generator().manual_seed(seed)
    phi, w, e = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((n, m), (m, t), (n, t)))
    phi = phi @ torch.randn(m, m, generator=g, dtype=torch.float64) + 3
    return phi, phi @ w + 5 + noise * e, torch.rand(n, generator=g, dtype=torch.float64) * 3


def fit(phi, y, weight=None, *, fold=None, parts=(50, 1), **options):
    """Statistics fed in uneven batches."""
    stats = RidgeStats(phi.shape[1], 1 if y.ndim == 1 else y.shape[1], **options)
    edges = [0, *np.cumsum(parts).tolist(), len(phi)]
    for a, b in itertools.pairwise(edges):
        stats.update(phi[a:b], y[a:b], *(None if x is None else x[a:b] for x in (weight, fold)))
    return stats


def refit(phi, y, lam, weight=None, intercept=True):
    """scikit-learn's weight and bias."""
    model = Ridge(alpha=lam, fit_intercept=intercept, solver="cholesky").fit(phi, y, weight)
    bias = torch.as_tensor(model.intercept_, dtype=torch.float64).reshape(-1)
    return torch.as_tensor(model.coef_).reshape(-1, phi.shape[1]), bias


def assert_same(a, b, **tolerance):
    tolerance = {**TIGHT, **tolerance}
    assert torch.allclose(a.weight, b.weight, **tolerance) and torch.allclose(a.bias, b.bias, **tolerance)


def hat(phi, lam, weight=None, intercept=True):
    """The matrix that maps sqrt(w) y to its fit; the unpenalised intercept is a column of ones."""
    x = np.c_[np.ones((len(phi), int(intercept))), phi.numpy()]
    x = x * (1 if weight is None else np.sqrt(weight.numpy())[:, None])
    penalty = lam * np.eye(x.shape[1])
    penalty[:intercept, :intercept] = 0
    return x @ np.linalg.solve(x.T @ x + penalty, x.T)


def brute_gcv(phi, y, lam, weight=None, intercept=True):
    h, root = hat(phi, lam, weight, intercept), 1 if weight is None else weight.sqrt().numpy()[:, None]
    n, target = len(phi), y.numpy() * root
    rss = np.square(target - h @ target).sum(0).mean()
    return n * rss / (n - np.trace(h)) ** 2


def thirds(**options):
    phi, y, weight = data()
    cuts = (slice(0, 30), slice(30, 70), slice(70, None))
    return [fit(phi[c], y[c], weight[c], parts=(11,), **options) for c in cuts], fit(phi, y, weight, **options)
