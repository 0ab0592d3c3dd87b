import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from snnk import hf
from snnk.hf.calibration import load_calibration
from snnk.hf.compression.figures import shown
from snnk.hf.general import fragments

from helpers.compression import TINY, check_page, made_up_timings, work_of
from helpers.heads import make
from helpers.texts import make_english, make_images, make_texts, make_tokenizer, save

pytestmark = pytest.mark.usefixtures("quick")
NUMBERS = {"Spearman": "same order (Spearman)", "relative squared error": "squared error over variance"}


def outputs(model, batches):
    with torch.no_grad():
        return torch.cat([model.eval()(**batch)[0].flatten() for batch in batches])


def refused(result, message):
    code, _, err = result
    return code == 2 and err.count("\n") == 1 and err.startswith("snnk: ") and message in err


def test_the_folder_loads_and_equals_the_model_in_memory(run, bert, texts, tmp_path):
    (bert / "README.md").write_text("---\nlicense: mit\n---\n# Old card\n")
    (bert / "notes.md").write_text("kept")
    (bert / "pytorch_model.bin").write_text("weights of another kind")
    (bert / "onnx").mkdir()
    (bert / "onnx" / "model.onnx").write_text("weights of another kind")
    options = ["--no-widen", "--keep", 0.5, "--refine", 2, "--recover", 0, "--out", tmp_path / "a" / "out"]
    code, out, err = run("compress", bert, "--calibration", texts, *options)
    assert code == 0 and err == "" and "encoder.layer.1" in out and "held-out error" in out and "stored MB" in out
    assert "12 texts of texts.txt" in out and "cosine, worst of 12" in out and "--hide-texts leaves them out" in out
    folder = tmp_path / "a" / "out"
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"out"}
    names = {path.name for path in folder.rglob("*")}
    assert {"plan.json", "report.json", "report.html", "README.md", "tokenizer.json", "notes.md"} <= names
    assert not {"pytorch_model.bin", "model.onnx"} & names

    model = transformers.BertModel.from_pretrained(bert)
    batches = load_calibration(texts, make_tokenizer(), held_out=500)
    plan = hf.plan(model, keep=0.5, batches=batches)
    done = hf.compress_(model, plan, batches, refine=2)
    loaded = transformers.AutoModel.from_pretrained(folder)
    assert torch.equal(outputs(loaded, batches), outputs(model, batches))
    assert hf.Plan.load(folder / "plan.json") == plan
    report = json.loads((folder / "report.json").read_text())
    assert [block["error"] for block in report["report"]["blocks"]] == [block.error for block in done.blocks]
    assert report["settings"]["keep"] == 0.5
    assert report["calibration"] == {
        "file": "texts.txt",
        "kind": "texts",
        "count": 108,
        "column": None,
        "general_texts": 0,
    }
    assert report["bytes"]["compressed"] < report["bytes"]["original"] and report["latency"]["rounds"] >= 3
    assert {"snnk", "torch", "transformers"} <= set(report["versions"]) and report["seed"] == 0
    page = " ".join(check_page((folder / "report.html").read_text()).texts)
    assert "bert, compressed" in page
    card = (folder / "README.md").read_text()
    assert 'base_model: "bert"' in card and "license: mit" in card
    assert "Old card" in (folder / "README.original.md").read_text()

    before = (folder / "report.json").read_bytes()
    assert refused(run("compress", bert, "--calibration", texts, "--out", folder), "exists already")
    assert (folder / "report.json").read_bytes() == before
    again = tmp_path / "again"
    assert run("compress", bert, "--calibration", texts, "--plan", folder / "plan.json", "--out", again)[0] == 0
    assert (again / "plan.json").read_bytes() == (folder / "plan.json").read_bytes()

    code, out, _ = run("audit", folder, "--original", bert)
    assert code == 0 and "stored bytes" in out and "atoms" in out
    code, out, _ = run("audit", folder, "--original", bert, "--json")
    assert code == 0 and json.loads(out)["ratios"]["stored_bytes"] < 1
    assert refused(run("audit", tmp_path / "none"), "is no folder")


