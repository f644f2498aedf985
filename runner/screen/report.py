"""The report of one job: its table beside the baseline, its gates, text, latency, lending, and where to look next.

Pure: outcomes in, lines out. Every sentence is derived from what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.sizes import human_bytes
from runner.execution.outcome import Outcome, Part
from runner.record.figures import Figures, outcome_figures, part_figures
from runner.record.tracking import open_hint
from runner.screen.lending import lending_lines
from runner.screen.table import Table
from runner.screen.units import DASH, fewer, mib, milliseconds, number, percent, rate, seconds, times

_MARKS = {"pass": "✓", "fail": "✗", "not_applicable": "–", "reference": "·"}
_TEXT_WIDTH = 60
_LINE_WIDTH = 100
_SHORT_HASH = 8
_SESSION_PREFIXES = ("paths.", "tracking", "contention.", "compare=")


@dataclass(frozen=True)
class Report:
    """A finished report: a table or none, and lines below it."""

    title: str
    table: Table | None
    lines: tuple[str, ...]

    def text(self, width: int = 0) -> list[str]:
        """Lines for a terminal."""
        return ([*self.table.lines(width), ""] if self.table is not None else []) + list(self.lines)

    def markdown(self) -> str:
        """The same as markdown: the table as one, the lines as they are."""
        table = self.table.markdown() + "\n" if self.table is not None else ""
        body = "\n".join(self.lines)
        return f"# {self.title}\n\n{table}```\n{body}\n```\n"


def job_report(outcome: Outcome, baseline: Outcome | None, *, where: Sequence[str] = ()) -> Report:
    """The report of one job. ``baseline`` is what it is set beside, or None; ``where`` are its last lines."""
    lines: list[str] = []
    table: Table | None = None
    if outcome.arm.batch is not None:
        table = batch_table(outcome)
    elif outcome.valid:
        table = pair_table(outcome, baseline)
    lines += gate_lines(outcome)
    if outcome.parts and not outcome.predicted:
        lines += text_lines(outcome.part)
    if outcome.valid and outcome.arm.batch is None:
        lines += [] if outcome.predicted else latency_lines(outcome, baseline)
        lines += lending_lines(outcome)
    lines += note_lines(outcome, baseline)
    lines += where
    return Report(outcome.label, table, tuple(lines))


def pair_table(outcome: Outcome, baseline: Outcome | None) -> Table:
    """The arm beside its baseline (or alone, when there is none to set it beside)."""
    mine = outcome_figures(outcome)
    assert mine is not None, "a valid outcome has figures"
    theirs = outcome_figures(baseline) if baseline is not None else None
    columns = (theirs, mine) if theirs is not None else (mine,)
    rows: list[tuple[tuple[str, ...], str]] = []

    def row(label: str, cells: Sequence[str], ratio: str = "", note: str = "") -> None:
        rows.append(((label, *cells, *([ratio] if theirs is not None else [])), note))

    def get(name: str) -> list[float | None]:
        return [f.get(name) for f in columns]

    budget = get("budget_bytes")
    grown = times(budget[1] / budget[0]) if len(budget) == 2 and budget[0] and budget[1] is not None else DASH
    row("weight budget", [mib(x) for x in budget], grown)
    moved = get("htod_bytes_per_token")
    in_place = get("in_place_bytes_per_token")
    read_in_place = any(in_place)
    ratio = DASH if read_in_place or len(moved) < 2 else fewer(moved[0], moved[1])
    row("htod bytes/token", [mib(x) for x in moved], ratio)
    row("  per step", [mib(x) for x in get("htod_bytes_per_step")])
    row("  streaming floor", [mib(x) for x in get("streaming_floor_bytes")], "per step")
    row("  floor ratio", [number(x, 3) for x in get("floor_ratio")])
    if read_in_place:
        row("in-place bytes/token", [mib(x) for x in in_place], "", "read from host memory, not copied")
    row("byte hit rate", [percent(x) for x in get("byte_hit_rate")])
    row("peak committed", [mib(x) for x in get("peak_committed_bytes")], "", _limit_note(mine, theirs))
    if outcome.predicted:
        header = (
            ("predicted", "baseline", outcome.label, "ratio") if theirs is not None else ("predicted", outcome.label)
        )
        return Table(header, tuple(r for r, _ in rows), tuple(n for _, n in rows))
    row("peak resident", [mib(x) for x in get("device_resident_peak_bytes")], "", _residency_note(outcome))
    count = len(outcome.part.tokens_per_s)
    runs = "1 run each" if count == 1 else f"median of {count} runs"
    row(f"tok/s ({runs})", [rate(x) for x in get("tokens_per_s")], "", _timing_note(outcome, baseline, mine, theirs))
    header = ("", "baseline", outcome.label, "ratio") if theirs is not None else ("", outcome.label)
    return Table(header, tuple(r for r, _ in rows), tuple(n for _, n in rows))


def batch_table(outcome: Outcome) -> Table:
    """One row per batch size."""
    rows = []
    for part in outcome.parts:
        found = part_figures(part) if part.status == "passed" else None
        if found is None:
            rows.append((f"N={part.rows}", *[DASH] * 7, f"{part.status}: {part.reason}"))
            continue
        rows.append(
            (
                f"N={part.rows}",
                mib(found.get("budget_bytes")),
                mib(found.get("htod_bytes_per_token")),
                mib(found.get("htod_bytes_per_step")),
                number(found.get("floor_ratio"), 3),
                percent(found.get("byte_hit_rate")),
                mib(found.get("peak_committed_bytes")),
                rate(found.get("tokens_per_s")),
                f"all gates pass · {found.regime}",
            )
        )
    header = ("rows", "budget", "htod/token", "htod/step", "floor ratio", "byte hits", "peak committed", "tok/s")
    return Table(header, tuple(r[:8] for r in rows), tuple(r[8] for r in rows))


def gate_lines(outcome: Outcome) -> list[str]:
    """Failed gates first, with their evidence; else one line with all of them."""
    lines: list[str] = []
    batch = outcome.arm.batch is not None
    log = next((run.log for part in reversed(outcome.parts) for run in reversed(part.runs)), None)
    for part in outcome.parts:
        place = f"N={part.rows} " if batch else ""
        bad = [v for v in part.verdicts if v.verdict == "fail"]
        for verdict in bad:
            lines.append(f"{'gates' if not lines else '     '}  {place}{verdict.name} ✗ {verdict.why}")
    if outcome.status == "failed":
        if not lines:
            lines.append(f"gates  {outcome.reason}")
        lines.append("       the run is marked FAILED and its figures are not offered as a result")
    elif outcome.status == "crashed":
        lines.append(f"crash  {outcome.reason}")
        lines.append("       there are no figures" + (f"; its log is {log}" if log else ""))
    elif outcome.status != "passed":
        lines.append(f"{outcome.status}  {outcome.reason or ''}".rstrip())
    rest = [v for v in outcome.part.verdicts if v.verdict != "fail"] if outcome.parts else []
    if rest and not batch:
        words = [f"{v.name} {_MARKS[v.verdict]}" + _word(v.verdict, v.word) for v in rest]
        for filled in _filled(words):
            lines.append(f"{'     ' if lines else 'gates'}  {'   '.join(filled)}")
    return lines


def text_lines(part: Part) -> list[str]:
    """What each prompt was continued with."""
    run = part.first
    if run is None or part.status != "passed":
        return []
    prompts = part.config.workload.prompts
    pairs = list(zip(prompts, run.record.get("text", ()), strict=False))
    lines = [f"{'text ' if not i else '     '}  {_quoted(p)} → {_quoted(t)}" for i, (p, t) in enumerate(pairs[:2])]
    return lines + ([f"       and {len(pairs) - 2} more rows"] if len(pairs) > 2 else [])


def latency_lines(outcome: Outcome, baseline: Outcome | None) -> list[str]:
    """Prefill, first token and inter-token times, and the stall of growth, of this session's runs."""
    lines: list[str] = []
    shown = [o for o in (baseline, outcome) if o is not None and o.stored is None and o.valid]
    width = max(len(o.label) for o in shown)
    for each in shown:
        found = outcome_figures(each)
        if found is None:
            continue
        itl = " / ".join(milliseconds(found.get(f"itl_{k}_s")) for k in ("p50", "p99", "max"))
        run = each.part.first
        stalls = run.record.get("latency", {}).get("growth_stall_s") or [] if run else []
        stalled = f"{len(stalls)}, longest {milliseconds(max(stalls))} ms" if stalls else "none"
        lines.append(
            f"{'latency' if not lines else '       '}  {each.label.ljust(width)}  "
            f"prefill {seconds(found.get('prefill_s'))} · first token {seconds(found.get('ttft_s'))} · "
            f"inter-token p50/p99/max {itl} ms · growth stalls {stalled}"
        )
    return lines


