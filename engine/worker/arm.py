"""What the child process does for an arm: load, warm up, wait for ``go``, measure, and emit the result."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.decode.loop import Generation
from engine.engine import Engine
from engine.faults import Faults
from engine.model.spec import ModelSpec
from engine.worker.events import Events, Progress, wait_for_go
from engine.worker.record import (
    bucket_record,
    generation_record,
    growth_record,
    latency_record,
)


def run_arm(config: EngineConfig, faults: Faults, events: Events) -> None:
    """Run every generation of ``config`` and emit what came of it."""
    engine = Engine(
        config,
        faults,
        on_plan=lambda engine: events.emit("plan", **plan_record(engine)),
    )
    try:
        engine.loop.on_growth = lambda event: events.emit("growth", **growth_record(event))
        events.emit("policy", **engine.effective_policy())
        events.emit("loaded", load_s=engine.load_s)
        _generate(engine, events)
    finally:
        engine.close()


def _generate(engine: Engine, events: Events) -> None:
    config = engine.config
    progress = Progress(events, config.warmup + config.measured, config.workload.tokens)
    generations: list[Generation] = []
    for index in range(config.warmup + config.measured):
        if index == config.warmup:
            wait_for_go(events)
            events.emit("measure_start")
            started = time.perf_counter()
        measured = index >= config.warmup
        generations.append(engine.loop.generate(index, engine.prompts, measured=measured, on_step=progress))
    wall = time.perf_counter() - started
    events.emit("measure_end")
    events.emit("result", **_result(engine, generations, wall))


def plan_record(engine: Engine) -> dict[str, Any]:
    """The plan as JSON types; sizes in bytes."""
    plan, spec = engine.plan, engine.spec
    return {
        "model": _model_record(spec, engine),
        "rows": plan.kv_layout.rows,
        "prompt_tokens": [len(prompt) for prompt in engine.prompts],
        "threads": engine.machine.threads,
        "manage": dataclasses.asdict(engine.decision),
        "limit_bytes": plan.limit,
        "limit_lifted": plan.lifted,
        "workspace_charge": plan.workspace_charge,
        "workspace_buffers": plan.workspace_buffers,
        "kv_full_bytes": plan.kv_full,
        "kv_floor_bytes": plan.kv_floor,
        "weight_allowance_bytes": plan.weights,
        "granule_bytes": engine.device.granularity,
        "budget": {
            "bytes": plan.budget.bytes,
            "bound_by": plan.budget.bound_by,
            "static_bytes": plan.budget.static,
            "elastic_bytes": plan.budget.elastic,
            "headroom_bytes": plan.budget.headroom,
            "headroom_bound": plan.budget.headroom > 0 and plan.budget.headroom_note(engine.weight_bytes) is None,
            "headroom_note": plan.budget.headroom_note(engine.weight_bytes),
            "override": plan.budget.bound_by == "override",
            "reasons": list(plan.budget.reasons),
        },
    }


def _model_record(spec: ModelSpec, engine: Engine) -> dict[str, Any]:
    return {
        "name": spec.name,
        "architecture": spec.architecture,
        **engine.machine.record(),
        "predicted": engine.machine.predicted,
        "weight_bytes": engine.weight_bytes,
        "layers": spec.layers,
        "units": len(engine.units),
        "vocab": spec.vocab,
        "context": spec.context,
        "tied": spec.tied,
        "kv_bytes_per_token": engine.plan.kv_layout.committed_bytes(1, 1) // engine.plan.kv_layout.rows,
    }


def _result(engine: Engine, generations: list[Generation], wall: float) -> dict[str, Any]:
    loop, measured = engine.loop, [g for g in generations if g.measured]
    growths = [event for event in loop.growths if event.generation >= engine.config.warmup]
    ledger = engine.ledger.snapshot()
    ledger["workspace_charge"] = engine.plan.workspace_charge
    # Where scratch lies elsewhere, the kernels themselves are held to their charge.
    measured_here = engine.machine.scratch_in_process
    ledger["workspace_measured"] = (
        engine.plan.workspace_buffers + engine.compute.scratch_bytes if measured_here else None
    )
    speeds = [g.tokens_per_s for g in measured if g.tokens_per_s is not None and not engine.machine.predicted]
    return {
        "schema": 1,
        "generations": [generation_record(g) for g in generations],
        "text": [engine.machine.text(row) for row in generations[-1].tokens],
        "stopped": generations[-1].stopped,
        "counters": loop.window.report(engine.plan.budget.bytes, engine.residency.mapped_physical),
        "accounting": loop.window.accounting(engine.weight_bytes),
        "capture": engine.capture_record(),
        "ledger": ledger,
        "growth": [growth_record(event) for event in growths],
        "memory": [dataclasses.astuple(point) for point in loop.memory],
        "windows": [bucket_record(bucket) for bucket in loop.buckets],
        "device": {
            "resident_bytes": engine.device.resident_bytes(),
            "granule_bytes": engine.device.granularity,
            "unaccounted_bytes": _unaccounted(engine),
        },
        "latency": {} if engine.machine.predicted else latency_record(measured, growths),
        "timing": {
            "tokens_per_s": float(np.median(speeds)) if speeds else None,
            "wall_s": wall,
        },
        "fault": None if engine.faults.kind == "none" else engine.faults.kind,
    }


def _unaccounted(engine: Engine) -> int:
    """Bytes of the device that this process took and the ledger does not know: scratch, code, libraries."""
    if engine.machine.scratch_in_process:
        return 0
    granules = engine.device.counters.live_granules * engine.device.granularity
    return max(0, engine.device.resident_bytes() - granules)
