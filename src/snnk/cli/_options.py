"""Options and arguments that several commands share, and the headings of `snnk --help`."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

START, COMPRESS, FINETUNE, FIT, PREDICT, MEASURE = GROUPS = (
    "Get started",
    "Compress a transformer",
    "Fine-tune a transformer",
    "Fit a table",
    "Predict with a fine-tuned transformer or a fitted table",
    "Measure and reproduce",
)
# Words that the shell completes. They are copies, as the tables in which they are defined would load torch.
WORDS = {
    "activation": ("sin", "cos", "relu", "leaky_relu", "gelu", "gelu_tanh", "tanh", "sigmoid", "silu", "softplus"),
    "block_dtype": ("float32", "float64"),
    "blocks": ("all", "ffn", "attention"),
    "features of blocks": ("atoms", "random-relu", "random-fourier"),
    "features of tables": ("learned", "learned-deep", "random-fourier", "random-relu"),
    "form": ("openvino-int8", "onnx-int8", "openvino", "onnx", "onnx-int8-static"),
    "task": ("auto", "regression", "classification"),
}

FILES = ".csv, .tsv, .jsonl (each also as .gz), .parquet, .arrow"  # the formats of snnk.hf.data


def complete(*words: str) -> Callable[[str], list[str]]:
    """Completion of an option that takes one of some words.

    Example:
        >>> complete("onnx", "openvino")("op")
        ['openvino']
    """
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


Model = Annotated[str, typer.Argument(help="Folder of a Hugging Face model, or its name on the hub.")]
Table = Annotated[
    Path, typer.Argument(help="Parquet, CSV, TSV (also as .gz) or Arrow file, or a folder of such files.")
]
NewFolder = Annotated[Path, typer.Option("--out", help="New folder for the model and its report.")]
Results = Annotated[Path, typer.Option("--out", help="Folder for the rows (JSON) and the picture (PNG).")]
Calibration = Annotated[
    Path | None,
    typer.Option(
        help=f"Unlabelled inputs: lines of text, {FILES}, or a folder of images. "
        "Default: general English text; texts of the kind that the model will read give better results."
    ),
]
Text = Annotated[str | None, typer.Option(help="Column of the texts. Default: the first column of strings.")]
TextPair = Annotated[str | None, typer.Option(help="Column of second texts, for pairs.")]
Blocks = Annotated[
    str,
    typer.Option(help="all, ffn (feed-forward blocks alone), or attention.", autocompletion=complete(*WORDS["blocks"])),
]
ShowTexts = Annotated[
    bool,
    typer.Option("--show-texts/--hide-texts", help="Whether the report shows the held-out texts that lost most."),
]
Task = Annotated[
    str,
    typer.Option(help="auto, regression or classification.", autocompletion=complete(*WORDS["task"])),
]
Base = Annotated[
    str | None,
    typer.Option(
        help="Base model of an adapter of snnk finetune, if it is not where it was: a folder, or a name on the hub."
    ),
]
MaxLoss = Annotated[
    float,
    typer.Option(
        help="Write nothing if the export, or the merge of an SNNK adapter, loses more than this against the same "
        "model in PyTorch, on held-out inputs (what the compression loses is in the report): 1 - mean cosine for "
        "vectors, 1 - part of equal predictions for classes, 1 - Spearman correlation for "
        "scores, log of the ratio of perplexities for decoders."
    ),
]
MaxLength = Annotated[int, typer.Option(help="Most tokens per input; the model's own limit applies too.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.", min=0, max=2**31)]


def batch(tokens: str) -> tuple[int, int]:
    """A value of --tokens: the number of inputs, and of tokens per text.

    Example:
        >>> batch("8x128")
        (8, 128)
    """
    if not (sizes := re.fullmatch(r"(\d{1,9})x(\d{1,9})", tokens)):
        raise ValueError(f"--tokens must be the number of inputs and of tokens per text, such as 1x32; got {tokens!r}")
    return int(sizes[1]), int(sizes[2])


def steps(recover: str) -> int | str:
    """The value of --recover.

    Example:
        >>> steps("auto"), steps("300")
        ('auto', 300)
    """
    if recover != "auto" and not recover.isdecimal():
        raise ValueError(f"--recover must be a number of steps, or auto; got {recover!r}")
    return recover if recover == "auto" else int(recover)


def require(*packages: str, extra: str) -> None:
    """Raise an error that names the extra to install if one of the packages is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise ImportError(f"this command needs {names}; install it with: pip install 'snnk[cli,{extra}]'")
