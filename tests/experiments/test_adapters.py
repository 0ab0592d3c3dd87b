"""Methods of equal size: rates, processes and claims."""

import pytest

from snnk.experiments import adapters

from helpers.experiments import Rows


def equal_size(method, task, score, seed=0, rate=1e-3, validation=1.0):
    facts = {"seed": seed, "trained": 78, "learning_rate": rate, "model": "some", "late_gain": 0.0}
    facts |= {
        "validation_loss": 1.0,
        "features": adapters.SIZES[method],
        "steps": 9,
        "start_validation": 0.0,
        "metric": "mcc",
    }
    return {"method": method, "task": task, "score": score, "validation": validation, **facts}


def test_methods_of_equal_size_are_compared_on_what_both_have():
    rows = [equal_size("snnk", "cola", 30.0), equal_size("snnk", "stsb", 80.0), equal_size("lora", "cola", 28.0)]
    rows += [equal_size("lora", "stsb", 81.0), equal_size("snnk", "cola", 0.0, rate=1e-2, validation=0.5)]
    rows += [equal_size("snnk", "mrpc", 90.0), equal_size("lora", "stsb", 99.0, seed=2)]  # which the other has not
    (claim,) = adapters.claims(Rows(rows, seed=0))
    told = "snnk 55.00 (78 trained), lora 54.50 (78 trained); some, mean of cola (1 seed), stsb (1 seed)"
    assert (claim["ours"], claim["holds"], claim["tolerance"]) == (told, None, "none: one seed has no standard error")
    rows[0]["trained"] = 79  # a task with more classes: still one bar a method
    (axes,) = adapters.plot(Rows(rows, seed=0)).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["snnk (78)", "lora (78)"]
    assert adapters.scores(Rows(rows, seed=0)) == pytest.approx({"snnk": 55.0, "lora": 54.5})
    config = {"tasks": ["cola", "stsb", "mrpc"], "methods": ["snnk", "lora"], "seeds": 1, "seed": 0}
    assert adapters.left(Rows(rows, **config)) == ["mrpc: no rows of lora with 8"]
    rows[2]["score"] = None  # it diverged: no seed is left out for that
    assert [(c["ours"], c["holds"]) for c in adapters.claims(Rows(rows, seed=0))] == [("diverged", False)]
    assert list(adapters.scores(Rows(rows, seed=0))) == ["snnk", "lora"]


@pytest.mark.parametrize(("second", "holds", "tie"), [(31.0, True, ""), (26.0, False, " (a tie)")])
def test_methods_of_equal_size_differ_by_more_than_seeds_do(second, holds, tie):
    """Gaps of 1 and `second` - 28 points: 2 +- 1, or -0.5 +- 1.5."""
    rows = [equal_size("snnk", "cola", 29.0), equal_size("lora", "cola", 28.0)]
    rows += [equal_size("snnk", "cola", second, 2), equal_size("lora", "cola", 28.0, 2)]
    (claim,) = adapters.claims(Rows(rows, seed=0))
    assert claim["holds"] is holds and f"(78 trained){tie}; some, mean of cola (2 seeds)" in claim["ours"]
    assert claim["tolerance"].startswith("1.00 points" if holds else "1.50 points")
    rows += [equal_size("snnk", "stsb", 80.0), equal_size("lora", "stsb", 80.0)]  # one seed: with the other's variance
    (claim,) = adapters.claims(Rows(rows, seed=0))
    error = (2 / 2 + 2) ** 0.5 / 2 if holds else (4.5 / 2 + 4.5) ** 0.5 / 2
    assert claim["tolerance"].startswith(f"{error:.2f} points") and "stsb (1 seed)" in claim["ours"]


def test_a_claim_is_open_while_scores_still_rise():
    rows = [equal_size("snnk", "cola", 29.0), equal_size("lora", "cola", 28.0)]
    rows += [equal_size("snnk", "cola", 29.5, 2), equal_size("lora", "cola", 28.0, 2)]
    assert [c["holds"] for c in adapters.claims(Rows(rows, seed=0))] == [True]
    rows[1]["late_gain"] = rows[3]["late_gain"] = 0.7
    (claim,) = adapters.claims(Rows(rows, seed=0))
    assert claim["holds"] is None and claim["ours"].endswith("still rising when training was cut off")


def test_the_closed_form_is_compared_with_rivals_and_with_its_parts():
    names = {"closed-form": 80.0, "closed-form, four layers": 78.0, "snnk-tuned, neurons": 79.0, "lora": 78.5}
    rows = [equal_size(name, "stsb", score, seed) for name, score in names.items() for seed in (0, 1)]
    found = {c["paper"].removeprefix("not in the paper: "): c["holds"] for c in adapters.claims(Rows(rows, seed=0))}
    assert found == {
        "closed-form above lora by a point or more": True,
        "closed form on neurons above hidden states": True,
        "training above the closed form on neurons": False,
    }


def lead(rows):
    """The claim about our first method and LoRA."""
    start = f"not in the paper: {adapters.TUNED} above lora by"
    return next(c for c in adapters.claims(Rows(rows, seed=0)) if c["paper"].startswith(start))


def test_comparisons_of_pairs_share_the_rows_of_single_texts():
    """The tasks with single texts have nothing to compare, and are trained once."""
    tasks, methods = ("cola", "stsb"), ("snnk-tuned", f"lora{adapters.PAIRS}", adapters.TUNED)
    cells = adapters.cells(adapters.Config(tasks=tasks, methods=methods))
    assert cells == [("cola", "snnk-tuned", 8), *(("stsb", method, 8) for method in methods)]
    few = [equal_size("snnk-tuned", "cola", 20.0), equal_size("lora", "cola", 21.0), equal_size("lora", "stsb", 70.0)]
    few.append(equal_size(adapters.TUNED, "stsb", 80.0))
    (axes,) = adapters.plot(Rows(few, seed=0)).axes
    # on cola, the first method is the plain one
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"{adapters.TUNED} (78)", "lora (78)"]
    rows = [equal_size("snnk-tuned", "cola", score, seed) for seed, score in enumerate((20.0, 20.2))]
    rows += [equal_size("lora", "cola", 20.0, seed) for seed in (0, 1)]
    rows += [
        equal_size(name, "stsb", score, seed)
        for name, score in ((adapters.TUNED, 86.0), ("lora", 83.0))
        for seed in (0, 1)
    ]
    claim = lead(rows)
    # gaps of 0 and 0.2, and twice of 3: 1.55 with a standard error of (0.02 / 2)^0.5 / 2
    assert claim["holds"] and claim["tolerance"].startswith("0.10 points, 2 standard errors")
    assert "lora 51.50" in claim["ours"] and f"{adapters.TUNED} 53.05" in claim["ours"]
    for r in rows:
        r["score"] = 84.5 if (r["method"], r["task"]) == (adapters.TUNED, "stsb") else r["score"]
    claim = lead(rows)
    assert not claim["holds"] and "(a tie)" not in claim["ours"]  # 0.8 points: ahead, but by less than one
    alone = [r for r in rows if r["seed"] == 0]
    claim = lead(alone)
    assert claim["holds"] is None  # one seed has no standard error
