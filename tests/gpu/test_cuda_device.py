"""The CUDA device on a real GPU: all that every device must do, and what only real memory can show.

Tests named ``refused`` make the driver fail on purpose. A memory checker counts that as an error, so leave them out:
``compute-sanitizer --tool memcheck python -m pytest tests/gpu -k "not refused"``.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest

from engine.device.cuda import CudaDevice
from engine.device.cuda_driver import check
from engine.device.exclusion import capturing
from engine.device.protocol import Device, Stream
from engine.errors import DeviceError, InvalidRequest
from tests.engine.device.contract import DeviceContract


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[CudaDevice]:
    """A device that stays open, so that opening another one does not start the GPU's context anew each time."""
    device = CudaDevice()
    yield device
    device.close()


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


class TestCuda(DeviceContract):
    """The contract with the driver's own granule."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = CudaDevice()
        yield device
        device.close()


class TestCudaWithLargeGranules(DeviceContract):
    """The contract with granules of 16 units."""

    @pytest.fixture
    def device(self, context: CudaDevice) -> Iterator[Device]:
        device = CudaDevice(16 * context.granularity)
        yield device
        device.close()


# Memory that comes back


def test_a_thousand_lend_and_return_cycles_end_where_they_began(device: CudaDevice) -> None:
    """Granules go from one range to another and back, as between weights and KV; then they are made and freed."""
    size, count = device.granularity, 8
    weights, cache = device.reserve(count * size), device.reserve(count * size)
    lent = device.create(count)
    device.map(weights, lent)
    # The first cycle may leave behind what the driver keeps for good, page tables among it.
    free = 0
    for cycle in range(1001):
        device.unmap(weights + size, count - 1)
        device.map(cache, lent[1:])
        device.fill(cache, (count - 1) * size, cycle % 256)
        device.unmap(cache, count - 1)
        device.map(weights + size, lent[1:])
        fresh = device.create(2)
        device.map(cache, fresh)
        device.unmap(cache, 2)
        device.release(fresh)
        if cycle == 0:
            device.synchronize()
            free = device.free_bytes()
    assert device.read(weights + size, 1) == bytes([1000 % 256])
    assert device.free_bytes() == free
    assert device.counters.live_granules == count


def test_closing_gives_everything_back(context: CudaDevice) -> None:
    CudaDevice().close()
    free = context.free_bytes()
    device = CudaDevice()
    address = device.reserve(40 * device.granularity)
    granules = device.create(32)
    device.map(address, granules)
    device.map(address + 32 * device.granularity, granules[:8])
    device.fill(address, 40 * device.granularity, 1)
    assert context.free_bytes() < free
    device.close()
    assert context.free_bytes() == free


def test_what_is_resident_follows_what_is_created(device: CudaDevice) -> None:
    granules = device.create(64)
    assert abs(device.resident_bytes() - 64 * device.granularity) <= device.granularity
    device.release(granules)
    assert device.resident_bytes() <= device.granularity


def test_more_than_the_gpu_has_is_refused_and_creates_nothing(context: CudaDevice) -> None:
    device = CudaDevice(1 << 44)
    free = context.free_bytes()
    with pytest.raises(DeviceError, match=r"creating .* failed: cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        device.create(2)
    assert context.free_bytes() == free
    assert device.counters.live_granules == 0
    device.close()


def test_mapping_over_mapped_addresses_is_refused_and_undone(device: CudaDevice) -> None:
    size, address = device.granularity, device.reserve(4 * device.granularity)
    granules = device.create(4)
    device.map(address + 2 * size, granules[:1])
    device.write(address + 2 * size, b"here")
    with pytest.raises(DeviceError, match="cuMemMap failed"):
        device.map(address, granules[1:])
    assert device.read(address + 2 * size, 4) == b"here"
    device.map(address, granules[2:])
    device.map(address + 3 * size, granules[1:2])
    device.unmap(address, 4)
    device.release(granules)


def test_mapping_outside_a_reservation_is_refused(device: CudaDevice) -> None:
    address = device.reserve(device.granularity)
    device.unreserve(address, device.granularity)
    with pytest.raises(DeviceError, match="cuMemMap failed"):
        device.map(address, device.create(1))


def test_a_granule_is_a_multiple_of_the_drivers_unit(context: CudaDevice) -> None:
    with pytest.raises(InvalidRequest, match="the driver's unit"):
        CudaDevice(context.granularity + 4096)


# Host memory


def test_pinned_memory_is_copied_from_and_read_in_place(device: CudaDevice) -> None:
    nbytes = 4 * device.granularity
    data = random.Random(5).randbytes(nbytes)
    host = ctypes.create_string_buffer(data, nbytes)
    made = device.pin(ctypes.addressof(host), nbytes)
    assert made.pinned, made.reason
    assert made.device_address is not None
    address = device.reserve(2 * nbytes)
    device.map(address, device.create(8))
    device.copy_in(address, ctypes.addressof(host), nbytes)
    device.move(address + nbytes, made.device_address, nbytes)
    device.synchronize()
    assert device.read(address, nbytes) == data
    assert device.read(address + nbytes, nbytes) == data
    device.unpin(ctypes.addressof(host))
    assert device.pin(ctypes.addressof(host), nbytes).pinned


def test_pinning_twice_is_refused_with_a_reason(device: CudaDevice) -> None:
    host = ctypes.create_string_buffer(1 << 20)
    assert device.pin(ctypes.addressof(host), 1 << 20).pinned
    twice = device.pin(ctypes.addressof(host), 1 << 20)
    assert twice.reason.startswith("pinning 1,048,576 B of host memory: cuMemHostRegister failed")


# Work in flight


def test_memory_is_not_taken_from_under_a_copy(device: CudaDevice) -> None:
    """The copies take milliseconds; unmapping right after them must wait, or they would run into nothing."""
    count, size = 32, device.granularity
    nbytes = count * size
    host = ctypes.create_string_buffer(random.Random(8).randbytes(nbytes), nbytes)
    assert device.pin(ctypes.addressof(host), nbytes).pinned
    address, elsewhere = device.reserve(nbytes), device.reserve(nbytes)
    granules = device.create(count)
    device.map(address, granules)
    for _ in range(8):
        device.copy_in(address, ctypes.addressof(host), nbytes)
    device.unmap(address, count)
    device.map(elsewhere, granules)
    assert device.read(elsewhere, nbytes) == host.raw


def test_bytes_that_were_written_need_not_be_kept(device: CudaDevice) -> None:
    """The stream is busy, so the bytes are long gone from where they were when their turn comes."""
    count, size = 64, device.granularity
    address = device.reserve(count * size)
    device.map(address, device.create(count))
    parts = [(at * size, random.Random(at).randrange(1, size)) for at in range(8)]
    for _ in range(200):
        device.fill(address, count * size, 0)
    for at, nbytes in parts:
        device.write(address + at, random.Random(nbytes).randbytes(nbytes))
    for at, nbytes in parts:
        assert device.read(address + at, nbytes) == random.Random(nbytes).randbytes(nbytes)


# Threads and graphs


def test_another_thread_can_use_the_device(device: CudaDevice) -> None:
    address = device.reserve(device.granularity)
    device.map(address, device.create(1))
    seen: list[bytes] = []

    def use() -> None:
        device.make_current()
        device.write(address, b"from a thread")
        seen.append(device.read(address, 13))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [b"from a thread"]


def test_a_captured_graph_follows_the_addresses_to_other_memory(device: CudaDevice) -> None:
    """Copy, wait and move in one graph; replayed after the memory behind its addresses has been exchanged."""
    from cuda.bindings import driver

    size = device.granularity
    address = device.reserve(2 * size)
    first, second = device.create(2), device.create(2)
    device.map(address, first)
    host = ctypes.create_string_buffer(random.Random(6).randbytes(size), size)
    assert device.pin(ctypes.addressof(host), size).pinned
    fork, filled = device.event(), device.event()
    with capturing():
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(driver.cuStreamBeginCapture, device.compute_stream, mode)
        device.record(fork, Stream.COMPUTE)
        device.wait(fork, Stream.COPY)
        device.copy_in(address, ctypes.addressof(host), size)
        device.record(filled, Stream.COPY)
        device.wait(filled, Stream.COMPUTE)
        device.move(address + size, address, size)
        graph = check(driver.cuStreamEndCapture, device.compute_stream)
    ready = check(driver.cuGraphInstantiate, graph, 0)
    check(driver.cuGraphLaunch, ready, device.compute_stream)
    assert device.read(address + size, size) == host.raw
    device.unmap(address, 2)
    device.map(address, second)
    device.fill(address, 2 * size, 0)
    ctypes.memmove(host, random.Random(7).randbytes(size), size)
    check(driver.cuGraphLaunch, ready, device.compute_stream)
    assert device.read(address + size, size) == host.raw
    check(driver.cuGraphExecDestroy, ready)
    check(driver.cuGraphDestroy, graph)
