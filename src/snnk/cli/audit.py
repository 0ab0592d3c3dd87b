"""`snnk audit`: the real size and cost of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snnk import _io
from snnk.cli import _options
from snnk.cli._printing import say, wrote

GROUP = _options.MEASURE
EXAMPLES = (
    "snnk audit my-model-small --original my-model",
    "snnk audit org/name --latency --json audit.json",
)


def command(
    model: _options.Model,
    original: Annotated[str | None, typer.Option(help="Folder or name of a model to compare with.")] = None,
    latency: Annotated[bool, typer.Option("--latency", help="Also measure the time per batch.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="New file for the figures.")] = None,
) -> None:
    """Show what a model, compressed or not, stores and costs: bytes, tied tensors, dtypes, multiply-adds, latency."""
    if json_file is not None:
        _io.check_out(json_file)
    _options.require("transformers", extra="hf")
    from snnk.hf import audit

    found = audit(model, original, latency=latency)
    say(found)
    if json_file is not None:
        _io.write_json(json_file, found.to_dict())
        wrote(json_file)
