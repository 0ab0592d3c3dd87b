"""CIFAR (section 4.2.2, the appendix's table of vision models): adapters, pooler and bundled head on a frozen ViT.

The paper's hyperparameters are batches of 64, ReLU adapters with 16 features (32 for ImageNet), gradients clipped to
norm 1, and inputs of the pooler divided by d^(1/4). Ours are a part of the images, and classifiers that start from
their closed form. All methods are trained until the score on validation rows has stopped rising, with a learning rate
that these rows choose. The paper's baseline for poolers is ViT's own pooler with the classifier; here it is a linear
probe of the token. The files of DINOv2 have no pooler, so that ours starts at random.

The model's processor resizes the images. "dinov2-small-98px" is DINOv2-small with a processor that makes them 98 pixels
wide, 7 x 7 patches, which takes a fifth of the time of 224. If --data-dir is the folder of CIFAR-100, or
uoft-cs/cifar100, it replaces CIFAR-10. --data-dir may also be a folder with train and test (or val), each with one
subfolder per class, as ImageNet has. Its name is then the name of the task. Only cifar10 and cifar100 are compared with
the paper, which prints no figure for ImageNet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snnk.experiments.lab import tiny
from snnk.experiments.lab.data import NOWHERE, Source, image_task, is_quick
from snnk.experiments.lab.protocol import Cell, Protocol, chosen, missing, run_cells
from snnk.experiments.lab.records import Results, Row, claim
from snnk.experiments.lab.tuning import CUT, bars, deviation, facts, have_ended, orders, others, score_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "table: vision models; figure: ViT poolers"
NEEDS = "CIFAR-10, CIFAR-100 or a folder of images; ViT-base, DINOv2 or another"
TIME = "minutes on a GPU, hours on a CPU; --quick 10 s"
WHY_NOT = """The rows are of DINOv2-small on 2,000 images of 98 pixels, and of heads alone: adapters have none. The
files of DINOv2 have no pooler, so that ours are random cosine features of the token. No training of the SNNK pooler was
better on validation rows than its start, the closed form of the classifier on these features. The linear probe reads
the token itself."""
TASKS = ("cifar10", "cifar100")
PAPER = {  # percent, with ViT-base and all images
    "snnk-relu": dict(zip(TASKS, (98.2, 91.1), strict=True)),
    "bundled": dict(zip(TASKS, (95.8, 82.73), strict=True)),
    "houlsby": dict(zip(TASKS, (99.1, 91.2), strict=True)),
    "lora": dict(zip(TASKS, (98.7, 90.6), strict=True)),
}
PAIRS = tuple(("snnk-relu", name, name) for name in ("houlsby", "lora", "bundled"))
NEAR = 1.0  # points that "matches" and "closely matching" allow
HEADS = {  # the paper's statement about the baseline, and the number of points by which ours may be below it
    "cifar10": {
        "snnk-pooler": ("matches the baseline", NEAR),
        "bundled": ("95.8, closely matching the baseline", NEAR),
    },
    "cifar100": {
        "snnk-pooler": ("outperforms the baseline", 0.0),
        "bundled": ("82.73, closely matching the baseline", NEAR),
    },
}


@dataclass(frozen=True)
class Config(Protocol):
    """The paper's sizes, where it gives them."""

    batch_size: int = 64
    schedule: str | None = None
    dropout: bool | None = None
    train_rows: int = 2000
    test_rows: int = 1000
    pooling: str = "model"
    methods: tuple[str, ...] = ("linear-probe", "snnk-pooler", "bundled", "snnk-relu", "houlsby", "lora")
    pooler_features: int = 512  # ours; the paper gives no number
    bundled_features: int = 1024
    adapter_features: int = 16
    imagenet_features: int = 32  # of adapters, if the name of the task starts with imagenet
    bottleneck: int = 48
    rank: int = 8

    def features(self, method: str, task: str) -> int | None:
        """The size of a method: features, width or rank; None for methods without one."""
        sizes = {"snnk-pooler": self.pooler_features, "bundled": self.bundled_features, "lora": self.rank}
        adapters = self.imagenet_features if _is_imagenet(task) else self.adapter_features
        sizes |= dict.fromkeys(("snnk-relu", "snnk-cos"), adapters)
        return {**sizes, "houlsby": self.bottleneck}.get(method)


def _is_imagenet(task: str) -> bool:
    return task.lower().startswith("imagenet")


QUICK = Config(
    methods=("linear-probe", "snnk-pooler", "bundled", "snnk-relu"),
    pooler_features=16,
    bundled_features=32,
    adapter_features=4,
    rates=(1e-3,),
    epochs=1,
    seeds=1,
)


def cells(config: Config, task: str) -> list[Cell]:
    return [(task, method, config.features(method, task)) for method in config.methods]


def total(config: Config) -> int:
    """The largest number of rows that `run` yields."""
    return config.most(cells(config, ""))


def run(config: Config, results: Results, source: Source = NOWHERE) -> Iterator[Row]:
    """Rows per method, learning rate and seed."""
    found = cells(config, image_task(source))
    with tiny.images(config, QUICK, source) as files:
        yield from run_cells(found, config, results, files, here=is_quick(config, QUICK))


def plot(results: Results) -> Figure:
    """Our accuracy per method, and the paper's."""
    from matplotlib.figure import Figure

    table = chosen(results, results.config["seed"])
    tasks = list(dict.fromkeys(r["task"] for r in table))
    size = (6 * len(tasks), 1.5 + 0.4 * len({r["method"] for r in table}))
    figure = Figure(figsize=size, layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        bars(axes, table, task, PAPER)
    return figure


def left(results: Results) -> list[str]:
    """The parts that the rows lack: of their own configuration, then of the paper's."""
    known = Config.of(results.config)
    done = dict.fromkeys(r["task"] for r in results)
    found = [line for task in done for line in missing(cells(known, task), known, results)]
    tasks = [task for task in TASKS if task not in done]
    tasks += [] if any(_is_imagenet(task) for task in done) else ["ImageNet"]
    found += [", ".join(tasks)] if tasks else []
    return [*found, *others(results, "vit-base"), "poolers from random against pretrained weights: glue has them"]


def claims(results: Results) -> list[Row]:
    """The order of pairs of methods, and the paper's statements about heads and their baseline."""
    rows, count = chosen(results, results.config["seed"]), results.config["test_rows"]
    table = orders(rows, PAIRS, PAPER, dict.fromkeys(TASKS, count))
    for task, heads in HEADS.items():
        for method, (text, below) in heads.items():
            names = (method, "linear-probe")
            own = {name: [r for r in rows if (r["task"], r["method"]) == (task, name)] for name in names}
            if not all(own.values()):
                continue
            score, probe = (score_of(rows, task, name) for name in names)
            if score is None or probe is None:
                table.append(claim(f"{task}: {method} {text}", "diverged", False))
                continue
            noise = deviation("accuracy", score, probe, count)
            tie, ended = " (a tie)" * (abs(score - probe) <= noise), all(map(have_ended, own.values()))
            near = score - probe >= -max(below, noise) if below else score - probe > noise
            table.append(
                claim(
                    f"{task}: {method} {text}",
                    f"{score:.2f}{facts(own[method])}, linear probe {probe:.2f}{facts(own['linear-probe'])}{tie}; "
                    f"{own[method][0]['model']}{CUT * (not ended)}",
                    near if ended else None,
                    f"{max(below, noise):.1f} points",
                )
            )
    return table
