"""`snnk.hf.export`: a folder with a model in, a folder with its graph for ONNX Runtime or OpenVINO and a report out.

Each stage, the exported graph and then its int8 form, is run on texts that nothing was fitted to and compared with the
model in PyTorch. The output folder appears only if the loss of every stage is within the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import PreTrainedModel

from snnk import _checks, _io
from snnk._environment import environment
from snnk.hf.calibration import HELD_OUT, Calibration, load_calibration
from snnk.hf.compression import figures as words
from snnk.hf.compression.agreement import measure
from snnk.hf.compression.causal import is_causal
from snnk.hf.compression.outputs import MEAN, probe
from snnk.hf.compression.pipeline import is_classifier, load, pooling_with_note
from snnk.hf.compression.timing import described
from snnk.hf.cost import counting_mode, stored
from snnk.hf.folders import copy_others, find_folder, find_transformer, is_cross_encoder, makes_vectors
from snnk.hf.models import Batch, quiet, reads_pairs, token_limit
from snnk.hf.serve import graphs, latency, quantizing
from snnk.hf.serve import report as pages
from snnk.hf.serve.graphs import FILES, PACKAGES, Session
from snnk.hf.widening import Gathered, gather

MAX_LOSS = 0.05
BATCH, CAUSAL_BATCH = 32, 8  # texts per batch of the measurements
CHECKED = 4  # batches for the comparison with PyTorch
BATCHES, LENGTH = (1, 32), 32  # inputs and tokens of the batches whose latency is measured
SECONDS = 5.0  # of the measurement of each
OWN = ("plan.json", "report.json", "report.html")  # files of `snnk compress` that do not describe a graph


@dataclass(frozen=True)
class Source:
    """A model in memory, with what an export needs of its folder.

    Args:
        name: for reports.
        folder: its files; those beside the weights are copied.
        inner: place of the transformer in the folder.
        network: the model, on the processor.
        processor: its tokenizer or image processor.
        sentences: whether sentence-transformers loads the folder.
        pairs: whether it reads pairs of texts.
        pooling: of hidden states, by the names of `POOLINGS`.
        note: on the pooling, for the report.
    """

    name: str
    folder: Path
    inner: PurePosixPath
    network: PreTrainedModel
    processor: Any
    sentences: bool
    pairs: bool
    pooling: tuple[str, ...] = (MEAN,)
    note: str = ""


def open_source(model: str, say: Callable[[str], None]) -> Source:
    """Load the model of a folder, compressed or not, or of the hub."""
    folder = find_folder(model)
    inner, sentences = find_transformer(folder), (folder / "modules.json").is_file()
    network, processor = load(folder / inner, say, sentences=sentences, headless=makes_vectors(folder))
    pairs = is_classifier(network) and (reads_pairs(network.config) or is_cross_encoder(folder))
    name = model if not Path(model).exists() else folder.resolve().name
    return Source(name, folder, inner, network, processor, sentences, pairs, *pooling_with_note(folder))


@quiet()
def export(
    model: str | Path,
    calibration: str | Path | None = None,
    *,
    to: str,
    out: str | Path,
    int8: str | None = None,
    max_loss: float = MAX_LOSS,
    column: str | Sequence[str] | None = None,
    max_length: int = 128,
    texts: bool = True,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Export a model to ONNX or OpenVINO into a new folder, with a report; what `snnk export` does.

    Args:
        model: folder of a Hugging Face model, also of sentence-transformers or compressed by snnk, or its name on the
            hub.
        calibration: unlabelled inputs like those of `snnk.hf.compress`, on which the loss is measured and with which
            int8 is calibrated. Default: the general English text of snnk.
        to: "onnx" or "openvino".
        out: new folder for the graph, the tokenizer, all other files of the model's folder, and report.json.
        int8: "dynamic" (ONNX only: scales of activations are computed for each batch) or "static" (fixed scales, from
            the calibration). Default: float32.
        max_loss: nothing is written if a stage loses more on held-out inputs: 1 - mean cosine for vectors, 1 - part of
            equal predictions for classes, 1 - Spearman correlation for scores, log of the ratio of perplexities for
            decoders.
        column: of the calibration file, as in `snnk.hf.compress`.
        max_length: tokens per text or pair of the calibration at most; the graph takes any length.
        texts: show the held-out texts that lost most in report.json and report.html.
        seed: of the sample of inputs.
        say: called with lines for people.

    Returns:
        The contents of report.json.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
        >>> folder, words = Path(tempfile.mkdtemp()), {"[UNK]": 0, "one": 1, "two": 2}
        >>> tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")  # doctest: +ELLIPSIS
        (...)
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> BertModel(BertConfig(vocab_size=3, **sizes)).save_pretrained(folder / "model")
        >>> _ = (folder / "texts.txt").write_text("one two one two\\n" * 40)
        >>> report = export(folder / "model", folder / "texts.txt", to="onnx", out=folder / "served")
        >>> report["file"], report["outputs"], report["stages"][1]["name"]
        ('onnx/model.onnx', ['last_hidden_state'], 'onnx')
    """
    settings = check_settings(to=to, int8=int8, max_loss=max_loss) | {
        "column": column,
        "max_length": max_length,
        "texts": texts,
        "seed": seed,
    }
    out = Path(out)
    if calibration is not None and not Path(calibration).exists():
        raise FileNotFoundError(f"no calibration file or folder {calibration}")
    with _io.locked_output(out):
        _io.check_out(out)
        source = open_source(str(model), say)
        if out.resolve().is_relative_to(source.folder.resolve()):
            raise ValueError(f"the output {out} is inside the model's folder {source.folder}; name a folder outside")
        return export_source(source, calibration, out, settings, say)


