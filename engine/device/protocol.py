"""The Device protocol: everything the engine asks of a device, and nothing more.

Memory has two halves. *Addresses* are reserved once and never move. *Granules* are units of physical memory of
``granularity`` bytes. Mapping puts granules behind addresses; one granule may be mapped at many addresses (an alias).
Copies run on a copy stream, kernels on a compute stream; events order the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

Granule = NewType("Granule", int)
"""A physical unit of ``granularity`` bytes, by the device's own number for it."""

Event = NewType("Event", int)


class Stream(Enum):
    """The two queues of work of a device."""

    COMPUTE = "compute"
    COPY = "copy"


@dataclass
class DeviceCounters:
    """What the device itself counted since it was opened."""

    htod_bytes: int = 0
    htod_calls: int = 0
    moved_bytes: int = 0
    created_granules: int = 0
    released_granules: int = 0
    map_calls: int = 0
    unmap_calls: int = 0

    @property
    def live_granules(self) -> int:
        """Granules created and not yet released."""
        return self.created_granules - self.released_granules


class Device(Protocol):
    """One device. Sizes in bytes; addresses are integers; all failures are :class:`engine.errors.DeviceError`."""

    kind: str
    granularity: int
    counters: DeviceCounters

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes`` (rounded up to granules) of addresses, backed by nothing."""

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back."""

    def create(self, count: int) -> list[Granule]:
        """Create ``count`` granules of physical memory: all of them, or none and an error."""

    def release(self, granules: Sequence[Granule]) -> None:
        """Free granules that are mapped nowhere."""

    def map(self, address: int, granules: Sequence[Granule]) -> None:
        """Put ``granules`` behind consecutive addresses from ``address``."""

    def unmap(self, address: int, count: int) -> None:
        """Take ``count`` granules away from behind ``address``; the addresses stay reserved."""

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` from host address ``source`` on the copy stream. Counted as HtoD."""

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device on the compute stream; the ranges may overlap."""

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set ``nbytes`` to ``byte`` on the compute stream."""

    def write(self, address: int, data: bytes) -> None:
        """Put a few bytes (inputs of a step) on the device on the compute stream. Not counted as HtoD."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Bring bytes back to the host, after all work on the compute stream."""

    def event(self) -> Event:
        """Make an event."""

    def record(self, event: Event, stream: Stream) -> None:
        """Mark this point of ``stream``."""

    def wait(self, event: Event, stream: Stream) -> None:
        """Let ``stream`` go on only after ``event`` as it was last recorded."""

    def synchronize(self) -> None:
        """Wait for all work of both streams."""

    def resident_bytes(self) -> int:
        """Physical bytes the device really holds for this process, as far as it can tell."""

    def close(self) -> None:
        """Free everything."""
