"""Whole commands against a scripted engine process: order, exit codes, and what the store holds afterwards."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runner.cli.compose import compose
from runner.errors import Contended, UserError
from runner.execution.execute import execute
from runner.plan.jobs import Plan, make_plan
from runner.plan.settings import PROJECT
from runner.record.tracking import Tracker, embedded_uri
from runner.watch.lock import DeviceLock
from tests.runner.support import worker


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with tables and nothing in it, to copy: making one takes seconds."""
    folder = tmp_path_factory.mktemp("empty")
    assert Tracker(folder, "sqlite:///" + str(folder / "mlflow.db"), "unused").ready()
    return folder


@pytest.fixture
def place(tmp_path: Path, empty_store: Path) -> Path:
    """A folder with a store, locks, and a model that nobody reads."""
    (tmp_path / "store").mkdir()
    shutil.copy(empty_store / "mlflow.db", tmp_path / "store" / "mlflow.db")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return tmp_path


def plan_of(place: Path, *arguments: str) -> Plan:
    paths = [f"paths.store={place / 'store'}", f"paths.locks={place / 'locks'}"]
    composed = compose([*arguments, "tokens=8", *paths])
    assert composed is not None
    return make_plan(composed.jobs, composed.sweep, default_model=lambda _: place / "model.gguf")


def command(place: Path, *arguments: str, flags: tuple[str, ...] = ()) -> tuple[int, str]:
    screen = io.StringIO()
    code = execute(plan_of(place, *arguments), worker=worker(*flags), file=screen)
    return code, screen.getvalue()


def runs(place: Path) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=embedded_uri(place / "store"))
    experiment = client.get_experiment_by_name("ebb")
    if experiment is None:
        return []
    return list(reversed(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])))


def status_by_name(place: Path) -> dict[str, str]:
    return {run.info.run_name.split(" ")[0]: run.info.status for run in runs(place)}


def test_the_main_job_runs_reference_and_baseline_first_and_records_everything(place: Path) -> None:
    code, said = command(place, "arm=elastic", "headroom=512MiB")
    assert code == 0, said
    order = [said.index(f"\n{name}") for name in ("reference ", "baseline ", "elastic-512MiB ")]
    assert order == sorted(order)
    assert "4.0x fewer" in said
    assert status_by_name(place) == {"baseline": "FINISHED", "elastic-512MiB": "FINISHED"}
    run = runs(place)[-1]
    assert run.data.params["headroom_bytes"] == str(512 << 20)
    assert run.data.params["arm"] == "elastic"
    assert run.data.metrics["htod_bytes_per_token"] > 0
    assert run.data.metrics["device_resident_peak_bytes"] == run.data.metrics["peak_committed_bytes"]
    assert run.data.metrics["sampler_cpu_fraction"] < 0.05
    assert run.data.tags["gate.tokens"] == "pass" and run.data.tags["gate.capture"] == "not_applicable"
    assert any(key.startswith("samples/") for key in run.data.metrics)
    artifacts = {p.name for p in Path(run.info.artifact_uri.removeprefix("file://")).iterdir()}
    assert artifacts == {
        "child.log", "config.yaml", "report.md", "result.json", "samples.jsonl", "text.txt", "tokens.json",
    }  # fmt: skip


def test_a_second_run_reuses_reference_and_baseline(place: Path) -> None:
    command(place, "arm=elastic")
    code, said = command(place, "arm=elastic")
    assert code == 0
    assert "reference " not in said and "\nbaseline " not in said.split("weight budget")[0]
    assert "baseline counters are from run" in said and "another session" in said


