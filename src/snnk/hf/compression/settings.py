"""Check the options of a compression before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snnk import _checks
from snnk.hf.compression.planning import BLOCKS, seconds_of
from snnk.hf.compression.timing import TOKENS
from snnk.hf.finding import parse_layers
from snnk.hf.serve import served

LEAST = 0.01  # of keep: with less, a block is hardly more than a constant
TIMED = ("target_speedup", "target_latency")  # targets for which times of blocks are measured


def check_settings(settings: dict[str, Any], calibration: Path | None) -> None:
    """Refuse options that contradict each other, and files that are not there, before any work."""
    targets = ("keep", "target_size", *TIMED)
    given = [name for name in targets if settings[name] is not None]
    if len(given) > 1:
        raise ValueError(f"give one of {', '.join(targets)}; got {' and '.join(given)}")
    if settings["keep"] is not None and not 0 < settings["keep"] <= 1:
        raise ValueError(f"keep must be above 0 and at most 1; got {settings['keep']}")
    if settings["keep"] is not None and settings["keep"] < LEAST:
        raise ValueError(
            f"keep {settings['keep']} would leave next to nothing of each block; the least is {LEAST}. "
            "To remove whole blocks, use target_size, target_speedup or target_latency instead"
        )
    others = [settings[name] for name in ("layers", "blocks", "feature_map", "joint")] != ["all", "all", "atoms", None]
    if settings["plan"] is not None and (given or others):
        raise ValueError(f"a plan replaces {', '.join(targets)}, layers, blocks, feature_map and joint; leave them out")
    if settings["tokens"] != TOKENS and not set(given) & {*TIMED}:
        raise ValueError(f"tokens are for {' and '.join(TIMED)}; give one of these, or leave them out")
    _checks.choose(settings["blocks"], BLOCKS, "blocks")
    if settings["joint"] and settings["feature_map"] != "atoms":
        raise ValueError(f"joint chooses numbers of atoms only; got feature_map {settings['feature_map']!r}")
    if settings["format"] == "plain" and (settings["joint"] or settings["feature_map"] != "atoms"):
        found = "joint" if settings["joint"] else f"feature_map {settings['feature_map']!r}"
        raise ValueError(f"format 'plain' needs atoms, as many in every block (--equal); got {found}")
    for name in ("target_speedup", "max_error", "recover_minutes"):
        if settings[name] is not None:
            _checks.positive(settings[name], name)
    if settings["target_latency"] is not None:
        seconds_of(settings["target_latency"])
    parse_layers(settings["layers"])
    if settings["to"] is not None:
        export_settings(settings)
    columns = [f"{name} {settings[name]!r}" for name in ("text", "text_pair") if settings[name] is not None]
    if calibration is None and columns:
        raise ValueError(
            "text and text_pair name columns of the calibration file; give calibration, or leave out "
            + " and ".join(columns)
        )
    if calibration is not None and not calibration.exists():
        raise FileNotFoundError(f"no calibration file or folder {calibration}")


def chosen_jointly(settings: dict[str, Any]) -> bool:
    """Whether the sizes of all blocks are chosen together, if there are enough inputs."""
    if settings["plan"] is not None or settings["feature_map"] != "atoms":
        return False
    return settings["blocks"] != "ffn" if settings["joint"] is None else settings["joint"]


def export_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The options of an export that `to` and `max_loss` stand for."""
    return served.check_settings(to=settings["to"], max_loss=settings["max_loss"])
