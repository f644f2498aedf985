"""How fast the host reads and copies memory, measured at load on the memory that the engine would use."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.device.host import HostDevice
from engine.device.link import Link, pace
from engine.memory.managing import Speeds

MOST_BYTES = 128 << 20
_TIMES = 5
_ENOUGH_S = 0.5


def measure_speeds(device: HostDevice, link: Link, most_bytes: int = MOST_BYTES) -> Speeds:
    """Speeds of ``device`` behind ``link``, from at most ``most_bytes`` of its memory, given back afterwards.

    Reads are a dot product over all cores, as kernels read: once, in order.

    Raises
    ------
    DeviceError
        When the device cannot give the memory.
    """
    count = max(1, most_bytes // device.granularity)
    nbytes = count * device.granularity
    near = np.ones(nbytes // 4, np.float32)
    base = device.reserve(nbytes)
    granules = device.create(count)
    device.map(base, granules)
    before = device.counters.htod_bytes, device.counters.htod_calls
    try:
        raw = (ctypes.c_char * nbytes).from_address(base)
        resident: NDArray[np.float32] = np.frombuffer(raw, np.float32)  # type: ignore[call-overload]
        copy = _rate(nbytes, lambda: device.copy_in(base, near.ctypes.data, nbytes))
        return Speeds(
            resident=_rate(nbytes, lambda: np.dot(resident, resident)),
            in_place=_rate(nbytes, lambda: _read_in_place(near, link)),
            copy=copy,
            overlapped=False,
            driver_model="none",
        )
    finally:
        device.counters.htod_bytes, device.counters.htod_calls = before
        device.unmap(base, count)
        device.release(granules)
        device.unreserve(base, nbytes)


def _read_in_place(near: NDArray[np.float32], link: Link) -> None:
    began = time.perf_counter()
    np.dot(near, near)
    pace(near.nbytes, link.in_place, began)


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    seconds: list[float] = []
    # A slow link needs no repeats: what disturbs it is short beside it.
    while len(seconds) < _TIMES and sum(seconds) < _ENOUGH_S:
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return nbytes / statistics.median(seconds)
