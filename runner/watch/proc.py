"""What /proc says about a process and the machine. Nothing raises: what cannot be read is None."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all cores together since boot: ``busy_s`` in use, ``total_s`` in all."""

    busy_s: float
    total_s: float


def cpu_times() -> CpuTimes | None:
    """CPU time of the machine from /proc/stat."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(x) for x in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(fields) < 8:
        return None
    # user nice system idle iowait irq softirq steal: steal is time others took from the whole machine, so it is busy.
    idle = fields[3] + fields[4]
    return CpuTimes((sum(fields) - idle) / _TICKS, sum(fields) / _TICKS)


def process_cpu_s(pid: int) -> float | None:
    """User and system seconds of one process, all threads."""
    fields = _stat_fields(pid)
    return None if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS


def process_start(pid: int) -> int | None:
    """Start of a process in ticks since boot: with the pid it names one process for as long as the machine is up."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[19])


def process_started_at(pid: int) -> float | None:
    """Unix time at which a process started, to 10 ms."""
    start = process_start(pid)
    if start is None:
        return None
    try:
        with open("/proc/stat", encoding="ascii") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    except (OSError, ValueError, StopIteration):
        return None
    return boot + start / _TICKS


def rss_split(pid: int) -> tuple[int | None, int | None]:
    """Resident anonymous and shared-memory bytes. Shared ones count once per mapping: not a residency figure."""
    found: dict[str, int] = {}
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("RssAnon:", "RssShmem:")):
                    name, amount, *_ = line.split()
                    found[name] = int(amount) * 1024
    except (OSError, ValueError):
        return None, None
    return found.get("RssAnon:"), found.get("RssShmem:")


def find_memfd(pid: int, name: str) -> tuple[str, ...]:
    """Paths under /proc/PID/fd of the memory files called ``name``, one per file however many descriptors it has."""
    wanted = f"/memfd:{name}"
    folder = Path(f"/proc/{pid}/fd")
    found: dict[tuple[int, int], str] = {}
    try:
        entries = list(folder.iterdir())
    except OSError:
        return ()
    for entry in entries:
        try:
            target = os.readlink(entry)
            if target.removesuffix(" (deleted)") == wanted:
                status = entry.stat()
                found.setdefault((status.st_dev, status.st_ino), str(entry))
        except OSError:
            continue
    return tuple(found.values())


def device_resident_bytes(paths: tuple[str, ...]) -> int | None:
    """Bytes of physical memory behind memory files, as the kernel counts them; None when one is gone."""
    try:
        return sum(os.stat(path).st_blocks * 512 for path in paths)
    except OSError:
        return None


def _stat_fields(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    # The command name is in parentheses and may hold anything, so count from the last one.
    fields = text[text.rfind(")") + 2 :].split()
    return fields if len(fields) > 19 else None
