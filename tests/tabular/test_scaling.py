"""Statistics of numbers of any size."""

import numpy as np
import pytest

from snnk.tabular.scaling import constant_scale, count_outliers, count_sizes, moments, standardise, target_unit

X = np.random.default_rng(0).normal(3, 2, size=(500, 2))
W = np.random.default_rng(1).uniform(size=500)


@pytest.mark.parametrize("power", [-1060, -600, 0, 600, 1019])
@pytest.mark.once
def test_moments_are_exact_at_any_size(power):
    """Powers of two scale float64 exactly, so that mean and variance are those of the unscaled values."""
    values = np.ldexp(np.round(X * 2**10), -10)  # few digits, which subnormal numbers keep
    for weight in (None, W):
        exponent, mean, variance = moments(np.ldexp(values, power), weight)
        expected = np.average(values, axis=0, weights=weight)
        np.testing.assert_allclose(np.ldexp(mean, exponent - power), expected, rtol=1e-10)
        squares = np.average(np.square(values - expected), axis=0, weights=weight)
        np.testing.assert_allclose(np.ldexp(np.sqrt(variance), exponent - power), np.sqrt(squares), rtol=1e-10)


def test_standardise_does_not_overflow():
    largest = np.finfo(float).max
    assert standardise(np.array([largest, -largest]), -largest, largest).tolist() == [2.0, 0.0]
    assert standardise(np.array([5e-324, 0.0]), 0.0, 5e-324).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("values", "outliers"),
    [
        ([1.0] * 99 + [2.0**22], 1),
        ([1.0] * 198 + [2.0**22] * 2, 2),
        ([1.0] * 197 + [2.0**22] * 3, 0),  # more than 1 % of the values
        ([1.0] * 99 + [2.0**20], 0),  # not large enough
        ([1.0] * 9 + [2.0**22], 0),  # too few values
        ([0.0] * 500 + [1.0] * 9 + [2.0**22], 0),  # zeros do not count
    ],
)
def test_outliers(values, outliers):
    assert count_outliers(count_sizes(np.array(values))) == outliers


def test_units():
    assert target_unit(np.array([3.0, 2.0**60, 2.0**61, 3 * 2.0**-70])).tolist() == [1.0, 1.0, 2.0**61, 2.0**-69]
    assert constant_scale(np.array([0.0, 0.3, 5.0, -(2.0**40)])).tolist() == [1.0, 1.0, 4.0, 2.0**40]
