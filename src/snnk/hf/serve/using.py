"""Parts of reports on a served model: how it is loaded, and its stages in a table and as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from snnk._html import NEW, bars
from snnk.hf.compression import figures

CACHE = {
    True: "The graph has a cache of keys and values: a new token is computed from the cache and itself.",
    False: "The graph has no cache of keys and values: each new token is computed from the whole text.",
}
INT8 = {  # words of pages on served models
    "onnx, openvino": "The model as a graph for ONNX Runtime or OpenVINO, which serve models without PyTorch.",
    "int8": "Weights and activations in 8 bits in place of 32. Static scales come from the calibration, dynamic ones "
    "from each batch.",
    "loss": "What a model loses against the original on held-out inputs: 1 - mean cosine for vectors, 1 - part of "
    "equal predictions for classes, 1 - Spearman correlation for scores, the log of the ratio of perplexities for "
    "decoders. 0 is best.",
}
OPTIMUM = {"onnx": ("optimum.onnxruntime", "ORTModel"), "openvino": ("optimum.intel", "OVModel")}
HEADS = {
    "ForSequenceClassification": "ForSequenceClassification",
    "ForImageClassification": "ForImageClassification",
    "ForTokenClassification": "ForTokenClassification",
    "ForQuestionAnswering": "ForQuestionAnswering",
    "ForMaskedLM": "ForMaskedLM",
    "ForCausalLM": "ForCausalLM",
    "LMHeadModel": "ForCausalLM",
}


def is_decoder(report: Mapping[str, Any]) -> bool:
    return bool(_optimum(report).endswith("ForCausalLM"))


def _optimum(report: Mapping[str, Any]) -> str:
    """The class of Optimum that loads the graph."""
    found = (name for end, name in HEADS.items() if report["model_class"].endswith(end))
    return OPTIMUM[report["to"]][1] + next(found, "ForFeatureExtraction")


def loader(report: Mapping[str, Any]) -> str:
    """Python that loads the folder with sentence-transformers or Optimum."""
    backend = report["to"]
    if report["sentence_transformers"]:
        kind = "CrossEncoder" if "Classification" in report["model_class"] else "SentenceTransformer"
        return f'from sentence_transformers import {kind}\n\nmodel = {kind}("this folder", backend="{backend}")'
    kind = _optimum(report)
    options = ', subfolder="openvino"' if backend == "openvino" else ""  # Optimum looks for folders of ONNX alone
    options += ", use_cache=False" if is_decoder(report) and not report["cache"] else ""
    return f'from {OPTIMUM[backend][0]} import {kind}\n\nmodel = {kind}.from_pretrained("this folder"{options})'


def shortened(names: Iterable[str]) -> str:
    """Names of inputs or outputs, those of a cache as one.

    Example:
        >>> shortened(["logits", "present.0.key", "present.0.value"])
        'logits, present.*'
    """
    return ", ".join(dict.fromkeys(f"{name.partition('.')[0]}.*" if "." in name else name for name in names))


def cache_note(report: Mapping[str, Any]) -> str:
    """Whether the graph of a decoder has a cache, and otherwise why, as sentences after others."""
    if not is_decoder(report):
        return ""
    return f" {CACHE[report['cache']]}" + (f" The reason: {report['no_cache']}." if report["no_cache"] else "")


def heads(report: Mapping[str, Any]) -> list[str]:
    """Headings of `rows`."""
    return ["stage", "MB", *(milliseconds(found) for found in report.get("latency", ())), "loss"]


def milliseconds(latency: Mapping[str, Any]) -> str:
    """The heading of milliseconds for a batch, with the clock and the number of threads.

    Example:
        >>> milliseconds({"clock": "processor", "threads": 1, "inputs": "1 x 32 tokens"})
        'ms of processor time, 1 thread, 1 x 32 tokens'
    """
    return f"ms of {clock_of(latency)}, {latency['inputs']}"


def clock_of(latency: Mapping[str, Any]) -> str:
    """The clock and the number of threads of a measurement.

    Example:
        >>> clock_of({"clock": "processor", "threads": 2})
        'processor time, 2 threads'
    """
    threads = latency["threads"]
    return f"{latency['clock']} time, {threads} thread{'s' if threads > 1 else ''}"


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Each stage with its size, its latencies and its loss, as text."""
    found = []
    for stage in report["stages"]:
        times = [_milliseconds(latency, stage["name"]) for latency in report.get("latency", ())]
        loss = figures.shown(stage.get("loss"))
        shown = ["-" if time is None else f"{time:.2f}" for time in times]
        found.append([stage["name"], f"{stage['bytes'] / 1e6:.1f}", *shown, loss])
    return found


def _milliseconds(latency: Mapping[str, Any], name: str) -> float | None:
    run = latency["runs"].get(name)
    return None if run is None else 1e3 * run[f"{latency['clock']}_seconds"]


def pictures(report: Mapping[str, Any]) -> str:
    """Size, latencies and loss of all stages as bars."""
    stages, lines = report["stages"], rows(report)
    names = [stage["name"] for stage in stages]
    parts = []
    for i, title in enumerate(heads(report)[1:-1], 1):
        values = [0.0 if line[i] == "-" else float(line[i]) for line in lines]
        key = f"{title}; the dashed line is {names[0]}"
        parts.append(bars(names, [(key, NEW, values)], [line[i] for line in lines], values[0]))
    losses = [(stage["name"], stage["loss"]) for stage in stages if "loss" in stage]
    values = [value for _, value in losses]
    title = "loss; the dashed line is 1"
    parts.append(bars([n for n, _ in losses], [(title, NEW, values)], [figures.shown(v) for v in values], 1))
    return "\n".join(parts)