def test_a_head_is_kept_and_options_reach_the_plan(run, texts, tmp_path):
    model = make("BertForSequenceClassification", num_labels=3)
    folder, out = save(model, tmp_path / "head"), tmp_path / "out"
    options = ["--layers", "1", "--blocks", "ffn", "--feature-map", "random-relu", "--keep", 0.8, "--recover", 2]
    code, text, _ = run("compress", folder, "--calibration", texts, *options, "--out", out)
    assert code == 0 and "same prediction" in text and "KL divergence, worst of 12" in text
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    assert next(ffn.kind for ffn in hf.find_ffns(loaded)) == "dense"
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)
    report = json.loads((out / "report.json").read_text())
    assert report["model_class"] == "BertForSequenceClassification" and report["blocks_in_all"] == 4
    assert [block["kind"] for block in report["plan"]["blocks"]] == ["random-relu"]


@pytest.mark.parametrize(
    ("name", "options", "compared", "figures"),
    [
        (
            "BertForQuestionAnswering",
            {},
            "start_logits and end_logits",
            {"start: Kendall": "start: same order (Kendall)", "end: Spearman": "end: same order (Spearman)"},
        ),
        ("ElectraForPreTraining", {"embedding_size": 8}, "logits", NUMBERS),
        ("BertForSequenceClassification", {"num_labels": 1}, "logits", NUMBERS),
        ("BertForMultipleChoice", {}, "logits", NUMBERS),
    ],
)
def test_heads_of_every_kind(run, texts, tmp_path, name, options, compared, figures):
    folder = save(make(name, **options), tmp_path / "model")
    code, out, err = run(
        "compress", folder, "--calibration", texts, "--refine", 0, "--recover", 2, "--out", tmp_path / "out"
    )
    assert code == 0 and all(name in out for name in figures.values()), err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(figures) <= set(report["agreement"]) and report["compared"] == compared
    page = " ".join(check_page((tmp_path / "out" / "report.html").read_text()).texts)
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (page, card):
        for figure, name in figures.items():
            assert name in text and shown(report["agreement"][figure]) in text
        assert compared in text and "cosine" not in text


