"""The experiments on transformers: each runs in its quick form without data or weights, and states what rows say."""

import json
import math
import tempfile
from dataclasses import replace

import pytest
from transformers import BertModel, DistilBertConfig, DistilBertModel

from snnk.cli import main
from snnk.experiments import adapters, compression, glue, load, uptraining, vision
from snnk.experiments.lab import paper, protocol, tiny
from snnk.experiments.lab.data import NOWHERE, Source
from snnk.experiments.lab.page import write_page
from snnk.experiments.lab.records import Results, Stored
from snnk.finetune.glue import GLUE

from helpers.experiments import MEASURED, Rows, table_row

NAMES = ("glue", "vision", "uptraining", "uptraining-images", "compression", "adapters")


DIM, WIDTH = tiny.SIZES["hidden_size"], tiny.SIZES["intermediate_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows and figures of all, through the command."""
    found = tmp_path_factory.mktemp("rows")
    for name in NAMES:
        with pytest.raises(SystemExit) as stop:
            main(["reproduce", name, "--quick", "--out", str(found)])
        assert stop.value.code == 0, name
    return found


def numbers(value):
    if isinstance(value, dict | list):
        return [n for part in (value.values() if isinstance(value, dict) else value) for n in numbers(part)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("name", NAMES)
def test_quick_runs_without_data_or_weights(name, folder):
    text = (folder / f"{name}.json").read_text()
    stored, module = json.loads(text), load(name)
    assert len(stored["rows"]) <= module.total(module.QUICK)
    assert all(math.isfinite(n) for n in numbers(stored["rows"]))
    assert all(abs(r.get("score", r.get("spearman"))) <= 100 and r["model"].startswith("tiny-") for r in stored["rows"])
    assert stored["source"] == {"model": "", "data": "made by --quick"}
    assert (folder / f"{name}.png").stat().st_size > 5000
    assert not any(path in text for path in (tempfile.gettempdir(), str(folder), tempfile.gettempprefix()))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_stopped_goes_on(name, folder, tmp_path):
    stored, module = json.loads((folder / f"{name}.json").read_text()), load(name)
    last = stored["rows"].pop()
    stored["rows"][0]["mark"] = 1
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(stored))
    results = Results(path, module.QUICK, source=NOWHERE.names)
    rows = list(module.run(module.QUICK, results))
    assert len(rows) == len(results.rows) == len(stored["rows"]) + 1 and rows[0]["mark"] == 1
    assert {k: v for k, v in rows[-1].items() if k not in MEASURED} == {
        k: v for k, v in last.items() if k not in MEASURED
    }


def test_page_of_these(folder, tmp_path):
    page = write_page(folder).read_text()
    assert page.count("This is the small configuration") == len(NAMES) and str(folder) not in page
    assert all(f"`snnk reproduce {name} --quick`" in page for name in NAMES)
    for name in NAMES:
        stored = json.loads((folder / f"{name}.json").read_text())
        assert not any(claim["ours"] in page for claim in load(name).claims(Stored(folder / f"{name}.json")))
        # as if it were no small one, and was stopped
        stored["config"]["batch_size" if "batch_size" in stored["config"] else "seed"] = 7
        stored["rows"].pop()
        (tmp_path / f"{name}.json").write_text(json.dumps(stored))
    page = write_page(tmp_path).read_text()
    for name in NAMES:
        rows = Stored(tmp_path / f"{name}.json")
        for claim in load(name).claims(rows):
            assert f"{claim['paper']} | {claim['ours']} | {claim['tolerance']} |" in page
        assert f" {len(rows.rows)} rows in [{name}.json]" in page and "torch" in page
    left = page.split("## Not run here")[1]
    for line in (
        "- glue: stsb: no rows of snnk-pooler with 8",
        "- glue: rte, mrpc, qnli, qqp, sst2, mnli, cola",
        "- glue: bert-base, the paper's model: these rows are of tiny-bert",
        "- vision: cifar10: no rows of snnk-relu with 4",
        "- vision: cifar100, ImageNet",
        "- uptraining: rte, mrpc, qnli, qqp, sst2, mnli, stsb",
        "- uptraining: cola: k = 2, atoms, seed 0",
        "- uptraining-images: cifar10: k = 2, atoms, seed 0",
        "- uptraining-images: cifar100",
        f"- compression: {compression.total(compression.QUICK) - 1} of {compression.total(compression.QUICK)} rows",
    ):
        assert line in left, line
    assert "`snnk reproduce glue --seeds 1`" in page and "small configuration" not in page


def test_trained_parameters_of_each_method(folder):
    rows, config = Stored(folder / "glue.json").rows, glue.QUICK
    head = DIM + 1
    by = {(r["method"], r["features"]): r for r in rows}
    pooler, bundled = config.pooler_features, config.bundled_features
    assert {key: r["trained"] for key, r in by.items()} == {
        **dict.fromkeys([("pooler", None), (f"pooler{protocol.DRAWN}", None)], DIM * DIM + DIM + head),
        **{(f"{name}-pooler", pooler): pooler * DIM + head for name in ("snnk", "psi", "tanh", "random")},
        ("snnk-pooler", 8): 8 * DIM + head,
        ("linear-probe", None): head,
        **dict.fromkeys([("bundled", bundled), ("bundled-solved", bundled)], bundled + 1),
    }
    solved, trained = by["bundled-solved", bundled], by["bundled", bundled]
    assert solved["steps"] == 0 and trained["epochs"] == config.epochs
    assert solved["start_validation"] == solved["validation"] == trained["start_validation"]
    one, other = by["pooler", None], by[f"pooler{protocol.DRAWN}", None]
    assert one["start_seconds"] > other["start_seconds"] == 0 and one["start_validation"] != other["start_validation"]


def test_a_pooler_that_was_trained_has_a_bias(folder, files, tmp_path):
    assert not any(r["pooler_trained"] for r in Stored(folder / "glue.json"))
    model = BertModel.from_pretrained(files["model"])
    model.pooler.dense.bias.data[0] = 0.1
    model.save_pretrained(tmp_path / "trained")
    assert glue._trained_pooler(str(tmp_path / "trained")) is True
    config = DistilBertConfig(vocab_size=9, dim=8, hidden_dim=8, n_layers=1, n_heads=2)
    DistilBertModel(config).save_pretrained(tmp_path / "none")
    assert glue._trained_pooler(str(tmp_path / "none")) is False


@pytest.mark.parametrize("name", ["uptraining", "uptraining-images"])
def test_uptraining_counts_what_the_bundled_model_has(name, folder):
    rows, config = Stored(folder / f"{name}.json").rows, load(name).QUICK
    by = {(r["replaced"], r["kind"]): r for r in rows}
    full = by[0, uptraining.FULLY]
    assert len(by) == len(rows) == 5
    tokens = config.texts * config.length if name == "uptraining" else config.images * 5  # patches and the class
    for k in (1, 2):
        for kind, biases in ((uptraining.RANDOM, 0), (uptraining.ATOMS, config.num_features)):
            row = by[k, kind]
            less = 2 * DIM * (WIDTH - config.num_features) + WIDTH - biases
            assert round(1e6 * (full["stored_M"] - row["stored_M"])) == k * less
            assert row["stored_MB"] == pytest.approx(4 * row["stored_M"])
            saved = k * tokens * 2 * DIM * (WIDTH - config.num_features)
            assert round(1e9 * (full["multiply_adds_G"] - row["multiply_adds_G"])) == saved
            assert row["steps"] == full["steps"] > 0


def test_more_blocks_than_there_are_are_all_of_them(files, tmp_path):
    """And files are read from --data-dir and --model."""
    config = replace(uptraining.QUICK, replaced=(2, 9))
    source = Source(files["data_dir"], files["model"])
    results = Results(tmp_path / "rows.json", config, source=source.names)
    rows = list(uptraining.run(config, results, source))
    assert [(r["replaced"], r["kind"]) for r in rows] == [(2, uptraining.RANDOM), (2, uptraining.ATOMS)]
    assert {(r["blocks"], r["model"]) for r in rows} == {(2, "tiny-bert")}
    assert files["data_dir"] not in results.path.read_text()


def test_compression_is_to_the_original(folder):
    rows = Stored(folder / "compression.json").rows
    assert rows[0]["way"] == compression.ORIGINAL and rows[0]["cosine"] == pytest.approx(1)
    for keep in compression.QUICK.keeps:
        own, other = (
            next(r for r in rows if (r["way"], r["keep"]) == (way, keep))
            for way in (compression.FITTED, compression.RANDOM)
        )
        assert 0.9 < other["cosine"] < own["cosine"] < 1 and own["stored_M"] == other["stored_M"]
        blocks = 2 * (2 * DIM * WIDTH + WIDTH + DIM) / 1e6
        assert rows[0]["stored_M"] - own["stored_M"] == pytest.approx((1 - keep) * blocks, rel=0.05)
        # atoms have the multiply-adds of the neurons that they are; the four matrices of attention stay
        assert own["multiply_adds"] == pytest.approx((4 * DIM + 2 * keep * WIDTH) / (4 * DIM + 2 * WIDTH), rel=0.05)
    whole = next(r for r in rows if r["way"] == compression.DISTILLED)
    assert whole["multiply_adds"] == pytest.approx(0.5, rel=0.05) and 0.9 < whole["cosine"] < 1


def test_vision_learns_two_colours(folder):
    rows = {r["method"]: r for r in Stored(folder / "vision.json")}
    assert rows["linear-probe"]["score"] > 70 and rows["linear-probe"]["trained"] == 2 * (DIM + 1)


def test_adapters_take_the_rate_that_validation_chose(folder):
    rows = Stored(folder / "adapters.json").rows
    for method in adapters.QUICK.methods:
        tried = [r for r in rows if r["method"] == method]
        [final] = [r for r in protocol.chosen(rows, 0) if r["method"] == method]
        assert final["validation"] == max(r["validation"] for r in tried)
        assert [r["learning_rate"] for r in tried] == list(adapters.QUICK.rates)


def test_claims_of_glue():
    rows = [
        table_row("cola", "snnk-pooler", 34.0, 512),
        table_row("cola", "snnk-pooler", 36.0, 512, seed=1),
        table_row("cola", "pooler", 30.0),
        table_row("cola", "random-pooler", 36.0, 512),
        table_row("stsb", "snnk-pooler", 70.0, 512),
        table_row("stsb", "pooler", 75.0),
        table_row("stsb", "bundled", 65.0, 1024),
        table_row("stsb", "bundled-solved", 60.0, 1024),
        table_row("stsb", "bundled, random start", 66.0, 1024),
        table_row("cola", "snnk-pooler", 20.0, 128),
    ]
    config = {"ablation_task": "cola", "pooler_features": 512, "bundled_features": 1024}
    found = {c["paper"]: c for c in glue.claims(Rows(rows, **config))}
    holds = {paper: claim["holds"] for paper, claim in found.items()}
    assert holds == {
        "cola: snnk-pooler 35.81, pooler 29.4": True,
        "stsb: snnk-pooler 78.93, pooler 78.1": False,  # about equal in the paper
        "stsb: bundled 71.84, pooler 78.1": True,
        "stsb: bundled 71.84, bundled-solved 67.0": True,
        "snnk-pooler above pooler on 5 of 8 tasks; 2 of cola, stsb": False,
        "not in the paper: a classifier is better if it starts from its closed form (bundled)": False,
        "a pooler that starts from pretrained weights is better than one from random weights": False,
        "snnk-pooler: more features help, on large tasks": True,
    }
    first = found["cola: snnk-pooler 35.81, pooler 29.4"]
    assert (
        first["ours"] == "snnk-pooler 35.00 (10 trained), pooler 30.00 (10 trained); some, 2 seeds"
        and first["tolerance"] == "4.1 points: less is a tie"
    )
    more = glue.claims(Rows([*rows, table_row("cola", "snnk-pooler", 0.0, 1024)], **config))
    assert first in more  # the row is of the ablation alone, although a bundled head has as many features
    few = found["snnk-pooler: more features help, on large tasks"]
    assert few["ours"] == "cola, 128: 20.00, 512: 35.00" and few["tolerance"] == "4.2 points: less is a tie"
    rows[-1]["score"] = 34.0
    found = {c["paper"]: c for c in glue.claims(Rows(rows, **config))}
    assert not found["snnk-pooler: more features help, on large tasks"]["holds"]
    assert glue.claims(Rows([], **config)) == []
    for score, holds in ((64.0, False), (60.0, True)):  # a start that is ahead by less than chance is not ahead
        rows[8]["score"] = score
        claim = next(c for c in glue.claims(Rows(rows, **config)) if "closed form (bundled)" in c["paper"])
        assert claim["holds"] is holds and ("(a tie)" in claim["ours"]) is not holds
        assert claim["tolerance"].endswith("points: less is a tie")
    for row in rows:
        row["pooler_trained"] = False
    rows[2]["score"] = None  # it diverged
    found = {c["paper"]: c["ours"] for c in glue.claims(Rows(rows, **config))}
    assert not any("random weights" in paper for paper in found)
    assert found["cola: snnk-pooler 35.81, pooler 29.4"] == "diverged"
    assert "some, whose pooler was never trained, 1 seed" in found["stsb: snnk-pooler 78.93, pooler 78.1"]
    rows[4]["start_validation"] = rows[4]["validation"]
    found = {c["paper"]: c["ours"] for c in glue.claims(Rows(rows, **config))}
    assert (
        "snnk-pooler 70.00 (10 trained, no better than its start), pooler 75.00 (10 trained)"
        in found["stsb: snnk-pooler 78.93, pooler 78.1"]
    )


def test_claims_about_poolers_are_open_while_scores_rise():
    rows = [table_row("cola", "snnk-pooler", 34.0, 512), table_row("cola", "pooler", 20.0)]
    rows += [table_row("cola", "snnk-pooler", 20.0, 128)]
    config = {"ablation_task": "cola", "pooler_features": 512, "bundled_features": 1024}
    assert [c["holds"] for c in glue.claims(Rows(rows, **config))] == [True, True, True]
    rows[0]["late_gain"] = 0.6
    found = glue.claims(Rows(rows, **config))
    assert [c["holds"] for c in found] == [None] * 3 and all("still rising" in c["ours"] for c in found)


def test_answers_are_the_rows_of_dev():
    assert {task: GLUE[task].rows[1] for task in paper.TASKS} == paper.ANSWERS


def test_the_papers_means_are_those_of_its_table():
    """82.32 and 83.46 of 0.3 M parameters, which the appendix's rows give."""
    means = {name: sum(paper.PAPER[name].values()) / 8 for name in ("snnk-relu", "lora")}
    assert {name: round(value, 2) for name, value in means.items()} == {"snnk-relu": 82.32, "lora": 83.46}
    for one, _, name, count in (*glue.COUNTS, *adapters.COUNTS):
        assert sum(paper.PAPER[one][task] > paper.PAPER[name][task] for task in paper.TASKS) == count


def test_claims_of_the_others():
    rows = [
        table_row("cifar10", name, score) for name, score in (("snnk-relu", 97), ("houlsby", 96), ("bundled", 94.5))
    ]
    rows.append(table_row("cifar10", "linear-probe", 95))
    rows[0]["late_gain"] = 0.4  # less than half a point
    found = vision.claims(Rows(rows, seed=0, test_rows=10_000))
    assert [(c["paper"][9:25], c["holds"]) for c in found] == [
        ("snnk-relu 98.2, ", True),  # within a point
        ("snnk-relu 98.2, ", True),
        ("bundled 95.8, cl", True),
    ]
    assert vision.claims(Rows(rows, seed=0, test_rows=1000))[2]["tolerance"] == "1.0 points"
    rows[2]["score"] = 93.5
    assert not vision.claims(Rows(rows, seed=0, test_rows=10_000))[2]["holds"]
    assert vision.claims(Rows(rows, seed=0, test_rows=400))[2]["holds"]  # 1.6 points by chance
    rows[3]["score"] = None
    assert [(c["ours"], c["holds"]) for c in vision.claims(Rows(rows, seed=0, test_rows=400))[2:]] == [
        ("diverged", False)
    ]

    def kept(way, keep, spearman, cosine):
        return {"way": way, "keep": keep, "spearman": spearman, "cosine": cosine, "seed": 0, "model": "some"}

    fitted, moved, chance, *_ = compression.WAYS
    rows = [kept(compression.ORIGINAL, 1.0, 86.7, 1.0), kept(fitted, 0.25, 86.4, 0.88), kept(chance, 0.25, 84.2, 0.77)]
    claims = compression.claims(Rows([*rows, kept(moved, 0.25, 86.8, 0.87)]))
    assert [c["holds"] for c in claims] == [True, False, True] and "86.70 -> 86.40 (some)" in claims[2]["ours"]
    for spearman, holds in ((86.35, True), (86.25, False)):  # a tie, and less
        claims = compression.claims(Rows([*rows, kept(moved, 0.25, spearman, 0.89)]))
        assert claims[1]["holds"] is holds


@pytest.mark.parametrize("module", [glue, vision, uptraining])
def test_experiments_go_on_after_a_run_that_diverged(module, tmp_path, monkeypatch):
    """Its row has no score, no claim holds for it, and the picture says so."""
    seen = []

    def diverging(*args, **options):
        seen.append(options["method"])
        return None if len(seen) == 2 else tuned(*args, **options)

    place = uptraining if module is uptraining else protocol
    tuned = place.tuned
    monkeypatch.setattr(place, "tuned", diverging)
    results = Results(tmp_path / "rows.json", module.QUICK, source=NOWHERE.names)
    rows = list(module.run(module.QUICK, results))
    assert len(rows) <= module.total(module.QUICK) and [r["score"] is None for r in rows].index(True) == 1
    assert rows[1]["trained"] is None and all(r["score"] is not None for r in rows[2:])
    lost = [c for c in module.claims(results) if "diverged" in c["ours"]]
    assert lost and not any(c["holds"] for c in lost)
    assert module.plot(results).axes and module.left(results)
