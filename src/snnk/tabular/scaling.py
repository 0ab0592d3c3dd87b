"""Means, scales and outliers of numbers of any size that float64 has; `fit` and `snnk.sklearn` share them.

Statistics are taken in units of a power of two, in which squares neither overflow nor vanish and no digit is lost.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
LARGEST, SMALLEST = sys.float_info.max, math.ulp(0.0)
CONSTANT = 1e-12  # a standard deviation below this part of the mean is rounding
EXPONENTS = 1100  # all exponents of float64 are between minus and plus this number
OUTLIER_BITS = 20  # an outlier is larger than all other values by a factor of 2^20
FEW_VALUES = 10  # among fewer values none is an outlier
ORDINARY = (2.0**-60, 2.0**60)  # deviations of a target whose products with features are safe in float32


def moments(values: Array, weight: Array | None = None) -> tuple[Any, Any, Any]:
    """Exponent e, mean and variance over the rows of values (n,) or (n, d); both are in units of 2^e."""
    values = np.asarray(values, np.float64)
    exponent = np.frexp(np.maximum(np.abs(values).max(0), SMALLEST))[1]
    scaled = np.ldexp(values, -exponent)
    mean = np.average(scaled, axis=0, weights=weight)
    return exponent, mean, np.average(np.square(scaled - mean), axis=0, weights=weight)


def standardise(values: Array, mean: Any, scale: Any) -> Array:
    """(values - mean) / scale in float64, also where the difference overflows or `scale` is subnormal."""
    exponent = np.frexp(scale)[1]
    with np.errstate(over="ignore"):  # a value too far away becomes infinite, and is refused because of its size
        return (np.ldexp(values, -exponent) - np.ldexp(mean, -exponent)) / np.ldexp(scale, -exponent)


def constant_scale(mean: Any) -> Any:
    """A scale for a column that is constant but for rounding, in which the rounding stays small."""
    return np.ldexp(1.0, np.maximum(np.frexp(mean)[1] - 1, 0))


def target_unit(scale: Any) -> Any:
    """The unit in which a target is fitted: 1 for targets of ordinary size, else the power of two below `scale`."""
    ordinary = (scale >= ORDINARY[0]) & (scale <= ORDINARY[1])
    return np.where(ordinary, 1.0, np.ldexp(1.0, np.frexp(scale)[1] - 1))


def count_sizes(values: Array) -> Array:
    """The number of nonzero values with each binary exponent; counts of different rows add."""
    return np.bincount(np.frexp(values[values != 0])[1] + EXPONENTS, minlength=2 * EXPONENTS)


def count_outliers(sizes: Array) -> int:
    """The number of outliers, from `count_sizes`: at most 1 % of the values, or one, and a million times as large.

    They would determine the mean and the scale of their column, in which the differences of all other values vanish.
    """
    used = np.flatnonzero(sizes)
    for i in np.flatnonzero(np.diff(used) > OUTLIER_BITS):
        rest, above = int(sizes[: used[i] + 1].sum()), int(sizes[used[i] + 1 :].sum())
        if rest >= FEW_VALUES and above <= max(rest // 99, 1):
            return above
    return 0
