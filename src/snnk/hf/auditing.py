"""`snnk.hf.audit`: what a model, in memory or in a folder, really stores and costs.

A size is easily wrong: the paper's table of bundled transformers counts k replaced layers as one shared object. Each
figure here is therefore measured: bytes from the headers of the files, every tensor once, with its other names beside
it; multiply-adds by running the model on the meta device; latency of two models in turns.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from snnk import _checks, _io
from snnk._text import printable
from snnk.hf.cost import (
    by_storage,
    count_forward,
    counting_mode,
    outside_state_dict,
    stored,
    tied_names,
)
from snnk.hf.finding import find_blocks
from snnk.hf.folders import check_folder, find_folder, find_transformer
from snnk.hf.model_blocks import FFN, Attention, ModelBlock
from snnk.hf.models import class_of, example_inputs, load_model, read_config, refuse_sizes
from snnk.hf.quantizer import SNNKQuantizer
from snnk.hf.replace import METHOD, SNNKQuantizationConfig
from snnk.hf.serve.latency import clock_of, measure, run_torch

UNITS = {"input_ids": "token", "pixel_values": "image", "input_features": "sound"}  # by the name of the first input
FIGURES = {  # attributes of Audit that are compared with those of the original
    "stored_bytes": "stored bytes",
    "parameters_unique": "parameters, each stored once",
    "parameters_stated": "parameters, under every name",
    "multiply_adds_one": "multiply-adds, one {0.unit}",
    "multiply_adds": "multiply-adds, {0.batch}",
    "seconds": "seconds, {0.batch}",
}


@dataclass(frozen=True)
class Block:
    """One block: its neurons or features, or the dimensions of queries and keys and of values in a head of attention.

    `multiply_adds` are those of its linear layers per token.
    """

    name: str
    kind: str
    features: int | tuple[int, int]
    parameters: int
    multiply_adds: int

    @property
    def size(self) -> str:
        return f"{self.features:,}" if isinstance(self.features, int) else " and ".join(map(str, self.features))


@dataclass(frozen=True)
class Audit:
    """The result of `audit`: `str()` gives a table, `to_dict` plain values for JSON.

    `parameters_stated` counts the numbers under every name of the state dict, saved buffers included.
    `parameters_unique` counts stored numbers: a tensor with two names counts once.
    """

    source: str
    model: str
    stored_bytes: int
    dtypes: dict[str, int]  # bytes per dtype
    parameters_stated: int
    parameters_unique: int
    tied: tuple[tuple[str, ...], ...]  # each a group of names of one module or one tensor
    buffers_outside: dict[str, int]  # bytes of the tensors that are not in the state dict
    unit: str = "token"
    batch: str = ""
    multiply_adds_one: int | None = None
    multiply_adds: int | None = None
    blocks: tuple[Block, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    timing: str = ""
    original: Audit | None = field(default=None, repr=False)

    @property
    def ratios(self) -> dict[str, float]:
        """The figures divided by those of the original; empty without an original."""
        pairs = {name: (getattr(self, name), getattr(self.original, name, None)) for name in FIGURES}
        return {name: ours / theirs for name, (ours, theirs) in pairs.items() if ours is not None and theirs}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the ratios."""
        return {**asdict(self), "ratios": self.ratios}

    def __str__(self) -> str:
        columns = [self] if self.original is None else [self, self.original]
        heads = "".join(f"{head:>19}" for head in ("this", "original", "this/original")[: 2 * len(columns) - 1])
        lines = [f"{self.model} in {printable(self.source)}", " " * 38 + heads]
        for name, what in FIGURES.items():
            values = [getattr(column, name) for column in columns]
            if name != "seconds" or self.seconds is not None:
                cells = [
                    f"{'-' if v is None else f'{v:.4f}' if isinstance(v, float) else f'{v:,}':>19}" for v in values
                ]
                ratio = f"{self.ratios[name]:>19.3f}" if name in self.ratios else ""
                lines.append(f"{what.format(self):<38}{''.join(cells)}{ratio}")
        lines += [f"  {self.timing}"] if self.timing else []
        lines.append("dtypes: " + ", ".join(f"{dtype} {size:,} bytes" for dtype, size in self.dtypes.items()))
        lines.append("tied: " + ("; ".join(" = ".join(names) for names in self.tied) or "nothing"))
        outside = ", ".join(f"{name} {size:,} bytes" for name, size in self.buffers_outside.items())
        lines.append(f"outside the state dict: {outside or 'nothing'}")
        width = max((len(block.name) for block in self.blocks), default=0) + 2
        if self.blocks:
            lines.append(f"{'block':<{width}}{'kind':<12}{'features':>11}{'parameters':>13}{'multiply-adds':>15}")
        for b in self.blocks:
            lines.append(f"{b.name:<{width}}{b.kind:<12}{b.size:>11}{b.parameters:>13,}{b.multiply_adds:>15,}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def audit(
    model: str | os.PathLike[str] | PreTrainedModel,
    original: str | os.PathLike[str] | PreTrainedModel | None = None,
    *,
    latency: bool = False,
    tokens: tuple[int, int] = (8, 128),
    rounds: int = 7,
) -> Audit:
    """Measure the size, tied tensors, dtypes, multiply-adds, blocks and latency of a model.

    Args:
        model: folder of a Hugging Face model, also of sentence-transformers, its name on the hub, or a transformers
            model in memory. The weights in a folder are read for `latency` only.
        original: a model to compare with, of the same forms; its blocks and outputs must have the same sizes.
        latency: also measure the time of a batch, with the threads of torch, the two models taking turns.
        tokens: batch size and length of the texts, up to the model's limit; for vision models the first number is that
            of the images.
        rounds: number of measurements, whose median is the latency.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> found = audit(BertForMaskedLM(config), tokens=(2, 5))
        >>> found.tied[0], found.blocks[1].multiply_adds == 2 * 8 * 3072
        (('bert.embeddings.word_embeddings.weight', 'cls.predictions.decoder.weight'), True)
    """
    batch, length = tokens
    tokens = _checks.positive_int(batch, "batch of tokens"), _checks.positive_int(length, "length of tokens")
    _checks.positive_int(rounds, "rounds")
    sources = [model] if original is None else [model, original]
    opened = [_open(model)]
    opened += [_open(source, like=opened[0][0]) for source in sources[1:]]
    reports = []
    shapes = []
    for source, (network, files) in zip(sources, opened, strict=True):
        report, output = _describe(network, files, tokens)
        reports.append(replace(report, source="memory" if isinstance(source, nn.Module) else str(source)))
        shapes.append((output, [(b.out_features,) for b in _blocks(network)[0]]))
    if any(a and b and a != b for a, b in zip(shapes[0], shapes[-1], strict=True)):
        sizes = [f"outputs {output}, {len(blocks)} blocks {blocks[:1]}" for output, blocks in shapes]
        raise ValueError(f"the original has {sizes[1]}, the model {sizes[0]}; give an original of the same sizes")
    if latency:
        models = [_open(source, like=opened[0][0], weights=True)[0] for source in sources]
        if any(tensor.is_meta for network in models for tensor in network.parameters()):
            raise ValueError("a model on the meta device has no weights to measure latency with; load it first")
        timing = f"median of {rounds} rounds, in turns, on {torch.get_num_threads()} thread(s)"
        seconds = _latency(models, tokens, rounds)
        reports = [replace(r, seconds=s, timing=timing) for r, s in zip(reports, seconds, strict=True)]
    return replace(reports[0], original=reports[1]) if len(reports) > 1 else reports[0]


