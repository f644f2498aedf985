"""The capture gate: it asks only where steps are recorded, and fails on each way in which replaying is incomplete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config import DeviceConfig
from runner.judge.gates import Evidence, Verdict, judge
from tests.runner.support import evidence


def on_cuda(counters: dict[str, Any], whole: dict[str, Any] | None = None, **device: Any) -> Evidence:
    seen = evidence()
    config = replace(seen.config, device=DeviceConfig("cuda", 1 << 30, 2 << 20, **device))
    base = {"decode_steps": 20, "captures": 1, "replays": 19, "fallbacks": 0, "invalidations": 1, "growth_events": 1}
    process = {"captures": 2, "replays": 30, "fallbacks": 0, "invalidations": 1, "reasons": [], **(whole or {})}
    record = {**seen.record, "counters": {**seen.record["counters"], **base, **counters}, "capture": process}
    return replace(seen, config=config, record=record)


def verdict(seen: Evidence) -> Verdict:
    return next(v for v in judge(seen) if v.name == "capture")


def test_every_step_replayed_or_recorded_passes() -> None:
    found = verdict(on_cuda({}))
    assert (found.verdict, found.word) == ("pass", "replayed")


@pytest.mark.parametrize(
    ("counters", "whole", "why"),
    [
        ({}, {"captures": 0, "reasons": ["no room"]}, "nothing was recorded (no room)"),
        ({"fallbacks": 2}, {}, "2 of 20 steps fell back"),
        ({"replays": 18}, {}, "18 steps replayed and 1 recorded, of 20"),
        ({"invalidations": 0}, {}, "0 invalidations for 1 growths"),
    ],
)
def test_what_is_incomplete_fails(counters: dict[str, Any], whole: dict[str, Any], why: str) -> None:
    found = verdict(on_cuda(counters, whole))
    assert found.verdict == "fail" and why in found.why


def test_where_nothing_is_recorded_it_does_not_apply() -> None:
    assert verdict(evidence()).verdict == "not_applicable"
    assert verdict(on_cuda({}, capture=False)).why == "not asked for"
    seen = on_cuda({})
    moving = replace(seen, config=replace(seen.config, policy=replace(seen.config.policy, residency="lru")))
    assert verdict(moving).why == "policy=lru moves pages"


def test_memory_outside_the_ledger_is_told_and_counted() -> None:
    seen = evidence()
    record = {**seen.record, "device": {"unaccounted_bytes": 300_000_000}}
    peak = record["ledger"]["peak_committed"]
    found = {
        at: next(v for v in judge(replace(seen, record=record, resident_peak=at)) if v.name == "residency")
        for at in (peak, peak + 300_000_000)
    }
    assert found[peak].verdict == "fail"
    assert found[peak + 300_000_000].verdict == "pass" and "outside the ledger" in found[peak + 300_000_000].why
