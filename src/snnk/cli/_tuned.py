"""Folders of `snnk finetune` as models for commands that read whole models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from snnk.cli import _options
from snnk.cli._printing import say


@contextmanager
def whole_model(
    model: str, base: str | None, calibration: Path | None, column: str | None, *, max_loss: float, seed: int
) -> Iterator[tuple[str, str | None]]:
    """The folder of a whole model, and the columns of the calibration file.

    An adapter of `snnk finetune` is merged into a temporary folder of the same name. For a model of pairs that snnk
    has tuned, the columns are those of its training, unless others are given.

    Args:
        model: folder or hub name, as the user gave it.
        base: of `snnk.finetune.load`.
        calibration, column: of `snnk.hf.compress`.
        max_loss, seed: of `snnk.finetune.merge`.
    """
    from snnk.finetune.loading import is_tuned, read_metrics

    folder = Path(model)
    facts = read_metrics(folder) if is_tuned(folder) else {"adapter": False}
    if not facts["adapter"] and base is not None:
        raise ValueError(f"--base is for adapters of snnk finetune; {model} is none, leave it out")
    if "data" in facts:
        from snnk.finetune.merging import calibration_columns

        column = column or ",".join(calibration_columns(facts, calibration) or ()) or None
    if not facts["adapter"]:
        yield model, column
        return
    _options.require("peft", extra="peft")
    from snnk.finetune import merge

    with TemporaryDirectory() as place:
        merged = Path(place) / folder.resolve().name
        merge(folder, merged, base=base, calibration=calibration, column=column, max_loss=max_loss, seed=seed, say=say)
        yield str(merged), column
