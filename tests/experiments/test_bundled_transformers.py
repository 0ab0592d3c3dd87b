"""Every cell of the paper's table of bundled transformers, on BERT-base and ViT-base without weights."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from snnk.experiments import bundled_latency, load
from snnk.experiments import bundled_transformers as experiment
from snnk.experiments.lab.records import Results

D, M = 768, 8
WIDTH = 4 * D
LAYER = 4 * (D * D + D) + 2 * D * WIDTH + WIDTH + D + 4 * D  # attention, block, two LayerNorms


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    results = Results(tmp_path_factory.mktemp("rows") / "bundled-transformers.json", experiment.Config())
    assert len(list(experiment.run(experiment.Config(), results))) == experiment.total(experiment.Config()) == 28
    return results


@pytest.mark.parametrize("k", range(7))
@pytest.mark.parametrize("form", experiment.FORMS)
@pytest.mark.parametrize("model", experiment.PAPER)
def test_every_cell(results, model, form, k):
    row = results.find(model=model, form=form, replaced=k)
    assert row["paper_G"] == experiment.PAPER[model]["multiply-adds", form][k]
    assert abs(row["with_biases_G"] - row["paper_G"]) < 0.65
    # the first linear layer becomes projection and A; bundled, the second one becomes a matrix with m columns too
    saved = D * WIDTH + WIDTH - M * D - M * WIDTH if form == "training" else 2 * D * WIDTH + WIDTH - 2 * M * D
    full = {"BERT": 109_482_240, "ViT": 86_567_656}[model]
    assert round(row["parameters_M"] * 1e6) == full - k * saved
    assert row["stored_MB"] == pytest.approx(4 * row["parameters_M"])
    assert round(row["as_one_object_M"] * 1e6) == full - (k > 0) * saved - max(k - 1, 0) * LAYER
    assert abs(row["as_one_object_M"] - row["paper_M"]) < 1


def test_multiply_adds_are_those_of_the_formulas(results):
    tokens, attention = 64 * 128, 2 * 64 * 128 * 128 * D
    linear = tokens * (4 * (D + 1) * D + (D + 1) * WIDTH + (WIDTH + 1) * D)
    full = 12 * (linear + attention) + 64 * (D + 1) * D
    bundled = full - 6 * tokens * ((D + 1) * WIDTH + WIDTH * D - 2 * M * D)
    found = [results.find(model="BERT", form="inference", replaced=k)["with_biases_G"] for k in (0, 6)]
    assert [round(giga * 1e9) for giga in found] == [full, bundled]


def test_claims_read_rows_and_say_why_parameters_differ(results):
    table = experiment.claims(results)
    flops, parameters, stored = table[:28], table[28:56], table[56:]
    assert all(claim["holds"] for claim in flops)
    assert [claim["holds"] for claim in parameters] == [True, True, *[False] * 5] * 4
    assert all((experiment.REASON in claim["ours"]) != claim["holds"] for claim in parameters)
    assert all(claim["ours"].endswith("the paper's within 1 M") for claim in parameters if not claim["holds"])
    assert [claim["holds"] for claim in stored] == [False, False]
    assert "325 MB" in stored[0]["ours"] and "226.71" in stored[0]["paper"]
    assert all("not the paper's either" in claim["ours"] for claim in stored)
    assert {claim["tolerance"] for claim in table} == {"1 G", "1 M", "1 MB"}


def test_reasons_are_checked_not_printed(results, tmp_path):
    row = dict(results.find(model="BERT", form="inference", replaced=6), as_one_object_M=60.0)
    changed = Results(tmp_path / "rows.json", experiment.Config())
    changed.rows = [row]
    assert (
        "60.0 M if the k replaced layers are one object, which is not the paper's"
        in experiment.claims(changed)[1]["ours"]
    )


def test_plot_and_rows_can_be_written_and_found_again(results):
    assert len(experiment.plot(results).axes) == 4
    again = Results(results.path, experiment.Config())
    assert list(experiment.run(experiment.Config(replaced=(6,)), again)) == [r for r in results if r["replaced"] == 6]
    assert len(json.loads(results.path.read_text())["rows"]) == 28
    quick = Results(results.path.with_name("quick.json"), experiment.QUICK)
    quick.rows = [r for r in results if r["replaced"] in experiment.QUICK.replaced]
    assert len(experiment.claims(quick)) == 2 * experiment.total(experiment.QUICK) + 2


def test_listing_experiments_does_not_import_transformers():
    assert load("bundled-transformers") is experiment
    code = """
