"""The judge of replacement: Belady's rule over a trace that reads the same pages again and again.

On a miss the page whose next use is farthest leaves. With bypass the page that came counts too: it may be the one that
goes, having been read without being admitted. Every page takes one frame and weighs some bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def belady(weights: Sequence[int], frames: int, cycles: int, bypass: bool) -> list[tuple[int, int]]:
    """(misses, bytes missed) of each of ``cycles`` passes over pages of ``weights`` bytes, frames empty at first."""
    count = len(weights)
    resident: set[int] = set()
    passes: list[tuple[int, int]] = []
    for _ in range(cycles):
        misses = missed = 0
        for now in range(count):
            if now in resident:
                continue
            misses += 1
            missed += weights[now]
            if len(resident) < frames:
                resident.add(now)
                continue
            # The page just read is needed again in a whole pass, later than any other.
            candidates = resident | {now} if bypass else resident
            farthest = max(candidates, key=lambda page: ((page - now - 1) % count, page))
            resident = (resident | {now}) - {farthest}
        passes.append((misses, missed))
    return passes


def per_pass(count: int, frames: int, bypass: bool) -> Fraction:
    """Misses a pass over ``count`` equal pages in the long run: the mean over one period, past the first passes."""
    settle, period = 2 * count, max(1, count - 1)
    passes = belady([1] * count, frames, settle + period, bypass)
    return Fraction(sum(misses for misses, _ in passes[settle:]), period)
