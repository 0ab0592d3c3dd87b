import pytest

from snnk.hf.compression import figures

VECTORS = {
    "name": "a.csv",
    "kind": "texts",
    "inputs": 1500,
    "figures": {"cosine": 0.9, "worst cosine": 0.7, "same nearest": 0.8, "ten nearest in common": 0.85},
    "quantiles": {"cosine": {"worst": 0.7, "1 %": 0.75, "median": 0.91}},
}
CLASSES = {
    "name": "b.csv",
    "kind": "texts",
    "inputs": 60,
    "figures": {"cosine": 0.99, "worst cosine": -1.0, "KL divergence": 0.1, "same best": 0.75},
    "quantiles": {"KL divergence": {"worst": 2.0, "5 %": 1.0}},
}
NUMBERS = {"Pearson": 0.9, "Spearman": 0.8, "Kendall": 0.7, "relative squared error": 0.25}
DECODER = {"original perplexity": 34.0, "perplexity": 40.0, "same next token": 0.6}


def named(sets):
    return {line.name: line.values for line in figures.lines(sets)}


def test_every_figure_has_a_line_and_the_worst_its_count():
    found = named([VECTORS])
    assert found == {
        "mean cosine": (0.9,),
        "same nearest neighbour (top-1)": (0.8,),
        "ten nearest in common (top-10)": (0.85,),
        "cosine, worst of 1,500": (0.7,),
        "cosine, 1 % are below": (0.75,),
        "cosine, median": (0.91,),
    }
    assert all(line.meaning for line in figures.lines([VECTORS])[:3])
    assert named([{**VECTORS, "figures": {"of another kind": 1.0}, "quantiles": {}}]) == {"of another kind": (1.0,)}


def test_large_is_worse_for_divergences_and_cosines_of_logits_are_not_shown():
    assert named([CLASSES]) == {
        "KL divergence": (0.1,),
        "same prediction": (0.75,),
        "KL divergence, worst of 60": (2.0,),
        "KL divergence, 5 % are above": (1.0,),
    }


def test_sets_are_side_by_side():
    other = {**VECTORS, "inputs": 60, "figures": {"cosine": 0.5}, "quantiles": {"cosine": {"worst": 0.1}}}
    found = named([VECTORS, other])
    assert found["mean cosine"] == (0.9, 0.5) and found["cosine, worst"] == (0.7, 0.1)
    assert found["cosine, 1 % are below"] == (0.75, None) and found["same nearest neighbour (top-1)"] == (0.8, None)
    assert [figures.described(held) for held in (VECTORS, other)] == ["1,500 texts of a.csv", "60 texts of a.csv"]


@pytest.mark.parametrize(
    ("held", "names"),
    [
        (
            VECTORS,
            [
                "mean cosine",
                "same nearest neighbour (top-1)",
                "ten nearest in common (top-10)",
                "cosine, worst of 1,500",
            ],
        ),
        (CLASSES, ["same prediction", "KL divergence", "KL divergence, worst of 60"]),
        ({**CLASSES, "figures": NUMBERS, "quantiles": {}}, ["same order (Spearman)", "squared error over variance"]),
        (
            {**CLASSES, "figures": DECODER, "quantiles": {}},
            ["perplexity before", "perplexity after", "same next token"],
        ),
    ],
)
def test_headline(held, names):
    assert [name for name, _ in figures.headline(held)] == names


def test_several_outputs():
    several = {f"{name}: {what}": value for name in ("start", "end") for what, value in NUMBERS.items()}
    quantiles = {f"{name}: difference": {"worst": 1.5} for name in ("start", "end")}
    held = {**CLASSES, "figures": several, "quantiles": quantiles}
    assert dict(figures.headline(held)) == {
        "start: same order (Spearman)": 0.8,
        "start: squared error over variance": 0.25,
        "start: difference, worst of 60": 1.5,
    }
    assert {"end: same order (Kendall)", "end: difference, worst of 60"} <= set(named([held]))
    assert figures.measure_of(held) == "start: difference"
