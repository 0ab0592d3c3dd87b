"""Compressed models in the forms in which they are served."""
