"""The frontier: what is shared between budgets, what is kept of a run that is stopped, and what is written."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy
import pytest
from transformers import AutoModel

from snnk import _html
from snnk._checkpoint import CheckpointError
from snnk.hf import compress, frontier
from snnk.hf.compression import planning
from snnk.hf.compression.damage import TooFewTokens
from snnk.hf.serve import frontier as module
from snnk.hf.serve import frontier_page
from snnk.hf.serve.forms import FORMS

from helpers import browser
from helpers.browser import needs_browser
from helpers.compression import check_page
from helpers.heads import make
from helpers.packages import need
from helpers.texts import make_texts, save

OPTIONS = {"keep": [0.3, 0.6], "refine": 2, "recover": 6}


@pytest.fixture(autouse=True)
def brief(quick, monkeypatch):
    """Short measurements, and no runtime for a default rival."""
    monkeypatch.setattr(module, "_installed", list)


@pytest.fixture
def many(tmp_path):
    """Enough texts to choose the sizes of all blocks together."""
    (tmp_path / "many.txt").write_text("\n".join(make_texts(150)))
    return tmp_path / "many.txt"


class Stopped(BaseException):
    """Ends a run as Ctrl-C does."""


def test_each_budget_is_what_compress_makes_of_it(bert, many, tmp_path, monkeypatch):
    """One pass over the data plans all budgets, and the models are those of separate runs, bit for bit."""
    passes = []
    measured = planning.measure
    monkeypatch.setattr(planning, "measure", lambda *args: passes.append(1) or measured(*args))
    found = frontier(bert, many, out=tmp_path / "curve", save=True, **OPTIONS)
    assert len(passes) == 1
    points = {point["name"]: point for point in found["points"]}
    assert list(points) == ["original", "keep 0.6", "keep 0.3"]
    assert found["points"] == json.loads((tmp_path / "curve" / "frontier.json").read_text())["points"]
    sizes = [point["bytes"] for point in points.values()]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    report = compress(bert, many, out=tmp_path / "one", keep=0.3, refine=2, recover=6)
    folder = tmp_path / "curve" / points["keep 0.3"]["folder"]
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "one" / "model.safetensors").read_bytes()
    assert points["keep 0.3"]["held_out"][0]["figures"] == report["held_out"][0]["figures"]
    assert points["original"]["held_out"][0]["figures"]["cosine"] == pytest.approx(1)
    assert AutoModel.from_pretrained(folder).config.model_type == "bert"
    assert not (tmp_path / "curve.checkpoint").exists()


def test_latency_is_that_of_both_batches_on_one_thread(bert, texts, tmp_path):
    found = frontier(bert, texts, out=tmp_path / "curve", tokens=[(1, 7), (32, 7)], **{**OPTIONS, "recover": 0})
    assert [part["inputs"] for part in found["latency"]] == ["1 x 7 tokens", "32 x 7 tokens"]
    assert {part["threads"] for part in found["latency"]} == {1} and {p["clock"] for p in found["latency"]} == {
        "processor"
    }
    for point in found["points"]:
        runs = [part["runs"][point["name"]] for part in found["latency"]]
        assert point["seconds"] == [run["processor_seconds"] for run in runs]
        assert point["folder"] is None and point["held_out"][0]["worst"] == []
    assert sorted(path.name for path in (tmp_path / "curve").iterdir()) == ["frontier.json", "report.html"]


def test_a_run_that_is_stopped_keeps_what_is_finished(bert, texts, tmp_path):
    """The second run computes neither the finished budget nor the finished blocks of the other again."""
    out, said, seen = tmp_path / "curve", [], []

    def stop(what, done, total, note=""):
        if (what, done) == ("keep 0.3: encoder.layer.0", 2):
            raise Stopped

    with pytest.raises(Stopped):
        frontier(bert, texts, out=out, progress=stop, **OPTIONS)
    assert not out.exists() and (tmp_path / "curve.checkpoint" / "keep-0.6" / "report.json").is_file()
    kept = (tmp_path / "curve.checkpoint" / "keep-0.6" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="belongs to a run that was stopped, with other options"):
        frontier(bert, texts, out=out, **{**OPTIONS, "refine": 3})
    frontier(bert, texts, out=out, save=True, say=said.append, progress=lambda what, *_: seen.append(what), **OPTIONS)
    assert f"going on from {out}.checkpoint, which has 1 budgets" in said
    assert not [what for what in seen if what.startswith("keep 0.6")]
    assert not [what for what in seen if what.startswith("keep 0.3: encoder.layer.0")]
    assert (out / "keep-0.6" / "model.safetensors").read_bytes() == kept
    frontier(bert, texts, out=tmp_path / "calm", save=True, **OPTIONS)
    names = ("keep-0.3", "model.safetensors")
    assert (out.joinpath(*names)).read_bytes() == (tmp_path / "calm").joinpath(*names).read_bytes()


def test_a_checkpoint_that_was_not_removed_goes_away_with_its_output(bert, texts, tmp_path):
    out, work = tmp_path / "curve", tmp_path / "curve.checkpoint"
    for folder, name in ((out, "frontier.json"), (work, "start.json")):
        folder.mkdir()
        (folder / name).write_text("{}")
    with pytest.raises(FileExistsError, match="exists already; choose another name"):
        frontier(bert, texts, out=out, **OPTIONS)
    assert not work.exists()
    shutil.rmtree(out)
    work.mkdir()
    (work / "diary.txt").write_text("mine")
    with pytest.raises(FileNotFoundError, match=r"start.json, which should be the start of a run of snnk frontier"):
        frontier(bert, texts, out=out, **OPTIONS)
    assert (work / "diary.txt").exists()


def test_static_embeddings_are_compared_by_neighbours(texts, tmp_path, monkeypatch):
    """Their vectors have another length, so that there is no cosine; only encoders of sentences have such points."""
    vectors = numpy.random.default_rng(0).normal(size=(60, 5)).astype("float32")

    def encode(lines):
        return numpy.stack(
            [vectors[[len(word) + ord(word[-1]) % 20 for word in line.split()]].mean(0) for line in lines]
        )

    made = SimpleNamespace(embedding=vectors, encode=encode)
    monkeypatch.setattr("snnk.hf.serve.static.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "model2vec", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "model2vec.distill", SimpleNamespace(distill=lambda model_name, device: made))
    monkeypatch.setitem(sys.modules, "wordllama", None)  # fails to be imported
    folder, said = save(make("BertModel"), tmp_path / "bert"), []
    options = {**OPTIONS, "keep": [0.5], "recover": 0}
    assert len(frontier(folder, texts, out=tmp_path / "plain", **options)["points"]) == 2  # no sentence encoder
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}])
    )
    point = frontier(folder, texts, out=tmp_path / "curve", say=said.append, **options)["points"][-1]
    assert (point["name"], point["keep"], point["bytes"]) == (
        "model2vec of the original, with its tokenizer",
        None,
        vectors.nbytes,
    )
    held = point["held_out"][0]["figures"]
    assert "cosine" not in held and 0 <= held["same nearest"] <= 1 and min(point["seconds"]) > 0
    assert any("there is no point of wordllama to compare with" in line for line in said)
    page = check_page((tmp_path / "curve" / "report.html").read_text())
    assert page.tags.count("circle") == 6 and "model2vec of the original, with its tokenizer" in page.texts


def test_all_models_are_compared_as_they_are_served(shallow, texts, tmp_path):
    form = "onnx-int8"
    need("onnxscript", "onnxruntime")
    options = {**OPTIONS, "keep": [0.5], "recover": 0, "to": form}
    points = frontier(shallow, texts, out=tmp_path / "curve", **options)["points"]
    names = ["original", "keep 0.5", f"original, {form}", f"keep 0.5, {form}"]
    assert [point["name"] for point in points] == names and [p["keep"] for p in points] == [1.0, 0.5, 1.0, 0.5]
    _, small, exported, both = (point["held_out"][0]["figures"]["cosine"] for point in points)
    assert exported > 0.9 and both == pytest.approx(small, abs=0.05)
    assert all(min(point["seconds"]) > 0 for point in points) and not (tmp_path / "curve.checkpoint").exists()
    text = (tmp_path / "curve" / "report.html").read_text()
    assert check_page(text).tags.count("circle") == 8 and text.count('class="drawn"') == 4


def test_int8_of_the_original_is_the_default_rival(bert, texts, tmp_path, monkeypatch):
    """A rival that cannot be made is a note; what was asked for by name is an error, before any fit."""
    options = {**OPTIONS, "keep": [0.5], "recover": 0}
    made, said = [], []
    monkeypatch.setattr(module, "_installed", lambda: ["openvino-int8", "onnx-int8"])

    def served(prepared, point, network, work, form, threads):
        made.append((point.name, form, threads))
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "_served", served)
    found = frontier(bert, texts, out=tmp_path / "curve", say=said.append, **options)
    assert made == [("original", "openvino-int8", 1)] and len(found["points"]) == 2
    assert "note: there is no point of openvino-int8 to compare with: no memory" in said
    frontier(bert, texts, out=tmp_path / "alone", rivals=False, **options)
    assert len(made) == 1
    monkeypatch.setattr(module.graphs, "write_onnx", lambda *args: 1 / 0)
    monkeypatch.setattr(module, "fit_and_write", None)
    with pytest.raises(ZeroDivisionError):
        frontier(bert, texts, out=tmp_path / "other", to="onnx", **options)


def test_a_form_whose_package_is_missing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("snnk.hf.serve.forms.find_spec", lambda name: None if name == "nncf" else name)
    with pytest.raises(ImportError, match=r"an export to openvino needs nncf; install the extra serve"):
        frontier("no-such-model", out=tmp_path / "curve", to="openvino-int8")
    with pytest.raises(ValueError, match="unknown form 'onxx'; did you mean 'onnx'"):
        frontier("no-such-model", out=tmp_path / "curve", to="onxx")


def test_too_few_tokens_leave_equal_shares(bert, texts, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise TooFewTokens("9 tokens are too few")

    said = []
    monkeypatch.setattr(module, "measure_choices", refuse)
    found = frontier(bert, texts, out=tmp_path / "curve", say=said.append, **{**OPTIONS, "recover": 0})
    assert sum("every block keeps the same share" in line for line in said) == 1
    assert found["settings"]["joint"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": []}, r"keep must be a list of numbers.*such as \[0.5, 0.25\]; got \[\]"),
        ({"keep": [0.5, 1.5]}, r"keep must be at least 0.01 and less than 1, which is the original; got 1.5"),
        ({"tokens": [(1, 0)]}, "length of tokens"),
        (
            {"text": "body"},
            "text and text_pair name columns of the calibration file; give calibration, or leave out text .body.",
        ),
    ],
)
def test_bad_options_are_refused_before_any_work(tmp_path, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        frontier("no-such-model", out=tmp_path / "curve", **options)
    assert list(tmp_path.iterdir()) == []


def test_too_few_inputs_for_int8_leave_no_checkpoint(bert, tmp_path):
    """The advice is to give more: the same command must then begin."""
    need("openvino", "nncf")
    (tmp_path / "few.txt").write_text("\n".join(make_texts(20)))
    with pytest.raises(ValueError, match=r"got \d+ texts, and at least 32"):
        frontier(bert, tmp_path / "few.txt", out=tmp_path / "curve", to="openvino-int8", **OPTIONS)
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(("curve", ".curve"))} == set()


def test_the_command_shows_all_points(run, bert, texts, tmp_path):
    options = ["--keep", "0.5,0.3", "--refine", 2, "--recover", 0]
    code, out, err = run("frontier", bert, "--calibration", texts, *options, "--out", tmp_path / "curve")
    assert code == 0, err
    assert all(name in out for name in ("original", "keep 0.5", "keep 0.3", "report.html"))
    code, _, err = run("frontier", bert, "--keep", "half", "--out", tmp_path / "other")
    assert code == 2 and "--keep must be numbers with commas between them, such as 0.5,0.25; got 'half'" in err


def report_of(*figures):
    """frontier.json with these figures, one set per point."""
    points = [
        {
            "name": f"p{i}",
            "keep": 1 / (i + 1),
            "form": "torch",
            "bytes": 10**6,
            "seconds": [0.001 * (i + 1), 0.01],
            "held_out": [held],
        }
        for i, held in enumerate({"name": "a", "kind": "texts", "inputs": 9, "figures": f} for f in figures)
    ]
    times = {"clock": "processor", "threads": 1, "rounds": 3, "processor": "x", "instructions": "AVX2"}
    return {
        "base_model": "<b>me</b>",
        "compared": "vectors",
        "calibration": {"file": "a", "count": 9, "kind": "texts"},
        "latency": [{"inputs": f"{n} x 32 tokens", **times} for n in (1, 32)],
        "points": points,
        "warnings": ["it & that"],
        "settings": {},
        "versions": {},
    }


def test_the_page_escapes_names_and_has_both_pictures():
    page = frontier_page.html(report_of({"cosine": 1.0, "same nearest": 1.0}, {"cosine": 0.9, "same nearest": 0.5}))
    found = check_page(page)
    assert found.tags.count("svg") == 2 and found.tags.count("circle") == 4 and "<b>me" not in page
    assert "same nearest neighbour (top-1)" in found.texts and "Warning:" in found.texts


@needs_browser
@pytest.mark.parametrize(("width", "dark"), browser.SCREENS)
def test_the_page_in_a_browser(tmp_path, width, dark):
    """Models that are alike, exported ones, and a rival, with long names."""
    shared = [1.0, 0.9, 0.9, 0.9, 0.7, 0.95, 0.9, 0.6, 0.01]
    report = report_of(*({"cosine": 1 - i / 99, "same nearest": same} for i, same in enumerate(shared)))
    report["base_model"] = "organisation/" + "a-long-name" * 9
    for i, point in enumerate(report["points"]):
        form = ("torch", "openvino-int8", None)[i // 5 if i < 8 else 2]
        point |= {"form": form, "name": f"{'very ' * i}long name of a model, {form}", "seconds": [1e-3 * (9 - i), 1e-2]}
    (tmp_path / "report.html").write_text(frontier_page.html(report))
    found = browser.check_page(tmp_path / "report.html", width, dark=dark)
    assert found.pictures == 2 and "cosine" in found.text and "int8\nWeights and activations in 8 bits" in found.text


def test_figures_of_classifiers_and_decoders():
    classes = report_of({"cosine": 1.0, "KL divergence": 0.0, "same best": 1.0})
    assert frontier_page.main_figure(classes["points"]) == "same best"
    assert frontier_page.headings(classes)[-2:] == ["same prediction", "KL divergence"]
    both = report_of(
        {"original perplexity": 9.0, "perplexity": 9.0, "same next token": 1.0},
        {"perplexity": 9.5, "same next token": 0.5},
    )
    assert frontier_page.main_figure(both["points"]) == "same next token"
    assert frontier_page.rows(both)[1][1:] == ["1.0", "2.00", "10.00", "0.50", "1.00", "9.5000", "0.5000"]


def test_every_form_has_a_colour_of_its_own():
    found = frontier_page._colours([{"form": form} for form in ("torch", *FORMS, None)])
    assert len(set(found.values())) == len(found) == len(FORMS) + 2
    assert all(_html.STYLE.count(f"{colour[4:-1]}: #") == 2 for colour in found.values())  # light and dark
