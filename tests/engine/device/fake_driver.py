"""Stands in for ``cuda.bindings.driver``: a ledger of what a driver holds, memory included, that can be made to fail.

Calls take effect at once, in program order, so it says nothing about streams except which one a call named.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

UNIT = 4096
"""Bytes of the driver's smallest granule here."""


class CUresult(IntEnum):
    """The codes the fake answers with, under the driver's numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


OK = CUresult.CUDA_SUCCESS
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE
FULL = CUresult.CUDA_ERROR_OUT_OF_MEMORY
ASTRAY = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


class FakeDriver:
    """One GPU with ``granules`` units of memory.

    Attributes
    ----------
    log
        Every call made, as (name, arguments).
    """

    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)

    def __init__(self, gpus: int = 1, granules: int = 2048, maps_memory: bool = True) -> None:
        self._gpus, self._total, self._maps_memory = gpus, granules * UNIT, maps_memory
        self._ids = itertools.count(0x10)
        self._addresses = itertools.count(0x7000_0000_0000, 1 << 32)
        self._failures: dict[str, tuple[int, CUresult]] = {}
        self._calls: Counter[str] = Counter()
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.contexts = 0
        self.current = 0
        self.handles: dict[int, bytearray] = {}
        self.mappings: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.reservations: dict[int, int] = {}
        self.streams: set[int] = set()
        self.events: set[int] = set()
        self.registered: dict[int, int] = {}

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return self._watched(name, value) if name.startswith("cu") and callable(value) else value

    def fail(self, name: str, call: int = 0, code: CUresult = FULL) -> None:
        """Let call number ``call`` from now (0 is the next) of function ``name`` fail, once."""
        self._failures[name] = (self._calls[name] + call, code)

    def snapshot(self) -> dict[str, Any]:
        """All the driver holds now, to be compared with another moment."""
        return {
            "contexts": self.contexts,
            "current": self.current,
            "handles": set(self.handles),
            "mappings": dict(self.mappings),
            "accessible": set(self.accessible),
            "reservations": dict(self.reservations),
            "streams": set(self.streams),
            "events": set(self.events),
            "registered": dict(self.registered),
        }

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of every call of ``name`` so far."""
        return [arguments for called, arguments in self.log if called == name]

    def _watched(self, name: str, function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append((name, arguments))
            number = self._calls[name]
            self._calls[name] += 1
            at, code = self._failures.get(name, (-1, OK))
            if number == at:
                del self._failures[name]
                return code, None
            return function(*arguments)

        call.__name__ = name
        return call

    # Start, contexts, streams, events

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace()

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (OK if self._gpus else CUresult.CUDA_ERROR_NO_DEVICE,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return OK, self._gpus

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return OK, ordinal

    def cuDeviceGetAttribute(self, attribute: int, gpu: int) -> tuple[Any, ...]:
        return OK, int(self._maps_memory)

    def cuDevicePrimaryCtxRetain(self, gpu: int) -> tuple[Any, ...]:
        self.contexts += 1
        return OK, 0xC0DE

    def cuDevicePrimaryCtxRelease(self, gpu: int) -> tuple[Any, ...]:
        self.contexts -= 1
        return (OK,)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return OK, self.current

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        self.current = context
        return (OK,)

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        return OK, self._new(self.streams)

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        return self._drop(self.streams, stream)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return (OK if stream in self.streams else INVALID,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        return (OK if stream in self.streams and event in self.events else INVALID,)

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return OK, self._new(self.events)

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        return self._drop(self.events, event)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return (OK if stream in self.streams and event in self.events else INVALID,)

    # Addresses and memory

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:
        return OK, UNIT

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return OK, self._free(), self._total

    def cuMemAddressReserve(self, size: int, alignment: int, hint: int, flags: int) -> tuple[Any, ...]:
        address = next(self._addresses)
        self.reservations[address] = size
        return OK, address

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        inside = any(address <= at < address + size for at in self.mappings)
        if inside or self.reservations.get(address) != size:
            return (INVALID,)
        del self.reservations[address]
        return (OK,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        if size % UNIT or size > self._free():
            return FULL, None
        handle = next(self._ids)
        self.handles[handle] = bytearray(b"\xee" * size)
        return OK, handle

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        return (OK if self.handles.pop(handle, None) is not None else INVALID,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        reserved = any(at <= address and address + size <= at + room for at, room in self.reservations.items())
        taken = any(at < address + size and address < at + len(self.handles[h]) for at, h in self.mappings.items())
        if not reserved or taken or size != len(self.handles[handle]):
            return (INVALID,)
        self.mappings[address] = handle
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        inside = self._whole_mappings(address, size)
        if not inside or count != len(access):
            return (INVALID,)
        self.accessible |= inside
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        inside = self._whole_mappings(address, size)
        for at in inside:
            del self.mappings[at]
        self.accessible -= inside
        return (OK if inside else INVALID,)

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        address, handle = next(self._addresses), next(self._ids)
        self.reservations[address] = size
        self.handles[handle] = bytearray(size)
        self.mappings[address] = handle
        self.accessible.add(address)
        return OK, address

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        handle = self.mappings.pop(address)
        self.accessible.remove(address)
        del self.reservations[address]
        del self.handles[handle]
        return (OK,)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[Any, ...]:
        if address in self.registered:
            return (INVALID,)
        self.registered[address] = size
        return (OK,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        return (OK, address) if address in self.registered else (INVALID, None)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        return (OK if self.registered.pop(address, None) is not None else INVALID,)

    # Copies

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        return (self._store(target, ctypes.string_at(source, size) if size else b""),)

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        data = self._load(source, size)
        if data is None:
            return (ASTRAY,)
        ctypes.memmove(target, data, size)
        return (OK,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        data = self._load(source, size)
        if data is None or abs(target - source) < size:  # the real one leaves overlapping ranges undefined
            return (ASTRAY,)
        return (self._store(target, data),)

    def cuMemsetD8Async(self, target: int, byte: int, size: int, stream: int) -> tuple[Any, ...]:
        return (self._store(target, bytes([byte]) * size) if size else INVALID,)

    def _free(self) -> int:
        return self._total - sum(map(len, self.handles.values()))

    def _new(self, kind: set[int]) -> int:
        number = next(self._ids)
        kind.add(number)
        return number

    def _drop(self, kind: set[int], number: int) -> tuple[Any, ...]:
        if number not in kind:
            return (INVALID,)
        kind.remove(number)
        return (OK,)

    def _whole_mappings(self, address: int, size: int) -> set[int]:
        """Addresses of the mappings that fill the range without a gap, or nothing."""
        found, at = set(), address
        while at < address + size:
            if at not in self.mappings:
                return set()
            found.add(at)
            at += len(self.handles[self.mappings[at]])
        return found if at == address + size else set()

    def _pieces(self, address: int, size: int) -> list[tuple[bytearray, int, int]] | None:
        """(memory, offset, length) behind a range, or None where anything in it is missing or not accessible."""
        pieces: list[tuple[bytearray, int, int]] = []
        while size:
            for at in self.accessible:
                memory = self.handles[self.mappings[at]]
                if at <= address < at + len(memory):
                    length = min(size, at + len(memory) - address)
                    pieces.append((memory, address - at, length))
                    address, size = address + length, size - length
                    break
            else:
                return None
        return pieces

    def _load(self, address: int, size: int) -> bytes | None:
        if any(at <= address and address + size <= at + room for at, room in self.registered.items()):
            return ctypes.string_at(address, size)
        pieces = self._pieces(address, size)
        if pieces is None:
            return None
        return b"".join(bytes(memory[offset : offset + length]) for memory, offset, length in pieces)

    def _store(self, address: int, data: bytes) -> CUresult:
        pieces = self._pieces(address, len(data))
        if pieces is None:
            return ASTRAY
        for memory, offset, length in pieces:
            memory[offset : offset + length] = data[:length]
            data = data[length:]
        return OK
