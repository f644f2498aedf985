"""Making a reference: the plain loop in a child of its own, or a baseline where the plain loop does not fit."""

from __future__ import annotations

from runner.errors import UserError
from runner.execution.baselines import BASELINE
from runner.execution.outcome import ProcessRun, Status
from runner.execution.services import Services
from runner.judge.identity import Identity
from runner.judge.references import Reference
from runner.plan.jobs import Job

PLAIN_LOOP = "the plain loop: neither governor, pager nor ring"


def predicted(job: Job) -> bool:
    """Whether ``job`` only counts, so that it makes no tokens to compare."""
    return job.settings.device.kind == "ledger"


class ReferenceRuns:
    """Makes references that are missing; each is tried once a command."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def ensure(self, job: Job, at: int, identity: Identity, width: int) -> tuple[Status, str] | None:
        """Make the reference of one configuration of ``job`` when there is none.

        Returns why the configuration cannot be run, or None. A baseline may go on without a reference where
        the plain loop does not fit: it will be the reference.
        """
        services = self._services
        if predicted(job) or services.references.find(identity) is not None:
            return None
        failure = services.no_reference.get(identity.hash)
        if failure is None:
            failure = self._make(job, at, identity, width)
            if failure is None:
                return None
            services.no_reference[identity.hash] = failure
        if failure[0] != "capacity":
            status: Status = "killed" if failure[0] == "killed" else "refused" if failure[0] == "refused" else "crashed"
            return status, failure[1] if status != "crashed" else f"the reference run: {failure[1]}"
        return None if job.arm.name == BASELINE else ("refused", f"there is no reference: {failure[1]}")

    def adopt_baseline(self, identity: Identity, run: ProcessRun) -> None:
        """Keep a baseline run whose gates passed as the reference, where there can be no other."""
        services = self._services
        does_not_fit = services.no_reference.get(identity.hash, ("", ""))[0] == "capacity"
        if does_not_fit and services.references.find(identity) is None and services.launcher.fault is None:
            self._save(identity, Reference.from_record(identity, run.record, BASELINE))

    def _make(self, job: Job, at: int, identity: Identity, width: int) -> tuple[str, str] | None:
        """Run the plain loop. None when the reference is kept, else what went wrong and why."""
        services, config = self._services, job.configs[at]
        many = len(job.configs) > 1
        label = f"reference N={len(config.workload.prompts)}" if many else "reference"
        services.children += 1
        with services.screen.bar(label, width) as bar:
            run = services.launcher.run(
                config,
                "reference",
                services.store / "references" / f"{identity.hash}.log",
                job.settings.timeout_s,
                on_event=bar.on_event,
                started=services.tracker.start,
            )
        result = run.result
        if result.interrupted:
            return "killed", "interrupted"
        if result.error is not None and result.crash is None:
            kind = str(result.error.get("kind"))
            return "capacity" if kind == "capacity" else "refused", str(result.error.get("message"))
        if result.crash is not None or result.record is None:
            return "crashed", f"{result.crash or 'no result'}; its log is {run.log}"
        try:
            self._save(identity, Reference.from_record(identity, result.record))
        except ValueError as error:
            return "crashed", str(error)
        services.screen.line(bar.finished(PLAIN_LOOP))
        return None

    def _save(self, identity: Identity, reference: Reference) -> None:
        try:
            self._services.references.save(identity, reference)
        except OSError as error:
            raise UserError(f"the store {self._services.store} cannot be written: {error.strerror}") from error
