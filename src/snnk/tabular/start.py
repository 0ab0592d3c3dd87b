"""The start of a fit: how rows become features, which is the same for all parts of a table.

It is made from some or all of the rows, and saved as a safetensors file. The note of the file is JSON with everything
that is no tensor, and with a hash of all, so that damage is found. The sums of a part have the same note, and more
tensors.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from snnk import _io
from snnk.maps import FeatureMap, feature_map_from_config
from snnk.tabular.columns import Columns
from snnk.tabular.config import LEARNED, FitConfig
from snnk.tabular.learned import choose_bandwidth, learn
from snnk.tabular.model import ROWS
from snnk.tabular.sample import MOST_NUMBERS, MOST_ROWS, Sample, content_hash, is_reserved
from snnk.tabular.scan import Scan
from snnk.tabular.source import Source, Table

if TYPE_CHECKING:
    import pyarrow as pa

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, how many there are (0: not known)
FORMAT = "snnk.Part 1"
MAP = "map."  # what the names of the tensors of the feature map begin with


def silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True, eq=False)
class Start:
    """How rows become features: all that the sums of different parts must share.

    Args:
        config: what to fit, with its bandwidth chosen.
        columns: the encoding of rows.
        feature_map: phi.
        shift: origin of the sums, (m + t,): products in float32 are rounded about it, in whichever part.

    Example:
        >>> import pyarrow as pa
        >>> rows = pa.table({"x": [0.0, 1.0, 2.0], "y": [0.5, 1.5, 2.5]})
        >>> prepare(rows, FitConfig("y", num_features=4, feature_map="random-relu")).feature_map
        ArcCosine(in_features=1, num_features=4, order=1, projection=orthogonal)
    """

    config: FitConfig
    columns: Columns
    feature_map: FeatureMap
    shift: list[float]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the feature map."""
        return {name: buffer.cpu().contiguous() for name, buffer in self.feature_map.state_dict().items()}

    def note(self) -> dict[str, Any]:
        """Everything but the tensors, for JSON."""
        return {
            "config": asdict(self.config) | {"drop": list(self.config.drop)},
            "columns": self.columns.to_dict(),
            "feature_map": self.feature_map.to_config(),
            "shift": self.shift,
        }

    def to_dict(self) -> dict[str, Any]:
        """The start as JSON, with its tensors as text."""
        data = _io.safetensors().torch.save(self.tensors())
        return {**self.note(), "tensors": base64.b64encode(data).decode("ascii")}

    @classmethod
    def from_dict(cls, stored: Any) -> Start:
        """A start from what `to_dict` gave; anything missing or of another kind is a ValueError."""
        try:
            tensors = _io.safetensors().torch.load(base64.b64decode(stored["tensors"], validate=True))
        except (KeyError, TypeError, ValueError, _io.SafetensorError) as error:
            raise ValueError(f"the start of the sums is damaged: {error}") from error
        return cls.of(stored, tensors)

    @classmethod
    def of(cls, stored: Any, tensors: Mapping[str, Tensor]) -> Start:
        """A start from a note and tensors; everything in them is checked."""
        try:
            config, columns = FitConfig.from_dict(stored["config"]), Columns.from_dict(stored["columns"])
            # The stored projection bounds what is allocated.
            fm = feature_map_from_config(stored["feature_map"], tuple(tensors["projection"].shape))
            shift = [float(value) for value in stored["shift"]]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"the start of the sums is damaged: {error}") from error
        expected = {name: (buffer.dtype, buffer.shape) for name, buffer in fm.state_dict().items()}
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        sizes = fm.in_features == columns.width and len(shift) == fm.num_features + columns.target.width
        inputs = tensors.get("source", torch.zeros(0))
        inside = not inputs.numel() or (int(inputs.min()) >= 0 and int(inputs.max()) < columns.width)
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors.values()) and all(map(math.isfinite, shift))
        if found != expected or not (sizes and inside and finite):
            raise ValueError("the start of the sums is damaged: its columns and its features do not fit together")
        fm.load_state_dict(tensors)
        return cls(config, columns, fm, shift)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the start to one file, whole or not at all: a part without sums."""
        tensors = {MAP + name: tensor for name, tensor in self.tensors().items()}
        note = {"format": FORMAT, "start": self.note(), "sources": {}, "unseen": {}}
        _io.write_tensors(path, tensors, {"note": signed(note, tensors)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Start:
        """Read the start from its own file, or from that of a part."""
        return read_file(path)[0]

    @cached_property
    def key(self) -> str:
        """A hash of the start; parts add if theirs are equal."""
        return digest(self.note(), self.tensors())


def signed(note: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The text of a note, with a hash of it and of the tensors."""
    return json.dumps({**note, "digest": digest(note, tensors)})


