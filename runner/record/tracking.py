"""Runs in MLflow. Only this process writes, outside the measured region, in batches, and through one thread.

MLflow takes seconds to import and a locked database can block for more, so all of it happens in a thread of its own:
the import overlaps the child's load, and whoever waits for the store can stop waiting. What is recorded is in local
files first; a store that does not answer costs its copy, never the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runner.child.signals import Stop
from runner.watch.proc import process_start

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

# The time a person is willing to wait for a store that does not answer.
PATIENCE_S = 30.0
_POLL_S = 0.1
_BATCH = 1000
_SQLITE = "sqlite:///"
_OWNER_TAGS = ("ebb.host", "ebb.boot", "ebb.pid", "ebb.pid_start")


@dataclass(frozen=True)
class Point:
    """One point of a metric: ``t`` is Unix time in seconds."""

    name: str
    value: float
    t: float
    step: int


@dataclass(frozen=True)
class RunContent:
    """Everything a run is given when it ends. ``folder`` holds its artifacts."""

    params: Mapping[str, str] = field(default_factory=dict)
    points: Sequence[Point] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


def embedded_uri(store: Path) -> str:
    """The URI of the store inside ``store``: absolute, so that the working directory has no say."""
    return f"{_SQLITE}{store.absolute() / 'mlflow.db'}"


def database_path(uri: str) -> Path | None:
    """The file of a sqlite URI, absolute; None for any other store."""
    return Path(uri.removeprefix(_SQLITE)).absolute() if uri.startswith(_SQLITE) else None


def open_hint(uri: str) -> str:
    """How a person opens the store at ``uri``."""
    if uri.startswith(("http://", "https://")):
        return f"open the store at {uri}"
    return f"open the store with: mlflow server --backend-store-uri {uri}"


def tag_name(text: str) -> str:
    """``text`` as part of a tag's name: MLflow allows letters, digits, dash, dot, blank, colon, slash, underscore."""
    return re.sub(r"[^\w\-. :/]", "_", text)


