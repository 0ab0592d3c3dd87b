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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snnk import _checks
from snnk.hf.compression.causal import is_causal
from snnk.hf.cost import counting_mode
from snnk.hf.folders import some
from snnk.hf.models import Batch, eager_attention, example_inputs
from snnk.hf.serve.sessions import PAST, POSITIONS, PRESENT, Session, Traced, example_cache, takes_positions
from snnk.hf.serve.unpadding import drop_padding_

TOLERANCE = 1e-4  # difference to PyTorch of an exported model in float32, over the largest value of the output
SIZES = (2, 7)  # inputs and tokens of the example that is traced: different, and 1 would be taken for a constant
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
STATES = "last_hidden_state"
FILES = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}  # names that Optimum looks for
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}


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


def input_names(model: PreTrainedModel, batch: Batch) -> tuple[str, ...]:
    """The inputs of a graph: those of a batch, in the order of Optimum; a ValueError for inputs of other kinds."""
    taken = inspect.signature(model.forward).parameters
    others = [name for name in batch if name not in INPUTS]
    names = tuple(name for name in INPUTS if name in batch and name in taken)
    if others or not names:
        raise ValueError(
            f"models of texts or of images can be exported; {type(model).__name__} has the inputs {some(batch)}: serve "
            "it with PyTorch"
        )
    return names


def output_names(model: PreTrainedModel, batch: Batch) -> tuple[str, ...]:
    """The outputs of a graph: all logits, or else the last hidden states."""
    with counting_mode(model):
        found = model(**batch)
    logits = tuple(name for name in found if name.endswith("logits") and isinstance(found[name], Tensor))
    if not logits and STATES not in found:
        raise ValueError(f"it returns {some(found)}, neither logits nor {STATES}")
    return logits or (STATES,)


def write_onnx(model: PreTrainedModel, batch: Batch, path: Path) -> str | None:
    """Write a model in float32 as an ONNX file; a ValueError names the module that cannot be exported.

    A decoder has its cache among inputs and outputs. Returns the reason if the cache of a decoder cannot be written.

    Args:
        model: on the processor.
        batch: inputs of the kinds that the graph will read.
        path: new file; weights of more than 1 GiB are in a file beside it.
    """
    import onnx

    names = input_names(model, batch)
    inputs = example(model, names)
    if "attention_mask" in inputs:
        inputs["attention_mask"][0, -1] = 0
    try:
        outputs = output_names(model, inputs)
    except Exception as error:  # of the model's code, which needs other inputs
        raise ValueError(refusal(model, error)) from error
    written, reason = None, None
    with counting_mode(model), silenced(), eager_attention(model):
        if is_causal(model):
            try:
                written = _with_cache(model, inputs, outputs)
            except Exception as error:  # of many types; a model that cannot be exported at all fails again below
                reason = _first_line(error)
        try:
            written = written or _export(model, inputs, outputs, {})
        except Exception as error:  # torch.export and the exporter raise errors of many types
            raise ValueError(refusal(model, error)) from error
        weights = sum(p.nbytes for p in model.parameters())
        written.save(path, external_data=weights > 2**30)
    _tidy(onnx, path)
    return reason


def _with_cache(model: PreTrainedModel, inputs: Batch, outputs: Sequence[str]) -> Any:
    """The graph of a decoder that reads some tokens after others."""
    past = example_cache(model, inputs)
    given = {
        "input_ids": inputs["input_ids"][:, 2:].contiguous(),
        "attention_mask": torch.ones(SIZES[0], 2 * SIZES[1] - 2, dtype=torch.int64),
    }
    if takes_positions(model, inputs):
        given[POSITIONS] = (torch.arange(SIZES[1] - 2) + SIZES[1]).expand(SIZES[0], -1).contiguous()
    return _export(model, given, outputs, past)


def _export(model: PreTrainedModel, inputs: Batch, outputs: Sequence[str], past: Batch) -> Any:
    free = torch.export.Dim.DYNAMIC
    dims = [{0: free} if name == "pixel_values" else {0: free, 1: free} for name in inputs]
    dims += [{0: free, 2: free}] * len(past)
    program = torch.export.export(
        Traced(model, list(inputs), outputs),
        (*inputs.values(), *past.values()),
        dynamic_shapes={"tensors": tuple(dims)},
        strict=False,
    )
    named = [*outputs, *(name.replace(PAST, PRESENT, 1) for name in past)]
    options: Any = {"dynamo": True, "verbose": False, "optimize": True}
    return torch.onnx.export(program, input_names=[*inputs, *past], output_names=named, **options)


def write_openvino(onnx_file: Path, path: Path) -> None:
    """Write an ONNX file as a model of OpenVINO: an .xml file, and a .bin file of weights in float32 beside it."""
    openvino = import_unreported("openvino")
    openvino.save_model(openvino.Core().read_model(onnx_file), path, compress_to_fp16=False)


def write_graph(model: PreTrainedModel, batch: Batch, folder: Path, to: str) -> tuple[Path, str | None]:
    """Write a model in float32 into a folder, as a graph of either format.

    Returns the file to open, and the reason if the cache of a decoder is left out.
    """
    path, graph = folder / FILES[to], folder / FILES["onnx"]
    reason = write_onnx(model, batch, graph)
    if to == "openvino":
        write_openvino(graph, path)
        graph.unlink()
        graph.with_name(f"{graph.name}.data").unlink(missing_ok=True)
    return path, reason


