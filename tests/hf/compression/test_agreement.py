"""Figures of agreement against values computed by hand, and outputs of heads of every kind."""

import math

import pytest
import torch
import transformers as hf

from snnk.hf.compression.agreement import agreement, compare
from snnk.hf.compression.outputs import MOST_TOKENS, POOLINGS, VECTORS, Outputs, outputs_of, probe

from helpers.architectures import perturb_
from helpers.compression import TINY
from helpers.heads import make

IDS = torch.tensor([[2, 5, 6, 7], [2, 8, 0, 0], [2, 9, 10, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
BATCH = {"input_ids": IDS, "attention_mask": MASK}
CHOICES = {name: torch.stack([x, x.flip(0)], 1) for name, x in BATCH.items()}  # (3, 2, 4)
TOKENS = int(MASK.sum())
POOLED = {"cosine", "worst cosine", "rank agreement", "same nearest"}
CLASSES = {"cosine", "worst cosine", "KL divergence", "same best"}
NUMBERS = {"Pearson", "Spearman", "Kendall", "relative squared error"}


def labelled(labels, figures):
    return {f"{label}: {figure}" for label in labels for figure in figures}


@pytest.mark.parametrize(
    ("name", "options", "batch", "shapes", "figures"),
    [
        ("BertModel", {}, BATCH, {VECTORS: (3, 8)}, POOLED),
        ("BertForSequenceClassification", {"num_labels": 3}, BATCH, {"logits": (3, 3)}, CLASSES),
        ("BertForSequenceClassification", {"num_labels": 4}, BATCH, {"logits": (3, 4)}, CLASSES),  # as many as tokens
        ("BertForSequenceClassification", {"num_labels": 1}, BATCH, {"logits": (3, 1)}, NUMBERS),
        ("BertForTokenClassification", {"num_labels": 5}, BATCH, {"logits": (TOKENS, 5)}, CLASSES),
        (
            "BertForQuestionAnswering",
            {},
            BATCH,
            {"start_logits": (TOKENS, 1), "end_logits": (TOKENS, 1)},
            labelled(["start", "end"], NUMBERS),
        ),
        ("BertForMultipleChoice", {}, CHOICES, {"logits": (3, 2)}, CLASSES),
        ("BertForNextSentencePrediction", {}, BATCH, {"logits": (3, 2)}, CLASSES),
        (
            "BertForPreTraining",
            {},
            BATCH,
            {"prediction_logits": (TOKENS, 43), "seq_relationship_logits": (3, 2)},
            labelled(["prediction", "seq relationship"], CLASSES),
        ),
        ("ElectraForPreTraining", {"embedding_size": 8}, BATCH, {"logits": (TOKENS, 1)}, NUMBERS),
        ("BertForMaskedLM", {}, BATCH, {"logits": (TOKENS, 43)}, CLASSES),
        ("BertLMHeadModel", {}, BATCH, {"logits": (TOKENS, 43)}, CLASSES),  # sees the token that it would predict
    ],
)
def test_heads(name, options, batch, shapes, figures):
    model = make(name, **options)
    found = probe(model, batch)
    assert {key: tuple(value.shape) for key, value in found.values.items()} == shapes
    assert found.compared.startswith("last hidden states" if VECTORS in shapes else " and ".join(shapes))
    perturb_(model, scale=0.3)
    other = probe(model, batch)
    assert set(agreement([found], [found])) == figures
    same, another = agreement([found] * 2, [found] * 2), agreement([found] * 2, [other] * 2)
    for key in figures:
        best = 0.0 if key.endswith(("divergence", "error")) else 1.0
        assert same[key] == pytest.approx(best, abs=1e-6) and math.isfinite(another[key])
    assert any(abs(same[key] - another[key]) > 1e-3 for key in figures)
    if batch is BATCH:  # with two tokens, which two classes of a sequence are not
        two = probe(model, {key: value[:, :2] for key, value in batch.items()})
        assert {key: x.shape[1] for key, x in two.values.items()} == {key: shape[1] for key, shape in shapes.items()}


def test_models_of_images_and_a_head_without_logits():
    sizes = {key: value for key, value in TINY.items() if key not in ("vocab_size", "max_position_embeddings")}
    model = hf.ViTForMaskedImageModeling(hf.ViTConfig(**sizes, image_size=8, patch_size=4)).eval()
    pixels = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    with torch.no_grad():
        wanted = model.vit(**pixels).last_hidden_state.mean(1)
    torch.testing.assert_close(probe(model, pixels).values[VECTORS], wanted)


def test_padding_is_left_out():
    model = make("BertModel")
    with torch.no_grad():
        states = model(**BATCH).last_hidden_state
    by_hand = torch.stack([states[0].mean(0), states[1, :2].mean(0), states[2, :3].mean(0)])
    torch.testing.assert_close(outputs_of(model, BATCH).values[VECTORS], by_hand)
    scores = make("ElectraForPreTraining", embedding_size=8)
    with torch.no_grad():
        logits = scores(**BATCH).logits
    torch.testing.assert_close(outputs_of(scores, BATCH).values["logits"][:, 0], logits[MASK.bool()])
    labels = make("BertForTokenClassification")
    with torch.no_grad():
        logits = labels(**BATCH).logits
    torch.testing.assert_close(outputs_of(labels, BATCH).values["logits"], logits[MASK.bool()])


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification"])
def test_a_sequence_of_padding_alone_is_left_out(name):
    model = make(name)
    empty = {"input_ids": torch.cat([IDS, 0 * IDS[:1]]), "attention_mask": torch.cat([MASK, 0 * MASK[:1]])}
    for key, value in outputs_of(model, BATCH).values.items():
        torch.testing.assert_close(outputs_of(model, empty).values[key], value)
    first = {"input_ids": empty["input_ids"].flip(0), "attention_mask": empty["attention_mask"].flip(0)}
    assert all(numbers.tolist() == [1, 2, 3] for numbers in outputs_of(model, first).inputs.values())
    nothing = outputs_of(model, {"input_ids": IDS[:1], "attention_mask": 0 * MASK[:1]})
    with pytest.raises(ValueError, match="nothing but padding"):
        agreement([nothing], [nothing])
    assert agreement([nothing, outputs_of(model, BATCH)], [nothing, outputs_of(model, BATCH)])["cosine"] > 0.999


def test_many_tokens_of_a_vocabulary_are_cut_and_single_numbers_are_not():
    batch = {"input_ids": torch.randint(43, (30, 20), generator=torch.Generator().manual_seed(0))}
    found = outputs_of(make("BertForMaskedLM"), batch)
    assert found.values["logits"].shape == (MOST_TOKENS, 43)
    assert found.inputs["logits"].bincount(minlength=30).min() >= 8  # of 20 tokens per input
    assert outputs_of(make("BertForQuestionAnswering"), batch).values["end_logits"].shape == (600, 1)


def one(name, values, inputs=None):
    """Outputs of batches, one row per input unless `inputs` has the numbers of the rows' inputs in each batch."""
    numbers = [range(len(rows)) for rows in values] if inputs is None else inputs
    return [
        Outputs({name: torch.tensor(rows, dtype=torch.float32)}, {name: torch.tensor(n)}, max(n) + 1)
        for rows, n in zip(values, map(list, numbers), strict=True)
    ]


def test_figures_of_logits_by_hand():
    """In two batches; p = (3/4, 1/4) against q = (1/4, 3/4), and twice the same."""
    three = math.log(3)
    before = one("logits", [[[three, 0.0], [0.0, three]], [[0.0, three]]])
    after = one("logits", [[[0.0, three], [0.0, three]], [[0.0, 2 * three]]])
    found = agreement(before, after)
    assert found["cosine"] == pytest.approx(2 / 3) and found["worst cosine"] == pytest.approx(0, abs=1e-7)
    assert found["same best"] == pytest.approx(2 / 3)
    first = 0.75 * math.log(3) - 0.25 * math.log(3)
    third = 0.25 * math.log((1 / 4) / (1 / 10)) + 0.75 * math.log((3 / 4) / (9 / 10))  # the other way round: 0.092
    assert found["KL divergence"] == pytest.approx((first + third) / 3, abs=1e-6)


def circle(degrees):
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1).tolist()


def test_rank_agreement_by_hand():
    """Neighbours at 0, 30 and 60 degrees; then at 0, 60 and 30: Spearman of (1, 2, 3) and (1, 3, 2) is 1/2."""
    before, after = (one(VECTORS, [circle(degrees)]) for degrees in ([0, 0, 30, 90], [0, 0, 60, 90]))
    assert agreement(before, after)["rank agreement"] == pytest.approx(0.5)
    assert agreement(before, before)["rank agreement"] == pytest.approx(1.0)
    alike = one(VECTORS, [[[1.0, 0.0]] * 4])
    assert "rank agreement" not in agreement(alike, before)
    assert agreement(before, alike)["rank agreement"] == 0.0


def test_the_nearest_neighbour_by_hand():
    """Vectors at 0, 10, 30, 70 degrees have the neighbours 1, 0, 1, 2, and with 40 in place of 10, 2, 2, 1, 1."""
    before, after = (one(VECTORS, [circle(d[:1]), circle(d[1:])]) for d in ([0, 10, 30, 70], [0, 40, 30, 70]))
    found = agreement(before, after)
    assert found["same nearest"] == 0.25 and agreement(before, before)["same nearest"] == 1.0
    assert "ten nearest in common" not in found  # of four
    assert "same nearest" not in agreement(one(VECTORS, [circle([0])]), one(VECTORS, [circle([1])]))


def test_ten_nearest_against_sets():
    """On 30 points of a circle whose cosines all differ, in batches; longer vectors have the same neighbours."""
    generator = torch.Generator().manual_seed(0)
    before, after = (170 * torch.rand(30, generator=generator, dtype=torch.float64) for _ in range(2))

    def nearest(degrees):
        return [set((degrees - x).abs().argsort()[1:11].tolist()) for x in degrees]

    wanted = sum(len(a & b) for a, b in zip(nearest(before), nearest(after), strict=True)) / 300
    assert 0.2 < wanted < 0.8
    rows = [one(VECTORS, [circle(x[:7].tolist()), circle(x[7:].tolist())]) for x in (before, after)]
    assert agreement(*rows)["ten nearest in common"] == pytest.approx(wanted)
    longer = [Outputs({VECTORS: 3 * x.values[VECTORS]}, x.inputs, x.size) for x in rows[0]]
    assert agreement(rows[0], longer)["ten nearest in common"] == 1.0


def test_quantiles_over_inputs():
    """Cosines 0, 0.005, ..., 0.995 of 200 inputs: 1 % of them are below 0.00995, which lies between two of them."""
    before, after = one(VECTORS, [[[1, 0]] * 200]), one(VECTORS, [[[i, (200**2 - i**2) ** 0.5] for i in range(200)]])
    found = compare(before, after)
    wanted = {"worst": 0.0, "1 %": 0.00995, "5 %": 0.04975, "median": 0.4975}
    assert found.inputs == 200 and found.quantiles == {"cosine": pytest.approx(wanted, abs=1e-6)}
    assert [case.input for case in found.worst] == list(range(10)) and found.worst[3].value == pytest.approx(0.015)
    # differences 0, 1, ..., 199 of numbers that are 1 from their mean: the largest are the worst
    ones = [[-1.0], [1.0]] * 100
    found = compare(one("logits", [ones]), one("logits", [[[x + i] for i, (x,) in enumerate(ones)]]))
    wanted = {"worst": 199.0, "1 %": 197.01, "5 %": 189.05, "median": 99.5}
    assert found.quantiles == {"difference": pytest.approx(wanted, abs=1e-3)}
    few = compare(one(VECTORS, [[[1, 0]] * 19]), one(VECTORS, [[[1, 0]] * 19]))
    assert set(few.quantiles["cosine"]) == {"worst", "median"}  # 5 % of 19 is less than one


def test_the_worst_of_single_numbers():
    """Differences 1, 0, 3, 0 of numbers whose standard deviation is 2, in batches of two inputs."""
    found = compare(one("logits", [[[0], [0]], [[4], [4]]]), one("logits", [[[1], [0]], [[1], [4]]]))
    assert found.quantiles == {"difference": {"worst": 1.5, "median": pytest.approx(0.25)}}
    assert [(c.input, c.value, c.before, c.after) for c in found.worst[:2]] == [(2, 1.5, 4.0, 1.0), (0, 0.5, 0.0, 1.0)]
    constant = compare(one("logits", [[[2], [2]]]), one("logits", [[[1], [3]]]))
    assert constant.quantiles == {} and constant.worst == ()


def test_the_worst_of_classes_and_each_class():
    three = math.log(3)
    before = one("logits", [[[three, 0], [0, three]], [[three, 0], [0, three], [0, three]]])
    after = one("logits", [[[three, 0], [0, three]], [[three, 0], [three, 0], [0, 2 * three]]])
    found = compare(before, after)
    assert found.classes == {0: (2, 1.0), 1: (3, pytest.approx(2 / 3))}
    worst = found.worst[0]
    assert (worst.input, worst.before, worst.after) == (3, 1, 0) and worst.value == pytest.approx(0.5 * three)
    assert found.worst[1].input == 4 and found.quantiles["KL divergence"]["worst"] == pytest.approx(0.5 * three)
    many = one("logits", [torch.eye(30).tolist()])
    assert compare(many, many).classes == {}


def test_an_input_has_the_mean_of_its_tokens():
    """Two tokens of input 1 with differences 1 and 3, one of input 0 with 1.5; input 2 of the batch is padding."""
    numbers = [[0, 1, 1], [0]]
    before, after = (
        one("start_logits", rows, numbers) for rows in ([[[1], [1], [5]], [[5]]], [[[2.5], [2], [2]], [[5]]])
    )
    found = compare(before, after)
    assert found.inputs == 3 and [(c.input, c.value) for c in found.worst] == [(1, 1.0), (0, 0.75), (2, 0.0)]
    assert found.worst[0].before is None and found.worst[1].before == 1.0
    wider = [Outputs(x.values, x.inputs, x.size + 1) for x in before]
    assert [c.input for c in compare(wider, after).worst] == [1, 0, 3]


def test_several_outputs_have_their_own_quantiles():
    model = make("BertForQuestionAnswering")
    before = probe(model, BATCH)
    perturb_(model, scale=0.3)
    found = compare([before], [probe(model, BATCH)])
    assert set(found.quantiles) == {"start: difference", "end: difference"} and found.inputs == 3
    assert found.worst[0].value == pytest.approx(found.quantiles["start: difference"]["worst"])


def test_outputs_are_compared_batch_by_batch():
    """So that the logits of one batch are in memory at a time."""
    seen = []

    def outputs(name):
        for x in one("logits", [[[1, 0]], [[0, 1]], [[1, 1]]]):
            seen.append(name)
            yield x

    compare(outputs("a"), outputs("b"))
    assert seen == ["a", "b"] * 3


@pytest.mark.parametrize("name", sorted(POOLINGS))
def test_poolings_by_hand(name):
    model = make("BertModel")
    with torch.no_grad():
        states = model(**BATCH).last_hidden_state
    rows = [states[i, :n] for i, n in enumerate(MASK.sum(1).tolist())]
    by_hand = {
        "cls": lambda x: x[0],
        "lasttoken": lambda x: x[-1],
        "max": lambda x: x.max(0).values,
        "mean": lambda x: x.mean(0),
        "mean_sqrt_len": lambda x: x.sum(0) / len(x) ** 0.5,
        "weightedmean": lambda x: sum((i + 1) * row for i, row in enumerate(x)) / sum(range(len(x) + 1)),
    }
    wanted = torch.stack([by_hand[name](x) for x in rows])
    found = outputs_of(model, BATCH, [name])
    torch.testing.assert_close(found.values[VECTORS], wanted)
    assert name in found.compared
    both = outputs_of(model, BATCH, [name, "mean"])
    torch.testing.assert_close(both.values[VECTORS][:, :8], wanted)
    assert both.values[VECTORS].shape == (3, 16)


def test_figures_of_single_numbers_by_hand():
    """Where every cosine is 1: of (1, 2, 3, 6), deviations (-2, -1, 0, 3); of (1, 3, 2, 6), (-2, 0, -1, 3)."""
    found = agreement(one("logits", [[[1], [2]], [[3], [6]]]), one("logits", [[[1], [3]], [[2], [6]]]))
    assert found == {
        "Pearson": pytest.approx(13 / 14),
        "Spearman": pytest.approx(4 / 5),  # 1 - 6 * 2 / (4 * 15)
        "Kendall": pytest.approx(2 / 3),  # five of six pairs are in the same order, one is not
        "relative squared error": pytest.approx(2 / 14),
    }
    constant = agreement(one("logits", [[[2], [2]]]), one("logits", [[[1], [3]]]))
    assert constant == {"relative squared error": pytest.approx(2 / 8)}
    assert agreement(one("logits", [[[2]]]), one("logits", [[[3]]])) == {"relative squared error": pytest.approx(0.25)}
    lost = agreement(one("logits", [[[1], [3]]]), one("logits", [[[2], [2]]]))
    assert lost == {"Pearson": 0.0, "Spearman": 0.0, "Kendall": 0.0, "relative squared error": pytest.approx(1.0)}


def test_errors():
    model = make("BertModel")
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight[0, 0] = math.inf
    with pytest.raises(ValueError, match=r"outputs are not finite: the vectors of BertModel in torch\.float32"):
        probe(model, BATCH)
    with pytest.raises(ValueError, match=r"BertForMultipleChoice cannot be run on inputs \{'input_ids': \(3, 4\)"):
        probe(make("BertForMultipleChoice"), BATCH)
    with pytest.raises(ValueError, match="set return_dict"):
        probe(make("BertModel", return_dict=False), BATCH)
    training = make("BertModel").train()
    assert probe(training, BATCH).pooled and training.training
