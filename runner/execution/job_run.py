"""One job while it runs: its references, its process runs turn by turn, and the outcome they come to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.model.shape_name import is_shape, shape_digest
from engine.sizes import human_bytes
from runner.errors import UserError
from runner.execution.baselines import BASELINE
from runner.execution.outcome import Outcome, Part, ProcessRun, Status, job_status
from runner.execution.reference_runs import ReferenceRuns, predicted
from runner.execution.services import Services
from runner.judge.gates import Evidence, Verdict, failed, judge, logits_failure, repeats_verdict
from runner.judge.identity import identity_of, model_digest, run_identity
from runner.judge.references import StoredRun
from runner.judge.token_text import token_text
from runner.plan.jobs import Job
from runner.record.recording import new_folder
from runner.screen.units import rate

_REFUSALS = ("request", "model", "capacity")


class JobRun:
    """A job and what has come of it so far.

    ``companion`` marks a baseline that runs only to be compared with. ``turns`` is how many process runs it wants of
    each of its configurations.
    """

    def __init__(self, job: Job, services: Services, companion: bool = False) -> None:
        self.job = job
        self.companion = companion
        self.turns = job.settings.repeats
        self.outcome: Outcome | None = None
        self.stored: StoredRun | None = None
        self.recorded = False
        self.run_id: str | None = None
        self.folder: Path | None = None
        self._services = services
        self._digest = _digest(job.configs[0].model.path, services.store)
        self._tokens = [identity_of(config, self._digest) for config in job.configs]
        self._counters = run_identity(job.configs[0], self._digest)
        self._done: list[list[ProcessRun]] = [[] for _ in job.configs]
        self._references_run = ReferenceRuns(services)
        self._stopped: dict[int, tuple[Status, str]] = {}
        self._taken = 0
        self._started = time.time()
        self._leads = False

    @property
    def counters_identity(self) -> str:
        """Equal for jobs whose counters must be equal."""
        return self._counters.hash

    @property
    def labels(self) -> list[str]:
        """What each of its processes is called on the screen."""
        if len(self.job.configs) == 1:
            return [self.job.label]
        return [f"{self.job.label} N={len(config.workload.prompts)}" for config in self.job.configs]

    @property
    def identities(self) -> Mapping[str, Any]:
        """For the record."""
        tokens = [identity.hash for identity in self._tokens]
        return {"tokens": tokens, "counters": self._counters.hash, "fields": self._tokens[0].fields}

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to run."""
        over = len(self._stopped) == len(self.job.configs)
        return self.stored is not None or over or self._taken >= self.turns or self._services.stop.requested

    def try_stored(self) -> None:
        """Let a baseline of an earlier session stand in, when timings are not compared over several runs."""
        if self.turns == 1 and self.has_references():
            self.stored = self._services.baselines.find(self._counters)

    def has_references(self) -> bool:
        """Whether every reference this job needs is in the store."""
        return predicted(self.job) or all(self._services.references.find(i) is not None for i in self._tokens)

    def take_turn(self, width: int) -> None:
        """One process run of each configuration that can still run."""
        for at, config in enumerate(self.job.configs):
            if at in self._stopped or self._services.stop.requested:
                continue
            why = self._references_run.ensure(self.job, at, self._tokens[at], width)
            if why is not None:
                self._stopped[at] = why
                continue
            if not self._services.stop.requested:
                self._run(at, config, width)
        self._taken += 1

    def settle(self, width: int) -> None:
        """Judge what ran and say so in a line."""
        job = self.job
        if self.stored is not None:
            part = Part(job.configs[0], "passed")
            self.outcome = Outcome(job.label, job.arm, (part,), "passed", companion=True, stored=self.stored)
            return
        parts = tuple(self._part(at) for at in range(len(job.configs)))
        status, reason = job_status(parts, job.arm.batch is not None)
        self.outcome = Outcome(
            label=job.label,
            arm=job.arm,
            parts=parts,
            status=status,
            reason=reason,
            companion=self.companion,
            unused=job.unused,
            same_as=job.same_as,
            notes=self._notes(parts),
            leads=self._leads,
        )
        if status not in ("passed", "not run"):
            self._services.screen.line(f"{job.label.ljust(width)}  {status}: {reason}")

    def begin_in_store(self, to_close: bool = False) -> None:
        """Create the run in the store, once. ``to_close``: the job has ended already."""
        if self.run_id is None:
            tags = {"ebb.label": self.job.label, "ebb.identity": self._tokens[0].hash}
            self.run_id = self._services.begin(self.job.label, self._started, tags, to_close)

    def with_ids(self) -> Outcome:
        """The outcome, with the run and the folder it is recorded under."""
        assert self.outcome is not None
        self.outcome = replace(self.outcome, run_id=self.run_id, folder=self.folder)
        return self.outcome

    def keep_baseline(self) -> None:
        """Keep a valid baseline for later sessions, and as the reference where there is no other. Raises OSError."""
        outcome = self.outcome
        if outcome is None or not outcome.valid or self.job.arm.name != BASELINE or outcome.part.first is None:
            return
        if self._services.launcher.fault is not None:
            return
        run = outcome.part.first
        stored = StoredRun(
            run_id=self.run_id or (self.folder.name if self.folder else "unknown"),
            created=time.strftime("%Y-%m-%d %H:%M:%S"),
            record=run.record,
            plan=run.plan,
            policy=run.policy,
            device_resident_peak=run.resident_peak,
        )
        self._services.baselines.save(self._counters, stored)

    def _run(self, at: int, config: EngineConfig, width: int) -> None:
        services, job = self._services, self.job
        label = self.labels[at]
        try:
            if self.folder is None:
                self.folder = new_folder(services.store, job.label)
        except OSError as error:
            raise UserError(f"the store {services.store} cannot be written: {error.strerror}") from error
        if not any(self._done):
            self._started = time.time()
            self._leads = services.children == 0
        services.children += 1
        number = len(self._done[at])
        name = "child.log" if at == number == 0 else f"child-{at}-{number}.log"
        with services.screen.bar(label, width) as bar:
            run = services.launcher.run(
                config,
                "arm",
                self.folder / name,
                job.settings.timeout_s,
                on_event=bar.on_event,
                started=services.tracker.start,
                before_go=self.begin_in_store,
            )
        self._done[at].append(run)
        stopped = _stopped(run)
        if stopped is not None:
            self._stopped[at] = stopped
        else:
            if self.job.arm.name == BASELINE and not failed(judge(self._evidence(at, run))):
                self._references_run.adopt_baseline(self._tokens[at], run)
            services.screen.line(bar.finished(_progress_note(run)))

    def _part(self, at: int) -> Part:
        config, runs = self.job.configs[at], tuple(self._done[at])
        stopped = self._stopped.get(at)
        reference = self._services.references.find(self._tokens[at])
        verdicts: list[Verdict] = []
        for run in runs:
            found = _judged(run, self._evidence(at, run))
            # Several runs, one row of gates: of each gate the first failure, else the first verdict.
            for place, verdict in enumerate(found):
                if place >= len(verdicts):
                    verdicts.append(verdict)
                elif verdict.verdict == "fail" and verdicts[place].verdict != "fail":
                    verdicts[place] = verdict
        if len(runs) > 1:
            verdicts.append(repeats_verdict([run.record.get("counters", {}) for run in runs if run.record]))
        bad = failed(tuple(verdicts))
        status: Status = "passed"
        reason: str | None = None
        if stopped is not None:
            status, reason = stopped
        elif not runs or (self._services.stop.requested and len(runs) < self.turns):
            status, reason = ("not run", "not run") if not runs else ("killed", "interrupted")
        elif bad:
            status = "contended" if all(v.name == "contention" for v in bad) else "failed"
            reason = f"{bad[0].name}: {bad[0].why}"
        return Part(config, status, runs, tuple(verdicts), reason, reference)

    def _evidence(self, at: int, run: ProcessRun) -> Evidence:
        reference = self._services.references.find(self._tokens[at])
        of_baseline = reference is None or reference.source == "baseline"
        return Evidence(
            config=_in_force(run),
            record=run.record,
            plan=run.plan,
            policy=run.policy,
            reference=reference,
            is_reference=self.job.arm.name == BASELINE and of_baseline,
            resident_peak=run.resident_peak,
            resident_source=run.samples.source,
            contention=run.contention,
            token_text=token_text(Path(run.config.model.path)),
        )

    def _notes(self, parts: tuple[Part, ...]) -> tuple[str, ...]:
        notes = _managing(parts)
        if predicted(self.job):
            notes.append("predicted: counted on the model's tensor table; nothing was moved and no token was made")
        if self._services.launcher.fault is not None:
            notes.append(f"a fault was planted on purpose: {self._services.launcher.fault.get('kind')}")
        if any(part.reference is not None and part.reference.source == "baseline" for part in parts):
            notes.append("the reference is a baseline run: the plain loop does not fit this machine")
        return tuple(notes)


