"""Is anyone else on the device? Before, during and after a run, with the verdict kept beside the figures.

On the host device only another holder of its lock is contention. CPU taken by others is measured and marks the
timings; it never refuses a run, because a machine with nothing else on it is not what people have. What
cannot be seen is ``unknown``, never ``clear``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from runner.watch.lock import DeviceLock

Contention = Literal["clear", "contended", "unknown"]

# Share of the whole machine, in percent, from which timings are marked.
CPU_MARK_PERCENT = 10.0


@dataclass(frozen=True)
class Check:
    """One look: ``when`` is before, during or after."""

    when: str
    verdict: Contention
    why: str


@dataclass(frozen=True)
class ContentionRecord:
    """The looks of one process run, and CPU used by others (percent of the machine; None when it was not seen)."""

    checks: tuple[Check, ...]
    others_cpu_percent: float | None

    @property
    def verdict(self) -> Contention:
        """The worst of the looks; with none at all it is unknown."""
        verdicts = {check.verdict for check in self.checks}
        if "contended" in verdicts:
            return "contended"
        return "clear" if verdicts == {"clear"} else "unknown"

    @property
    def timing_note(self) -> str | None:
        """What to say beside timings, or None."""
        if self.others_cpu_percent is None:
            return "CPU use by others could not be seen: timings are marked"
        if self.others_cpu_percent < CPU_MARK_PERCENT:
            return None
        return f"others used {self.others_cpu_percent:.0f} % of the CPU meanwhile: timings are marked"


def look(when: str, lock: DeviceLock) -> Check:
    """One look at the host device."""
    if lock.held():
        return Check(when, "clear", "the device lock is ours")
    owner = lock.owner()
    if owner is not None and owner.pid != os.getpid():
        return Check(when, "contended", f"the device lock is held by {owner}")
    return Check(when, "unknown", "the lock file was removed or replaced, so others cannot be seen")


def record(checks: Sequence[Check], others_cpu: Sequence[float]) -> ContentionRecord:
    """Put the looks together with the mean of the CPU readings."""
    mean = sum(others_cpu) / len(others_cpu) if others_cpu else None
    return ContentionRecord(tuple(checks), mean)
