"""The model that `snnk fit` writes: columns, a feature map and one matrix, in safetensors and JSON."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snnk import _checks, _io
from snnk._text import cell, quoting
from snnk.maps import FeatureMap
from snnk.tabular.columns import MISSING, Column, Columns, read_column
from snnk.tabular.config import FitConfig
from snnk.tabular.scaling import Array, standardise
from snnk.tabular.source import Source, Table

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "snnk.TableModel 1"
LARGEST_TARGET = 1e150  # in units of the target; the squares of larger numbers overflow when they are added
ROWS = 2048  # number of rows whose features are held at once, few enough for memory that the allocator keeps


class PredictionSummary(NamedTuple):
    """The result of `TableModel.write_predictions`."""

    rows: int  # number of predictions
    score: dict[str, float]  # {"R2": ...} or {"accuracy": ...}, empty if the table has no target
    unseen: dict[str, int]  # number of new categories and of numbers far outside the training data, by column


class _Predicted(NamedTuple):
    """A record batch with the outputs (n, t) for its rows in `keep`."""

    outputs: Tensor
    keep: Tensor
    batch: pa.RecordBatch
    label: str
    first_row: int


@dataclass(frozen=True, eq=False)
class TableModel:
    """phi(x) A^T + b on the columns of a table, times the unit of the target.

    The unit, `columns.target.scale`, is 1 except for targets below about 1e-18 or above 1e18.

    Args:
        columns: the encoding of rows as inputs.
        feature_map: phi.
        weight, bias: A (t, m) and b (t,), float64; t is 1 or the number of classes.
        config: the configuration of the fit.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet as pq, tempfile
        >>> from snnk.tabular import fit
        >>> folder = Path(tempfile.mkdtemp())
        >>> x = np.linspace(-2, 2, 200)
        >>> pq.write_table(pa.table({"x": x, "y": np.sin(x)}), folder / "data.parquet")
        >>> _ = fit(folder / "data.parquet", folder / "model", FitConfig("y", num_features=32))
        >>> model = TableModel.load(folder / "model")
        >>> model.write_predictions(folder / "data.parquet", folder / "predictions.csv").rows
        200
    """

    columns: Columns
    feature_map: FeatureMap
    weight: Tensor
    bias: Tensor
    config: FitConfig

    def outputs(self, x: Tensor) -> Tensor:
        """Map encoded inputs (n, width) to outputs (n, t): predictions, or one score per class."""
        with torch.no_grad():
            return (self.feature_map.phi(x).double() @ self.weight.T + self.bias) * self.columns.target.scale

    def predict(self, source: Source, *, missing: str | None = None) -> Iterator[tuple[list[Any], Tensor]]:
        """Yield (predictions, mask of the rows that they are for) per batch of a table, in the order of its rows.

        Args:
            source: a Parquet, CSV or Arrow file, a folder of them, or a datasets.Dataset.
            missing: the policy for missing values; by default that of the fit.
        """
        for part in self._predict(Table(source), [c.name for c in self.columns.inputs], missing):
            yield self._named(part.outputs), part.keep

    def write_predictions(
        self, source: Source, path: str | os.PathLike[str], *, missing: str | None = None
    ) -> PredictionSummary:
        """Write one prediction per line to a CSV file; the line of a row that was dropped is empty.

        The names of classes come from a table, and could be made to look like formulas. A name that begins with =, +,
        -, @, a tab or a line break and is no plain number gets an apostrophe in front, so that a spreadsheet shows it
        as text. `predict` returns names as they are.

        Args:
            source: a Parquet, CSV or Arrow file, a folder of them, or a datasets.Dataset.
            path: the CSV file.
            missing: the policy for missing values; by default that of the fit.
        """
        path, table, target = Path(path), Table(source), self.columns.target
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path.name}; make it, or name another")
        names = [c.name for c in (*self.columns.inputs, target) if c.name in table.names]
        rows, score, unseen = 0, _Score(target), Counter[str]()
        with _io.replacing(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file, quoting=quoting((target.name, *(target.categories or ()))))
            writer.writerow([f"predicted_{target.name}"])
            for part in self._predict(table, names, missing, unseen):
                found = iter(cell(name) for name in self._named(part.outputs))
                writer.writerows([next(found)] if kept else [""] for kept in part.keep.tolist())
                rows += len(part.outputs)
                if target.name in names:
                    score.add(part)
        return PredictionSummary(rows, score.result(), {name: number for name, number in unseen.items() if number})

    def _predict(
        self, table: Table, names: list[str], missing: str | None, unseen: Counter[str] | None = None
    ) -> Iterator[_Predicted]:
        columns = self.columns
        if missing is not None:
            columns = replace(columns, missing=_checks.choose(missing, MISSING, "policy for missing values"))
        absent = [c.name for c in columns.inputs if c.name not in table.names]
        if absent:
            raise ValueError(f"no column {', '.join(map(repr, absent))}; the table has {', '.join(table.names)}")
        for label, batches in table.blocks(columns=names):
            first = 0
            for batch in batches:
                x, _, keep = columns.encode(batch, label, first_row=first, with_target=False, unseen=unseen)
                outputs = torch.cat([self.outputs(part) for part in x.split(ROWS)])
                wrong = ~outputs.isfinite().all(1)
                if bool(wrong.any()):
                    row = first + int(keep.nonzero()[int(wrong.int().argmax())])
                    raise ValueError(
                        f"the prediction for row {row} of {label} is beyond the largest float64: its inputs are far "
                        "from those of the training"
                    )
                yield _Predicted(outputs, keep, batch, label, first)
                first += batch.num_rows
        table.check_unchanged()

    def _named(self, outputs: Tensor) -> list[Any]:
        classes = self.columns.target.categories
        return outputs[:, 0].tolist() if classes is None else [classes[i] for i in outputs.argmax(1).tolist()]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write model.safetensors, then model.json; each appears whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"feature_map.{k}": v for k, v in self.feature_map.state_dict().items()}
        _io.write_tensors(folder / "model.safetensors", tensors | {"weight": self.weight, "bias": self.bias})
        body = {"format": FORMAT, "config": asdict(self.config), "columns": self.columns.to_dict()}
        _io.write_json(folder / "model.json", body)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TableModel:
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
        tensors, fm = _load_tensors(weights, config, columns)
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"{weights} is damaged: {name} has NaN or infinite numbers; copy it again, or fit again"
                )
        prefix = "feature_map."
        fm.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        return cls(columns, fm, tensors["weight"], tensors["bias"], config)


def _load_tensors(path: Path, config: FitConfig, columns: Columns) -> tuple[dict[str, Tensor], FeatureMap]:
    """The tensors of a model, and its map; shapes and dtypes are compared with the header before a map is drawn."""
    t, m, d = columns.target.width, config.num_features, columns.width
    with _io.open_tensors(path) as file:
        found = _io.tensor_header(file)
        expected = {"weight": ("F64", (t, m)), "bias": ("F64", (t,))}
        wrong = [name for name, entry in expected.items() if found.get(name) != entry]
        # The header has been checked against the size of the file, so the stored projection bounds what is drawn.
        if wrong or d * m > 2 * math.prod(found.get("feature_map.projection", ("", (0,)))[1]):
            raise _mismatch(path, wrong or ["feature_map.projection"])
        fm = config.make_map(columns)
        expected |= {f"feature_map.{name}": ("F32", tuple(x.shape)) for name, x in fm.state_dict().items()}
        if found != expected:
            raise _mismatch(path, [k for k in found.keys() | expected if found.get(k) != expected.get(k)])
        return {name: file.get_tensor(name) for name in found}, fm


def _mismatch(path: Path, names: list[str]) -> ValueError:
    return ValueError(f"{path} does not fit model.json: {', '.join(sorted(names))}; copy both again, or fit again")


class _Score:
    """R2 or accuracy, from sums over the rows with a target."""

    def __init__(self, target: Column) -> None:
        self.target = target
        self.sums = np.zeros(4)  # of 1, of squared errors or hits, of y and of y^2

    def add(self, part: _Predicted) -> None:
        target, keep = self.target, part.keep.numpy()
        y, bad = read_column(part.batch, target, part.label)
        known = keep & ~bad
        numbers = target.categories is None
        guess: Array = (part.outputs[:, 0] if numbers else part.outputs.argmax(1)).numpy()[~bad[keep]]
        if numbers:  # about the mean, sums of squares keep their digits
            y, guess = (standardise(values, target.mean, target.scale) for values in (y, guess))
            far = known & (np.abs(y) > LARGEST_TARGET)
            if far.any():
                raise ValueError(
                    f"{target.name!r} at row {part.first_row + int(far.argmax())} of {part.label} is too far from its "
                    f"mean in training, {target.mean:g}, to count in a score; leave the column out"
                )
        y = y[known].astype(float)
        loss = np.square(guess - y) if numbers else guess == y
        self.sums += [len(y), loss.sum(), y.sum(), np.square(y).sum()]

    def result(self) -> dict[str, float]:
        n, loss, total, squares = self.sums
        if not n:
            return {}
        if self.target.categories is not None:
            return {"accuracy": loss / n}
        variation = squares - total**2 / n
        return {"R2": 1 - loss / variation if variation else 0.0}
