"""The forms in which a model can be served: a graph for ONNX Runtime or OpenVINO, in float32 or int8."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedModel

from snnk import _checks
from snnk.hf.cost import counting_mode
from snnk.hf.models import Batch
from snnk.hf.serve import graphs, quantizing
from snnk.hf.serve.latency import Run

# Format and int8 of the forms of `snnk.hf.export`, the fastest first (docs/figures.md); the last one loses most
FORMS = {
    "openvino-int8": ("openvino", "static"),
    "onnx-int8": ("onnx", "dynamic"),
    "openvino": ("openvino", None),
    "onnx": ("onnx", None),
    "onnx-int8-static": ("onnx", "static"),
}


def check_form(form: str) -> tuple[str, str | None]:
    """Format and int8 of a form; an error for an unknown one, and for one whose packages are not installed."""
    to, int8 = FORMS[_checks.choose(form, FORMS, "form")]
    wanted = [*graphs.PACKAGES[to], *(["nncf"] if to == "openvino" and int8 else [])]
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"an export to {to} needs {' and '.join(missing)}; install the extra serve: pip install 'snnk[serve]'"
        )
    return to, int8


def write_form(network: PreTrainedModel, batches: Iterable[Batch], folder: Path, form: str) -> Path:
    """Write a model as a graph into a folder; the scales of int8 are those of the batches' first inputs."""
    to, int8 = FORMS[form]
    inputs = list(islice(graphs.each(batches), quantizing.MOST))
    network = network if network.dtype == torch.float32 else copy.deepcopy(network).float()
    path, _ = graphs.write_graph(network, inputs[0], folder, to)
    if int8 is not None:
        quantizing.quantize_(path, to, int8, inputs)
    return path


def run_form(model: PreTrainedModel, batch: Batch, form: str) -> Run:
    """A model as it runs in a form, for measurements of time alone: int8 has the scales of this batch."""
    check_form(form)
    inputs = {name: x for name, x in batch.items() if name in graphs.INPUTS}
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with tempfile.TemporaryDirectory() as folder, counting_mode(model):
        path = write_form(model, [inputs], Path(folder), form)
        session = graphs.open_graph(path, FORMS[form][0])
    return lambda: session(inputs)
