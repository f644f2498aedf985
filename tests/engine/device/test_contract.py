"""The host device does what every device must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.device.host import HostDevice
from tests.engine.device.contract import DeviceContract


class TestHost(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[HostDevice]:
        device = HostDevice(65536, 32 * 65536)
        yield device
        device.close()