def check_settings(*, to: str, int8: str | None, max_loss: float) -> dict[str, Any]:
    """The settings of an export; an error for those that contradict each other, and for missing packages."""
    _checks.choose(to, FILES, "format")
    if int8 is not None:
        _checks.choose(int8, quantizing.MODES[to], f"int8 for {to}")
    _checks.at_least_zero(max_loss, "max_loss")
    wanted = [*PACKAGES[to], *(["nncf"] if to == "openvino" and int8 else [])]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"an export to {to} needs {' and '.join(missing)}; install the extra serve: pip install 'snnk[serve]'"
        )
    return {"to": to, "int8": int8, "max_loss": max_loss}


def export_source(
    source: Source,
    calibration: str | Path | None,
    out: Path,
    settings: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Export a model that is in memory. Whoever reads another kind of folder makes a `Source` and calls this."""
    network = source.network
    inputs = _inputs(source, calibration, settings)
    say(f"inputs: {inputs.given}")
    outputs = probe(network, inputs.batches[0], source.pooling)
    with _io.new_folder(out) as temporary:
        card = copy_others(source.folder, source.inner, temporary)
        for name in OWN:
            (temporary / name).unlink(missing_ok=True)
        made = make_graphs(
            network,
            inputs,
            temporary / source.inner,
            settings,
            pooling=source.pooling,
            say=say,
        )
        save_config(network, temporary / source.inner)
        found = {
            "format": pages.FORMAT,
            "base_model": source.name,
            "model_class": type(network).__name__,
            "sentence_transformers": source.sentences,
            **made,
            "file": str(source.inner / made["file"]),
            "compared": outputs.compared + (source.note if outputs.pooled else ""),
            "calibration": {
                "file": inputs.given.source,
                "kind": inputs.given.kind,
                "count": inputs.given.items,
                "column": inputs.given.column,
            },
            "settings": dict(settings),
            "versions": environment(),
        }
        _io.write_json(temporary / "report.json", found)
        (temporary / "README.md").write_text(pages.model_card(found, card), encoding="utf-8")
        (temporary / "report.html").write_text(pages.html(found), encoding="utf-8")
    return found


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
        network: the model, which is converted to float32.
        inputs: to calibrate with, and to measure on.
        folder: place of the model's configuration.
        settings: "to", "int8", "max_loss" and "texts" of `export`.
        pooling: of hidden states, for the measurements.
        say: called with lines for people.
        original: the model that `network` was made from, which the report compares with. Default: `network`.
    """
    to, mode = settings["to"], settings["int8"]
    place = folder / to
    place.mkdir(parents=True)
    path = place / FILES[to]
    warned: list[str] = []
    if mode is not None:
        doubt = quantizing.doubt(mode, inputs.given.kind, inputs.given.items)
        if doubt is not None:
            warned.append(doubt)
            say(f"warning: {doubt}")
    say(f"exporting to {to}")
    network = network.float()
    batches = inputs.batches
    names = graphs.input_names(network, batches[0])
    graph = place / FILES["onnx"]
    graphs.write_onnx(network, batches[0], graph)
    if to == "openvino":
        graphs.write_openvino(graph, path)
        graph.unlink()
        (place / f"{graph.name}.data").unlink(missing_ok=True)
    exact = graphs.open_graph(path, to, exact=True)
    checked = [graphs.alone(batches[0]), *(batch for held in inputs.held_out for batch in held[-CHECKED:])]
    difference = graphs.check_same(network, exact, checked)
    say(f"the graph differs from PyTorch by {difference:.1e} of the largest output")
    runs: dict[str, Callable[[Batch], latency.Run]] = {}

    def compared(model: PreTrainedModel, run: Session | None = None) -> list[dict[str, Any]]:
        options: dict[str, Any] = {"pooling": pooling, "texts": settings["texts"], "run": run}
        return [measure(model, network, held, **options) for held in inputs.held_out]

    def torch_stage(name: str, model: PreTrainedModel) -> dict[str, Any]:
        runs[name] = lambda batch: latency.run_torch(model, batch)
        found: dict[str, Any] = {"name": name, "bytes": sum(t.nbytes for t in stored(model).values())}
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
        loss = f"{words.shown(found['added_loss'])} ({loss_in_words(own[0]['figures'])})"
        say(f"{name}: {found['bytes'] / 1e6:.1f} MB, loss {loss}")
        if not found["added_loss"] <= settings["max_loss"]:
            raise ValueError(
                f"{name} loses {loss}, more than max_loss {settings['max_loss']}: nothing was written; "
                f"{_advice(to, mode)}"
            )
        return found

    stages = [torch_stage("pytorch", network)]
    if original is not None:
        stages = [torch_stage("original", original), torch_stage("compressed", network)]
    stages.append(graph_stage(to))
    if mode is not None:
        say(f"quantizing to int8 ({mode})")
        quantizing.quantize_(path, to, mode, list(graphs.each(batches))[: quantizing.MOST])
        stages.append(graph_stage(f"{to} int8 {mode}"))
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
        "inputs": list(names),
        "outputs": list(exact(checked[0])),
        "cache": False,
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
    return max(loss for loss, _ in _losses(figures))


def loss_in_words(figures: Mapping[str, float]) -> str:
    """What `loss_of` is for these figures.

    Example:
        >>> loss_in_words({"cosine": 0.5, "worst cosine": 0.2, "KL divergence": 0.0, "same best": 0.9})
        '1 - part of equal predictions'
    """
    return max(_losses(figures))[1]


def _losses(figures: Mapping[str, float]) -> Iterable[tuple[float, str]]:
    for label in dict.fromkeys(key.rpartition(": ")[0] for key in figures):
        own = {key.rpartition(": ")[2]: value for key, value in figures.items() if key.rpartition(": ")[0] == label}
        if "perplexity" in own:
            ratio = own["perplexity"] / own["original perplexity"]
            yield max(0.0, math.log(ratio)), "log of the ratio of perplexities"
        elif "same best" in own:
            yield 1 - own["same best"], "1 - part of equal predictions"
        elif "Spearman" in own:
            yield 1 - own["Spearman"], "1 - Spearman correlation"
        elif "cosine" in own:
            yield 1 - own["cosine"], "1 - mean cosine"
        else:
            yield own["relative squared error"], "squared error over the mean square"


def save_config(network: PreTrainedModel, folder: Path) -> None:
    """Write config.json, without the mark of a compressed model: runtimes read names of classes from it alone."""
    config = network.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(network).__name__]
    _io.write_json(folder / "config.json", config)


def _inputs(source: Source, calibration: str | Path | None, settings: Mapping[str, Any]) -> Gathered:
    network = source.network
    length = min(settings["max_length"], token_limit(network.config) or settings["max_length"])
    given: Calibration = load_calibration(
        calibration,
        source.processor,
        column=settings["column"],
        pairs=calibration is None and source.pairs,
        max_length=length,
        batch_size=CAUSAL_BATCH if is_causal(network) else BATCH,
        held_out=HELD_OUT,
        seed=settings["seed"],
    )
    return gather(given, source.processor, max_length=length, wide=False, seed=settings["seed"])


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _advice(to: str, mode: str | None) -> str:
    if mode is None:
        return "give a larger max_loss, or serve the model with PyTorch"
    other = "--int8 dynamic, " if to == "onnx" and mode == "static" else ""
    return f"use {other}no --int8, more texts like those in use, or a larger max_loss"
