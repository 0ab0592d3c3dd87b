"""A tiny model and texts for it, in folders of their own."""

import pytest
import torch
import transformers
from fuzz import TINY, make_texts, make_tokenizer


@pytest.fixture
def bert(tmp_path):
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(tmp_path / "bert")
    make_tokenizer().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(make_texts()))
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"{t}\t{len(t) % 2}\n" for t in make_texts()))
    return tmp_path / "texts.txt"
