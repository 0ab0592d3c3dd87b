"""Rows, labels and batches."""

import pytest
import torch

from snnk.finetune.data import Data, Labels, encode_texts

from helpers.texts import make_tokenizer


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["b", "a", "b", "a"], ("a", "b")),
        (["10", "9", "10", "9"], ("9", "10")),
        ([1, 0, 1, 0], ("0", "1")),
        ([True, False] * 2, ("0", "1")),
        (["5.000", "3"] * 2, None),
        (["0", "1", "none"] * 4, ("0", "1", "none")),
        (["none", "na"] * 4, ("na", "none")),
        ([0.5, 1.0, 2.0, 3.0], None),
        (["1.5", "x"] * 2, ("1.5", "x")),
    ],
)
def test_classes_are_distinguished_from_numbers(values, names):
    labels = Labels.of(values, "f")
    assert labels.names == names
    found = labels.encode(values, "f")
    assert found.is_floating_point() == (names is None)
    if names is not None:
        assert [names[i] for i in found] == [str(int(v)) if isinstance(v, bool) else str(v) for v in values]
    assert Labels.of(["1", "2", "3"], "f", regression=True).names is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "f is empty"),
        (["a", None, ""], "2 rows of 3 without a label, the first is row 2"),
        ([0.5, float("nan")], "1 rows of 2 without a label"),
        (["0.5", "1.5", "NaN"], "are numbers except for NaN; leave these out"),
        (["a", "a"], "all labels of f are 'a'"),
        (["a", "b", "c", "d"], "4 classes in 4 rows"),
    ],
)
@pytest.mark.once
def test_bad_labels(values, message):
    with pytest.raises(ValueError, match=message):
        Labels.of(values, "f")


def test_labels_of_other_files_must_be_known():
    with pytest.raises(ValueError, match="g has the labels c, which are not in the training data: a, b"):
        Labels(("a", "b")).encode(["a", "c"], "g")
    with pytest.raises(ValueError, match="must be finite numbers; got x, inf"):
        Labels(None).encode(["1.0", "x", "inf"], "g")


def numbers(count=103, classes=3):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    labels = torch.randint(classes, (count,), generator=generator)
    return Data(list(range(count)), labels, lambda rows: {"x": torch.tensor(rows)}, lengths)


def test_an_epoch_has_every_row_once_and_depends_on_seed_and_epoch_only():
    data = numbers()
    epoch = data.epoch(8, seed=1, epoch=2)
    assert sorted(i for batch in epoch for i in batch) == list(range(103)) and len(epoch) == 13
    assert epoch == data.epoch(8, 1, 2)
    assert epoch != data.epoch(8, 1, 3) and epoch != data.epoch(8, 2, 2)
    batch = data.batch(epoch[0])
    assert batch["x"].tolist() == epoch[0] and torch.equal(batch["labels"], data.labels[epoch[0]])

    def padding(batches):
        return sum(max(data.lengths[i] for i in b) * len(b) for b in batches) - sum(data.lengths)

    plain = [list(range(i, min(i + 8, 103))) for i in range(0, 103, 8)]
    assert padding(epoch) < padding(plain) / 3


def test_the_split_is_stratified_and_disjoint():
    data = numbers(1000)
    train, held = data.split(0.1, seed=0)
    assert sorted([*train.rows, *held.rows]) == list(range(1000)) and len(held) == pytest.approx(100, abs=2)
    for c in range(3):
        assert int((held.labels == c).sum()) == pytest.approx(0.1 * int((data.labels == c).sum()), abs=0.5)
    assert torch.equal(held.labels, data.labels[list(held.rows)])
    assert held.rows == data.split(0.1, seed=0)[1].rows != data.split(0.1, seed=1)[1].rows
    with pytest.raises(ValueError, match="4 of each are needed"):
        numbers(20).split(0.1, seed=0)


def test_texts_and_pairs_are_tokenised_cut_and_padded():
    tokenizer = make_tokenizer()
    data = encode_texts(tokenizer, ["w1 w2", "w3"], None, torch.tensor([0, 1]), 64)
    batch = data.batch([0, 1])
    assert batch["input_ids"].tolist() == [[2, 4, 5], [2, 6, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    pairs = encode_texts(tokenizer, ["w1"], ["w2 w3 w4"], torch.tensor([0]), 64)
    assert {4, 5, 6, 7} <= set(pairs.rows[0]["input_ids"])
    assert encode_texts(tokenizer, ["w1 " * 9], None, torch.tensor([0]), 4).lengths == [4]
