"""Graphs of models for ONNX Runtime and OpenVINO, with any number of inputs and tokens, and sessions that run them.

A model is traced by torch.export, written as ONNX, and read from there by OpenVINO. The graph has the inputs of the
model's tokenizer or image processor, and its logits or last hidden states as outputs: what Optimum and
sentence-transformers expect. `check_same` compares it with the model in PyTorch.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from snnk import _checks
from snnk.hf.cost import counting_mode
from snnk.hf.folders import some
from snnk.hf.models import Batch, example_inputs

TOLERANCE = 1e-4  # difference to PyTorch of an exported model in float32, over the largest value of the output
SIZES = (2, 7)  # inputs and tokens of the example that is traced: different, and 1 would be taken for a constant
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
STATES = "last_hidden_state"
FILES = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}  # names that Optimum looks for
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}
Session = Callable[[Batch], dict[str, Tensor]]  # runs a graph: outputs by name, on the processor


def import_unreported(name: str) -> Any:
    """Import OpenVINO or NNCF without the package by which they report imports and calls to a server.

    Both go on without this package where it cannot be imported, and look for it only once.
    """
    telemetry = "openvino_telemetry"
    before = sys.modules.get(telemetry)
    sys.modules[telemetry] = None  # type: ignore[assignment]  # an import of it fails
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[telemetry]
        if before is not None:
            sys.modules[telemetry] = before


class Traced(nn.Module):
    """A model whose inputs are in order, and whose outputs are the chosen ones."""

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, inputs, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(found[name] for name in self.outputs)


def input_names(model: PreTrainedModel, batch: Batch) -> tuple[str, ...]:
    """The inputs of a graph: those of a batch, in the order of Optimum; a ValueError for inputs of other kinds."""
    taken = inspect.signature(model.forward).parameters
    others = [name for name in batch if name not in INPUTS]
    names = tuple(name for name in INPUTS if name in batch and name in taken)
    if others or not names:
        raise ValueError(
            f"models of texts or of images can be exported; {type(model).__name__} has the inputs {some(batch)}"
        )
    return names


def output_names(model: PreTrainedModel, batch: Batch) -> tuple[str, ...]:
    """The outputs of a graph: all logits, or else the last hidden states."""
    with counting_mode(model):
        found = model(**batch)
    logits = tuple(name for name in found if name.endswith("logits") and isinstance(found[name], Tensor))
    if not logits and STATES not in found:
        raise ValueError(
            f"{type(model).__name__} returns {some(found)}, neither logits nor {STATES}: it cannot be exported; "
            "export a part of it that returns one of these, such as its encoder"
        )
    return logits or (STATES,)


def write_onnx(model: PreTrainedModel, batch: Batch, path: Path) -> None:
    """Write a model in float32 as an ONNX file; a ValueError names the module that cannot be exported.

    Args:
        model: on the processor.
        batch: inputs of the kinds that the graph will read.
        path: new file; weights of more than 2 GB are in a file beside it.
    """
    import onnx

    names = input_names(model, batch)
    inputs = example(model, names)
    outputs = output_names(model, inputs)
    dims: Any = [{0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for _ in names]
    if "pixel_values" in names:
        dims = [{0: torch.export.Dim.DYNAMIC}]
    with counting_mode(model), silenced(), _eager(model):
        try:
            traced = Traced(model, names, outputs)
            program = torch.export.export(
                traced, tuple(inputs[name] for name in names), dynamic_shapes={"tensors": tuple(dims)}, strict=False
            )
            written: Any = torch.onnx.export(
                program, input_names=names, output_names=outputs, dynamo=True, verbose=False, optimize=True
            )
        except Exception as error:  # torch.export and the exporter raise errors of many types
            raise ValueError(_refusal(model, error)) from error
        weights = sum(p.nbytes for p in model.parameters())
        written.save(path, external_data=weights > 2**30)
    _tidy(onnx, path, names)


def write_openvino(onnx_file: Path, path: Path) -> None:
    """Write an ONNX file as a model of OpenVINO: an .xml file, and a .bin file of weights in float32 beside it."""
    openvino = import_unreported("openvino")
    openvino.save_model(openvino.Core().read_model(onnx_file), path, compress_to_fp16=False)


def open_onnx(path: Path, *, threads: int | None = None) -> Session:
    """A session of ONNX Runtime on the processor, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads or torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names, outputs = ([node.name for node in nodes] for nodes in (session.get_inputs(), session.get_outputs()))

    def run(batch: Batch) -> dict[str, Tensor]:
        found = session.run(outputs, {name: batch[name].numpy() for name in names})
        return {name: torch.from_numpy(value) for name, value in zip(outputs, found, strict=True)}

    return run


