"""Methods of equal size: rates, processes and claims."""

from dataclasses import replace

import pytest

from snnk.experiments import adapters
from snnk.experiments.lab.records import Results

from helpers.experiments import MEASURED, Rows


def test_rates_beside_the_best_are_tried_too(tmp_path):
    config = adapters.Config(("cola", "stsb"), ("snnk", "full"), rates=(1.0, 2.0, 3.0, 4.0, 5.0), seeds=2)
    scores = {"snnk": {2: 0.5, 3: 0.4, 4: 0.3, 1: 0.6}, "full": {0.02: 0.1, 0.03: 0.2, 0.04: 0.1}}
    results = Results(tmp_path / "rows.json", config)
    seen = []
    for wave in adapters.waves(config, results):
        seen.append([(k["task"], k["method"], k["learning_rate"], k["seed"]) for k in wave])
        for key in wave:
            results.add({**key, "validation": scores[key["method"]][key["learning_rate"]]})
    for task, waves in (("cola", seen[:3]), ("stsb", seen[3:])):
        first = [(task, "snnk", rate, 0) for rate in (2.0, 3.0, 4.0)]
        first += [(task, "full", rate, 0) for rate in (0.02, 0.03, 0.04)]
        assert waves == [first, [(task, "snnk", 1.0, 0)], [(task, "snnk", 1.0, 1), (task, "full", 0.03, 1)]]
    assert len(results.rows) <= adapters.total(config)
    final = {(r["task"], r["method"], r["seed"], r["learning_rate"]) for r in adapters.chosen(results)}
    rates = {"snnk": 1.0, "full": 0.03}
    assert final == {(t, m, s, rates[m]) for t in config.tasks for m in config.methods for s in (0, 1)}
    assert adapters.left(results) == []
    equal = Results(tmp_path / "equal.json", config)
    for wave in adapters.waves(config, equal):
        for key in reversed(wave):  # as processes end; all alike
            equal.add({**key, "validation": 0.0 if key["learning_rate"] in (3, 4, 5, 0.03, 0.04) else None})
    assert {r["learning_rate"] for r in adapters.chosen(equal)} == {3.0, 0.03}


def test_a_training_that_diverges_is_a_row_without_figures(files):
    config = replace(adapters.QUICK, epochs=5, schedule="constant")
    key = {"task": "cola", "method": "houlsby", "learning_rate": 1e30, "seed": 0}
    assert adapters.measure(key, config, files) == {**key, "validation": None, "dev": None, "late_gain": 0.0}


def test_rows_of_own_processes_are_those_of_this_one_and_have_their_own_memory(files):
    config = replace(adapters.QUICK, train_rows=44)  # --quick alone trains in this process
    keys = [{"task": "cola", "method": m, "learning_rate": 1e-3, "seed": 0} for m in ("lora", "pfeiffer")]
    here = {key["method"]: adapters.measure(key, config, files) for key in keys}
    for there in adapters._measured(keys, config, files):
        own = here.pop(there["method"])
        assert 0.05 < there["peak_GB"] <= own["peak_GB"] + 0.05
        assert {k: v for k, v in own.items() if k not in MEASURED} == {
            k: v for k, v in there.items() if k not in MEASURED
        }
        assert there["epochs"] == 1 and there["ended"] is False  # too few epochs to tell
    assert not here


def equal_size(method, task, score, seed=0, rate=1e-3, validation=1.0):
    facts = {"seed": seed, "trained": 78, "learning_rate": rate, "model": "some", "late_gain": 0.0}
    return {"method": method, "task": task, "dev": score, "validation": validation, **facts}


def test_methods_of_equal_size_are_compared_on_what_both_have():
    rows = [equal_size("snnk", "cola", 0.3), equal_size("snnk", "stsb", 0.8), equal_size("lora", "cola", 0.28)]
    rows += [equal_size("lora", "stsb", 0.81), equal_size("snnk", "cola", 0.0, rate=1e-2, validation=0.5)]
    rows += [equal_size("snnk", "mrpc", 0.9), equal_size("lora", "stsb", 0.99, seed=2)]  # which the other has not
    (claim,) = adapters.claims(Rows(rows, seed=0))
    told = "snnk 55.00 (78 trained), lora 54.50 (78 trained); some, mean of cola (1 seed), stsb (1 seed)"
    assert (claim["ours"], claim["holds"], claim["tolerance"]) == (told, True, "none")
    rows[0]["trained"] = 79  # a task with more classes: still one bar a method
    (axes,) = adapters.plot(Rows(rows, seed=0)).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["snnk (78)", "lora (78)"]
    assert adapters.scores(Rows(rows, seed=0)) == pytest.approx({"snnk": 55.0, "lora": 54.5})
    config = {"tasks": ["cola", "stsb", "mrpc"], "methods": ["snnk", "lora"], "seeds": 1, "seed": 0}
    assert adapters.left(Rows(rows, **config)) == ["mrpc: 1 of 2 final rows, of 1 methods"]
    rows[2]["dev"] = None  # it diverged: no seed is left out for that
    assert [(c["ours"], c["holds"]) for c in adapters.claims(Rows(rows, seed=0))] == [("diverged", False)]
    assert list(adapters.scores(Rows(rows, seed=0))) == ["snnk", "lora"]


@pytest.mark.parametrize(("second", "holds", "tie"), [(0.31, True, ""), (0.26, False, " (a tie)")])
def test_methods_of_equal_size_differ_by_more_than_seeds_do(second, holds, tie):
    """Gaps of 1 and `second` - 0.28 points: 2 +- 1, or -0.5 +- 1.5."""
    rows = [equal_size("snnk", "cola", 0.29), equal_size("lora", "cola", 0.28)]
    rows += [equal_size("snnk", "cola", second, 2), equal_size("lora", "cola", 0.28, 2)]
    (claim,) = adapters.claims(Rows(rows, seed=0))
    assert claim["holds"] is holds and f"(78 trained){tie}; some, mean of cola (2 seeds)" in claim["ours"]
    assert claim["tolerance"].startswith("1.00 points" if holds else "1.50 points")
    rows += [equal_size("snnk", "stsb", 0.8), equal_size("lora", "stsb", 0.8)]  # one seed: with the other's variance
    (claim,) = adapters.claims(Rows(rows, seed=0))
    error = (2 / 2 + 2) ** 0.5 / 2 if holds else (4.5 / 2 + 4.5) ** 0.5 / 2
    assert claim["tolerance"].startswith(f"{error:.2f} points") and "stsb (1 seed)" in claim["ours"]


def test_a_claim_is_open_while_scores_still_rise():
    rows = [equal_size("snnk", "cola", 0.29), equal_size("lora", "cola", 0.28)]
    assert [c["holds"] for c in adapters.claims(Rows(rows, seed=0))] == [True]
    rows[1]["late_gain"] = 0.7
    (claim,) = adapters.claims(Rows(rows, seed=0))
    assert claim["holds"] is None and claim["ours"].endswith("still rising when training was cut off")
