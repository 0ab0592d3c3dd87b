"""Layers: `SNNKLinear`, `SNNKAdapter`, and `bundle`, which turns consecutive layers into one matrix."""

from snnk.nn.adapter import SNNKAdapter
from snnk.nn.bounds import error_bound
from snnk.nn.bundling import Bundled, bundle
from snnk.nn.linear import SNNKLinear

__all__ = ["Bundled", "SNNKAdapter", "SNNKLinear", "bundle", "error_bound"]
