"""Reproducible measurements; each module is a command that writes its result, with machine and date, to ``results/``."""
