"""Classifiers and poolers of pretrained transformers: closed forms of classifiers, and SNNK poolers."""
