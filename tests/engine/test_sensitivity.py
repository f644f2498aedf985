"""The gates can fail: one granule overwritten between two steps is seen, wherever it lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.config import DeviceConfig, EngineConfig, ModelConfig, PolicyConfig, WorkloadConfig
from engine.engine import Engine
from engine.faults import Faults
from engine.reference import PlainLoop

STEP = 6


@pytest.fixture(scope="module")
def config(real_model: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(str(real_model)),
        workload=WorkloadConfig(("The capital of France is", "The three primary colors are"), tokens=16),
        device=DeviceConfig(limit_bytes=1 << 30, threads=2),
        policy=PolicyConfig(lending=True),
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    with Engine(config) as engine:
        yield engine


def planted(engine: Engine) -> list[Faults]:
    """Twenty seeded granules: every kind of tensor, keys and values; the rest at random."""
    rng = np.random.default_rng(20261201)
    granule = engine.device.granularity
    layers = [unit for unit in engine.units if unit.kind == "layer"]
    heads = [unit for unit in engine.units if unit.kind == "head"]
    kinds = [part.role for part in layers[-1].slices] + ["head", "keys", "values"]
    assert len(kinds) == 13
    chosen: list[Faults] = []
    for number in range(20):
        kind = kinds[number] if number < len(kinds) else kinds[int(rng.integers(len(kinds)))]
        seed, layer = int(rng.integers(1 << 30)), int(rng.integers(len(layers)))
        if kind in ("keys", "values"):
            block = int(rng.integers(engine.spec.kv_heads * len(engine.prompts)))
            fault = Faults("overwrite", step=STEP, kv_range=2 * layer + (kind == "values"), granule=block, seed=seed)
        else:
            unit = heads[int(rng.integers(len(heads)))] if kind == "head" else layers[layer]
            unit = layers[-1] if kind == "output_norm" else unit
            part = unit.slice(kind)
            first, last = part.offset // granule, (part.end - 1) // granule
            fault = Faults(
                "overwrite", step=STEP, unit=unit.index, granule=int(rng.integers(first, last + 1)), seed=seed
            )
        chosen.append(fault)
    return chosen


def test_an_overwritten_granule_is_caught(engine: Engine, config: EngineConfig) -> None:
    expected = PlainLoop(config).generate()
    by_digest = by_tokens = 0
    for index, fault in enumerate(planted(engine)):
        kept = weights_under(engine, fault)
        engine.faults = dataclasses.replace(fault, generation=index)
        made = engine.loop.generate(index, engine.prompts)
        engine.faults = Faults()
        if kept is not None:
            engine.device.write(*kept)
        assert made.digests[0][:STEP] == expected.digests[0][:STEP], "nothing differs before the fault"
        by_digest += made.digests != expected.digests
        by_tokens += made.tokens != expected.tokens
    assert by_digest == 20
    assert by_tokens >= 18
    clean = engine.loop.generate(20, engine.prompts)
    assert clean.digests == expected.digests


def weights_under(engine: Engine, fault: Faults) -> tuple[int, bytes] | None:
    """What the fault will overwrite, to be put back; None for KV, which the next generation writes anew."""
    if fault.unit is None:
        return None
    unit = engine.units[fault.unit]
    address = engine.residency.address(unit, unit.slices[0].role) + fault.granule * engine.device.granularity
    return address, engine.device.read(address, engine.device.granularity)
