"""Readings of the device and the child, taken from outside the engine every 300 ms.

The engine's ledger says what it charged. This says what is there: the memory file behind the host device is looked
at through /proc, so the engine has no part in the number. Reading must not disturb what is measured: the sampler
counts its own CPU time and the gaps between its readings.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from runner.watch.nvml import GpuReading, NvmlProbe
from runner.watch.proc import CpuTimes, cpu_times, device_resident_bytes, find_memfd, process_cpu_s, rss_split

INTERVAL_S = 0.3


@dataclass(frozen=True)
class Sample:
    """One reading. ``t`` is Unix time in seconds, ``mark`` says what caused it. Bytes are bytes; CPU is in percent:
    of one core for the child, of the whole machine for others. None where it could not be read."""

    t: float
    mark: str
    device_resident_bytes: int | None = None
    rss_anon_bytes: int | None = None
    rss_shmem_bytes: int | None = None
    child_cpu_percent: float | None = None
    others_cpu_percent: float | None = None
    gpu: GpuReading | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON types; readings that could not be taken are left out."""
        return {k: v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True)
class Samples:
    """A finished series. ``cpu_s`` is the sampler's own CPU time, ``wall_s`` how long it ran, ``max_gap_s`` the
    longest time between two readings."""

    series: tuple[Sample, ...]
    cpu_s: float
    wall_s: float
    max_gap_s: float
    source: str

    @property
    def cpu_fraction(self) -> float:
        """Sampler's CPU time as a part of wall time; 0 when it did not run."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    def peak(self, field: str) -> int | None:
        """The largest reading of ``field``, or None when there was none."""
        values = [v for s in self.series if (v := getattr(s, field)) is not None]
        return max(values) if values else None

    def others_cpu(self, start: float | None = None, end: float | None = None) -> list[float]:
        """CPU readings of others, between two Unix times when they are given."""
        return [
            s.others_cpu_percent
            for s in self.series
            if s.others_cpu_percent is not None and (start is None or s.t >= start) and (end is None or s.t <= end)
        ]


class Sampler:
    """Samples one child in a thread of its own.

    Parameters
    ----------
    pid
        The child.
    probe
        NVML, or None where it is not used.
    interval_s
        Seconds between readings; :meth:`mark` adds one at once.
    on_gpu
        The device's memory is the GPU's: what the child holds there beyond what it held when its plan stood.
    """

    def __init__(
        self, pid: int, probe: NvmlProbe | None = None, interval_s: float = INTERVAL_S, on_gpu: bool = False
    ) -> None:
        self._pid = pid
        self._on_gpu = on_gpu
        self._idle: int | None = None
        self._probe = probe
        self._interval = interval_s
        self._memfd: str | None = None
        self._paths: tuple[str, ...] = ()
        self._marks: list[str] = []
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._series: list[Sample] = []
        self._cpu_s = 0.0
        self._max_gap = 0.0
        self._started = time.monotonic()
        self._last_cpu: tuple[float, CpuTimes | None, float | None, float] | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> Sampler:
        """Take the first reading (before anything is loaded) and go on in the background."""
        self._thread.start()
        return self

    def watch(self, memfd: str) -> None:
        """The name of the device's memory file, once the child has said it."""
        self._memfd = memfd
        self.mark("hello")

    def mark(self, name: str) -> None:
        """Take one more reading now: something happened that an interval could miss."""
        self._marks.append(name)
        self._wake.set()

    def stop(self) -> Samples:
        """End the thread and return what it saw. Safe to call twice."""
        self._ended.set()
        self._wake.set()
        self._thread.join(timeout=5.0)
        source = f"st_blocks of /memfd:{self._memfd}" if self._memfd else "none"
        if self._on_gpu:
            source = "NVML, growth of the process since its plan stood"
        wall = time.monotonic() - self._started
        return Samples(tuple(self._series), self._cpu_s, wall, self._max_gap, source)

    def _run(self) -> None:
        cpu_before = time.thread_time()
        last = time.monotonic()
        self._read("start")
        due = last + self._interval
        while not self._ended.is_set():
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            if self._ended.is_set():
                break
            now = time.monotonic()
            self._max_gap = max(self._max_gap, now - last)
            last = now
            marks, self._marks = self._marks, []
            self._read("+".join(marks) if marks else "interval")
            # Not due + interval: after a late reading (a stopped machine) there is no burst to catch up.
            due = max(due, now) if marks and due > now else now + self._interval
            self._cpu_s = time.thread_time() - cpu_before
        self._cpu_s = time.thread_time() - cpu_before

    def _read(self, mark: str) -> None:
        sample = Sample(time.time(), mark)
        if self._memfd is not None and not self._paths:
            self._paths = find_memfd(self._pid, self._memfd)
        resident = device_resident_bytes(self._paths) if self._paths else None
        anon, shmem = rss_split(self._pid)
        child, others = self._cpu()
        gpu = self._probe.read() if self._probe is not None else None
        if self._on_gpu:
            resident = self._grown(gpu, mark)
        self._series.append(
            replace(
                sample,
                device_resident_bytes=resident,
                rss_anon_bytes=anon,
                rss_shmem_bytes=shmem,
                child_cpu_percent=child,
                others_cpu_percent=others,
                gpu=gpu,
            )
        )

    def _grown(self, gpu: GpuReading | None, mark: str) -> int | None:
        """What the child holds of the GPU beyond its reading at ``plan``: the device was open, nothing was placed."""
        held = gpu.bytes_of(self._pid) if gpu is not None else None
        if "plan" in mark.split("+") and self._idle is None:
            self._idle = held
        return None if held is None or self._idle is None else max(0, held - self._idle)

    def _cpu(self) -> tuple[float | None, float | None]:
        """Percent of one core used by the child, percent of the machine used by others, since the last full reading."""
        now = time.monotonic()
        if self._last_cpu is not None and now - self._last_cpu[0] < 0.5 * self._interval:
            return None, None  # /proc counts in 10 ms ticks: over a short time the figure is noise
        times, child, own = cpu_times(), process_cpu_s(self._pid), time.process_time()
        previous, self._last_cpu = self._last_cpu, (now, times, child, own)
        if previous is None or child is None or previous[2] is None:
            return None, None
        elapsed = now - previous[0]
        child_s = child - previous[2]
        child_percent = 100.0 * child_s / elapsed
        others: float | None = None
        if times is not None and previous[1] is not None:
            total = times.total_s - previous[1].total_s
            busy = times.busy_s - previous[1].busy_s
            mine = child_s + own - previous[3]
            others = 100.0 * max(0.0, busy - mine) / total if total > 0 else None
        return child_percent, others