def _open(
    source: Any, like: PreTrainedModel | None = None, weights: bool = False
) -> tuple[PreTrainedModel, list[Path]]:
    """A model and its files; without `weights`, the model of a folder is on the meta device.

    If `like` is a model of the same type, its class is used, so that both have the same head.
    """
    if isinstance(source, PreTrainedModel):
        return source, []
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"expected a folder or a transformers PreTrainedModel; got {type(source).__name__}")
    folder = find_folder(str(source))
    folder /= find_transformer(folder)
    files, config = check_folder(folder), read_config(folder)
    saved = class_of(config)
    kind = type(like) if like is not None and like.config.model_type == config.model_type else saved
    if kind is None:
        name = next(iter(config.architectures or []), "none")
        raise ValueError(f"config.json in {folder} names the class {name!r}, which transformers does not have")
    if weights:
        return load_model(folder, kind, new_head=kind is not saved).model, files
    try:
        with torch.device("meta"):
            model = kind(config)
    except Exception as error:  # the file is the user's: anything may be wrong
        raise ValueError(f"{folder} cannot be loaded as {kind.__name__}: {error}") from error
    refuse_sizes(model, files)
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == METHOD:
        try:
            quantizer = SNNKQuantizer(SNNKQuantizationConfig(**quantization))
            quantizer.preprocess_model(model, checkpoint_files=[str(file) for file in files])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{folder / 'config.json'} does not describe a compressed model: {error}") from error
    return model, files


