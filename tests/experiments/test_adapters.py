"""Methods of equal size: rates, processes and claims."""

from dataclasses import replace

import pytest

from snnk.experiments import adapters
from snnk.experiments.lab.records import Results

from helpers.experiments import MEASURED, Rows


def test_rates_beside_the_best_are_tried_too(tmp_path):
    config = adapters.Config(("cola", "stsb"), ("snnk", "lora"), rates=(1.0, 2.0, 3.0, 4.0, 5.0), seeds=2)
    scores = {"snnk": {2: 0.5, 3: 0.4, 4: 0.3, 1: 0.6}, "lora": {2: 0.1, 3: 0.2, 4: 0.1}}
    results = Results(tmp_path / "rows.json", config)
    seen = []
    for wave in adapters.waves(config, results):
        seen.append([(k["stage"], k["task"], k["method"], k["learning_rate"], k["seed"]) for k in wave])
        for key in wave:
            results.add({**key, "validation": scores[key["method"]][key["learning_rate"]]})
    first = [("tuning", "cola", method, rate, 0) for method in ("snnk", "lora") for rate in (2.0, 3.0, 4.0)]
    assert seen[:2] == [first, [("tuning", "cola", "snnk", 1.0, 0)]] and len(seen) == 3
    rates = {"snnk": 1.0, "lora": 3.0}
    finals = [("final", task, m, rates[m], s) for s in (1, 2) for task in config.tasks for m in config.methods]
    assert seen[2] == finals
    assert len(results.rows) <= adapters.total(config)
    equal = Results(tmp_path / "equal.json", config)
    for wave in adapters.waves(config, equal):
        for key in reversed(wave):  # as processes end; all alike
            equal.add({**key, "validation": 0.0 if key["learning_rate"] > 2 else None})
    assert {r["learning_rate"] for r in equal if r["stage"] == "final"} == {3.0}


def test_a_training_that_diverges_is_a_row_without_figures(files):
    config = replace(adapters.QUICK, max_steps=20, schedule="constant")
    key = {"stage": "tuning", "task": "cola", "method": "houlsby", "learning_rate": 1e30, "seed": 0}
    assert adapters.measure(key, config, files) == {**key, "validation": None, "dev": None}


def test_a_row_of_its_own_process_has_its_own_memory(files):
    config = replace(adapters.QUICK, max_steps=2)  # --quick alone trains in this process
    key = {"stage": "tuning", "task": "cola", "method": "lora", "learning_rate": 1e-3, "seed": 0}
    here, there = adapters.measure(key, config, files), adapters._alone(key, config, files)
    assert 0.05 < there["peak_GB"] <= here["peak_GB"] + 0.05
    assert {k: v for k, v in here.items() if k not in MEASURED} == {k: v for k, v in there.items() if k not in MEASURED}


def equal_size(method, task, score, seed=1, stage="final"):
    facts = {"seed": seed, "trained": 78, "learning_rate": 1e-3, "model": "some"}
    return {"stage": stage, "method": method, "task": task, "dev": score, **facts}


def test_methods_of_equal_size_are_compared_on_what_both_have():
    rows = [equal_size("snnk", "cola", 0.3), equal_size("snnk", "stsb", 0.8), equal_size("lora", "cola", 0.28)]
    rows += [equal_size("lora", "stsb", 0.81), equal_size("snnk", "cola", 0.0, stage="tuning")]
    rows += [equal_size("snnk", "mrpc", 0.9), equal_size("lora", "stsb", 0.99, seed=2)]  # which the other has not
    (claim,) = adapters.claims(Rows(rows))
    told = "snnk 55.00 (78 trained), lora 54.50 (78 trained); some, mean of cola (1 seed), stsb (1 seed)"
    assert (claim["ours"], claim["holds"], claim["tolerance"]) == (told, True, "none")
    rows[0]["trained"] = 79  # a task with more classes: still one bar a method
    (axes,) = adapters.plot(Rows(rows)).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["snnk (78)", "lora (78)"]
    assert adapters.scores(Rows(rows)) == pytest.approx({"snnk": 55.0, "lora": 54.5})
    config = {"tasks": ["cola", "stsb", "mrpc"], "methods": ["snnk", "lora"], "seeds": 1}
    assert adapters.left(Rows(rows, **config)) == ["mrpc: 1 of 2 final rows, of 1 methods"]
    rows[2]["dev"] = None  # it diverged: no seed is left out for that
    assert [(c["ours"], c["holds"]) for c in adapters.claims(Rows(rows))] == [("diverged", False)]
    assert list(adapters.scores(Rows(rows))) == ["snnk", "lora"]


@pytest.mark.parametrize(("second", "holds", "tie"), [(0.31, True, ""), (0.26, False, " (a tie)")])
def test_methods_of_equal_size_differ_by_more_than_seeds_do(second, holds, tie):
    """Gaps of 1 and `second` - 0.28 points: 2 +- 1, or -0.5 +- 1.5."""
    rows = [equal_size("snnk", "cola", 0.29), equal_size("lora", "cola", 0.28)]
    rows += [equal_size("snnk", "cola", second, 2), equal_size("lora", "cola", 0.28, 2)]
    (claim,) = adapters.claims(Rows(rows))
    assert claim["holds"] is holds and f"(78 trained){tie}; some, mean of cola (2 seeds)" in claim["ours"]
    assert claim["tolerance"].startswith("1.00 points" if holds else "1.50 points")
    rows += [equal_size("snnk", "stsb", 0.8), equal_size("lora", "stsb", 0.8)]  # one seed: with the other's variance
    (claim,) = adapters.claims(Rows(rows))
    error = (2 / 2 + 2) ** 0.5 / 2 if holds else (4.5 / 2 + 4.5) ** 0.5 / 2
    assert claim["tolerance"].startswith(f"{error:.2f} points") and "stsb (1 seed)" in claim["ours"]
