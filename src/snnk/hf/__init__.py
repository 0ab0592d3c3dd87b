"""Hugging Face transformers: find feed-forward blocks, replace them, save and load the result.

`import snnk.hf` once, and AutoModel.from_pretrained(folder) loads a compressed model as any other.
"""

from snnk.hf.architectures import ARCHITECTURES, FFN, Architecture, find_ffns
from snnk.hf.classify.heads import ClassifierFit, fit_classifier_
from snnk.hf.classify.poolers import (
    HeadReport,
    bundled_head_,
    freeze_but_head_,
    merge_pooler_,
    replace_pooler_,
)
from snnk.hf.classify.sites import POOLERS, Pooler, find_pooler
from snnk.hf.compression.ffn import BlockReport, Report, compress_
from snnk.hf.compression.paper import bundle_, replace_ffn_
from snnk.hf.compression.planning import BlockPlan, Plan, plan
from snnk.hf.quantizer import register
from snnk.hf.record import Observation, observe
from snnk.hf.replace import KINDS, Replacement, SNNKQuantizationConfig, replace_

register()

__all__ = [
    "ARCHITECTURES",
    "FFN",
    "KINDS",
    "POOLERS",
    "Architecture",
    "BlockPlan",
    "BlockReport",
    "ClassifierFit",
    "HeadReport",
    "Observation",
    "Plan",
    "Pooler",
    "Replacement",
    "Report",
    "SNNKQuantizationConfig",
    "bundle_",
    "bundled_head_",
    "compress_",
    "find_ffns",
    "find_pooler",
    "fit_classifier_",
    "freeze_but_head_",
    "merge_pooler_",
    "observe",
    "plan",
    "register",
    "replace_",
    "replace_ffn_",
    "replace_pooler_",
]
