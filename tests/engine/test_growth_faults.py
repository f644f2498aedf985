"""A failure at any device call of a growth ends with one clear error, and memory as it was before."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.config import PolicyConfig
from engine.device.host import HostDevice
from engine.engine import Engine
from engine.errors import DeviceError, EbbError
from engine.memory.ledger import KV
from engine.weights.policies import DYNAMIC
from tests.engine.test_tokens import GROWING_LIMIT, growing
from tests.tiny_model import Tiny

CALLS = ("map", "unmap", "create", "fill")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny().write(tmp_path_factory.mktemp("model") / "tiny.gguf")


class FailingDevice:
    """The real device, except that one call fails once: the ``at``-th call of ``method`` after :meth:`arm`."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.calls = dict.fromkeys(CALLS, 0)
        self._method, self._at = "", -1

    def arm(self, method: str, at: int) -> None:
        self.calls = dict.fromkeys(CALLS, 0)
        self._method, self._at = method, at

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._device, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            if name == self._method and self.calls[name] == self._at:
                self._method = ""
                raise DeviceError(f"planted: {name} call {self._at}")
            return real(*arguments)

        return call


def state(engine: Engine) -> dict[str, Any]:
    return {
        "holders": {h.name: dataclasses.astuple(h)[:3] for h in engine.ledger.holders.values()},
        "capacity": engine.kv.capacity,
        "resident": engine.device.resident_bytes(),
        "live": engine.device.counters.live_granules,
        "fills": [engine.residency.fills(unit) for unit in engine.units],
    }


@pytest.mark.parametrize("residency", ["hotset", "stable_resident", *DYNAMIC])
def test_a_failed_growth_leaves_everything_as_it_was(model: Path, residency: str) -> None:
    config = growing(model, GROWING_LIMIT, policy=PolicyConfig(lending=True, residency=residency))
    with Engine(config) as engine:
        device = FailingDevice(engine.device)
        inner = [getattr(engine.residency, name, None) for name in ("_table", "_staging")]
        for part in (engine, engine.kv, engine.residency, engine.pool, *inner):
            for name in ("device", "_device"):
                if hasattr(part, name):
                    setattr(part, name, device)
        before = state(engine)
        contents = weights(engine)
        device.arm("none", -1)
        assert engine.kv.ensure(1024, [5, 2]) is not None
        assert engine.ledger.holders[KV].committed > before["holders"][KV][2]
        made = dict(device.calls)
        assert made["map"] >= 8
        engine.loop._return_kv(engine.loop.window)
        assert state(engine)["holders"] == before["holders"]
        failures = 0
        for method in CALLS:
            for at in range(1, made[method] + 1):
                before = state(engine)
                device.arm(method, at)
                with pytest.raises(EbbError, match="planted"):
                    engine.kv.ensure(1024, [5, 2])
                device.arm("none", -1)
                engine.pool.trim()
                assert state(engine) == before, (method, at)
                failures += 1
        assert failures > 20
        assert weights(engine) == contents
        assert engine.ledger.clean()
        list(engine.run())


def weights(engine: Engine) -> list[bytes]:
    """Every resident weight byte, read from the device."""
    found = []
    for unit in engine.units:
        cold = {(fill.address, fill.nbytes) for fill in engine.residency.fills(unit)}
        for part in unit.slices:
            address = engine.residency.address(unit, part.role)
            if not any(start < address + part.nbytes and address < start + count for start, count in cold):
                found.append(engine.device.read(address, part.nbytes))
    return found


@pytest.mark.parametrize("method", ["map", "create"])
def test_a_load_that_breaks_off_says_why_and_frees_everything(
    model: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    config = growing(model, GROWING_LIMIT, policy=PolicyConfig(lending=True))
    real, calls = getattr(HostDevice, method), []
    opened: list[HostDevice] = []

    def failing(self: HostDevice, *arguments: Any) -> Any:
        calls.append(arguments)
        opened[:] = [self]
        if len(calls) == (14 if method == "map" else 4):
            raise DeviceError(f"planted: {method}")
        return real(self, *arguments)

    monkeypatch.setattr(HostDevice, method, failing)
    with pytest.raises(DeviceError, match=f"planted: {method}"):
        Engine(config)
    assert opened[0].counters.live_granules == 0
