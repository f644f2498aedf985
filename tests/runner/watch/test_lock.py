"""One process holds a device; others are told who, and the kernel gives it back when the holder dies."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.child.signals import Stop
from runner.errors import Contended, Interrupted, UserError
from runner.plan.settings import PROJECT
from runner.watch.contention import look, record
from runner.watch.lock import DeviceLock


@contextlib.contextmanager
def other_holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    script = (
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
        "from pathlib import Path\nfrom runner.watch.lock import DeviceLock\n"
        f"lock = DeviceLock(Path({str(folder)!r}), 'host'); lock.acquire(); print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_told_who_holds_it(tmp_path: Path) -> None:
    with other_holder(tmp_path) as other, pytest.raises(Contended) as caught:
        DeviceLock(tmp_path, "host").acquire()
    assert f"device host is in use: pid {other.pid} " in caught.value.line
    assert "python" in caught.value.line
    assert caught.value.hint is not None and "contention.wait" in caught.value.hint
    assert caught.value.exit_code == 3


def test_a_killed_holder_leaves_no_stale_lock(tmp_path: Path) -> None:
    with other_holder(tmp_path) as other:
        other.kill()
        other.wait()
        lock = DeviceLock(tmp_path, "host")
        lock.acquire()
        assert lock.held()
        owner = lock.owner()
        assert owner is not None and owner.pid == os.getpid()
        lock.release()


def test_waiting_ends_when_the_holder_does(tmp_path: Path) -> None:
    with other_holder(tmp_path) as other:
        threading.Timer(0.4, other.kill).start()
        begun = time.monotonic()
        lock = DeviceLock(tmp_path, "host")
        lock.acquire(wait_s=10.0)
        assert time.monotonic() - begun < 5.0
        assert lock.held()
        lock.release()


def test_waiting_ends_when_the_user_says_so(tmp_path: Path) -> None:
    stop = Stop()
    threading.Timer(0.2, lambda: stop.request("SIGINT")).start()
    with other_holder(tmp_path), pytest.raises(Interrupted):
        DeviceLock(tmp_path, "host").acquire(wait_s=30.0, stop=stop)


def test_devices_do_not_share_a_lock(tmp_path: Path) -> None:
    with DeviceLock(tmp_path, "host"), DeviceLock(tmp_path, "GPU-0") as other:
        assert other.held()


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be opened"):
        DeviceLock(tmp_path / "file" / "locks", "host").acquire()


def test_looks_are_clear_contended_or_unknown(tmp_path: Path) -> None:
    lock = DeviceLock(tmp_path, "host")
    with lock:
        assert look("before", lock).verdict == "clear"
        lock.path.unlink()
        assert look("during", lock).verdict == "unknown"
        with other_holder(tmp_path) as other:
            found = look("after", lock)
            assert found.verdict == "contended" and f"pid {other.pid}" in found.why
    assert record([found], []).verdict == "contended"
    assert record([], []).verdict == "unknown"


def test_cpu_of_others_marks_timings_and_never_refuses(tmp_path: Path) -> None:
    with DeviceLock(tmp_path, "host") as lock:
        looks = [look("before", lock)]
    busy, idle, blind = record(looks, [40.0, 60.0]), record(looks, [1.0]), record(looks, [])
    assert busy.verdict == idle.verdict == blind.verdict == "clear"
    assert busy.timing_note is not None and "50 %" in busy.timing_note
    assert idle.timing_note is None
    assert blind.timing_note is not None
