"""Exported models: the folder that sentence-transformers and Optimum read, the same outputs, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import transformers as hf

from snnk.hf import export, find_ffns
from snnk.hf.replace import replace_
from snnk.hf.serve import forms, graphs, quantizing
from snnk.hf.serve import served as served_stages
from snnk.hf.serve.served import loss_of
from snnk.hf.serve.sessions import Session

from helpers import browser
from helpers.architectures import make as make_architecture
from helpers.architectures import perturb_
from helpers.browser import needs_browser
from helpers.compression import check_page
from helpers.heads import make
from helpers.packages import need
from helpers.texts import make_images, make_paired, make_texts, make_tokenizer, save

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32}
# Serves a folder without torch, transformers and snnk: tokenizer.json, the graph, and the pooling in numpy.
SERVE = """
import json, sys
for name in ("torch", "transformers", "snnk", "openvino_telemetry"):
    sys.modules[name] = None  # an import of it fails
import numpy
from tokenizers import Tokenizer
folder, runtime = sys.argv[1:]
tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
found = tokenizer.encode_batch(json.load(sys.stdin))
inputs = {"input_ids": [x.ids for x in found], "attention_mask": [x.attention_mask for x in found]}
inputs = {name: numpy.array(x) for name, x in inputs.items()}
if runtime == "onnx":
    import onnxruntime
    states = onnxruntime.InferenceSession(folder + "/onnx/model.onnx").run(["last_hidden_state"], inputs)[0]
else:
    import openvino
    model = openvino.Core().compile_model(folder + "/openvino/openvino_model.xml", "CPU")
    states = model(inputs)["last_hidden_state"]
mask = inputs["attention_mask"][..., None]
print(json.dumps(((states * mask).sum(1) / mask.sum(1)).tolist()))
"""


# Converts a graph to int8 of OpenVINO and runs it.
CONVERT = """
import sys
from pathlib import Path
import torch
from snnk.hf.serve import graphs, quantizing
graph, folder = map(Path, sys.argv[1:])
path = folder / "openvino_model.xml"
graphs.write_openvino(graph, path)
inputs = [{name: torch.ones(1, n, dtype=torch.long) for name in ("input_ids", "attention_mask")} for n in range(1, 5)]
quantizing.quantize_(path, "openvino", "static", inputs)
assert graphs.open_openvino(path)(inputs[0])["last_hidden_state"].shape == (1, 1, 16)
assert "openvino" in sys.modules and "nncf" in sys.modules
print([name for name in sys.modules if name.startswith("openvino_telemetry")])
"""


def serve(folder, runtime, texts):
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(folder), runtime], input=json.dumps(texts), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return torch.tensor(json.loads(done.stdout))


def sentence_folder(folder):
    """A model of sentence-transformers in the format of snnk: one block has other sizes than its configuration."""
    model = make("BertModel", **SIZES)
    for module in replace_(find_ffns(model)[0], "atoms", 6).modules:
        perturb_(module, seed=3)
    save(model, folder)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    (folder / "plan.json").write_text("{}")
    return model, folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A sentence model, its folder, the texts, and the folder and the report of its export."""
    place = tmp_path_factory.mktemp("exported")
    model, folder = sentence_folder(place / "model")
    (place / "texts.txt").write_text("\n".join(make_texts(300)))
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_stages, "SECONDS", 0.0)
        report = export(folder, place / "texts.txt", to="onnx", out=place / "served", say=said.append)
    return model, folder, place / "texts.txt", place / "served", report, said


@pytest.fixture
def brief(monkeypatch):
    """Latency is measured as briefly as it can be."""
    monkeypatch.setattr(served_stages, "SECONDS", 0.0)


@pytest.fixture
def same_graph(exported, monkeypatch):
    """The graph of `exported` stands for another export of the same model, which takes seconds."""
    graph = exported[3] / "onnx" / "model.onnx"
    monkeypatch.setattr(graphs, "write_onnx", lambda model, batch, path: shutil.copy(graph, path) and None)