import sys
from snnk.cli import main
for args in (["--help"], ["reproduce", "--list"]):
    try:
        main(args)
    except SystemExit as stop:
        assert stop.code == 0
print([m for m in sys.modules if m.split(".")[0] == "transformers"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "bundled-transformers" in done.stdout and done.stdout.endswith("[]\n")


def test_latency_is_processor_time_of_one_thread(monkeypatch):
    calls, clock, threads = [], [0.0], torch.get_num_threads()

    def model(name, seconds):
        def forward(**inputs):
            calls.append((name, torch.get_num_threads(), torch.is_grad_enabled(), inputs))
            clock[0] += seconds

        return forward

    config = replace(bundled_latency.QUICK, rounds=3)
    monkeypatch.setattr("time.process_time", lambda: clock[0])
    for name in ("TURN", "WARM"):  # one call per turn
        monkeypatch.setattr(f"snnk.hf.serve.latency.{name}", 1e-9)
    assert bundled_latency._seconds([model("a", 3.0), model("b", 2.0)], {"x": 1}, config) == [[3.0] * 3, [2.0] * 3]
    assert "".join(name for name, *_ in calls) == "aaabbb" + "baabba"
    assert {call[1:3] for call in calls} == {(1, False)} and calls[0][3] == {"x": 1}
    with pytest.raises(ZeroDivisionError):
        bundled_latency._seconds([lambda x: 1 / 0], {"x": 1}, replace(config, threads=threads + 1))
    assert torch.get_num_threads() == threads


def test_rows_and_claims_of_latency(monkeypatch, tmp_path):
    seen = []

    def seconds(models, inputs, config):
        seen.append((models, inputs))
        return [[3.0, 9.0, 4.0], [2.0, 3.0, 4.0]]

    monkeypatch.setattr(bundled_latency, "_seconds", seconds)
    config = replace(bundled_latency.QUICK, models=("BERT", "ViT"), images=1, length=8)
    results, state = Results(tmp_path / "rows.json", config), torch.get_rng_state()
    rows = list(bundled_latency.run(config, results))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(rows) == bundled_latency.total(config) and list(bundled_latency.run(config, results)) == rows
    for row, (models, inputs) in zip(rows, seen, strict=True):
        assert (row["seconds"], row["time_ratio"], row["threads"]) == ([3.0, 9.0, 4.0], 1.5, 1)
        first, second = (sum(t.numel() for t in model.state_dict().values()) for model in models)
        assert first - second == 2 * D * WIDTH + WIDTH - 2 * M * D and not any(model.training for model in models)
        tokens = 16 if row["model"] == "BERT" else 197
        fewer = tokens * (2 * D * WIDTH - 2 * M * D)
        assert round(1e9 * (row["multiply_adds_G"] - row["multiply_adds_G_bundled"])) == fewer
        assert next(iter(inputs.values())).shape[0] == (2 if row["model"] == "BERT" else 1)
    figure = bundled_latency.plot(results)
    figure.savefig(tmp_path / "latency.png")
    assert len(figure.axes[0].get_legend().get_texts()) == 4  # each once
    assert list(figure.axes[0].lines[0].get_ydata()) == [1.5, 3.0, 1.0]

    def claims(row, time_ratio):
        work = {"multiply_adds_G": 1.48, "multiply_adds_G_bundled": 1.0}
        return bundled_latency.claims([{**row, **work, "time_ratio": time_ratio}])

    first, second = claims(rows[0], 1.41)
    assert first["holds"] and first["paper"] == "BERT: 0.44 -> 0.32 s, 1.38 times faster"
    assert first["ours"] == "1.41 times faster (turns 1.00 to 3.00), top 1 of 2: 4.0 -> 3.0 s"
    assert second["holds"] and second["tolerance"] == "5% of their ratio"
    assert [claim["holds"] for claim in claims(rows[0], 1.38)] == [True, False]
    assert [claim["holds"] for claim in claims(rows[0], 1.37)] == [False, False]
    assert claims(rows[1], 1.27)[0]["holds"] and not claims(rows[1], 1.26)[0]["holds"]
