"""Skips everything in this folder where there is no GPU, with the reason the device itself gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.device.cuda_driver import unavailable

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here ``gpu``, and to be skipped where there is none."""
    mine = [item for item in items if HERE in item.path.parents]
    reason = unavailable() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
