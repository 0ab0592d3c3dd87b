"""The model that `snnk fit` writes: columns, a feature map and one matrix, in safetensors and JSON."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snnk import _checks, _io, _rows
from snnk.maps import FeatureMap, feature_map_from_config
from snnk.tabular.calibration import BOUNDS, PlattScaling
from snnk.tabular.columns import MISSING, REACH, Column, Columns, read_column
from snnk.tabular.config import LEARNED, FitConfig
from snnk.tabular.learned import LearnedFeatures as LearnedFeatures  # files may name it
from snnk.tabular.quality import check_quality
from snnk.tabular.scaling import Array, standardise
from snnk.tabular.source import Source, Table

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "snnk.TableModel 1"
LARGEST_TARGET = 1e150  # in units of the target; the squares of larger numbers overflow when they are added
ROWS = 2048  # number of rows whose features are held at once, few enough for memory that the allocator keeps
CELLS = 1 << 20  # number of inputs and outputs of rows that are encoded, and written, at once
FLOOR = 1e-12  # of a probability without calibration
SHIFT, FAR = 0.5, 8.0  # limits of drift, in deviations of the training
MANY_FAR = 1 / FAR**2  # share of the rows; by Chebyshev's inequality no more of the training can be that far away
LOGIT = 36.0  # beyond it, a probability in float64 is 0 or 1


class Drift(NamedTuple):
    """A number column whose values differ from those of the training; `str` gives a sentence.

    The mean does by more than half a standard deviation and three standard errors, or more values are beyond 8 standard
    deviations than can be in training, 1 in 64, and three standard errors of that. Values that are ignored, more than
    2^24 of them away, do not count here.
    """

    column: str
    mean: float
    far: float  # share of the values that are more than 8 standard deviations from the mean in training
    training_mean: float
    training_deviation: float

    def __str__(self) -> str:
        trained = f"{self.training_mean:.4g} with a standard deviation of {self.training_deviation:.4g} in training"
        far = f"; {100 * self.far:.3g} % of the values are over {FAR:g} of these away" if self.far > MANY_FAR else ""
        return f"{self.column}: the mean is {self.mean:.4g}, and was {trained}{far}"


class PredictionSummary(NamedTuple):
    """The result of `TableModel.write_predictions`.

    A row whose class was not seen in training counts as a wrong prediction, and neither in AUC nor in log-loss.
    """

    rows: int  # number of predictions
    score: dict[str, float]  # accuracy, AUC and log-loss, or R2 and RMSE; empty if the table has no target
    unseen: dict[str, int]  # number of new categories and of numbers far outside the training data, by column
    drift: list[Drift]  # number columns whose values differ from those of the training


class _Predicted(NamedTuple):
    """A record batch with the outputs (n, t) for its rows in `keep`, and for classes their probabilities (n, k)."""

    outputs: Tensor
    probabilities: Tensor | None
    keep: Tensor
    batch: pa.RecordBatch
    label: str
    first_row: int

    @property
    def guess(self) -> Tensor:
        """Numbers, or indices of the predicted classes, (n,)."""
        return self.outputs[:, 0] if self.probabilities is None else self.probabilities.argmax(1)


@dataclass(frozen=True, eq=False)
class TableModel:
    """phi(x) A^T + b on the columns of a table, times the unit of the target.

    The unit, `columns.target.scale`, is 1 except for targets below about 1e-18 or above 1e18.

    Args:
        columns: the encoding of rows as inputs.
        feature_map: phi.
        weight, bias: A (t, m) and b (t,), float64; t is 1 or the number of classes.
        config: the configuration of the fit.
        calibration: how scores of classes become probabilities.
        quality: figures on held-out rows, from `snnk.tabular.quality.assess`.

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
    calibration: PlattScaling | None = None
    quality: dict[str, Any] | None = None

    def outputs(self, x: Tensor) -> Tensor:
        """Map encoded inputs (n, width) to outputs (n, t): predictions, or one score per class."""
        with torch.no_grad():
            parts = [self.feature_map.phi(part).double() @ self.weight.T + self.bias for part in x.split(ROWS)]
            return torch.cat(parts) * self.columns.target.scale

    def probabilities(self, x: Tensor) -> Tensor:
        """Map encoded inputs (n, width) to probabilities of the classes (n, k), float64.

        Without a calibration, as in files of earlier versions, these are the scores, cut to [0, 1] and divided by
        their sum: the scores are a least-squares estimate of the probabilities.
        """
        if self.columns.target.categories is None:
            raise ValueError(f"{self.columns.target.name!r} is a number, which has no classes; use outputs")
        return self.probabilities_of(self.outputs(x))

    def probabilities_of(self, scores: Tensor) -> Tensor:
        """Map scores of classes (n, k), from `outputs`, to probabilities (n, k)."""
        if self.calibration is None or not len(scores):
            cut = scores.clamp(FLOOR, 1)
            return cut / cut.sum(1, keepdim=True)
        return self.calibration.probabilities(scores.clamp(*BOUNDS))

    def predict(self, data: Source, *, missing: str | None = None) -> Iterator[tuple[list[Any], Tensor]]:
        """Yield (predictions, mask of the rows that they are for) per part of a table, in the order of its rows.

        The predicted class is the one with the largest probability.

        Args:
            data: a file or folder, a frame, record batches, or a callable that returns some; see `snnk.tabular.fit`.
            missing: the policy for missing values; by default that of the fit.
        """
        for part in self._predict(Table(data, text=self.columns.texts), [c.name for c in self.columns.inputs], missing):
            yield self._named(part), part.keep

    def write_predictions(
        self,
        data: Source,
        out: str | os.PathLike[str],
        *,
        missing: str | None = None,
        key: str | Sequence[str] = (),
        probabilities: bool = True,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> PredictionSummary:
        """Write one prediction per row to a file; that of a row that was dropped is an empty cell, or null.

        Its columns are those of `key`, `predicted_<target>`, and for classes one `probability_<class>` each. Class
        names come from a table, and could be made to look like formulas. In a CSV file, a name that begins with =, +,
        -, @, a tab or a line break and is no plain number gets an apostrophe in front, so that a spreadsheet shows it
        as text. The other formats and `predict` have names as they are.

        Args:
            data: a file or folder, a frame, record batches, or a callable that returns some; see `snnk.tabular.fit`.
            out: the file, .csv, .jsonl or .parquet; it appears when all rows are written.
            missing: the policy for missing values; by default that of the fit.
            key: columns that are copied, as a list or with commas between them. Those of a CSV file are copied as
                texts, unless the model reads them.
            probabilities: whether to write the probabilities of classes.
            progress: called with the rows that are done and the number of rows, or 0 if that is unknown.
        """
        path, target, keys = Path(out), self.columns.target, _rows.key_names(key)
        _rows.check_output(path)
        own = [c.name for c in (*self.columns.inputs, target)]
        table = Table(data, text=[*self.columns.texts, *(name for name in keys if name not in own)], exact=keys)
        absent = [name for name in keys if name not in table.names]
        if absent:
            raise ValueError(_absent(absent, table))
        names = [name for name in dict.fromkeys((*own, *keys)) if name in table.names]
        types = self._types(probabilities)
        _rows.check_keys(keys, [*types], data if isinstance(data, str | os.PathLike) else "the table")
        rows, done, total = 0, 0, table.count_rows()
        score, drift, unseen = _Score(target), _Drift(self.columns), Counter[str]()
        known = {name: table.schema.field(name).type for name in keys} | types
        with _rows.writing(path, known, keys, (target.name, *(target.categories or ()))) as write:
            for part in self._predict(table, names, missing, unseen):
                kept = {name: part.batch.column(name) for name in keys}
                write(kept | _spread(self._written(part, probabilities), part.keep.tolist()))
                drift.add(part)
                if target.name in names:
                    unseen[target.name] += score.add(part)
                rows, done = rows + len(part.outputs), done + part.batch.num_rows
                progress(done, total)
            if not done:  # the file has its columns also without rows
                write({name: [] for name in known})
        found = {name: number for name, number in unseen.items() if number}
        return PredictionSummary(rows, score.result(), found, drift.result())

    def _predict(
        self, table: Table, names: list[str], missing: str | None, unseen: Counter[str] | None = None
    ) -> Iterator[_Predicted]:
        columns = self.columns
        if missing is not None:
            columns = replace(columns, missing=_checks.choose(missing, MISSING, "policy for missing values"))
        absent = [c.name for c in columns.inputs if c.name not in table.names]
        if absent:
            raise ValueError(_absent(absent, table))
        step = max(CELLS // (columns.width + columns.target.width), ROWS)
        for label, batches in table.blocks(columns=names):
            first = 0
            for whole in batches:
                for start in range(0, whole.num_rows, step):
                    yield self._predict_part(columns, whole.slice(start, step), label, first + start, unseen)
                first += whole.num_rows
        table.check_unchanged()

    def _predict_part(
        self, columns: Columns, batch: pa.RecordBatch, label: str, first: int, unseen: Counter[str] | None
    ) -> _Predicted:
        x, _, keep = columns.encode(batch, label, first_row=first, with_target=False, unseen=unseen)
        outputs = self.outputs(x)
        wrong = ~outputs.isfinite().all(1)
        if bool(wrong.any()):
            row = first + int(keep.nonzero()[int(wrong.int().argmax())])
            raise ValueError(
                f"the prediction for row {row} of {label} is beyond the largest float64: its inputs are far from those "
                "of the training"
            )
        classes = columns.target.categories is not None
        return _Predicted(outputs, self.probabilities_of(outputs) if classes else None, keep, batch, label, first)

    def _named(self, part: _Predicted) -> list[Any]:
        classes = self.columns.target.categories
        return part.guess.tolist() if classes is None else [classes[i] for i in part.guess.tolist()]

    def _types(self, probabilities: bool) -> dict[str, Any]:
        """Names and Arrow types of the columns of predictions."""
        import pyarrow as pa

        target = self.columns.target
        if target.categories is None:
            return {f"predicted_{target.name}": pa.float64()}
        shown = target.categories if probabilities else ()
        return {f"predicted_{target.name}": pa.string()} | {f"probability_{name}": pa.float64() for name in shown}

    def _written(self, part: _Predicted, probabilities: bool) -> dict[str, list[Any]]:
        """The columns of predictions for the rows that are kept."""
        own, *classes = self._types(probabilities)
        shown: Array = np.empty((0, 0)) if part.probabilities is None else part.probabilities.numpy().T
        return {own: self._named(part)} | {c: _rows.digits(p) for c, p in zip(classes, shown, strict=False)}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write model.safetensors, then model.json; each appears whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"feature_map.{k}": v for k, v in self.feature_map.state_dict().items()}
        _io.write_tensors(folder / "model.safetensors", tensors | {"weight": self.weight, "bias": self.bias})
        body = {"format": FORMAT, "config": asdict(self.config), "columns": self.columns.to_dict()}
        if self.config.feature_map in LEARNED:
            body["feature_map"] = self.feature_map.to_config()
        if self.calibration is not None:
            body["calibration"] = self.calibration.to_dict()
        if self.quality is not None:
            body["quality"] = self.quality
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
            calibration = _load_calibration(stored["calibration"], columns) if "calibration" in stored else None
            quality = check_quality(stored["quality"]) if "quality" in stored else None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}; copy it again, or fit again") from error
        tensors, fm = _load_tensors(weights, config, columns, stored.get("feature_map"))
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"{weights} is damaged: {name} has NaN or infinite numbers; copy it again, or fit again"
                )
        prefix = "feature_map."
        fm.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        return cls(columns, fm, tensors["weight"], tensors["bias"], config, calibration, quality)


