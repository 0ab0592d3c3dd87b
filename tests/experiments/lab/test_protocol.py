"""Training to the end: which rates and seeds are run, in which processes, and which rows are final."""

from dataclasses import dataclass, replace

import pytest

from snnk.experiments.lab import protocol
from snnk.experiments.lab.protocol import DRAWN, LAYERS, NEURONS, PAIRS, Protocol
from snnk.experiments.lab.records import Results
from snnk.experiments.lab.tuning import course, have_ended

from helpers.experiments import MEASURED

SOLVED = "bundled-solved"
SMALL = Protocol(epochs=1, train_rows=44, pooling="mean")


@dataclass(frozen=True)
class Config(Protocol):
    tasks: tuple[str, ...] = ("cola", "stsb")


def key_of(task, method, features=None, rate=1e-3, seed=0):
    return {"task": task, "method": method, "features": features, "learning_rate": rate, "seed": seed}


def test_rates_beside_the_best_are_tried_too(tmp_path):
    config = Config(rates=(1.0, 2.0, 3.0, 4.0, 5.0), seeds=2)
    cells = [(task, method, None) for task in config.tasks for method in ("snnk", "full", SOLVED)]
    scores = {"snnk": {2: 5, 3: 4, 4: 3, 1: 6}, "full": {0.02: 1, 0.03: 2, 0.04: 1}, SOLVED: {1: 0}}
    results = Results(tmp_path / "rows.json", config)
    seen = []
    for wave in protocol.waves(cells, config, results):
        seen.append([(k["task"], k["method"], k["learning_rate"], k["seed"]) for k in wave])
        for key in wave:
            results.add({**key, "validation": scores[key["method"]][key["learning_rate"]], "validation_loss": 1.0})
    final = {"snnk": 1.0, "full": 0.03, SOLVED: 1.0}
    for task, waves in (("cola", seen[:3]), ("stsb", seen[3:])):
        first = [(task, "snnk", rate, 0) for rate in (2.0, 3.0, 4.0)]
        first += [(task, "full", rate, 0) for rate in (0.02, 0.03, 0.04)] + [(task, SOLVED, 1.0, 0)]
        assert waves == [first, [(task, "snnk", 1.0, 0)], [(task, m, rate, 1) for m, rate in final.items()]]
    assert len(results.rows) <= config.most(cells) and protocol.missing(cells, config, results) == []
    found = {(r["task"], r["method"], r["seed"], r["learning_rate"]) for r in protocol.chosen(results, 0)}
    assert found == {(t, m, s, final[m]) for t in config.tasks for m in final for s in (0, 1)}
    more = replace(config, seeds=3)
    assert protocol.missing([("cola", "snnk", None)], more, results) == ["cola: snnk, 2 of 3 seeds"]


@pytest.mark.parametrize("lower", [False, True])
def test_of_equal_scores_the_loss_and_then_the_rate_chooses_in_whatever_order_processes_end(tmp_path, lower):
    config = Config(rates=(1.0, 3.0, 4.0, 5.0, 6.0) if lower else (1.0, 2.0, 3.0, 4.0, 5.0), seeds=2)
    results = Results(tmp_path / "rows.json", config)
    for wave in protocol.waves([("cola", "snnk", 8)], config, results):
        for key in reversed(wave):
            rate = key["learning_rate"]
            facts = {"validation": 0.0 if rate > 2 else None, "validation_loss": 1.0 if rate < 5 or not lower else 0.9}
            results.add({**key, **facts})
    assert {r["learning_rate"] for r in protocol.chosen(results, 0)} == {5.0 if lower else 3.0}


def test_rows_of_other_tasks_and_methods_are_kept(tmp_path):
    """A run of more tasks goes on from the rows of fewer."""
    first = Results(tmp_path / "rows.json", Config(tasks=("cola",)))
    first.add({**key_of("cola", "lora", 8), "validation": 1.0})
    again = Results(tmp_path / "rows.json", Config(tasks=("stsb", "cola")))
    assert again.find(task="cola", method="lora") is not None
    lower = Config(rates=(3e-4, 3e-3), tasks=("cola",), seeds=2)  # the best known rate is none of these
    goes_on = Results(tmp_path / "rows.json", lower)
    seen = []
    for wave in protocol.waves([("cola", "lora", 8)], lower, goes_on):
        seen.append([(k["learning_rate"], k["seed"]) for k in wave])
        for key in wave:
            goes_on.add({**key, "validation": 0.5 - key["learning_rate"], "validation_loss": 1.0})
    assert seen == [[(3e-4, 0), (3e-3, 0)], [(3e-4, 1)]]
    other = Results(tmp_path / "rows.json", Config(epochs=3))
    assert other.find(task="cola") is None


