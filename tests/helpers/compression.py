"""Helpers of the tests of compression: batches, pages, explained variance."""

from html.parser import HTMLParser

import torch
from torch import nn

from snnk.hf.compression.plans import option, width_of
from snnk.hf.compression.times import Time, TimedBlocks, Timings
from snnk.hf.finding import find_blocks
from snnk.hf.model_blocks import FFN

from helpers.architectures import IMAGES

TINY = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 43,
    "max_position_embeddings": 64,
}


class Page(HTMLParser):
    """Tags that are open, all texts, attributes of pictures, and everything that could be loaded from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts, self.tags, self.loads, self.pictures = [], [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        places = [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]
        self.loads += [place for place in places if not place.startswith("#")]
        self.pictures += [dict(attrs)] if tag == "svg" else []
        if tag not in ("meta", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def check_page(page):
    """Well-formed, self-contained, and with a text for every picture; returns what was parsed."""
    found = Page(page)
    assert found.open == [] and found.loads == []
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert all(picture.get("aria-label") and picture["role"] == "img" for picture in found.pictures)
    assert "http" not in page and "url(" not in page and "@import" not in page
    return found


def explained(gram, cross, chosen, penalty):
    inner = gram[chosen][:, chosen] + penalty * torch.eye(len(chosen), dtype=gram.dtype)
    return float((cross[chosen] * torch.linalg.solve(inner, cross[chosen])).sum())


def some_batches(row="bert", count=12, size=16, seed=0, padding=0):
    """Text with sequences of two lengths, or images; `padding` more tokens of padding behind all of them."""
    generator = torch.Generator().manual_seed(seed)
    if row in IMAGES:
        return [{"pixel_values": torch.randn(size, 3, 8, 8, generator=generator)} for _ in range(count)]
    if row == "whisper":
        return [{"input_features": torch.randn(size, 4, 12, generator=generator)} for _ in range(count)]
    batches = []
    for _ in range(count):
        ids, mask = torch.randint(3, 40, (size, 9), generator=generator), torch.ones(size, 9, dtype=torch.long)
        mask[: size // 2, 6:] = 0
        more = torch.full((size, padding), 7)
        batches.append({"input_ids": torch.cat([ids, more], 1), "attention_mask": torch.cat([mask, 0 * more], 1)})
    return batches


def made_up_timings(model, kind="atoms"):
    """Times as if every multiply-add of a linear layer took one nanosecond, and nothing else any time."""
    seconds = 1e-9 * work_of(model)
    groups = []
    for block in find_blocks(model):
        width = width_of(block)
        if isinstance(block, FFN):
            choices = [option(block, "drop"), option(block, "linear")] if kind == "atoms" else []
            choices += [option(block, kind, count) for count in (2, width // 2, width)]
        else:
            ranks = [(width, 1), (width, width // 2)]
            ranks += [] if block.names.fixed else [(1, 1), (1, width), (width // 2, 1), (1, width // 2)]
            choices = [option(block, "low-rank", ranks=pair) for pair in ranks]
        times = [
            Time(c.kind, c.num_features, c.ranks, seconds + 1e-9 * (c.multiply_adds - c.multiply_adds_before))
            for c in [option(block, "dense"), *choices]
        ]
        groups.append(TimedBlocks((block.name,), width, tuple(times)))
    return Timings("torch", (1, 32), "a processor", 1, 0.0, seconds, tuple(groups))


def work_of(model):
    """Multiply-adds of all linear layers per token."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
