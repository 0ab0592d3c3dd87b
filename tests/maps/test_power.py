"""Random Maclaurin features."""

import math

import pytest
import torch

from snnk import ACTIVATIONS, PowerSeries

from helpers.maps import F64, estimate, unit


def test_power_series_exact_is_the_taylor_polynomial():
    x, w, b = unit(3, 4, 0, 0.5), unit(3, 4, 1), torch.tensor([0.1, 0.0, -0.2])
    for name in ("tanh", "gelu", "sigmoid", "sin"):
        fm = PowerSeries(4, 8, name, **F64)
        assert torch.allclose(fm.exact(x, w, b), ACTIVATIONS[name](x @ w.T + b), atol=2e-4)


def test_power_series_structure():
    fm = PowerSeries(4, 2000, "tanh", **F64)
    positive, negative = fm.degrees
    assert set(positive.tolist()) <= {1, 5, 9} and set(negative.tolist()) <= {3, 7, 11}
    assert (positive == 1).double().mean() == pytest.approx(256 / 273, abs=0.03)  # 2^-2 of 2^-2 + 2^-6 + 2^-10
    assert fm.projection.abs().unique().tolist() == [1.0]
    x = unit(3, 4, 0)
    first = x @ fm.projection[0, :, :-1].T + fm.projection[0, :, -1]  # shared by both parts
    row = int((positive == 1).nonzero()[0])
    p_one = 256 / 273
    assert torch.allclose(fm.phi(x)[:, row], first[:, row] * math.sqrt(1 / p_one / 1000))


def test_power_series_errors():
    with pytest.raises(ValueError, match="relu has no Taylor series at 0; known: sin, cos"):
        PowerSeries(4, 8, "relu")
    with pytest.raises(ValueError, match="not all zero"):
        PowerSeries(4, 8, coefficients=[0.0])
    assert PowerSeries(4, 7, coefficients=[1.0, 1.0, 0.5]).num_features == 7
    one = torch.ones(1, 4)
    assert float(estimate(PowerSeries(4, 6, coefficients=[2.0]), one, one)) == pytest.approx(2.0)
