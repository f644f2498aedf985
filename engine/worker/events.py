"""Events of a child process: JSON lines on its standard output, and the hand-shake before the measured window."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

_PROGRESS_EVERY_S = 0.1


class Events:
    """Writes events; the pipe is a private copy of standard output, so that a library's print cannot tear a line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event with the time of day."""
        self._out.write(json.dumps({"event": event, "t": time.time(), **fields}) + "\n")
        self._out.flush()


class Progress:
    """Progress events, throttled. Usable as :data:`engine.decode.loop.OnStep`."""

    def __init__(self, events: Events, generations: int, steps: int) -> None:
        self._events, self._generations, self._steps = events, generations, steps
        self._last = 0.0
        self._first_token_told = False

    def __call__(self, generation: int, step: int, phase: str) -> None:
        if step >= 1 and not self._first_token_told:
            self._first_token_told = True
            self._events.emit("first_token", generation=generation)
        now = time.monotonic()
        if now - self._last >= _PROGRESS_EVERY_S or step == self._steps:
            self._last = now
            self._events.emit(
                "progress", generation=generation, generations=self._generations, step=step, steps=self._steps,
                phase=phase,
            )  # fmt: skip


def wait_for_go(events: Events) -> None:
    """Say ``ready`` and block until the parent says ``go`` (or closes the pipe)."""
    events.emit("ready")
    sys.stdin.readline()
