"""One engine process: started, listened to, and always ended.

The child gets a process group of its own, so that everything it started ends with it, and a parent-death signal, so
that it ends with us even when we are killed with a signal nobody can catch. It speaks JSON lines on stdout; what
does not parse is kept in its log and changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from runner.child.result import ChildLimits, ChildResult, Event, crash_reason
from runner.child.signals import Stop

WORKER: tuple[str, ...] = (sys.executable, "-m", "engine.worker")

# The signal is set by the process that will become the child, after the fork and before the exec: it survives the
# exec. Done here and not in a preexec_fn, which is not safe with threads in the parent. The parent may have died
# before the call, hence the second look.
_GUARD = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""

_MAX_LINE = 64 << 20
_MAX_GARBAGE = 1 << 20
_READ = 1 << 16
_LOOK_S = 1.0
_END: Event = {"event": "__end__"}
_WAKE: Event = {"event": "__wake__"}


class Child:
    """A running child. Use :func:`run_child` unless the steps are needed one by one."""

    def __init__(
        self,
        job: Mapping[str, Any],
        log: Path,
        *,
        worker: Sequence[str] = WORKER,
        limits: ChildLimits | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._limits = limits or ChildLimits()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._kept: list[Event] = []
        self._garbage = 0
        self._asked_to_end: str | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = log.open("ab", buffering=0)
        self.log = log
        self.started = time.time()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=None if environment is None else dict(environment),
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"child-{self.pid}", daemon=True)
        self._reader.start()
        self._send(json.dumps(job))

    def run(
        self,
        stop: Stop,
        on_event: Callable[[Event], None] = lambda _: None,
        before_go: Callable[[], None] = lambda: None,
    ) -> ChildResult:
        """Listen until the child has ended, and end it if it does not.

        ``before_go`` is called when the child says it is ready and may block; "go" is sent when it returns. Time spent
        there does not count as the child's silence.
        """
        begun = last = time.monotonic()
        try:
            with stop.waking(lambda: self._events.put(_WAKE)):
                while True:
                    now = time.monotonic()
                    if stop.requested:
                        self._asked_to_end = "interrupted"
                        break
                    overdue = self._overdue(now - last, now - begun)
                    if overdue:
                        self._asked_to_end = overdue
                        break
                    event = self._next(_LOOK_S)
                    if event is None:
                        if self._exited():
                            break
                        continue
                    if event is _END:
                        break
                    if event is _WAKE:
                        continue
                    self._keep(event)
                    on_event(event)
                    if event["event"] == "ready":
                        before_go()
                        self._send("go")
                    last = time.monotonic()
        finally:
            code = self.end()
        return self._result(code, interrupted=stop.requested and self._asked_to_end == "interrupted")

    def end(self) -> int | None:
        """End the child and its group: by itself if it is about to, else SIGTERM, else SIGKILL. Returns its exit code
        (negative for a signal). Safe to call twice."""
        if self._process.returncode is None:
            if self._asked_to_end is None and not self._wait(self._limits.exit_s):
                self._asked_to_end = f"did not exit within {self._limits.exit_s:g} s of its last event"
            if not self._exited():
                self._signal(signal.SIGTERM)
                self._wait(self._limits.term_s)
            # Also after a clean exit: whatever it started goes too. The child is not reaped yet, so
            # the group's number cannot belong to anyone else.
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._reader.join(timeout=5.0)
        while (event := self._next(0)) is not None:
            if event is not _END and event is not _WAKE:
                self._keep(event)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return self._process.returncode

    def _result(self, code: int | None, interrupted: bool) -> ChildResult:
        record = next((e for e in reversed(self._kept) if e["event"] == "result"), None)
        error = next((e for e in reversed(self._kept) if e["event"] == "error"), None)
        crash = None
        if not interrupted:
            crash = self._asked_to_end or crash_reason(code, record, error, self.log)
        return ChildResult(
            pid=self.pid,
            exit_code=code,
            record=record if crash is None and not interrupted and error is None else None,
            error=error,
            crash=crash,
            interrupted=interrupted,
            started=self.started,
            ended=time.time(),
            garbage=self._garbage,
            events=tuple(e for e in self._kept if e["event"] != "result"),
        )

    def _overdue(self, silent: float, total: float) -> str | None:
        if silent > self._limits.silence_s:
            return f"no event for {self._limits.silence_s:g} s"
        if total > self._limits.overall_s:
            return f"not finished after {self._limits.overall_s:g} s"
        return None

    def _keep(self, event: Event) -> None:
        if event["event"] != "progress":
            self._kept.append(event)

    def _next(self, seconds: float) -> Event | None:
        try:
            return self._events.get(timeout=seconds) if seconds else self._events.get_nowait()
        except queue.Empty:
            return None

    def _send(self, line: str) -> None:
        # A child that is gone shows in its exit code; a failed write has nothing to add.
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode() + b"\n")

    def _exited(self) -> bool:
        """Whether it has exited, without reaping it."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        pause = 0.002
        while not self._exited():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        return True

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        """Reader thread: stdout to events. Lines over the bound are dropped, and counted as garbage."""
        stream = self._process.stdout
        assert stream is not None
        pending, dropping = bytearray(), False
        try:
            while chunk := stream.read(_READ):
                *complete, rest = chunk.split(b"\n")
                for part in complete:
                    if dropping:
                        self._note(b"", "a line over the bound was dropped")
                    else:
                        self._line(bytes(pending + part))
                    pending, dropping = bytearray(), False
                if not dropping:
                    pending += rest
                if len(pending) > _MAX_LINE:
                    pending, dropping = bytearray(), True
            if pending or dropping:
                self._line(bytes(pending))
        except (OSError, ValueError):
            pass  # closed under us while the child is being ended
        finally:
            self._events.put(_END)

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str) and not event["event"].startswith("__"):
            self._events.put(event)
        else:
            self._note(line, "not an event")

    def _note(self, line: bytes, why: str) -> None:
        self._garbage += 1
        if self._garbage * 200 < _MAX_GARBAGE:
            with contextlib.suppress(OSError, ValueError):
                self._log.write(b"[stdout, %s] %s\n" % (why.encode(), line[:200]))


def run_child(
    job: Mapping[str, Any],
    log: Path,
    stop: Stop,
    on_event: Callable[[Event], None] = lambda _: None,
    before_go: Callable[[], None] = lambda: None,
    *,
    worker: Sequence[str] = WORKER,
    limits: ChildLimits | None = None,
) -> ChildResult:
    """Start a child with ``job``, listen to it, end it. See :class:`Child`."""
    return Child(job, log, worker=worker, limits=limits).run(stop, on_event, before_go)
