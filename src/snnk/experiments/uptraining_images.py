"""Uptraining on images (section 4.3, appendix "Uptraining Transformers"): the top k blocks of a ViT as SNNK layers.

As in uptraining on GLUE, 8 random features replace the first layer of a feed-forward block and its GELU, the whole
model is trained, and the block is bundled. Beyond the paper, 8 atoms take the place of the random features: neurons of
the block itself, fitted to the training images without their labels. AdamW, the linear schedule, the warmup of 6 % and
the weight decay of 1e-3 are the paper's. The rate, which it does not give, and the number of images and epochs are
ours. Multiply-adds are counted for a batch of 64 images after the model's processor. The images are those of `vision`:
CIFAR-10, CIFAR-100 or folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from snnk.experiments.lab import tiny
from snnk.experiments.lab.data import NOWHERE, Source, image_task
from snnk.experiments.lab.records import Results, Row
from snnk.experiments.lab.tuning import others
from snnk.experiments.uptraining import blocks_of, cells, claims, gaps, plot, uptrained

__all__ = ["FIGURE", "NEEDS", "QUICK", "TIME", "Config", "claims", "left", "plot", "run", "total"]

FIGURE = "figure: uptraining of ViT on images"
NEEDS = "CIFAR-10, CIFAR-100 or a folder of images; ViT-base, DINOv2 or another"
TIME = "minutes on a GPU, an hour on a CPU; --quick 10 s"
FULL = {"cifar10": 98.95, "cifar100": 91.67}  # the paper's full fine-tuning of ViT-base


@dataclass(frozen=True)
class Config:
    """The paper's setting; a k above the number of blocks means all blocks."""

    replaced: tuple[int, ...] = (0, 3, 6)
    num_features: int = 8
    learning_rate: float = 5e-5
    weight_decay: float = 1e-3
    train_rows: int = 2000
    test_rows: int = 1000
    batch_size: int = 32
    epochs: int = 10
    images: int = 64
    seeds: int = 1
    seed: int = 0


QUICK = Config(replaced=(0, 1, 2), num_features=4, epochs=1, images=2)


def total(config: Config) -> int:
    """Number of rows that `run` yields; fewer for a model with fewer blocks than the largest k."""
    return len(cells(config.replaced)) * config.seeds


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """One row per seed, k, and kind of the new blocks."""
    task = image_task(source)
    with tiny.images(config, QUICK, source) as files:
        blocks = blocks_of(files["model"])
        for seed in range(config.seed, config.seed + config.seeds):
            for k, kind in cells(config.replaced, blocks):
                key = {"task": task, "replaced": k, "kind": kind, "seed": seed}
                row = results.find(**key)
                if row is None:
                    inputs = _inputs(files, config.images)
                    options = {"weight_decay": config.weight_decay, "seed": seed}
                    found = uptrained(files, k, kind, config, "accuracy", inputs, **options)
                    row = results.add({**key, "blocks": blocks, **found, "paper_full": FULL.get(task)})
                yield row


def _inputs(files: Mapping[str, str], images: int) -> dict[str, Tensor]:
    """A batch of copies of the first image, as the model's processor resizes it."""
    from snnk.hf.data import find_images, read_images
    from snnk.hf.models import load_processor

    processor = load_processor(files["model"], images=True)
    pixels = read_images(find_images(Path(files["test"]))[:1], processor)["pixel_values"]
    return {"pixel_values": pixels.expand(images, *pixels.shape[1:])}


def left(results: Results) -> list[str]:
    """The parts that the rows lack: of their own configuration, then of the paper's."""
    tasks = [task for task in FULL if not any(r["task"] == task for r in results)]
    return [*gaps(results), *([", ".join(tasks)] if tasks else []), *others(results, "vit-base")]
