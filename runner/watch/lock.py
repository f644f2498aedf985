"""One run at a time on a device: a kernel lock across processes, per device.

The lock is ``flock`` on a file: the kernel drops it when its holder dies, however it dies, so there is no stale lock to
clear. The file stays; who holds it is written inside for the message others see.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.child.signals import Stop
from runner.errors import Contended, Interrupted, UserError

_POLL_S = 0.2


@dataclass(frozen=True)
class Owner:
    """Who holds a lock, as it wrote about itself."""

    pid: int
    command: str
    since: str
    host: str

    def __str__(self) -> str:
        return f'pid {self.pid} "{self.command}" since {self.since}'


class DeviceLock:
    """The lock of one device. ``folder`` is made if missing.

    Raises
    ------
    Contended
        On :meth:`acquire`, when another process holds it; the message names its pid and command.
    UserError
        On :meth:`acquire`, when the lock file cannot be opened.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.path = folder / f"{device}.lock"
        self._fd: int | None = None

    def acquire(
        self,
        wait_s: float = 0.0,
        stop: Stop | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take the lock, waiting up to ``wait_s`` seconds; a ``stop`` ends the wait with Interrupted. ``say`` is told
        once who is waited for."""
        deadline = time.monotonic() + wait_s
        told = False
        fd = self._open()
        try:
            while not _try_lock(fd):
                left = deadline - time.monotonic()
                if stop is not None and stop.requested:
                    raise Interrupted("interrupted while waiting for the device")
                if left <= 0:
                    raise Contended(self._busy(fd), "wait for it with contention.wait=10m")
                if not told:
                    say(f"waiting for the device: {self._busy(fd)}")
                    told = True
                if stop is not None:
                    stop.wait(min(_POLL_S, left))
                else:
                    time.sleep(min(_POLL_S, left))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._write_owner(fd)

    def release(self) -> None:
        """Give it up; nothing happens when it is not held."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)
        self._fd = None

    def held(self) -> bool:
        """Whether we hold the lock others would meet: the file may have been replaced under us."""
        if self._fd is None:
            return False
        try:
            ours, there = os.fstat(self._fd), os.stat(self.path)
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def owner(self) -> Owner | None:
        """Who wrote itself into the file, or None when nobody did."""
        try:
            return _parse_owner(self.path.read_text(encoding="utf-8"))
        except OSError:
            return None

    def __enter__(self) -> DeviceLock:
        if self._fd is None:
            self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _open(self) -> int:
        folder = self.path.parent
        new = [(path, mode) for path, mode in ((folder, 0o1777), (self.path, 0o666)) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            line = f"the device lock {self.path} cannot be opened: {error.strerror}"
            raise UserError(line, "choose another folder with paths.locks=FOLDER") from error
        # The umask would shut other users out, and a lock they cannot open is one they do not see.
        for path, mode in new:
            with contextlib.suppress(OSError):
                path.chmod(mode)
        return fd

    def _busy(self, fd: int) -> str:
        owner = _parse_owner(os.pread(fd, 4096, 0).decode(errors="replace"))
        who = str(owner) if owner else "a process that has not said who it is"
        return f"device {self.device} is in use: {who}"

    def _write_owner(self, fd: int) -> None:
        owner = {
            "pid": os.getpid(),
            "command": " ".join(sys.orig_argv)[:200],
            "since": time.strftime("%H:%M:%S"),
            "host": socket.gethostname(),
        }
        # The message of others is poorer without it, the lock is not weaker.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(owner).encode(), 0)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _parse_owner(text: str) -> Owner | None:
    try:
        data: dict[str, Any] = json.loads(text)
        return Owner(int(data["pid"]), str(data["command"]), str(data["since"]), str(data["host"]))
    except (ValueError, KeyError, TypeError):
        return None
