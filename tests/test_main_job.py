"""The main job as a user runs it: the real model, the real runner in its own process, a real store."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.cli.compose import compose
from runner.execution.execute import execute
from runner.plan.jobs import make_plan

PROJECT = Path(__file__).parents[1]
PINNED = json.loads((PROJECT / "tests" / "data" / "golden.json").read_text())["default_workload"]


@dataclass(frozen=True)
class Store:
    """A store of its own, and commands that use it."""

    path: Path
    model: Path

    def settings(self) -> list[str]:
        return [f"paths.store={self.path / 'store'}", f"paths.locks={self.path / 'locks'}", f"model.path={self.model}"]

    def run(self, *arguments: str, flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(PROJECT / "run.py"), *flags, *arguments, *self.settings()],
            capture_output=True,
            text=True,
            cwd=self.path,
            timeout=280,
        )

    def runs(self) -> dict[str, Any]:
        """Runs of the store by name, newest last."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{self.path / 'store' / 'mlflow.db'}")
        ids = [experiment.experiment_id for experiment in client.search_experiments()]
        found = client.search_runs(ids, order_by=["attributes.start_time ASC"])
        return {run.info.run_name: run for run in found}

    def artifacts(self, run: Any) -> set[str]:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{self.path / 'store' / 'mlflow.db'}")
        return {item.path for item in client.list_artifacts(run.info.run_id)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> Store:
    return Store(tmp_path_factory.mktemp("main"), real_model)


@pytest.fixture(scope="module")
def main_job(store: Store) -> subprocess.CompletedProcess[str]:
    return store.run("arm=elastic", "headroom=512MiB")


def test_the_main_job_passes_and_shows_the_effect(main_job: subprocess.CompletedProcess[str], store: Store) -> None:
    assert main_job.returncode == 0, main_job.stderr + main_job.stdout
    runs = store.runs()
    elastic, baseline = runs["elastic-512MiB"], runs["baseline"]
    assert elastic.info.status == baseline.info.status == "FINISHED"
    ours, theirs = (run.data.metrics["htod_bytes_per_token"] for run in (elastic, baseline))
    assert ours * 4 <= theirs
    assert elastic.data.tags["gate.tokens"] == elastic.data.tags["gate.residency"] == "pass"
    assert elastic.data.params["arm"] == "elastic"
    assert elastic.data.params["headroom_bytes"] == str(512 << 20)


def test_its_tokens_are_the_pinned_ones(main_job: subprocess.CompletedProcess[str], store: Store) -> None:
    (found,) = (store.path / "store" / "results").glob("*elastic-512MiB*/tokens.json")
    assert json.dumps(list(PINNED["prompts"].values())) in json.dumps(json.loads(found.read_text()))


def test_device_memory_seen_from_outside_stays_within_the_charge(
    main_job: subprocess.CompletedProcess[str], store: Store
) -> None:
    metrics = store.runs()["elastic-512MiB"].data.metrics
    assert 0 < metrics["device_resident_peak_bytes"] <= metrics["budget_bytes"] + (24 << 20) + (32 << 20)
    assert metrics["device_resident_peak_bytes"] < PINNED["weights"]


def test_counters_samples_and_artifacts_are_in_the_store(
    main_job: subprocess.CompletedProcess[str], store: Store
) -> None:
    run = store.runs()["elastic-512MiB"]
    for name in ("byte_hit_rate", "floor_ratio", "peak_committed_bytes", "tokens_per_s", "streaming_floor_bytes"):
        assert name in run.data.metrics
    assert store.artifacts(run) >= {"config.yaml", "tokens.json", "text.txt", "samples.jsonl", "report.md"}


def test_the_report_says_what_a_reader_needs(main_job: subprocess.CompletedProcess[str]) -> None:
    shown = main_job.stdout
    for words in (
        "weight budget", "htod bytes/token", "floor ratio", "byte hit rate", "peak committed", "peak resident",
        "tokens ✓ identical", "lending was not called back in this run", "one pair: no verdict", " Paris.",
    ):  # fmt: skip
        assert words in shown, words
    assert "Traceback" not in shown + main_job.stderr


def test_a_second_run_uses_the_stored_reference_and_baseline(
    main_job: subprocess.CompletedProcess[str], store: Store
) -> None:
    again = store.run("arm=elastic", "headroom=512MiB")
    assert again.returncode == 0
    assert not re.search(r"^(reference|baseline) ", again.stdout, re.MULTILINE)


def test_a_sweep_runs_every_distinct_job_once(main_job: subprocess.CompletedProcess[str], store: Store) -> None:
    done = store.run("arm=baseline,elastic,wddm_legacy,resident", "headroom=0,512MiB", flags=["-m"])
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"^(\S+) +16/16 +gen 3/3", done.stdout, re.MULTILINE)
    assert sorted(ran) == ["baseline", "elastic-0", "elastic-512MiB", "resident", "wddm_legacy"]
    assert "emulated" in done.stdout
    legacy = store.runs()["wddm_legacy"].data.metrics
    assert legacy["htod_bytes_per_token"] == 0
    assert legacy["in_place_bytes_per_token"] > 0


