"""Ctrl-C and SIGTERM as a flag that waiting code looks at, so that clean-up is never cut in half.

A handler that raises can raise anywhere, also inside the code that marks a run as killed. Here a signal only sets the
flag and wakes whoever waits. A second one changes nothing: clean-up has bounds of its own, and cutting it in half
would leave the run RUNNING in the store.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether the user asked to stop. ``reason`` is the signal's name, or None."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._wakers: list[Callable[[], None]] = []
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self._event.is_set()

    def request(self, reason: str) -> None:
        """Ask to stop; safe to call from a signal handler."""
        self.reason = self.reason or reason
        self._event.set()
        for wake in tuple(self._wakers):
            wake()

    def wait(self, seconds: float) -> bool:
        """Sleep up to ``seconds``; True as soon as a stop was asked for."""
        return self._event.wait(seconds)

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call ``wake`` on a stop while the block runs. ``wake`` must be safe in a signal handler."""
        self._wakers.append(wake)
        try:
            yield
        finally:
            self._wakers.remove(wake)


@contextlib.contextmanager
def watching_signals() -> Iterator[Stop]:
    """A :class:`Stop` that SIGINT, SIGTERM and SIGHUP set while the block runs; handlers are put back after it.

    Outside the main thread signals cannot be watched; the Stop then only reacts to ``request``.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous: dict[signal.Signals, Any] = {}

    def handle(number: int, _frame: FrameType | None) -> None:
        stop.request(signal.Signals(number).name)

    for number in _SIGNALS:
        # A signal that was ignored at the start (nohup) stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