def _load_calibration(stored: Any, columns: Columns) -> PlattScaling:
    found = PlattScaling.from_dict(stored)
    if columns.target.categories is None or len(found.offset) != columns.target.width:
        raise ValueError(f"the calibration has {len(found.offset)} classes; expected those of the target")
    return found


def _load_tensors(
    path: Path, config: FitConfig, columns: Columns, learned: Any = None
) -> tuple[dict[str, Tensor], FeatureMap]:
    """The tensors of a model, and its map; shapes and dtypes are compared with the header before a map is drawn.

    `learned` is the configuration of a map that was learnt; other maps are drawn from the configuration of the fit.
    """
    t, d, prefix = columns.target.width, columns.width, "feature_map."
    with _io.open_tensors(path) as file:
        found = _io.tensor_header(file)
        shape = found.get(f"{prefix}projection", ("", (0,)))[1]
        if learned is None:
            # The header has been checked against the size of the file, so the stored projection bounds what is drawn.
            if d * config.num_features > 2 * math.prod(shape) or config.feature_map in LEARNED:
                raise _mismatch(path, [f"{prefix}projection"])
            fm = config.make_map(columns)
        else:
            try:
                fm = feature_map_from_config(learned, shape)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"the feature map of {path.parent} is damaged: {error}; copy it again") from error
        expected = {"weight": ("F64", (t, fm.num_features)), "bias": ("F64", (t,))}
        kinds = {torch.float32: "F32", torch.int64: "I64"}
        expected |= {prefix + name: (kinds[x.dtype], tuple(x.shape)) for name, x in fm.state_dict().items()}
        if found != expected or fm.in_features != d:
            raise _mismatch(path, [k for k in found.keys() | expected if found.get(k) != expected.get(k)] or [prefix])
        tensors = {name: file.get_tensor(name) for name in found}
    source = tensors.get(f"{prefix}source", torch.zeros(1))
    if source.numel() and not (int(source.min()) >= 0 and int(source.max()) < d):
        raise ValueError(f"{path} is damaged: {prefix}source names inputs that are not there; copy it, or fit again")
    return tensors, fm


