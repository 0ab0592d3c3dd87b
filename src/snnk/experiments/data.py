"""The data sets of the paper, from a local folder or, with `--data-dir hub`, through Hugging Face datasets.

Row counts are checked; what is missing is named, with where to get it. Files are looked for in the folder itself and
in one of the data set's name; each may be gzipped.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HUB = "hub"


@dataclass(frozen=True)
class Source:
    """Where data and weights are.

    Args:
        data_dir: a folder, or "hub"; None for experiments that need no data, and for small data made by --quick.
        model: folder or hub name of a pretrained model.
    """

    data_dir: str | None = None
    model: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """What rows say about it: the model's name, and whether data were made."""
        model = "" if self.model is None else Path(self.model).name
        return {"model": model, "data": "made by --quick" if self.data_dir is None else "real"}


NOWHERE = Source()


@dataclass(frozen=True)
class Split:
    """Inputs (n, ...) and classes (n,)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: Tensor) -> Split:
        return Split(self.x[rows], self.y[rows])


@dataclass(frozen=True)
class DataSet:
    """Files of a data set, rows of its splits, its hub name, and where to get it."""

    files: dict[str, tuple[str, ...]]  # role -> names that a file may have
    rows: dict[str, int]
    where: str
    hub: str | None = None


DATASETS = {
    "mnist": DataSet(
        {
            f"{split} {what}": (f"{stem}-{what}-idx{n}-ubyte", f"{stem}-{what}.idx{n}-ubyte")
            for split, stem in (("train", "train"), ("test", "t10k"))
            for what, n in (("images", 3), ("labels", 1))
        },
        {"train": 60_000, "test": 10_000},
        "yann.lecun.com/exdb/mnist, four files *-ubyte.gz",
        "ylecun/mnist",
    ),
    "covertype": DataSet(
        {"all": ("covtype.parquet", "covtype.data", "covtype.csv")},
        {"all": 581_012},
        "archive.ics.uci.edu/dataset/31/covertype, covtype.data.gz",
    ),
    "higgs": DataSet(
        {"all": ("HIGGS.parquet", "HIGGS.csv")}, {"all": 11_000_000}, "archive.ics.uci.edu/dataset/280/higgs"
    ),
    "hepmass": DataSet(
        {"train": ("all_train.parquet", "all_train.csv"), "test": ("all_test.parquet", "all_test.csv")},
        {"train": 7_000_000, "test": 3_500_000},
        "archive.ics.uci.edu/dataset/347/hepmass, all_train.csv.gz and all_test.csv.gz",
    ),
    "cifar10": DataSet(
        {
            "train images": ("data_batch_1.webp",),
            "test images": ("test_batch.webp",),
            "labels": ("labels.npz",),
        },
        {"train": 10_000, "test": 10_000},
        "huggingface.co/datasets/uoft-cs/cifar10 (--data-dir hub); or data_batch_1 and test_batch as mosaics of 100 x "
        "100 tiles in lossless WebP with labels.npz",
        "uoft-cs/cifar10",
    ),
}


def find(name: str, source: Source) -> dict[str, Path]:
    """The files of a data set by role; an error says which are missing, where they should be, and where to get them."""
    known = DATASETS[name]
    if source.data_dir is None:
        raise FileNotFoundError(f"{name} is needed: get it from {known.where}, and name its folder with --data-dir")
    root = Path(source.data_dir)
    found: dict[str, Path] = {}
    for role, names in known.files.items():
        places = [folder / f"{n}{end}" for folder in (root / name, root) for n in names for end in ("", ".gz")]
        path = next((p for p in places if p.is_file()), None)
        if path is not None:
            found[role] = path
    missing = [" or ".join(names) for role, names in known.files.items() if role not in found]
    if missing:
        raise FileNotFoundError(
            f"{name}: no {', '.join(missing)} (.gz) in {root} or {root / name}; get it from {known.where}"
        )
    return found


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _counted(name: str, split: str, rows: int) -> None:
    wanted = DATASETS[name].rows[split]
    if rows != wanted:
        raise ValueError(f"{name}, {split}: {rows:,} rows instead of {wanted:,}; get it anew: {DATASETS[name].where}")


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """An array of bytes in the idx format of MNIST: (n,) labels or (n, rows, columns) images."""
    with _open(path) as file:
        raw = file.read()
    dims = raw[3] if raw[:3] == b"\0\0\x08" else 0
    shape = tuple(np.frombuffer(raw[4 : 4 + 4 * dims], ">u4").tolist())
    body = np.frombuffer(raw[4 + 4 * dims :], np.uint8) if dims else np.zeros(0, np.uint8)
    if not dims or body.size != np.prod(shape):
        raise ValueError(f"{path} is no complete idx file of bytes; get it anew")
    return body.reshape(shape)


def mnist(source: Source) -> dict[str, Split]:
    """MNIST: inputs (n, 784) in [0, 1]."""
    if source.data_dir == HUB:
        return _hub_images("mnist", "image", "label", lambda x: x.reshape(len(x), -1))
    files = find("mnist", source)
    splits = {}
    for split in ("train", "test"):
        images, labels = (read_idx(files[f"{split} {what}"]) for what in ("images", "labels"))
        _counted("mnist", split, len(labels))
        x = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32) / 255)
        splits[split] = Split(x, torch.from_numpy(labels.astype(np.int64)))
    return splits


def cifar10(source: Source) -> dict[str, Split]:
    """CIFAR-10: images (n, 32, 32, 3) as bytes; from files, one fifth of the training set."""
    if source.data_dir == HUB:
        return _hub_images("cifar10", "img", "label", lambda x: x)
    from PIL import Image

    files = find("cifar10", source)
    splits = {}
    with np.load(files["labels"], allow_pickle=False) as labels:
        for split in ("train", "test"):
            with Image.open(files[f"{split} images"]) as image:
                mosaic = np.asarray(image.convert("RGB"))
            down, across = mosaic.shape[0] // 32, mosaic.shape[1] // 32
            tiles = mosaic.reshape(down, 32, across, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)
            _counted("cifar10", split, len(tiles))
            y = torch.from_numpy(labels[split][: len(tiles)].astype(np.int64))
            splits[split] = Split(torch.from_numpy(np.ascontiguousarray(tiles)), y)
    return splits


def covertype(source: Source) -> Split:
    """CoverType: 54 columns, classes 0..6."""
    x, y = _table(find("covertype", source)["all"], "Cover_Type", -1)
    _counted("covertype", "all", len(y))
    return Split(x, y - 1)


def higgs(source: Source) -> Split:
    """HIGGS: 28 columns, two classes; the last 500,000 rows are its test set."""
    x, y = _table(find("higgs", source)["all"], "label", 0)
    _counted("higgs", "all", len(y))
    return Split(x, y)


def hepmass(source: Source) -> Split:
    """HEPMASS: 28 columns, two classes; the rows of its training file, then those of its test file."""
    files = find("hepmass", source)
    parts = {split: _table(files[split], "label", 0) for split in ("train", "test")}
    for split, (_, y) in parts.items():
        _counted("hepmass", split, len(y))
    return Split(*(torch.cat(pair) for pair in zip(parts["train"], parts["test"], strict=True)))


def _table(path: Path, target: str, place: int) -> tuple[Tensor, Tensor]:
    """Columns (n, d) float32 and the target: a column of that name, or, in a CSV file without names, the one there."""
    import pyarrow.csv
    import pyarrow.parquet

    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
    else:  # UCI's files have no header, but for HEPMASS's, whose first is "# label"
        with _open(path) as file:
            named = any(letter.isalpha() and letter not in "eE" for letter in file.readline().decode())
        options = pyarrow.csv.ReadOptions(autogenerate_column_names=not named)
        table = pyarrow.csv.read_csv(path, read_options=options)
    names = [name.strip("# ") for name in table.column_names]
    at = names.index(target) if target in names else place % len(names)
    columns = [column.to_numpy().astype(np.float32) for column in table.columns]
    y = torch.from_numpy(columns.pop(at).astype(np.int64))
    return torch.from_numpy(np.stack(columns, 1)), y


def _hub_images(name: str, image: str, label: str, shape: Callable[[Any], Any]) -> dict[str, Split]:
    import datasets  # type: ignore[import-untyped]

    loaded = datasets.load_dataset(str(DATASETS[name].hub))
    splits = {}
    for split in ("train", "test"):
        x = np.stack([np.asarray(picture) for picture in loaded[split][image]])
        y = torch.tensor(loaded[split][label])
        x = shape(x.astype(np.float32) / 255 if x.ndim == 3 else x)
        splits[split] = Split(torch.from_numpy(np.ascontiguousarray(x)), y)
    return splits


def is_quick(config: Any, quick: Any) -> bool:
    """Whether a configuration is the small one, whatever --seeds says: it may then do with data that are made."""
    return bool(replace(config, seeds=quick.seeds) == quick)


def made(rows: int, columns: int, classes: int, seed: int) -> Split:
    """Classes of a curved function of three Gaussian columns, for --quick."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    scores = torch.sin(x[:, :3] @ torch.randn(3, classes, generator=generator))
    return Split(x, scores.argmax(1))


def stratified(y: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to keep and rows to hold out, the same share of every class."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    held = torch.zeros(len(y), dtype=torch.bool)
    for c in y.unique():
        rows = order[y[order] == c]
        held[rows[: round(fraction * len(rows))]] = True
    return order[~held[order]], order[held[order]]
