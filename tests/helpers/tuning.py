"""Tiny data and settings for fine-tuning."""

import torch
import transformers

from snnk.finetune import FinetuneConfig
from snnk.hf.classify.means import pool_means_

from helpers.texts import WORDS, make_tokenizer

DIM = 16
HEAD = 2 * DIM + 2  # parameters of a classifier of two classes


TINY = {
    "hidden_size": DIM,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 43,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # features that differ from text to text
}


def make_rows(count=160, seed=0):
    """Texts, and whether most of their words are of the first half: the mean of tokens tells it."""
    generator = torch.Generator().manual_seed(seed)
    texts, labels = [], []
    for n in torch.randint(3, 12, (count,), generator=generator).tolist():
        words = torch.randint(40, (n,), generator=generator)
        texts.append(" ".join(WORDS[i] for i in words))
        labels.append(int((words < 20).double().mean() > 0.5))
    return texts, labels


def write(path, texts, labels):
    rows = (f"{text}\t{label}" for text, label in zip(texts, labels, strict=True))
    path.write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return str(path)


def save(kind, folder, **options):
    torch.manual_seed(0)
    kind(kind.config_class(**{**TINY, **options})).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def make_config(root, out, **options):
    files = {"train": str(root / "train.tsv"), "test": str(root / "test.tsv")}
    # in float32, whatever the processor has
    options = {"method": "linear-probe", "epochs": 2, "batch_size": 32, "pooling": "mean", "bf16": False, **options}
    return FinetuneConfig(model=str(root / "bert"), out=str(out), **{**files, **options})


class Stop(Exception):
    pass


def make_model(**options):
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**{**TINY, **options}))
    return pool_means_(model)


def outputs(model):
    tokenizer = make_tokenizer()
    with torch.no_grad():
        return model.eval()(**tokenizer(["w1 w2 w3", "w30"], padding=True, return_tensors="pt")).logits


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
