"""Compression of pretrained transformers without labels: plan, fit block by block, distill, measure, report."""
