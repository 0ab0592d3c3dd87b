"""Classifiers and poolers of pretrained transformers: closed-form starts and SNNK poolers."""
