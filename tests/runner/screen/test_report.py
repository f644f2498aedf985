"""The words of the report: each is derived from what was recorded, and what did not pass offers no figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from arms.spec import ArmSpec
from runner.execution.outcome import Outcome, exit_code, job_status
from runner.judge.gates import Verdict, judge
from runner.judge.references import StoredRun
from runner.screen.report import job_report, where_lines
from runner.screen.sweep_report import sweep_report
from runner.screen.table import Table
from runner.screen.units import fewer, mib, rate, times
from tests.runner.support import BASELINE, ELASTIC, evidence, outcome

WDDM = ArmSpec(
    name="wddm_legacy",
    summary="unmanaged",
    managed=False,
    commits_on_demand=False,
    cold="in_place",
    emulated="no driver",
)
RESIDENT = ArmSpec(name="resident", summary="all", lift_limit=True)


def text(of: Outcome, baseline: Outcome | None = None) -> str:
    return "\n".join(job_report(of, baseline).text())


def failed(arm: ArmSpec = ELASTIC) -> Outcome:
    good = outcome(arm)
    verdicts = judge(evidence(arm, frozenset({"wrong-token"})))
    part = replace(good.part, status="failed", verdicts=verdicts, reason="tokens: row 1")
    return replace(good, parts=(part,), status="failed", reason="tokens: row 1")


def test_an_arm_stands_beside_its_baseline() -> None:
    said = text(outcome(), outcome(BASELINE))
    assert "4.0x fewer" in said and "1.75x" in said
    assert "one pair: no verdict" in said
    assert "baseline withholds 5.0 MiB for KV" in said
    assert "limit 16 MiB" in said
    assert "tokens ✓ identical" in said and "capture – not applicable" in said
    assert '"prompt 0" → " text 0\\n"' in said
    assert "lending was not called back in this run" in said
    assert "ledger and device agree" in said


def test_without_a_baseline_there_is_no_ratio() -> None:
    said = text(outcome())
    assert "ratio" not in said.splitlines()[0]
    assert "fewer" not in said


def test_a_failed_gate_comes_first_and_takes_the_figures_with_it() -> None:
    lines = text(failed(), outcome(BASELINE)).splitlines()
    assert lines[0] == "gates  tokens ✗ row 1, step 3: expected 103, got 1103 (generation 2)"
    assert lines[1] == "       the run is marked FAILED and its figures are not offered as a result"
    assert not any("MiB" in line and "bytes/token" in line for line in lines)


def test_reclaims_are_told_with_the_bytes_before_and_after() -> None:
    said = text(outcome(flags=frozenset({"reclaim"})))
    assert "lending was called back 2 times in 2 measured generations" in said
    assert "KV 256 → 512 tokens: weights gave 1.0 MiB" in said
    assert "htod bytes/token 0.5 MiB → 1.0 MiB · stall 4.0 ms" in said
    assert said.count("KV 256 → 512") == 1
    assert "growth stalls 2, longest 4.0 ms" in said


def test_an_arm_that_does_not_lend_says_nothing_of_lending() -> None:
    assert "lending was" not in text(outcome(BASELINE))


def test_emulated_lifted_override_and_unused_are_said() -> None:
    said = text(outcome(WDDM, unused={"headroom": "not elastic"}), outcome(BASELINE))
    assert "emulated: no driver" in said
    assert "headroom is not used by wddm_legacy: not elastic" in said
    assert "in-place bytes/token" in said and "fewer" not in said
    said = text(outcome(RESIDENT), outcome(BASELINE))
    assert "device.limit is lifted for this arm" in said and "limit lifted" in said
    assert "across regimes: baseline streams, this fits" in said


def test_a_headroom_that_did_not_bind_is_named() -> None:
    good = outcome()
    run = good.part.runs[0]
    note = "headroom did not bind: all weights fit beside it"
    plan = {**run.plan, "budget": {**run.plan["budget"], "headroom_note": note, "override": True}}
    events = tuple(plan if e["event"] == "plan" else e for e in run.result.events)
    run = replace(run, result=replace(run.result, events=events))
    said = text(replace(good, parts=(replace(good.part, runs=(run,)),)))
    assert note in said
    assert "the budget is an override, adopted as given" in said


def test_a_stored_baseline_lends_its_counters_and_not_its_timings() -> None:
    base = outcome(BASELINE)
    run = base.part.runs[0]
    stored = StoredRun("0123456789abcdef", "2026-01-02 03:04:05", run.record, run.plan, run.policy, run.resident_peak)
    base = replace(base, parts=(replace(base.part, runs=()),), stored=stored)
    said = text(outcome(), base)
    assert "4.0x fewer" in said
    assert "baseline counters are from run 01234567 at 2026-01-02 03:04:05" in said
    (speed,) = [line for line in said.splitlines() if line.startswith("tok/s")]
    assert "–" in speed and "another session" in speed


def test_repeats_show_medians_with_their_number() -> None:
    def thrice(arm: ArmSpec) -> Outcome:
        one = outcome(arm)
        return replace(one, parts=(replace(one.part, runs=one.part.runs * 3),))

    said = text(thrice(ELASTIC), thrice(BASELINE))
    assert "tok/s (median of 3 runs)" in said and "n=3 each: medians, no verdict" in said


def test_where_lines_say_what_to_do_next() -> None:
    said = where_lines(outcome(run_id="0123456789"), Path("/r/report.md"), "sqlite:////s/mlflow.db", None)
    assert said[0] == "run    elastic  01234567  ·  report /r/report.md"
    assert said[1].endswith("mlflow server --backend-store-uri sqlite:////s/mlflow.db")
    lost = where_lines(outcome(folder=Path("/r")), None, "x", "the store x did not answer within 60 s")
    assert lost[1].endswith("did not answer within 60 s; the results are kept in /r")


def test_a_sweep_names_what_failed_and_what_was_folded() -> None:
    crashed = replace(outcome(WDDM), status="crashed", reason="killed by signal 9 (SIGKILL)")
    base = outcome(BASELINE, same_as=("arm=baseline headroom=512MiB paths.store=/x",))
    report = sweep_report([outcome(), crashed, base, outcome(RESIDENT)])
    assert report.table is not None
    assert report.table.header == ("", "baseline", "elastic", "resident (limit lifted)")
    said = "\n".join(report.text())
    assert "crashed   wddm_legacy: killed by signal 9 (SIGKILL)" in said
    assert "baseline: arm=baseline headroom=512MiB means the same and was not run again" in said
    assert "| htod bytes/token | 2.0 MiB | 0.5 MiB | 0.0 MiB |" in report.markdown()


def test_a_batch_sweep_has_a_row_per_size_and_survives_a_refusal() -> None:
    arm = ArmSpec(name="batch_sweep", summary="", lending=True, batch=(2, 8))
    part = outcome().part
    big = replace(part.config, workload=replace(part.config.workload, prompts=("x",) * 8))
    refused = replace(part, config=big, status="refused", runs=(), verdicts=(), reason="KV does not fit")
    assert job_status((part, refused), batch=True) == ("passed", None)
    assert job_status((refused,), batch=True) == ("refused", "N=8: KV does not fit")
    said = text(Outcome("batch_sweep", arm, (part, refused), "passed"))
    assert "N=2" in said and "all gates pass" in said
    assert "N=8" in said and "refused: KV does not fit" in said


def test_a_failed_batch_size_is_named() -> None:
    arm = ArmSpec(name="batch_sweep", summary="", lending=True, batch=(2,))
    bad = replace(outcome().part, status="failed", verdicts=(Verdict("ledger", "fail", "oversubscribed_bytes 1"),))
    said = text(Outcome("batch_sweep", arm, (bad,), "failed", "N=2"))
    assert "gates  N=2 ledger ✗ oversubscribed_bytes 1" in said


def test_the_worst_decides_the_exit_code() -> None:
    def coded(*statuses: str) -> int:
        return exit_code(tuple(replace(outcome(), status=status) for status in statuses))  # type: ignore[arg-type]

    assert coded("passed") == 0
    assert coded("passed", "refused") == 2
    assert coded("refused", "contended") == 3
    assert coded("contended", "failed", "passed") == 1
    assert coded("failed", "crashed", "contended") == 4
    assert coded("crashed", "killed", "not run") == 130
    assert exit_code((replace(outcome(BASELINE), status="refused", companion=True), outcome())) == 0


def test_wide_tables_break_into_blocks_with_the_first_column_again() -> None:
    table = Table(("", "baseline", "a", "b", "c"), (("rate", "1", "2", "3", "4"),))
    lines = table.lines(width=20)
    assert all(len(line) <= 20 for line in lines)
    assert lines[0].split() == ["baseline", "a"]
    assert sum("baseline" in line for line in lines) == 3
    assert "| rate | 1 | 2 | 3 | 4 |" in table.markdown()


def test_units() -> None:
    assert (mib(None), mib(1 << 20), rate(6.94), rate(68.2)) == ("–", "1.0 MiB", "6.9", "68")
    assert (times(1.614), times(12.0)) == ("1.61x", "12x")
    assert (fewer(10, 2), fewer(2, 10), fewer(10, 0), fewer(0, 1)) == ("5.0x fewer", "5.0x more", "none left", "–")
