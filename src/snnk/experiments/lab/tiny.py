"""Model and data of the experiments on transformers: from --model and --data-dir, or small generated ones.

--quick generates a BERT and a ViT of two layers with random weights, files in GLUE's format, and images of two colours.
They show that an experiment runs, and nothing about any method.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from snnk.experiments.lab.data import HUB, IMAGES, Source, image_folders, image_task, is_quick

LOG = logging.getLogger("snnk")
BERT = "bert-base-uncased"
VIT = "google/vit-base-patch16-224-in21k"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,  # large enough that features differ between inputs
}
SIDE = 16
ROWS = {"train": 80, "dev": 24}  # with a tenth held out, two rows per feature: enough for GCV instead of folds
WORDS = [f"w{i}" for i in range(40)]
Files = dict[str, str]  # fields of FinetuneConfig


@contextmanager
def glue(config: Any, quick: Any, source: Source, default: str = BERT) -> Iterator[Files]:
    """The values of `model` and `data_dir` for FinetuneConfig.

    The files of all tasks are checked before a model is loaded: in the subfolder `glue` of --data-dir, or in itself.

    Args:
        config: has `tasks`, or means STS-B.
        quick: the experiment's QUICK configuration, for which missing files are generated.
        source: of model and data.
        default: the model without --model.
    """
    _require()
    from snnk.finetune.glue import GLUE_WHERE

    small = is_quick(config, quick)
    with TemporaryDirectory() as name:
        folder = Path(name)
        if source.data_dir is not None:
            tasks = getattr(config, "tasks", ("stsb",))
            data_dir = _glue_folder(source.data_dir, tasks, folder)
        elif small:
            data_dir = make_glue(folder)
        else:
            raise FileNotFoundError(
                f"GLUE is needed: get it from {GLUE_WHERE}, and name the folder of those with --data-dir; or load it "
                "with --data-dir hub"
            )
        model = source.model or (make_bert(folder / "tiny-bert") if small else default)
        _check_model(model)
        yield {"model": model, "data_dir": data_dir}


def _glue_folder(data_dir: str, tasks: Iterable[str], folder: Path) -> str:
    """The folder with the files of all tasks; files from the hub are written into `folder`."""
    from snnk.finetune.glue import GLUE, GLUE_HUB, miscounted

    hub = data_dir in (HUB, GLUE_HUB)
    places = (folder,) if hub else (Path(data_dir, "glue"), Path(data_dir))
    root = next((p for p in places if any((p / row.folder).is_dir() for row in GLUE.values())), places[-1])
    for task in dict.fromkeys(tasks):
        if hub:
            hub_glue(task, folder)
        if (line := miscounted(task, root)) is not None:
            LOG.warning(line)
    return str(root)


def glue_columns(task: str, data_dir: str | Path) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """The columns of a GLUE task's training file and of its dev file, by name."""
    from snnk.finetune.glue import glue_files
    from snnk.hf.data import read_columns

    row, train, dev = glue_files(task, Path(data_dir))
    return read_columns(train, row.columns, spare=True), read_columns(dev, row.columns, spare=True)


def hub_glue(task: str, folder: Path) -> None:
    """Download a task from the hub and write it in the format of GLUE's own files."""
    from snnk.finetune.glue import GLUE, GLUE_HUB
    from snnk.hf.data import hub_columns

    row = GLUE[task]
    (folder / row.folder).mkdir(parents=True, exist_ok=True)
    for part in ("train", row.dev):
        found = hub_columns(f"{GLUE_HUB}:{task}@{part.replace('dev', 'validation')}")
        texts = [name for name in found if name not in ("label", "idx")]
        # scores of STS-B are float32 on the hub, where 3.8 reads as 3.799999952316284
        cells = {row.label: [f"{v:.3f}" if isinstance(v, float) else str(v) for v in found["label"]]}
        for name, column in zip(filter(None, (row.text, row.pair)), texts, strict=True):
            cells[name] = [" ".join(text.split()) for text in found[column]]  # texts without tabs and line breaks
        names = row.columns or tuple(cells)
        lines = zip(*(cells.get(name, [""] * len(found["label"])) for name in names), strict=True)
        text = "".join("\t".join(line) + "\n" for line in ([] if row.columns else [names]) + list(lines))
        (folder / row.folder / f"{part}.tsv").write_text(text, encoding="utf-8")