def open_onnx(path: Path, *, threads: int | None = None) -> Session:
    """A session of ONNX Runtime on the processor, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads or torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    nodes = session.get_inputs()
    inputs, outputs = (tuple(node.name for node in part) for part in (nodes, session.get_outputs()))
    sizes = {node.name: (node.shape[1], node.shape[3]) for node in nodes if node.name.startswith(f"{PAST}.")}

    def run(given: dict[str, Any], wanted: Sequence[str]) -> list[Tensor]:
        return [torch.from_numpy(value) for value in session.run(wanted, given)]

    return Session(inputs, outputs, run, sizes)


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
    inputs, outputs = (tuple(node.get_any_name() for node in nodes) for nodes in (compiled.inputs, compiled.outputs))
    shapes = {name: node.get_partial_shape() for name, node in zip(inputs, compiled.inputs, strict=True)}
    caches = {name: shape for name, shape in shapes.items() if name.startswith(f"{PAST}.")}

    def run(given: dict[str, Any], wanted: Sequence[str]) -> list[Tensor]:
        found = compiled(given)
        return [torch.from_numpy(found[name].copy()) for name in wanted]

    return Session(inputs, outputs, run, {n: (x[1].get_length(), x[3].get_length()) for n, x in caches.items()})


def open_graph(path: Path, to: str, *, threads: int | None = None, exact: bool = False) -> Session:
    """A session for a graph of either format; with `exact`, OpenVINO computes in float32."""
    if _checks.choose(to, FILES, "format") == "onnx":
        return open_onnx(path, threads=threads)
    return open_openvino(path, threads=threads, precision="f32" if exact else None)


def check_same(model: PreTrainedModel, session: Session, batches: Iterable[Batch]) -> float:
    """The largest difference between a graph and its model, over the largest value; a ValueError above TOLERANCE."""
    found: list[float] = []
    for batch in batches:
        with counting_mode(model):
            wanted = model(**batch)
        for name, value in session(batch).items():
            if value.shape != wanted[name].shape:
                raise ValueError(
                    f"the exported graph returns {name} of shape {tuple(value.shape)} where PyTorch returns "
                    f"{tuple(wanted[name].shape)}: the model's code depends on the shape of its inputs"
                )
            found.append(_difference(value, wanted[name]))
        if session.sizes and (one := alone(batch))["input_ids"].shape[1] > 1:
            with counting_mode(model):
                whole = model(**one).logits
            for start in {whole.shape[1] // 2, whole.shape[1] - 1}:  # several new tokens after others, and one
                found.append(_difference(session(session.after(one, start))["logits"], whole[:, start:]))
    worst = next((x for x in found if x != x), max(found))  # max leaves out NaN
    if not worst <= TOLERANCE:
        raise ValueError(
            f"the exported graph differs from PyTorch by {worst:.1e} of the largest output, more than {TOLERANCE:.0e}: "
            "nothing was written; the model's code may depend on values of its inputs"
        )
    return worst


def _difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


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
    """Inputs of a graph: so many, of so many tokens if they are texts, without padding."""
    found = example_inputs(model, sizes)
    ids = found.get("input_ids")
    if ids is not None:
        found |= {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {name: found[name] for name in names}


def _tidy(onnx: Any, path: Path) -> None:
    """Leave out padding, sizes inside the graph and the exporter's notes, and name its free dimensions by words.

    The notes have the lines of Python that each node comes from, with the paths of their files on this machine.
    """
    proto = onnx.load(path, load_external_data=False)
    drop_padding_(proto)
    words: dict[str, str] = {}
    for node in proto.graph.input:
        past = node.name.startswith(f"{PAST}.")
        for i, dim in enumerate(node.type.tensor_type.shape.dim):
            if dim.dim_param:
                words.setdefault(dim.dim_param, "batch" if i == 0 else "past" if past else "length")
    mask = next((node for node in proto.graph.input if node.name == "attention_mask"), None)
    if "past" in words.values() and mask is not None:
        words[mask.type.tensor_type.shape.dim[1].dim_param] = "past + length"
    del proto.graph.value_info[:]  # sizes that some passes over a graph, such as int8, change and do not correct
    for node in (*proto.graph.input, *proto.graph.output):
        for dim in node.type.tensor_type.shape.dim:
            if dim.dim_param:  # to assign it would remove a fixed size
                dim.dim_param = re.sub(r"\w+", lambda found: words.get(found[0], found[0]), dim.dim_param)
    graph, functions = proto.graph, proto.functions
    notes = (graph.node, graph.input, graph.output, graph.initializer)
    for item in (proto, graph, *functions, *(x for part in (*notes, *(f.node for f in functions)) for x in part)):
        del item.metadata_props[:]
    onnx.save(proto, path)


def refusal(model: PreTrainedModel, error: Exception) -> str:
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
    place = " ".join(filter(None, (where, node)))
    told = ": ".join(filter(None, (f"{type(model).__name__} cannot be exported", place, _first_line(error))))
    if model.config.is_encoder_decoder:
        return f"{told}; a model with an encoder and a decoder is no single graph: export its encoder, or use PyTorch"
    return (
        f"{told}; the code of this module depends on values of the inputs or uses an operator without a counterpart: "
        "serve the model with PyTorch, or change this module"
    )


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:300]


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
