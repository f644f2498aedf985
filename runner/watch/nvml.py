"""Readings of one GPU through NVML, where a GPU and NVML exist.

Every figure on its own may be unsupported (a virtual GPU, MIG, an old driver): then it is None and the others still
come.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuReading:
    """One reading: bytes, percent, MHz, watts, degrees Celsius. ``reserved_bytes`` is the driver's own part.
    ``processes`` counts compute processes; None when the list cannot be read, which is not the same as none.
    ``by_process`` are the bytes each of them holds, by process id, for those whose bytes can be read."""

    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    utilization_percent: int | None = None
    memory_utilization_percent: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    clock_event_reasons: int | None = None
    processes: int | None = None
    by_process: tuple[tuple[int, int], ...] = ()

    def bytes_of(self, pid: int) -> int | None:
        """Bytes that process ``pid`` holds, None when that cannot be read."""
        return dict(self.by_process).get(pid)


class NvmlProbe:
    """One GPU. Make it with :func:`open_probe`."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid: str | None = self._ask(lambda: nvml.nvmlDeviceGetUUID(handle))

    def read(self) -> GpuReading:
        """One reading; never raises."""
        nvml, handle = self._nvml, self._handle
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
        rates = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        running = self._ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        power = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return GpuReading(
            used_bytes=_int(memory, "used"),
            free_bytes=_int(memory, "free"),
            reserved_bytes=_int(memory, "reserved"),
            utilization_percent=_int(rates, "gpu"),
            memory_utilization_percent=_int(rates, "memory"),
            sm_clock_mhz=self._ask(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            memory_clock_mhz=self._ask(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
            power_w=None if power is None else power / 1000.0,
            temperature_c=self._ask(lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            clock_event_reasons=self._ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))),
            processes=None if running is None else len(running),
            by_process=tuple(
                (int(each.pid), int(each.usedGpuMemory)) for each in running or () if each.usedGpuMemory is not None
            ),
        )

    def close(self) -> None:
        """Let go of NVML."""
        self._ask(self._nvml.nvmlShutdown)

    def _ask(self, call: Callable[[], Any]) -> Any:
        # NVML raises a class per status, AttributeError where the binding or the driver lacks a call.
        with contextlib.suppress(Exception):
            return call()
        return None


def open_probe(index: int = 0, module: str = "pynvml") -> NvmlProbe | None:
    """The probe of GPU ``index``, or None where there is no NVML or no such GPU."""
    try:
        nvml = importlib.import_module(module)
        nvml.nvmlInit()
    except Exception:  # ImportError, or any NVML status: all mean "no GPU to look at"
        return None
    try:
        return NvmlProbe(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
    except Exception:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()
        return None


def _int(struct: Any, field: str) -> int | None:
    value = getattr(struct, field, None)
    return None if value is None else int(value)
