"""Compression of whole image encoders, attention included: quality, size and latency against rivals.

    python benchmarks/images.py --model FOLDER --data CIFAR10_FOLDER [--keeps 0.5,0.33] [--out FILE]
    python benchmarks/images.py --quick

The images of CIFAR-10 are enlarged to 112 x 112. `keep` is the part of the multiply-adds of all linear layers inside
the layers of the model. The rows "snnk" are what `snnk.hf.compress` writes with its default options from images of the
training file, without their classes. A linear classifier is fitted in closed form to the vectors (first token of the
last layer) that the original has for other images of the training file, and stays as it is: `accuracy`, in percent, is
that of the compressed model's vectors with the original's classifier, on images of the test file, which are evaluated
once per row. `cosine` is the mean cosine of these vectors to the original's. Latency is processor time on one thread
for 16 images and for one, over that of the original, measured in turns. --quick generates a small model and images,
which show that the script runs and nothing else.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rivals
import torch
import torch.nn.functional as F
from compress import latency, size_of
from PIL import Image
from torch import Tensor
from transformers import AutoModel, Dinov2Config, Dinov2Model, ViTImageProcessor
from whole import kept

from snnk.experiments.compression import Batch, States
from snnk.experiments.lab.data import Source, Split, cifar10
from snnk.experiments.lab.records import Results
from snnk.hf import compress
from snnk.hf.finding import find_ffns

SHAPES = {"16": 16, "1": 1}


@dataclass(frozen=True)
class Config:
    """`fit` images to compress with, `probe` for the classifier and `test` to measure, of `side` pixels."""

    model: str = ""
    side: int = 112
    fit: int = 2000
    probe: int = 4000
    test: int = 2000
    ridge: float = 1.0  # times the mean square of the vectors
    rounds: int = 9
    seed: int = 0


@dataclass(frozen=True)
class Place:
    """A model, its folder with a processor, the folder of images, batches of these, and labelled images."""

    model: Any
    folder: Path
    images: Path
    calibration: list[Batch]
    probe: Split
    test: Split
    options: dict[str, Any]


def prepare(model: Any, splits: dict[str, Split], work: Path, config: Config, options: dict[str, Any]) -> Place:
    """Write the model with a processor, and the first images of the training split as files."""
    processor = ViTImageProcessor(size={"height": config.side, "width": config.side})
    for part in (model, processor):
        part.save_pretrained(work / "model")
    (work / "images").mkdir()
    for i, image in enumerate(splits["train"].x[: config.fit]):
        Image.fromarray(image.numpy()).save(work / "images" / f"{i:05}.png")

    def encode(split: Split) -> Split:
        parts = [processor(list(part.numpy()), return_tensors="pt")["pixel_values"] for part in split.x.split(100)]
        return Split(torch.cat(parts), split.y)

    train = splits["train"]
    rows = torch.arange(config.fit, config.fit + config.probe)
    fitted = encode(train.take(torch.arange(min(config.fit, 512)))).x
    return Place(
        model,
        work / "model",
        work / "images",
        [{"pixel_values": part} for part in fitted.split(16)],
        encode(train.take(rows)),
        encode(splits["test"].take(torch.arange(config.test))),
        options,
    )


def read(args: argparse.Namespace, work: Path, config: Config) -> Place:
    model = AutoModel.from_pretrained(args.model, trust_remote_code=False).eval()
    return prepare(model, cifar10(Source(str(args.data))), work, config, {})


def make(work: Path, config: Config) -> Place:
    """A small model and random images, for --quick."""
    torch.manual_seed(config.seed)
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": config.side}
    model = Dinov2Model(Dinov2Config(**sizes, patch_size=14)).eval()
    splits = {
        name: Split(torch.randint(256, (200, 32, 32, 3), dtype=torch.uint8), torch.randint(10, (200,)))
        for name in ("train", "test")
    }
    return prepare(model, splits, work, config, {"refine": 5, "recover": 5})


def states(model: Any) -> States:
    """Vectors of images: the first token of the last layer."""
    return lambda batch: model(**batch).last_hidden_state[:, 0]


@torch.no_grad()
def vectors(model: Any, images: Tensor) -> Tensor:
    return torch.cat([states(model)({"pixel_values": part}) for part in images.split(50)])


def classifier(x: Tensor, classes: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
    """Least squares towards one-hot classes, with a penalty."""
    x, mean = x.double() - x.double().mean(0), x.double().mean(0)
    gram = x.T @ x + ridge * float(x.square().mean()) * torch.eye(x.shape[1], dtype=torch.float64)
    targets = F.one_hot(classes.long()).double()
    weight = torch.linalg.solve(gram, x.T @ (targets - targets.mean(0)))
    return lambda rows: ((rows.double() - mean) @ weight + targets.mean(0)).argmax(1)


def ours(place: Place, keep: float, work: Path, **options: Any) -> Any:
    """The model that `snnk.hf.compress` writes."""
    out = work / "small"
    compress(place.folder, place.images, out=out, keep=keep, **{**place.options, **options})
    model = AutoModel.from_pretrained(out, trust_remote_code=False).eval()
    shutil.rmtree(out)
    return model


def rival(change: Callable[[Any, Any, float], None]) -> Callable[[Place, float, Path], Any]:
    """A copy of the model that `change` has changed."""

    def changed(place: Place, keep: float, work: Path) -> Any:
        model = copy.deepcopy(place.model)
        change(model, place.calibration, keep)
        return model

    return changed


def drop_layers(model: Any, batches: Any, keep: float) -> None:
    """Drop the layers that turn the residual stream least."""
    layers = len(find_ffns(model))
    rivals.drop_layers(model, batches, layers - max(1, round(keep * layers)))


CONTENDERS: dict[str, Callable[[Place, float, Path], Any]] = {
    "snnk": ours,
    "snnk, without distillation": lambda p, k, w: ours(p, k, w, recover=0),
    "activation-aware low rank": rival(rivals.low_rank),
    "pruning without refit": rival(rivals.prune),
    "dropping layers": rival(drop_layers),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="generate a small model")
    parser.add_argument("--model", type=Path, help="folder of an image encoder")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--keeps", default="0.5,0.33")
    parser.add_argument("--threads", type=int, default=2, help="latency is always measured on one thread")
    parser.add_argument("--only", default="", help="contenders, separated by semicolons")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/images.json"))
    args = parser.parse_args()
    if not args.quick and not (args.model and args.data):
        parser.error("name --model and --data, or use --quick for a generated model")
    config = Config(args.model.name) if args.model else Config("quick", 28, 100, 50, 50, rounds=2)
    keeps = [0.5] if args.quick else [float(k) for k in args.keeps.split(",")]
    torch.set_num_threads(args.threads)
    results = Results(args.out, config)
    names = args.only.split(";") if args.only else list(CONTENDERS)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        place = make(work, config) if args.quick else read(args, work, config)
        decide = classifier(vectors(place.model, place.probe.x), place.probe.y, config.ridge)
        before = vectors(place.model, place.test.x)
        for name, keep in [("original", 1.0), *((name, keep) for keep in keeps for name in names)]:
            if results.find(contender=name, keep=keep):
                continue
            clocks = time.perf_counter, time.process_time
            start = [clock() for clock in clocks]
            model = place.model if name == "original" else CONTENDERS[name](place, keep, work)
            spent = [(clock() - begun) / 60 for clock, begun in zip(clocks, start, strict=True)]
            after = vectors(model, place.test.x)
            parameters, megabytes = size_of(model)
            row = results.add(
                {
                    "contender": name,
                    "keep": keep,
                    "multiply_adds": kept(model, place.model),
                    "parameters": parameters,
                    "stored_MB": megabytes,
                    **{
                        f"latency_{label}": latency(
                            states(place.model), states(model), {"pixel_values": place.test.x[:count]}, config.rounds
                        )
                        for label, count in SHAPES.items()
                    },
                    "accuracy": 100 * float((decide(after) == place.test.y).double().mean()),
                    "same_class": 100 * float((decide(after) == decide(before)).double().mean()),
                    "cosine": float(F.cosine_similarity(before, after).mean()),
                    "minutes": spent[0],
                    "processor_minutes": spent[1],
                    "threads": args.threads,
                    "seed": config.seed,
                }
            )
            sys.stdout.write(
                f"{name}, keep {keep}: {row['multiply_adds']:.3f} of the multiply-adds, latency "
                f"{row['latency_16']:.2f} and {row['latency_1']:.2f}, accuracy {row['accuracy']:.2f}, "
                f"cosine {row['cosine']:.4f}, {row['minutes']:.1f} min ({row['processor_minutes']:.1f} of processors)\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
