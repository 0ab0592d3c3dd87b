"""Fine-tuning with labels: the paper's methods, ours and the usual ones, in one training loop (sections 4.2 and 4.3).

`finetune` goes from files to a folder, which `load` reads and `predict` applies to rows. METHODS lists the ways to
fine-tune; it and `FinetuneConfig` load no torch, so that a command can show and check its options at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snnk.finetune.config import FinetuneConfig
from snnk.finetune.methods import METHODS

if TYPE_CHECKING:
    from snnk.finetune.loading import load
    from snnk.finetune.merging import merge
    from snnk.finetune.predictions import predict
    from snnk.finetune.run import finetune

__all__ = ["METHODS", "FinetuneConfig", "finetune", "load", "merge", "predict"]


def __getattr__(name: str) -> Any:
    if name == "finetune":
        from snnk.finetune.run import finetune

        return finetune
    if name == "load":
        from snnk.finetune.loading import load

        return load
    if name == "merge":
        from snnk.finetune.merging import merge

        return merge
    if name == "predict":
        from snnk.finetune.predictions import predict

        return predict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
