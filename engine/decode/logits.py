"""From logits to a token and a digest, the same for every way of running."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine.errors import InvalidLogits


def pick(logits: NDArray[np.float32], generation: int, step: int) -> list[int]:
    """Greedy tokens of one step out of logits [rows, vocab], lowest id first among equals.

    Raises
    ------
    InvalidLogits
        When a row's logits are not all finite.
    """
    finite = np.isfinite(logits).all(axis=1)
    if not finite.all():
        raise InvalidLogits(int(np.argmin(finite)), step, generation)
    return [int(i) for i in logits.argmax(axis=1)]


def digest(logits: NDArray[np.float32]) -> list[str]:
    """A digest of each row's logits."""
    return [xxhash.xxh3_64_hexdigest(row.data) for row in logits]
