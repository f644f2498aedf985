"""What the report says about lending: when growth called memory back, and what it cost in bytes per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.execution.outcome import Outcome
from runner.screen.units import mib, milliseconds

NOT_CALLED_BACK = "lending was not called back in this run"


def lending_lines(outcome: Outcome) -> list[str]:
    """Lines about lending, for arms that lend; nothing for others."""
    run = outcome.part.first
    if run is None or not outcome.part.config.policy.lending:
        return []
    record = run.record
    reclaims = int(record.get("counters", {}).get("reclaim_events") or 0)
    if reclaims == 0:
        return [f"lending  {NOT_CALLED_BACK}"]
    shown = _distinct([g for g in record.get("growth", ()) if g.get("reclaimed_from_weights")])
    windows = record.get("windows", ())
    measured = sum(1 for g in record.get("generations", ()) if g.get("measured"))
    often = f"{reclaims} time{'s' if reclaims != 1 else ''}"
    over = f" in {measured} measured generations" if measured > 1 else ""
    lines = [f"lending  lending was called back {often}{over}:"]
    return lines + [f"           {_reclaim(growth, windows)}" for growth in shown]


def _reclaim(growth: Mapping[str, Any], windows: Sequence[Mapping[str, Any]]) -> str:
    start, end = growth["from_tokens"], growth["to_tokens"]
    before, after = _bytes_at(windows, start), _bytes_at(windows, end)
    return (
        f"KV {start} → {end} tokens: weights gave {mib(growth['reclaimed_from_weights'])} "
        f"(need {mib(growth['need_bytes'])}, {mib(growth['from_unassigned'])} unassigned) · "
        f"htod bytes/token {mib(before)} → {mib(after)} · stall {milliseconds(growth.get('stall_s'))} ms"
    )


def _bytes_at(windows: Sequence[Mapping[str, Any]], capacity: int) -> float | None:
    found = [w["htod_bytes_per_token"] for w in windows if w.get("capacity_tokens") == capacity]
    return found[0] if found else None


def _distinct(growths: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every generation grows alike, so each step is said once."""
    seen: dict[tuple[int, int], Mapping[str, Any]] = {}
    for growth in growths:
        seen.setdefault((growth["from_tokens"], growth["to_tokens"]), growth)
    return list(seen.values())
