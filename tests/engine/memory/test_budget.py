"""The published integers come out exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.budget import Conditions, KvShape, bucket_tokens, derive_budget, static_budget

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "golden.json").read_text())
PUBLISHED = GOLDEN["budget"]
LIMIT = PUBLISHED["managed_limit"]
KV = KvShape(PUBLISHED["kv_bytes_per_token"], 1, PUBLISHED["max_context"])


def test_kv_floor_and_full_reservation() -> None:
    assert KV.floor == PUBLISHED["kv_floor"]
    assert KV.full == PUBLISHED["kv_full_reservation"]


def test_static_budget() -> None:
    assert static_budget(LIMIT, KV) == PUBLISHED["static"]


@pytest.mark.parametrize("case", PUBLISHED["elastic"] + PUBLISHED["clamp"], ids=lambda c: str(c["headroom"]))
def test_elastic_budget_and_its_clamp(case: dict[str, int]) -> None:
    budget = derive_budget(LIMIT, KV, Conditions(headroom=case["headroom"]))
    assert budget.bytes == case["budget"]
    assert budget.bound_by == ("elastic" if case["headroom"] <= 1560281088 else "static_floor")


@pytest.mark.parametrize(
    ("length", "max_context", "expected"),
    [
        (length, group["max_context"], expected)
        for group in PUBLISHED["bucket_tokens"]
        for length, expected in group["cases"]
    ],
)
def test_buckets(length: int, max_context: int, expected: int) -> None:
    assert bucket_tokens(length, max_context) == expected


@pytest.mark.parametrize("off", ["managed", "commits_on_demand", "lending"])
def test_with_any_condition_off_the_budget_is_static_and_says_why(off: str) -> None:
    budget = derive_budget(LIMIT, KV, Conditions(**{off: False}))
    assert budget.bytes == PUBLISHED["lending_off"]
    assert budget.bound_by in ("static", "unmanaged")
    (reason,) = budget.reasons
    assert {"managed": "not managed", "commits_on_demand": "commit on demand", "lending": "lending"}[off] in reason


def test_an_override_is_adopted_as_given() -> None:
    budget = derive_budget(LIMIT, KV, Conditions(override=6 << 30))
    assert (budget.bytes, budget.bound_by) == (6 << 30, "override")


def test_the_default_workload_of_the_readme() -> None:
    default = GOLDEN["default_workload"]
    kv = KvShape(default["kv_bytes_per_token_per_row"], 2, 8192)
    assert kv.full == default["kv_full_two_rows"]
    assert static_budget(1 << 30, kv) == default["static_budget"]
    assert derive_budget(1 << 30, kv, Conditions(headroom=512 << 20)).bytes == default["elastic_512MiB"]


@given(
    limit=st.integers(0, 1 << 40),
    per_token=st.integers(1, 1 << 20),
    rows=st.integers(1, 16),
    context=st.integers(1, 1 << 17),
    headroom=st.integers(0, 1 << 41),
    workspace=st.integers(0, 1 << 30),
)
def test_headroom_never_drops_the_budget_below_the_static_one(
    limit: int, per_token: int, rows: int, context: int, headroom: int, workspace: int
) -> None:
    kv = KvShape(per_token, rows, context)
    budget = derive_budget(limit, kv, Conditions(headroom=headroom), workspace)
    assert budget.bytes >= static_budget(limit, kv, workspace) >= 0
    assert budget.bytes <= max(budget.static, limit - workspace - kv.floor)


def test_a_headroom_that_does_not_bind_is_named() -> None:
    kv = KvShape(4096, 1, 8192)
    small = derive_budget(100 << 20, kv, Conditions(headroom=1 << 20))
    assert "did not bind" in str(small.headroom_note(weight_bytes=50 << 20))
    assert small.headroom_note(weight_bytes=200 << 20) is None
    assert "static" in str(derive_budget(100 << 20, kv, Conditions(headroom=1 << 30)).headroom_note(200 << 20))
