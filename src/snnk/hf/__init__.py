"""Hugging Face transformers: find feed-forward blocks, replace them, save and load the result.

`import snnk.hf` once, and AutoModel.from_pretrained(folder) loads a compressed model as any other.
"""

from snnk.hf.architectures import ARCHITECTURES, FFN, Architecture, Observation, find_ffns, observe
from snnk.hf.blocks import KINDS, Replacement, SNNKQuantizationConfig, replace_
from snnk.hf.compress import BlockReport, Report, compress_
from snnk.hf.io import register
from snnk.hf.plan import BlockPlan, Plan, plan
from snnk.hf.uptrain import bundle_, replace_ffn_

register()

__all__ = [
    "ARCHITECTURES",
    "FFN",
    "KINDS",
    "Architecture",
    "BlockPlan",
    "BlockReport",
    "Observation",
    "Plan",
    "Replacement",
    "Report",
    "SNNKQuantizationConfig",
    "bundle_",
    "compress_",
    "find_ffns",
    "observe",
    "plan",
    "register",
    "replace_",
    "replace_ffn_",
]
