"""int8 weights and activations: by ONNX Runtime's quantizer for ONNX, and by NNCF for OpenVINO.

Weights have one scale per output of a matrix (per channel). Scales of activations are computed for each batch
("dynamic"), or are fixed, from inputs like those in use ("static").
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from torch import Tensor

from snnk._environment import instructions
from snnk.hf.serve.graphs import import_unreported, open_graph, silenced

MODES = {"onnx": ("static", "dynamic"), "openvino": ("static",)}
# Inputs for fixed scales: fewer than LEAST are refused, fewer than ENOUGH give a warning, and at most MOST are used.
LEAST, ENOUGH, MOST = 32, 200, 300
MATRICES = ["MatMul", "Gemm"]


def doubt(mode: str, kind: str, count: int) -> str | None:
    """A warning of few inputs for fixed scales; a ValueError if there are too few.

    Example:
        >>> doubt("static", "texts", 100)  # doctest: +ELLIPSIS
        '100 texts are few for the scales of int8: ...; give 200 or more'
        >>> doubt("dynamic", "texts", 100) is None
        True
    """
    if mode != "static" or count >= ENOUGH:
        return None
    if count < LEAST:
        raise ValueError(
            f"static int8 takes its scales from the calibration inputs; got {count} {kind}, and at least {LEAST} are "
            f"needed ({ENOUGH} or more are better): give more, or use dynamic int8 of ONNX (--to onnx-int8)"
        )
    return f"{count} {kind} are few for the scales of int8: other inputs may exceed them; give {ENOUGH} or more"


def on_others(to: str) -> str | None:
    """A warning of the loss on other processors, for ONNX.

    Without the instructions VNNI, x86 processors add products of 8 bits in 16 bits, which can overflow.
    """
    if to != "onnx":
        return None
    if seven_bits():
        return "this processor has no VNNI: weights have 7 bits instead of 8, so that sums do not overflow"
    return "the loss of int8 may be larger on an x86 processor without VNNI than measured here"


def seven_bits() -> bool:
    """Whether sums of 8-bit products can overflow on this processor: one with AVX2 and without VNNI."""
    found = instructions()
    return "AVX2" in found and "VNNI" not in found


def quantize_(path: Path, to: str, mode: str, inputs: Sequence[dict[str, Tensor]]) -> None:
    """Put the int8 form of a graph in its place.

    Args:
        path: file of a graph in float32.
        to: "onnx" or "openvino".
        mode: "static" or "dynamic".
        inputs: for the scales, one at a time, so that there is no padding.
    """
    if mode == "static":
        session = open_graph(path, to, exact=True)
        if session.sizes:  # texts in use go on from a cache
            lengths = [one["input_ids"].shape[1] for one in inputs]
            inputs = [session.after(x, n // 2) if n > 1 else x for x, n in zip(inputs, lengths, strict=True)]
        inputs = [session.complete(one) for one in inputs]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, silenced(), redirect_stdout(StringIO()):
        new = Path(folder) / path.name
        if to == "openvino":
            _openvino(path, new, inputs)
        elif mode == "static":
            _onnx_static(path, new, inputs)
        else:
            _onnx_dynamic(path, new)
        for old in path.parent.glob(f"{path.stem}.*"):
            old.unlink()
        for file in Path(folder).iterdir():
            shutil.move(file, path.parent / file.name)


def _onnx_dynamic(path: Path, new: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(path, new, per_channel=True, reduce_range=seven_bits(), weight_type=QuantType.QInt8)


def _onnx_static(path: Path, new: Path, inputs: Sequence[dict[str, Tensor]]) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(inputs)

        def get_next(self) -> Any:
            found = next(self.left, None)
            return None if found is None else {name: x.numpy() for name, x in found.items()}

    prepared = new.with_name("prepared.onnx")
    quant_pre_process(path, prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared,
        new,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        reduce_range=seven_bits(),
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=MATRICES,
    )
    prepared.unlink()


def _openvino(path: Path, new: Path, inputs: Sequence[dict[str, Tensor]]) -> None:
    nncf, openvino = import_unreported("nncf"), import_unreported("openvino")
    model = openvino.Core().read_model(path)
    names = [node.get_any_name() for node in model.inputs]
    data = nncf.Dataset([{name: one[name].numpy() for name in names} for one in inputs])
    small = nncf.quantize(model, data, subset_size=len(inputs), model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(small, new, compress_to_fp16=False)
