"""Folders of `snnk finetune` as models for commands that read whole models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from snnk.cli import _options
from snnk.cli._printing import say


@contextmanager
def whole_model(
    model: str, base: str | None, calibration: Path | None, text: str | None, text_pair: str | None, **options: Any
) -> Iterator[tuple[str, str | None, str | None]]:
    """The folder of a whole model, and the columns of the calibration file.

    An adapter of `snnk finetune` is merged into a temporary folder of the same name. For a model of pairs that snnk
    has tuned, the columns are those of its training, unless others are given.

    Args:
        model: folder or hub name, as the user gave it.
        base: of `snnk.finetune.load`.
        calibration, text, text_pair: of `snnk.hf.compress`.
        options: `max_loss` and `seed` of `snnk.finetune.merge`.
    """
    from snnk.finetune.loading import is_tuned, read_metrics

    folder = Path(model)
    facts = read_metrics(folder) if is_tuned(folder) else {"adapter": False}
    if not facts["adapter"] and base is not None:
        raise ValueError(f"--base is for adapters of snnk finetune; {model} is none, leave it out")
    if "data" in facts:
        from snnk.finetune.merging import calibration_columns

        if text is None and text_pair is None:
            text, text_pair = calibration_columns(facts, calibration)
    if not facts["adapter"]:
        yield model, text, text_pair
        return
    _options.require("peft", extra="peft")
    from snnk.finetune import merge

    with TemporaryDirectory() as place:
        merged = Path(place) / folder.resolve().name
        options |= {"text": text, "text_pair": text_pair, "say": say}
        merge(folder, merged, base=base, calibration=calibration, **options)
        yield str(merged), text, text_pair
