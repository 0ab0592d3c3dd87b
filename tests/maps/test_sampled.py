"""Frequencies that are sampled from a Fourier transform."""

import numpy as np
import pytest
import torch
from scipy import stats

from snnk import ACTIVATIONS, URF, UnreachableError
from snnk.maps.sampled import Sampled

from helpers.maps import F64, unit


def test_block_iid_shares_frequencies():
    omega, *_ = Sampled(block_size=4).rows(ACTIVATIONS["tanh"], -1, 1, 40, torch.Generator().manual_seed(0))
    blocks = omega.reshape(10, 4)
    assert (blocks == blocks[:, :1]).all() and len(set(blocks[:, 0])) == 10
    omega, *_ = Sampled().rows(ACTIVATIONS["tanh"], -1, 1, 40, torch.Generator().manual_seed(0))
    assert len(set(omega)) == 40


def test_reach_of_sampled_maps_is_kept():
    """The proposal follows the reach, and weights beyond it are refused however small the sample's own error."""
    fm = URF.paper(6, 400, "tanh", antithetic=True, rho="balanced", w_norm=1.4, on_error="raise")
    with pytest.raises(UnreachableError, match=r"below 1\.57"):
        fm.psi(unit(2, 6, 0, 1.6))
    omegas = [
        np.mean(Sampled().rows(ACTIVATIONS["tanh"], -1, 1, 4000, torch.Generator().manual_seed(0), kappa)[0])
        for kappa in (0.1, 1.4)
    ]
    assert omegas[1] > 3 * omegas[0]


def test_other_proposals():
    for proposal in (stats.norm(scale=0.4), [stats.norm(scale=s) for s in (1, 1, 0.4, 0.5)]):
        fm = URF.paper(6, 400, "erf", proposal=proposal, rho="balanced", **F64)
        assert fm.psi(unit(2, 6, 0)).isfinite().all()
    with pytest.raises(ValueError, match=r"one distribution or four.*got 2"):
        URF.paper(6, 400, "erf", proposal=[stats.norm(), stats.norm()])
    with pytest.raises(ValueError, match="has 2 parts; num_features must be at least 4"):
        URF.paper(6, 2, "sigmoid")