@contextmanager
def images(config: Any, quick: Any, source: Source, default: str = VIT) -> Iterator[Files]:
    """The values of `model`, `train` and `test` for FinetuneConfig: folders of --data-dir, or images of CIFAR.

    Args:
        config: has `train_rows` and `test_rows`, the numbers of CIFAR images to draw, and `seed`.
        quick: the experiment's QUICK configuration.
        source: of model and data.
        default: the model without --model.
    """
    _require()
    small = is_quick(config, quick)
    with TemporaryDirectory() as name:
        folder = Path(name)
        found = image_folders(source)
        if source.data_dir is None and small:
            make_images(folder)
        elif found is None:
            for part, split in IMAGES[image_task(source)](source).items():
                rows = getattr(config, f"{part}_rows")
                chosen = torch.randperm(len(split), generator=torch.Generator().manual_seed(config.seed))[:rows]
                write_images(folder / part, split.x[chosen], split.y[chosen].tolist())
        train, test = found or (folder / "train", folder / "test")
        model = source.model or (make_vit(folder / "tiny-vit") if small else default)
        _check_model(model)
        yield {"model": model, "train": str(train), "test": str(test)}


def _check_model(model: str) -> None:
    """Refuse a folder without a model, or with code in it, before any run."""
    from snnk.hf.folders import find_folder, find_transformer

    if Path(model).exists():  # a model of the hub is checked by the first run, which downloads it
        find_transformer(find_folder(model))


def _require() -> None:
    """Raise an ImportError for a missing package before any run."""
    for name in ("transformers", "accelerate", "peft"):
        try:
            import_module(name)
        except ImportError:
            raise ImportError(f"this experiment needs {name}: pip install 'snnk[experiments]'") from None


def make_bert(folder: Path) -> str:
    """Write a BERT with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    _save(BertModel, BertConfig(vocab_size=len(names), max_position_embeddings=64, **SIZES), folder)
    return str(folder)


def make_vit(folder: Path) -> str:
    """Write a ViT with its image processor."""
    from transformers import ViTConfig, ViTModel

    _save(ViTModel, ViTConfig(image_size=SIDE, patch_size=SIDE // 2, **SIZES), folder)
    facts = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(facts))
    return str(folder)


def _save(kind: Any, config: Any, folder: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)  # transformers draws from the global generator
        kind(config).save_pretrained(folder)


def make_glue(folder: Path) -> str:
    """Write files of CoLA, SST-2, MRPC and STS-B with random words.

    The label of CoLA and SST-2 is whether most words come from the first half of the vocabulary. Those of MRPC and
    STS-B depend on the number of words that two sentences share.
    """
    generator = random.Random(0)
    for task in ("CoLA", "SST-2", "MRPC", "STS-B"):
        (folder / task).mkdir(parents=True)
    for part, rows in ROWS.items():
        lines: dict[str, list[str]] = {
            "CoLA": [],
            "SST-2": ["sentence\tlabel"],
            "MRPC": ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"],
            "STS-B": ["index\tsentence1\tsentence2\tscore"],
        }
        for i in range(rows):
            one, two = (generator.sample(WORDS, generator.randint(4, 8)) for _ in range(2))
            shared = generator.randint(0, 4)
            two[:shared] = one[:shared]
            low = sum(WORDS.index(word) < len(WORDS) // 2 for word in one)
            first, second = " ".join(one), " ".join(two)
            lines["SST-2"].append(f"{first}\t{int(2 * low > len(one))}")
            lines["CoLA"].append(f"made\t{int(2 * low > len(one))}\t\t{first}")
            lines["MRPC"].append(f"{int(shared > 2)}\t{i}\t{i}\t{first}\t{second}")
            lines["STS-B"].append(f"{i}\t{first}\t{second}\t{5 * shared / 4:.3f}")
        for task, found in lines.items():
            (folder / task / f"{part}.tsv").write_text("\n".join(found) + "\n", encoding="utf-8")
    return str(folder)


def make_images(folder: Path) -> None:
    """Write folders train and test with two classes of images: more red, or more blue."""
    generator = torch.Generator().manual_seed(0)
    for part, rows in (("train", ROWS["train"]), ("test", ROWS["dev"])):
        pixels = torch.randint(200, (rows, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
        classes = [i % 2 for i in range(rows)]
        for image, c in zip(pixels, classes, strict=True):
            image[..., 2 * c] += 40
        write_images(folder / part, pixels, classes)


def write_images(folder: Path, pixels: Tensor, classes: list[int]) -> None:
    """Write bytes (n, h, w, 3) as PNG files, with one subfolder per class."""
    from PIL import Image

    for c in sorted(set(classes)):
        (folder / str(c)).mkdir(parents=True)
    for i, (image, c) in enumerate(zip(pixels.numpy(), classes, strict=True)):
        Image.fromarray(image).save(folder / str(c) / f"{i}.png")
