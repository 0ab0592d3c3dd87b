"""Ridge regression from sums that add and subtract (`sums`), and atoms chosen from a Gram matrix (`atoms`)."""

from snnk.ridge.sums import RidgeStats

__all__ = ["RidgeStats"]
