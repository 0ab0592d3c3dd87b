"""Open a model that is to be compressed, and read its inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from snnk.hf.calibration import HELD_OUT, Calibration, load_calibration
from snnk.hf.classify.means import refuse_neurons
from snnk.hf.compression.causal import is_causal
from snnk.hf.compression.outputs import MEAN, POOLINGS, Outputs, probe
from snnk.hf.compression.settings import TIMED, export_settings
from snnk.hf.finding import choose_layers, find_ffns
from snnk.hf.folders import find_folder, find_transformer, is_cross_encoder, makes_vectors, pooling_of, some
from snnk.hf.models import (
    headless_class,
    load_model,
    load_processor,
    read_config,
    reads_pairs,
    set_padding,
    token_limit,
)
from snnk.hf.record import unreached
from snnk.hf.serve import plain, quantizing
from snnk.hf.serve.forms import write_form
from snnk.hf.widening import Gathered, gather

REFINE = 120
BATCH, CAUSAL_BATCH = 32, 8  # texts per batch, which is one step of the distillation
MORE_TOKENS = 450_000  # for the distillation, beside those of the fit


@dataclass(frozen=True)
class Source:
    """A model in memory, with the folder that it comes from.

    Args:
        name: of the model, for reports.
        folder: its files.
        inner: place of the transformer in the folder.
        sentences: whether sentence-transformers loads the folder.
        network: the model.
        processor: its tokenizer or image processor.
    """

    name: str
    folder: Path
    inner: PurePosixPath
    sentences: bool
    network: PreTrainedModel
    processor: Any

    @property
    def pairs(self) -> bool:
        """Whether the model reads pairs of texts."""
        network = self.network
        return is_classifier(network) and (reads_pairs(network.config) or is_cross_encoder(self.folder))


@dataclass(frozen=True)
class Opened(Source):
    """The same with what was asked for: options of `compress`, with those that follow from the model."""

    settings: dict[str, Any]


@dataclass(frozen=True)
class Prepared(Opened):
    """The same with its inputs, whatever the budget: what several compressions of one model share.

    Args:
        inputs: those to fit to, to distil with, and to measure on.
        outputs: of the first batch.
        note: on the pooling.
        layers, away: numbers of the chosen layers that run for the inputs, and how many do not.
    """

    inputs: Gathered
    outputs: Outputs
    note: str
    layers: list[int]
    away: int

    @property
    def compared(self) -> str:
        """The outputs that are compared, for reports."""
        return self.outputs.compared + (self.note if self.outputs.pooled else "")


def open_source(model: str, out: Path, say: Callable[[str], None]) -> Source:
    """Load the model of a folder, compressed or not, or of the hub, for an output in another folder."""
    folder = find_folder(model)
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"the output {out} is inside the model's folder {folder}; name a folder outside")
    inner, sentences = find_transformer(folder), (folder / "modules.json").is_file()
    network, processor = load(folder / inner, say, sentences=sentences, headless=makes_vectors(folder))
    if is_classifier(network) and hasattr(processor, "pad_token_id"):
        set_padding(network, processor)
    name = model if not Path(model).exists() else folder.resolve().name
    return Source(name, folder, inner, sentences, network, processor)


def open_model(model: str, out: Path, settings: dict[str, Any], say: Callable[[str], None]) -> Opened:
    """Load a model that is to be compressed into the folder `out`."""
    source = open_source(model, out, say)
    refuse_neurons(source.network)
    settings = _for_plain(source.network, settings, say)
    if settings["refine"] is None:
        settings = {**settings, "refine": 0 if is_causal(source.network) and settings["recover"] else REFINE}
    return Opened(**_fields(source), settings=settings)


def read_given(
    source: Source, calibration: str | Path | None, settings: Mapping[str, Any], *, more_tokens: int = 0
) -> tuple[Calibration, int]:
    """Read and tokenize inputs for a model; returns them with the most tokens that one of them may have."""
    network = source.network
    length = min(settings["max_length"], token_limit(network.config) or settings["max_length"])
    given = load_calibration(
        calibration,
        source.processor,
        text=settings["text"],
        text_pair=settings["text_pair"],
        pairs=calibration is None and source.pairs,
        max_length=length,
        batch_size=CAUSAL_BATCH if is_causal(network) else BATCH,
        held_out=HELD_OUT,
        more_tokens=more_tokens,
        seed=settings["seed"],
    )
    return given, length


def _fields(source: Source) -> dict[str, Any]:
    return {field.name: getattr(source, field.name) for field in fields(source)}


def _for_plain(model: PreTrainedModel, settings: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The settings with which a plan fits the configuration of the model's family."""
    if settings["format"] != "plain" or settings["plan"] is not None:
        return settings
    blocks = settings["blocks"]
    if blocks == "all" and not plain.has_head_sizes(model):
        blocks = "ffn"
        kind = model.config.model_type
        say(f"note: attention stays as it is, as the configuration of {kind} models cannot have smaller heads")
    return {**settings, "joint": False, "blocks": blocks}