def _in_force(run: ProcessRun) -> EngineConfig:
    """What the run is judged by: where it was left to the engine whether to manage, what the engine chose."""
    policy = run.config.policy
    if policy.manage == "auto" and run.policy.get("managed") is False:
        return replace(run.config, policy=policy.unmanaged())
    return run.config


def _managing(parts: tuple[Part, ...]) -> list[str]:
    """What the engine decided about managing, and the bus that was emulated."""
    notes = []
    for part in parts:
        device = part.config.device
        rates = (("copies", device.copy_rate), ("reads in place", device.in_place_rate))
        held = [f"{what} at most {rate / 1e9:g} GB/s" for what, rate in rates if rate is not None]
        if held:
            notes.append(f"emulated bus: {', '.join(held)}")
        if part.config.policy.manage == "auto" and part.first is not None:
            notes.append(f"manage=auto: {part.first.policy.get('manage_reason')}")
    return list(dict.fromkeys(notes))


def _digest(model: str, store: Path) -> str:
    if is_shape(model):
        return shape_digest(model)
    try:
        return model_digest(Path(model), store / "digests.json")
    except OSError as error:
        raise UserError(f"the model {model} cannot be read: {error.strerror}") from error


def _stopped(run: ProcessRun) -> tuple[Status, str] | None:
    """Why this run gave no result, or None when it did."""
    result = run.result
    if result.interrupted:
        return "killed", "interrupted"
    if result.crash is not None:
        return "crashed", result.crash
    if result.error is not None:
        message = str(result.error.get("message", "no message"))
        return ("refused" if result.error.get("kind") in _REFUSALS else "failed"), message
    return None


def _judged(run: ProcessRun, evidence: Evidence) -> tuple[Verdict, ...]:
    if run.record:
        return judge(evidence)
    error = run.result.error
    return logits_failure(error) if error is not None and error.get("kind") == "logits" else ()


def _progress_note(run: ProcessRun) -> str:
    speed = run.record.get("timing", {}).get("tokens_per_s")
    committed = run.record.get("ledger", {}).get("peak_committed")
    resident = run.resident_peak
    words = [f"{rate(speed)} tok/s".rjust(12), run.contention.verdict]
    if run.config.device.limit_bytes is None:
        words.append("limit lifted")
    if committed is not None and resident is not None:
        words.append(f"ledger {human_bytes(committed)} / resident {human_bytes(resident)}")
    return f"{words[0]}   {' · '.join(words[1:])}"