def _mismatch(path: Path, names: list[str]) -> ValueError:
    return ValueError(f"{path} does not fit model.json: {', '.join(sorted(names))}; copy both again, or fit again")


def _absent(names: Sequence[str], table: Table) -> str:
    return f"no column {', '.join(map(repr, names))}; the table has {', '.join(table.names)}"


def _spread(columns: dict[str, list[Any]], keep: list[bool]) -> dict[str, list[Any]]:
    """Values of the rows that are kept, with None for all other rows."""
    if all(keep):
        return columns
    return {
        name: [next(found) if kept else None for kept in keep] for name, v in columns.items() for found in [iter(v)]
    }


class _Drift:
    """Sums over the number columns of a table, in units of the training."""

    def __init__(self, columns: Columns) -> None:
        self.columns = [column for column in columns.inputs if column.kind == "number"]
        self.sums = np.zeros((len(self.columns), 3))  # of 1, of values, and of values that are far away

    def add(self, part: _Predicted) -> None:
        for sums, column in zip(self.sums, self.columns, strict=True):
            values, bad = read_column(part.batch, column, part.label)
            z = standardise(values[~bad], column.mean, column.scale)
            z = z[np.abs(z) <= REACH]
            sums += [len(z), z.sum(), (np.abs(z) > FAR).sum()]

    def result(self) -> list[Drift]:
        found = []
        for (n, total, far), column in zip(self.sums, self.columns, strict=True):
            if not n:
                continue
            most_far = MANY_FAR + 3 * math.sqrt(MANY_FAR * (1 - MANY_FAR) / n)
            if abs(total / n) > max(SHIFT, 3 / math.sqrt(n)) or far / n > most_far:
                mean = column.mean + total / n * column.scale
                found.append(Drift(column.name, float(mean), float(far / n), column.mean, column.scale))
        return found