def test_a_sweep_goes_on_after_a_crash_and_ends_with_the_worst(place: Path) -> None:
    arguments = ("-m", "arm=elastic,wddm_legacy,baseline,resident", "headroom=0,512MiB")
    code, said = command(place, *arguments, flags=("die-wddm",))
    assert code == 4
    assert said.index("\nbaseline ") < said.index("\nelastic-0 ") < said.index("\nresident ")
    assert "crashed   wddm_legacy: killed by signal 9" in said
    assert status_by_name(place) == {
        "sweep": "FAILED",
        "baseline": "FINISHED",
        "elastic-0": "FINISHED",
        "elastic-512MiB": "FINISHED",
        "wddm_legacy": "KILLED",
        "resident": "FINISHED",
    }
    (report,) = (place / "store" / "results").glob("*-sweep-*/report.md")
    assert "| htod bytes/token |" in report.read_text()
    assert str(report) in said
    parent = next(run for run in runs(place) if run.info.run_name.startswith("sweep"))
    children = [run for run in runs(place) if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(children) == 5


@pytest.mark.parametrize("flag", ["wrong-token", "wrong-digest", "spill", "not-lending", "nan"])
def test_a_failed_gate_fails_the_run(place: Path, flag: str) -> None:
    command(place, "arm=elastic")
    code, said = command(place, "arm=elastic", flags=(flag,))
    assert code == 1
    assert "✗" in said and "not offered as a result" in said
    run = runs(place)[-1]
    assert run.info.status == "FAILED"
    assert "fail" in [v for k, v in run.data.tags.items() if k.startswith("gate.")]
    assert "htod_bytes_per_token" not in run.data.metrics


def test_a_failed_baseline_is_not_kept(place: Path) -> None:
    code, said = command(place, "arm=baseline", flags=("spill",))
    assert code == 1, said
    assert not list((place / "store" / "results").glob("baseline-*.json"))


@pytest.mark.parametrize(("flag", "status"), [("exit-4", "FAILED"), ("segv", "FAILED"), ("die-at-load", "KILLED")])
def test_a_crash_is_exit_code_4_and_never_left_running(place: Path, flag: str, status: str) -> None:
    command(place, "arm=baseline")
    code, said = command(place, "arm=baseline", flags=(flag,))
    assert code == 4
    assert "child.log" in said
    assert [run.info.status for run in runs(place)] == ["FINISHED", status]


def test_what_the_engine_refuses_is_bad_input(place: Path) -> None:
    with pytest.raises(UserError, match="the KV reservation does not fit"):
        command(place, "arm=baseline", flags=("refuse",))
    assert runs(place) == []


def test_a_batch_sweep_logs_by_rows_and_survives_a_refused_size(place: Path) -> None:
    code, said = command(place, "arm=batch_sweep", flags=("refuse-8",))
    assert code == 0, said
    assert "N=8" in said and "refused: the KV reservation does not fit the limit" in said
    (run,) = runs(place)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=embedded_uri(place / "store"))
    steps = [m.step for m in client.get_metric_history(run.info.run_id, "htod_bytes_per_token")]
    assert steps == [1, 2, 4]


def test_where_the_plain_loop_does_not_fit_the_baseline_is_the_reference(place: Path) -> None:
    code, said = command(place, "arm=elastic", flags=("no-plain-loop",))
    assert code == 0, said
    assert "the reference is a baseline run" in said
    by_name = {run.info.run_name: run for run in runs(place)}
    assert by_name["baseline"].data.tags["gate.tokens"] == "reference"
    assert by_name["elastic-0"].data.tags["gate.tokens"] == "pass"


def test_repeats_alternate_with_the_baseline(place: Path) -> None:
    code, said = command(place, "arm=elastic", "repeats=2")
    assert code == 0
    order = [line.split()[0] for line in said.splitlines() if "gen 3/3" in line]
    assert order == ["reference", "baseline", "elastic-0", "elastic-0", "baseline"]
    assert "median of 2 runs" in said and "repeats ✓ equal counters" in said
    assert len(runs(place)) == 2


def test_a_device_that_is_held_is_exit_code_3(place: Path) -> None:
    with DeviceLock(place / "locks", "host"), pytest.raises(Contended):
        command(place, "arm=baseline")
    assert runs(place) == []


def test_a_store_that_breaks_costs_its_copy_and_not_the_result(place: Path) -> None:
    (place / "store" / "mlflow.db").write_bytes(b"not a database" * 100)
    code, said = command(place, "arm=baseline")
    assert code == 0
    assert "cannot be used" in said and "the results are kept in" in said
    (result,) = (place / "store" / "results").glob("*-baseline-*/result.json")
    assert json.loads(result.read_text())["valid"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_child_and_marks_the_run_killed(place: Path, number: signal.Signals) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
from pathlib import Path
from runner.execution.execute import execute
from tests.runner.support import worker
from tests.runner.execution.test_execute import plan_of
sys.exit(execute(plan_of(Path({str(place)!r}), "-m", "arm=baseline,elastic"), worker=worker("slow")))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list((place / "store" / "results").glob("*-baseline-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "killed    baseline: interrupted" in said and "not run   elastic-0" in said
    assert set(status_by_name(place).values()) == {"KILLED"}
    (result,) = (place / "store" / "results").glob("*-baseline-*/result.json")
    pid = json.loads(result.read_text())["parts"][0]["runs"][0]["pid"]
    assert not Path(f"/proc/{pid}").exists()
