r"""Frequencies sampled from a Fourier transform, with importance weights (section 3.1, the continuous case).

f(z) = sum_j c_j E_{xi ~ pbar_j}[p_j(xi) / pbar_j(xi) exp(2 pi i xi z)] over the four non-negative parts j of the
transform, where c_j p_j is that part, up to its sign or a factor i. Only the ratio to pbar_j is needed, so a part need
not be integrable. Transforms with a pole of order two at 0 (relu, gelu, silu, softplus) have no such expectation;
theirs are replaced by the transform of the windowed function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Generator

from snnk import _checks
from snnk.maps.activations import Activation
from snnk.maps.series import Array


@dataclass(frozen=True)
class Sampled:
    """Frequencies drawn from a proposal density with importance weights, the paper's continuous case.

    Args:
        proposal: a frozen continuous scipy.stats distribution of xi on the real line, or four, one for each part. Its
            density times exp(-4 pi xi |x||w|) must fall slower than the square of the transform, or the variance is
            infinite: a Gaussian is too light for tanh. Default: Laplace with density exp(-omega), or
            exp(-(reach - |x||w|) omega) where the activation's reach leaves less than that.
        block_size: number of projections that share one xi; 1 is iid sampling, more is the paper's block-iid.
    """

    proposal: Any = None
    block_size: int = 1

    def rows(
        self,
        activation: Activation,
        low: float,
        high: float,
        projections: int,
        generator: Generator,
        kappa: float = 0.0,
    ) -> tuple[Array, Array, Array]:
        """(omega, alpha, beta), each (projections,): an equal share for each delta and each non-zero part."""
        rate = min(1.0, activation.reach - kappa) if activation.reach > kappa else 1.0
        proposal = stats.laplace(scale=1 / (2 * math.pi * rate)) if self.proposal is None else self.proposal
        proposals = list(proposal) if isinstance(proposal, list | tuple) else [proposal] * 4
        if len(proposals) != 4:
            raise ValueError(f"proposal must be one distribution or four, one for each part; got {len(proposals)}")
        size = _checks.positive_int(self.block_size, "block_size")
        spectrum = activation.spectrum
        if spectrum is None or spectrum.order > 1 or spectrum.slope:
            spectrum = activation.windowed(low, high)
        atoms = [(xi, weight) for xi, weight in spectrum.atoms if xi >= 0]
        quantiles = np.linspace(0.51, 0.99, 49)
        parts = [j for j, p in enumerate(proposals) if spectrum.parts(np.abs(p.ppf(quantiles)))[j].max() > 0]
        pieces = len(atoms) + len(parts)
        if projections < pieces:
            raise ValueError(
                f"the transform of {activation.name} has {pieces} parts; num_features must be at least {2 * pieces}"
            )
        counts = [len(share) for share in np.array_split(np.arange(projections), pieces)]
        rows = []
        for (place, mass), n in zip(atoms, counts, strict=False):
            pair = 2 if place > 0 else 1
            rows.append(np.repeat([[2 * math.pi * place], [pair * mass.real], [-pair * mass.imag]], n, axis=1))
            rows[-1][1:] *= projections / n
        for j, n in zip(parts, counts[len(atoms) :], strict=True):
            u = torch.rand(-(-n // size), generator=generator, dtype=torch.float64).clamp(1e-15, 1 - 1e-15)
            proposal = proposals[j]
            xi = np.repeat(np.abs(proposal.ppf(u.numpy())), size)[:n]
            # xi and -xi together have density pbar(xi) + pbar(-xi); 2 Re FT goes with cos, -2 Im FT with sin
            weight = 2 * spectrum.parts(xi)[j] / (proposal.pdf(xi) + proposal.pdf(-xi)) * projections / n
            signed = (1.0, -1.0, -1.0, 1.0)[j] * weight
            rows.append(np.stack([2 * math.pi * xi, signed * (j < 2), signed * (j >= 2)]))
        omega, alpha, beta = np.concatenate(rows, axis=1)
        return omega, alpha, beta