@pytest.mark.parametrize(("labels", "figure"), [(1, "Kendall"), (2, "same best")])
def test_models_of_pairs(run, tmp_path, labels, figure):
    """A cross-encoder and a classifier of pairs are calibrated and measured on pairs."""
    pairs = list(zip(make_texts(120), make_texts(120, seed=1), strict=True))
    (tmp_path / "pairs.csv").write_text("query,passage\n" + "".join(f"{one},{two}\n" for one, two in pairs))
    folder = save(make("BertForSequenceClassification", num_labels=labels), tmp_path / "model")
    options = ["--calibration", tmp_path / "pairs.csv", "--refine", 0, "--recover", 2, "--keep", 0.5]
    args = ["compress", folder, *options, "--out", tmp_path / "out"]
    code, out, err = run(*args, "--text", "query", "--text-pair", "passage")
    assert code == 0 and "108 pairs of pairs.csv, column 'query,passage'; held out: 12" in out, err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["calibration"]["kind"] == "pairs" and report["calibration"]["column"] == "query,passage"
    (held,) = report["held_out"]
    assert held["kind"] == "pairs" and held["inputs"] == 12 and figure in held["figures"]
    shown = {" / ".join(pair) for pair in pairs}
    assert len(held["worst"]) == 10 and all(case["text"] in shown for case in held["worst"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert held["worst"][0]["text"] in page and "unlabelled pairs (pairs.csv, column query,passage)" in page
    assert refused(
        run(*args[:-1], tmp_path / "no", "--text", "query", "--text-pair", "answer"), "its columns are query, passage"
    )
    assert not (tmp_path / "no").exists()


def test_a_model_in_float16(run, texts, tmp_path):
    folder = save(make("BertModel").half(), tmp_path / "half")
    options = ["--refine", 2, "--recover", 20, "--keep", 0.5]
    assert run("compress", folder, "--calibration", texts, *options, "--out", tmp_path / "out")[0] == 0
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float16
    assert json.loads((tmp_path / "out" / "report.json").read_text())["agreement"]["worst cosine"] > 0.99


def test_outputs_that_are_not_finite_are_reported_before_and_after_the_work(run, bert, texts, tmp_path, monkeypatch):
    model = transformers.BertModel.from_pretrained(bert)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.fill_(3e38)  # sums of which overflow
    model.save_pretrained(tmp_path / "broken")
    make_tokenizer().save_pretrained(tmp_path / "broken")
    started = []
    compress_, out = hf.compress_, ["--refine", 0, "--out", tmp_path / "out"]
    monkeypatch.setattr("snnk.hf.compression.pipeline.compress_", lambda *args, **kwargs: started.append(1))
    assert refused(run("compress", tmp_path / "broken", "--calibration", texts, *out), "outputs are not finite")
    assert not started

    def compress(*args, **kwargs):
        done = compress_(*args, **kwargs)
        done.agreement["cosine"] = float("nan")
        return done

    monkeypatch.setattr("snnk.hf.compression.pipeline.compress_", compress)
    assert refused(run("compress", bert, "--calibration", texts, *out), "outputs are not finite: cosine nan")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_its_tokenizer(run, texts, tmp_path):
    def compress(folder):
        return run("compress", folder, "--calibration", texts, "--out", tmp_path / "out")

    transformers.BertModel(transformers.BertConfig(**{**TINY, "vocab_size": 500})).save_pretrained(tmp_path / "bert")
    assert refused(compress(tmp_path / "bert"), "has 5 tokens and the model 500")
    transformers.LlamaModel(transformers.LlamaConfig(**TINY)).save_pretrained(tmp_path / "llama")
    assert refused(compress(tmp_path / "llama"), "has no tokenizer that can be loaded")
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(tmp_path / "tiny")
    assert refused(compress(tmp_path / "tiny"), "100% of the tokens")


def test_other_models_in_the_folder_stay_there(run, bert, texts, tmp_path):
    for name in ("checkpoint-500", "runs/checkpoint-7", "teacher", "parts/student"):
        (bert / name).mkdir(parents=True)
        (bert / name / "config.json").write_text("{}")
        (bert / name / ("trainer_state.json" if "checkpoint" in name else "model.safetensors")).write_text("x")
    for name in ("2_Dense", "notes/config.json", "runs/log.txt"):
        (bert / name).parent.mkdir(exist_ok=True)
        (bert / name).write_text("kept") if "." in name else (bert / name).mkdir()
    for name in ("config.json", "model.safetensors"):
        (bert / "2_Dense" / name).write_text("kept")
    (bert / "modules.json").write_text(
        json.dumps([{"idx": 1, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}])
    )
    assert run("compress", bert, "--calibration", texts, "--refine", 0, "--out", tmp_path / "out")[0] == 0
    folders = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_dir()}
    assert folders == {"2_Dense", "notes", "runs"}
    assert (tmp_path / "out/2_Dense/model.safetensors").is_file() and (tmp_path / "out/runs/log.txt").is_file()
    (bert / "adapter_config.json").write_text("{}")
    result = run("compress", bert, "--calibration", texts, "--out", tmp_path / "again")
    assert refused(result, "holds an adapter")


def test_what_a_killed_run_left_is_removed(run, bert, texts, tmp_path):
    left, other = (tmp_path / f".{name}.{'0' * 32}.tmp" for name in ("out", "other"))
    for path in (left, other):
        path.mkdir()
        (path / "model.safetensors").write_text("half")
    code, out, _ = run("compress", bert, "--calibration", texts, "--refine", 0, "--out", tmp_path / "out")
    assert code == 0 and str(left) in out
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == [other]


def test_a_decoder_whose_tokenizer_has_no_padding(run, texts, tmp_path):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_inner=32, n_layer=1, n_head=2, vocab_size=43, n_positions=32)
    )
    folder = save(model, tmp_path / "gpt2", make_tokenizer(eos_token="[CLS]"))
    code, out, _ = run("compress", folder, "--calibration", texts, "--equal", "--out", tmp_path / "out")
    assert code == 0 and "perplexity before" in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "perplexity before" in page and "same next token" in page
    settings = json.loads((tmp_path / "out" / "report.json").read_text())["settings"]
    assert settings["refine"] == 0 and settings["recover"] == "auto"
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == (folder / "tokenizer_config.json").read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert hf.find_ffns(loaded)[0].width == 10 and loaded.lm_head.weight is loaded.transformer.wte.weight


def test_joint_and_refused_blocks(run, bert, texts, tmp_path):
    options = ["--joint", "--keep", 0.5, "--max-error", 1e-9, "--refine", 0]
    code, out, _ = run("compress", bert, "--calibration", texts, *options, "--out", tmp_path / "out")
    assert code == 0 and "refused" in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["timing"] is None
    assert any(block["predicted_error"] for block in report["plan"]["blocks"])
    assert report["bytes"]["original"] == report["bytes"]["compressed"]


