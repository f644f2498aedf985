"""Every gate passes on a good run and fails on the fault it is for, with the evidence in its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from arms.spec import ArmSpec
from runner.judge.gates import Evidence, Verdict, judge, logits_failure, repeats_verdict
from runner.watch.contention import Check, ContentionRecord
from tests.runner.support import BASELINE, ELASTIC, evidence


def verdict(name: str, seen: Evidence) -> Verdict:
    return next(v for v in judge(seen) if v.name == name)


def changed(section: str, **values: Any) -> Evidence:
    """Evidence whose record has other values in one section."""
    seen = evidence()
    return replace(seen, record={**seen.record, section: {**seen.record[section], **values}})


RESIDENT = ArmSpec(name="resident", summary="all", lift_limit=True)
WDDM = ArmSpec(
    name="wddm_legacy", summary="unmanaged", managed=False, commits_on_demand=False, cold="in_place", emulated="why"
)


@pytest.mark.parametrize("arm", [BASELINE, ELASTIC, RESIDENT, WDDM], ids=lambda arm: arm.name)
def test_a_good_run_fails_no_gate(arm: ArmSpec) -> None:
    assert [v for v in judge(evidence(arm)) if v.verdict == "fail"] == []


def test_verdicts_of_a_resident_run_say_what_does_not_apply() -> None:
    found = {v.name: v.verdict for v in judge(evidence(RESIDENT))}
    assert found["streaming"] == found["floor"] == found["capture"] == "not_applicable"


def test_tokens_name_the_first_difference() -> None:
    seen = evidence(flags=frozenset({"wrong-token"}), token_text={103: " answer", 1103: " fi\nrst"}.get)
    found = verdict("tokens", seen)
    assert found.verdict == "fail"
    assert found.why == 'row 1, step 3: expected 103 " answer", got 1103 " fi\\nrst" (generation 2)'
    assert dict(found.evidence) == {"generation": 2, "row": 1, "step": 3, "expected": 103, "actual": 1103}


@pytest.mark.parametrize("cut", [1, 7], ids=["much shorter", "one shorter"])
def test_a_generation_that_ends_early_differs(cut: int) -> None:
    seen = evidence()
    generations = [dict(g) for g in seen.record["generations"]]
    generations[1]["tokens"] = [generations[1]["tokens"][0][:cut], generations[1]["tokens"][1]]
    found = verdict("tokens", replace(seen, record={**seen.record, "generations": generations}))
    assert found.verdict == "fail" and f"row 0, step {cut}" in found.why and "got no token" in found.why


def test_a_run_that_is_its_own_reference_says_so() -> None:
    seen = evidence(BASELINE, reference=None, is_reference=True)
    assert verdict("tokens", seen).verdict == "reference"
    assert verdict("digests", seen).verdict == "reference"
    disagreeing = evidence(BASELINE, frozenset({"wrong-token"}), reference=None, is_reference=True)
    assert verdict("tokens", disagreeing).verdict == "fail"


def test_no_reference_is_not_a_pass() -> None:
    assert verdict("tokens", evidence(reference=None)).verdict == "fail"


def test_digests_name_the_step_and_need_the_same_batch_shape() -> None:
    found = verdict("digests", evidence(flags=frozenset({"wrong-digest"})))
    assert found.verdict == "fail" and found.why.startswith("row 0, step 2: ")
    seen = evidence()
    assert seen.reference is not None
    other = replace(seen.reference, digests=seen.reference.digests[:1])
    assert verdict("digests", replace(seen, reference=other)).verdict == "not_applicable"


@pytest.mark.parametrize(
    "values",
    [
        {"oversubscribed_bytes": 1},
        {"ref_underflows": 1},
        {"byte_underflows": 1},
        {"unaccounted_committed_bytes": -65536},
        {"peak_committed": 1 << 40},
        {"workspace_measured": 1 << 30},
    ],
    ids=lambda values: next(iter(values)),
)
def test_ledger_faults(values: dict[str, int]) -> None:
    assert verdict("ledger", changed("ledger", **values)).verdict == "fail"


def test_accounting_must_close_to_the_byte() -> None:
    hits = evidence().record["accounting"]["hit_bytes"]
    assert "weights x steps" in verdict("accounting", changed("accounting", hit_bytes=hits - 1)).why
    copied = evidence().record["accounting"]["policy_htod_bytes"]
    assert "the policy counted" in verdict("accounting", changed("accounting", policy_htod_bytes=copied + 1)).why


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("managed", False),
        ("lending", False),
        ("commits_on_demand", False),
        ("residency", "stable_resident"),
        ("cold", "in_place"),
        ("capture", True),
        ("execution_provider", "CUDAExecutionProvider"),
    ],
)
def test_a_policy_that_is_not_in_force_fails_with_the_reason(field: str, value: Any) -> None:
    seen = evidence()
    found = verdict("policy", replace(seen, policy={**seen.policy, field: value, "decline_reasons": ["because"]}))
    assert found.verdict == "fail"
    assert found.why.startswith(f"{field}: asked ") and found.why.endswith("(because)")


def test_an_override_must_be_adopted_as_given() -> None:
    seen = evidence()
    asked = replace(seen.config, policy=replace(seen.config.policy, budget_bytes=123))
    assert verdict("policy", replace(seen, config=asked)).verdict == "fail"
    in_force = {**seen.policy, "budget_bytes": 123, "bound_by": "override"}
    assert verdict("policy", replace(seen, config=asked, policy=in_force)).verdict == "pass"


def test_a_field_the_engine_did_not_report_fails() -> None:
    seen = evidence()
    policy = {k: v for k, v in seen.policy.items() if k != "cold"}
    assert "did not report" in verdict("policy", replace(seen, policy=policy)).why


@pytest.mark.parametrize("word", ["contended", "unknown"])
def test_contention_that_is_not_clear_fails(word: Any) -> None:
    record = ContentionRecord((Check("before", "clear", ""), Check("during", word, "pid 7")), None)
    found = verdict("contention", evidence(contention=record))
    assert found.verdict == "fail" and found.why == f"{word} during: pid 7"
    assert verdict("contention", evidence(contention=ContentionRecord((), None))).verdict == "fail"


def test_residency_takes_a_granule_a_holder_or_two_percent() -> None:
    committed = evidence().record["ledger"]["peak_committed"]
    slack = max(3 * 65536, committed * 2 // 100)
    for offset in (0, slack, -slack):
        assert verdict("residency", evidence(resident_peak=committed + offset)).verdict == "pass"
    spilled = verdict("residency", evidence(resident_peak=committed // 2))
    assert spilled.verdict == "fail" and spilled.why.startswith("spilled: ") and "(test)" in spilled.why
    assert "in the ledger" in verdict("residency", evidence(resident_peak=committed + slack + 1)).why
    assert verdict("residency", evidence(resident_peak=None)).verdict == "fail"


def test_a_budget_below_the_weights_must_stream() -> None:
    found = verdict("streaming", changed("counters", htod_bytes=0, in_place_bytes=0))
    assert found.verdict == "fail" and "nothing was streamed" in found.why


def test_fewer_bytes_than_the_floor_is_a_fault() -> None:
    assert verdict("floor", changed("counters", floor_ratio=0.99)).verdict == "fail"


def test_a_record_without_what_a_gate_needs_fails_that_gate() -> None:
    seen = evidence()
    found = {v.name: v for v in judge(replace(seen, record={"generations": seen.record["generations"]}))}
    assert found["ledger"].verdict == found["accounting"].verdict == found["residency"].verdict == "fail"
    assert "'ledger'" in found["ledger"].why
    assert found["tokens"].verdict == "pass"


def test_logits_that_are_not_finite() -> None:
    (found,) = logits_failure({"message": "logits are not finite", "generation": 1, "row": 0, "step": 3})
    assert found.verdict == "fail" and dict(found.evidence) == {"generation": 1, "row": 0, "step": 3}


def test_repeats_must_agree_on_every_counter() -> None:
    assert repeats_verdict([{"a": 1}]).verdict == "not_applicable"
    assert repeats_verdict([{"a": 1}, {"a": 1}]).verdict == "pass"
    found = repeats_verdict([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    assert found.verdict == "fail" and found.why == "run 2 of 2: b is 3, run 1 had 2"


def test_residency_is_asked_only_of_arms_that_manage_it() -> None:
    for arm in (WDDM, RESIDENT):
        seen = evidence(arm)
        seen = replace(seen, policy={**seen.policy, "residency": "stable_resident"})
        assert verdict("policy", seen).verdict == "pass"


def test_a_budget_that_shrinks_below_the_weights_must_stream_too() -> None:
    seen = evidence(RESIDENT)
    windows = [{"capacity_tokens": 512, "budget_bytes": 1, "steps": 1, "htod_bytes_per_token": 0.0}]
    assert verdict("streaming", replace(seen, record={**seen.record, "windows": windows})).verdict == "fail"


def test_one_token_comes_from_prefill_alone_so_nothing_had_to_stream() -> None:
    seen = changed("counters", decode_steps=0, htod_bytes=0, in_place_bytes=0, floor_ratio=None)
    assert verdict("streaming", seen).verdict == "not_applicable"
