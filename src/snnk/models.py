"""What `snnk fit` makes: columns, a feature map and one matrix, saved as safetensors and JSON."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snnk import _checks, _io
from snnk.features import ArcCosine, FeatureMap, ProjectedURF
from snnk.ridge import BLOCK_DTYPES
from snnk.tables import MISSING, TASKS, Columns, Table, read_column

FORMAT = "snnk.TableModel 1"
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
        _checks.choose(self.feature_map, MAPS, "feature map")
        m = _checks.positive_int(self.num_features, "num_features")
        object.__setattr__(self, "num_features", m)  # a numpy integer is no JSON
        if self.feature_map == "fourier" and m % 2:
            raise ValueError(f"num_features must be even for 'fourier', cos and sin come in pairs; got {m}")
        _checks.positive(self.bandwidth, "bandwidth")
        _checks.choose(self.task, TASKS, "task")
        _checks.choose(self.missing, MISSING, "policy for missing values")
        _checks.choose(self.block_dtype, BLOCK_DTYPES, "block_dtype")
        if self.lam != "gcv" and not (isinstance(self.lam, int | float) and 0 <= self.lam < math.inf):
            raise ValueError(f"lam must be 'gcv' or a number >= 0; got {self.lam!r}")

    def make_map(self, columns: Columns) -> FeatureMap:
        make = MAPS[self.feature_map]
        x_norm = math.sqrt(len(columns.inputs))  # a standardised number and a one-hot category have length one each
        return make(columns.width, self.num_features, self.bandwidth, x_norm, self.seed)


@dataclass(frozen=True, eq=False)
class TableModel:
    """phi(x) A^T + b on the columns of a table.

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
            return self.feature_map.phi(x).double() @ self.weight.T + self.bias

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
    ) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Outputs, which rows they are for, and the batch that they come from."""
        absent = [c.name for c in self.columns.inputs if c.name not in table.names]
        if absent:
            raise ValueError(f"no column {', '.join(map(repr, absent))}; the table has {', '.join(table.names)}")
        for label, batches in table.blocks(columns=names):
            for batch in batches:
                x, _, keep = self.columns.encode(batch, label, with_target=False, unseen=unseen)
                yield torch.cat([self.outputs(part) for part in x.split(ROWS)]), keep, batch

    def _named(self, outputs: Tensor) -> list[Any]:
        classes = self.columns.target.categories
        return outputs[:, 0].tolist() if classes is None else [classes[i] for i in outputs.argmax(1).tolist()]

    def write_predictions(self, source: Any, path: str | Path) -> tuple[int, dict[str, float], dict[str, int]]:
        """One prediction a line to a CSV file, empty for rows left out.

        Returns how many there are, a score if y is known, and values not seen in training, by column.
        """
        path, table, target = Path(path), Table(source), self.columns.target
        unseen: Counter[str] = Counter()
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path.name}; make it, or name another")
        names = [c.name for c in (*self.columns.inputs, target) if c.name in table.names]
        count, sums = 0, np.zeros(4)  # over rows with a target: 1, hit or squared error, y, y^2
        with _io.replacing(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([f"predicted_{target.name}"])
            for outputs, keep, batch in self._batches(table, names, unseen):
                found = iter(self._named(outputs))
                writer.writerows([next(found)] if kept else [""] for kept in keep.tolist())
                count += len(outputs)
                if target.name in names:
                    y, bad = (a[keep.numpy()] for a in read_column(batch, target))
                    guess = (outputs[:, 0] if target.categories is None else outputs.argmax(1)).numpy()[~bad]
                    y = y[~bad].astype(float) - target.mean  # sums of squares keep their digits about the mean
                    loss = np.square(guess - target.mean - y) if target.categories is None else guess == y
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
        from safetensors.torch import load_file

        folder = Path(folder)
        try:
            stored = json.loads((folder / "model.json").read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} holds no model of snnk fit: {error}") from error
        if stored.get("format") != FORMAT:
            raise ValueError(f"{folder}/model.json is {stored.get('format')!r}; expected {FORMAT!r}")
        known = {f.name for f in fields(FitConfig)}
        if set(stored["config"]) != known:
            raise ValueError(f"{folder}/model.json has other settings than {', '.join(sorted(known))}")
        config = FitConfig(**{**stored["config"], "drop": tuple(stored["config"]["drop"])})
        columns = Columns.from_dict(stored["columns"])
        fm = config.make_map(columns)
        tensors = load_file(folder / "model.safetensors")
        shapes = {f"feature_map.{k}": v.shape for k, v in fm.state_dict().items()}
        t = columns.target.width
        shapes |= {"weight": torch.Size((t, config.num_features)), "bias": torch.Size((t,))}
        if {k: v.shape for k, v in tensors.items()} != shapes:
            wrong = sorted(k for k in tensors.keys() | shapes if k not in tensors or tensors[k].shape != shapes.get(k))
            raise ValueError(f"{folder}/model.safetensors does not fit model.json: {', '.join(wrong)}")
        prefix = "feature_map."
        fm.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        return cls(columns, fm, tensors["weight"], tensors["bias"], config)
