"""Serve an exported sentence encoder or classifier over HTTP: a runtime, tokenizers and numpy are all it needs.

snnk export my-model-small --calibration sentences.txt --to onnx-int8 --out served
python examples/serve.py served 8000
curl localhost:8000 -d '{"texts": ["A sentence.", "Another one."]}'

An encoder with mean pooling answers with unit vectors, a classifier with labels and probabilities, and a model of one
number, such as a reranker, with its output as a score, before any sigmoid. A classifier of pairs takes pairs:
{"texts": [["A question?", "A passage."]]}. Texts are cut to what tokenizer and model allow, as `snnk predict` does.
The runtime is onnxruntime, or openvino for a folder of snnk export --to openvino or openvino-int8.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

folder, port = Path(sys.argv[1]), int(sys.argv[2])
graph = next((path for name in ("model.onnx", "openvino_model.xml") for path in folder.rglob(name)), None)
if graph is None:
    sys.exit(f"{folder} has no model.onnx and no openvino_model.xml: name a folder that snnk export wrote")
config = json.loads((graph.parent.parent / "config.json").read_text())
tokenizer = Tokenizer.from_file(str(next(folder.rglob("tokenizer.json"))))
tokenizer.enable_padding(pad_id=config.get("pad_token_id") or 0)
limits = [json.loads(path.read_text()).get("max_seq_length") for path in folder.glob("sentence_*_config.json")]
limits += [json.loads(path.read_text()).get("model_max_length") for path in folder.rglob("tokenizer_config.json")]
if (positions := config.get("max_position_embeddings") or 0) > 0:
    behind_padding = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")  # their positions begin at 2
    limits.append(positions - 2 if config["model_type"] in behind_padding else positions)
tokenizer.enable_truncation(int(min(filter(None, [*limits, 8192]))))
if graph.suffix == ".onnx":
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # requests run side by side
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    classifies = session.get_outputs()[0].name == "logits"

    def output(batch: dict[str, np.ndarray]) -> np.ndarray:
        return session.run(None, batch)[0]
else:
    sys.modules["openvino_telemetry"] = None  # openvino reports its use to a server by this package, if it finds it
    import openvino

    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": 1})
    names = [node.get_any_name() for node in compiled.inputs]
    classifies = compiled.outputs[0].get_any_name() == "logits"

    def output(batch: dict[str, np.ndarray]) -> np.ndarray:
        return compiled.create_infer_request().infer(batch)[0]  # one per call, as requests run side by side


if classifies and not config.get("architectures", [""])[0].endswith("ForSequenceClassification"):
    sys.exit(f"{folder} has {config.get('architectures')}, which classifies no whole texts: change classify() below")
others = [path for path in folder.glob("[1-9]_*") if path.name not in ("1_Pooling", "2_Normalize")]
pooling = folder / "1_Pooling" / "config.json"
modes = json.loads(pooling.read_text()) if pooling.exists() else {"pooling_mode": "mean"}
modes = [modes.get("pooling_mode"), *(key for key, on in modes.items() if key.startswith("pooling_mode_") and on)]
if not classifies and (others or [mode for mode in modes if mode] not in (["mean"], ["pooling_mode_mean_tokens"])):
    sys.exit(f"{folder} does not return the mean of its tokens: change encode() below to what it does")


def run(texts: list) -> tuple[np.ndarray, np.ndarray]:
    """The output of the graph for texts or pairs of texts, and the mask of tokens that are not padding, (n, t)."""
    rows = tokenizer.encode_batch([tuple(text) if isinstance(text, list) else text for text in texts])
    fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    batch = {name: np.array([getattr(row, field) for row in rows]) for name, field in fields.items()}
    return output({name: batch[name] for name in names}), batch["attention_mask"]


def encode(texts: list[str]) -> np.ndarray:
    """Unit vectors of texts, (n, d): means of the last hidden states over tokens that are not padding."""
    states, mask = run(texts)
    vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def classify(texts: list) -> dict[str, list]:
    """The most probable label of each text and the probabilities of all, or the one score of each text."""
    logits, _ = run(texts)
    if logits.shape[1] == 1:
        return {"scores": logits[:, 0].tolist()}
    if config.get("problem_type") == "multi_label_classification":  # a text may have several labels, or none
        probabilities = 1 / (1 + np.exp(-logits))
    else:
        exponentials = np.exp(logits - logits.max(1, keepdims=True))
        probabilities = exponentials / exponentials.sum(1, keepdims=True)
    labels = [config.get("id2label", {}).get(str(i), f"LABEL_{i}") for i in range(logits.shape[1])]
    return {
        "labels": [labels[i] for i in logits.argmax(1)],
        "probabilities": [dict(zip(labels, row, strict=True)) for row in probabilities.tolist()],
    }


def is_text(text: object) -> bool:
    """Whether something is a text, or for a classifier a pair of texts."""
    if isinstance(text, list) and len(text) == 2 and classifies:
        return all(isinstance(part, str) for part in text)
    return isinstance(text, str)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a client may send many requests over one connection
    disable_nagle_algorithm = True  # the answer would wait for 40 ms behind its headers

    def do_POST(self) -> None:
        try:
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["texts"]
            understood = isinstance(texts, list) and len(texts) > 0 and all(map(is_text, texts))
        except (KeyError, TypeError, ValueError):
            understood = False
        if understood:
            try:
                answers = classify(texts) if classifies else {"vectors": encode(texts).tolist()}
                status = 200
            except Exception as error:
                status, answers = 500, {"error": f"the model failed: {error}"}
        else:
            status, answers = 400, {"error": 'expected {"texts": ["a text", ...]}'}
        answer = json.dumps(answers).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        """Write nothing per request."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"listening on port {server.server_port}", flush=True)
    server.serve_forever()
