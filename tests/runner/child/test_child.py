"""The child process: what it says is heard, and it always ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from runner.child.result import ChildLimits, ChildResult
from runner.child.signals import Stop
from runner.child.spawn import run_child
from runner.plan.settings import PROJECT
from tests.runner.support import config, worker

QUICK = ChildLimits(silence_s=5.0, overall_s=60.0, exit_s=2.0, term_s=0.3)


def run(tmp_path: Path, *flags: str, limits: ChildLimits = QUICK, stop: Stop | None = None, **more: Any) -> ChildResult:
    job = {"mode": "arm", "config": config().to_dict(), "fault": None}
    return run_child(job, tmp_path / "child.log", stop or Stop(), worker=worker(*flags), limits=limits, **more)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def until(condition: Any, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_good_run_gives_its_record(tmp_path: Path) -> None:
    heard: list[str] = []
    result = run(tmp_path, on_event=lambda event: heard.append(event["event"]))
    assert result.crash is None and result.error is None and result.exit_code == 0
    assert result.record is not None and result.record["schema"] == 1
    assert [name for name in dict.fromkeys(heard) if name != "progress"] == [
        "hello", "plan", "policy", "loaded", "first_token", "ready", "measure_start", "measure_end", "result",
    ]  # fmt: skip
    assert gone(result.pid)


def test_go_waits_for_the_parent(tmp_path: Path) -> None:
    returned: list[float] = []

    def before_go() -> None:
        time.sleep(0.4)
        returned.append(time.time())

    result = run(tmp_path, before_go=before_go)
    start = result.event("measure_start")
    assert start is not None and start["t"] >= returned[0]


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        pytest.param("die-at-load", "killed by signal 9 (SIGKILL); the machine may have run out of memory", id="kill"),
        pytest.param("segv", "killed by signal 11 (SIGSEGV)", id="segv"),
        pytest.param("exit-4", "exit code 4: a bug was met", id="error"),
        pytest.param("exit-3", "exit code 3: something went wrong here", id="stderr"),
        pytest.param("no-result", "exit code 0 without a result", id="empty"),
        pytest.param("linger", "did not exit within 2 s of its last event", id="linger"),
    ],
)
def test_crash_reasons(tmp_path: Path, flag: str, reason: str) -> None:
    limits = ChildLimits(silence_s=2.5, overall_s=60.0, exit_s=2.0, term_s=0.3)
    result = run(tmp_path, flag, limits=limits)
    if flag == "linger":  # its stdout stays open, so it is silence that ends it
        reason = "no event for 2.5 s"
    assert result.crash == reason
    assert result.record is None
    assert gone(result.pid)


@pytest.mark.parametrize(("flag", "kind"), [("refuse", "capacity"), ("nan", "logits")])
def test_an_error_of_its_own_kind_is_no_crash(tmp_path: Path, flag: str, kind: str) -> None:
    result = run(tmp_path, flag)
    assert result.crash is None and result.record is None
    assert result.error is not None and result.error["kind"] == kind


def test_a_hang_is_ended_even_when_it_ignores_sigterm(tmp_path: Path) -> None:
    limits = ChildLimits(silence_s=0.5, overall_s=60.0, exit_s=1.0, term_s=0.2)
    result = run(tmp_path, "hang", "deaf", limits=limits)
    assert result.crash == "no event for 0.5 s"
    assert result.exit_code == -signal.SIGKILL


def test_the_whole_run_has_a_limit(tmp_path: Path) -> None:
    limits = ChildLimits(silence_s=30.0, overall_s=0.5, exit_s=1.0, term_s=0.2)
    assert run(tmp_path, "slow", limits=limits).crash == "not finished after 0.5 s"


def test_garbage_is_kept_in_the_log_and_changes_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, "garbage")
    assert result.crash is None and result.record is not None
    assert result.garbage == 5
    assert "not json" in (tmp_path / "child.log").read_text(errors="replace")


def test_a_line_over_the_bound_is_dropped(tmp_path: Path) -> None:
    result = run(tmp_path, "huge")
    assert result.record is not None and result.garbage == 1
    assert (tmp_path / "child.log").stat().st_size < 10_000


def test_a_stop_ends_the_child(tmp_path: Path) -> None:
    stop = Stop()
    threading.Timer(0.5, lambda: stop.request("SIGINT")).start()
    begun = time.monotonic()
    result = run(tmp_path, "hang", stop=stop)
    assert result.interrupted and result.crash is None
    assert time.monotonic() - begun < 3.0
    assert gone(result.pid)


def test_what_the_child_started_ends_with_it(tmp_path: Path) -> None:
    result = run(tmp_path, "grandchild")
    assert result.record is not None

    def group() -> list[str]:
        out = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
        return [line for line in out.splitlines() if line.split()[0] == str(result.pid) and "Z" not in line]

    assert until(lambda: not group())


def test_a_parent_killed_with_sigkill_leaves_no_orphan(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
from pathlib import Path
from runner.child.spawn import run_child
from runner.child.signals import Stop
from tests.runner.support import config, worker
job = {{"mode": "arm", "config": config().to_dict(), "fault": None}}
run_child(job, Path({str(tmp_path / "child.log")!r}), Stop(), lambda e: print(e.get("pid", ""), flush=True),
          worker=worker("hang", "deaf"))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert until(lambda: gone(child))