def load(
    folder: Path, say: Callable[[str], None], *, sentences: bool = False, headless: bool = False
) -> tuple[PreTrainedModel, Any]:
    """The model, with the head that its configuration names, and its tokenizer or image processor.

    A tensor that the files lack is refused, as it would be drawn at random, compressed and saved as if it were trained.
    The exception is the pooler of a folder of sentence-transformers (`sentences`), which is saved as zeros. With
    `headless`, the model is the one that sentence-transformers makes vectors with, without a head.
    """
    loaded = load_model(folder, headless_class(read_config(folder)) if headless else None, zero_pooler=sentences)
    model = loaded.model
    if loaded.unexpected:
        say(f"note: a {type(model).__name__} does without {some(sorted(loaded.unexpected))}, which the files have")
    if loaded.missing:
        say(f"note: the files have no {some(sorted(loaded.missing))}; sentence vectors do without, these are zeros")
    images = model.main_input_name == "pixel_values"
    processor = load_processor(folder, images, vocab_size=getattr(model.config, "vocab_size", None) or 0)
    return model, processor


def prepare(opened: Opened, calibration: Path | None, say: Callable[[str], None]) -> Prepared:
    """Read and tokenize the inputs, and run the model on the first batch."""
    network, settings = opened.network, opened.settings
    if calibration is None and is_classifier(network) and not opened.pairs:
        say("note: if the model classifies pairs of texts, give a file of pairs and the names of its two columns")
    given, length = read_given(opened, calibration, settings, more_tokens=MORE_TOKENS if settings["recover"] else 0)
    causal = is_causal(network)
    wide = given.kind != "images" and not causal if settings["widen"] is None else settings["widen"]
    settings = {**settings, "widen": wide}
    words = getattr(network.config.get_text_config(), "vocab_size", None)
    inputs = gather(given, opened.processor, max_length=length, wide=wide, vocab_size=words, seed=settings["seed"])
    say(f"calibration: {inputs}")
    if type(network).__name__.endswith("ForMultipleChoice"):  # one choice per text, whose score is compared
        parts: tuple[list[Any], ...] = inputs.batches, inputs.lessons, inputs.more, *inputs.held_out
        for part in parts:
            part[:] = [batch and {name: x[:, None] for name, x in batch.items()} for batch in part]
    pooling, note = pooling_with_note(opened.folder)
    outputs = probe(network, inputs.batches[0], pooling)  # before any work
    if settings["to"] is not None:
        chosen = export_settings(settings)
        if chosen["int8"] is not None:
            quantizing.doubt(chosen["int8"], given.kind, given.items)  # refuses too few inputs
        if all(settings[name] is None for name in TIMED):  # otherwise it is exported for its times
            say("trying to export the original")
            with tempfile.TemporaryDirectory() as place:
                write_form(network, inputs.own[:1], Path(place), chosen["to"])
    layers, away = _reached(network, inputs.batches[0], settings)
    return Prepared(
        **{**_fields(opened), "settings": settings},
        inputs=inputs,
        outputs=outputs,
        note=note,
        layers=layers,
        away=away,
    )


def _reached(network: PreTrainedModel, batch: dict[str, Tensor], settings: dict[str, Any]) -> tuple[list[int], int]:
    """The numbers of the chosen layers that run for a batch, and how many do not; a ValueError if none does."""
    ffns = choose_layers(find_ffns(network), settings["layers"])
    away = {ffn.index for ffn in unreached(ffns, network, batch)}
    if len(away) == len(ffns):
        raise ValueError(f"no layer of {settings['layers']!r} runs for the inputs, {', '.join(batch)}; choose others")
    return [ffn.index for ffn in ffns if ffn.index not in away], len(away)


def is_classifier(model: PreTrainedModel) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")


def pooling_with_note(folder: Path) -> tuple[tuple[str, ...], str]:
    """The pooling of a folder of sentence-transformers; the mean, with a note, if its own is not among ours."""
    named = pooling_of(folder)
    if named and not set(named) <= set(POOLINGS):
        return (MEAN,), f"; sentence-transformers pools by {', '.join(named)} here"
    return named or (MEAN,), ""
