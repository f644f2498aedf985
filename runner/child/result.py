"""How a child ended, and in what words."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# Errors a child names itself: they are told as they are, and are no crash.
_NAMED = ("request", "model", "capacity", "logits")


@dataclass(frozen=True)
class ChildLimits:
    """Seconds: ``silence_s`` without any event, ``overall_s`` in all, ``exit_s`` to exit after the last event,
    ``term_s`` between SIGTERM and SIGKILL."""

    silence_s: float = 600.0
    overall_s: float = 6 * 3600.0
    exit_s: float = 30.0
    term_s: float = 3.0


@dataclass(frozen=True)
class ChildResult:
    """How one child ended.

    ``record`` is the body of its result event, ``error`` its error event. ``crash`` says in words why it ended
    without a usable result and without an error of its own kind; ``interrupted`` that we ended it because we were asked
    to. ``garbage`` counts lines that were no event.
    """

    pid: int
    exit_code: int | None
    record: dict[str, Any] | None
    error: dict[str, Any] | None
    crash: str | None
    interrupted: bool
    started: float
    ended: float
    garbage: int
    events: tuple[Event, ...]

    def event(self, name: str) -> Event | None:
        """The last event of that name, or None. Progress events are not kept."""
        return next((e for e in reversed(self.events) if e["event"] == name), None)


def crash_reason(code: int | None, record: Event | None, error: Event | None, log: Path) -> str | None:
    """Why a child that we did not end ended without a usable result, or None when it did not.

    ``code`` is its exit code, negative for a signal; ``log`` is what it wrote to stderr.
    """
    if error is not None and code is not None and code >= 0:
        if error.get("kind") in _NAMED:
            return None
        first_line = str(error.get("message", "no message")).partition("\n")[0]
        return f"exit code {code}: {first_line}"
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
        hint = "; the machine may have run out of memory" if -code == signal.SIGKILL else ""
        return f"killed by signal {-code} ({name}){hint}"
    if code != 0:
        return f"exit code {code}: {_last_words(log)}"
    return None if record is not None else "exit code 0 without a result"


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [x.strip() for x in log.read_bytes()[-4096:].decode(errors="replace").splitlines()]
        return next((x[:200] for x in reversed(lines) if x), "nothing in its log")
    return "its log cannot be read"
