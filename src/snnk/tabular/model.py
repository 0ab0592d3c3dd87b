"""What `snnk fit` makes: columns, a feature map and one matrix, saved as safetensors and JSON."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snnk import _checks, _io
from snnk.maps import ArcCosine, FeatureMap, ProjectedURF
from snnk.ridge.sums import BLOCK_DTYPES
from snnk.tabular.columns import MISSING, Columns, read_column
from snnk.tabular.scaling import LARGEST, standardise
from snnk.tabular.scan import TASKS
from snnk.tabular.source import Table

FORMAT = "snnk.TableModel 1"
FARTHEST = 1e150  # units of a target whose squares still add up
# What a spreadsheet takes for the beginning of a formula (OWASP, "CSV Injection"), and a plain number, which is none.
FORMULA, NUMBER = re.compile(r"[=+\-@\t\r\n]"), re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
ROWS = 2048  # rows whose features are held at once: few enough to stay in memory that the allocator keeps


def _fourier(width: int, m: int, bandwidth: float, x_norm: float, seed: int) -> FeatureMap:
    return ProjectedURF(width, m, "identity", x_norm=x_norm, bandwidth=bandwidth, seed=seed)


def _relu(width: int, m: int, bandwidth: float, x_norm: float, seed: int) -> FeatureMap:
    return ArcCosine(width, m, augment=True, seed=seed)


MAPS: dict[str, Callable[..., FeatureMap]] = {"fourier": _fourier, "relu": _relu}


@dataclass(frozen=True)
class FitConfig:
    """What to fit.

    Args:
        target: name of the target column.
        num_features: number m of random features; even for "fourier".
        feature_map: "fourier" (cos and sin) or "relu".
        bandwidth: of "fourier": standard deviation of the angles; larger fits finer detail.
        lam: the penalty, a number or "gcv".
        task: "auto", "regression" or "classification".
        missing: "raise", "drop" or "mean".
        drop: columns to leave out.
        block_dtype: "float32" (features and their products within a block; sums are float64 always) or "float64".
        seed: of the features.
    """

    target: str
    num_features: int = 4096
    feature_map: str = "fourier"
    bandwidth: float = 1.0
    lam: float | str = "gcv"
    task: str = "auto"
    missing: str = "raise"
    drop: tuple[str, ...] = ()
    block_dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.target, str):
            raise TypeError(f"target must be the name of a column; got {self.target!r}")
        if not isinstance(self.drop, tuple) or not all(isinstance(name, str) for name in self.drop):
            raise TypeError(f"drop must be a tuple of names of columns; got {self.drop!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an integer; got {self.seed!r}")
        _checks.choose(self.feature_map, MAPS, "feature map")
        m = _checks.positive_int(self.num_features, "num_features")
        object.__setattr__(self, "num_features", m)  # a numpy integer is no JSON
        if self.feature_map == "fourier" and m % 2:
            raise ValueError(f"num_features must be even for 'fourier', cos and sin come in pairs; got {m}")
        _checks.positive(self.bandwidth, "bandwidth")
        _checks.choose(self.task, TASKS, "task")
        _checks.choose(self.missing, MISSING, "policy for missing values")
        _checks.choose(self.block_dtype, BLOCK_DTYPES, "block_dtype")
        lam = None if isinstance(self.lam, bool) else self.lam
        if lam != "gcv" and not (isinstance(lam, int | float) and 0 <= lam <= LARGEST):
            raise ValueError(f"lam must be 'gcv' or a number >= 0; got {self.lam!r}")

    @classmethod
    def from_dict(cls, stored: Any) -> FitConfig:
        """Settings as a file has them: all of them, and no others."""
        known = {f.name for f in fields(cls)}
        if not isinstance(stored, dict) or set(stored) != known:
            raise ValueError(f"settings must be {', '.join(sorted(known))}; got others")
        if not isinstance(stored["drop"], list):
            raise TypeError(f"drop must be a list; got {stored['drop']!r}")
        return cls(**{**stored, "drop": tuple(stored["drop"])})

    def make_map(self, columns: Columns) -> FeatureMap:
        make = MAPS[self.feature_map]
        x_norm = math.sqrt(len(columns.inputs))  # a standardised number and a one-hot category have length one each
        return make(columns.width, self.num_features, self.bandwidth, x_norm, self.seed)


@dataclass(frozen=True, eq=False)
class TableModel:
    """phi(x) A^T + b on the columns of a table, times the unit of the target.

    The unit, `columns.target.scale`, is 1 but for targets below about 1e-18 or above 1e18.

    Args:
        columns: how rows become inputs.
        feature_map: phi.
        weight, bias: A (t, m) and b (t,), float64; t is 1 or the number of classes.
        config: what it was fitted with.
    """

    columns: Columns
    feature_map: FeatureMap
    weight: Tensor
    bias: Tensor
    config: FitConfig

    def outputs(self, x: Tensor) -> Tensor:
        """Encoded inputs (n, width) -> (n, t): predictions, or a score for each class."""
        with torch.no_grad():
            return (self.feature_map.phi(x).double() @ self.weight.T + self.bias) * self.columns.target.scale

    def with_missing(self, policy: str) -> TableModel:
        """The same model with another policy for missing values: "raise", "drop" or "mean"."""
        _checks.choose(policy, MISSING, "policy for missing values")
        return replace(self, columns=replace(self.columns, missing=policy))

    def predict(self, source: Any) -> Iterator[tuple[list[Any], Tensor]]:
        """(predictions, which rows they are for) for each batch of a table, in the order of its rows."""
        for found, keep, _ in self._batches(Table(source), [c.name for c in self.columns.inputs]):
            yield self._named(found), keep

    def _batches(
        self, table: Table, names: list[str], unseen: Counter[str] | None = None
    ) -> Iterator[tuple[Tensor, Tensor, tuple[Any, str, int]]]:
        """Outputs, which rows they are for, and the batch that they come from, with its block and first row."""
        absent = [c.name for c in self.columns.inputs if c.name not in table.names]
        if absent:
            raise ValueError(f"no column {', '.join(map(repr, absent))}; the table has {', '.join(table.names)}")
        for label, batches in table.blocks(columns=names):
            first = 0
            for batch in batches:
                x, _, keep = self.columns.encode(batch, label, with_target=False, unseen=unseen, first_row=first)
                outputs = torch.cat([self.outputs(part) for part in x.split(ROWS)])
                wrong = ~outputs.isfinite().all(1)
                if bool(wrong.any()):
                    row = first + int(keep.nonzero()[int(wrong.int().argmax())])
                    raise ValueError(
                        f"the prediction for row {row} of {label} is beyond the largest float64: its inputs are far "
                        "from those of the training"
                    )
                yield outputs, keep, (batch, label, first)
                first += batch.num_rows
        table.check_unchanged()

    def _named(self, outputs: Tensor) -> list[Any]:
        classes = self.columns.target.categories
        return outputs[:, 0].tolist() if classes is None else [classes[i] for i in outputs.argmax(1).tolist()]

    def write_predictions(self, source: Any, path: str | Path) -> tuple[int, dict[str, float], dict[str, int]]:
        """One prediction per line to a CSV file, empty for rows left out.

        The name of a class comes from a table and may be made to look like a formula: one that begins with =, +, -, @,
        a tab or a line break and is no plain number gets an apostrophe in front, and a spreadsheet shows it as text.
        `predict` returns names as they are.

        Returns how many there are, a score if y is known, and values not seen in training, by column.
        """
        path, table, target = Path(path), Table(source), self.columns.target
        unseen: Counter[str] = Counter()
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path.name}; make it, or name another")
        names = [c.name for c in (*self.columns.inputs, target) if c.name in table.names]
        count, sums = 0, np.zeros(4)  # over rows with a target: 1, hit or squared error, y, y^2
        with _io.replacing(path) as temporary, temporary.open("w", newline="") as file:
            # Some spreadsheets cut lines at semicolons and tabs, unless there are quotes around the cell.
            cut = any(mark in name for name in (target.name, *(target.categories or ())) for mark in ";\t")
            writer = csv.writer(file, quoting=csv.QUOTE_ALL if cut else csv.QUOTE_MINIMAL)
            writer.writerow([f"predicted_{target.name}"])
            for outputs, keep, (batch, label, first) in self._batches(table, names, unseen):
                found = iter(_cell(name) for name in self._named(outputs))
                writer.writerows([next(found)] if kept else [""] for kept in keep.tolist())
                count += len(outputs)
                if target.name in names:
                    y, bad = read_column(batch, target, label)
                    known = keep.numpy() & ~bad
                    guess = (outputs[:, 0] if target.categories is None else outputs.argmax(1)).numpy()[
                        ~bad[keep.numpy()]
                    ]
                    if target.categories is None:  # sums of squares keep their digits about the mean
                        y, guess = (standardise(values, target.mean, target.scale) for values in (y, guess))
                        far = known & (np.abs(y) > FARTHEST)
                        if far.any():
                            raise ValueError(
                                f"{target.name!r} at row {first + int(far.argmax())} of {label} is too far from its "
                                f"mean in training, {target.mean:g}, to count in a score; leave the column out"
                            )
                    y = y[known].astype(float)
                    loss = np.square(guess - y) if target.categories is None else guess == y
                    sums += [len(y), loss.sum(), y.sum(), np.square(y).sum()]
        n, loss, total, squares = sums
        score: dict[str, float] = {}
        if n:
            spread = squares - total**2 / n
            r2 = {"R2": 1 - loss / spread if spread else 0.0}
            score = r2 if target.categories is None else {"accuracy": loss / n}
        return count, score, {name: number for name, number in unseen.items() if number}

    def save(self, folder: str | Path) -> None:
        """Write model.safetensors, then model.json, each whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"feature_map.{k}": v for k, v in self.feature_map.state_dict().items()}
        _io.write_tensors(folder / "model.safetensors", tensors | {"weight": self.weight, "bias": self.bias})
        body = {"format": FORMAT, "config": asdict(self.config), "columns": self.columns.to_dict()}
        _io.write_json(folder / "model.json", body)

    @classmethod
    def load(cls, folder: str | Path) -> TableModel:
        """Read a folder that `save` wrote; anything missing or unexpected is an error that names it."""
        folder = Path(folder)
        path, weights = folder / "model.json", folder / "model.safetensors"
        try:
            stored = _io.read_json(path, "a model of snnk fit")
        except FileNotFoundError as error:
            raise ValueError(f"{folder} holds no model of snnk fit: {error}") from None
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            found = stored.get("format") if isinstance(stored, dict) else stored
            raise ValueError(f"{path} is not {FORMAT!r}; got {str(found)[:80]!r}")
        try:
            config, columns = FitConfig.from_dict(stored.get("config")), Columns.from_dict(stored.get("columns"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}; copy it again, or fit again") from error
        t, m, d = columns.target.width, config.num_features, columns.width
        with _io.open_tensors(weights) as file:
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in _slices(file)}
            expected = {"weight": ("F64", (t, m)), "bias": ("F64", (t,))}
            # The header bounds what is drawn: it has as many bytes behind it as it says.
            drawn = math.prod(found.get("feature_map.projection", ("", (0,)))[1])
            if any(found.get(name) != entry for name, entry in expected.items()) or d * m > 2 * drawn:
                wrong = [name for name, entry in expected.items() if found.get(name) != entry]
                raise ValueError(_mismatch(weights, wrong or ["feature_map.projection"]))
            fm = config.make_map(columns)
            expected |= {f"feature_map.{name}": ("F32", tuple(x.shape)) for name, x in fm.state_dict().items()}
            if found != expected:
                raise ValueError(
                    _mismatch(weights, [k for k in found.keys() | expected if found.get(k) != expected.get(k)])
                )
            tensors = {name: file.get_tensor(name) for name in found}
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"{weights} is damaged: {name} has NaN or infinite numbers; copy it again, or fit again"
                )
        prefix = "feature_map."
        fm.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        return cls(columns, fm, tensors["weight"], tensors["bias"], config)


def _slices(file: Any) -> Iterator[tuple[str, Any]]:
    return ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 (it is no dict)


def _mismatch(path: Path, names: list[str]) -> str:
    return f"{path} does not fit model.json: {', '.join(sorted(names))}; copy both again, or fit again"


def _cell(value: Any) -> Any:
    """The cell of a CSV file for a prediction; see `write_predictions`."""
    formula = isinstance(value, str) and FORMULA.match(value) and not NUMBER.fullmatch(value)
    return f"'{value}" if formula else value
