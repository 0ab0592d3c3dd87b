"""Slow, obvious implementations that the library is checked against."""

from __future__ import annotations

import cmath
import math

import numpy as np
from scipy import integrate, stats


def lambda_g(z, g, A=0.0):
    """Equation 7 of the paper for complex z."""
    d = len(g)
    exponent = A * np.dot(g, g) + math.sqrt(1 - 4 * A) * np.dot(g, z) - np.dot(z, z) / 2
    return (1 - 4 * A) ** (d / 4) * cmath.exp(exponent)


def complex_urf(x, w, b, g, atoms, rho, A=0.0):
    """The paper's complex estimator for a discrete spectrum {xi: weight}, every atom with all rows of g."""
    total = 0j
    for xi, weight in atoms:
        r = rho(xi)
        eta = 2j * math.pi * xi / r
        for row in g:
            total += weight * cmath.exp(2j * math.pi * xi * b) * lambda_g(r * x, row, A) * lambda_g(eta * w, row, A)
    return total / len(g)


def half_arccos_kernel(x, w, order):
    """E[Theta(g.x) Theta(g.w) (g.x)^n (g.w)^n] by quadrature over the polar angle in the plane of x and w."""
    nx, nw = np.linalg.norm(x), np.linalg.norm(w)
    theta = math.acos(np.clip(x @ w / nx / nw, -1, 1))

    def integrand(t):
        a, c = math.cos(t), math.cos(t - theta)
        return (a * c) ** order if a > 0 and c > 0 else 0.0

    points = [-math.pi / 2, theta - math.pi / 2, math.pi / 2, theta + math.pi / 2]
    angular = integrate.quad(integrand, -math.pi, math.pi + theta, points=points, limit=400)[0]
    if theta > 0:  # the range above is longer than one turn
        angular -= integrate.quad(integrand, math.pi, math.pi + theta, limit=200)[0]
    radial = stats.chi(2).moment(2 * order) if order else 1.0
    return (nx * nw) ** order * radial * angular / (2 * math.pi)


def inverse_transform(spectrum, f0, z):
    """f(z) from its spectrum by the compensated formula at the top of activations.py."""

    def integrand(xi):
        ft = complex(spectrum.density(np.array([xi]))[0])
        return 2 * (ft.real * (math.cos(2 * math.pi * xi * z) - 1) - ft.imag * math.sin(2 * math.pi * xi * z))

    total = sum(
        integrate.quad(integrand, low, high, limit=2000)[0]
        for low, high in [(1e-9, 0.5), (0.5, 2.0), (2.0, 8.0), (8.0, 60.0)]
    )
    return f0 + spectrum.slope * z + total


def orthogonal_variance(d, rows, t):
    """Variance of one antithetic row's estimate of e^{i z} at z = 0, times what `rows` orthogonal rows make of it.

    With |u|^2 = |v|^2 = t and u.v = 0 the vector c = v + iu has c.c = 0, so that (g.c)^k is a harmonic of degree k of
    mean square (2t)^k k! on Gaussian rows, and d^k / (d (d + 2) ... (d + 2k - 2)) of that on the sphere of radius
    sqrt(d). Of exp(g.c) the even k are left, half for the real part. Two orthogonal rows correlate in degree k as the
    Gegenbauer polynomial of that degree at 0: -1 / (d - 1), 3 / ((d - 1)(d + 1)), ...
    """
    total = 0.0
    for k in range(2, 60, 2):
        radius = math.prod(d / (d + 2 * i) for i in range(k))
        between = (-1) ** (k // 2) * math.prod((2 * i + 1) / (d - 1 + 2 * i) for i in range(k // 2))
        total += (2 * t) ** k / math.factorial(k) / 2 * radius * (1 + (rows - 1) * between)
    return total


def sphere_bias_squared(d, kappa):
    """Mean over directions of x and w, and over b, of the squared bias of sin(w.x + b) at |x||w| = kappa.

    The mean of exp(g.c) over the sphere of radius sqrt(d) is 0F1(; d/2; d c.c / 4), and c.c = 2i z.
    """

    def squared(z):
        mean, term = 0j, 1 + 0j
        for k in range(80):
            mean += term
            term *= 0.5j * d * z / ((d / 2 + k) * (k + 1))
        return abs(mean - cmath.exp(1j * z)) ** 2 / 2

    def density(cosine):
        return (1 - cosine**2) ** ((d - 3) / 2)

    top = integrate.quad(lambda c: squared(kappa * c) * density(c), -1, 1)[0]
    return top / integrate.quad(density, -1, 1)[0]
