"""An emulated link: makes memory that is near as slow to reach as memory behind a bus.

The host device copies at memory speed and kernels read the host store as fast as device memory, so nothing there is
worth moving. Held to the rates of a bus, the same bytes cost what they would cost behind one. Rates are bytes/s; None
is no limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

# Waking from a sleep takes about this long; what is left is waited out awake.
_WAKE_S = 2e-4


@dataclass(frozen=True)
class Link:
    """``copy`` holds copies into the device, ``in_place`` holds reads of host memory by kernels."""

    copy: int | None = None
    in_place: int | None = None

    @property
    def emulated(self) -> bool:
        """Whether anything is held back."""
        return self.copy is not None or self.in_place is not None


MEMORY_SPEED = Link()
"""No link at all."""


def pace(nbytes: int, rate: int | None, started: float) -> None:
    """Return once ``nbytes`` that began to move at ``started`` (``time.perf_counter``) have taken as at ``rate``.

    ``rate`` of None returns at once.
    """
    if rate is None or nbytes == 0:
        return
    until = started + nbytes / rate
    while (left := until - time.perf_counter()) > 0:
        if left > _WAKE_S:
            time.sleep(left - _WAKE_S)
