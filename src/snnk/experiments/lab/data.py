"""The data sets of the paper, from a local folder or from the Hugging Face hub.

The files of a data set may lie in the folder that --data-dir names, or in a subfolder with the data set's name, so that
one folder can hold all data sets. Each file may be gzipped. `--data-dir hub`, or the name of a data set on the hub,
downloads it instead. Row counts are checked, and an error names a missing or damaged file and where to get it.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

HUB = "hub"
SPLITS = ("train", "test")
SIDE = 32  # height and width of CIFAR images


@dataclass(frozen=True)
class Source:
    """Where an experiment finds its data and its pretrained model.

    Args:
        data_dir: a folder, or "hub"; None for experiments without data, and for the data that --quick generates.
        model: folder or hub name of a pretrained model.
    """

    data_dir: str | None = None
    model: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """The description that is stored with the rows: the model's name without its path, and the kind of data."""
        model = self.model or ""
        if model and Path(model).is_dir():
            model = Path(model).resolve().name
        return {"model": model, "data": "made by --quick" if self.data_dir is None else "real"}


NOWHERE = Source()
NO_DATA = {"model": "", "data": "none"}  # stored with the rows of experiments that need no data


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
    """The files of a data set, its numbers of rows, and where to get it.

    Args:
        title: the name that an experiment's NEEDS uses.
        files: role -> the names that a file may have.
        rows: number of rows per split; `hub_rows` if the version on the hub has others.
        where: address and files, for error messages.
        hub: name on the Hugging Face hub.
        columns: names of the columns of images and classes, on the hub and in Parquet files.
    """

    title: str
    files: dict[str, tuple[str, ...]]
    rows: dict[str, int]
    where: str
    hub: str | None = None
    hub_rows: dict[str, int] | None = None
    columns: tuple[str, str] = ("img", "label")


DATASETS = {
    "mnist": DataSet(
        "MNIST",
        {
            f"{split} {what}": (f"{stem}-{what}-idx{n}-ubyte", f"{stem}-{what}.idx{n}-ubyte")
            for split, stem in (("train", "train"), ("test", "t10k"))
            for what, n in (("images", 3), ("labels", 1))
        },
        {"train": 60_000, "test": 10_000},
        "yann.lecun.com/exdb/mnist, four files *-ubyte.gz; or --data-dir hub",
        "ylecun/mnist",
        columns=("image", "label"),
    ),
    "covertype": DataSet(
        "CoverType",
        {"all": ("covtype.parquet", "covtype.data", "covtype.csv")},
        {"all": 581_012},
        "archive.ics.uci.edu/dataset/31/covertype, covtype.data.gz",
    ),
    "higgs": DataSet(
        "HIGGS",
        {"all": ("HIGGS.parquet", "HIGGS.csv")},
        {"all": 11_000_000},
        "archive.ics.uci.edu/dataset/280/higgs, HIGGS.csv.gz",
    ),
    "hepmass": DataSet(
        "HEPMASS",
        {"train": ("all_train.parquet", "all_train.csv"), "test": ("all_test.parquet", "all_test.csv")},
        {"train": 7_000_000, "test": 3_500_000},
        "archive.ics.uci.edu/dataset/347/hepmass, all_train.csv.gz and all_test.csv.gz",
    ),
    "cifar10": DataSet(
        "CIFAR-10",
        {
            "train images": ("data_batch_1.webp",),
            "test images": ("test_batch.webp",),
            "labels": ("labels.npz",),
        },
        {"train": 10_000, "test": 10_000},
        "huggingface.co/datasets/uoft-cs/cifar10 (--data-dir hub); or data_batch_1 and test_batch as mosaics of 100 x "
        "100 tiles in lossless WebP with labels.npz",
        "uoft-cs/cifar10",
        {"train": 50_000, "test": 10_000},
    ),
    "cifar100": DataSet(
        "CIFAR-100",
        {split: (f"{split}.bin", f"{split}.parquet", f"{split}-00000-of-00001.parquet") for split in SPLITS},
        {"train": 50_000, "test": 10_000},
        "huggingface.co/datasets/uoft-cs/cifar100 (its two Parquet files, or --data-dir uoft-cs/cifar100), or "
        "www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz, train.bin and test.bin",  # the Python archive has pickles
        "uoft-cs/cifar100",
        columns=("img", "fine_label"),
    ),
}


def needs_data(needs: str) -> bool:
    """Whether an experiment's NEEDS names a data set.

    Example:
        >>> needs_data("MNIST"), needs_data("transformers, peft")
        (True, False)
    """
    return any(title in needs for title in ("GLUE", *(known.title for known in DATASETS.values())))


def _files(name: str, root: Path) -> dict[str, Path]:
    """The files of a data set that exist, by role."""
    found: dict[str, Path] = {}
    for role, names in DATASETS[name].files.items():
        places = [folder / f"{n}{end}" for folder in (root / name, root) for n in names for end in ("", ".gz")]
        path = next((p for p in places if p.is_file()), None)
        if path is not None:
            found[role] = path
    return found


