"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.decode.kernels import one_thread_pool
from engine.model.fetch import default_model


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The model that ships with Ebb, from the user's cache; fetched once when it is not there."""
    return default_model(cache_dir=None, progress=False)


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """One process has one thread pool; the tests' is of two, whatever the machine has."""
    one_thread_pool(2)
