"""The stages of a served model: in PyTorch, as a graph, and in int8, with the loss and the latency of each.

Each graph is run on texts that nothing was fitted to, and compared with the model in PyTorch. `make_graphs` raises an
error if the loss of a stage is above the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from snnk import _checks
from snnk.hf import doubts
from snnk.hf.compression import figures as words
from snnk.hf.compression.agreement import measure
from snnk.hf.compression.timing import described
from snnk.hf.cost import bytes_of, counting_mode
from snnk.hf.models import Batch
from snnk.hf.serve import graphs, latency, quantizing
from snnk.hf.serve.forms import check_form
from snnk.hf.serve.sessions import Session
from snnk.hf.widening import Gathered

MAX_LOSS = 0.05
CHECKED = 4  # batches for the comparison with PyTorch
BATCHES, LENGTH = (1, 32), 32  # inputs and tokens of the batches whose latency is measured
SECONDS = 5.0  # of the measurement of each


def check_settings(*, to: str, max_loss: float) -> dict[str, Any]:
    """The settings of an export, with the form `to` as format and int8; an error for missing packages."""
    _checks.at_least_zero(max_loss, "max_loss")
    format, int8 = check_form(to)
    return {"to": format, "int8": int8, "max_loss": max_loss}


def make_graphs(
    network: PreTrainedModel,
    inputs: Gathered,
    folder: Path,
    settings: Mapping[str, Any],
    *,
    pooling: Sequence[str],
    say: Callable[[str], None],
    original: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Write the graph of a model below `folder`, and return its stages with what each loses, for a report.

    A ValueError if the graph differs from PyTorch, or if a stage loses more than settings["max_loss"].

    Args:
        network: the model. It and `original` are converted to float32, after their sizes are taken.
        inputs: to calibrate with, and to measure on.
        folder: place of the model's configuration.
        settings: "to", "int8", "max_loss" and "show_texts" of `export`.
        pooling: of hidden states, for the measurements.
        say: called with lines for people.
        original: the model that `network` was made from, which the report compares with. Default: `network`.
    """
    to, mode = settings["to"], settings["int8"]
    place = folder / to
    place.mkdir(parents=True)
    warned: list[str] = []
    if mode is not None:
        doubt = quantizing.doubt(mode, inputs.given.kind, inputs.given.items)
        warned += filter(None, (doubt, quantizing.on_others(to)))
    if original is None:  # otherwise the compression has said so
        held = inputs.held_out[0]
        warned += filter(None, [doubts.scarce(held.items, held.kind)])
    for warning in warned:
        say(f"warning: {warning}")
    say(f"exporting to {to}")
    sizes = {id(model): bytes_of(model) for model in (network, original or network)}
    if network.dtype != torch.float32:
        kind = str(network.dtype).removeprefix("torch.")
        warned.append(f"the weights in PyTorch are in {kind}, and sizes are those; all latencies are of float32")
        say(f"note: {warned[-1]}")
    network = network.float()
    original = None if original is None else original.float()
    names = graphs.input_names(network, inputs.own[0])
    path, no_cache = graphs.write_graph(network, inputs.own[0], place, to)
    exact = graphs.open_graph(path, to, exact=True)
    checked = [graphs.alone(inputs.own[0]), *(batch for held in inputs.held_out for batch in held[-CHECKED:])]
    difference = graphs.check_same(network, exact, checked)
    say(f"the graph differs from PyTorch by {difference:.1e} of the largest output")
    runs: dict[str, Callable[[Batch], latency.Run]] = {}

    def compared(model: PreTrainedModel, run: Session | None = None) -> list[dict[str, Any]]:
        options: dict[str, Any] = {"pooling": pooling, "texts": settings["show_texts"], "run": run}
        return [measure(model, network, held, **options) for held in inputs.held_out]

    def torch_stage(name: str, model: PreTrainedModel) -> dict[str, Any]:
        runs[name] = lambda batch: latency.run_torch(model, batch)
        found: dict[str, Any] = {"name": name, "bytes": sizes[id(model)]}
        if original is not None and model is network:
            found |= {"held_out": compared(original)}
            found["loss"] = loss_of(found["held_out"][0]["figures"])
        return found

    def graph_stage(name: str) -> dict[str, Any]:
        run = graphs.open_graph(path, to)
        runs[name] = lambda batch: lambda: run(batch)
        own = compared(network, run)
        sets = own if original is None else compared(original, run)
        found: dict[str, Any] = {"name": name, "bytes": _bytes(place), "held_out": sets}
        found |= {"added_loss": loss_of(own[0]["figures"]), "loss": loss_of(sets[0]["figures"])}
        loss = f"{words.shown(found['added_loss'])} against PyTorch ({loss_in_words(own[0]['figures'])})"
        say(f"{name}: {found['bytes'] / 1e6:.1f} MB, loss {loss}")
        if not found["added_loss"] <= settings["max_loss"]:
            raise ValueError(
                f"{name} loses {loss}, more than max_loss {settings['max_loss']}: nothing was written; "
                f"{_advice(to, mode)}"
            )
        return found

    if original is None:
        stages = [torch_stage("pytorch", network)]
    else:
        stages = [torch_stage("original", original), torch_stage("compressed", network)]
    stages.append(graph_stage(to))
    if mode is not None:
        say(f"quantizing to int8 ({mode})")
        quantizing.quantize_(path, to, mode, list(islice(graphs.each(inputs.own), quantizing.MOST)))
        stages.append(graph_stage(f"{to} int8 {mode}"))
    if original is None and (doubt := doubts.one_class(stages[-1]["held_out"][0]["classes"])) is not None:
        warned.append(doubt)
        say(f"warning: {doubt}")
    say("measuring latency")
    times = _latency(network, original, names, runs)
    for found in times:
        for doubt in found.doubts():
            warned.append(f"latency of {found.inputs}: {doubt}")
            say(f"warning: {warned[-1]}")
    return {
        "to": to,
        "int8": mode,
        "file": f"{to}/{path.name}",
        "inputs": list(exact.inputs),
        "outputs": list(exact.outputs),
        "cache": bool(exact.sizes),
        "no_cache": no_cache,
        "difference": difference,
        "tolerance": graphs.TOLERANCE,
        "stages": stages,
        "latency": [found.to_dict() for found in times],
        "held_out": stages[-1]["held_out"],
        "warnings": warned,
    }