def read_file(path: str | os.PathLike[str]) -> tuple[Start, dict[str, Any], list[str]]:
    """The start in a file of a start or of a part, the note of the file, and the names of its tensors."""
    with _io.open_tensors(path) as file:
        text = (file.metadata() or {}).get("note", "")
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    try:
        note = json.loads(text or "null")
        if not isinstance(note, dict) or note.get("format") != FORMAT:
            raise ValueError(f"it is not {FORMAT!r}")
        if note.pop("digest", None) != digest(note, tensors):
            raise ValueError("its contents are not those that were written")
        own = {name.removeprefix(MAP): tensor for name, tensor in tensors.items() if name.startswith(MAP)}
        return Start.of(note["start"], own), note, list(tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error


def damaged(path: str | os.PathLike[str], error: Exception) -> ValueError:
    """The error for a file that cannot be used."""
    return ValueError(f"{path} holds no whole sums or start of snnk fit: {error}; copy it again, or make it again")


def digest(note: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A hash of the contents of a file: JSON and tensors by name, so that damage to it is found."""
    found = hashlib.blake2b(json.dumps(note, sort_keys=True).encode(), digest_size=32)
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().numpy().data)
    return found.hexdigest()


def new_sample(columns: int) -> Sample:
    """An empty sample of rows with this number of columns."""
    return Sample(max(min(MOST_ROWS, MOST_NUMBERS // max(columns, 1)), ROWS))


def prepare(data: Source, config: FitConfig, *, progress: Progress = silent) -> Start:
    """Learn columns and features from a table, or from a sample of its rows in random order or not.

    Args:
        data: a file or folder, a frame, or a callable that returns batches; see `snnk.tabular.fit`.
        config: what to fit.
        progress: a function that is called with (what is being done, how many are done, how many there are).

    Example:
        >>> import numpy as np, pyarrow as pa
        >>> x = np.random.default_rng(0).normal(size=400)
        >>> start = prepare(pa.table({"x": x, "y": np.sin(x)}), FitConfig("y", num_features=16))
        >>> start.columns.names, start.feature_map.num_features
        (['x'], 16)
    """
    table = Table(data)
    scan, sample = Scan.start(table, config.target, config.drop), new_sample(len(table.names))
    scan.read(table, progress=lambda rows: progress("reading columns", rows, 0), sample=sample)
    table.check_unchanged()
    return make_start(config, scan.columns(config.task, config.missing), sample.table(), progress)


def make_start(config: FitConfig, columns: Columns, sample: pa.Table, progress: Progress = silent) -> Start:
    """The start for some columns: learn the features, or choose the bandwidth, from a sample of the rows."""
    most = max(MOST_NUMBERS // (columns.width + columns.target.width), ROWS)
    pairs = [columns.encode(batch, "the sample")[:2] for batch in sample.slice(0, most).to_batches(ROWS)]
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs if y is not None]
    if not sum(map(len, xs)):
        raise ValueError("no rows are left: each has a missing, NaN or infinite value, and is dropped")
    x, y = torch.cat(xs), torch.cat(ys)
    used = ~is_reserved(content_hash(x))
    if bool(used.any()):
        x, y = x[used], y[used]
    if config.feature_map not in LEARNED and isinstance(config.bandwidth, str):
        fourier = config.feature_map == "random-fourier"  # others have no bandwidth, and any number will do
        m = min(config.num_features, 1024)
        bandwidth = choose_bandwidth(x, y, m, config.seed, columns.norm) if fourier else 1.0
        config = replace(config, bandwidth=bandwidth)
    if config.feature_map in LEARNED:
        fm = learn(
            x,
            y,
            config.num_features,
            classes=columns.target.categories is not None,
            deep=config.feature_map == "learned-deep",
            seed=config.seed,
            progress=lambda done, total: progress("learning features", done, total),
        )
    else:
        fm = config.make_map(columns)
    with torch.no_grad():
        shift = torch.cat([fm.phi(x[:ROWS]).double().mean(0), y[:ROWS].mean(0)]).tolist()
    return Start(config, columns, fm, shift)
