"""What every device must do, whatever its memory is made of. Each device's tests inherit these cases."""

from __future__ import annotations

import ctypes
import random

import pytest

from engine.device.protocol import Device, Stream


class DeviceContract:
    """Inherit, and define the fixture ``device``: a fresh device, closed afterwards, with room for 32 granules."""

    def test_an_alias_shows_the_same_bytes_at_two_addresses(self, device: Device) -> None:
        size = device.granularity
        granules = device.create(2)
        one, other = device.reserve(2 * size), device.reserve(2 * size)
        device.map(one, granules)
        device.map(other, granules[::-1])
        device.write(one, b"first")
        device.write(other, b"second")
        assert device.read(other + size, 5) == b"first"
        assert device.read(one + size, 6) == b"second"
        assert device.counters.live_granules == 2

    def test_one_granule_can_stand_behind_many_addresses(self, device: Device) -> None:
        granules = device.create(1)
        addresses = [device.reserve(device.granularity) for _ in range(16)]
        for address in addresses:
            device.map(address, granules)
        device.write(addresses[7], b"seen by all")
        assert {device.read(address, 11) for address in addresses} == {b"seen by all"}

    def test_addresses_survive_other_memory_behind_them(self, device: Device) -> None:
        address, elsewhere = device.reserve(device.granularity), device.reserve(device.granularity)
        first, second = device.create(2)
        device.map(address, [first])
        device.write(address, b"first")
        device.unmap(address, 1)
        device.map(address, [second])
        device.write(address, b"other")
        device.map(elsewhere, [first])
        assert device.read(elsewhere, 5) == b"first"
        device.unmap(address, 1)
        device.unmap(elsewhere, 1)
        device.map(address, [first])
        assert device.read(address, 5) == b"first"

    def test_a_range_mapped_in_parts_is_unmapped_at_once(self, device: Device) -> None:
        size, address = device.granularity, device.reserve(6 * device.granularity)
        granules = device.create(6)
        device.map(address, granules[:1])
        device.map(address + size, granules[3:])
        device.map(address + 4 * size, granules[1:3])
        device.unmap(address, 6)
        device.map(address, granules)
        device.fill(address, 6 * size, 3)
        assert device.read(address + 5 * size, 4) == b"\3\3\3\3"

    def test_a_part_of_a_mapped_range_can_be_unmapped(self, device: Device) -> None:
        size, address = device.granularity, device.reserve(6 * device.granularity)
        granules, spare = device.create(6), device.create(2)
        device.map(address, granules)
        for index in range(6):
            device.write(address + index * size, bytes([index]))
        device.unmap(address + 2 * size, 2)
        device.map(address + 2 * size, spare)
        device.write(address + 2 * size, b"\x0a")
        device.write(address + 3 * size, b"\x0b")
        assert [device.read(address + i * size, 1)[0] for i in range(6)] == [0, 1, 10, 11, 4, 5]

    def test_copies_are_counted(self, device: Device) -> None:
        address = device.reserve(device.granularity)
        device.map(address, device.create(1))
        held = ctypes.create_string_buffer(b"x" * 100, 100)
        device.copy_in(address, ctypes.addressof(held), 100)
        device.copy_in(address + 100, ctypes.addressof(held), 50)
        device.synchronize()
        assert device.read(address, 150) == b"x" * 150
        assert (device.counters.htod_bytes, device.counters.htod_calls) == (150, 2)

    def test_what_goes_in_by_write_is_not_counted_as_copied(self, device: Device) -> None:
        address = device.reserve(device.granularity)
        device.map(address, device.create(1))
        device.write(address, b"ids")
        assert (device.counters.htod_bytes, device.counters.htod_calls) == (0, 0)

    def test_a_fill_reaches_its_range_and_no_further(self, device: Device) -> None:
        address = device.reserve(device.granularity)
        device.map(address, device.create(1))
        device.fill(address, 300, 1)
        device.fill(address + 100, 100, 255)
        assert device.read(address, 300) == b"\1" * 100 + b"\xff" * 100 + b"\1" * 100

    @pytest.mark.parametrize("distance", [1, 100, 4096, 100_000])
    @pytest.mark.parametrize("up", [True, False])
    def test_moves_between_overlapping_ranges_lose_nothing(self, device: Device, distance: int, up: bool) -> None:
        nbytes = min(3 * device.granularity - 100_000, 5 << 20)
        address = device.reserve(3 * device.granularity)
        device.map(address, device.create(3))
        data = random.Random(distance).randbytes(nbytes)
        source, target = (address, address + distance) if up else (address + distance, address)
        device.write(source, data)
        device.move(target, source, nbytes)
        assert device.read(target, nbytes) == data
        assert device.counters.moved_bytes == nbytes

    def test_events_order_the_two_streams(self, device: Device) -> None:
        address = device.reserve(2 * device.granularity)
        device.map(address, device.create(2))
        held = ctypes.create_string_buffer(random.Random(1).randbytes(device.granularity), device.granularity)
        filled, ran = device.event(), device.event()
        for _ in range(20):
            device.wait(ran, Stream.COPY)
            device.copy_in(address, ctypes.addressof(held), device.granularity)
            device.record(filled, Stream.COPY)
            device.wait(filled, Stream.COMPUTE)
            device.move(address + device.granularity, address, device.granularity)
            device.fill(address, device.granularity, 0)
            device.record(ran, Stream.COMPUTE)
        assert device.read(address + device.granularity, device.granularity) == held.raw
        assert device.read(address, 16) == bytes(16)

    def test_nothing_is_a_fine_amount(self, device: Device) -> None:
        address = device.reserve(device.granularity)
        device.map(address, device.create(1))
        assert device.create(0) == []
        device.map(address, [])
        device.release([])
        device.fill(address, 0, 1)
        device.write(address, b"")
        device.move(address, address, 100)
        device.copy_in(address, 0, 0)
        assert device.read(address, 0) == b""

    def test_sizes_are_rounded_up_to_granules(self, device: Device) -> None:
        address = device.reserve(device.granularity + 1)
        device.map(address, device.create(2))
        device.write(address + 2 * device.granularity - 1, b"z")
        device.unmap(address, 2)
        device.unreserve(address, device.granularity + 1)

    def test_a_device_closes_with_everything_still_in_use(self, device: Device) -> None:
        address = device.reserve(4 * device.granularity)
        device.map(address, device.create(4))
        device.record(device.event(), Stream.COMPUTE)
        device.close()
        device.close()
