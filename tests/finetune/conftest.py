"""A tiny model and rows that it can learn from."""

import pytest
import torch
import transformers

from snnk.finetune.data import encode_texts

from helpers.texts import make_tokenizer
from helpers.tuning import make_rows, save, write


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    save(transformers.BertModel, folder / "bert")
    texts, labels = make_rows()
    write(folder / "train.tsv", texts, ["yes" if label else "no" for label in labels])
    texts, labels = make_rows(60, seed=1)
    write(folder / "test.tsv", texts, ["yes" if label else "no" for label in labels])
    return folder


@pytest.fixture(scope="module")
def data():
    texts, labels = make_rows()
    return encode_texts(make_tokenizer(), texts, None, torch.tensor(labels), 64)
