"""Least squares from sums that add and subtract: `RidgeStats`, its solutions, and atoms chosen from a Gram matrix."""

from snnk.ridge.atoms import choose_atoms, refine_
from snnk.ridge.sums import LinearSolution, RidgeSolution, RidgeStats

__all__ = ["LinearSolution", "RidgeSolution", "RidgeStats", "choose_atoms", "refine_"]