def test_pairs_have_rows_and_a_pooling_of_their_own(files):
    config = replace(SMALL, pair_rows=40)
    assert (config.rows("cola"), config.rows("stsb"), SMALL.rows("stsb"), config.rows("cifar10")) == (44, 40, 44, 44)
    found = {name: protocol.measure(key_of("stsb", name, 4), config, files) for name in ("snnk", f"snnk{PAIRS}")}
    assert {name: row["pooling"] for name, row in found.items()} == {"snnk": "mean", f"snnk{PAIRS}": "pairs"}
    one, two = (row["trained"] for row in found.values())
    assert two > one  # the classifier reads four times as many numbers, or more
    more = [(task, f"closed-form{end}") for task in ("cola", "stsb") for end in ("", LAYERS, NEURONS)]
    read = [protocol.measure(key_of(task, name, None), config, files)["pooling"] for task, name in more]
    assert read == ["neurons", "layers", "neurons", "neurons", "pairs", "neuron-pairs"]


def test_a_training_that_diverges_is_a_row_without_figures(files):
    config = replace(SMALL, epochs=5, schedule="constant")
    key = key_of("cola", "houlsby", 4, rate=1e30)
    row = protocol.measure(key, config, files)
    assert row.items() >= key.items() and row["validation"] is row["score"] is None and row["late_gain"] == 0


def test_rows_of_own_processes_are_those_of_this_one_and_have_their_own_memory(files):
    keys = [key_of("cola", "lora", 4), key_of("cola", "pfeiffer", 4)]
    here = {key["method"]: protocol.measure(key, SMALL, files) for key in keys}
    for there in protocol.measured(keys, SMALL, files):
        own = here.pop(there["method"])
        assert 0.05 < there["peak_GB"] <= own["peak_GB"] + 0.05
        assert all(there[name] == value for name, value in own.items() if name not in MEASURED)
        assert there["epochs"] == 1
    assert not here


def test_a_start_at_random_and_a_head_without_training(files):
    drawn = protocol.measure(key_of("cola", f"lora{DRAWN}", 4, rate=1e-9), SMALL, files)
    fitted = protocol.measure(key_of("cola", "lora", 4, rate=1e-9), SMALL, files)
    assert drawn["start_validation"] != fitted["start_validation"]
    untrained = protocol.measure(key_of("stsb", SOLVED, 16), SMALL, files)
    assert untrained["steps"] == 0 and untrained["pooling"] == "model" and have_ended([untrained])


@pytest.mark.parametrize(
    ("scores", "stopped", "gain"),
    [
        ([0.1, 0.5, 0.6, 0.61], False, 11.0),  # above 0.5
        ([0.1, 0.6, 0.5, 0.61], False, 1.0),
        ([0.1, 0.6, 0.5, 0.4, 0.3], True, 0.0),
        ([0.1, 0.3], False, 20.0),
        ([0.1], False, 0.0),
        ([0.1, 0.61, 0.6, 0.61], False, 0.0),
    ],
)
def test_a_training_has_ended_when_its_score_rises_no_more(scores, stopped, gain):
    epochs = [{"epoch": float(i), "mcc": score} for i, score in enumerate(scores)]
    best = scores.index(max(scores))
    found = course({"epochs": epochs, "best": best, "stopped_early": stopped}, "mcc")
    assert found["late_gain"] == pytest.approx(gain) and found["ended"] is (gain <= 0.5)
    assert (found["epochs"], found["best_epoch"]) == (len(scores) - 1, best)
    assert have_ended([found, {"late_gain": 0.0}]) is (gain <= 1.0)  # in the mean
    assert not have_ended([{}]) and not have_ended([])  # rows of before
