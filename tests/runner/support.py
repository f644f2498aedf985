"""What several runner tests need: a small configuration, and evidence as a passing run leaves it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from arms.spec import ArmSpec
from engine.config import DeviceConfig, EngineConfig, ModelConfig, PolicyConfig, WorkloadConfig
from runner.child.result import ChildResult
from runner.execution.outcome import Outcome, Part, ProcessRun
from runner.judge.gates import Evidence, judge
from runner.judge.identity import Identity
from runner.judge.references import Reference
from runner.watch.contention import Check, ContentionRecord
from runner.watch.sampler import Sample, Samples
from tests.runner import fake_worker as fake

WORKER = Path(__file__).with_name("fake_worker.py")
CLEAR = ContentionRecord(tuple(Check(when, "clear", "ours") for when in ("before", "during", "after")), 1.0)
BASELINE = ArmSpec(name="baseline", summary="static")
ELASTIC = ArmSpec(name="elastic", summary="elastic", lending=True)


def worker(*flags: str) -> list[str]:
    """The command line of the scripted engine process."""
    return [sys.executable, str(WORKER), *flags]


def config(arm: ArmSpec = ELASTIC, rows: int = 2, tokens: int = 8, path: str = "model.gguf") -> EngineConfig:
    """A small configuration of ``arm``."""
    return EngineConfig(
        model=ModelConfig(path=path),
        workload=WorkloadConfig(prompts=tuple(f"prompt {row}" for row in range(rows)), tokens=tokens),
        device=DeviceConfig(limit_bytes=None if arm.lift_limit else fake.LIMIT),
        policy=PolicyConfig(
            managed=arm.managed, lending=arm.lending, commits_on_demand=arm.commits_on_demand, cold=arm.cold
        ),
        max_context=512,
    )


def reference(of: EngineConfig) -> Reference:
    """The reference of the scripted process for ``of``."""
    return Reference.from_record(Identity("hash", {}), fake.record_of(of.to_dict()), "plain loop")


def evidence(arm: ArmSpec = ELASTIC, flags: frozenset[str] = frozenset(), **changes: Any) -> Evidence:
    """What a passing run of ``arm`` leaves; ``changes`` replace fields."""
    of = config(arm)
    data = of.to_dict()
    record = fake.record_of(data, flags)
    base = Evidence(
        config=of,
        record=record,
        plan=fake.plan_of(data),
        policy=fake.policy_of(data),
        reference=reference(of),
        is_reference=False,
        resident_peak=record["ledger"]["peak_committed"],
        resident_source="test",
        contention=CLEAR,
    )
    return replace(base, **changes)


def outcome(arm: ArmSpec = ELASTIC, flags: frozenset[str] = frozenset(), **changes: Any) -> Outcome:
    """A finished job of ``arm`` as the runner would have it."""
    seen = evidence(arm, flags)
    events = ({"event": "plan", **dict(seen.plan)}, {"event": "policy", **dict(seen.policy)})
    result = ChildResult(1, 0, dict(seen.record), None, None, False, 100.0, 101.0, 0, events)
    sample = Sample(100.5, "interval", device_resident_bytes=seen.resident_peak, others_cpu_percent=1.0)
    run = ProcessRun(seen.config, result, Samples((sample,), 0.001, 1.0, 0.3, "test"), CLEAR, Path("child.log"))
    part = Part(seen.config, "passed", (run,), judge(seen), None, seen.reference)
    return replace(Outcome(arm.name, arm, (part,), "passed"), **changes)