def note_lines(outcome: Outcome, baseline: Outcome | None) -> list[str]:
    """What a reader must know beside the figures."""
    notes: list[str] = list(outcome.notes)
    if outcome.arm.emulated:
        notes.append(f"emulated: {outcome.arm.emulated}")
    if outcome.arm.lift_limit:
        notes.append("device.limit is lifted for this arm: all weights are resident")
    run = outcome.part.first if outcome.parts else None
    if run is not None:
        budget = run.plan.get("budget") or {}
        if budget.get("override"):
            notes.append(f"the budget is an override, adopted as given: {mib(budget.get('bytes'))}")
        if budget.get("headroom_note"):
            notes.append(str(budget["headroom_note"]))
        if run.contention.timing_note:
            notes.append(run.contention.timing_note)
    if baseline is not None and baseline.stored is not None and outcome.valid:
        short = baseline.stored.run_id[:_SHORT_HASH]
        when = baseline.stored.created
        notes.append(f"baseline counters are from run {short} at {when}; its timings are not compared")
    elif baseline is not None and baseline.stored is None and not baseline.valid and outcome.valid:
        notes.append(f"no baseline to compare with: it {baseline.status} ({baseline.reason})")
    notes += [f"{name} is not used by {outcome.arm.name}: {why}" for name, why in outcome.unused.items()]
    notes += [f"{said} means the same and was not run again" for said in told_overrides(outcome)]
    return [f"{'note ' if not i else '     '}  {note}" for i, note in enumerate(notes)]


