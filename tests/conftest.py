"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model.fetch import default_model


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The model that ships with Ebb, from the user's cache; fetched once when it is not there."""
    return default_model(cache_dir=None, progress=False)
