"""`python -m snnk.cli`, the form that torchrun needs."""

from snnk.cli import main

main()
