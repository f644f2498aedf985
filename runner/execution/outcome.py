"""What came of a job: its process runs, its verdicts, and one word for the whole."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arms.spec import ArmSpec
from engine.config import EngineConfig
from runner.child.result import ChildResult
from runner.judge.gates import Verdict
from runner.judge.references import Reference, StoredRun
from runner.watch.contention import ContentionRecord
from runner.watch.sampler import Samples

Status = Literal["passed", "failed", "crashed", "refused", "contended", "killed", "not run"]

EXIT_CODES: Mapping[Status, int] = {
    "passed": 0,
    "failed": 1,
    "crashed": 4,
    "refused": 2,
    "contended": 3,
    "killed": 130,
    "not run": 130,
}
# The first of these that occurs is what a sweep ends with.
_WORST_FIRST: tuple[Status, ...] = ("killed", "not run", "crashed", "failed", "contended", "refused")


@dataclass(frozen=True)
class ProcessRun:
    """One child process and what was seen beside it."""

    config: EngineConfig
    result: ChildResult
    samples: Samples
    contention: ContentionRecord
    log: Path

    @property
    def record(self) -> dict[str, Any]:
        """The child's result; empty when it gave none."""
        return self.result.record or {}

    @property
    def plan(self) -> dict[str, Any]:
        """The child's plan event, or nothing."""
        return self.result.event("plan") or {}

    @property
    def policy(self) -> dict[str, Any]:
        """The policy the child says is in force, or nothing."""
        return self.result.event("policy") or {}

    @property
    def resident_peak(self) -> int | None:
        """Highest reading of device-resident bytes from outside."""
        return self.samples.peak("device_resident_bytes")


@dataclass(frozen=True)
class Part:
    """One engine configuration of a job: the job itself, or one batch size of a batch sweep.

    ``runs`` are its process runs (one a repeat). ``reason`` says in a line why it did not pass.
    """

    config: EngineConfig
    status: Status
    runs: tuple[ProcessRun, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    reason: str | None = None
    reference: Reference | None = None

    @property
    def rows(self) -> int:
        """Prompts in one batch."""
        return len(self.config.workload.prompts)

    @property
    def first(self) -> ProcessRun | None:
        """The process run whose counters are shown, or None."""
        return next((run for run in self.runs if run.record), None)

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """One figure a process run, each the median of its measured generations."""
        found = (run.record.get("timing", {}).get("tokens_per_s") for run in self.runs if run.record)
        return tuple(float(x) for x in found if x is not None)

    @property
    def median_tokens_per_s(self) -> float | None:
        """Median over process runs, or None."""
        return statistics.median(self.tokens_per_s) if self.tokens_per_s else None


@dataclass(frozen=True)
class Outcome:
    """One job, done or not. ``stored`` is set instead of runs when a baseline of an earlier session stands in;
    ``leads`` says that its first child was the first of the command."""

    label: str
    arm: ArmSpec
    parts: tuple[Part, ...]
    status: Status
    reason: str | None = None
    companion: bool = False
    run_id: str | None = None
    folder: Path | None = None
    stored: StoredRun | None = None
    unused: Mapping[str, str] = field(default_factory=dict)
    same_as: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    leads: bool = False

    @property
    def part(self) -> Part:
        """The only part, or the first of a batch sweep."""
        return self.parts[0]

    @property
    def valid(self) -> bool:
        """Whether its figures are a result."""
        return self.status == "passed"

    @property
    def predicted(self) -> bool:
        """Whether its figures were counted on a model's shape, and nothing ran."""
        return bool(self.parts) and self.part.config.device.kind == "ledger"


def job_status(parts: tuple[Part, ...], batch: bool) -> tuple[Status, str | None]:
    """The word for a whole job. A batch size that the engine refuses is a row, not a failure, as long as one ran."""
    counted = parts
    if batch and any(part.status != "refused" for part in parts):
        counted = tuple(part for part in parts if part.status != "refused")
    for status in _WORST_FIRST:
        bad = next((part for part in counted if part.status == status), None)
        if bad is not None:
            return status, bad.reason if not batch else f"N={bad.rows}: {bad.reason}"
    return "passed", None


def exit_code(outcomes: tuple[Outcome, ...]) -> int:
    """The code a command ends with: the worst in the order 130, 4, 1, 3, 2, 0.

    A baseline that the engine refuses under these settings is a finding about them, not a fault of the job beside it.
    """
    counted = [o for o in outcomes if not (o.companion and o.status == "refused")]
    for status in _WORST_FIRST:
        if any(outcome.status == status for outcome in counted):
            return EXIT_CODES[status]
    return 0
