"""One module per figure or table of the paper, found by its file name; `lab` holds what the experiments share.

An experiment is a module with the members of `Experiment` below. `names()` looks into this folder, so that a new
experiment is one new file, and `load(name)` imports that experiment alone. `snnk.experiments.lab.runs.reproduce` runs
one.

Example:
    >>> load("bundled-transformers").FIGURE
    'bundling table'
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from snnk.experiments.lab.data import Source
    from snnk.experiments.lab.records import Results, Row

__all__ = ["HOLDS", "Experiment", "load", "names"]

HOLDS = {True: "yes", False: "no", None: "open"}  # words for whether a claim holds

# The order of the list and of the page, that of the paper; experiments that are not named here follow by name.
ORDER = (
    "pointwise",
    "siren",
    "qpnn",
    "mnist",
    "uci",
    "trainable-parameters",
    "bundled-transformers",
    "bundled-latency",
    "glue",
    "vision",
    "uptraining",
    "uptraining-images",
    "estimators",
    "compression",
    "adapters",
)


class Experiment(Protocol):
    """The members of an experiment's module.

    It may also have `left(results)`, what the rows do not cover yet, and `WHY_NOT`, the reason why claims do not hold.

    FIGURE, NEEDS and TIME are shown by `snnk reproduce --list`. `Config` is a frozen dataclass with the paper's
    hyperparameters as defaults, and `QUICK` is a configuration that runs in seconds. `run` yields `total(config)` rows
    and skips those that `results` has already. `plot` and `claims` read rows and nothing else.
    """

    FIGURE: str
    NEEDS: str
    TIME: str
    Config: Any
    QUICK: Any

    def total(self, config: Any) -> int: ...
    def run(self, config: Any, results: Results, source: Source) -> Iterator[Row]: ...
    def plot(self, results: Results) -> Figure: ...
    def claims(self, results: Results) -> list[Row]: ...


def names() -> list[str]:
    """The names of all experiments, in the order of the page; imports none of them."""
    found = [module.name.replace("_", "-") for module in iter_modules(__path__) if not module.ispkg]
    return sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def load(name: str) -> Experiment:
    """Import one experiment by its name."""
    from snnk import _checks

    known = _checks.choose(name, names(), "experiment")
    return cast(Experiment, import_module(f"{__name__}.{known.replace('-', '_')}"))
