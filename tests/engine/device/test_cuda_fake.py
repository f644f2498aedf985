"""The CUDA device over a fake driver: what it asks for, what it gives back, and what is left when a call fails."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.device.cuda import CudaDevice
from engine.device.cuda_driver import unavailable
from engine.device.exclusion import Exclusion, capturing
from engine.device.overlap import pieces
from engine.device.pinning import PinLimits
from engine.device.protocol import Device, Stream
from engine.errors import DeviceError, InvalidRequest
from tests.engine.device.contract import DeviceContract
from tests.engine.device.fake_driver import UNIT, FakeDriver

GRANULE = 16 * UNIT


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver) -> Iterator[CudaDevice]:
    device = CudaDevice(GRANULE, driver=driver)
    yield device
    device.close()


class TestFakeCuda(DeviceContract):
    """The whole contract, over the fake."""

    @pytest.fixture
    def device(self, driver: FakeDriver) -> Iterator[Device]:
        device = CudaDevice(GRANULE, driver=driver)
        yield device
        device.close()


def state(device: CudaDevice, driver: FakeDriver) -> tuple[Any, ...]:
    """All that must be as it was after a call that failed."""
    return driver.snapshot(), vars(device.counters).copy(), dict(device._mapped), set(device._handles)


# Nothing is lost


@pytest.mark.parametrize("units", [1, 16])
def test_a_thousand_cycles_end_where_they_began(units: int) -> None:
    driver = FakeDriver()
    device = CudaDevice(units * UNIT, driver=driver)
    address = device.reserve(4 * device.granularity)
    before = driver.snapshot()
    for _ in range(1000):
        granules = device.create(4)
        device.map(address, granules)
        device.unmap(address, 4)
        device.release(granules)
    assert driver.snapshot() == before
    assert device.counters.live_granules == 0
    assert device.counters.created_granules == 4000
    assert device.resident_bytes() == 0


def test_closing_gives_back_all_that_was_taken(driver: FakeDriver) -> None:
    before = driver.snapshot()
    device = CudaDevice(GRANULE, driver=driver)
    address = device.reserve(4 * GRANULE)
    device.map(address, device.create(3))
    device.event()
    host = ctypes.create_string_buffer(100)
    device.pin(ctypes.addressof(host), 100)
    device.close()
    device.close()
    assert driver.snapshot() == before


def test_closing_goes_on_after_a_call_that_fails(driver: FakeDriver) -> None:
    device = CudaDevice(GRANULE, driver=driver)
    device.map(device.reserve(GRANULE), device.create(1))
    device.create(2)
    driver.fail("cuMemRelease")
    with pytest.raises(DeviceError, match="cuMemRelease"):
        device.close()
    left = driver.snapshot()
    assert (len(left["handles"]), left["mappings"], left["reservations"], left["contexts"]) == (1, {}, {}, 0)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("cuDevicePrimaryCtxRetain", 0),
        ("cuCtxGetCurrent", 0),
        ("cuCtxSetCurrent", 0),
        ("cuStreamCreate", 0),
        ("cuStreamCreate", 1),
        ("cuMemAlloc", 0),
        ("cuMemGetInfo", 0),
    ],
)
def test_a_device_that_fails_to_open_holds_nothing(driver: FakeDriver, call: str, number: int) -> None:
    before = driver.snapshot()
    driver.fail(call, number)
    with pytest.raises(DeviceError, match=call):
        CudaDevice(GRANULE, driver=driver)
    assert driver.snapshot() == before


# Failing calls


def filled(device: CudaDevice) -> int:
    """Six granules of addresses, four of them mapped."""
    address = device.reserve(6 * GRANULE)
    device.map(address, device.create(3))
    device.map(address + 3 * GRANULE, device.create(1))
    return address


OPERATIONS: dict[str, Callable[[CudaDevice, int, Any], object]] = {
    "create": lambda device, address, spare: device.create(4),
    "map": lambda device, address, spare: device.map(address + 4 * GRANULE, spare),
    "alias": lambda device, address, spare: device.map(device.reserve(2 * GRANULE), spare[:1] * 2),
    "unmap": lambda device, address, spare: device.unmap(address, 4),
    "reserve": lambda device, address, spare: device.reserve(GRANULE),
}


@pytest.mark.parametrize(
    ("operation", "call", "number"),
    [
        *(("create", "cuMemCreate", number) for number in range(4)),
        *(("map", "cuMemMap", number) for number in range(2)),
        ("map", "cuMemSetAccess", 0),
        ("unmap", "cuStreamSynchronize", 0),
        ("unmap", "cuStreamSynchronize", 1),
        ("unmap", "cuMemUnmap", 0),
        ("reserve", "cuMemAddressReserve", 0),
    ],
)
def test_a_call_that_fails_leaves_everything_as_it_was(
    device: CudaDevice, driver: FakeDriver, operation: str, call: str, number: int
) -> None:
    address, spare = filled(device), device.create(2)
    run = OPERATIONS[operation]
    before = state(device, driver)
    driver.fail(call, number)
    with pytest.raises(DeviceError, match=f"{call} failed: CUDA_ERROR_OUT_OF_MEMORY"):
        run(device, address, spare)
    assert state(device, driver) == before
    run(device, address, spare)
    assert state(device, driver) != before


def test_a_release_that_fails_half_way_gives_back_the_others(device: CudaDevice, driver: FakeDriver) -> None:
    granules = device.create(4)
    driver.fail("cuMemRelease", 1)
    with pytest.raises(DeviceError, match="cuMemRelease"):
        device.release(granules)
    assert device.counters.live_granules == 1
    device.release([granule for granule in granules if granule in device._handles])
    assert device.counters.live_granules == 0


def test_too_little_memory_is_said_with_figures(device: CudaDevice) -> None:
    with pytest.raises(DeviceError, match=r"creating 6,553,600 B failed: cuMemCreate .* were free after \d+ of 100"):
        device.create(100)
    assert device.counters.live_granules == 0


# Misuse


def test_mapped_granules_are_not_released(device: CudaDevice, driver: FakeDriver) -> None:
    address, granules = device.reserve(GRANULE), device.create(2)
    device.map(address, granules[:1])
    before = state(device, driver)
    with pytest.raises(DeviceError, match="still mapped"):
        device.release(granules)
    assert state(device, driver) == before


def test_unmapping_what_is_not_mapped_is_refused(device: CudaDevice, driver: FakeDriver) -> None:
    address = filled(device)
    before = state(device, driver)
    with pytest.raises(DeviceError, match="not all of them are mapped"):
        device.unmap(address, 5)
    assert state(device, driver) == before


def test_released_granules_are_not_mapped(device: CudaDevice) -> None:
    address, granules = device.reserve(GRANULE), device.create(1)
    device.release(granules)
    with pytest.raises(DeviceError, match="already released"):
        device.map(address, granules)


def test_only_whole_reservations_are_given_back(device: CudaDevice) -> None:
    address = device.reserve(4 * GRANULE)
    with pytest.raises(DeviceError, match="not a reservation"):
        device.unreserve(address, GRANULE)
    device.unreserve(address, 4 * GRANULE)


# What is asked of the driver


def test_a_range_is_made_accessible_and_unmapped_in_one_call(device: CudaDevice, driver: FakeDriver) -> None:
    address = device.reserve(8 * GRANULE)
    device.map(address, device.create(8))
    device.unmap(address, 8)
    assert [arguments[:2] for arguments in driver.named("cuMemSetAccess")] == [(address, 8 * GRANULE)]
    assert driver.named("cuMemUnmap") == [(address, 8 * GRANULE)]
    assert (device.counters.map_calls, device.counters.unmap_calls) == (8, 1)


def test_copies_go_to_the_copy_stream_and_the_rest_to_the_compute_stream(
    device: CudaDevice, driver: FakeDriver
) -> None:
    address = device.reserve(2 * GRANULE)
    device.map(address, device.create(2))
    host = ctypes.create_string_buffer(16)
    device.copy_in(address, ctypes.addressof(host), 16)
    device.write(address, b"few")
    device.fill(address, 16, 0)
    device.move(address + 16, address, 16)
    device.read(address, 16)
    device.record(device.event(), Stream.COPY)
    assert [arguments[3] for arguments in driver.named("cuMemcpyHtoDAsync")] == [
        device.copy_stream,
        device.compute_stream,
    ]
    for call in ("cuMemsetD8Async", "cuMemcpyDtoDAsync", "cuMemcpyDtoHAsync"):
        assert [arguments[3] for arguments in driver.named(call)] == [device.compute_stream]
    assert driver.named("cuEventRecord")[0][1] == device.copy_stream


def test_unmapping_waits_for_both_streams_first(device: CudaDevice, driver: FakeDriver) -> None:
    address = filled(device)
    driver.log.clear()
    device.unmap(address, 1)
    assert [name for name, _ in driver.log] == ["cuStreamSynchronize", "cuStreamSynchronize", "cuMemUnmap"]


def test_what_is_resident_is_read_from_the_driver(device: CudaDevice) -> None:
    granules = device.create(10)
    assert device.resident_bytes() == 10 * GRANULE
    assert device.free_bytes() <= device.total_bytes - 10 * GRANULE
    device.release(granules)
    assert device.resident_bytes() == 0


# Opening


@pytest.mark.parametrize("granule", [0, -UNIT, UNIT + 1])
def test_a_granule_is_a_multiple_of_the_drivers_unit(driver: FakeDriver, granule: int) -> None:
    with pytest.raises(InvalidRequest, match="expected a multiple of 4,096 B"):
        CudaDevice(granule, driver=driver)


def test_without_a_wish_the_granule_is_the_drivers_unit(driver: FakeDriver) -> None:
    device = CudaDevice(driver=driver)
    assert device.granularity == UNIT
    device.close()


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text.startswith("device=cuda: ")
    assert "\n" not in text
    return text


def test_no_driver_is_one_line() -> None:
    def cuInit(flags: int) -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    with pytest.raises(InvalidRequest) as caught:
        CudaDevice(driver=SimpleNamespace(cuInit=cuInit))
    assert "no NVIDIA driver on this machine" in one_line(caught.value)


def test_no_cuda_python_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(InvalidRequest) as caught:
        CudaDevice()
    assert "cuda-python is not installed" in one_line(caught.value)
    assert unavailable() == str(caught.value)


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InvalidRequest) as caught:
        CudaDevice(driver=FakeDriver(gpus=0))
    assert "no GPU" in one_line(caught.value)
    assert "CUDA_VISIBLE_DEVICES=''" in str(caught.value)


def test_a_gpu_that_is_not_there_or_cannot_map_is_one_line() -> None:
    with pytest.raises(InvalidRequest) as caught:
        CudaDevice(ordinal=2, driver=FakeDriver(gpus=2))
    assert "no GPU 2; the driver shows 2" in one_line(caught.value)
    with pytest.raises(InvalidRequest) as caught:
        CudaDevice(driver=FakeDriver(maps_memory=False))
    assert "virtual memory management" in one_line(caught.value)


def test_a_driver_that_does_not_start_says_why(driver: FakeDriver) -> None:
    driver.fail("cuInit")
    with pytest.raises(DeviceError, match="cuInit failed: CUDA_ERROR_OUT_OF_MEMORY"):
        CudaDevice(driver=driver)


# Pinned memory


def test_pinned_memory_can_be_read_in_place_and_is_let_go(device: CudaDevice, driver: FakeDriver) -> None:
    host = ctypes.create_string_buffer(4096)
    made = device.pin(ctypes.addressof(host), 4096)
    assert made.pinned
    assert made.reason == ""
    assert driver.named("cuMemHostRegister") == [(ctypes.addressof(host), 4096, 3)]
    device.unpin(ctypes.addressof(host))
    assert driver.registered == {}
    with pytest.raises(DeviceError, match="not pinned by this device"):
        device.unpin(ctypes.addressof(host))


def test_memory_the_driver_will_not_pin_stays_pageable_and_says_why(device: CudaDevice, driver: FakeDriver) -> None:
    driver.fail("cuMemHostRegister")
    made = device.pin(0x1000, 4096)
    assert not made.pinned
    assert made.reason.startswith("pinning 4,096 B of host memory: cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY")


def test_a_pin_that_cannot_be_mapped_is_undone(device: CudaDevice, driver: FakeDriver) -> None:
    driver.fail("cuMemHostGetDevicePointer")
    with pytest.raises(DeviceError, match="cuMemHostGetDevicePointer"):
        device.pin(0x1000, 4096)
    assert driver.registered == {}


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": "1000", "sys/fs/cgroup/a/b/memory.max": "max"}, 1000),
        ("0::/a/b", {"sys/fs/cgroup/a/memory.max": "1000", "sys/fs/cgroup/a/b/memory.max": "500"}, 500),
        ("0::/", {"sys/fs/cgroup/memory.max": "700"}, 700),
        ("0::/", {}, None),
        ("3:cpu,memory:/x", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "900"}, 900),
        ("3:memory:/x", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_the_lowest_cgroup_limit_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int | None
) -> None:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    limits = PinLimits.read(tmp_path)
    assert limits.cgroup_bytes == expected
    assert (limits.obstacle(1001) is None) == (expected is None)


def test_pinning_more_than_the_cgroup_may_hold_is_not_even_tried(
    device: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PinLimits, "read", classmethod(lambda cls: PinLimits(cgroup_bytes=1000)))
    made = device.pin(0x1000, 4096)
    assert made.reason == "pinning 4,096 B would pass the memory limit of the cgroup, 1,000 B"
    assert driver.named("cuMemHostRegister") == []


# Capture


def test_memory_is_not_remapped_inside_a_capture(device: CudaDevice, driver: FakeDriver) -> None:
    address, spare = filled(device), device.create(2)
    before = state(device, driver)
    with capturing():
        for run in OPERATIONS.values():
            with pytest.raises(DeviceError, match="inside a graph capture"):
                run(device, address, spare)
        with pytest.raises(DeviceError, match="inside a graph capture"):
            CudaDevice(driver=driver)
        with pytest.raises(DeviceError, match="inside a graph capture"):
            device.close()
        device.fill(address, 16, 0)
    assert state(device, driver) == before
    device.unmap(address, 4)


def test_a_capture_and_a_change_of_the_map_wait_for_each_other() -> None:
    gate, order, inside = Exclusion(), [], threading.Event()

    def capture() -> None:
        with gate.capturing():
            inside.set()
            order.append("capture")

    thread = threading.Thread(target=capture)
    with gate.remapping("mapping"):
        thread.start()
        assert not inside.wait(0.05)
        with gate.remapping("mapping"):
            order.append("map")
    thread.join()
    assert order == ["map", "capture"]


# Moves


@given(
    nbytes=st.integers(0, 300),
    distance=st.integers(-300, 300),
    scratch_bytes=st.integers(1, 100),
)
def test_pieces_move_as_memmove_does(nbytes: int, distance: int, scratch_bytes: int) -> None:
    memory = bytearray(i % 251 for i in range(1200))
    source, target, scratch = 400, 400 + distance, 1000
    expected = memory[source : source + nbytes]
    for to, start, length in pieces(target, source, nbytes, scratch, scratch_bytes):
        assert length > 0
        assert abs(to - start) >= length
        assert start == scratch or source <= start < source + nbytes
        assert length <= scratch_bytes or scratch not in (to, start)
        memory[to : to + length] = memory[start : start + length]
    assert memory[target : target + nbytes] == expected


def test_a_close_overlap_takes_few_copies() -> None:
    copies = list(pieces(1, 0, 64 << 20, 1 << 40, 2 << 20))
    assert len(copies) == 64
