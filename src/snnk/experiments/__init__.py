"""One file for each figure or table of the paper: a configuration, `run` yielding `total` rows, `plot`, `claims`."""

from __future__ import annotations

from types import ModuleType

from snnk.experiments import bundled_transformers, pointwise

EXPERIMENTS: dict[str, ModuleType] = {"pointwise": pointwise, "bundled-transformers": bundled_transformers}
