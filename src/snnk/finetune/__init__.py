"""Fine-tuning with labels: the paper's methods, ours and the usual ones, in one training loop (sections 4.2 and 4.3).

`finetune` goes from files to a folder, which `load` reads. METHODS lists the ways to fine-tune; it and `FinetuneConfig`
load no torch, so that a command can show and check its options at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snnk.finetune.config import FinetuneConfig
from snnk.finetune.methods import METHODS

if TYPE_CHECKING:
    from snnk.finetune.run import finetune, load

__all__ = ["METHODS", "FinetuneConfig", "finetune", "load"]


def __getattr__(name: str) -> Any:
    if name not in ("finetune", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from snnk.finetune import run

    return getattr(run, name)
