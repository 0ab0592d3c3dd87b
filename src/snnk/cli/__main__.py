"""`python -m snnk.cli`, which torchrun needs."""

from snnk.cli import main

main()