def test_sizes_for_a_form_come_from_times_of_this_form(run, shallow, texts, tmp_path, monkeypatch):
    for name in ("onnxruntime", "onnxscript"):
        pytest.importorskip(name)
    asked = []

    def measured(model, blocks, **options):
        asked.append(options["runtime"])
        return replace(made_up_timings(model), runtime=options["runtime"])

    def compare(models, **options):
        asked.append(options["runtime"])
        return [1e-9 * work_of(model) for model in models]

    monkeypatch.setattr("snnk.hf.compression.planning.measure_times", measured)
    monkeypatch.setattr("snnk.hf.compression.pipeline.compare", compare)
    options = "--target-speedup", 1.3, "--refine", 0, "--recover", 0, "--out", tmp_path / "out"
    command = "compress", shallow, "--calibration", texts, *options, "--to", "onnx-int8", "--max-loss"
    code, _, err = run(*command, 0)
    assert code == 2 and "the same command with another --max-loss goes on from here" in err
    code, out, err = run(*command, 1)
    assert code == 0 and "going on from" in out and asked == ["onnx-int8"] * 3, err  # the second run has the times
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["timing"]["runtime"] == "onnx-int8"
    assert report["served"]["stages"][-1]["name"] == "onnx int8 dynamic"


@pytest.mark.parametrize("target", [["--target-speedup", 1.3], ["--target-latency", "0.9us"]])
def test_a_latency_is_predicted_and_measured(run, bert, texts, tmp_path, monkeypatch, target):
    asked = []

    def measured(model, blocks, **options):
        asked.append(options)
        return replace(made_up_timings(model), tokens=options["tokens"])

    monkeypatch.setattr("snnk.hf.compression.planning.measure_times", measured)
    monkeypatch.setattr("snnk.hf.compression.pipeline.compare", lambda models, **_: [1e-9 * work_of(m) for m in models])
    folder = tmp_path / "out"
    options = [*target, "--tokens", "2x6", "--refine", 0, "--recover", 0, "--out", folder]
    code, out, err = run("compress", bert, "--calibration", texts, *options)
    assert code == 0 and len(asked) == 1, err  # once for both plans
    assert (asked[0]["kind"], asked[0]["tokens"], asked[0]["runtime"]) == ("atoms", (2, 6), "torch")
    timing = json.loads((folder / "report.json").read_text())["timing"]
    wanted = timing["original_seconds"] / 1.3 if target[1] == 1.3 else 0.9e-6
    assert timing["tokens"] == [2, 6] and timing["predicted_seconds"] <= wanted + 1e-12
    assert timing["compressed_seconds"] == pytest.approx(timing["predicted_seconds"])
    assert hf.Plan.load(folder / "plan.json").predicted_seconds == timing["predicted_seconds"]
    assert "ms for 2 x 6 tokens with torch, predicted 0.00" in " ".join(out.split())
    for name in ("report.html", "README.md"):
        assert "for 2 x 6 tokens with torch; predicted 0.00 ms" in (folder / name).read_text()


def test_a_latency_that_is_missed_is_warned_of(run, bert, texts, tmp_path, monkeypatch):
    """Refused blocks stay as they are in the prediction, too; a machine that is slower in the end is named."""
    busy = {"threads": 2, "waited": 0.4}
    monkeypatch.setattr(
        "snnk.hf.compression.planning.measure_times", lambda model, *_, **__: replace(made_up_timings(model), **busy)
    )
    monkeypatch.setattr("snnk.hf.compression.pipeline.compare", lambda models, **_: [1e-9 * work_of(models[0]), 0.002])
    options = [
        "--target-speedup",
        1.3,
        "--max-error",
        1e-9,
        "--refine",
        0,
        "--tokens",
        "1x99",
        "--out",
        tmp_path / "out",
    ]
    code, *_ = run("compress", bert, "--calibration", texts, *options)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    original = 1e-9 * work_of(transformers.BertModel.from_pretrained(bert))
    assert code == 0 and report["timing"]["predicted_seconds"] == pytest.approx(original)
    assert "the latency is 2.00 ms, and 0.00 ms were predicted" in " ".join(report["warnings"])
    assert "the process waited for 40 % of the time" in " ".join(report["warnings"])
    assert "for texts of 32 tokens, the most that the model has" in " ".join(report["warnings"])


