"""One engine process from start to end, with everything that is watched beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.config import EngineConfig
from runner.child.result import ChildLimits
from runner.child.signals import Stop
from runner.child.spawn import WORKER, Child
from runner.execution.outcome import ProcessRun
from runner.plan.settings import PROJECT
from runner.watch.contention import Check, look, record
from runner.watch.lock import DeviceLock
from runner.watch.nvml import NvmlProbe
from runner.watch.sampler import Sampler

_MARKS = frozenset(("plan", "loaded", "first_token", "growth", "ready", "measure_start", "measure_end"))
_LONGEST_SILENCE_S = 600.0


@dataclass(frozen=True)
class Launcher:
    """How children are started and watched.

    ``worker`` is the child's command line; ``fault`` a fault that tests plant in arms (never in a reference).
    """

    stop: Stop
    lock: DeviceLock
    probe: NvmlProbe | None = None
    worker: Sequence[str] = WORKER
    fault: Mapping[str, Any] | None = None

    def run(
        self,
        config: EngineConfig,
        mode: Literal["arm", "reference"],
        log: Path,
        timeout_s: float,
        *,
        on_event: Callable[[dict[str, Any]], None],
        started: Callable[[], None] = lambda: None,
        before_go: Callable[[], None] = lambda: None,
    ) -> ProcessRun:
        """Run ``config`` in a child of its own.

        ``started`` is called right after the child was spawned, ``before_go`` when it waits to be measured. A child
        that fails is not an error here: see ``ProcessRun.result``.
        """
        checks: list[Check] = [look("before", self.lock)]
        limits = ChildLimits(silence_s=min(_LONGEST_SILENCE_S, timeout_s), overall_s=timeout_s)
        fault = dict(self.fault) if self.fault is not None and mode == "arm" else None
        job = {"mode": mode, "config": config.to_dict(), "fault": fault}
        child = Child(job, log, worker=self.worker, limits=limits, environment=_environment())
        sampler = Sampler(child.pid, self.probe, on_gpu=config.device.kind == "cuda").start()
        started()

        def heard(event: dict[str, Any]) -> None:
            if event["event"] == "hello" and isinstance(event.get("memfd"), str):
                sampler.watch(event["memfd"])
            elif event["event"] in _MARKS:
                sampler.mark(event["event"])
            if event["event"] == "measure_start":
                checks.append(look("during", self.lock))
            on_event(event)

        try:
            result = child.run(self.stop, heard, before_go)
        finally:
            child.end()
            samples = sampler.stop()
        checks.append(look("after", self.lock))
        start, end = result.event("measure_start"), result.event("measure_end")
        window = samples.others_cpu(_time(start), _time(end)) or samples.others_cpu()
        return ProcessRun(config, result, samples, record(checks, window), log)


def _environment() -> dict[str, str]:
    """Ours, with the project importable whatever the working directory, and a traceback on a segmentation fault."""
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}


def _time(event: dict[str, Any] | None) -> float | None:
    value = event.get("t") if event else None
    return float(value) if isinstance(value, int | float) else None
