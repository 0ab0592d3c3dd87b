"""Tiny models with a head."""

import torch
import transformers as hf

from helpers.compression import TINY


def make(name, **options):
    torch.manual_seed(0)
    kind = getattr(hf, name)
    return kind(kind.config_class(**{**TINY, **options})).eval()
