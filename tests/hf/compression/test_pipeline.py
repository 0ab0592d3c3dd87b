"""Agreement in the report of `compress` against the outputs of the two folders, on texts that nothing was fitted to."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

from snnk.hf import compress, plan
from snnk.hf.calibration import load_calibration
from snnk.hf.compression import pipeline
from snnk.hf.compression.timing import RUNTIMES
from snnk.hf.general import general_texts

from helpers.architectures import conditional, perturb_
from helpers.compression import made_up_timings
from helpers.heads import make
from helpers.texts import make_english, make_paired, make_texts, make_tokenizer, save

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def bert(tmp_path):
    model = make("BertModel")
    perturb_(model, scale=0.3)
    return save(model, tmp_path / "bert")


@pytest.fixture
def many(tmp_path):
    """A file of 900 texts, of which 90 are held out."""
    path = tmp_path / "many.txt"
    path.write_text("\n".join(make_texts(900)))
    return path


def held_out(path):
    return load_calibration(path, make_tokenizer(), held_out=500).held_out


def outputs(folder, batches, name="last_hidden_state", auto=hf.AutoModel):
    model = auto.from_pretrained(folder).eval()
    with torch.no_grad():
        return [getattr(model(**batch), name) for batch in batches]


def pooled(states, batches, how):
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches]).tolist()
    rows = [x[:length] for x, length in zip((x for part in states for x in part), lengths, strict=True)]
    return torch.stack([x[0] if how == "cls" else x.mean(0) for x in rows])


def with_pooling(folder, name):
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (path, kind) in enumerate(modules)
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": False, f"pooling_mode_{name}": True, "include_prompt": True})
    )


@pytest.mark.parametrize("how", ["mean", "cls"])
def test_vectors_of_held_out_texts(bert, many, tmp_path, how):
    if how == "cls":
        with_pooling(bert, "cls_token")
    found = compress(bert, many, out=tmp_path / "out", keep=0.25, refine=0)
    batches = held_out(many)
    before, after = (pooled(outputs(folder, batches), batches, how) for folder in (bert, tmp_path / "out"))
    cosine = F.cosine_similarity(before, after, dim=1)
    (held,) = found["held_out"]
    assert held["inputs"] == batches.items == 90 and held["name"] == "many.txt" and held["kind"] == "texts"
    assert found["agreement"] == held["figures"] and f"by {how} pooling" in found["compared"]
    assert found["agreement"]["cosine"] == pytest.approx(float(cosine.mean()), abs=1e-6)
    assert held["quantiles"]["cosine"]["worst"] == pytest.approx(float(cosine.min()), abs=1e-6)
    by_name = dict(zip(batches.names, cosine.tolist(), strict=True))
    worst = [case["value"] for case in held["worst"]]
    assert worst == pytest.approx(cosine.sort().values[:10].tolist(), abs=1e-6)
    assert [by_name[case["text"]] for case in held["worst"]] == pytest.approx(worst, abs=1e-6)
    nearest = [(F.normalize(x) @ F.normalize(x).T).fill_diagonal_(-1).argmax(1) for x in (before, after)]
    assert found["agreement"]["same nearest"] == pytest.approx(float((nearest[0] == nearest[1]).float().mean()))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["held_out"] == found["held_out"]


def test_a_pooling_that_is_not_ours_is_named(bert, many, tmp_path):
    with_pooling(bert, "of_its_own")
    found = compress(bert, many, out=tmp_path / "out", keep=0.5, refine=0)
    assert found["compared"].endswith("by mean pooling; sentence-transformers pools by of_its_own here")


def test_labels_of_a_classifier(many, tmp_path):
    names = {0: "good", 1: "<bad>", 2: "odd"}
    model = make("BertForSequenceClassification", id2label=names, label2id={v: k for k, v in names.items()})
    perturb_(model, scale=0.3)
    folder = save(model, tmp_path / "head")
    found = compress(folder, many, out=tmp_path / "out", keep=0.05, blocks="ffn", joint=False, refine=0)
    batches = held_out(many)
    auto = hf.AutoModelForSequenceClassification
    before, after = (torch.cat(outputs(place, batches, "logits", auto)) for place in (folder, tmp_path / "out"))
    best = [names[int(i)] for i in before.argmax(1)]
    same = before.argmax(1) == after.argmax(1)
    assert not same.all()
    (held,) = found["held_out"]
    assert found["agreement"]["same best"] == pytest.approx(float(same.float().mean()))
    assert {c["label"]: c["count"] for c in held["classes"]} == {name: best.count(name) for name in set(best)}
    for one in held["classes"]:
        rows = torch.tensor([name == one["label"] for name in best])
        assert one["same"] == pytest.approx(float(same[rows].float().mean()))
    worst = held["worst"][0]
    place = batches.names.index(worst["text"])
    divergence = F.kl_div(after.log_softmax(1), before.log_softmax(1), log_target=True, reduction="none").sum(1)
    assert place == int(divergence.argmax()) and worst["value"] == pytest.approx(float(divergence.max()), abs=1e-6)
    assert (worst["before"], worst["after"]) == (best[place], names[int(after[place].argmax())])


def test_texts_are_left_out_on_request(run, bert, many, tmp_path):
    """Also of the model card, which is made to be published and never has them."""
    texts = make_texts(900)

    def shown(folder):
        files = {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".html", ".md")}
        return {name for name, content in files.items() if any(text in content for text in texts if len(text) > 20)}

    command = ["compress", bert, "--calibration", many, "--refine", 0, "--keep", 0.5]
    code, _, _ = run(*command, "--out", tmp_path / "with")
    assert code == 0 and shown(tmp_path / "with") == {"report.json", "report.html"}
    code, out, _ = run(*command, "--hide-texts", "--out", tmp_path / "without")
    assert code == 0 and shown(tmp_path / "without") == set() and "--hide-texts" not in out
    report = json.loads((tmp_path / "without" / "report.json").read_text())
    assert report["held_out"][0]["worst"] == [] and report["held_out"][0]["inputs"] == 90
    assert report["settings"]["show_texts"] is False


def test_a_file_of_copies_is_measured_on_the_batches_that_compress_holds_out(bert, tmp_path):
    (tmp_path / "copies.txt").write_text("w1 w2 w3 w4\n" * 40)
    found = compress(bert, tmp_path / "copies.txt", out=tmp_path / "out", keep=0.25, refine=0)
    (held,) = found["held_out"]
    assert held["inputs"] == 3 and held["worst"] == [] and found["agreement"]["cosine"] > 0.99
    assert any("reads all texts as the same tokens" in warning for warning in found["warnings"])


@pytest.mark.parametrize(("given", "jointly"), [({}, True), ({"blocks": "ffn"}, False), ({"joint": False}, False)])
def test_sizes_are_chosen_jointly_where_that_pays(bert, many, tmp_path, monkeypatch, given, jointly):
    """Feed-forward blocks alone keep equal shares unless something else is asked for."""
    asked, make = [], pipeline.make_plan
    monkeypatch.setattr(
        pipeline, "make_plan", lambda *args, **options: asked.append(options["batches"]) or make(*args, **options)
    )
    compress(bert, many, out=tmp_path / "out", keep=0.5, refine=0, recover=0, **given)
    assert [batches is not None for batches in asked] == [False, True][: 1 + jointly]
    if given == {"blocks": "ffn"}:
        compress(bert, many, out=tmp_path / "asked", keep=0.5, refine=0, recover=0, joint=True, **given)
        assert asked[-1] is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": (10**6, 10**6)}, "1000000 x 1000000 tokens is too large to be timed"),
        ({}, "BertModel cannot be run with torch: out of order"),
    ],
)
def test_timings_of_a_plan_are_checked_before_any_work(bert, tmp_path, monkeypatch, change, message):
    """The file of texts is not read yet, which has too few."""

    def broken(model, batch):
        raise RuntimeError("out of order")

    monkeypatch.setitem(RUNTIMES, "torch", broken)
    model = hf.AutoModel.from_pretrained(bert)
    found = plan(model, target_speedup=1.2, timings=made_up_timings(model))
    replace(found, timings=replace(found.timings, **change)).save(tmp_path / "plan.json")
    (tmp_path / "few.txt").write_text("w1\n")
    with pytest.raises(ValueError, match=message):
        compress(bert, tmp_path / "few.txt", out=tmp_path / "out", plan=tmp_path / "plan.json")


def test_a_timing_that_fails_in_the_end_is_a_warning(bert, many, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no session")

    model = hf.AutoModel.from_pretrained(bert)
    plan(model, target_speedup=1.2, timings=made_up_timings(model)).save(tmp_path / "plan.json")
    monkeypatch.setattr("snnk.hf.compression.pipeline.compare", fail)
    found = compress(bert, many, out=tmp_path / "out", plan=tmp_path / "plan.json", refine=0, recover=0)
    assert found["timing"] is None and "could not be measured: no session" in found["warnings"][-1]
    assert hf.AutoModel.from_pretrained(tmp_path / "out") is not None and (tmp_path / "out/report.html").is_file()


@pytest.mark.parametrize("blocks", ["attention", "ffn"])
def test_few_texts_are_few_for_attention_too(bert, tmp_path, blocks):
    (tmp_path / "few.txt").write_text("\n".join(f"w{i} w{i + 1}" for i in range(20)))
    options = {"blocks": blocks, "keep": 0.5, "joint": False, "refine": 0, "recover": 0}
    found = compress(bert, tmp_path / "few.txt", out=tmp_path / "out", **options)
    features = {"attention": 4, "ffn": 16}[blocks]  # two heads with two dimensions each, or half of 32 neurons
    assert any(f"few for blocks of {features} features" in warning for warning in found["warnings"])


LABELS = {0: "entailment", 1: "neutral", 2: "contradiction"}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "x"}}, "pairs"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "x"}, "pairs"),
        ({"id2label": LABELS, "label2id": {name: i for i, name in LABELS.items()}}, "pairs"),
        ({"num_labels": 2}, "texts"),
    ],
)
def test_a_model_of_pairs_without_a_file(tmp_path, options, kind):
    """It is fitted to pairs of general text, and a file of single texts is doubtful."""
    tokenizer, notes = make_paired(make_english), []
    model = make("BertForSequenceClassification", vocab_size=len(tokenizer), num_hidden_layers=1, **options)
    folder = save(model, tmp_path / "head", tokenizer)
    common = {"keep": 0.5, "refine": 0, "joint": False, "recover": 0}
    found = compress(folder, out=tmp_path / "out", say=notes.append, **common)
    assert found["calibration"]["kind"] == kind and found["held_out"][0]["kind"] == kind
    assert any("classifies pairs" in note for note in notes) == (kind == "texts")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(general_texts(300)))
    found = compress(folder, texts, out=tmp_path / "again", **common)
    assert any("reads pairs of texts" in warning for warning in found["warnings"]) == (kind == "pairs")
    with pytest.raises(ValueError, match=r"give calibration, or leave out text 'one' and text_pair 'two'"):
        compress(folder, out=tmp_path / "third", text="one", text_pair="two")


@pytest.mark.parametrize("base", [False, True])
def test_a_folder_of_sentence_transformers_is_no_language_model(many, tmp_path, base):
    """The class of config.json is that of the model that the embedding model was trained from."""
    torch.manual_seed(0)
    config = hf.GPT2Config(n_embd=8, n_inner=32, n_layer=2, n_head=2, vocab_size=43, n_positions=64)
    model = hf.GPT2Model(config) if base else hf.GPT2LMHeadModel(config)
    folder = save(model, tmp_path / "gpt2", make_tokenizer(eos_token="[CLS]"))
    with_pooling(folder, "lasttoken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    found = compress(folder, many, out=tmp_path / "out", keep=0.5, refine=0, recover=0)
    assert found["model_class"] == "GPT2Model" and "by lasttoken pooling" in found["compared"]
    assert "cosine" in found["agreement"] and found["settings"]["widen"]
    batches = held_out(many)
    before, after = (torch.cat(ends(outputs(place, batches), batches)) for place in (folder, tmp_path / "out"))
    cosine = F.cosine_similarity(before, after, dim=1).mean()
    assert found["agreement"]["cosine"] == pytest.approx(float(cosine), abs=1e-6)


def ends(states, batches):
    """The states of the last tokens that are not padding."""
    lengths = [batch["attention_mask"].sum(1) for batch in batches]
    return [x[torch.arange(len(x)), n - 1] for x, n in zip(states, lengths, strict=True)]


def test_a_tower_for_images_stays_as_it_is(many, tmp_path):
    """Texts do not reach it; with equal shares as well as in a joint plan."""
    folder = save(conditional(), tmp_path / "model")
    for joint in (True, False):
        out = tmp_path / str(joint)
        found = compress(folder, many, out=out, keep=0.5, joint=joint, refine=0, recover=0)
        assert "2 layers do not run for texts alone" in found["warnings"][0] and found["blocks_in_all"] == 8
        assert {block["name"].partition(".")[0] for block in found["plan"]["blocks"]} == {"language_model"}
        before, after = (hf.LlavaForConditionalGeneration.from_pretrained(place) for place in (folder, out))
        tower = dict(after.model.vision_tower.named_parameters())
        assert all(torch.equal(tower[name], p) for name, p in before.model.vision_tower.named_parameters())
    with pytest.raises(ValueError, match=r"no layer of '0,1' runs for the inputs, input_ids"):
        compress(folder, many, out=tmp_path / "none", layers="0,1")
