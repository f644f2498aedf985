"""The host device: what is created is resident, what is released is not, one granule can stand at many addresses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from engine.device.host import HostDevice
from engine.errors import DeviceError, InvalidRequest

GRANULE = 65536


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice(GRANULE, 64 * GRANULE)
    yield device
    device.close()


def test_created_granules_are_resident_and_released_ones_are_gone(device: HostDevice) -> None:
    granules = device.create(10)
    assert device.resident_bytes() == 10 * GRANULE
    device.release(granules[3:7])
    assert device.resident_bytes() == 6 * GRANULE
    assert device.counters.live_granules == 6


def test_an_alias_shows_the_same_bytes_at_two_addresses(device: HostDevice) -> None:
    granules = device.create(2)
    one, other = device.reserve(2 * GRANULE), device.reserve(2 * GRANULE)
    device.map(one, granules)
    device.map(other, granules[::-1])
    device.write(one, b"first")
    assert device.read(other + GRANULE, 5) == b"first"
    assert device.resident_bytes() == 2 * GRANULE


def test_addresses_survive_unmapping_and_new_memory_behind_them(device: HostDevice) -> None:
    address = device.reserve(GRANULE)
    first, second = device.create(2)
    device.map(address, [first])
    device.write(address, b"old")
    device.unmap(address, 1)
    device.map(address, [second])
    assert device.read(address, 3) == b"\0\0\0"


def test_releasing_after_unmapping_really_frees(device: HostDevice) -> None:
    address = device.reserve(4 * GRANULE)
    granules = device.create(4)
    device.map(address, granules)
    device.fill(address, 4 * GRANULE, 7)
    device.unmap(address, 4)
    device.release(granules)
    assert device.resident_bytes() == 0


def test_a_released_granule_comes_back_empty(device: HostDevice) -> None:
    address = device.reserve(GRANULE)
    granules = device.create(1)
    device.map(address, granules)
    device.fill(address, GRANULE, 7)
    device.unmap(address, 1)
    device.release(granules)
    device.map(address, device.create(1))
    assert device.read(address, GRANULE) == bytes(GRANULE)


def test_creating_beyond_the_capacity_creates_nothing(device: HostDevice) -> None:
    device.create(60)
    with pytest.raises(DeviceError, match="at most"):
        device.create(5)
    assert device.counters.live_granules == 60
    assert device.resident_bytes() == 60 * GRANULE
    assert len(device.create(4)) == 4


def test_too_many_mappings_are_refused_before_the_kernel_does(device: HostDevice) -> None:
    device._max_mappings = 3
    granules = device.create(8)
    address = device.reserve(8 * GRANULE)
    with pytest.raises(DeviceError, match="max_map_count"):
        device.map(address, granules[::2])  # four runs: none is next to another
    device.map(address, granules[:8])


def test_copies_are_counted(device: HostDevice) -> None:
    address = device.reserve(GRANULE)
    device.map(address, device.create(1))
    source = b"x" * 100
    import ctypes

    held = ctypes.create_string_buffer(source, 100)
    device.copy_in(address, ctypes.addressof(held), 100)
    assert device.read(address, 100) == source
    assert (device.counters.htod_bytes, device.counters.htod_calls) == (100, 1)


@pytest.mark.parametrize("granule", [0, -4096, 1000])
def test_a_granule_is_a_multiple_of_the_page_size(granule: int) -> None:
    with pytest.raises(InvalidRequest, match="page size"):
        HostDevice(granule, GRANULE)


def test_residency_can_be_read_from_outside(device: HostDevice) -> None:
    device.create(5)
    links = {os.readlink(f"/proc/self/fd/{fd}"): fd for fd in os.listdir("/proc/self/fd") if _is_link(fd)}
    memfd = next(fd for link, fd in links.items() if "ebb-device" in link)
    assert os.stat(f"/proc/self/fd/{memfd}").st_blocks * 512 == 5 * GRANULE


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")
