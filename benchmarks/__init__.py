"""Reproducible measurements; each module is a command that writes its result to ``results/``, with machine and date."""