def is_there(name: str, source: Source) -> bool:
    """Whether --data-dir has files of a data set; the error of `find` lists those that are missing."""
    return source.data_dir is not None and bool(_files(name, Path(source.data_dir)))


def find(name: str, source: Source) -> dict[str, Path]:
    """The files of a data set by role. The error for missing files lists them, the folders, and where to get them."""
    known = DATASETS[name]
    if source.data_dir is None:
        raise FileNotFoundError(f"{name} is needed: get it from {known.where}, and name its folder with --data-dir")
    if source.data_dir == HUB:
        raise FileNotFoundError(
            f"{name} is not loaded from the hub: get it from {known.where}, and name its folder with --data-dir"
        )
    root = Path(source.data_dir)
    found = _files(name, root)
    missing = [" or ".join(names) for role, names in known.files.items() if role not in found]
    if missing:
        raise FileNotFoundError(
            f"{name}: no {', '.join(missing)} (.gz) in {root} or {root / name}; get it from {known.where}"
        )
    return found


def _on_hub(name: str, source: Source) -> bool:
    return source.data_dir is not None and source.data_dir in (HUB, DATASETS[name].hub)


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Turn any error that a truncated or changed file causes into one ValueError that names the file."""
    try:
        yield
    except (EOFError, KeyError, OSError, ValueError, zlib.error, BadZipFile) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the system, such as no permission
            raise
        raise ValueError(f"{path} is damaged ({error}); get it anew") from error


def _counted(name: str, split: str, x: Any, y: Any, *, hub: bool = False) -> None:
    """Raise a ValueError unless a split has the expected numbers of inputs and classes."""
    known = DATASETS[name]
    wanted = ((known.hub_rows if hub else None) or known.rows)[split]
    for what, rows in (("classes", len(y)), ("inputs", len(x))):
        if rows != wanted:
            raise ValueError(
                f"{name}, {split}, {what}: {rows:,} rows instead of {wanted:,}; get it anew: {known.where}"
            )


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """An array of bytes in the idx format of MNIST: (n,) labels or (n, rows, columns) images."""
    with _whole(path), _open(path) as file:
        raw = file.read()
    dims = raw[3] if raw[:3] == b"\0\0\x08" else 0
    shape = tuple(np.frombuffer(raw[4 : 4 + 4 * dims], ">u4").tolist())
    body = np.frombuffer(raw[4 + 4 * dims :], np.uint8) if dims else np.zeros(0, np.uint8)
    if not dims or body.size != np.prod(shape):
        raise ValueError(f"{path} is not a complete idx file of bytes; get it anew")
    return body.reshape(shape)


def mnist(source: Source) -> dict[str, Split]:
    """MNIST: inputs (n, 784) in [0, 1]."""
    splits = {}
    if _on_hub("mnist", source):
        splits = _hub_images("mnist")
    else:
        files = find("mnist", source)
        for split in SPLITS:
            x, y = (read_idx(files[f"{split} {what}"]) for what in ("images", "labels"))
            _counted("mnist", split, x, y)
            splits[split] = _split(x, y)
    return {key: Split(split.x.flatten(1).float() / 255, split.y) for key, split in splits.items()}


def cifar10(source: Source) -> dict[str, Split]:
    """CIFAR-10: images (n, 32, 32, 3) as bytes. The local files hold one fifth of the training set."""
    if _on_hub("cifar10", source):
        return _hub_images("cifar10")
    from snnk.hf.data import open_image

    files = find("cifar10", source)
    splits = {}
    for split in SPLITS:
        path = files[f"{split} images"]
        with _whole(path):
            mosaic = np.asarray(open_image(path))
        down, across = mosaic.shape[0] // SIDE, mosaic.shape[1] // SIDE
        whole = mosaic[: down * SIDE, : across * SIDE].reshape(down, SIDE, across, SIDE, 3)
        tiles = whole.swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)
        with _whole(files["labels"]), _open(files["labels"]) as file, np.load(file, allow_pickle=False) as labels:
            y = labels[split][: len(tiles)]  # the file may hold the labels of all five batches
        _counted("cifar10", split, tiles, y)
        splits[split] = _split(tiles, y)
    return splits


def cifar100(source: Source) -> dict[str, Split]:
    """CIFAR-100 with its 100 fine classes: images (n, 32, 32, 3) as bytes, from binary or Parquet files."""
    if _on_hub("cifar100", source):
        return _hub_images("cifar100")
    files = find("cifar100", source)
    splits = {}
    for split in SPLITS:
        path = files[split]
        with _whole(path):
            x, y = _parquet_images(path, "cifar100") if path.suffix == ".parquet" else _records(path)
        _counted("cifar100", split, x, y)
        splits[split] = _split(x, y)
    return splits


def _records(path: Path) -> tuple[Any, Any]:
    """Read CIFAR-100's binary records: coarse class, fine class, then the image channel by channel."""
    with _open(path) as file:
        rows = np.frombuffer(file.read(), np.uint8).reshape(-1, 2 + 3 * SIDE * SIDE)
    return rows[:, 2:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1), rows[:, 1]


