"""One file for each figure or table of the paper: a configuration, `run` yielding rows, `plot` and `claims`."""

from __future__ import annotations

from types import ModuleType

from snnk.experiments import pointwise

EXPERIMENTS: dict[str, ModuleType] = {"pointwise": pointwise}
