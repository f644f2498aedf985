"""What every job of a command shares."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner.child.process_run import Launcher
from runner.child.signals import Stop
from runner.errors import UserError
from runner.judge.references import BaselineStore, ReferenceStore
from runner.plan.settings import PROJECT
from runner.record.tracking import Tracker, database_path, embedded_uri
from runner.screen.progress import Screen

_SCHEMES = ("sqlite:///", "postgresql", "mysql", "mssql", "http://", "https://", "databricks")


@dataclass
class Services:
    """``store`` is the folder of local results, references and the embedded database. ``no_reference`` holds why a
    reference could not be made, by identity, so that it is tried once a command. ``sweep_name`` and ``sweep_id``
    are the run that stands above those of a sweep; None outside one, and the id until it is created.
    ``children`` counts child processes started so far."""

    launcher: Launcher
    tracker: Tracker
    screen: Screen
    store: Path
    no_reference: dict[str, tuple[str, str]] = field(default_factory=dict)
    sweep_name: str | None = None
    sweep_id: str | None = None
    children: int = 0

    @property
    def stop(self) -> Stop:
        """Whether the user asked to stop."""
        return self.launcher.stop

    def begin(self, name: str, started: float, tags: Mapping[str, str], to_close: bool = False) -> str | None:
        """Create a run in the store, under the sweep's when there is one. ``to_close``: it has ended already, and is
        recorded even when the user has asked to stop."""
        stop = None if to_close else self.stop
        if self.sweep_name is not None and self.sweep_id is None:
            self.sweep_id = self.tracker.begin(self.sweep_name, started, {"ebb.sweep": "true"}, stop)
        above = {"mlflow.parentRunId": self.sweep_id} if self.sweep_id is not None else {}
        return self.tracker.begin(name, started, {**provenance(), **tags, **above}, stop)

    @property
    def references(self) -> ReferenceStore:
        """References under the store."""
        return ReferenceStore(self.store)

    @property
    def baselines(self) -> BaselineStore:
        """Baselines under the store."""
        return BaselineStore(self.store)


def check_writable(store: Path, uri: str | None) -> None:
    """Find out before anything runs that results could not be kept.

    Raises
    ------
    UserError
        The store's folder, or the database in it (or at a sqlite ``uri``), cannot be written, or ``uri`` is of a kind
        that MLflow refuses (a folder).
    """
    if bad := [mark for mark in "%?#" if mark in str(store)]:
        line = f"the store {store} cannot be used: {bad[0]} has a meaning of its own in a database's address"
        raise UserError(line, "choose another folder with paths.store=FOLDER")
    places = [store, store / "results"]
    if uri is not None and not uri.startswith(_SCHEMES):
        line = f"tracking.uri={uri}: this is no store that MLflow still writes to"
        raise UserError(line, "write a database or a server, such as sqlite:////folder/mlflow.db or http://host:5000")
    database = database_path(uri if uri is not None else embedded_uri(store))
    files = [database] if database is not None else []
    places += [file.parent for file in files]
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            line = f"the store {place} cannot be written: {error.strerror}"
            raise UserError(line, "choose another folder with paths.store=FOLDER") from error
    for file in files:
        if file.exists() and not os.access(file, os.W_OK):
            line = f"the store {file} cannot be written: it is read-only"
            raise UserError(line, "choose another folder with paths.store=FOLDER")


@functools.cache
def provenance() -> dict[str, str]:
    """Where the code comes from, as tags: the command, and git's commit when there is one."""
    tags = {"mlflow.source.name": " ".join(sys.orig_argv)[:500], "mlflow.source.type": "LOCAL"}
    commit = _git("rev-parse", "HEAD")
    if commit:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        tags |= {"mlflow.source.git.commit": commit, "git.changed": str(bool(changed)).lower()}
    return tags


def _git(*arguments: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True, timeout=5)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""
