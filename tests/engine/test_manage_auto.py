"""Left to the engine, managing is chosen where a run of both ways shows it to be cheaper."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

import engine.machine.host as host
from engine.config import EngineConfig, PolicyConfig
from engine.engine import Engine
from engine.machine.host_speeds import measure_speeds
from tests.engine.test_tokens import MIB, configure
from tests.tiny_model import Tiny

FAST, SLOW = 400_000_000, 8_000_000
"""Rates of an emulated bus, bytes/s: even the fast one is slow against memory, so noise does not decide."""
LIMIT = 19 * MIB // 4
ELASTIC = PolicyConfig(lending=True, headroom_bytes=700 << 10, residency="hotset", ring_slots=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny(layers=8).write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def over(config: EngineConfig, copy: int, in_place: int) -> EngineConfig:
    return replace(config, device=replace(config.device, copy_rate=copy, in_place_rate=in_place))


def run(config: EngineConfig) -> tuple[Engine, float, list[list[int]]]:
    """The engine, closed, its median seconds a step, and its tokens."""
    with Engine(config) as engine:
        generations = list(engine.run())
    return engine, statistics.median(s for g in generations for s in g.itl_s), generations[-1].tokens


def configuration(model: Path, limit: int = LIMIT) -> EngineConfig:
    return configure(model, limit, policy=ELASTIC, tokens=6, max_context=512, prompts=("Hello", "ab"))


@pytest.mark.parametrize(("copy", "in_place"), [(FAST, SLOW), (SLOW, FAST)], ids=["copying wins", "in place wins"])
def test_what_auto_chooses_is_what_both_ways_show_to_be_cheaper(model: Path, copy: int, in_place: int) -> None:
    config = over(configuration(model), copy, in_place)
    left, _, tokens = run(replace(config, policy=replace(config.policy, manage="auto")))
    managed, with_copies, others = run(config)
    unmanaged, without, _ = run(replace(config, policy=config.policy.unmanaged()))
    assert managed.loop.window.decode.htod_bytes > 0 and unmanaged.loop.window.decode.in_place_bytes > 0
    assert left.decision.managed == (with_copies < without)
    assert left.decision.managed == (copy == FAST)
    assert left.effective_policy()["managed"] == left.decision.managed
    assert tokens == others


def test_nothing_is_managed_where_everything_fits(model: Path) -> None:
    config = configuration(model, 64 * MIB)
    left, _, _ = run(replace(config, policy=replace(config.policy, manage="auto")))
    counters = left.loop.window.decode
    assert not left.decision.managed and "all weights fit" in left.decision.reason
    assert (counters.htod_bytes, counters.page_ins, counters.in_place_bytes) == (0, 0, 0)


@pytest.mark.parametrize("driver_model", ["wddm", "unknown"])
def test_a_driver_that_places_memory_itself_is_left_to_do_so(
    model: Path, driver_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "measure_speeds", lambda *a: replace(measure_speeds(*a), driver_model=driver_model))
    config = over(configuration(model), SLOW, FAST)
    left, _, _ = run(replace(config, policy=replace(config.policy, manage="auto")))
    _, with_copies, _ = run(config)
    _, without, _ = run(replace(config, policy=config.policy.unmanaged()))
    assert not left.decision.managed and driver_model in left.decision.reason
    assert without < with_copies


def test_the_measurement_leaves_nothing_behind(model: Path) -> None:
    config = replace(configuration(model), policy=replace(ELASTIC, manage="auto"))
    with Engine(over(config, FAST, SLOW)) as engine:
        counted = engine.device.counters.live_granules * engine.device.granularity
        assert engine.ledger.committed == counted
