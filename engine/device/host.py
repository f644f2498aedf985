"""The host device: physical memory is a memfd, addresses are reserved mappings, and residency can be seen from outside.

A granule is a range of the memfd. Mapping is ``mmap(MAP_SHARED|MAP_FIXED)``, so one granule can stand behind many
addresses. Releasing punches a hole, so the memory really goes back; ``st_blocks`` of the memfd (through
``/proc/PID/fd``) tells any process how much is resident. Copies are synchronous: on the cores that run
the kernels a copy thread gains nothing.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import sys
import time
from collections.abc import Iterator, Sequence

from engine.device.link import MEMORY_SPEED, Link, pace
from engine.device.protocol import DeviceCounters, Event, Granule, Stream
from engine.errors import DeviceError, InvalidRequest

MEMFD_NAME = "ebb-device"

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_MAP_NORESERVE, _MAP_POPULATE = 0x4000, 0x8000
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 0x01, 0x02
_MADV_COLLAPSE = 25
_HUGE = 2 << 20
_MAP_FAILED = ctypes.c_void_p(-1).value
# Other mappings of the process (libraries, heaps, thread stacks) need room below vm.max_map_count too.
_SPARE_MAPPINGS = 4096


class HostDevice:
    """A :class:`engine.device.protocol.Device` in host memory (Linux).

    Parameters
    ----------
    granularity
        Bytes of a granule: a multiple of the page size.
    capacity
        The most physical bytes the device will hold; more is a DeviceError.
    link
        What copies are held to.
    """

    kind = "host"

    def __init__(self, granularity: int, capacity: int, link: Link = MEMORY_SPEED) -> None:
        if sys.platform != "linux":
            raise InvalidRequest("device=host needs Linux (memfd and shared mappings); this system has neither")
        page = os.sysconf("SC_PAGESIZE")
        if granularity <= 0 or granularity % page:
            raise InvalidRequest(f"device.granule={granularity}: expected a multiple of the page size, {page} B")
        self.granularity = granularity
        self._link = link
        self.counters = DeviceCounters()
        self._libc = _libc()
        self._capacity = -(-capacity // granularity)
        self._fd = os.memfd_create(MEMFD_NAME)
        self._fresh = 0
        self._returned: list[int] = []
        self._runs: dict[int, int] = {}
        self._mappings = 0
        self._max_mappings = _max_map_count() - _SPARE_MAPPINGS
        self._events = 0

    def reserve(self, nbytes: int) -> int:
        # Large ranges start at a huge-page boundary: reserve more, give both ends back.
        wanted = self._rounded(nbytes)
        spare = _HUGE if wanted >= _HUGE else 0
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        start = self._mmap(None, wanted + spare, _PROT_NONE, flags, -1, 0)
        skip = -start % _HUGE if spare else 0
        for at, length in ((start, skip), (start + skip + wanted, spare - skip)):
            if length:
                self._libc.munmap(at, length)
        return start + skip

    def unreserve(self, address: int, nbytes: int) -> None:
        if self._libc.munmap(address, self._rounded(nbytes)):
            raise DeviceError(f"munmap of {nbytes:,} B failed: {_errno()}")

    def create(self, count: int) -> list[Granule]:
        if self.counters.live_granules + count > self._capacity:
            raise DeviceError(f"the host device holds at most {self._capacity * self.granularity:,} B")
        chosen = self._choose(count)
        done = 0
        for first, length in _runs(chosen):
            # Allocate now: like device memory, a created granule is physical whether or not it was touched.
            if self._libc.fallocate(
                self._fd,
                _FALLOC_KEEP_SIZE,
                first * self.granularity,
                length * self.granularity,
            ):
                reason = _errno()
                self._punch(chosen[:done])
                self._give_back(chosen)
                raise DeviceError(f"creating {count * self.granularity:,} B failed: {reason}")
            done += length
        self.counters.created_granules += count
        return [Granule(index) for index in chosen]

    def release(self, granules: Sequence[Granule]) -> None:
        self._punch(granules)
        self._give_back(granules)
        self.counters.released_granules += len(granules)

    def map(self, address: int, granules: Sequence[Granule]) -> None:
        runs = list(_runs(granules))
        if self._mappings + len(runs) > self._max_mappings:
            raise DeviceError(
                f"mapping {len(granules):,} granules would need more than the {self._max_mappings:,} mappings "
                "vm.max_map_count leaves; use a larger device.granule"
            )
        at, mapped = address, 0
        try:
            for first, length in runs:
                self._map_run(at, first * self.granularity, length * self.granularity)
                at += length * self.granularity
                mapped += 1
        except DeviceError:
            if mapped:
                self._cover(address, at - address)
            raise
        self._mappings += len(runs)
        self.counters.map_calls += len(runs)
        self._runs[address] = len(runs)

    def _choose(self, count: int) -> list[int]:
        """Numbers of ``count`` granules that hold no memory: returned ones, lowest first, else new ones.

        A large block of new ones starts at a huge-page boundary of the memfd, so that it can be backed by huge pages.
        """
        large = count * self.granularity >= _HUGE
        if large and len(self._returned) < count:
            start = -(-self._fresh * self.granularity // _HUGE) * _HUGE // self.granularity
            self._give_back(range(self._fresh, start))
            chosen = list(range(start, start + count))
        else:
            chosen = [heapq.heappop(self._returned) for _ in range(min(count, len(self._returned)))]
            chosen.extend(range(self._fresh, self._fresh + count - len(chosen)))
        self._fresh = max(self._fresh, chosen[-1] + 1) if chosen else self._fresh
        os.ftruncate(self._fd, max(os.fstat(self._fd).st_size, self._fresh * self.granularity))
        return chosen

    def unmap(self, address: int, count: int) -> None:
        nbytes = count * self.granularity
        # Cover the range before any hole is punched: reading a punched page would quietly allocate it again.
        self._cover(address, nbytes)
        self.counters.unmap_calls += 1
        for start in [a for a in self._runs if address <= a < address + nbytes]:
            self._mappings -= self._runs.pop(start)

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        began = time.perf_counter()
        ctypes.memmove(address, source, nbytes)
        pace(nbytes, self._link.copy, began)
        self.counters.htod_bytes += nbytes
        self.counters.htod_calls += 1

    def move(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)
        self.counters.moved_bytes += nbytes

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        ctypes.memset(address, byte, nbytes)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def event(self) -> Event:
        self._events += 1
        return Event(self._events)

    def record(self, event: Event, stream: Stream) -> None:
        """Copies and kernels are synchronous here, so order is program order."""

    def wait(self, event: Event, stream: Stream) -> None:
        """See :meth:`record`."""

    def synchronize(self) -> None:
        """See :meth:`record`."""

    def resident_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity) * self.granularity

    def _mmap(
        self,
        address: int | None,
        nbytes: int,
        protection: int,
        flags: int,
        fd: int,
        offset: int,
    ) -> int:
        result = self._libc.mmap(address, nbytes, protection, flags, fd, offset)
        if result == _MAP_FAILED:
            raise DeviceError(f"mmap of {nbytes:,} B failed: {_errno()}")
        return int(result)

    def _map_run(self, address: int, offset: int, nbytes: int) -> None:
        first = -(-address // _HUGE) * _HUGE
        last = (address + nbytes) // _HUGE * _HUGE
        huge = first < last and (address - offset) % _HUGE == 0
        populate = 0 if huge else _MAP_POPULATE
        flags = _MAP_SHARED | _MAP_FIXED | populate
        self._mmap(address, nbytes, _PROT_READ_WRITE, flags, self._fd, offset)
        if huge:
            # Kernels read weights 8 % faster through huge pages. Where the system has none to give, small ones do.
            self._libc.madvise(first, last - first, _MADV_COLLAPSE)

    def _cover(self, address: int, nbytes: int) -> None:
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._mmap(address, nbytes, _PROT_NONE, flags, -1, 0)

    def _punch(self, granules: Sequence[int]) -> None:
        for first, length in _runs(sorted(granules)):
            if self._libc.fallocate(
                self._fd,
                _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE,
                first * self.granularity,
                length * self.granularity,
            ):
                raise DeviceError(f"releasing {length * self.granularity:,} B failed: {_errno()}")

    def _give_back(self, granules: Sequence[int]) -> None:
        for index in granules:
            heapq.heappush(self._returned, index)


def _runs(granules: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs of consecutive numbers, in order, as (first, length)."""
    first, length = -1, 0
    for index in granules:
        if length and index == first + length:
            length += 1
            continue
        if length:
            yield first, length
        first, length = index, 1
    if length:
        yield first, length


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_int64,
    ]
    return libc


def _errno() -> str:
    return os.strerror(ctypes.get_errno())


def _max_map_count() -> int:
    try:
        with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65530
