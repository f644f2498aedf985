"""Runs in a real sqlite store: what is written, what status a run ends with, and what a broken store costs."""

from __future__ import annotations

import math
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runner.errors import UserError
from runner.execution.services import check_writable
from runner.plan.settings import PROJECT
from runner.record.tracking import Point, RunContent, Tracker, embedded_uri


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that exists: making one takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    assert Tracker(folder, None, "ebb").ready()
    return folder


def client(store: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=embedded_uri(store))


def tracker(store: Path) -> Tracker:
    return Tracker(store, None, "ebb")


def test_a_run_holds_what_it_was_given(store: Path, tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("# report")
    t = tracker(store)
    started = time.time() - 100
    run_id = t.begin("elastic-512MiB", started, {"ebb.label": "x"})
    assert run_id is not None
    points = [Point("htod_bytes_per_token", 12.5, started + 1, 0)]
    points += [Point("samples/device_resident_bytes", float(i), started + i * 0.3, i) for i in range(2500)]
    content = RunContent({"arm": "elastic"}, points, {"gate.tokens": "pass"}, tmp_path)
    assert t.finish(run_id, "FINISHED", content)

    run = client(store).get_run(run_id)
    assert run.info.run_name == "elastic-512MiB" and run.info.status == "FINISHED"
    assert run.data.params == {"arm": "elastic"}
    assert run.data.metrics["htod_bytes_per_token"] == 12.5
    assert run.data.tags["gate.tokens"] == "pass"
    history = client(store).get_metric_history(run_id, "samples/device_resident_bytes")
    assert len(history) == 2500
    assert min(m.timestamp for m in history) == int(started * 1000)
    assert [a.path for a in client(store).list_artifacts(run_id)] == ["report.md"]
    assert str(store / "artifacts") in run.info.artifact_uri


def test_the_store_is_where_it_is_whatever_the_working_directory(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    t = tracker(store)
    run_id = t.begin("here", time.time(), {})
    assert t.finish(run_id, "FINISHED", RunContent())
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_process_is_gone_is_closed_at_the_next_start(store: Path) -> None:
    script = (
        f"import os, sys, time; sys.path.insert(0, {str(PROJECT)!r})\n"
        "from pathlib import Path\nfrom runner.record.tracking import Tracker\n"
        f"print(Tracker(Path({str(store)!r}), None, 'ebb').begin('left', time.time(), {{}}), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    left = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    run_id = left.stdout.strip()
    assert client(store).get_run(run_id).info.status == "RUNNING"

    alive = tracker(store)
    own = alive.begin("alive", time.time(), {})
    assert run_id in alive.closed_stale
    run = client(store).get_run(run_id)
    assert run.info.status == "KILLED"
    assert "ended without closing this run" in run.data.tags["ebb.closed"]

    later = tracker(store)
    assert later.ready()
    assert own not in later.closed_stale, "the process of that run is alive: it is this one"
    alive.finish(own, "FINISHED", RunContent())


@pytest.mark.slow
def test_two_processes_make_one_store(tmp_path: Path) -> None:
    script = (
        f"import sys, time; sys.path.insert(0, {str(PROJECT)!r})\n"
        "from pathlib import Path\nfrom runner.record.tracking import RunContent, Tracker\n"
        f"t = Tracker(Path({str(tmp_path)!r}), None, 'ebb')\n"
        "r = t.begin('x', time.time(), {}); print(t.finish(r, 'FINISHED', RunContent()), t.problem)\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [out for out, _ in said] == ["True None\n"] * 2
    assert [err for _, err in said] == ["", ""], "MLflow prints nothing of its own"


def test_a_damaged_store_is_one_line_and_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is not a database" * 100)
    t = tracker(tmp_path)
    assert t.begin("x", time.time(), {}) is None
    assert t.problem is not None and "\n" not in t.problem and "cannot be used" in t.problem
    assert not t.finish(None, "FINISHED", RunContent())


def test_a_locked_store_does_not_hold_us_up(store: Path) -> None:
    t = Tracker(store, None, "ebb", patience_s=1.0)
    run_id = t.begin("locked", time.time(), {})
    with sqlite3.connect(store / "mlflow.db") as other:
        other.execute("BEGIN EXCLUSIVE")
        begun = time.monotonic()
        assert not t.finish(run_id, "FINISHED", RunContent({"a": "b"}))
        assert time.monotonic() - begun < 3.0
        other.rollback()
    assert t.problem is not None and "did not answer within 1 s" in t.problem


def test_a_half_written_run_is_not_finished(store: Path) -> None:
    t = tracker(store)
    run_id = t.begin("half", time.time(), {})
    assert not t.finish(run_id, "FINISHED", RunContent({"bad(name)": "x"}))
    assert t.problem is not None
    assert client(store).get_run(run_id).info.status == "FAILED"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_not_logged(value: float) -> None:
    from runner.record.figures import figures

    found = figures({"counters": {"floor_ratio": value, "hit_rate": None, "htod_bytes_per_token": 1}}, {}, {}, None)
    assert found.metrics() == {"htod_bytes_per_token": 1.0}


def test_a_store_that_cannot_be_written_is_found_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written") as caught:
        check_writable(tmp_path / "file" / "store", None)
    assert caught.value.exit_code == 2
    with pytest.raises(UserError):
        check_writable(tmp_path, f"sqlite:///{tmp_path / 'file' / 'x.db'}")
    check_writable(tmp_path / "new", None)
    assert sorted(os.listdir(tmp_path / "new")) == ["results"]
