"""``memmove`` out of copies whose two ranges must not overlap, as a device's own copies are."""

from __future__ import annotations

from collections.abc import Iterator


def pieces(target: int, source: int, nbytes: int, scratch: int, scratch_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Copies (to, from, bytes) that, run in order, move ``nbytes`` from ``source`` to ``target``.

    Ranges that overlap are cut into pieces no longer than their distance, last piece first when they move up.
    Ranges so close that this would take many small copies go through ``scratch`` instead, two copies a piece.
    """
    distance = abs(target - source)
    if not distance or not nbytes:
        return
    direct = distance >= nbytes or 2 * distance >= scratch_bytes
    step = min(distance, nbytes) if direct else scratch_bytes
    starts = range(0, nbytes, step)
    for start in reversed(starts) if target > source else starts:
        length = min(step, nbytes - start)
        if direct:
            yield target + start, source + start, length
        else:
            yield scratch, source + start, length
            yield target + start, scratch, length