def error_in_int8(served, batch, wanted, tmp_path):
    """The squared error of an exported graph's logits after dynamic int8, over their mean square."""
    path = tmp_path / "int8.onnx"
    path.write_bytes((served / "onnx" / "model.onnx").read_bytes())
    quantizing.quantize_(path, "onnx", "dynamic", [])
    assert b"_scale" in path.read_bytes()
    found = graphs.open_onnx(path)(batch)["logits"]
    return float((found - wanted).square().mean() / wanted.square().mean())


def vectors(model, texts):
    batch = make_tokenizer()(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return (states * mask).sum(1) / mask.sum(1)


def test_the_folder_is_what_sentence_transformers_and_optimum_read(exported):
    *_, served, report, said = exported
    files = {str(path.relative_to(served)) for path in served.rglob("*") if path.is_file()}
    assert files == {
        *("onnx/model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json", "modules.json"),
        *("1_Pooling/config.json", "sentence_bert_config.json", "report.json", "report.html", "README.md"),
    }
    graph = onnx.load(served / "onnx" / "model.onnx").graph
    shapes = {x.name: [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim] for x in graph.input}
    assert shapes == {"input_ids": ["batch", "length"], "attention_mask": ["batch", "length"]}
    assert [x.name for x in graph.output] == ["last_hidden_state"]
    config = json.loads((served / "config.json").read_text())
    assert "quantization_config" not in config and config["architectures"] == ["BertModel"]
    assert hf.AutoConfig.from_pretrained(served).model_type == "bert"
    assert json.loads((served / "report.json").read_text()) == report
    assert 0 <= report["difference"] <= report["tolerance"] == 1e-4
    assert [found["inputs"] for found in report["latency"]] == ["1 x 32 tokens", "32 x 32 tokens"]
    assert all(set(found["runs"]) == {"pytorch", "onnx"} for found in report["latency"])
    assert report["stages"][1]["loss"] < 1e-5 and "differs from PyTorch by" in " ".join(said)
    check_page((served / "report.html").read_text())
    assert 'SentenceTransformer("this folder", backend="onnx")' in (served / "README.md").read_text()


@needs_browser
@pytest.mark.parametrize(("width", "dark"), browser.SCREENS)
def test_the_page_in_a_browser(exported, width, dark):
    found = browser.check_page(exported[3] / "report.html", width, dark=dark)
    assert "From PyTorch to what is served" in found.text and "loss; the dashed line is 1" in found.text
    assert "\nlatency\nThe time for one batch." in found.text and "\nkeep\n" not in found.text


@pytest.mark.parametrize("texts", [["w1"], ["w1 w2 w3", "w4 " * 30, "w7 w8"]])
def test_a_process_without_torch_and_snnk_returns_the_same_vectors(exported, texts):
    model, *_, served, _, _ = exported
    assert torch.allclose(serve(served, "onnx", texts), vectors(model, texts), atol=1e-5)


def test_openvino_and_nncf_report_nothing(exported, tmp_path):
    need("openvino_telemetry", "nncf")
    _, _, _, served, _, _ = exported
    home = tmp_path / "home"
    home.mkdir()
    there = {name: value for name, value in os.environ.items() if name != "CI"}  # in CI they do not ask
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(served / "onnx" / "model.onnx"), str(tmp_path)],
        env=there | {"HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert not (home / "intel").exists()


def test_no_file_names_a_place_on_this_machine(exported):
    _, folder, _, served, _, _ = exported
    for path in served.rglob("*"):
        if path.is_file():
            found = path.read_bytes()
            assert str(folder.parent).encode() not in found, path
            assert os.path.dirname(torch.__file__).encode() not in found and b"graphs.py" not in found, path


def test_int8_of_both_formats(exported, tmp_path):
    """Static and dynamic int8 of ONNX, and static int8 of OpenVINO, of one graph; each is near it."""
    need("openvino", "nncf")
    _, _, _, served, _, _ = exported
    inputs = [dict(make_tokenizer()([text], return_tensors="pt")) for text in make_texts(40)]
    batch = dict(make_tokenizer()(make_texts(60, seed=5), padding=True, return_tensors="pt"))
    exact = graphs.open_onnx(served / "onnx" / "model.onnx")(batch)["last_hidden_state"]
    for to, mode in (("onnx", "static"), ("onnx", "dynamic"), ("openvino", "static")):
        path = tmp_path / to / mode / graphs.FILES[to]
        path.parent.mkdir(parents=True)
        if to == "onnx":
            path.write_bytes((served / "onnx" / "model.onnx").read_bytes())
        else:
            graphs.write_openvino(served / "onnx" / "model.onnx", path)
            found = graphs.open_openvino(path, precision="f32")(batch)["last_hidden_state"]
            assert torch.allclose(found, exact, atol=1e-5)
        quantizing.quantize_(path, to, mode, inputs)
        assert (b"FakeQuantize" if to == "openvino" else b"_scale") in path.read_bytes()
        found = graphs.open_graph(path, to)(batch)["last_hidden_state"]
        error = float((found - exact).square().mean() / exact.square().mean())
        assert 1e-7 < error < 0.08, (to, mode, error)  # 7 bits have twice the error of 8, four times when squared
        files = {"onnx": [".onnx"], "openvino": [".bin", ".xml"]}[to]
        assert sorted(file.suffix for file in path.parent.iterdir()) == files


@pytest.mark.parametrize(("found", "most"), [("AVX2", 64), ("AVX2, AVX-512, VNNI", 127), ("unknown", 127)])
def test_weights_have_seven_bits_without_vnni(exported, tmp_path, monkeypatch, found, most):
    monkeypatch.setattr(quantizing, "instructions", lambda: found)
    path = tmp_path / "model.onnx"
    path.write_bytes((exported[3] / "onnx" / "model.onnx").read_bytes())
    quantizing.quantize_(path, "onnx", "dynamic", [])
    tensors = [onnx.numpy_helper.to_array(x) for x in onnx.load(path).graph.initializer]
    assert max(abs(x.astype(int)).max() for x in tensors if x.dtype == "int8" and x.ndim == 2) == most
    assert ("7 bits" if most == 64 else "may be larger") in quantizing.on_others("onnx")


def test_static_int8_for_openvino_from_the_command(exported, tmp_path, run, brief, same_graph):
    need("nncf")
    model, folder, texts, *_ = exported
    out = tmp_path / "served"
    args = ("--to", "openvino-int8", "--calibration", texts, "--out", out, "--hide-texts")
    code, printed, err = run("export", folder, *args)
    assert code == 0, err
    assert "openvino int8 static" in printed and "openvino/openvino_model.xml" in printed
    report = json.loads((out / "report.json").read_text())
    sizes = [stage["bytes"] for stage in report["stages"]]
    assert [stage["name"] for stage in report["stages"]] == ["pytorch", "openvino", "openvino int8 static"]
    assert 0 <= report["stages"][1]["loss"] <= report["stages"][2]["loss"] < 0.05 and min(sizes) > 0
    assert {path.name for path in (out / "openvino").iterdir()} == {"openvino_model.xml", "openvino_model.bin"}
    some = make_texts(5, seed=9)
    assert torch.cosine_similarity(serve(out, "openvino", some), vectors(model, some)).min() > 0.95
    assert report["held_out"][0]["worst"] == []


def test_a_loss_above_the_limit_leaves_nothing(exported, tmp_path, same_graph):
    _, folder, texts, *_ = exported
    options = {"to": "onnx-int8", "max_loss": 1e-9, "out": tmp_path / "out"}
    with pytest.raises(ValueError, match=r"loses \S+ against PyTorch \(1 - mean cosine\), more than max_loss 1e-09"):
        export(folder, texts, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_differs_from_pytorch_is_refused(exported, tmp_path):
    model, *_, served, _, _ = exported
    batch = dict(make_tokenizer()(["w1 w2"], return_tensors="pt"))
    session = graphs.open_onnx(served / "onnx" / "model.onnx")
    assert graphs.check_same(model, session, [batch]) < 1e-5
    wrong = 1.001 * session(batch)["last_hidden_state"]
    with pytest.raises(ValueError, match=r"the exported graph differs from PyTorch by 1\.0e-03 of the largest output"):
        graphs.check_same(model, replace(session, run=lambda given, names: [wrong]), [batch])
    with pytest.raises(ValueError, match=r"returns last_hidden_state of shape \(1, 2, 16\) where PyTorch returns"):
        graphs.check_same(model, replace(session, run=lambda given, names: [wrong[:, :2]]), [batch])


class Branching(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *args, **options):
        return self.layer(x, *args, **options) if float(x.sum()) > 0 else x


def test_a_model_that_cannot_be_exported_names_the_module(tmp_path):
    model = make("BertModel", **SIZES)
    model.encoder.layer[0].intermediate = Branching(model.encoder.layer[0].intermediate)
    batch = dict(make_tokenizer()(["w1 w2"], return_tensors="pt"))
    with pytest.raises(ValueError, match=r"BertModel cannot be exported: in encoder\.layer\.0\.intermediate \(Branch"):
        graphs.write_onnx(model, batch, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(bert, texts, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="unknown form 'onix'; did you mean 'onnx'"):
        export(bert, texts, to="onix", out=out)
    with pytest.raises(ValueError, match="unknown form 'openvino-int8-dynamic'; did you mean 'openvino-int8'"):
        export(bert, texts, to="openvino-int8-dynamic", out=out)
    with pytest.raises(FileExistsError, match="exists already; choose another name"):
        export(bert, texts, to="onnx", out=bert)
    with pytest.raises(FileNotFoundError, match="no calibration file or folder"):
        export(bert, tmp_path / "none.txt", to="onnx", out=out)
    (tmp_path / "few.txt").write_text("\n".join(make_texts(20)))
    with pytest.raises(ValueError, match=r"got \d+ texts, and at least 32 are needed .*--to onnx-int8\)"):
        export(bert, tmp_path / "few.txt", to="onnx-int8-static", out=out)
    assert not out.exists()


def test_an_export_is_no_model_to_export(exported, tmp_path):
    *_, texts, served, _, _ = exported
    with pytest.raises(ValueError, match="it is an export to onnx: name the folder that it was made from"):
        export(served, texts, to="onnx", out=tmp_path / "out")


def test_a_missing_package_names_the_extra(monkeypatch, bert, texts, tmp_path):
    monkeypatch.setattr(forms, "find_spec", lambda name: None if name == "nncf" else name)
    with pytest.raises(ImportError, match=r"needs nncf; install the extra serve: pip install 'snnk\[serve\]'"):
        export(bert, texts, to="openvino-int8", out=tmp_path / "out")


def test_the_loss_of_each_kind_of_output():
    assert loss_of({"cosine": 0.9, "worst cosine": 0.1}) == pytest.approx(0.1)
    assert loss_of({"cosine": 0.5, "KL divergence": 1.0, "same best": 0.75}) == 0.25
    assert loss_of({"start: Spearman": 0.9, "end: Spearman": 0.8}) == pytest.approx(0.2)
    assert loss_of({"original perplexity": 2.0, "perplexity": 2.0 * torch.e}) == pytest.approx(1.0)
    assert loss_of({"original perplexity": 2.0, "perplexity": 1.0}) == 0.0


def test_outputs_that_are_not_finite_are_no_small_loss():
    nan = float("nan")
    assert loss_of({"original perplexity": 5.0, "perplexity": nan}) == float("inf")
    assert loss_of({"start: Spearman": 0.99, "end: Spearman": nan}) == float("inf")
    model, batch = make("BertModel").eval(), {"input_ids": torch.ones(1, 4, dtype=torch.long)}

    def run(given, names):
        return [torch.full((1, 4, model.config.hidden_size), nan) for _ in names]

    session = Session(("input_ids",), ("last_hidden_state",), run, {})
    with pytest.raises(ValueError, match="differs from PyTorch by nan"):
        graphs.check_same(model, session, [batch])


def test_a_model_with_a_decoder_behind_its_encoder_is_refused_with_advice(tmp_path, run):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 43}
    folder = save(hf.T5ForConditionalGeneration(hf.T5Config(**sizes)), tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(60)))
    code, _, err = run(
        "export", folder, "--calibration", tmp_path / "texts.txt", "--to", "onnx", "--out", tmp_path / "out"
    )
    assert code == 2 and "T5ForConditionalGeneration" in err and not (tmp_path / "out").exists()
    assert "export its encoder" in err


def test_a_reranker_returns_the_scores_of_the_cross_encoder(tmp_path, brief):
    """The cross-encoder is that of sentence-transformers; nothing was calibrated with the pairs."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = make("BertForSequenceClassification", num_labels=1, type_vocab_size=2, **SIZES)
    perturb_(model)
    folder = save(model, tmp_path / "model", make_paired())
    pairs = list(zip(make_texts(80), make_texts(80, seed=1), strict=True))
    rows = "".join(f"{a},{b}\n" for a, b in pairs)
    (tmp_path / "pairs.csv").write_text(f"query,passage\n{rows}")
    report = export(
        folder, tmp_path / "pairs.csv", text="query", text_pair="passage", to="onnx", out=tmp_path / "served"
    )
    assert report["inputs"] == ["input_ids", "attention_mask", "token_type_ids"] and report["outputs"] == ["logits"]
    assert report["stages"][1]["loss"] < 1e-6 and "Spearman" in report["held_out"][0]["figures"]
    assert any("agreement is measured on 8 held-out pairs" in warning for warning in report["warnings"])
    others = list(zip(make_texts(9, seed=2), make_texts(9, seed=3), strict=True))
    cross = sentence_transformers.CrossEncoder(str(folder), num_labels=1, device="cpu")
    wanted = cross.predict(others, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
    batch = make_paired()(*map(list, zip(*others, strict=True)), padding=True, return_tensors="pt")
    found = graphs.open_onnx(tmp_path / "served" / "onnx" / "model.onnx")(batch)["logits"][:, 0]
    assert torch.allclose(found, wanted, atol=1e-5) and wanted.std() > 1e-3
    assert 1e-9 < error_in_int8(tmp_path / "served", batch, wanted[:, None], tmp_path) < 0.05
    assert "ORTModelForSequenceClassification" in (tmp_path / "served" / "README.md").read_text()


def test_a_classifier_that_always_predicts_one_class_is_warned_of(tmp_path, brief):
    model = make("BertForSequenceClassification", num_labels=2, **SIZES)
    model.config.id2label = {0: "no", 1: "yes"}
    with torch.no_grad():
        model.classifier.bias += torch.tensor([9.0, 0.0])
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(60)))
    report = export(save(model, tmp_path / "model"), tmp_path / "texts.txt", to="onnx", out=tmp_path / "served")
    assert any("predicts 'no' for 6 of 6 held-out inputs" in warning for warning in report["warnings"])


def test_images_of_any_number(tmp_path, brief):
    images = make_images(tmp_path / "images", 20)
    model = make_architecture("dinov2", hf.Dinov2ForImageClassification, num_labels=3)
    processor = hf.ViTImageProcessor(size={"height": 8, "width": 8})
    folder = save(model, tmp_path / "model", processor)
    report = export(folder, images, to="onnx", out=tmp_path / "served", max_loss=0.0)
    assert report["inputs"] == ["pixel_values"] and report["calibration"]["kind"] == "images"
    session = graphs.open_onnx(tmp_path / "served" / "onnx" / "model.onnx")
    for count in (1, 5):
        pixels = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            wanted = model(pixel_values=pixels).logits
        assert torch.allclose(session({"pixel_values": pixels})["logits"], wanted, atol=1e-5)
    assert 1e-9 < error_in_int8(tmp_path / "served", {"pixel_values": pixels}, wanted, tmp_path) < 0.05
    assert (tmp_path / "served" / "preprocessor_config.json").is_file()


def generate(session, ids, count):
    """Greedy tokens by the cache of a graph."""
    left = {"input_ids": ids, **session.empty(len(ids))}
    for _ in range(count):
        new = left["input_ids"].shape[1]
        left["attention_mask"] = torch.ones_like(ids)
        left["position_ids"] = torch.arange(ids.shape[1] - new, ids.shape[1]).expand(len(ids), -1).contiguous()
        found = session(left)
        best = found["logits"][:, -1].argmax(1, keepdim=True)
        ids = torch.cat([ids, best], 1)
        left = {"input_ids": best} | {name: found[name.replace("past_key_values", "present")] for name in session.sizes}
    return ids


def test_a_decoder_has_a_cache(tmp_path, brief, run):
    model = make_architecture("llama", hf.LlamaForCausalLM, vocab_size=43, num_hidden_layers=1).to(torch.bfloat16)
    folder = save(model, tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(60)))
    args = ("--to", "onnx", "--calibration", tmp_path / "texts.txt", "--out", tmp_path / "served", "--max-length", 20)
    code, out, err = run("export", folder, *args)
    assert code == 0, err
    assert "The graph has a cache of keys and values" in out and "perplexity" in out
    batch = make_tokenizer()(["w1 w2 w3", "w4 w5 w6 w7 w8"], padding=True, return_tensors="pt")
    session = graphs.open_onnx(tmp_path / "served" / "onnx" / "model.onnx")
    with torch.no_grad():
        wanted = model.float()(batch["input_ids"], batch["attention_mask"]).logits
    found = session(batch)
    mask = batch["attention_mask"].bool()
    assert list(found) == ["logits"] and torch.allclose(found["logits"][mask], wanted[mask], atol=1e-4)
    ids, row = batch["input_ids"][1:], {name: x[1:] for name, x in batch.items()}
    assert 1e-9 < error_in_int8(tmp_path / "served", row, wanted[1:], tmp_path) < 0.05
    expected = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert generate(session, ids, 6).tolist() == expected.tolist()
    report = json.loads((tmp_path / "served" / "report.json").read_text())
    assert report["stages"][0]["bytes"] == sum(p.nbytes for p in model.parameters()) // 2  # stored in bfloat16
    assert any("are in bfloat16" in warning for warning in report["warnings"])
    card = (tmp_path / "served" / "README.md").read_text()
    assert report["cache"] and "use_cache" not in card and "position_ids, past_key_values.*, outputs logits" in card


@pytest.mark.parametrize(
    ("name", "model_class", "positions", "options"),
    [
        ("gpt2", hf.GPT2LMHeadModel, True, {"n_layer": 1}),
        ("bloom", hf.BloomForCausalLM, False, {"n_layer": 1}),
        ("opt", hf.OPTForCausalLM, False, {"num_hidden_layers": 1}),
        ("gemma2", hf.Gemma2ForCausalLM, True, {"sliding_window": 9}),  # in every other layer
    ],
)
def test_caches_of_other_decoders(tmp_path, name, model_class, positions, options):
    """Positions are an input where the model takes them from 0 on, and sliding windows are as in PyTorch."""
    model = make_architecture(name, model_class, vocab_size=43, **options).eval()
    batch = {"input_ids": torch.randint(2, 43, (2, 14), generator=torch.Generator().manual_seed(0))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    padded = {**batch, "attention_mask": (torch.arange(14) < torch.tensor([[9], [14]])).long()}
    session = graphs.open_onnx(graphs.write_graph(model, batch, tmp_path, "onnx")[0])
    assert len(session.sizes) == 2 * model.config.num_hidden_layers
    assert ("position_ids" in session.inputs) == positions
    assert graphs.check_same(model, session, [batch, padded]) < 1e-5


def test_a_decoder_without_a_usual_cache_is_exported_without(tmp_path, monkeypatch, brief):
    monkeypatch.setattr(graphs, "example_cache", lambda *args: 1 / 0)
    model = make_architecture("llama", hf.LlamaForCausalLM, vocab_size=43, num_hidden_layers=1)
    folder = save(model, tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(60)))
    report = export(folder, tmp_path / "texts.txt", to="onnx", out=tmp_path / "served", max_length=20)
    card = (tmp_path / "served" / "README.md").read_text()
    assert not report["cache"] and "use_cache=False" in card and "The graph has no cache of keys and values" in card
    assert report["no_cache"] == "division by zero" and "The reason: division by zero." in card


def test_compress_ends_in_what_is_served(shallow, texts, tmp_path, quick, run, monkeypatch):
    """A graph that loses too much leaves the checkpoint alone, from which a command with another limit goes on."""
    out = tmp_path / "small"
    args = ("compress", shallow, "--calibration", texts, "--keep", 0.5, "--recover", 0, "--equal", "--out", out)
    code, _, err = run(*args, "--to", "tflite")
    assert code == 2 and "unknown form 'tflite'. Known: openvino-int8, onnx-int8, openvino, onnx" in err
    (tmp_path / "few.txt").write_text("\n".join(make_texts(20)))
    few = ("compress", shallow, "--calibration", tmp_path / "few.txt", "--out", out, "--to", "openvino-int8")
    if find_spec("nncf") is not None:
        code, printed, err = run(*few)
        assert code == 2 and "at least 32 are needed" in err and "fitt" not in printed
        assert "dynamic int8 of ONNX (--to onnx-int8)" in err
        code, printed, err = run(*few, "--target-speedup", 1.3)
        assert code == 2 and "at least 32 are needed" in err and "measuring" not in printed
    write = graphs.write_onnx

    def once(model, batch, path):
        made = tmp_path / f"{model.num_parameters()}.onnx"
        if not made.exists():
            write(model, batch, made)
        path.write_bytes(made.read_bytes())

    monkeypatch.setattr(graphs, "write_onnx", once)
    code, _, err = run(*args, "--to", "onnx-int8", "--max-loss", 0)
    assert code == 2 and "more than max_loss 0.0: nothing was written" in err and not out.exists()
    code, printed, err = run(*args, "--to", "onnx-int8", "--max-loss", 0.2)
    assert code == 0, err
    assert "going on from" in printed and "onnx int8 dynamic" in printed
    report = json.loads((out / "report.json").read_text())
    names = ["original", "compressed", "onnx", "onnx int8 dynamic"]
    assert [stage["name"] for stage in report["served"]["stages"]] == names
    assert all(list(found["runs"]) == names for found in report["served"]["latency"])
    losses = [stage["loss"] for stage in report["served"]["stages"][1:]]
    assert losses[0] == pytest.approx(1 - report["agreement"]["cosine"], abs=1e-6)
    assert losses[1] == pytest.approx(losses[0], abs=1e-4) and abs(losses[2] - losses[0]) < 0.2
    assert (out / "model.safetensors").is_file() and (out / "onnx" / "model.onnx").is_file()
    page = check_page((out / "report.html").read_text())
    assert "From the original to what is served" in page.texts
    assert re.search(r"ms of \w+ time, \d+ threads?, 32 x 32 tokens", " ".join(page.texts))
    assert "ORTModelForFeatureExtraction" in (out / "README.md").read_text()
