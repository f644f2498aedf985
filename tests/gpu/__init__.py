"""Tests that need a GPU: ``python -m pytest tests/gpu``. Elsewhere they are skipped, and say why."""
