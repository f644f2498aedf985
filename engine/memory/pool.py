"""Granules on their way from one holder to another, so that a transfer frees and creates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from engine.device.protocol import Device, Granule


class GranulePool:
    """Takes granules back and hands them out again; what nobody takes is released by :meth:`trim`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Granule] = []

    def put(self, granules: Sequence[Granule]) -> None:
        """Keep granules that are mapped nowhere."""
        self._free.extend(granules)

    def take(self, count: int) -> list[Granule]:
        """``count`` granules, kept ones first, lowest first; the rest are created. All or none."""
        self._free.sort()
        kept = self._free[:count]
        fresh = self._device.create(count - len(kept)) if count > len(kept) else []
        del self._free[: len(kept)]
        return kept + fresh

    def withdraw(self, granules: Sequence[Granule]) -> None:
        """Take exactly these kept granules out again (to undo a :meth:`put`)."""
        leaving = set(granules)
        self._free = [granule for granule in self._free if granule not in leaving]

    def trim(self) -> None:
        """Release everything kept."""
        if self._free:
            self._device.release(self._free)
            self._free = []
