"""The ledger machine: the published table to the byte, and the same counters as a machine that moves bytes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import engine.engine
from engine.config import DeviceConfig, EngineConfig, ModelConfig, PolicyConfig, WorkloadConfig
from engine.device.ledger import LedgerDevice
from engine.engine import Engine
from engine.errors import DeviceError, InvalidRequest, ModelError
from engine.machine.host import HostMachine
from engine.machine.ledger import NoCompute, TableStore
from engine.model.shape import read_shape, tensor_table
from engine.model.shape_name import shape_names
from tests.engine.test_tokens import GROWING_LIMIT, configure, growing
from tests.tiny_model import Tiny

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "golden.json").read_text())
LIMIT = GOLDEN["budget"]["managed_limit"]


def predict(policy: PolicyConfig, shape: str = "qwen14b_shape", limit: int | None = LIMIT) -> dict[str, Any]:
    config = EngineConfig(
        model=ModelConfig(f"shape:{shape}"),
        workload=WorkloadConfig(("The capital of France is",), tokens=16),
        device=DeviceConfig("ledger", limit, 2 << 20),
        policy=policy,
    )
    with Engine(config) as engine:
        list(engine.run())
        assert engine.ledger.clean()
        assert engine.loop.window.accounting(engine.weight_bytes)["ok"]
        return engine.loop.window.report(engine.plan.budget.bytes, engine.residency.mapped_physical)


def test_the_published_table_comes_out_to_the_byte() -> None:
    table = tensor_table(read_shape("shape:qwen14b_shape"))
    assert len(table) == GOLDEN["model"]["keys"]
    assert sum(table.values()) == GOLDEN["model"]["weight_bytes"]
    assert table["lm_head.weight"] == GOLDEN["model"]["lm_head_packed_bytes"]


@pytest.mark.parametrize(
    ("policy", "most_per_token"),
    [
        (PolicyConfig(), 1.9e9),
        (PolicyConfig(lending=True, headroom_bytes=512 << 20), 0.85e9),
        (PolicyConfig(lending=True), 0.4e9),
    ],
    ids=["baseline", "elastic 512MiB", "elastic 0"],
)
def test_the_published_experiment_stays_near_its_floor(policy: PolicyConfig, most_per_token: float) -> None:
    started = time.perf_counter()
    counters = predict(policy)
    assert 1 <= counters["floor_ratio"] <= 1.05
    assert counters["htod_bytes_per_token"] <= most_per_token
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_can_be_planned_at_any_scale(name: str) -> None:
    shape = read_shape(f"shape:{name}")
    total = sum(tensor_table(shape).values())
    kv = shape.spec.kv_bytes_per_token(2) * 8192
    counters = predict(PolicyConfig(lending=True), name, total // 2 + kv)
    assert 1 <= counters["floor_ratio"] <= 1.08
    assert shape.source


class CountedHost(HostMachine):
    """The host machine's model and workspace on a device that only counts."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.device.close()
        self.device = LedgerDevice(config.device.granule_bytes, self._capacity())
        self.store = TableStore(self.units)

    def load(self) -> None:
        pass

    def compute(self, *_: Any) -> NoCompute:
        return NoCompute(len(self.prompts))


def counters_of(config: EngineConfig) -> dict[str, Any]:
    with Engine(config) as engine:
        list(engine.run())
        found = engine.loop.window.report(engine.plan.budget.bytes, engine.residency.mapped_physical)
        found["ledger"] = engine.ledger.snapshot()
        found["growth"] = [(e.growth.need_bytes, e.growth.reclaimed_from_weights) for e in engine.loop.growths]
        del found["rebinds"]
        return found


@pytest.mark.parametrize("residency", ["hotset", "stable_resident"])
@pytest.mark.parametrize("grows", [False, True])
def test_ledger_and_host_count_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, residency: Any, grows: bool
) -> None:
    model = Tiny().write(tmp_path / "tiny.gguf")
    policy = PolicyConfig(lending=True, residency=residency)
    if grows:
        config = growing(model, GROWING_LIMIT, policy=policy)
    else:
        config = configure(model, 5_800_000, policy=PolicyConfig(residency=residency))
    on_host = counters_of(config)
    monkeypatch.setattr(engine.engine, "open_machine", CountedHost)
    assert counters_of(config) == on_host
    assert on_host["htod_bytes"] > 0


def test_what_cannot_be_predicted_is_refused(tmp_path: Path) -> None:
    real = Tiny().write(tmp_path / "tiny.gguf")
    base = configure(real, 5_800_000)
    with pytest.raises(InvalidRequest, match="runs on a model's shape"):
        Engine(EngineConfig(base.model, base.workload, DeviceConfig("ledger")))
    with pytest.raises(InvalidRequest, match="device=ledger"):
        Engine(EngineConfig(ModelConfig("shape:qwen14b_shape"), base.workload, DeviceConfig("host")))
    with pytest.raises(ModelError, match="no shape is called"):
        Engine(EngineConfig(ModelConfig("shape:none"), base.workload, DeviceConfig("ledger")))


def test_the_ledger_device_refuses_what_a_real_one_would() -> None:
    device = LedgerDevice(4096, 10 * 4096)
    address = device.reserve(4 * 4096)
    granules = device.create(4)
    device.map(address, granules)
    with pytest.raises(DeviceError, match="mapped already"):
        device.map(address, granules[:1])
    device.unmap(address, 2)
    with pytest.raises(DeviceError, match="not mapped"):
        device.unmap(address, 1)
    with pytest.raises(DeviceError, match="at most"):
        device.create(7)
    assert device.resident_bytes() == 4 * 4096
