"""The figures of a run under their published names, out of a child's record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.execution.outcome import Outcome, Part, ProcessRun

_COUNTERS = (
    "htod_bytes_per_token",
    "htod_bytes_per_step",
    "streaming_floor_bytes",
    "floor_ratio",
    "byte_hit_rate",
    "hit_rate",
    "in_place_bytes_per_token",
    "page_ins_per_token",
    "evictions",
    "bypassed_page_ins",
    "compulsory_bytes",
    "bypassed_bytes",
    "refetched_bytes",
    "bypassed_byte_share",
    "rebinds",
    "growth_events",
    "reclaim_events",
    "relends",
    "prefill_htod_bytes",
    "mapped_physical",
)


@dataclass(frozen=True)
class Figures:
    """One run's figures. ``values`` are by published name, bytes and seconds; None where there is none."""

    values: Mapping[str, float | int | None]
    bound_by: str | None
    limit: int | None
    withheld_kv: int | None
    weight_bytes: int | None

    def get(self, name: str) -> float | int | None:
        """The figure, or None."""
        return self.values.get(name)

    @property
    def regime(self) -> str:
        """Whether weights fit the budget or come from the host at every step."""
        moved = (self.get("htod_bytes_per_step") or 0) or (self.get("in_place_bytes_per_token") or 0)
        return "streams" if moved else "fits"

    def metrics(self) -> dict[str, float]:
        """What can be logged as a number: no None, NaN or infinity."""
        return {k: float(v) for k, v in self.values.items() if v is not None and math.isfinite(v)}


def figures(
    record: Mapping[str, Any],
    plan: Mapping[str, Any],
    policy: Mapping[str, Any],
    resident_peak: int | None,
) -> Figures:
    """Figures of one record; what it lacks is None."""
    counters = record.get("counters", {})
    ledger = record.get("ledger", {})
    latency = record.get("latency", {})
    stalls = latency.get("growth_stall_s") or []
    budget = plan.get("budget", {})
    kv_peak = ledger.get("holders", {}).get("KvCache", {}).get("peak")
    full = plan.get("kv_full_bytes")
    values: dict[str, float | int | None] = {name: counters.get(name) for name in _COUNTERS}
    values |= {
        "budget_bytes": policy.get("budget_bytes", counters.get("budget_bytes")),
        "peak_committed_bytes": ledger.get("peak_committed"),
        "oversubscribed_bytes": ledger.get("oversubscribed_bytes"),
        "workspace_measured_bytes": ledger.get("workspace_measured"),
        "workspace_charge_bytes": ledger.get("workspace_charge"),
        "device_resident_peak_bytes": resident_peak,
        "tokens_per_s": record.get("timing", {}).get("tokens_per_s"),
        "prefill_s": latency.get("prefill_s"),
        "ttft_s": latency.get("ttft_s"),
        "itl_p50_s": latency.get("itl_p50_s"),
        "itl_p99_s": latency.get("itl_p99_s"),
        "itl_max_s": latency.get("itl_max_s"),
        "growth_stall_max_s": max(stalls) if stalls else None,
    }
    static = policy.get("bound_by") == "static" or budget.get("bound_by") == "static"
    return Figures(
        values=values,
        bound_by=policy.get("bound_by") or budget.get("bound_by"),
        limit=None if plan.get("limit_lifted") else plan.get("limit_bytes"),
        withheld_kv=full - kv_peak if static and full is not None and kv_peak is not None else None,
        weight_bytes=plan.get("model", {}).get("weight_bytes"),
    )


def run_figures(run: ProcessRun) -> Figures:
    """Figures of a process run."""
    return figures(run.record, run.plan, run.policy, run.resident_peak)


def part_figures(part: Part) -> Figures | None:
    """Figures of a part: counters of its first run (they are the same in all), median tok/s over its runs."""
    run = part.first
    if run is None:
        return None
    found = run_figures(run)
    return Figures(
        {**found.values, "tokens_per_s": part.median_tokens_per_s},
        found.bound_by,
        found.limit,
        found.withheld_kv,
        found.weight_bytes,
    )


def outcome_figures(outcome: Outcome) -> Figures | None:
    """Figures of a job, or of the stored run that stands in for it. None when it has none or they do not count."""
    if outcome.stored is not None:
        stored = outcome.stored
        found = figures(stored.record, stored.plan, stored.policy, stored.device_resident_peak)
        # Timings of another session are not set beside timings of this one.
        timeless = {k: None if k == "tokens_per_s" or k.endswith("_s") else v for k, v in found.values.items()}
        return Figures(timeless, found.bound_by, found.limit, found.withheld_kv, found.weight_bytes)
    return part_figures(outcome.part) if outcome.valid and outcome.parts else None
