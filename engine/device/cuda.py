"""The CUDA device: granules are cuMemCreate handles, addresses are reserved ranges, copies have a stream of their own.

A granule is one handle, so any granule can go behind any address, and behind several at once. A range of granules is
mapped one by one and made accessible, or unmapped, in one call; the cost still goes by the granule, so large ranges
want large granules. Work is asynchronous: what runs on the copy stream is ordered against the compute stream by events,
and unmapping waits for both.

A device belongs to the thread that opened it; another thread calls :meth:`CudaDevice.make_current` first.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from engine.device.cuda_driver import check, load_driver, open_gpu
from engine.device.exclusion import remapping
from engine.device.overlap import pieces
from engine.device.pinning import PinLimits, Pinning
from engine.device.protocol import DeviceCounters, Event, Granule, Stream
from engine.errors import DeviceError, InvalidRequest

_SCRATCH_BYTES = 2 << 20


class CudaDevice:
    """A :class:`engine.device.protocol.Device` on one NVIDIA GPU.

    Parameters
    ----------
    granularity
        Bytes of a granule, a multiple of the driver's own unit (2 MiB); None for that unit.
    ordinal
        Which GPU, as the driver counts them.
    driver
        Stands in for ``cuda.bindings.driver`` in tests.

    Raises
    ------
    InvalidRequest
        When there is no driver or no such GPU, or ``granularity`` does not fit it.
    """

    kind = "cuda"

    def __init__(self, granularity: int | None = None, ordinal: int = 0, driver: Any = None) -> None:
        self._cu = cu = load_driver() if driver is None else driver
        gpu = open_gpu(cu, ordinal)
        self._describe_memory(int(gpu))
        unit = check(
            cu.cuMemGetAllocationGranularity,
            self._properties,
            cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        )
        self.granularity = unit if granularity is None else granularity
        if self.granularity <= 0 or self.granularity % unit:
            raise InvalidRequest(f"device.granule={granularity}: expected a multiple of {unit:,} B, the driver's unit")
        self.counters = DeviceCounters()
        self._numbers = itertools.count()
        self._handles: dict[Granule, Any] = {}
        self._mapped: dict[int, Granule] = {}
        self._reserved: dict[int, int] = {}
        self._events: dict[Event, Any] = {}
        self._pinned: set[int] = set()
        with remapping("opening a device"), ExitStack() as undo:
            self._context = check(cu.cuDevicePrimaryCtxRetain, gpu)
            undo.callback(check, cu.cuDevicePrimaryCtxRelease, gpu)
            undo.callback(check, cu.cuCtxSetCurrent, check(cu.cuCtxGetCurrent))
            self.make_current()
            self._streams: dict[Stream, Any] = {}
            for stream in Stream:
                self._streams[stream] = check(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
                undo.callback(check, cu.cuStreamDestroy, self._streams[stream])
            self._scratch = int(check(cu.cuMemAlloc, _SCRATCH_BYTES))
            undo.callback(check, cu.cuMemFree, self._scratch)
            free, total = check(cu.cuMemGetInfo)
            self.total_bytes = int(total)
            self._used_at_first = self.total_bytes - int(free)
            undo.callback(self._give_everything_back)
            self._open = undo.pop_all()

    @property
    def driver(self) -> Any:
        """The driver's functions."""
        return self._cu

    @property
    def compute_stream(self) -> int:
        """The compute stream's handle, for libraries that take one."""
        return int(self._streams[Stream.COMPUTE])

    @property
    def copy_stream(self) -> int:
        """The copy stream's handle."""
        return int(self._streams[Stream.COPY])

    def make_current(self) -> None:
        """Let the calling thread use the device."""
        check(self._cu.cuCtxSetCurrent, self._context)

    def reserve(self, nbytes: int) -> int:
        size = self._rounded(nbytes)
        with remapping("reserving addresses"):
            address = int(check(self._cu.cuMemAddressReserve, size, 0, 0, 0))
        self._reserved[address] = size
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        if self._reserved.get(address) != self._rounded(nbytes):
            raise DeviceError(f"{nbytes:,} B at {address:#x} are not a reservation of this device")
        with remapping("giving addresses back"):
            check(self._cu.cuMemAddressFree, address, self._reserved[address])
        del self._reserved[address]

    def create(self, count: int) -> list[Granule]:
        cu = self._cu
        made: dict[Granule, Any] = {}
        with remapping("creating memory"), ExitStack() as undo:
            for _ in range(count):
                try:
                    handle = check(cu.cuMemCreate, self.granularity, self._properties, 0)
                except DeviceError as error:
                    raise DeviceError(
                        f"creating {count * self.granularity:,} B failed: {error}; {self.free_bytes():,} B of "
                        f"{self.total_bytes:,} B were free after {len(made):,} of {count:,} granules"
                    ) from error
                undo.callback(check, cu.cuMemRelease, handle)
                made[Granule(next(self._numbers))] = handle
            undo.pop_all()
        self._handles.update(made)
        self.counters.created_granules += count
        return list(made)

    def release(self, granules: Sequence[Granule]) -> None:
        handles = self._handles_of(granules)
        # The driver would keep a mapped granule's memory until it is unmapped, and say nothing.
        if mapped := set(granules).intersection(self._mapped.values()):
            raise DeviceError(f"{len(mapped):,} of the granules to be released are still mapped")
        with remapping("releasing memory"), ExitStack() as all_of_them:
            for granule, handle in zip(granules, handles, strict=True):
                all_of_them.callback(self._release, granule, handle)

    def map(self, address: int, granules: Sequence[Granule]) -> None:
        if not granules:
            return
        cu, size = self._cu, self.granularity
        ats = range(address, address + len(granules) * size, size)
        with remapping("mapping memory"), ExitStack() as undo:
            for at, handle in zip(ats, self._handles_of(granules), strict=True):
                check(cu.cuMemMap, at, size, 0, handle, 0)
                undo.callback(check, cu.cuMemUnmap, at, size)
            check(cu.cuMemSetAccess, address, len(granules) * size, [self._access], 1)
            undo.pop_all()
        self._mapped.update(zip(ats, granules, strict=True))
        self.counters.map_calls += len(granules)

    def unmap(self, address: int, count: int) -> None:
        if not count:
            return
        ats = range(address, address + count * self.granularity, self.granularity)
        if any(at not in self._mapped for at in ats):
            raise DeviceError(f"unmapping {count:,} granules at {address:#x}: not all of them are mapped")
        with remapping("unmapping memory"):
            # The driver unmaps at once, also from under work that still reads or writes the memory.
            self.synchronize()
            check(self._cu.cuMemUnmap, address, count * self.granularity)
        for at in ats:
            del self._mapped[at]
        self.counters.unmap_calls += 1

    def copy_in(self, address: int, source: int, nbytes: int) -> None:
        check(self._cu.cuMemcpyHtoDAsync, address, source, nbytes, self._streams[Stream.COPY])
        self.counters.htod_bytes += nbytes
        self.counters.htod_calls += 1

    def move(self, target: int, source: int, nbytes: int) -> None:
        stream = self._streams[Stream.COMPUTE]
        for to, start, length in pieces(target, source, nbytes, self._scratch, _SCRATCH_BYTES):
            check(self._cu.cuMemcpyDtoDAsync, to, start, length, stream)
        self.counters.moved_bytes += nbytes

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        if nbytes:
            check(self._cu.cuMemsetD8Async, address, byte, nbytes, self._streams[Stream.COMPUTE])

    def write(self, address: int, data: bytes) -> None:
        # From pageable memory the driver stages the bytes before it returns, so ``data`` need not be kept.
        # For the same reason a captured graph must not contain this call.
        check(self._cu.cuMemcpyHtoDAsync, address, _address_of(data), len(data), self._streams[Stream.COMPUTE])

    def read(self, address: int, nbytes: int) -> bytes:
        stream = self._streams[Stream.COMPUTE]
        target = ctypes.create_string_buffer(nbytes)
        check(self._cu.cuMemcpyDtoHAsync, ctypes.addressof(target), address, nbytes, stream)
        check(self._cu.cuStreamSynchronize, stream)
        return target.raw

    def read_later(self, target: int, address: int, nbytes: int) -> None:
        """Bring bytes to pinned host memory at ``target`` on the compute stream; an event after it says when."""
        check(self._cu.cuMemcpyDtoHAsync, target, address, nbytes, self._streams[Stream.COMPUTE])

    def wait_for(self, event: Event) -> None:
        """Let the host wait for ``event`` as it was last recorded."""
        check(self._cu.cuEventSynchronize, self._events[event])

    def event(self) -> Event:
        handle = check(self._cu.cuEventCreate, self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        event = Event(int(handle))
        self._events[event] = handle
        return event

    def record(self, event: Event, stream: Stream) -> None:
        check(self._cu.cuEventRecord, self._events[event], self._streams[stream])

    def wait(self, event: Event, stream: Stream) -> None:
        check(self._cu.cuStreamWaitEvent, self._streams[stream], self._events[event], 0)

    def synchronize(self) -> None:
        for stream in self._streams.values():
            check(self._cu.cuStreamSynchronize, stream)

    def free_bytes(self) -> int:
        """Bytes of the GPU nobody holds now, as the driver says."""
        free, _ = check(self._cu.cuMemGetInfo)
        return int(free)

    def resident_bytes(self) -> int:
        """Growth of the GPU's memory in use since this device was opened.

        It holds what other libraries allocated in this process since then, and what other processes did.
        """
        used = self.total_bytes - self.free_bytes()
        return max(0, used - self._used_at_first)

    def pin(self, address: int, nbytes: int) -> Pinning:
        """Pin host memory that somebody else owns, and let kernels read it in place.

        The memory must outlive the device or be unpinned first; touch it before, since pinning fresh pages takes ten
        times as long. Where it must stay pageable the reason is returned: copies from it still work, at a fraction of
        the speed.
        """
        cu, limits = self._cu, PinLimits.read()
        if obstacle := limits.obstacle(nbytes):
            return Pinning(reason=obstacle)
        flags = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
        with remapping("pinning host memory"), ExitStack() as undo:
            try:
                check(cu.cuMemHostRegister, address, nbytes, flags)
            except DeviceError as error:
                return Pinning(reason=f"pinning {nbytes:,} B of host memory: {error} ({limits.explain()})")
            undo.callback(check, cu.cuMemHostUnregister, address)
            seen = int(check(cu.cuMemHostGetDevicePointer, address, 0))
            undo.pop_all()
        self._pinned.add(address)
        return Pinning(seen)

    def unpin(self, address: int) -> None:
        """Undo :meth:`pin`, after the copies that still read the memory."""
        if address not in self._pinned:
            raise DeviceError(f"host memory at {address:#x} was not pinned by this device")
        with remapping("unpinning host memory"):
            self.synchronize()
            check(self._cu.cuMemHostUnregister, address)
        self._pinned.remove(address)

    def close(self) -> None:
        with remapping("closing a device"):
            self._open.close()

    def _describe_memory(self, ordinal: int) -> None:
        cu = self._cu
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = ordinal
        self._access = cu.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity) * self.granularity

    def _handles_of(self, granules: Sequence[Granule]) -> list[Any]:
        try:
            return [self._handles[granule] for granule in granules]
        except KeyError as error:
            raise DeviceError(f"granule {error} was never created or is already released") from None

    def _release(self, granule: Granule, handle: Any) -> None:
        check(self._cu.cuMemRelease, handle)
        del self._handles[granule]
        self.counters.released_granules += 1

    def _give_everything_back(self) -> None:
        """What callers did not give back themselves. Each step is tried, whatever became of the one before it."""
        cu = self._cu
        with ExitStack() as steps:  # run from the last one added to the first
            for address, size in self._reserved.items():
                steps.callback(check, cu.cuMemAddressFree, address, size)
            for granule, handle in self._handles.items():
                steps.callback(self._release, granule, handle)
            for address in self._mapped:
                steps.callback(check, cu.cuMemUnmap, address, self.granularity)
            for address in self._pinned:
                steps.callback(check, cu.cuMemHostUnregister, address)
            for handle in self._events.values():
                steps.callback(check, cu.cuEventDestroy, handle)
            steps.callback(self.synchronize)


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