def _latency(
    network: PreTrainedModel,
    original: PreTrainedModel | None,
    names: Sequence[str],
    runs: Mapping[str, Callable[[Batch], latency.Run]],
) -> list[latency.Latency]:
    """Latencies of all stages, in turns, for each of BATCHES."""
    found = []
    with counting_mode(network), counting_mode(original or network):
        for count in BATCHES:
            batch = graphs.example(network, names, (count, LENGTH))
            made = {name: run(batch) for name, run in runs.items()}
            found.append(latency.measure(made, described(batch), seconds=SECONDS))
    return found


def loss_of(figures: Mapping[str, float]) -> float:
    """What a model loses, from figures of agreement; the largest of several outputs.

    Example:
        >>> round(loss_of({"cosine": 0.98, "same nearest": 0.9}), 6)
        0.02
    """
    return max(_losses(figures))[0]


def loss_in_words(figures: Mapping[str, float]) -> str:
    """What `loss_of` is for these figures.

    Example:
        >>> loss_in_words({"cosine": 0.5, "worst cosine": 0.2, "KL divergence": 0.0, "same best": 0.9})
        '1 - part of equal predictions'
    """
    return max(_losses(figures))[1]


def _losses(figures: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """Losses with their names; infinite if an output is not finite."""
    for loss, name in _finite_or_not(figures):
        yield loss if math.isfinite(loss) else math.inf, name


def _finite_or_not(figures: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    for label in dict.fromkeys(key.rpartition(": ")[0] for key in figures):
        own = {key.rpartition(": ")[2]: value for key, value in figures.items() if key.rpartition(": ")[0] == label}
        if "perplexity" in own:
            gain = math.log(own["perplexity"] / own["original perplexity"])
            yield 0.0 if gain < 0 else gain, "log of the ratio of perplexities"
        elif "same best" in own:
            yield 1 - own["same best"], "1 - part of equal predictions"
        elif "Spearman" in own:
            yield 1 - own["Spearman"], "1 - Spearman correlation"
        elif "cosine" in own:
            yield 1 - own["cosine"], "1 - mean cosine"
        else:
            yield own["relative squared error"], "squared error over the mean square"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _advice(to: str, mode: str | None) -> str:
    if mode is None:
        return "give a larger max_loss, or serve the model with PyTorch"
    other = "dynamic int8 (--to onnx-int8), " if to == "onnx" and mode == "static" else ""
    return f"use {other}float32 (--to {to}), more texts like those in use, or a larger max_loss"
