"""The comparison table of a whole sweep: jobs as columns, the baseline first, jobs without figures with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from runner.execution.outcome import Outcome
from runner.record.figures import Figures, outcome_figures, part_figures
from runner.record.tracking import open_hint
from runner.screen.report import Report, told_overrides
from runner.screen.table import Table
from runner.screen.units import DASH, fewer, mib, milliseconds, number, percent, rate

_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("weight budget", lambda f: mib(f.get("budget_bytes"))),
    ("  bound by", lambda f: f.bound_by or DASH),
    ("regime", lambda f: f.regime),
    ("htod bytes/token", lambda f: mib(f.get("htod_bytes_per_token"))),
    ("  per step", lambda f: mib(f.get("htod_bytes_per_step"))),
    ("  streaming floor", lambda f: mib(f.get("streaming_floor_bytes"))),
    ("  floor ratio", lambda f: number(f.get("floor_ratio"), 3)),
    ("in-place bytes/token", lambda f: mib(f.get("in_place_bytes_per_token"))),
    ("byte hit rate", lambda f: percent(f.get("byte_hit_rate"))),
    ("peak committed", lambda f: mib(f.get("peak_committed_bytes"))),
    ("peak resident", lambda f: mib(f.get("device_resident_peak_bytes"))),
    ("inter-token p50, ms", lambda f: milliseconds(f.get("itl_p50_s"))),
    ("inter-token p99, ms", lambda f: milliseconds(f.get("itl_p99_s"))),
    ("reclaims", lambda f: number(f.get("reclaim_events"), 0)),
)


def sweep_report(outcomes: Sequence[Outcome]) -> Report:
    """The report of all jobs of a sweep; ``outcomes`` may hold companions (a baseline run for comparison)."""
    ordered = sorted(outcomes, key=lambda o: o.arm.name != "baseline")
    valid = [o for o in ordered if o.valid or o.stored is not None]
    columns = [(_label(o), found, o) for o in valid for found in [_figures(o)] if found is not None]
    table = None
    if columns:
        rows = [(name, *(cell(found) for _, found, _ in columns)) for name, cell in _ROWS]
        rows.insert(4, ("  against baseline", *_against(columns)))
        rows.append(("tok/s", *(rate(f.get("tokens_per_s")) for _, f, _ in columns)))
        rows.append(("  process runs", *(str(len(o.part.tokens_per_s)) if o.parts else DASH for _, _, o in columns)))
        rows.append(("tokens", *(_tokens(o) for _, _, o in columns)))
        table = Table(("", *(label for label, _, _ in columns)), tuple(rows))
    lines = [f"{o.status.ljust(9)} {o.label}: {o.reason}" for o in ordered if not o.valid and o.stored is None]
    lines += _batch_lines(valid)
    lines += _notes(ordered)
    return Report("sweep", table, tuple(lines))


def sweep_where_lines(store: Path, folder: Path | None, uri: str, problem: str | None) -> list[str]:
    """The last lines: where the report is, and how to open the store."""
    lines = [f"run    report {folder / 'report.md'}" if folder else "run    the report could not be written"]
    if problem:
        return [*lines, f"       {problem}; the results are kept in {store / 'results'}"]
    return [*lines, f"       {open_hint(uri)}"]


def _figures(outcome: Outcome) -> Figures | None:
    return None if outcome.arm.batch is not None else outcome_figures(outcome)


def _label(outcome: Outcome) -> str:
    marks = (
        (outcome.stored is not None, "stored"),
        (outcome.arm.emulated is not None, "emulated"),
        (outcome.arm.lift_limit, "limit lifted"),
    )
    said = ", ".join(mark for holds, mark in marks if holds)
    return f"{outcome.label} ({said})" if said else outcome.label


def _against(columns: Sequence[tuple[str, Figures, Outcome]]) -> list[str]:
    """Each column's copied bytes against a baseline of the same tokens, where there is one."""
    cells = []
    for _, found, outcome in columns:
        base = next((f for _, f, o in columns if o.arm.name == "baseline" and _comparable(o, outcome)), None)
        if base is None or outcome.arm.name == "baseline" or found.get("in_place_bytes_per_token"):
            cells.append(DASH)
        else:
            cells.append(fewer(base.get("htod_bytes_per_token"), found.get("htod_bytes_per_token")))
    return cells


def _comparable(baseline: Outcome, outcome: Outcome) -> bool:
    mine, theirs = outcome.part.config, baseline.part.config
    same_memory = outcome.arm.lift_limit or mine.device == theirs.device
    return mine.workload == theirs.workload and mine.max_context == theirs.max_context and same_memory


def _tokens(outcome: Outcome) -> str:
    verdict = next((v for v in outcome.part.verdicts if v.name == "tokens"), None)
    if verdict is None:
        return DASH if outcome.stored is None else "passed then"
    return verdict.word or verdict.verdict


def _batch_lines(outcomes: Sequence[Outcome]) -> list[str]:
    lines = []
    for outcome in outcomes:
        if outcome.arm.batch is None:
            continue
        lines.append(f"{outcome.label}: htod bytes/token by rows")
        for part in outcome.parts:
            found = part_figures(part) if part.status == "passed" else None
            said = mib(found.get("htod_bytes_per_token")) if found else f"{part.status}: {part.reason}"
            lines.append(f"  N={part.rows}  {said}")
    return lines


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    notes = []
    for o in outcomes:
        if o.stored is not None:
            notes.append(f"{o.label}: counters from run {o.stored.run_id[:8]} at {o.stored.created}; no timings")
        notes += [f"{o.label}: {note}" for note in o.notes]
        if o.arm.emulated:
            notes.append(f"{o.label}: emulated: {o.arm.emulated}")
        notes += [f"{o.label}: {name} is not used: {why}" for name, why in o.unused.items()]
        notes += [f"{o.label}: {said} means the same and was not run again" for said in told_overrides(o)]
        run = o.part.first if o.parts else None
        if run is not None and (run.plan.get("budget") or {}).get("headroom_note"):
            notes.append(f"{o.label}: {run.plan['budget']['headroom_note']}")
        if run is not None and run.contention.timing_note:
            notes.append(f"{o.label}: {run.contention.timing_note}")
    notes.append("tok/s are single runs or medians of a few: no verdict on speed is drawn from them")
    return [f"{'note ' if not i else '     '}  {note}" for i, note in enumerate(dict.fromkeys(notes))]
