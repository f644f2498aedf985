"""Everything of the CUDA machine but the GPU: its forward pass, results and made-up weights, on host memory."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.machine.cuda as cuda
import engine.model.shape_name as shape_name
from engine.config import DeviceConfig, EngineConfig, ModelConfig, PolicyConfig, WorkloadConfig
from engine.decode.recordings import Step
from engine.device.host import HostDevice
from engine.device.pinning import Pinning
from engine.engine import Engine
from engine.errors import InvalidLogits, InvalidRequest
from engine.machine.cuda_kernels import Target
from engine.machine.generated import GeneratedStore, made_up_prompt
from engine.model.shape import read_shape, shape_units

KIB = 1024
LONG = 65
"""Repeats that make prompts end just below a bucket's end."""
SMALL = {
    "source": "made up for tests", "layers": 4, "hidden": 256, "inner": 512, "heads": 4, "kv_heads": 2, "head_dim": 64,
    "vocab": 1024, "context": 1024, "bits": 4, "block": 32, "biases": ["attn_k", "attn_v"],
}  # fmt: skip


class HostStandIn(HostDevice):
    """Host memory with the few calls that only a GPU has."""

    compute_stream = 0

    def __init__(self, granularity: int) -> None:
        super().__init__(granularity, 64 << 20)

    def pin(self, address: int, nbytes: int) -> Pinning:
        return Pinning(address)

    def read_later(self, target: int, address: int, nbytes: int) -> None:
        ctypes.memmove(target, address, nbytes)

    def wait_for(self, event: Any) -> None:
        pass


class Repeating:
    """Records a step by keeping its calls and replays it by making them again, so that copies count."""

    def __init__(self, device: HostStandIn) -> None:
        pass

    def record(self, enqueue: Any) -> Any:
        return enqueue

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    monkeypatch.setattr(shape_name, "SHAPES", tmp_path)
    monkeypatch.setattr(cuda, "CudaDevice", HostStandIn)
    monkeypatch.setattr(cuda, "CudaRecorder", Repeating)
    monkeypatch.setattr(cuda, "Target", lambda stream: Target("CPUExecutionProvider", "cpu", None))
    yield


def configure(limit: int | None, long: int = 0, lending: bool = True, **policy: Any) -> EngineConfig:
    prompts = tuple(f"row {n}: {'water boils at ' * (n + 1 + long)}" for n in range(2))
    return EngineConfig(
        model=ModelConfig("shape:small"),
        workload=WorkloadConfig(prompts, tokens=12),
        device=DeviceConfig("cuda", limit, 4 * KIB),
        policy=PolicyConfig(lending=lending, **policy),
        max_context=1024,
        prefill_chunk=64,
        measured=1,
    )


def run(config: EngineConfig) -> tuple[list[list[int]], list[list[str]], Engine]:
    with Engine(config) as engine:
        generations = list(engine.run())
        assert all(g.tokens == generations[0].tokens for g in generations)
        assert engine.loop.window.accounting(engine.weight_bytes)["ok"]
    return generations[-1].tokens, generations[-1].digests, engine


def half_of(whole: Engine) -> int:
    """A limit that leaves weights about half of what they take, with KV at its full length."""
    return whole.plan.workspace_charge + whole.plan.kv_full + whole.weight_bytes // 2


def test_arms_agree_and_tokens_vary() -> None:
    tokens, digests, whole = run(configure(None))
    limit = half_of(whole)
    for policy in ({}, {"residency": "stable_resident"}):
        again, marks, engine = run(configure(limit, lending=False, **policy))
        assert engine.loop.window.decode.htod_bytes > 0
        assert (again, marks) == (tokens, digests)
    assert all(len(set(row)) > 4 for row in tokens)
    assert [len(row) for row in tokens] == [12, 12]


def test_results_lag_and_every_step_counts() -> None:
    _, _, engine = run(configure(None))
    window = engine.loop.window
    assert (window.decode_steps, window.emitted_tokens) == (11, 22)
    assert engine.capture_record()["captures"] == 1
    assert window.replays == 11


def test_growth_keeps_tokens_and_records_anew() -> None:
    tokens, digests, whole = run(configure(None, long=LONG))
    grown, marks, engine = run(configure(half_of(whole), long=LONG))
    assert (grown, marks) == (tokens, digests)
    window = engine.loop.window
    assert window.growth_events == window.invalidations == 1
    assert window.replays == window.decode_steps - window.captures


def test_a_moving_policy_declines_recording() -> None:
    _, _, whole = run(configure(None))
    _, _, engine = run(configure(half_of(whole), lending=False, residency="lru"))
    window = engine.loop.window
    assert (window.replays, window.fallbacks) == (0, window.decode_steps)
    assert "lru" in engine.capture_record()["reasons"][0]


def test_weights_are_the_same_whatever_the_threads() -> None:
    shape = read_shape("shape:small")
    made = []
    for threads in (1, 3):
        store = GeneratedStore(shape, shape_units(shape))
        store.load(threads)
        made.append(ctypes.string_at(store.base, store._table))
    assert made[0] == made[1]
    assert len(set(made[0][i : i + 64] for i in range(0, 64000, 64))) > 900


def test_logits_that_are_no_numbers_are_found() -> None:
    with Engine(configure(None)) as engine:
        head = next(unit for unit in engine.units if unit.kind == "head")
        bad = np.full(32, np.nan, np.float16).tobytes()
        engine.device.write(engine.residency.address(head, "head.scales"), bad)
        with pytest.raises(InvalidLogits):
            list(engine.run())


@pytest.mark.parametrize("workload", [{"template": "model"}, {"ignore_eos": False}])
def test_what_a_shape_cannot_do_is_refused(workload: dict[str, Any]) -> None:
    config = EngineConfig(ModelConfig("shape:small"), WorkloadConfig(("a",), **workload), DeviceConfig("cuda"))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        Engine(config)


def test_prompts_are_as_long_as_the_ledger_counts_them() -> None:
    assert len(made_up_prompt("The capital of France is", 1000)) == 6
    assert len(made_up_prompt("", 1000)) == 1


def test_steps_have_names() -> None:
    assert {step.value for step in Step} == {"eager", "recorded", "replayed", "fell back"}
