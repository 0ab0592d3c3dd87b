"""Hugging Face transformers: compress, audit and classify with pretrained models.

`import snnk.hf` once, and AutoModel.from_pretrained(folder) loads a compressed model like any other.
"""

from snnk.hf.auditing import audit
from snnk.hf.calibration import load_calibration
from snnk.hf.classify.heads import fit_classifier_
from snnk.hf.classify.poolers import bundled_head_, merge_pooler_, replace_pooler_
from snnk.hf.compression.blocks import compress_
from snnk.hf.compression.paper import bundle_, replace_ffn_
from snnk.hf.compression.pipeline import compress
from snnk.hf.compression.planning import plan
from snnk.hf.compression.plans import Plan
from snnk.hf.finding import find_ffns
from snnk.hf.hub import push_to_hub
from snnk.hf.quantizer import register
from snnk.hf.serve.exporting import export
from snnk.hf.serve.frontier import frontier

register()

__all__ = [
    "Plan",
    "audit",
    "bundle_",
    "bundled_head_",
    "compress",
    "compress_",
    "export",
    "find_ffns",
    "fit_classifier_",
    "frontier",
    "load_calibration",
    "merge_pooler_",
    "plan",
    "push_to_hub",
    "replace_ffn_",
    "replace_pooler_",
]
