"""Run the jobs of a plan, one child at a time, and report.

For each job: its reference exists or is made first, its baseline exists or runs beside it, the child runs, gates judge
it, and it is recorded. A job that fails does not stop the others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from engine.sizes import format_bytes
from runner.child.process_run import Launcher
from runner.child.signals import watching_signals
from runner.child.spawn import WORKER
from runner.errors import UserError
from runner.execution.baselines import BASELINE, baseline_job, compares
from runner.execution.job_run import JobRun
from runner.execution.outcome import EXIT_CODES, Outcome, exit_code
from runner.execution.services import Services, check_writable
from runner.plan.jobs import Plan
from runner.record.recording import new_folder, run_content, run_status, write_files
from runner.record.tracking import RunContent, RunStatus, Tracker, tag_name
from runner.screen.progress import Screen
from runner.screen.report import job_report, where_lines
from runner.screen.sweep_report import sweep_report, sweep_where_lines
from runner.watch.lock import DeviceLock
from runner.watch.nvml import open_probe


def execute(
    plan: Plan,
    *,
    worker: Sequence[str] = WORKER,
    file: TextIO | None = None,
    fault: Mapping[str, Any] | None = None,
) -> int:
    """Run every job of ``plan`` and return the exit code of the command.

    ``worker`` is the child's command line, ``file`` where the report goes (stdout), and ``fault`` a fault for tests of
    the gates, planted in every arm; nothing of such a run is kept as a baseline.

    Raises
    ------
    UserError
        Nothing can be recorded, or the only job asks for what the engine refuses.
    Contended
        The device is held by another process.
    """
    settings = plan.settings
    screen = Screen(file)
    check_writable(settings.paths.store, settings.tracking.uri)
    lock = DeviceLock(settings.paths.locks, settings.device.kind)
    with watching_signals() as stop:
        lock.acquire(settings.contention.wait_s, stop, screen.line)
        probe = open_probe()
        try:
            tracker = Tracker(settings.paths.store, settings.tracking.uri, settings.tracking.experiment)
            services = Services(Launcher(stop, lock, probe, worker, fault), tracker, screen, settings.paths.store)
            if plan.sweep:
                services.sweep_name = f"sweep {time.strftime('%Y-%m-%d %H:%M:%S')}"
            return _Session(plan, services).run()
        finally:
            lock.release()
            if probe is not None:
                probe.close()


class _Session:
    """The jobs of one command."""

    def __init__(self, plan: Plan, services: Services) -> None:
        self._plan = plan
        self._services = services
        self._screen = services.screen
        self._outcomes: dict[str, Outcome] = {}
        self._lost = False
        self._runs = self._with_baselines()
        labels = [label for run in self._runs for label in run.labels]
        self._label_width = max(len(label) for label in [*labels, "reference"])

    def run(self) -> int:
        """All of it. Whatever goes wrong on the way, no run is left open in the store."""
        try:
            code = self._run_jobs()
        except BaseException as error:
            self._close_open_runs(f"{type(error).__name__}: {error}")
            raise
        return EXIT_CODES["crashed"] if self._lost else code

    def _close_open_runs(self, reason: str) -> None:
        for run in self._runs:
            if run.run_id is not None and not run.recorded:
                tags = {"ebb.reason": reason[:500]}
                self._services.tracker.finish(run.run_id, "FAILED", RunContent(tags=tags))

    def _run_jobs(self) -> int:
        self._header()
        for run in self._schedule():
            if not self._services.stop.requested and not run.ended:
                run.take_turn(self._label_width)
            if run.ended and run.outcome is None:
                run.settle(self._label_width)
                if self._rounds == 1:
                    self._record(run)
        for run in self._runs:
            if run.outcome is None:
                run.settle(self._label_width)
            if not run.recorded:
                self._record(run)
        outcomes = tuple(run.outcome for run in self._runs if run.outcome is not None)
        if self._plan.sweep:
            self._sweep_end(outcomes)
        if closed := len(self._services.tracker.closed_stale):
            self._screen.line(f"       {closed} earlier run(s) whose process had ended were closed as KILLED")
        if self._plan.sweep:
            return exit_code(outcomes)
        if outcomes[-1].status == "refused":
            raise UserError(outcomes[-1].reason or "the engine refused this job")
        return exit_code(outcomes)

    @property
    def _rounds(self) -> int:
        return max(run.turns for run in self._runs)

    def _with_baselines(self) -> list[JobRun]:
        """The jobs, each baseline that is only there for comparison before the first job that needs it."""
        runs: list[JobRun] = []
        jobs = self._plan.jobs
        own = [JobRun(job, self._services) for job in jobs]
        own.sort(key=lambda run: run.job.arm.name != BASELINE)  # what others are compared with goes first
        there = {run.counters_identity for run in own if run.job.arm.name == BASELINE}
        for run in own:
            if compares(run.job):
                companion = JobRun(baseline_job(run.job), self._services, companion=True)
                if companion.counters_identity not in there:
                    there.add(companion.counters_identity)
                    companion.try_stored()
                    runs.append(companion)
            runs.append(run)
        return runs

    def _schedule(self) -> Iterator[JobRun]:
        """Turns in order, every second round backwards: A B, B A, A B ... so that drift hits all alike."""
        for turn in range(self._rounds):
            order = self._runs if turn % 2 == 0 else list(reversed(self._runs))
            for run in order:
                if turn < run.turns:
                    yield run

    def _header(self) -> None:
        job = self._plan.jobs[0]
        config = job.configs[0]
        count = f"{len(self._plan.jobs)} jobs · " if self._plan.sweep else ""
        limit = config.device.limit_bytes
        rows = [len(each.workload.prompts) for each in job.configs]
        prompts = ", ".join(str(count) for count in rows)
        self._screen.line(
            f"ebb  {count}{job.settings.model.name} · {config.device.kind} device, "
            + ("limit lifted" if limit is None else f"limit {format_bytes(limit)}")
            + f" · {prompts} prompt{'s' if rows != [1] else ''} · {config.workload.tokens} tokens"
            + f" · {config.warmup + config.measured} generations"
        )
        missing = [] if all(run.has_references() for run in self._runs) else ["its reference"]
        missing += ["baseline"] if any(run.companion and run.stored is None for run in self._runs) else []
        if missing:
            said = " and ".join(missing).replace("its reference", "the plain loop")
            self._screen.line(f"     not in the store for this identity yet: running {said} first")

    def _baseline_for(self, run: JobRun) -> Outcome | None:
        if not compares(run.job):
            return None
        wanted = JobRun(baseline_job(run.job), self._services).counters_identity
        return next((r.outcome for r in self._runs if r.counters_identity == wanted), None)

    def _record(self, run: JobRun) -> None:
        """Local files, then MLflow, then the report on the terminal."""
        run.recorded = True
        outcome = run.outcome
        if outcome is None or outcome.stored is not None or outcome.status == "not run":
            return
        services, tracker = self._services, self._services.tracker
        if outcome.status == "refused" and run.run_id is None:
            return
        baseline = self._baseline_for(run)
        if run.run_id is None:
            run.begin_in_store(to_close=True)
        outcome = run.with_ids()
        report_path: Path | None = None
        try:
            folder = run.folder or new_folder(services.store, outcome.label)
            write_files(folder, run.job, outcome, run.identities)
            report_path = folder / "report.md"
            report_path.write_text(job_report(outcome, baseline).markdown(), encoding="utf-8")
            run.keep_baseline()
        except OSError as error:
            self._screen.line(f"note   the local files of {outcome.label} could not be written: {error}")
            outcome = replace(outcome, folder=None)
        tracker.finish(run.run_id, run_status(outcome), run_content(run.job, outcome, run.folder))
        self._lost = self._lost or (outcome.folder is None and tracker.problem is not None)
        if not run.companion and not self._plan.sweep:
            where = where_lines(outcome, report_path, tracker.uri, tracker.problem)
            report = job_report(outcome, baseline, where=where)
            self._screen.line()
            self._screen.lines(report.text(self._screen.width))

    def _sweep_end(self, outcomes: tuple[Outcome, ...]) -> None:
        """The comparison table: as markdown in a folder of its own, in the sweep's run, and on the terminal."""
        services, tracker = self._services, self._services.tracker
        report, folder = sweep_report(outcomes), None
        with contextlib.suppress(OSError):
            folder = new_folder(services.store, "sweep")
            (folder / "report.md").write_text(report.markdown(), encoding="utf-8")
        done: RunStatus = "FINISHED" if all(o.status == "passed" for o in outcomes) else "FAILED"
        content = RunContent(tags={f"job.{tag_name(o.label)}": o.status for o in outcomes}, folder=folder)
        tracker.finish(services.sweep_id, "KILLED" if services.stop.requested else done, content)
        where = sweep_where_lines(services.store, folder, tracker.uri, tracker.problem)
        self._screen.line()
        self._screen.lines([*report.text(self._screen.width), *where])
