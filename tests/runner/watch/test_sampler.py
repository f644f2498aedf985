"""The sampler sees a real memory file of a real child from outside, and costs next to nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from runner.watch.nvml import NvmlProbe, open_probe
from runner.watch.proc import device_resident_bytes, find_memfd, process_cpu_s, process_start, rss_split
from runner.watch.sampler import Sampler

MIB = 1 << 20

HOLDER = """
import os, sys
fd = os.memfd_create("ebb-device")
os.dup(fd)
os.memfd_create("other")
os.ftruncate(fd, 64 << 20)
print("made", flush=True)
for line in sys.stdin:
    start, length = map(int, line.split())
    os.posix_fallocate(fd, start, length)
    print("done", flush=True)
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process with a memory file that grows on request."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    yield process
    process.kill()
    process.communicate()


def grow(holder: subprocess.Popen[str], start: int, length: int) -> None:
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write(f"{start} {length}\n")
    assert holder.stdout.readline() == "done\n"


def test_residency_is_read_from_outside_to_the_page(holder: subprocess.Popen[str]) -> None:
    paths = find_memfd(holder.pid, "ebb-device")
    assert len(paths) == 1, "two descriptors of one file are one file"
    assert device_resident_bytes(paths) == 0
    grow(holder, 8 * MIB, 3 * MIB)
    assert device_resident_bytes(paths) == 3 * MIB
    assert find_memfd(holder.pid, "ebb") == ()


def test_a_series_holds_the_peak_and_marked_readings(holder: subprocess.Popen[str]) -> None:
    sampler = Sampler(holder.pid, interval_s=30.0).start()
    sampler.watch("ebb-device")
    grow(holder, 0, 5 * MIB)
    sampler.mark("growth")
    time.sleep(0.2)
    samples = sampler.stop()
    assert samples.peak("device_resident_bytes") == 5 * MIB
    assert samples.series[0].mark == "start" and samples.series[0].device_resident_bytes is None
    assert any("growth" in s.mark for s in samples.series)
    assert samples.series[-1].rss_anon_bytes
    assert samples.source == "st_blocks of /memfd:ebb-device"
    assert "gpu" not in samples.series[-1].to_dict()


def test_it_keeps_its_pace_and_costs_less_than_two_percent(holder: subprocess.Popen[str]) -> None:
    sampler = Sampler(holder.pid, interval_s=0.3).start()
    sampler.watch("ebb-device")
    time.sleep(2.0)
    samples = sampler.stop()
    assert 6 <= len(samples.series) <= 9
    assert samples.cpu_fraction < 0.02
    assert samples.max_gap_s < 1.0
    others = samples.others_cpu()
    assert others and all(0.0 <= value <= 100.0 for value in others)


def test_a_child_that_is_gone_gives_nothing_and_raises_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    sampler = Sampler(process.pid, interval_s=0.05).start()
    sampler.watch("ebb-device")
    time.sleep(0.2)
    samples = sampler.stop()
    assert samples.peak("device_resident_bytes") is None
    assert process_cpu_s(process.pid) is None
    assert process_start(process.pid) is None
    assert rss_split(process.pid) == (None, None)


class FakeNvml(SimpleNamespace):
    """NVML as a GPU with some calls unsupported would answer."""

    nvmlMemory_v2 = 2
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    closed = False

    def nvmlDeviceGetUUID(self, _: Any) -> str:
        return "GPU-0"

    def nvmlDeviceGetMemoryInfo(self, _: Any, version: int) -> Any:
        assert version == 2
        return SimpleNamespace(used=100, free=900, reserved=24)

    def nvmlDeviceGetUtilizationRates(self, _: Any) -> Any:
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetClockInfo(self, _: Any, kind: int) -> int:
        return 1000 * kind

    def nvmlDeviceGetPowerUsage(self, _: Any) -> int:
        return 71_500

    def nvmlShutdown(self) -> None:
        self.closed = True


def test_unsupported_nvml_figures_are_none() -> None:
    nvml = FakeNvml()
    probe = NvmlProbe(nvml, object())
    reading = probe.read()
    assert probe.uuid == "GPU-0"
    assert (reading.used_bytes, reading.free_bytes, reading.reserved_bytes) == (100, 900, 24)
    assert reading.utilization_percent is None and reading.processes is None and reading.temperature_c is None
    assert (reading.sm_clock_mhz, reading.power_w) == (1000, 71.5)
    probe.close()
    assert nvml.closed


def test_no_nvml_is_no_probe() -> None:
    assert open_probe(module="a_module_that_is_not_there") is None


def test_gpu_readings_are_in_the_series(holder: subprocess.Popen[str]) -> None:
    sampler = Sampler(holder.pid, NvmlProbe(FakeNvml(), object()), interval_s=0.05).start()
    time.sleep(0.1)
    gpu = sampler.stop().series[0].gpu
    assert gpu is not None and gpu.used_bytes == 100