class _Score:
    """R2 and root mean squared error, or accuracy, AUC and log-loss, from sums over the rows with a target.

    AUC is that of `roc_auc`, computed from histograms of the logits of the probabilities, so that its memory does not
    depend on the number of rows. Two rows in one bin count as a tie.
    """

    def __init__(self, target: Column) -> None:
        self.target = target
        self.sums = np.zeros(4)  # of 1, of squared errors or hits, of y and of y^2
        self.known, self.log_loss = 0, 0.0  # number of rows with a class of the training, and -log of its probability
        curves = 1 if target.width == 2 else target.width
        self.bins = max((1 << 20) // target.width, 1 << 10)
        # of other classes and of this one, per class that has a curve
        self.counts = np.zeros((curves, 2, self.bins if target.categories else 0), np.int64)

    def add(self, part: _Predicted) -> int:
        """Count the rows of a part; returns the number of those whose class was not seen in training."""
        target, keep = self.target, part.keep.numpy()
        y, bad = read_column(part.batch, target, part.label)
        known, guess = keep & ~bad, part.guess.numpy()[~bad[keep]]
        if part.probabilities is None:  # about the mean, sums of squares keep their digits
            y, guess = (standardise(values, target.mean, target.scale) for values in (y, guess))
            far = known & (np.abs(y) > LARGEST_TARGET)
            if far.any():
                raise ValueError(
                    f"{target.name!r} at row {part.first_row + int(far.argmax())} of {part.label} is too far from its "
                    f"mean in training, {target.mean:g}, to count in a score; leave the column out"
                )
        y = y[known].astype(float)
        loss = np.square(guess - y) if part.probabilities is None else guess == y
        self.sums += [len(y), loss.sum(), y.sum(), np.square(y).sum()]
        return 0 if part.probabilities is None else self._add_classes(part.probabilities.numpy()[~bad[keep]], y)

    def _add_classes(self, probabilities: Array, labels: Array) -> int:
        seen = labels >= 0
        p, index = probabilities[seen], labels[seen].astype(int)
        self.known += len(p)
        chosen = p[np.arange(len(p)), index].clip(np.finfo(float).eps, 1)
        self.log_loss -= float(np.log(chosen).sum())
        for c, (others, own) in enumerate(self.counts, start=len(self.counts) == 1):
            with np.errstate(divide="ignore"):
                logit = np.log(p[:, c]) - np.log1p(-p[:, c])
            place = ((logit.clip(-LOGIT, LOGIT) + LOGIT) / (2 * LOGIT) * (self.bins - 1)).astype(int)
            own += np.bincount(place[index == c], minlength=self.bins)
            others += np.bincount(place[index != c], minlength=self.bins)
        return int((~seen).sum())

    def result(self) -> dict[str, float]:
        n, loss, total, squares = self.sums
        if not n:
            return {}
        if self.target.categories is None:
            variation = squares - total**2 / n
            rmse = math.sqrt(loss / n) * self.target.scale
            return {"R2": float(1 - loss / variation) if variation else 0.0, "RMSE": rmse}
        found = {"accuracy": float(loss / n)}
        areas = [area for others, own in self.counts if (area := _area(others, own)) is not None]
        if areas:
            found["AUC"] = sum(areas) / len(areas)
        return found | ({"log-loss": self.log_loss / self.known} if self.known else {})


def _area(others: Array, own: Array) -> float | None:
    """The share of pairs of a row of `own` and one of `others` that are in order; None if there is none."""
    pairs = float(own.sum()) * float(others.sum())
    below = np.cumsum(others) - others / 2  # a tie counts half
    return float(own @ below) / pairs if pairs else None
