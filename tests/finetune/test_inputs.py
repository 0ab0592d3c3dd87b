"""The rows that a run reads, and how it cuts and draws them."""

from dataclasses import replace

import pytest
import torch
import transformers

from snnk.finetune import FinetuneConfig
from snnk.finetune.inputs import read

from helpers.texts import make_tokenizer
from helpers.tuning import make_config, make_rows, save, write


@pytest.mark.parametrize("kind", [transformers.BertModel, transformers.RobertaModel, transformers.MPNetModel])
def test_texts_are_cut_to_the_positions_of_the_model(tmp_path, kind):
    folder, offset = save(kind, tmp_path / "model"), 0 if kind is transformers.BertModel else 2
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 10**30  # as of a tokenizer that was saved without a limit
    file = write(tmp_path / "long.tsv", ["w1 w2 " * 50, "w3 " * 70] * 20, ["a", "b"] * 20)
    config = FinetuneConfig(folder, "", train=file, max_length=1000)
    data = read(config, tokenizer, images=False).train
    assert set(data.lengths) == {64 - offset}
    with torch.no_grad():
        kind.from_pretrained(folder)(input_ids=data.batch([0, 1])["input_ids"])  # a torch error at one token more
    assert read(replace(config, max_length=9), tokenizer, images=False).train.lengths[0] == 9


def test_limit_train_draws_its_rows(root, tmp_path):
    """A file that is sorted by class would else give one class."""
    texts, labels = make_rows()
    order = sorted(range(len(labels)), key=labels.__getitem__)
    file = write(tmp_path / "sorted.tsv", [texts[i] for i in order], [labels[i] for i in order])
    config = make_config(root, tmp_path / "out", train=file, test=None, limit_train=40)
    inputs = read(config, make_tokenizer(), images=False)
    found = [*inputs.train.labels.tolist(), *inputs.validation.labels.tolist()]
    assert len(inputs.train) == 40 and len(inputs.validation) == len(labels) - 40  # other rows, as there are enough
    assert 10 < sum(inputs.train.labels.tolist()) < 30 and sum(found) == labels.count(max(labels))
    few = read(replace(config, limit_train=len(labels) - 3), make_tokenizer(), images=False)
    assert len(few.train) + len(few.validation) == len(labels) - 3  # three rows are too few to validate on
    assert read(config, make_tokenizer(), images=False).train.rows == inputs.train.rows
    assert read(replace(config, seed=1), make_tokenizer(), images=False).train.rows != inputs.train.rows


def test_the_columns_that_nobody_named_are_named(root, tmp_path):
    """The first column of texts may be one of keys; a reader sees it before the training."""
    texts, labels = make_rows()
    rows = [f"p{i}\t{text}\t{i}\t{label}" for i, (text, label) in enumerate(zip(texts, labels, strict=True))]
    file = tmp_path / "keys.tsv"
    file.write_text("\n".join(["key\tbody\tnumber\tlabel", *rows]) + "\n")
    config = make_config(root, tmp_path / "out", train=file, test=None, text=None)
    said = read(config, make_tokenizer(), images=False).columns
    assert said == (
        "texts are read from the column 'key', labels from 'label'; others with texts: 'body' (--text, --text-pair)"
    )
    assert read(replace(config, text="body"), make_tokenizer(), images=False).columns is None
