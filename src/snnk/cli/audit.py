"""`snnk audit`: the real size and cost of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from snnk.cli import _options
from snnk.cli._printing import say, show_json

GROUP = _options.MEASURE
EXAMPLES = (
    "snnk audit my-model-small --original my-model",
    "snnk audit org/name --latency --json",
)


def command(
    model: _options.Model,
    original: Annotated[str | None, typer.Option(help="Folder or name of a model to compare with.")] = None,
    latency: Annotated[bool, typer.Option("--latency", help="Also measure the time per batch.")] = False,
    tokens: Annotated[str, typer.Option(help="Batch whose time is measured: inputs x tokens per text.")] = "8x128",
    json: _options.Json = False,
) -> None:
    """Show what a model, compressed or not, stores and costs: bytes, tied tensors, dtypes, multiply-adds, latency."""
    _options.require("transformers", extra="hf")
    from snnk.hf import audit

    found = audit(model, original, latency=latency, tokens=_options.batch(tokens))
    if json:
        show_json(found.to_dict())
    else:
        say(found)
