"""Graph capture and changes of the memory map exclude each other, in the whole process.

A wait for a stream makes a capture on it void, and unmapping waits. Pinning host memory and plain allocations, from any
thread, make captures void that are not in relaxed mode; drivers differ in whether mapping does. So whoever captures
holds :func:`capturing`, and the device holds :func:`remapping` around every such call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import DeviceError


class Exclusion:
    """One lock, held by a capture or by a change of the memory map; re-entrant within its thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._captures = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Hold off changes of the memory map while a graph is captured. Waits for one under way."""
        with self._lock:
            self._captures += 1
            try:
                yield
            finally:
                self._captures -= 1

    @contextmanager
    def remapping(self, what: str) -> Iterator[None]:
        """Hold off captures while the memory map changes. Waits for a capture in another thread.

        Raises
        ------
        DeviceError
            When this very thread is capturing: waiting would never end, going on would void the capture.
        """
        with self._lock:
            if self._captures:
                raise DeviceError(f"{what} inside a graph capture would make the capture void")
            yield


_process = Exclusion()
capturing = _process.capturing
remapping = _process.remapping
