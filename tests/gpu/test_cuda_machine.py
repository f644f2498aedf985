"""The engine on a real GPU, on a small made-up model: tokens across arms, recorded steps, growth, planted faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import engine.model.shape_name as shape_name
from engine.config import DeviceConfig, EngineConfig, ModelConfig, PolicyConfig, WorkloadConfig
from engine.decode.loop import Generation
from engine.engine import Engine
from engine.errors import InvalidLogits
from engine.faults import Faults

MIB = 1 << 20
SMALL = {
    "source": "made up for tests", "layers": 8, "hidden": 1024, "inner": 2816, "heads": 8, "kv_heads": 8,
    "head_dim": 128, "vocab": 16384, "context": 4096, "bits": 4, "block": 32, "biases": ["attn_k", "attn_v"],
}  # fmt: skip
PROMPTS = ("The harbour town lies where a slow brown river meets the sea.", "Water boils at")


@pytest.fixture(autouse=True, scope="module")
def small_shape(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "small.json").write_text(json.dumps(SMALL))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape_name, "SHAPES", folder)
        yield


def configure(
    limit: int | None, policy: PolicyConfig, prompts: tuple[str, ...] = PROMPTS, tokens: int = 16, **more: Any
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("shape:small"),
        workload=WorkloadConfig(prompts, tokens=tokens),
        device=DeviceConfig("cuda", limit, 2 * MIB, capture=more.pop("capture", True)),
        policy=policy,
        max_context=more.pop("max_context", 2048),
        prefill_chunk=more.pop("prefill_chunk", 8),
        warmup=1,
        measured=more.pop("measured", 2),
    )


def run(config: EngineConfig, faults: Faults | None = None) -> tuple[Generation, Engine]:
    with Engine(config, faults) as engine:
        generations = list(engine.run())
        assert all(made.tokens == generations[0].tokens for made in generations)
        assert engine.loop.window.accounting(engine.weight_bytes)["ok"]
    ledger = engine.ledger.snapshot()
    assert ledger["oversubscribed_bytes"] == ledger["unaccounted_committed_bytes"] == 0
    return generations[-1], engine


def tight(config: EngineConfig, share: float = 0.8) -> int:
    """A limit that leaves weights about ``share`` of what they take once KV is at its full length."""
    with Engine(config) as engine:
        plan = engine.plan
        return plan.workspace_charge + plan.kv_full + int(share * engine.weight_bytes)


def assert_replayed(engine: Engine) -> None:
    window, whole = engine.loop.window, engine.capture_record()
    assert whole["captures"] > 0, whole
    assert window.fallbacks == 0, whole
    assert window.replays == window.decode_steps - window.captures
    assert window.invalidations == window.growth_events


def test_every_arm_gives_the_tokens_of_the_plain_loop() -> None:
    from engine.machine.cuda_reference import CudaPlainLoop

    resident = configure(None, PolicyConfig())
    with closing(CudaPlainLoop(resident)) as loop:
        expected = loop.generate()
    assert all(len(set(row)) > 6 for row in expected.tokens)
    limit = tight(resident)
    arms = {
        "resident": (None, PolicyConfig()),
        "baseline": (limit, PolicyConfig()),
        "elastic": (limit, PolicyConfig(lending=True)),
        "elastic with headroom": (limit, PolicyConfig(lending=True, headroom_bytes=8 * MIB)),
        "three slots": (limit, PolicyConfig(ring_slots=3)),
        "whole tensors": (limit, PolicyConfig(residency="stable_resident")),
    }
    for name, (at, policy) in arms.items():
        made, engine = run(configure(at, policy))
        assert made.tokens == expected.tokens, name
        assert made.digests == expected.digests, name
        assert_replayed(engine)
        if "elastic" not in name and name != "resident":
            assert engine.loop.window.decode.htod_bytes > 0, name


def test_a_moving_policy_runs_call_by_call() -> None:
    resident = configure(None, PolicyConfig())
    expected, _ = run(resident)
    made, engine = run(configure(tight(resident), PolicyConfig(residency="lru")))
    assert made.tokens == expected.tokens
    assert engine.loop.window.replays == 0
    assert engine.capture_record()["reasons"]


def test_growth_replayed_equals_call_by_call_and_whole_from_the_start() -> None:
    shape = {"prompts": (PROMPTS[0], PROMPTS[1]), "tokens": 1100, "measured": 1}
    limit = tight(configure(None, PolicyConfig(), **shape), 0.6)
    lending = PolicyConfig(lending=True)
    made, engine = run(configure(limit, lending, **shape))
    assert [event.growth.to_tokens for event in engine.loop.growths if event.generation == 1] == [512, 1024, 2048]
    assert engine.loop.window.reclaim_events > 0
    assert_replayed(engine)
    eager, other = run(configure(limit, lending, capture=False, **shape))
    assert other.capture_record()["captures"] == 0
    assert (made.tokens, made.digests) == (eager.tokens, eager.digests)
    whole, _ = run(configure(None, PolicyConfig(commits_on_demand=False), **shape))
    same = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(made.tokens, whole.tokens, strict=True)]
    assert made.tokens == whole.tokens, f"equal tokens by row: {same} of 1100"


def test_poisoned_slots_change_nothing_and_missing_copies_do() -> None:
    resident = configure(None, PolicyConfig())
    expected, _ = run(resident)
    config = configure(tight(resident), PolicyConfig())
    poisoned, _ = run(config, Faults("poison_ring"))
    assert poisoned.digests == expected.digests
    with Engine(config, Faults("skip_copy")) as engine:
        made = next(engine.run())
    assert made.digests != expected.digests


@pytest.mark.parametrize("unit", [0, 3, 8])
def test_an_overwritten_granule_is_seen(unit: int) -> None:
    config = configure(None, PolicyConfig())
    expected, _ = run(config)
    with Engine(config, Faults("overwrite", generation=0, step=3, unit=unit)) as engine:
        try:
            made = next(engine.run())
        except InvalidLogits as error:
            assert error.step >= 3
            return
    assert made.digests[0][:3] == expected.digests[0][:3]
    assert made.digests[0][3:] != expected.digests[0][3:]


def test_lending_and_reclaiming_again_and_again_leaves_memory_as_it_was() -> None:
    shape = {"prompts": PROMPTS * 2, "tokens": 260}
    limit = tight(configure(None, PolicyConfig(), **shape), 0.6)
    config = configure(limit, PolicyConfig(lending=True), measured=12, **shape)
    free = []
    with Engine(config) as engine:
        for _ in engine.run():
            engine.device.synchronize()
            free.append(engine.device.resident_bytes())
    assert engine.loop.window.growth_events == engine.loop.window.reclaim_events == 12
    assert max(free[2:]) - min(free[2:]) <= engine.device.granularity, free
