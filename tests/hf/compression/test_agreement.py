"""Figures of agreement against values computed by hand, and outputs of heads of every kind."""

import math

import pytest
import torch
import transformers as hf

from snnk.hf.compression.agreement import MEANS, MOST_TOKENS, Outputs, agreement, outputs_of, probe

from helpers.architectures import perturb_
from helpers.compression import TINY
from helpers.heads import make

IDS = torch.tensor([[2, 5, 6, 7], [2, 8, 0, 0], [2, 9, 10, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
BATCH = {"input_ids": IDS, "attention_mask": MASK}
CHOICES = {name: torch.stack([x, x.flip(0)], 1) for name, x in BATCH.items()}  # (3, 2, 4)
TOKENS = int(MASK.sum())
VECTORS = {"cosine", "worst cosine", "KL divergence", "same best"}
NUMBERS = {"Pearson", "Spearman", "relative squared error"}


def labelled(labels, figures):
    return {f"{label}: {figure}" for label in labels for figure in figures}


@pytest.mark.parametrize(
    ("name", "options", "batch", "shapes", "figures"),
    [
        ("BertModel", {}, BATCH, {MEANS: (3, 8)}, {"cosine", "worst cosine", "rank agreement"}),
        ("BertForSequenceClassification", {"num_labels": 3}, BATCH, {"logits": (3, 3)}, VECTORS),
        ("BertForSequenceClassification", {"num_labels": 4}, BATCH, {"logits": (3, 4)}, VECTORS),  # as many as tokens
        ("BertForSequenceClassification", {"num_labels": 1}, BATCH, {"logits": (3, 1)}, NUMBERS),
        ("BertForTokenClassification", {"num_labels": 5}, BATCH, {"logits": (TOKENS, 5)}, VECTORS),
        (
            "BertForQuestionAnswering",
            {},
            BATCH,
            {"start_logits": (TOKENS, 1), "end_logits": (TOKENS, 1)},
            labelled(["start", "end"], NUMBERS),
        ),
        ("BertForMultipleChoice", {}, CHOICES, {"logits": (3, 2)}, VECTORS),
        ("BertForNextSentencePrediction", {}, BATCH, {"logits": (3, 2)}, VECTORS),
        (
            "BertForPreTraining",
            {},
            BATCH,
            {"prediction_logits": (TOKENS, 43), "seq_relationship_logits": (3, 2)},
            labelled(["prediction", "seq relationship"], VECTORS),
        ),
        ("ElectraForPreTraining", {"embedding_size": 8}, BATCH, {"logits": (TOKENS, 1)}, NUMBERS),
        ("BertForMaskedLM", {}, BATCH, {"logits": (TOKENS, 43)}, VECTORS),
        ("LlamaForCausalLM", {}, BATCH, {"logits": (TOKENS, 43)}, VECTORS),
    ],
)
def test_heads(name, options, batch, shapes, figures):
    model = make(name, **options)
    found = probe(model, batch)
    assert {key: tuple(value.shape) for key, value in found.values.items()} == shapes
    assert found.compared.startswith("mean of the last hidden states" if MEANS in shapes else " and ".join(shapes))
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
    torch.testing.assert_close(probe(model, pixels).values[MEANS], wanted)


def test_padding_is_left_out():
    model = make("BertModel")
    with torch.no_grad():
        states = model(**BATCH).last_hidden_state
    by_hand = torch.stack([states[0].mean(0), states[1, :2].mean(0), states[2, :3].mean(0)])
    torch.testing.assert_close(outputs_of(model, BATCH).values[MEANS], by_hand)
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
    nothing = outputs_of(model, {"input_ids": IDS[:1], "attention_mask": 0 * MASK[:1]})
    with pytest.raises(ValueError, match="nothing but padding"):
        agreement([nothing], [nothing])
    assert agreement([nothing, outputs_of(model, BATCH)], [nothing, outputs_of(model, BATCH)])["cosine"] > 0.999


def test_many_tokens_of_a_vocabulary_are_cut_and_single_numbers_are_not():
    batch = {"input_ids": torch.randint(43, (30, 20), generator=torch.Generator().manual_seed(0))}
    assert outputs_of(make("BertForMaskedLM"), batch).values["logits"].shape == (MOST_TOKENS, 43)
    assert outputs_of(make("BertForQuestionAnswering"), batch).values["end_logits"].shape == (600, 1)


def one(name, values):
    return [Outputs({name: torch.tensor(row, dtype=torch.float32)}) for row in values]


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


def test_rank_agreement_by_hand():
    """Neighbours at 0, 30 and 60 degrees; then at 0, 60 and 30: Spearman of (1, 2, 3) and (1, 3, 2) is 1/2."""

    def turned(*degrees):
        angles = torch.tensor(degrees).cumsum(0).deg2rad()
        return [torch.stack([angles.cos(), angles.sin()], 1).tolist()]

    before, after = one(MEANS, turned(0.0, 0.0, 30.0, 60.0)), one(MEANS, turned(0.0, 0.0, 60.0, 30.0))
    assert agreement(before, after)["rank agreement"] == pytest.approx(0.5)
    assert agreement(before, before)["rank agreement"] == pytest.approx(1.0)
    alike = one(MEANS, [[[1.0, 0.0]] * 4])
    assert "rank agreement" not in agreement(alike, before)
    assert agreement(before, alike)["rank agreement"] == 0.0


def test_figures_of_single_numbers_by_hand():
    """Where every cosine is 1: of (1, 2, 3, 6), deviations (-2, -1, 0, 3); of (1, 3, 2, 6), (-2, 0, -1, 3)."""
    found = agreement(one("logits", [[[1], [2]], [[3], [6]]]), one("logits", [[[1], [3]], [[2], [6]]]))
    assert found == {
        "Pearson": pytest.approx(13 / 14),
        "Spearman": pytest.approx(4 / 5),  # 1 - 6 * 2 / (4 * 15)
        "relative squared error": pytest.approx(2 / 14),
    }
    constant = agreement(one("logits", [[[2], [2]]]), one("logits", [[[1], [3]]]))
    assert constant == {"relative squared error": pytest.approx(2 / 8)}
    assert agreement(one("logits", [[[2]]]), one("logits", [[[3]]])) == {"relative squared error": pytest.approx(0.25)}
    lost = agreement(one("logits", [[[1], [3]]]), one("logits", [[[2], [2]]]))
    assert lost == {"Pearson": 0.0, "Spearman": 0.0, "relative squared error": pytest.approx(1.0)}


def test_errors():
    model = make("BertModel")
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight[0, 0] = math.inf
    with pytest.raises(ValueError, match=r"outputs are not finite: the mean of BertModel in torch\.float32"):
        probe(model, BATCH)
    with pytest.raises(ValueError, match=r"BertForMultipleChoice cannot be run on inputs \{'input_ids': \(3, 4\)"):
        probe(make("BertForMultipleChoice"), BATCH)
    with pytest.raises(ValueError, match="set return_dict"):
        probe(make("BertModel", return_dict=False), BATCH)
    training = make("BertModel").train()
    assert probe(training, BATCH).pooled and training.training