def told_overrides(outcome: Outcome) -> list[str]:
    """The folded jobs as the user typed them, without what concerns the whole command."""
    told = []
    for said in outcome.same_as:
        words = [word for word in said.split(" ") if not word.startswith(_SESSION_PREFIXES)]
        told.append(" ".join(words) or outcome.label)
    return told


def where_lines(outcome: Outcome, report: Path | None, uri: str, problem: str | None) -> list[str]:
    """The last lines: which run, where the report is, how to open the store."""
    run = outcome.run_id[:_SHORT_HASH] if outcome.run_id else "not in the store"
    lines = [f"run    {outcome.label}  {run}" + (f"  ·  report {report}" if report else "")]
    if problem:
        kept = f"the results are kept in {outcome.folder}" if outcome.folder else "the results are lost"
        lines.append(f"       {problem}; {kept}")
    else:
        lines.append(f"       {open_hint(uri)}")
    return lines


def _filled(words: Sequence[str]) -> list[list[str]]:
    """Words in lines of about the length people read."""
    lines: list[list[str]] = [[]]
    for word in words:
        if lines[-1] and len("   ".join([*lines[-1], word])) > _LINE_WIDTH:
            lines.append([])
        lines[-1].append(word)
    return lines


def _word(verdict: str, word: str) -> str:
    if verdict == "not_applicable":
        return " not applicable"
    if verdict == "reference":
        return " reference"
    return f" {word}" if word else ""


def _limit_note(mine: Figures, theirs: Figures | None) -> str:
    limit = "limit lifted" if mine.limit is None else f"limit {human_bytes(mine.limit)}"
    for name, found in (("baseline", theirs), ("it", mine)):
        if found is not None and found.withheld_kv:
            return f"{limit} ({name} withholds {mib(found.withheld_kv)} for KV)"
    return limit


def _residency_note(outcome: Outcome) -> str:
    verdict = next((v for v in outcome.part.verdicts if v.name == "residency"), None)
    agree = verdict is not None and verdict.verdict == "pass"
    return "seen from outside" + (": ledger and device agree" if agree else "")


def _timing_note(outcome: Outcome, baseline: Outcome | None, mine: Figures, theirs: Figures | None) -> str:
    if theirs is None or baseline is None:
        return "no verdict"
    if baseline.stored is not None:
        return "the baseline is of another session: no verdict"
    across = f" · across regimes: baseline {theirs.regime}, this {mine.regime}" if theirs.regime != mine.regime else ""
    count = len(outcome.part.tokens_per_s)
    return ("one pair: no verdict" if count == 1 else f"n={count} each: medians, no verdict") + across


def _quoted(text: str) -> str:
    flat = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    flat = "".join(ch if ch.isprintable() else "�" for ch in flat)
    return f'"{flat if len(flat) <= _TEXT_WIDTH else flat[: _TEXT_WIDTH - 1] + "…"}"'