def test_images(run, tmp_path):
    torch.manual_seed(0)
    sizes = {key: value for key, value in TINY.items() if key not in ("vocab_size", "max_position_embeddings")}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4)).eval()
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    folder, images = save(model, tmp_path / "vit", processor), make_images(tmp_path / "images", 20)
    code, out, _ = run("compress", folder, "--calibration", images, "--out", tmp_path / "out")
    assert code == 0 and "18 images of images; held out: 2" in out
    assert (tmp_path / "out" / "preprocessor_config.json").exists()
    loaded, batches = transformers.AutoModel.from_pretrained(tmp_path / "out"), load_calibration(images, processor)
    assert outputs(loaded, batches).isfinite().all() and hf.find_ffns(loaded)[0].width == 8


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_sentence_transformers_folders_are_kept(run, bert, texts, tmp_path, inner):
    folder = tmp_path / "st"
    folder.mkdir()
    bert.rename(folder / inner) if inner else bert.replace(folder)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{path[2:]}"}
        for i, path in enumerate([inner, "1_Pooling", "2_Dense"])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / inner / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    for name, file in (("1_Pooling", "config.json"), ("2_Dense", "config.json"), ("2_Dense", "model.safetensors")):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / file).write_text(f"{name} {file}")
    pooling = {"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, "include_prompt": True}))
    assert run("compress", folder, "--calibration", texts, "--refine", 0, "--out", tmp_path / "out")[0] == 0
    ours = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    theirs = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert ours - theirs == {"README.md", "report.json", "report.html", "plan.json"} and theirs <= ours
    for name in theirs:
        if (folder / name).is_file() and name not in (
            f"{inner}/{f}".strip("/") for f in ("config.json", "model.safetensors")
        ):
            assert (folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    assert hf.find_ffns(transformers.AutoModel.from_pretrained(tmp_path / "out" / inner))[0].width == 8
    card = (tmp_path / "out" / "README.md").read_text()
    assert "SentenceTransformer(" in card
    for text in (card, (tmp_path / "out" / "report.html").read_text()):
        assert "last hidden states of each input, by cls pooling" in text


@pytest.mark.parametrize(
    "where",
    [
        "snnk.hf.compression.pipeline.compress_",
        "snnk.hf.compression.pipeline.html",
        "transformers.BertModel.save_pretrained",
    ],
)
@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_nothing_but_a_checkpoint_is_left_when_it_fails(run, bert, texts, tmp_path, monkeypatch, where, error):
    """An error would come again, and leaves nothing; after Ctrl-C the same command goes on from the checkpoint."""

    def fail(*args, **kwargs):
        raise error

    def compress():
        return run("compress", bert, "--calibration", texts, "--refine", 0, "--recover", 16, "--out", tmp_path / "out")

    before = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        code, _, err = compress()
    left = {path.name for path in tmp_path.iterdir()} - before
    if isinstance(error, KeyboardInterrupt):
        assert code == 130 and left == {"out.checkpoint"} and "the same command continues from its checkpoint" in err
        code, out, _ = compress()
        assert code == 0 and "going on from" in out
        assert {path.name for path in tmp_path.iterdir()} - before == {"out"}
    else:
        assert code == 2 and not left


@pytest.fixture
def english(tmp_path):
    """The folder of a tiny model whose tokenizer knows the general text."""
    tokenizer = make_english()
    model = transformers.BertModel(transformers.BertConfig(**{**TINY, "vocab_size": len(tokenizer)}))
    return save(model, tmp_path / "english", tokenizer)


def test_texts_are_widened_and_agreement_is_measured_on_both_kinds(run, english, tmp_path):
    lines = [f"The {a} {b} the {c}." for a in ("dog", "cat") for b in ("followed", "hid") for c in general_words(10)]
    (tmp_path / "narrow.txt").write_text("\n".join(lines))
    options = ["--calibration", tmp_path / "narrow.txt", "--keep", 0.5, "--refine", 0, "--recover", 0]
    code, out, err = run("compress", english, *options, "--out", tmp_path / "wide")
    assert code == 0 and err == "" and "mixed in:" in out and "general text of snnk" in out
    report = json.loads((tmp_path / "wide" / "report.json").read_text())
    assert [held["name"] for held in report["held_out"]] == ["narrow.txt", "general text of snnk"]
    assert [held["inputs"] for held in report["held_out"]] == [4, 500] and report["settings"]["widen"] is True
    assert report["agreement"] == report["held_out"][0]["figures"]
    assert report["calibration"]["file"] == "narrow.txt" and report["calibration"]["general_texts"] > 1000
    assert "general texts of snnk" in (tmp_path / "wide" / "README.md").read_text()
    assert run("compress", english, *options, "--no-widen", "--out", tmp_path / "alone")[0] == 0
    alone = json.loads((tmp_path / "alone" / "report.json").read_text())
    assert len(alone["held_out"]) == 2 and not alone["calibration"]["general_texts"]
    warning, *_ = alone["warnings"]
    assert warning.startswith("36 inputs with ") and "are few for blocks of " in warning
    for name in ("README.md", "report.html"):
        assert "are few for blocks of " in (tmp_path / "alone" / name).read_text()


def general_words(count):
    return [word for word in fragments()["words"]["object"] if word.isalpha()][:count]


def test_without_calibration_the_general_text_is_used_and_named(run, english, tmp_path):
    folder = english
    code, out, err = run("compress", folder, "--keep", 0.5, "--refine", 0, "--recover", 0, "--out", tmp_path / "out")
    assert code == 0 and err == "" and "general text of snnk" in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["calibration"]["file"] == "general text of snnk" and report["calibration"]["count"] > 1000
    assert "general text of snnk" in (tmp_path / "out" / "README.md").read_text()
    assert "general text of snnk" in (tmp_path / "out" / "report.html").read_text()


def test_without_calibration_a_model_of_images_or_of_other_words_is_refused(run, bert, tmp_path):
    sizes = {**TINY, "image_size": 8, "patch_size": 4}
    images = save(transformers.ViTModel(transformers.ViTConfig(**sizes)), tmp_path / "vit", ViTImageProcessorPil())
    for model, message in ((images, "name a folder of images"), (bert, "are unknown to the tokenizer")):
        assert refused(run("compress", model, "--out", tmp_path / "out"), message)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", 0], "keep must be above 0"),
        (["--keep", 1.5], "keep must be above 0"),
        (["--keep", "nan"], "keep must be above 0"),
        (["--keep", "x"], "--keep"),
        (["--keep", 0.0001], "keep 0.0001 would leave next to nothing of each block; the least is 0.01"),
        (["--keep", 0.5, "--target-speedup", 1.5], "give one of keep"),
        (["--recover-minutes", "nan"], "recover_minutes must be a positive number"),
        (["--recover-minutes", 0], "recover_minutes must be a positive number"),
        (["--target-size", "10GB"], "target_size 10GB is met by the model as it is"),
        (["--target-size", "big"], "target_size must be like"),
        (["--target-size", "1KB"], "cannot be reached"),
        (["--target-speedup", -1], "target_speedup must be a positive number"),
        (["--target-latency", "3 MB"], "target_latency must be like '3ms'"),
        (["--target-latency", "3ms", "--tokens", "32"], "--tokens must be the number of inputs and of tokens per text"),
        (["--target-latency", "3ms", "--to", "onxx"], "unknown form 'onxx'; did you mean 'onnx'"),
        (["--tokens", "1x8"], "tokens are for target_speedup and target_latency"),
        (["--layers", "a"], "layers must be"),
        (["--layers", "top-9"], "top-2"),
        (["--layers", "7"], "among 0 to 1"),
        (["--feature-map", "random-cos"], "random-fourier"),
        (["--feature-map", "random-relu", "--joint"], "atoms only"),
        (["--max-error", 0], "max_error"),
        (["--max-length", 0], "--max-length"),
        (["--refine", -1], "--refine"),
        (["--plan", "none.json"], "none.json"),
        (["--plan", "none.json", "--keep", 0.5], "a plan replaces keep"),
        (["--text", "x"], "without columns"),
        (["--calibration", "none.txt"], "no calibration file or folder none.txt"),
    ],
)
def test_bad_options(run, bert, texts, tmp_path, options, message):
    args = ["compress", bert, "--calibration", texts, "--out", tmp_path / "out", *options]
    code, out, err = run(*args)
    assert refused((code, out, err), message) and out == "" and not (tmp_path / "out").exists()