def _describe(model: PreTrainedModel, files: list[Path], tokens: tuple[int, int]) -> tuple[Audit, tuple[int, ...]]:
    """A report without source and latency, and the shape of the first output, () if the model could not be run."""
    notes, unique = [], stored(model)
    shape: tuple[int, ...] = ()
    figures: dict[str, Any] = {}
    parts = [(str(t.dtype).removeprefix("torch."), t.numel(), t.nbytes) for t in unique.values()]
    if files:
        held, parts = sum(numel for _, numel, _ in parts), [part for file in files for part in _header(file)]
        if held != sum(numel for _, numel, _ in parts):
            notes.append(f"the files have {sum(p[1] for p in parts):,} numbers, a {type(model).__name__} {held:,}")
    sizes: Counter[str] = Counter()
    for dtype, _, size in parts:
        sizes[dtype] += size
    try:
        one, many = (example_inputs(model, size) for size in ((1, 1), tokens))
        unit = UNITS[next(iter(many))]
        batch = " x ".join(map(str, next(iter(many.values())).shape)) + f" {unit}s"
        figures = {"unit": unit, "batch": batch, "multiply_adds_one": count_forward(model, one)[0]}
        figures["multiply_adds"], shape = count_forward(model, many)
    except Exception as error:  # the model's code may raise anything, and the rest of the report is still right
        notes.append(f"multiply-adds are not counted: {type(error).__name__}: {error}")
    blocks, reason = _blocks(model)
    report = Audit(
        source="",
        model=type(model).__name__,
        stored_bytes=sum(sizes.values()),
        dtypes=dict(sizes),
        parameters_stated=sum(t.numel() * len(names) for names, t in by_storage(model)),
        parameters_unique=sum(numel for _, numel, _ in parts),
        tied=tied_names(model),
        buffers_outside=outside_state_dict(model),
        blocks=tuple(Block(b.name, b.kind, _features(b), b.num_parameters, b.multiply_adds) for b in blocks),
        notes=(*notes, *([f"no table of blocks: {reason}"] if reason else [])),
        **figures,
    )
    return report, shape


def _header(file: Path) -> list[tuple[str, int, int]]:
    """(dtype, numbers, bytes) of each tensor in a safetensors file, none of which is read."""
    with _io.open_tensors(file) as opened:
        header = _io.tensor_header(opened).values()
    sizes = [(dtype, torch.Size(shape).numel(), re.search(r"\d+", dtype)) for dtype, shape in header]
    return [
        (dtype, numel, numel * int(bits[0]) // 8 if bits else numel) for dtype, numel, bits in sizes
    ]  # BOOL: 1 byte


def _latency(models: list[PreTrainedModel], tokens: tuple[int, int], rounds: int) -> list[float]:
    """Seconds per batch of each model, the original last."""
    with ExitStack() as modes:
        for model in models:
            modes.enter_context(counting_mode(model))
        runs = {str(i): run_torch(model, example_inputs(model, tokens)) for i, model in enumerate(models[::-1])}
        found = measure(runs, "x".join(map(str, tokens)), clock=clock_of(models[0]), least=rounds, most=rounds)
        return list(found.seconds.values())[::-1]


def _blocks(model: PreTrainedModel) -> tuple[list[ModelBlock], str]:
    try:
        return find_blocks(model), ""
    except ValueError as error:
        return [], str(error)


def _features(block: ModelBlock) -> int | tuple[int, int]:
    if isinstance(block, FFN):
        return block.width
    heads = [layer for layer in block.linears[:-1] if layer is not None]  # one layer may compute queries and values
    size = block.head_size if isinstance(block, Attention) else 0
    queries, values = (getattr(layer, "ranks", (size,)) for layer in (heads[0], heads[-1]))
    return queries[0], values[-1]
