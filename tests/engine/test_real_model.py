"""The real model: the pinned tokens of the default workload, from every side."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import DeviceConfig, EngineConfig, ModelConfig, PolicyConfig, WorkloadConfig
from engine.engine import Engine
from engine.reference import PlainLoop

PINNED = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())["default_workload"]
PROMPTS = tuple(PINNED["prompts"])


def configure(model: Path, policy: PolicyConfig) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(str(model)),
        workload=WorkloadConfig(PROMPTS, tokens=16),
        device=DeviceConfig(limit_bytes=1 << 30, threads=2),
        policy=policy,
    )


def test_the_plain_loop_gives_the_pinned_tokens(real_model: Path) -> None:
    assert PlainLoop(configure(real_model, PolicyConfig())).generate().tokens == list(PINNED["prompts"].values())


@pytest.mark.parametrize(
    ("policy", "per_step"),
    [
        (PolicyConfig(), (235e6, 245e6)),
        (PolicyConfig(lending=True, headroom_bytes=512 << 20), (25e6, 40e6)),
        (PolicyConfig(lending=True), (0, 0)),
    ],
    ids=["baseline", "elastic 512MiB", "elastic 0"],
)
def test_the_default_experiment_shows_the_effect(
    real_model: Path, policy: PolicyConfig, per_step: tuple[float, float]
) -> None:
    with Engine(configure(real_model, policy)) as engine:
        assert engine.weight_bytes == PINNED["weights"]
        assert engine.plan.workspace_charge < 32 << 20
        for made in engine.run():
            assert made.tokens == list(PINNED["prompts"].values())
        window = engine.loop.window.report(engine.plan.budget.bytes, engine.residency.mapped_physical)
        assert per_step[0] <= window["htod_bytes_per_step"] <= per_step[1]
        assert window["floor_ratio"] is None or 1 <= window["floor_ratio"] <= 1.08
        assert engine.device.resident_bytes() == engine.ledger.committed <= 1 << 30
        assert engine.ledger.clean()


def test_text_streams_from_the_command_line(real_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.generate", "--model", str(real_model), "--limit", "512MiB", "--tokens", "8",
         "--headroom", "0", "--max-context", "256", "The capital of France is"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris.")
    assert "streamed a step" in done.stderr


def test_a_long_context_takes_back_over_100_megabytes_and_changes_nothing(real_model: Path) -> None:
    sentence = "Every spring the river carries silt down from the hills, and every autumn the storms push it back. "
    config = EngineConfig(
        model=ModelConfig(str(real_model)),
        workload=WorkloadConfig((sentence * 56, "In short, " + sentence * 30), tokens=6),
        device=DeviceConfig(limit_bytes=576 << 20, threads=2),
        policy=PolicyConfig(lending=True),
        max_context=2048,
        warmup=0,
        measured=1,
    )
    expected = PlainLoop(config).generate()
    for policy in (PolicyConfig(lending=True), PolicyConfig()):
        with Engine(dataclasses.replace(config, policy=policy)) as engine:
            assert len(engine.prompts[0]) > 1024
            (made,) = engine.run()
            assert made.tokens == expected.tokens
            assert made.digests == expected.digests
            assert engine.ledger.clean()
            assert engine.ledger.oversubscribed_bytes == 0
            assert engine.device.resident_bytes() == engine.ledger.committed
            growths = [event.growth for event in engine.loop.growths]
            assert [growth.to_tokens for growth in growths] == [512, 1024, 2048]
            demoted = [growth.reclaimed_from_weights for growth in growths if growth.reclaimed_from_weights]
            if policy.lending:
                assert len(demoted) >= 2
                assert sum(demoted) >= 100e6
            else:
                assert not demoted