def test_bad_files(run, bert, texts, tmp_path, monkeypatch):
    def compress(model=bert, calibration=texts, out=tmp_path / "out", *options):
        return run("compress", model, "--calibration", calibration, "--out", out, *options)

    (tmp_path / "empty.txt").write_text("\n")
    assert refused(compress(calibration=tmp_path / "empty.txt"), "is empty")
    (tmp_path / "few.txt").write_text("w1\n" * 12)
    assert refused(
        compress(bert, tmp_path / "few.txt", tmp_path / "out", "--keep", 0.9), "are too few to fit 28 features"
    )
    assert refused(compress(out=bert / "out"), "inside the model's folder")
    assert refused(compress(out=texts / "out"), "cannot be made")
    assert refused(compress(model=texts), "is no folder")
    assert refused(compress(model="./none"), "is no folder")
    assert refused(compress(model=tmp_path / "none" / "none"), "is no folder")

    def offline(*args, **kwargs):
        raise RuntimeError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert refused(compress(model="org/name"), "the hub did not give it: no network")

    plan = hf.plan(transformers.BertModel(transformers.BertConfig(**{**TINY, "intermediate_size": 64})), keep=0.5)
    plan.save(tmp_path / "other.json")
    assert refused(compress(bert, texts, tmp_path / "out", "--plan", tmp_path / "other.json"), "the plan is for")
    albert = transformers.AlbertModel(
        transformers.AlbertConfig(hidden_size=8, embedding_size=8, num_attention_heads=2, vocab_size=43)
    )
    assert refused(compress(model=save(albert, tmp_path / "albert")), "one shared layer")
    (bert / "model.safetensors").write_bytes(b"rubbish")
    assert refused(compress(), "is not a whole safetensors file")
    (bert / "config.json").unlink()
    assert refused(compress(), "there is no config.json")
    (bert / "modules.json").write_text('[{"idx": 0, "path": "../bert"}]')
    assert refused(compress(), "outside the folder")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_hub_name(run, bert, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, ignore_patterns: str(bert))
    assert run("compress", "org/name", "--calibration", texts, "--refine", 0, "--out", tmp_path / "out")[0] == 0
    assert 'base_model: "org/name"' in (tmp_path / "out" / "README.md").read_text()


