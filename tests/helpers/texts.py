"""A tiny tokenizer, texts and images, and folders of models with them."""

import re

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from snnk.hf.general import general_texts

WORDS = [f"w{i}" for i in range(40)]


def make_tokenizer(*, vocabulary=WORDS, **special):
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", *vocabulary])}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=[("[CLS]", 2)]
    )
    special = special or {"pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", model_max_length=64, **special)


def make_paired(make=make_tokenizer):
    """A tokenizer that also returns which text of a pair each token belongs to."""
    return make(pad_token="[PAD]", model_input_names=["input_ids", "token_type_ids", "attention_mask"])


def make_english(**special):
    """A tokenizer that knows the words of the general text."""
    words = re.findall(r"\w+|[^\w\s]+", " ".join(general_texts(3000)))
    return make_tokenizer(vocabulary=sorted(set(words)), **special)


def save(model, folder, processor=None):
    """Save a model with the tiny tokenizer, or another processor; returns the folder."""
    model.save_pretrained(folder)
    (processor or make_tokenizer()).save_pretrained(folder)
    return folder


def make_texts(count=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (count,), generator=generator)
    return [" ".join(WORDS[i] for i in torch.randint(40, (int(n),), generator=generator)) for n in lengths]


def make_images(folder, count=12):
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        pixels = torch.randint(256, (40, 50, 3), dtype=torch.uint8, generator=generator).numpy()
        Image.fromarray(pixels).save(folder / f"{i}.{('png', 'jpg', 'JPEG')[i % 3]}")
    return folder
