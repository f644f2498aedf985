"""The ledger device: counts everything, holds nothing. The same governor and placement run on it at any scale.

Addresses are numbers, granules are numbers, copies are additions. It is for planning and for tests, so it refuses
what a real device would refuse: mapping over a mapping, unmapping what is not mapped, creating beyond its capacity.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from engine.device.protocol import DeviceCounters, Event, Granule, Stream
from engine.errors import DeviceError


class LedgerDevice:
    """A :class:`engine.device.protocol.Device` of ``capacity`` bytes that exist on paper."""

    kind = "ledger"

    def __init__(self, granularity: int, capacity: int) -> None:
        self.granularity = granularity
        self.counters = DeviceCounters()
        self._capacity = -(-capacity // granularity)
        self._next_address = granularity
        self._next_granule = 0
        self._returned: list[int] = []
        self._mapped: dict[int, Granule] = {}
        self._events = 0

    def reserve(self, nbytes: int) -> int:
        start = self._next_address
        self._next_address += -(-nbytes // self.granularity) * self.granularity
        return start

    def unreserve(self, address: int, nbytes: int) -> None:
        """Addresses are never used twice, so there is nothing to do."""

    def create(self, count: int) -> list[Granule]:
        if self.counters.live_granules + count > self._capacity:
            raise DeviceError(f"the ledger device holds at most {self._capacity * self.granularity:,} B")
        chosen = [heapq.heappop(self._returned) for _ in range(min(count, len(self._returned)))]
        missing = count - len(chosen)
        chosen.extend(range(self._next_granule, self._next_granule + missing))
        self._next_granule += missing
        self.counters.created_granules += count
        return [Granule(number) for number in chosen]

    def release(self, granules: Sequence[Granule]) -> None:
        for granule in granules:
            heapq.heappush(self._returned, granule)
        self.counters.released_granules += len(granules)

    def map(self, address: int, granules: Sequence[Granule]) -> None:
        first = address // self.granularity
        if any(first + at in self._mapped for at in range(len(granules))):
            raise DeviceError("mapping over addresses that are mapped already")
        for at, granule in enumerate(granules):
            self._mapped[first + at] = granule
        self.counters.map_calls += 1

    def unmap(self, address: int, count: int) -> None:
        first = address // self.granularity
        if any(first + at not in self._mapped for at in range(count)):
            raise DeviceError("unmapping addresses that are not mapped")
        for at in range(count):
            del self._mapped[first + at]
        self.counters.unmap_calls += 1

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        self.counters.htod_bytes += nbytes
        self.counters.htod_calls += 1

    def move(self, target: int, source: int, nbytes: int) -> None:
        self.counters.moved_bytes += nbytes

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Nothing is there to fill."""

    def write(self, address: int, data: bytes) -> None:
        """Nothing is there to write to."""

    def read(self, address: int, nbytes: int) -> bytes:
        raise DeviceError("the ledger device holds no bytes to read")

    def event(self) -> Event:
        self._events += 1
        return Event(self._events)

    def record(self, event: Event, stream: Stream) -> None:
        """Nothing takes time here."""

    def wait(self, event: Event, stream: Stream) -> None:
        """Nothing takes time here."""

    def synchronize(self) -> None:
        """Nothing takes time here."""

    def resident_bytes(self) -> int:
        return self.counters.live_granules * self.granularity

    def close(self) -> None:
        """Nothing to free."""
