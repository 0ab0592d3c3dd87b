"""Load exported models with sentence-transformers, Optimum and the bare runtimes, and compare them with PyTorch.

    python benchmarks/loading.py --model FOLDER --served EXPORTED,EXPORTED [--out FILE]

Runs in an environment without snnk, as Optimum needs an older transformers than snnk is tested with:

    pip install torch==2.13.0 "sentence-transformers>=5" optimum-onnx[onnxruntime] optimum-intel[openvino]

MODEL is the folder that was exported, which sentence-transformers loads with PyTorch. Vectors are compared with its
vectors by the largest difference of a number, and by the smallest cosine. A graph in float32 must be within 1e-4 of
PyTorch with ONNX Runtime, and within 0.02 with OpenVINO, which uses bfloat16 on processors that have it; int8 must
have cosines above 0.9. The exit code is 1 if one is not. Each graph is also run by its runtime alone, with the package
tokenizers, in a process that imports neither torch nor transformers. With a decoder, Optimum must generate the tokens
that PyTorch generates, by the cache, also for a text with padding on its left.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

TEXTS = [
    "A man is playing a guitar.",
    "The rain has stopped.",
    "Seven small boats left the harbour at dawn " * 4,
    "Yes",
]
ALONE = """
import json, sys
import numpy as np
from tokenizers import Tokenizer
folder, kind = sys.argv[1:]
tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
tokenizer.enable_padding()
tokenizer.enable_truncation(128)
rows = tokenizer.encode_batch(json.load(sys.stdin))
inputs = {"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}
inputs = {name: np.array(x, dtype=np.int64) for name, x in inputs.items()}
inputs["token_type_ids"] = np.zeros_like(inputs["input_ids"])
if kind == "onnx":
    import onnxruntime
    session = onnxruntime.InferenceSession(folder + "/onnx/model.onnx", providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    states = session.run(["last_hidden_state"], {name: inputs[name] for name in names})[0]
else:
    import openvino
    model = openvino.Core().compile_model(folder + "/openvino/openvino_model.xml", "CPU")
    states = model({node.get_any_name(): inputs[node.get_any_name()] for node in model.inputs})[0]
assert not {"torch", "transformers", "snnk"} & set(sys.modules)
mask = inputs["attention_mask"][:, :, None]
vectors = (states * mask).sum(1) / mask.sum(1)
json.dump((vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist(), sys.stdout)
"""
PACKAGES = ("torch", "transformers", "sentence-transformers", "optimum", "optimum-onnx", "optimum-intel", "onnxruntime")


def by_sentence_transformers(folder: Path, kind: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), backend=kind, local_files_only=True)
    return model.encode(TEXTS, normalize_embeddings=True)


def by_optimum(folder: Path, kind: str) -> Any:
    """Mean pooling of the states that Optimum's model returns."""
    import torch
    from transformers import AutoTokenizer

    if kind == "onnx":
        from optimum.onnxruntime import ORTModelForFeatureExtraction as Model
    else:
        from optimum.intel import OVModelForFeatureExtraction as Model

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=128, return_tensors="pt")
    options = {"subfolder": "openvino"} if kind == "openvino" else {}
    states = Model.from_pretrained(folder, trust_remote_code=False, **options)(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()


def alone(folder: Path, kind: str) -> Any:
    found = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder), kind], input=json.dumps(TEXTS), capture_output=True, text=True
    )
    if found.returncode:
        raise RuntimeError(found.stderr[-2000:])
    return np.array(json.loads(found.stdout))


def generated(model: Any) -> Any:
    """Tokens that a decoder puts after two texts, one of which has padding on its left."""
    import torch

    ids, mask = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=mask, **options)


def decoder_row(original: Path, folder: Path, kind: str) -> dict[str, Any]:
    """Whether Optimum generates what PyTorch does; OpenVINO computes in float32 for this."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if kind == "onnx":
        from optimum.onnxruntime import ORTModelForCausalLM as Model
    else:
        from optimum.intel import OVModelForCausalLM as Model

        options = {"subfolder": "openvino", "ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
    wanted = generated(AutoModelForCausalLM.from_pretrained(original, trust_remote_code=False))
    found = generated(Model.from_pretrained(folder, trust_remote_code=False, **options))
    return {"loader": "optimum", "to": kind, "int8": None, "same_tokens": bool((found == wanted).all())}


LOADERS = {"sentence-transformers": by_sentence_transformers, "optimum": by_optimum, "runtime alone": alone}


def known(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder that was exported")
    parser.add_argument("--served", required=True, help="folders of snnk export, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loading.json"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    wrong, wanted = 0, None
    for folder in map(Path, args.served.split(",")):
        report = json.loads((folder / "report.json").read_text())
        kind, int8 = report["to"], report["int8"]
        if report["cache"]:
            rows.append(decoder_row(args.model, folder, kind))
            wrong += not rows[-1]["same_tokens"]
            sys.stdout.write(f"{folder.name} by optimum: same tokens {rows[-1]['same_tokens']}\n")
            continue
        wanted = by_sentence_transformers(args.model, "torch") if wanted is None else wanted
        for name, load in LOADERS.items():
            found = load(folder, kind)
            difference, cosine = float(np.abs(found - wanted).max()), float((found * wanted).sum(1).min())
            good = cosine > 0.9 if int8 else difference < (1e-4 if kind == "onnx" else 0.02)
            wrong += not good
            rows.append({"loader": name, "to": kind, "int8": int8, "difference": difference, "cosine": cosine})
            sys.stdout.write(
                f"{folder.name} by {name}: difference {difference:.1e}, smallest cosine {cosine:.6f}"
                f"{'' if good else ': too far'}\n"
            )
    versions = {name: known(name) for name in (*PACKAGES, "openvino")} | {"python": platform.python_version()}
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    found = {"model": args.model.name, "versions": versions, "processor": processor, "rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