def open_openvino(path: Path, *, threads: int | None = None, precision: str | None = None) -> Session:
    """A session of OpenVINO on the processor, with as many threads as torch has.

    Args:
        path: the .xml file.
        threads: default: those of torch.
        precision: "f32" for float32. Default: OpenVINO's choice, bfloat16 on processors that have it.
    """
    openvino = import_unreported("openvino")
    config: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads or torch.get_num_threads()}
    if precision is not None:
        config["INFERENCE_PRECISION_HINT"] = precision
    compiled = openvino.Core().compile_model(path, "CPU", config)
    names, outputs = ([node.get_any_name() for node in nodes] for nodes in (compiled.inputs, compiled.outputs))

    def run(batch: Batch) -> dict[str, Tensor]:
        found = compiled({name: batch[name].numpy() for name in names})
        return {name: torch.from_numpy(found[i].copy()) for i, name in enumerate(outputs)}

    return run


def open_graph(path: Path, to: str, *, exact: bool = False) -> Session:
    """A session for a graph of either format; with `exact`, OpenVINO computes in float32."""
    if _checks.choose(to, FILES, "format") == "onnx":
        return open_onnx(path)
    return open_openvino(path, precision="f32" if exact else None)


def check_same(model: PreTrainedModel, session: Session, batches: Iterable[Batch]) -> float:
    """The largest difference between a graph and its model, over the largest value; a ValueError above TOLERANCE."""
    worst = 0.0
    for batch in batches:
        with counting_mode(model):
            wanted = model(**batch)
        for name, value in session(batch).items():
            if value.shape != wanted[name].shape:
                raise ValueError(
                    f"the exported graph returns {name} of shape {tuple(value.shape)} where PyTorch returns "
                    f"{tuple(wanted[name].shape)}: the model's code depends on the shape of its inputs"
                )
            worst = max(worst, float((value - wanted[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-30)))
    if not worst <= TOLERANCE:
        raise ValueError(
            f"the exported graph differs from PyTorch by {worst:.1e} of the largest output, more than {TOLERANCE:.0e}: "
            "nothing was written; the model's code may depend on values of its inputs"
        )
    return worst


def alone(batch: Batch) -> dict[str, Tensor]:
    """The first input of a batch, without its padding."""
    return next(each([batch]))


def each(batches: Iterable[Batch]) -> Iterator[dict[str, Tensor]]:
    """The inputs of batches one by one, without their padding."""
    for batch in batches:
        for i in range(len(next(iter(batch.values())))):
            one = {name: x[i : i + 1] for name, x in batch.items()}
            if (mask := one.get("attention_mask")) is not None and mask.any():
                one = {name: x[:, mask[0].bool()] for name, x in one.items()}
            yield one


def example(model: PreTrainedModel, names: Sequence[str], sizes: tuple[int, int] = SIZES) -> dict[str, Tensor]:
    """Inputs of a graph: so many, of so many tokens if they are texts; the last token of the first is padding."""
    found = example_inputs(model, sizes)
    ids = found.get("input_ids")
    if ids is not None:
        found |= {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        found["attention_mask"][0, -1] = 0
    return {name: found[name] for name in names}


def _tidy(onnx: Any, path: Path, names: Sequence[str]) -> None:
    """Call the free dimensions of a graph batch and length, and leave out the exporter's notes.

    The notes have the lines of Python that each node comes from, with the paths of their files on this machine.
    """
    proto = onnx.load(path, load_external_data=False)
    words: dict[str, str] = {}
    for node in proto.graph.input:
        if node.name in names:
            for dim, word in zip(node.type.tensor_type.shape.dim, ("batch", "length"), strict=False):
                if dim.dim_param:
                    words[dim.dim_param] = word
    for node in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in node.type.tensor_type.shape.dim:
            if dim.dim_param in words:
                dim.dim_param = words[dim.dim_param]
    graph, functions = proto.graph, proto.functions
    notes = (graph.node, graph.input, graph.output, graph.value_info, graph.initializer)
    for item in (proto, graph, *functions, *(x for part in (*notes, *(f.node for f in functions)) for x in part)):
        del item.metadata_props[:]
    onnx.save(proto, path)


def _refusal(model: PreTrainedModel, error: Exception) -> str:
    """The module of the model in which the export failed, the operator if it is known, and advice."""
    names = {id(module): name for name, module in model.named_modules()}
    place, chain = "", ""
    seen: BaseException | None = error
    while seen is not None:  # the first cause is the last of the chain
        frame = seen.__traceback__
        while frame is not None:
            owner = frame.tb_frame.f_locals.get("self")
            place = names.get(id(owner), place) or place
            frame = frame.tb_next
        chain, seen = f"{chain}\n{seen}", seen.__cause__ or seen.__context__
    found = re.search(r"target=torch\.ops\.([\w.]+)", chain)
    where = f"in {place} ({type(model.get_submodule(place)).__name__})" if place else ""
    node = f"at the operator {found[1]}" if found else ""
    first = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
    return (
        f"{type(model).__name__} cannot be exported: {' '.join(filter(None, (where, node)))}: {first.strip()[:300]}; "
        "the code of this module depends on values of the inputs or uses an operator without a counterpart: serve the "
        "model with PyTorch, or change this module"
    )


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Attention as matrix products and a softmax, which both runtimes fuse best."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def silenced() -> Iterator[None]:
    """Silence the exporters, which write about operators that the model does not have."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
