"""`merge`: the folder of an adapter becomes the folder of a whole model, which compression and exports can read.

LoRA and IA3 are linear in the inputs of a layer, and PEFT merges them into its weights. An SNNK adapter is not linear.
`snnk.peft.to_lora` fits the nearest LoRA adapter to it on unlabelled inputs, and that one is merged. What this changes
is measured on other inputs, and refused above a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from snnk import _checks, _io
from snnk.finetune.card import model_card
from snnk.finetune.loading import load, mark_pairs, read_metrics
from snnk.finetune.scores import spearman
from snnk.hf.calibration import HELD_OUT, load_calibration
from snnk.hf.data import ARROW, LINES, file_format
from snnk.hf.models import place, quiet, token_limit

LENGTH = 128  # tokens per calibration text at most
Columns = tuple[str | None, str | None]  # of texts, and of second texts


@quiet()
def merge(
    folder: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    calibration: str | Path | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    max_loss: float = 0.05,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write the model of an adapter's folder, with the adapter merged into its weights, to a new folder.

    Args:
        folder: written by `finetune`, with an adapter.
        out: new folder, which `load` and `snnk predict` read without the base model; and, if the pooling is
            "model", transformers too.
        base: of `load`.
        calibration, text, text_pair: of `snnk.hf.compress`, for SNNK adapters: unlabelled texts or images like those
            in use. Default: the general English text of snnk.
        max_loss: for SNNK adapters, the largest part of predictions that may change, or 1 - Spearman correlation for
            numbers, on inputs that nothing was fitted to; above it nothing is written.
        seed: of the sample of calibration inputs.
        say: called with lines for people.

    Returns:
        How the adapter was merged, as `merged` in the metrics.json of `out`: "exact", or the rank, the part of the
        adapter's effect that the LoRA adapter explains, and the loss.

    Example:
        >>> from snnk.hf import compress
        >>> merge("tuned", "whole", calibration="texts.txt")["loss"]  # doctest: +SKIP
        0.012
        >>> compress("whole", "texts.txt", out="small")  # doctest: +SKIP
    """
    folder, out = Path(folder), Path(out)
    _io.check_out(out)
    _checks.at_least_zero(max_loss, "max_loss")
    facts = read_metrics(folder)
    if not facts["adapter"]:
        raise ValueError(f"{folder} has no adapter to merge; it is a whole model already")
    model, processor = load(folder, base=base)
    if facts.get("data", {}).get("text_pair"):
        mark_pairs(model)
    merged: dict[str, Any] = {"exact": True}
    if any(config.peft_type.startswith("SNNK") for config in model.peft_config.values()):
        found = _calibration(model, processor, facts, calibration, (text, text_pair), seed)
        model, merged = _merge_nearest(model, found, max_loss, say)
    else:
        model = model.merge_and_unload(safe_merge=True)
        say("the adapter was merged into the weights")
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    facts = {**facts, "adapter": False, "base": {}, "merged": merged}
    try:
        new = model_card(facts, text)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder / 'metrics.json'} was changed: {error!r}; copy the folder again") from error
    with _io.new_folder(out) as temporary:
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)
        _io.write_json(temporary / "metrics.json", facts)
        (temporary / "README.md").write_text(new, encoding="utf-8")
    return merged


def _calibration(
    model: Any, processor: Any, facts: dict[str, Any], path: str | Path | None, columns: Columns, seed: int
) -> list[list[dict[str, Tensor]]]:
    """Batches to fit to, and others to measure with."""
    if facts["images"] and path is None:
        raise ValueError("an SNNK adapter is merged with unlabelled inputs; give a folder of images as calibration")
    described = facts.get("data", {})
    pair = described.get("text_pair")
    text, text_pair = columns if any(columns) else calibration_columns(facts, path)
    found = load_calibration(
        path,
        processor,
        text=text,
        text_pair=text_pair,
        pairs=path is None and pair is not None,
        max_length=min(LENGTH, token_limit(model.config.get_text_config()) or LENGTH),
        held_out=HELD_OUT,
        seed=seed,
    )
    if found.held_out is None:
        raise ValueError(f"{found.source} has too few different inputs to hold some out; give more")
    return [list(found), list(found.held_out)]


def calibration_columns(facts: dict[str, Any], path: str | Path | None) -> Columns:
    """The columns of pairs that a model was trained on, for a file with columns; none if it was trained on texts."""
    described = facts.get("data", {})
    text, pair = described.get("text"), described.get("text_pair")
    if path is None or pair is None or file_format(Path(path))[0] not in (*LINES, *ARROW):
        return None, None
    return str(text), str(pair)


def _merge_nearest(
    model: Any, batches: Sequence[list[dict[str, Tensor]]], max_loss: float, say: Callable[[str], None]
) -> tuple[Any, dict[str, Any]]:
    """The model with the LoRA adapter nearest to its SNNK adapter, merged, and what this changes."""
    from peft import PeftModel

    from snnk.peft import to_lora
    from snnk.peft.layer import sizes
    from snnk.peft.model import layers_of

    fitted, held = batches
    layers: list[Any] = [layer for _, layer in layers_of(model, "default")]
    rank = min(
        max(layer.snnk_adapter["default"].num_features for layer in layers),
        *(min(sizes(layer.get_base_layer())) for layer in layers),
    )
    before = _logits(model, held)
    nearest = to_lora(model, rank, fitted)
    with TemporaryDirectory() as place:
        nearest.save_pretrained(place)
        model = PeftModel.from_pretrained(model.unload(), place).merge_and_unload(safe_merge=True).eval()
    after = _logits(model, held)
    if before.shape[1] == 1:
        loss = 1 - spearman(before[:, 0].numpy(), after[:, 0].numpy())
    else:
        loss = 1 - float((before.argmax(1) == after.argmax(1)).double().mean())
    found = {"exact": False, "rank": rank, "explained": nearest.explained, "loss": loss, "held_out": len(before)}
    say(
        f"an SNNK adapter cannot be merged exactly: the nearest LoRA adapter, which explains {nearest.explained:.1%} "
        f"of its effect, was merged in its place; on {len(before):,} held-out inputs the loss is {loss:.4f}"
    )
    if not loss <= max_loss:
        raise ValueError(
            f"the loss of merging the SNNK adapter, {loss:.4f} on {len(before):,} others, is above {max_loss}; "
            "calibrate with texts like those of the training, raise max_loss (--max-loss), or train with the "
            "method lora, which merges exactly"
        )
    return model, found


def _logits(model: Any, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(**place(batch, model)).logits.float().cpu() for batch in batches])