def test_each_lending_condition_turned_off_gives_the_static_budget_and_says_why(store: Store) -> None:
    for off, reason in (
        ("arm.lending=false", "lending is disabled"),
        ("arm.commits_on_demand=false", "KV does not commit on demand"),
        ("arm.managed=false", "not managed"),
    ):
        store.run("arm=elastic", off, "compare=none", "tokens=2", "generations.warmup=0", "generations.measured=1")
        newest = max((store.path / "store" / "results").glob("*elastic*/result.json"), key=os.path.getmtime)
        recorded = newest.read_text()
        assert reason in recorded
        assert '"bytes": 310755328' in recorded.replace('"bytes":310755328', '"bytes": 310755328')


def execute_with_fault(store: Store, capsys: pytest.CaptureFixture[str], fault: dict[str, Any]) -> tuple[int, str]:
    command = compose(["arm=elastic", "headroom=512MiB", "compare=none", *store.settings()])
    assert command is not None
    code = execute(make_plan(command.jobs, command.sweep), fault=fault)
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "overwrite", "generation": 1, "step": 5, "unit": 7, "granule": 100, "seed": 1},
        {"kind": "skip_copy"},
    ],
    ids=lambda fault: fault["kind"],
)
def test_a_planted_fault_fails_the_run(
    main_job: subprocess.CompletedProcess[str], store: Store, capsys: pytest.CaptureFixture[str], fault: dict[str, Any]
) -> None:
    code, shown = execute_with_fault(store, capsys, fault)
    assert code == 1
    assert re.search(r"tokens ✗ row \d, step \d+: expected \d+ .*, got \d+ .*\(generation \d\)", shown), shown
    run = store.runs()["elastic-512MiB"]
    assert run.info.status == "FAILED"
    assert run.data.tags["gate.tokens"] == "fail"


def test_poisoned_ring_slots_pass(
    main_job: subprocess.CompletedProcess[str], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = execute_with_fault(store, capsys, {"kind": "poison_ring"})
    assert code == 0, shown


def test_logits_that_are_not_finite_fail_the_run(
    main_job: subprocess.CompletedProcess[str], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = execute_with_fault(store, capsys, {"kind": "nan", "generation": 1, "step": 3, "unit": 7})
    assert code == 1
    assert "not finite" in shown


@pytest.mark.parametrize("how", [-signal.SIGKILL, -signal.SIGSEGV, 7])
def test_a_crash_of_the_arm_is_told_and_closes_its_run(
    main_job: subprocess.CompletedProcess[str], store: Store, capsys: pytest.CaptureFixture[str], how: int
) -> None:
    code, shown = execute_with_fault(store, capsys, {"kind": "exit", "generation": 1, "step": 3, "code": how})
    assert code == 4
    assert ("signal" if how < 0 else "exit code 7") in shown
    assert store.runs()["elastic-512MiB"].info.status == ("KILLED" if how == -signal.SIGKILL else "FAILED")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_killed_with_its_child(
    main_job: subprocess.CompletedProcess[str], store: Store, number: signal.Signals
) -> None:
    before = set(children_of_worker())
    process = subprocess.Popen(
        [sys.executable, str(PROJECT / "run.py"), "arm=elastic", "headroom=512MiB", "compare=none",
         "generations.measured=200", *store.settings()],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=store.path,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(run.info.status == "RUNNING" for run in store.runs().values()):
        time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert all(run.info.status != "RUNNING" for run in store.runs().values())
    assert store.runs()["elastic-512MiB"].info.status == "KILLED"
    assert set(children_of_worker()) <= before


def children_of_worker() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"engine.worker" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_one_token_a_row_is_a_run_too(main_job: subprocess.CompletedProcess[str], store: Store) -> None:
    done = store.run("arm=baseline", "tokens=1", "compare=none")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_output_that_is_full_costs_no_run(main_job: subprocess.CompletedProcess[str], store: Store) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(PROJECT / "run.py"), "arm=elastic", "compare=none", "tokens=3", *store.settings()],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=store.path, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert all(run.info.status != "RUNNING" for run in store.runs().values())
