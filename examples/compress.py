"""Compress a model, export it to ONNX in int8, and compare the vectors that onnxruntime returns with the original's.

    python examples/compress.py [MODEL] [--calibration texts.txt] [--keep 0.33] [--out compressed] [--minutes 5]

Without MODEL, a small one with random weights is made; its vectors mean nothing. The result is served over HTTP by
`python examples/serve.py compressed 8000`.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import tiny
import torch
from transformers import AutoModel, AutoTokenizer

import snnk.hf

TEXTS = ["A man is playing the guitar.", "Somebody plays an instrument.", "The weather will be fine tomorrow."]


def main(model: str, calibration: Path | None, keep: float, out: Path, minutes: float) -> None:
    report = snnk.hf.compress(
        model, calibration, out=out, keep=keep, recover_minutes=minutes, to="onnx-int8", say=print
    )
    sizes = report["bytes"]
    print(f"{sizes['original']:,} bytes became {sizes['compressed']:,} in PyTorch")

    original, tokenizer = AutoModel.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        wanted = means(original(**batch).last_hidden_state.numpy(), batch["attention_mask"].numpy())
    session = onnxruntime.InferenceSession(out / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = {node.name: batch[node.name].numpy() for node in session.get_inputs()}
    found = means(session.run(None, inputs)[0], batch["attention_mask"].numpy())
    for text, cosine in zip(TEXTS, (wanted * found).sum(1), strict=True):
        print(f"cosine {cosine:.3f}  {text}")


def means(states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Unit vectors of texts: means over tokens that are not padding."""
    vectors = (states * mask[..., None]).sum(1)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a model, or its name on the hub")
    parser.add_argument("--calibration", type=Path, help="texts of the kind that the model will read, one per line")
    parser.add_argument("--keep", type=float, default=0.33)
    parser.add_argument("--out", type=Path, default=Path("compressed"))
    parser.add_argument("--minutes", type=float, default=5.0, help="most minutes of distillation")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(args.model or str(tiny.make(Path(folder) / "tiny")), args.calibration, args.keep, args.out, args.minutes)
