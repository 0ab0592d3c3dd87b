"""Every cell of the paper's table of bundled transformers, on BERT-base and ViT-base without weights."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from snnk.experiments import EXPERIMENTS, bundled_latency
from snnk.experiments import bundled_transformers as experiment
from snnk.experiments.records import Results

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
    assert EXPERIMENTS["bundled-transformers"] is experiment
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


def test_latency_takes_turns_and_counts_processor_time(monkeypatch):
    calls, clock, threads = [], [0.0], torch.get_num_threads()

    def model(name, seconds):
        def forward(**inputs):
            calls.append((name, torch.get_num_threads(), torch.is_grad_enabled(), inputs))
            clock[0] += seconds + 10 * (len(calls) <= 2)  # what the first turn has beside is not counted

        return forward

    monkeypatch.setattr(bundled_latency.time, "process_time", lambda: clock[0])
    times = bundled_latency._turns([model("a", 3.0), model("b", 2.0)], {"x": 1}, rounds=3)
    assert times == [[3.0] * 3, [2.0] * 3] and torch.get_num_threads() == threads
    assert "".join(name for name, *_ in calls) == "abbaabba"
    assert {tuple(call[1:3]) for call in calls} == {(1, False)} and calls[0][3] == {"x": 1}


def test_latency_of_a_small_model_and_its_claims(tmp_path):
    config = replace(bundled_latency.QUICK, models=("BERT", "ViT"), images=1, length=8, rounds=1)
    results = Results(tmp_path / "rows.json", config)
    rows = list(bundled_latency.run(config, results))
    assert len(rows) == bundled_latency.total(config) and list(bundled_latency.run(config, results)) == rows
    assert all(row["seconds"] == row["all_seconds"][0] > 0 and row["multiply_adds_ratio"] > 1.2 for row in rows)
    figure = bundled_latency.plot(results)
    figure.savefig(tmp_path / "latency.png")
    assert len(figure.axes[0].get_legend().get_texts()) == 4  # each once

    def holds(time_ratio):
        made = {**rows[0], "multiply_adds_ratio": 1.48, "time_ratio": time_ratio}
        return [claim["holds"] for claim in bundled_latency.claims([made])]

    assert holds(1.41) == [True, True] and holds(1.38) == [True, False] and holds(1.37) == [False, False]