def test_a_tuned_folder_with_an_adapter_is_merged_first(run, bert, tmp_path):
    """Also where its base model was moved, and with the columns of pairs of its training."""
    texts = make_texts(120)
    rows = [f"{a},{b},{len(a) > len(b)}" for a, b in zip(texts, texts[::-1], strict=True)]
    (tmp_path / "pairs.csv").write_text("\n".join(["query,passage,label", *rows]) + "\n")
    pairs = "--text", "query", "--text-pair", "passage"
    tune = "--method", "lora", "--max-steps", 2, "--train", tmp_path / "pairs.csv", *pairs
    assert run("finetune", bert, *tune, "--out", tmp_path / "tuned")[0] == 0
    bert.rename(tmp_path / "moved")
    options = "--calibration", tmp_path / "pairs.csv", "--keep", 0.5, "--recover", 0, "--refine", 0, "--no-widen"
    command = "compress", tmp_path / "tuned", *options, "--out", tmp_path / "small"
    assert refused(run(*command), "with base (--base)")
    code, out, _ = run(*command, "--base", tmp_path / "moved")
    assert code == 0 and "the adapter was merged into the weights" in out and "pairs of pairs.csv" in out
    found = json.loads((tmp_path / "small" / "report.json").read_text())
    assert found["base_model"] == "tuned" and found["calibration"]["column"] == "query,passage"
    data = tmp_path / "pairs.csv", "--out", tmp_path / "p.csv"
    code, out, _ = run("predict", tmp_path / "small", *data)  # with the columns of the training
    assert code == 0 and "120 predictions, accuracy" in out
    assert refused(run("compress", tmp_path / "moved", "--base", "x", "--out", tmp_path / "o"), "moved is none")
    with pytest.raises(ValueError, match=r"snnk\.finetune\.merge writes it for a folder of snnk finetune"):
        hf.compress(tmp_path / "tuned", out=tmp_path / "other")