class Tracker:
    """The store. Every call waits at most ``patience_s`` and never raises: a failure is a line in ``problem``."""

    def __init__(self, store: Path, uri: str | None, experiment: str, patience_s: float = PATIENCE_S) -> None:
        self._store = store
        self.uri = _absolute(uri) if uri is not None else embedded_uri(store)
        self._experiment = experiment
        self._patience = patience_s
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._opened: Future[Any] | None = None
        self._client: Any = None
        self._experiment_id = ""
        self.problem: str | None = None
        self.closed_stale: tuple[str, ...] = ()

    def start(self) -> None:
        """Import MLflow and open the store in the background. Does nothing the second time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
            self._thread.start()
            self._opened = self._submit(self._open)

    def ready(self, stop: Stop | None = None) -> bool:
        """Wait until the store is open. False, and ``problem`` says why, when it is not."""
        self.start()
        assert self._opened is not None
        self._wait(self._opened, stop)
        return self.problem is None

    def begin(self, name: str, started: float, tags: Mapping[str, str], stop: Stop | None = None) -> str | None:
        """Create a run (Unix time ``started``) and return its id, or None."""
        if not self.ready(stop):
            return None
        run_id: str | None = self._call(lambda: self._create(name, started, tags), stop)
        return run_id

    def finish(self, run_id: str | None, status: RunStatus, content: RunContent) -> bool:
        """Write everything and close the run. True when it is all in the store."""
        if run_id is None or self.problem is not None:
            return False
        return self._call(lambda: self._close(run_id, status, content), None) is not None

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Add tags to a run."""
        if self.problem is None:
            self._call(lambda: self._client.log_batch(run_id, tags=_tags(tags)), None)

    def _call(self, task: Callable[[], Any], stop: Stop | None) -> Any:
        return self._wait(self._submit(task), stop)

    def _submit(self, task: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    def _wait(self, future: Future[Any], stop: Stop | None) -> Any:
        deadline = time.monotonic() + self._patience
        while not future.done():
            if time.monotonic() > deadline:
                self.problem = self.problem or f"the store {self.uri} did not answer within {self._patience:g} s"
                return None
            if stop is not None and stop.requested:
                return None
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=_POLL_S)
        error = future.exception()
        if error is not None:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self.problem = self.problem or f"the store {self.uri} cannot be used: {reason}"
            return None
        return future.result()

    def _work(self) -> None:
        while True:
            future, task = self._tasks.get()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

    # Everything below runs in the tracking thread.

    def _open(self) -> bool:
        # Set before the import: MLflow reads them then. A measurement tool does not call home.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")
        # A server that is not there is found out in seconds, not in the minutes of MLflow's own defaults.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        warnings.filterwarnings("ignore", module=r"(mlflow|alembic|sqlalchemy|pydantic)(\..*)?")
        for name in ("mlflow", "alembic", "sqlalchemy", "git"):
            logging.getLogger(name).setLevel(logging.ERROR)
            logging.getLogger(name).addHandler(logging.NullHandler())
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        with _file_lock(self._store / ".mlflow.lock", self._patience):
            # Creating or migrating the database from two processes at once breaks it.
            self._client = MlflowClient(tracking_uri=self.uri)
            found = self._client.get_experiment_by_name(self._experiment)
            if found is None:
                database = database_path(self.uri)
                # Left to itself MLflow puts the artifacts of a local database below the working directory.
                place = (database.parent / "artifacts").as_uri() if database is not None else None
                self._experiment_id = self._client.create_experiment(self._experiment, artifact_location=place)
            else:
                self._experiment_id = found.experiment_id
            self.closed_stale = self._close_stale()
        return True

    def _close_stale(self) -> tuple[str, ...]:
        """End runs whose process is gone: nobody else ever will."""
        query = f"attributes.status = 'RUNNING' and tags.`ebb.host` = '{socket.gethostname()}'"
        closed = []
        for run in self._client.search_runs([self._experiment_id], filter_string=query, max_results=1000):
            if _owner_gone(run.data.tags):
                reason = f"process {run.data.tags.get('ebb.pid')} ended without closing this run"
                self._client.set_tag(run.info.run_id, "ebb.closed", reason)
                self._client.set_terminated(run.info.run_id, "KILLED")
                closed.append(run.info.run_id)
        return tuple(closed)

    def _create(self, name: str, started: float, tags: Mapping[str, str]) -> str:
        run = self._client.create_run(
            self._experiment_id,
            start_time=int(started * 1000),
            tags={**_owner(), **{k: v[:5000] for k, v in tags.items()}},
            run_name=name,
        )
        return str(run.info.run_id)

    def _close(self, run_id: str, status: RunStatus, content: RunContent) -> bool:
        from mlflow.entities import Metric, Param

        try:
            params = [Param(k, v[:6000]) for k, v in content.params.items()]
            self._client.log_batch(run_id, params=params, tags=_tags(content.tags))
            metrics = [Metric(p.name, p.value, int(p.t * 1000), p.step) for p in content.points]
            for start in range(0, len(metrics), _BATCH):
                self._client.log_batch(run_id, metrics=metrics[start : start + _BATCH])
            if content.folder is not None and content.folder.is_dir():
                self._client.log_artifacts(run_id, str(content.folder))
        except BaseException:
            # Half a record is not a finished run, whatever the arm did.
            status = "FAILED" if status == "FINISHED" else status
            raise
        finally:
            self._client.set_terminated(run_id, status)
        return True


def _absolute(uri: str) -> str:
    database = database_path(uri)
    return uri if database is None else f"{_SQLITE}{database}"


def _tags(tags: Mapping[str, str]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(k, v[:5000]) for k, v in tags.items()]


def _owner() -> dict[str, str]:
    values = (socket.gethostname(), _boot(), str(os.getpid()), str(process_start(os.getpid())))
    return dict(zip(_OWNER_TAGS, values, strict=True))


def _owner_gone(tags: Mapping[str, str]) -> bool:
    """Whether the process that owns a run of this host has ended. A pid that was given to another process counts as
    ended; a run without our tags is not ours to judge."""
    if not all(name in tags for name in _OWNER_TAGS):
        return False
    if tags["ebb.boot"] != _boot():
        return True
    pid = int(tags["ebb.pid"]) if tags["ebb.pid"].isdigit() else -1
    return str(process_start(pid)) != tags["ebb.pid_start"]


def _boot() -> str:
    """This boot and pid namespace: a pid means nothing outside them."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return "unknown"


@contextlib.contextmanager
def _file_lock(path: Path, patience_s: float) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {patience_s:g} s") from None
                time.sleep(0.05)
        yield
