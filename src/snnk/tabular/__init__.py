"""Closed-form training on tables of any length: one pass for the columns, one pass for the sums."""