def _parquet_images(path: Path, name: str) -> tuple[Any, Any]:
    """Read images and classes from a Parquet file, in which `datasets` stores encoded bytes."""
    from PIL import Image

    from snnk.hf.data import read_rows

    image, label = DATASETS[name].columns
    rows = list(read_rows(path, only=[image, label]))
    pictures = [Image.open(io.BytesIO(row[image]["bytes"])).convert("RGB") for row in rows]
    return np.stack([np.asarray(picture) for picture in pictures]), np.array([row[label] for row in rows])


IMAGES: dict[str, Callable[[Source], dict[str, Split]]] = {"cifar10": cifar10, "cifar100": cifar100}


def image_folders(source: Source) -> tuple[Path, Path] | None:
    """The folders train and test (or val) of --data-dir, with one subfolder per class; None if there are none."""
    root = Path(source.data_dir or "")
    held = [root / name for name in ("test", "val") if (root / name).is_dir()]
    return (root / "train", held[0]) if source.data_dir and (root / "train").is_dir() and held else None


def image_task(source: Source) -> str:
    """The name of the image task: that of a folder of images, else cifar100 if --data-dir holds it, else cifar10."""
    if source.data_dir is None:
        return "cifar10"
    root = Path(source.data_dir)
    own = root.resolve().name
    if image_folders(source):
        return own
    named = [name for name in IMAGES if own == name or source.data_dir == DATASETS[name].hub]
    there = [name for name in IMAGES if len(_files(name, root)) == len(DATASETS[name].files)]
    return [*named, *there, "cifar10"][0]


def covertype(source: Source) -> Split:
    """CoverType: 54 columns, classes 0..6."""
    x, y = _table(find("covertype", source)["all"], "Cover_Type", -1)
    _counted("covertype", "all", x, y)
    return Split(x, y - 1)


def higgs(source: Source) -> Split:
    """HIGGS: 28 columns, two classes. The last 500,000 rows are its test set."""
    x, y = _table(find("higgs", source)["all"], "label", 0)
    _counted("higgs", "all", x, y)
    return Split(x, y)


def hepmass(source: Source) -> Split:
    """HEPMASS: 28 columns, two classes. The rows of the test file follow those of the training file."""
    files = find("hepmass", source)
    parts = {split: _table(files[split], "label", 0) for split in SPLITS}
    for split, (x, y) in parts.items():
        _counted("hepmass", split, x, y)
    return Split(*(torch.cat(pair) for pair in zip(parts["train"], parts["test"], strict=True)))


def _table(path: Path, target: str, place: int) -> tuple[Tensor, Tensor]:
    """Columns (n, d) in float32, and the target: the column of that name, or at that place in a file without names.

    Arrow reads whole columns of numbers here, as `snnk.hf.data` makes Python objects of each of up to 11 million rows.
    """
    import pyarrow.csv
    import pyarrow.parquet

    with _whole(path):
        if path.suffix == ".parquet":
            table = pyarrow.parquet.read_table(path)
        else:  # of UCI's files only HEPMASS has a header, which begins with "# label"
            with _open(path) as file:
                named = any(letter.isalpha() and letter not in "eE" for letter in file.readline().decode())
            options = pyarrow.csv.ReadOptions(autogenerate_column_names=not named)
            table = pyarrow.csv.read_csv(path, read_options=options)
        columns = [column.to_numpy().astype(np.float32) for column in table.columns]
    names = [name.strip("# ") for name in table.column_names]
    at = names.index(target) if target in names else place % len(names)
    y = torch.from_numpy(columns.pop(at).astype(np.int64))
    return torch.from_numpy(np.stack(columns, 1)), y


def _hub_images(name: str) -> dict[str, Split]:
    from snnk.hf.data import hub_columns

    image, label = DATASETS[name].columns
    splits = {}
    for split in SPLITS:
        found = hub_columns(f"{DATASETS[name].hub}@{split}")
        _counted(name, split, found[image], found[label], hub=True)
        splits[split] = _split(np.stack([np.asarray(picture) for picture in found[image]]), np.array(found[label]))
    return splits


def _split(x: Any, y: Any) -> Split:
    return Split(torch.from_numpy(np.array(x, order="C")), torch.from_numpy(np.asarray(y).astype(np.int64)))


def is_quick(config: Any, quick: Any) -> bool:
    """Whether a configuration is QUICK up to the number of seeds: only then are missing data generated."""
    return bool(replace(config, seeds=quick.seeds) == quick)


def made(rows: int, columns: int, classes: int, seed: int) -> Split:
    """Gaussian columns, and classes that are a curved function of the first three, for --quick."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    scores = torch.sin(x[:, :3] @ torch.randn(3, classes, generator=generator))
    return Split(x, scores.argmax(1))


def stratified(y: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of rows to keep and of rows to hold out, with the same share of every class."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
    held = torch.zeros(len(y), dtype=torch.bool)
    for c in y.unique():
        rows = order[y[order] == c]
        held[rows[: round(fraction * len(rows))]] = True
    return order[~held[order]], order[held[order]]
