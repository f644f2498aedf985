"""Whole engines under every policy: tokens of the reference, counters of the simulation, in every generation."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig, PolicyConfig
from engine.counters import Tally
from engine.engine import Engine
from engine.errors import CapacityUnavailable, InvalidRequest
from engine.reference import PlainLoop
from engine.weights.policies import DYNAMIC
from tests.engine.test_tokens import GRANULE, GROWING_LIMIT, MIB, configure, growing
from tests.tiny_model import Tiny
from tests.trace_sim import Count, Pass, simulate

ALL = ("hotset", "stable_resident", *DYNAMIC)
HEAD_AND_DOWN = ("token_embd.weight", "blk.*.ffn_down.weight")
TENSORS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def sizes_of(tiny: Tiny) -> list[list[int]]:
    """Tensor sizes in bytes, unit by unit: layers, then the head in chunks of at most about a layer."""
    kv, h = tiny.kv_heads * tiny.head_dim, tiny.hidden
    shapes = (h, h * h, kv * h, kv * h, h * h, h, tiny.inner * h, tiny.inner * h, h * tiny.inner)
    units = [[4 * n for n in shapes] for _ in range(tiny.layers)]
    chunks = -(-tiny.vocab * h * 4 // sum(units[0]))
    rows = -(-tiny.vocab // chunks)
    units[-1].append(4 * h)
    return units + [[4 * h * (min(at + rows, tiny.vocab) - at)] for at in range(0, tiny.vocab, rows)]


def passes_of(tiny: Tiny, engine: Engine, generation: int = 0) -> tuple[list[Pass], list[Pass]]:
    """Prefill and decode passes of a generation, and the budget in force at each, in granules."""
    chunk, reach = engine.config.prefill_chunk, len(sizes_of(tiny))
    budget = engine.plan.weights // GRANULE
    prefill = [tiny.layers for prompt in engine.prompts for _ in range(-(-len(prompt) // chunk))]
    prefill[-1] = reach  # only the last one runs the head
    decode = []
    after = {e.step: e.growth.budget_after // GRANULE for e in engine.loop.growths if e.generation == generation}
    at_load = budget
    for step in range(1, engine.config.workload.tokens):
        budget = after.get(step, budget)
        decode.append(Pass(reach, budget))
    return [Pass(each, at_load) for each in prefill], decode


def expected(tiny: Tiny, engine: Engine, pinned: frozenset[tuple[int, int]] = frozenset()) -> tuple[Count, Count]:
    """What one generation's prefill and decode must cost."""
    prefill, decode = passes_of(tiny, engine)
    policy = engine.config.policy
    counts = simulate(sizes_of(tiny), GRANULE, policy.residency, prefill + decode, pinned, policy.ring_slots)
    return reduce(add, counts[: len(prefill)]), reduce(add, counts[len(prefill) :])


def agrees(tally: Tally, count: Count, generations: int) -> None:
    for name in (f.name for f in fields(Count) if f.name != "evictions"):
        assert getattr(tally, name) == generations * getattr(count, name), name


def check(engine: Engine, tiny: Tiny, reference: Any, pinned: frozenset[tuple[int, int]] = frozenset()) -> None:
    """Three generations: tokens, digests, and counters that are three times those of the simulation."""
    for made in engine.run():
        assert made.tokens == reference.tokens
        assert made.digests == reference.digests
    window, generations = engine.loop.window, engine.config.measured
    prefill, decode = expected(tiny, engine, pinned)
    agrees(window.prefill, prefill, generations)
    agrees(window.decode, decode, generations)
    assert window.evictions == generations * decode.evictions
    assert engine.residency.evictions == generations * (prefill.evictions + decode.evictions)
    assert window.accounting(engine.weight_bytes)["ok"]
    assert engine.ledger.clean()
    assert engine.device.resident_bytes() == engine.ledger.committed
    assert engine.effective_policy()["residency"] == engine.config.policy.residency


def short(path: Path, policy: PolicyConfig) -> EngineConfig:
    return configure(
        path, 32 * MIB, policy=policy, prompts=("Hello", "ab"), tokens=4, max_context=256, warmup=0, measured=3
    )


@st.composite
def tinies(draw: st.DrawFn) -> Tiny:
    return Tiny(
        layers=draw(st.integers(1, 5)),
        inner=draw(st.sampled_from([64, 128, 200])),
        vocab=draw(st.sampled_from([96, 150, 700])),
        seed=draw(st.integers(0, 9)),
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tiny=tinies(), share=st.floats(0, 1), slots=st.integers(1, 3))
def test_on_random_models_and_budgets_every_policy_costs_what_the_simulation_says(
    tmp_path: Path, tiny: Tiny, share: float, slots: int
) -> None:
    path = tiny.write(tmp_path / "random.gguf")
    reference = PlainLoop(short(path, PolicyConfig())).generate()
    for name in ALL:
        # A budget anywhere between the least workable and all weights.
        with Engine(short(path, PolicyConfig(residency=name, ring_slots=slots))) as engine:
            least, full = engine.residency.least_bytes, engine.residency.full_bytes
        budget = least + int(share * (full - least)) // GRANULE * GRANULE
        policy = PolicyConfig(residency=name, ring_slots=slots, budget_bytes=budget)
        with Engine(short(path, policy)) as engine:
            check(engine, tiny, reference)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Tiny().write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def long_reference(model: Path) -> Any:
    return PlainLoop(growing(model, GROWING_LIMIT)).generate()


@pytest.mark.parametrize("name", ALL)
def test_through_growth_counters_are_those_of_the_simulation_too(model: Path, long_reference: Any, name: str) -> None:
    config = growing(model, GROWING_LIMIT, policy=PolicyConfig(lending=True, residency=name))
    with Engine(EngineConfig(**{**vars(config), "warmup": 0, "measured": 3})) as engine:
        check(engine, Tiny(), long_reference)
        assert engine.loop.window.reclaim_events > 0
        assert engine.loop.window.evictions > 0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("name", [name for name in ALL if name != "hotset"])
def test_the_largest_tensors_kept_resident_change_no_token_in_any_generation(
    model: Path, name: str, share: float
) -> None:
    reference = PlainLoop(short(model, PolicyConfig())).generate()
    policy = PolicyConfig(residency=name, pin=HEAD_AND_DOWN)
    with Engine(short(model, policy)) as engine:
        least, full = engine.residency.least_bytes, engine.residency.full_bytes
    tiny, budget = Tiny(), least + int(share * (full - least)) // GRANULE * GRANULE
    units = sizes_of(tiny)
    pinned = frozenset((u, TENSORS.index("ffn_down")) for u in range(tiny.layers))
    pinned |= {(u, 0) for u in range(tiny.layers, len(units))}
    with Engine(short(model, PolicyConfig(residency=name, pin=HEAD_AND_DOWN, budget_bytes=budget))) as engine:
        check(engine, tiny, reference, pinned)
        lacking = {fill.address for unit in engine.units for fill in engine.residency.fills(unit)}
        for u, t in pinned:
            unit = engine.units[u]
            assert engine.residency.address(unit, unit.slices[t].role) not in lacking


@pytest.mark.parametrize("name", [name for name in ALL if name != "hotset"])
def test_the_largest_tensors_stay_resident_through_growth(model: Path, long_reference: Any, name: str) -> None:
    policy = PolicyConfig(lending=True, residency=name, pin=("blk.*.ffn_down.weight",))
    config = growing(model, GROWING_LIMIT, policy=policy)
    with Engine(EngineConfig(**{**vars(config), "warmup": 0, "measured": 3})) as engine:
        check(engine, Tiny(), long_reference, frozenset((u, TENSORS.index("ffn_down")) for u in range(4)))
        assert engine.loop.window.reclaim_events > 0


@pytest.mark.parametrize("name", [name for name in ALL if name != "hotset"])
def test_pins_that_do_not_fit_are_refused_before_anything_is_allocated(model: Path, name: str) -> None:
    policy = PolicyConfig(residency=name, pin=("*.ffn_*.weight",), budget_bytes=60 * GRANULE)
    with pytest.raises(CapacityUnavailable, match=r"below the least workable .*; policy.pin=\*.ffn_\*.weight is part"):
        Engine(short(model, policy))


def test_pins_mean_nothing_to_the_hot_set(model: Path) -> None:
    with pytest.raises(InvalidRequest, match="policy=hotset keeps parts"):
        Engine(short(model, PolicyConfig(pin=("*",))))
